//! The CNI plugins that connect the pods of emulated nodes.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use anyhow::{Context, Result};
use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use tempfile::TempDir;
use tortie_dataplane::{PodAddress, PodAttachment, PodWiring as _};
use tortie_hcn::schema::{Endpoint, Modify, Namespace, RequestType, lenient};
use tortie_hcn::{Guid, Hcn, HcnExt};
use tortie_windows::{WindowsWiring, endpoint_id};

use super::Location;

/// The name of the other plugin's network.
const OTHER_NETWORK: &str = "azure";

/// A plugin on a node.
pub(super) enum Plugin {
    /// Tortie.
    Tortie {
        /// Connects the pods.
        wiring: WindowsWiring,
        /// The addresses of its network.
        block: Ipv4Net,
        /// Those of IPv6, if it has any.
        ipv6: Option<Ipv6Net>,
    },
    /// Another one. Its network is of type L2Bridge and has both families.
    Other {
        /// Its network.
        network: Guid,
        /// Where the container runtime keeps its results.
        results: TempDir,
    },
}

impl Plugin {
    /// The other plugin, its network, and the folder with its results.
    pub(super) fn other(hcn: &dyn Hcn) -> Result<(Self, Guid, PathBuf)> {
        let subnet = |net: &str, gateway: &str, all: &str| json!({"IpAddressPrefix": net, "Routes": [{"NextHop": gateway, "DestinationPrefix": all}]});
        let subnets =
            [subnet("0.0.0.0/0", "0.0.0.1", "0.0.0.0/0"), subnet("fd00::/64", "fd00::ffff", "::/0")];
        let document = json!({"Name": OTHER_NETWORK, "Type": "L2Bridge", "Ipams": [{"Type": "Static", "Subnets": subnets}]});
        let network = hcn.create_network(&lenient(&document.to_string())?)?;
        let results = tempfile::tempdir()?;
        let folder = results.path().to_owned();
        Ok((Self::Other { network, results }, network, folder))
    }

    pub(super) fn has_ipv6(&self) -> bool {
        match self {
            Self::Tortie { ipv6, .. } => ipv6.is_some(),
            Self::Other { .. } => true,
        }
    }

    pub(super) fn connect(&self, hcn: &dyn Hcn, pod: &Location, addresses: &[IpAddr]) -> Result<()> {
        let compartment = hcn.create_namespace(&Namespace::default())?;
        match self {
            Self::Tortie { wiring, block, ipv6 } => {
                let ipv4 = PodAddress::ipv4(ipv4_of(addresses), *block);
                let six = addresses.iter().find(|address| address.is_ipv6());
                let six = ipv6
                    .zip(six)
                    .map(|(block, address)| PodAddress { address: *address, block: block.into() });
                let attachment = PodAttachment {
                    endpoint: pod.endpoint.clone(),
                    container_id: pod.container_id.clone(),
                    netns: compartment.to_string(),
                    addresses: std::iter::once(ipv4).chain(six).collect(),
                    mtu: None,
                    mac: None,
                    limits: Default::default(),
                    dns: Default::default(),
                };
                wiring.connect(&attachment)?;
            }
            Self::Other { network, results } => {
                let configurations: Vec<Value> =
                    addresses.iter().map(|address| json!({"IpAddress": address})).collect();
                let document = json!({
                    "ID": endpoint_id(&pod.container_id), "Name": format!("{}_{OTHER_NETWORK}", pod.container_id),
                    "HostComputeNetwork": network, "IpConfigurations": configurations,
                });
                let endpoint: Endpoint = lenient(&document.to_string())?;
                let endpoint = hcn.create_endpoint(&endpoint)?;
                hcn.modify_namespace(compartment, &Modify::namespace_endpoint(RequestType::Add, endpoint))?;
                fs::write(results.path().join(&pod.container_id), result(pod, addresses).to_string())?;
            }
        }
        Ok(())
    }

    pub(super) fn disconnect(&self, hcn: &dyn Hcn, pod: &Location) -> Result<()> {
        match self {
            Self::Tortie { wiring, .. } => wiring.disconnect(&pod.endpoint, &pod.container_id)?,
            Self::Other { results, .. } => {
                hcn.delete_endpoint(endpoint_id(&pod.container_id))?;
                fs::remove_file(results.path().join(&pod.container_id)).context("the runtime's result")?;
            }
        }
        Ok(())
    }
}

/// What the container runtime keeps of the other plugin's answer.
fn result(pod: &Location, addresses: &[IpAddr]) -> Value {
    let ips: Vec<Value> = addresses.iter().map(|address| json!({"address": address.to_string()})).collect();
    json!({
        "kind": "cniCacheV1", "containerId": pod.container_id, "ifName": &*pod.endpoint.interface,
        "cniArgs": [["K8S_POD_NAMESPACE", &*pod.endpoint.namespace], ["K8S_POD_NAME", &*pod.endpoint.pod]],
        "result": {"ips": ips},
    })
}

/// The first IPv4 address. A pod without one gets an address in HNS that the cluster does not know.
fn ipv4_of(addresses: &[IpAddr]) -> Ipv4Addr {
    let first = addresses.iter().find_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    });
    first.unwrap_or_else(|| match addresses.first() {
        Some(IpAddr::V6(address)) => {
            let [.., a, b] = address.octets();
            Ipv4Addr::new(100, 64, a, b)
        }
        _ => Ipv4Addr::UNSPECIFIED,
    })
}
