//! The node's own endpoint on an L2Bridge network. It is the gateway of the pods, and connects the node to them
//! (`pkg/backend/hostgw/hostgw_windows.go` of flannel; `cni-plugin/pkg/dataplane/windows` of Calico).

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use tortie_hcn::schema::{Endpoint, IpConfig, Modify, Network, RequestType, SchemaVersion};
use tortie_hcn::{Class, Hcn, HcnExt};
use tracing::{info, warn};

use crate::{Error, NETWORK};

/// The name of the endpoint, as in Calico.
fn name() -> String {
    format!("{NETWORK}_ep")
}

/// The third address of a block. IPAM gives it to no pod.
pub(crate) fn node_address(block: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(block.network()).saturating_add(2))
}

/// Whether an endpoint of the network is the node's own: the agent makes it, and removes it with the network.
#[must_use]
pub fn is_of_node(endpoint: &Endpoint) -> bool {
    endpoint.name.eq_ignore_ascii_case(&name())
}

/// Ensures that the endpoint exists and is attached to the node's compartment. One with another address is recreated.
pub(crate) fn ensure_node_endpoint(
    hcn: &(impl Hcn + ?Sized),
    network: &Network,
    block: Ipv4Net,
) -> Result<(), Error> {
    let address = node_address(block);
    let has_address = |endpoint: &Endpoint| {
        endpoint.ip_configurations.iter().any(|config| config.ip_address.parse() == Ok(address))
    };
    let mut known: Option<Endpoint> = None;
    for endpoint in hcn.endpoints_of_network(network.id)?.into_iter().filter(is_of_node) {
        if has_address(&endpoint) && known.is_none() {
            known = Some(endpoint);
        } else {
            warn!(endpoint = %endpoint.id, "the node's own endpoint differs; recreating it");
            remove(hcn, &endpoint)?;
        }
    }
    if known.as_ref().is_some_and(|endpoint| !endpoint.host_compute_namespace.is_zero()) {
        return Ok(());
    }
    let id = match known {
        Some(endpoint) => endpoint.id,
        None => hcn.create_endpoint(&document(network, block))?,
    };
    hcn.attach_to_host(id)?;
    info!(%address, "the node is connected to its pods");
    Ok(())
}

/// Removes the endpoint, before its network is deleted.
pub(crate) fn remove(hcn: &(impl Hcn + ?Sized), endpoint: &Endpoint) -> Result<(), Error> {
    if !endpoint.host_compute_namespace.is_zero() {
        let detach = Modify::namespace_endpoint(RequestType::Remove, endpoint.id);
        match hcn.modify_namespace(endpoint.host_compute_namespace, &detach) {
            Err(error) if error.class() != Class::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    Ok(hcn.delete_endpoint(endpoint.id)?)
}

fn document(network: &Network, block: Ipv4Net) -> Endpoint {
    let ip = IpConfig {
        ip_address: node_address(block).to_string(),
        prefix_length: block.prefix_len(),
        ..Default::default()
    };
    let mut endpoint = Endpoint {
        name: name(),
        host_compute_network: network.id,
        ip_configurations: vec![ip],
        ..Default::default()
    };
    endpoint.base.schema_version = Some(SchemaVersion::V2);
    endpoint
}
