//! The options of an agent that serves Services.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::bail;
use ipnet::IpNet;
use tortie_agent::{NodePortAddresses, ServiceProxy};
use tortie_store::Endpoints;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

use crate::store::StoreArguments;

#[derive(clap::Args)]
pub(crate) struct ServiceProxyArguments {
    /// Serve the Services of the cluster on this Linux node, in the place of kube-proxy. While kube-proxy runs on the node, or its rules are
    /// there, the agent leaves Services to it, and reports that
    #[arg(long, env = "TORTIE_SERVICES")]
    services: bool,
    /// Where Services and their endpoints are read: datastore, kubernetes (the API that kubectl would use, or that this pod runs in), or
    /// kubernetes:KUBECONFIG. By default, the datastore; with etcd, which has only copies of Services, kubernetes
    #[arg(long, env = "TORTIE_SERVICES_SOURCE", value_name = "SOURCE", requires = "services")]
    services_source: Option<ServicesSource>,
    /// The addresses of the node that accept NodePorts: primary (the first address of each family that its Node has), or networks
    #[arg(
        long,
        env = "TORTIE_NODE_PORT_ADDRESSES",
        value_name = "primary|CIDR,…",
        value_parser = node_port_addresses,
        requires = "services",
        default_value = "primary"
    )]
    node_port_addresses: NodePortAddresses,
}

/// Where Services are read.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ServicesSource {
    Datastore,
    Kubernetes(Option<PathBuf>),
}

impl FromStr for ServicesSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "datastore" => Ok(Self::Datastore),
            None if text == "kubernetes" => Ok(Self::Kubernetes(None)),
            Some(("kubernetes", file)) if !file.is_empty() => Ok(Self::Kubernetes(Some(file.into()))),
            _ => Err("write datastore, kubernetes or kubernetes:KUBECONFIG".to_owned()),
        }
    }
}

fn node_port_addresses(text: &str) -> Result<NodePortAddresses, String> {
    if text == "primary" {
        return Ok(NodePortAddresses::Primary);
    }
    let network = |part: &str| {
        let network = part.trim().parse::<IpNet>();
        network.map_err(|_| {
            format!("{part:?} is no network; write primary, or networks such as 192.0.2.0/24,2001:db8::/64")
        })
    };
    text.split(',').map(network).collect::<Result<_, _>>().map(NodePortAddresses::In)
}

impl ServiceProxyArguments {
    /// The source of Services, if they are to be served.
    pub(crate) async fn open(
        &self,
        arguments: &StoreArguments,
        store: &Arc<dyn Endpoints>,
    ) -> anyhow::Result<Option<ServiceProxy>> {
        if !self.services {
            return Ok(None);
        }
        let by_default = match arguments.is_etcd() {
            true => ServicesSource::Kubernetes(None),
            false => ServicesSource::Datastore,
        };
        let source = self.services_source.clone().unwrap_or(by_default);
        let store: Arc<dyn Endpoints> = match source {
            ServicesSource::Datastore => store.clone(),
            ServicesSource::Kubernetes(_) if !arguments.is_etcd() => bail!(
                "--services-source kubernetes is for an agent with --store etcd:…; the datastore of this one has the Services itself: remove it"
            ),
            ServicesSource::Kubernetes(file) => Arc::new(Kubernetes::new(&config(file.as_deref())).await?),
        };
        let api_server = store.api_server().and_then(host_address);
        Ok(Some(ServiceProxy { store, node_ports: self.node_port_addresses.clone(), api_server }))
    }
}

fn config(file: Option<&Path>) -> KubernetesConfig {
    file.map_or(KubernetesConfig::Inferred, |file| KubernetesConfig::Kubeconfig(file.to_owned()))
}

/// The address in a URL; none for a name, which is found by the node's own means, not by a Service.
fn host_address(url: &str) -> Option<IpAddr> {
    let authority = url.split_once("://")?.1.split('/').next()?;
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.0,
        None => authority.split(':').next()?,
    };
    host.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_an_api_server_is_found_in_its_url() {
        for (url, address) in [
            ("https://10.96.0.1:443/", Some("10.96.0.1")),
            ("https://10.96.0.1", Some("10.96.0.1")),
            ("https://[fd96::1]:6443", Some("fd96::1")),
            ("https://api.example:6443", None),
            ("", None),
        ] {
            assert_eq!(host_address(url), address.map(|address| address.parse().unwrap()), "{url}");
        }
    }

    #[test]
    fn sources_and_addresses_are_read() {
        assert_eq!("datastore".parse(), Ok(ServicesSource::Datastore));
        assert_eq!("kubernetes".parse(), Ok(ServicesSource::Kubernetes(None)));
        assert_eq!("kubernetes:/k:1".parse(), Ok(ServicesSource::Kubernetes(Some("/k:1".into()))));
        for wrong in ["", "kubernetes:", "etcd", "datastore:x"] {
            assert!(wrong.parse::<ServicesSource>().is_err(), "{wrong}");
        }
        assert_eq!(node_port_addresses("primary"), Ok(NodePortAddresses::Primary));
        let networks = ["192.0.2.0/24", "2001:db8::/64"].map(|net| net.parse().unwrap()).to_vec();
        assert_eq!(node_port_addresses("192.0.2.0/24, 2001:db8::/64"), Ok(NodePortAddresses::In(networks)));
        for wrong in ["", "192.0.2.1", "primary,192.0.2.0/24", "all"] {
            assert!(node_port_addresses(wrong).is_err(), "{wrong}");
        }
    }
}
