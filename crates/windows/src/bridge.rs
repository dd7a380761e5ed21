//! The node's own endpoint on an L2Bridge network. It is the gateway of the pods, and connects the node to them
//! (`pkg/backend/hostgw/hostgw_windows.go` of flannel; `cni-plugin/pkg/dataplane/windows` of Calico).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use tortie_hcn::schema::{
    Endpoint, IpConfig, Modify, Network, NetworkMode, Query, RequestType, SchemaVersion,
};
use tortie_hcn::{Class, Guid, Hcn, HcnExt, Kind};
use tracing::{info, warn};

use crate::host::Host;
use crate::network_spec::ipv6_subnet;
use crate::{Error, NETWORK};

/// The name of the endpoint, as in Calico.
fn name() -> String {
    format!("{NETWORK}_ep")
}

/// The third address of a block. IPAM gives it to no pod.
pub(crate) fn node_address(block: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(block.network()).saturating_add(2))
}

/// The same address of an IPv6 block.
pub(crate) fn node_address_v6(block: Ipv6Net) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(block.network()).saturating_add(2))
}

/// The GUID namespace of its identifiers. It must never change, because the endpoint is found by it.
const SPACE: Guid = Guid::from_bytes(*b"tortie-node-end\0");

/// Its identifier, which is derived from the network's.
fn id(network: Guid) -> Guid {
    Guid::derived(SPACE, &network.to_string())
}

/// The node's own endpoint: by its identifier, or by its name if Calico or an earlier agent created it. A network may have an endpoint
/// for each backend of the cluster, and listing them takes long.
fn find(hcn: &(impl Hcn + ?Sized), network: &Network) -> Result<Vec<Endpoint>, Error> {
    let is_own = |endpoint: &Endpoint| endpoint.host_compute_network == network.id && is_of_node(endpoint);
    let read = |id| match hcn.endpoint(id) {
        Ok(endpoint) => Ok(Some(endpoint).filter(is_own)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(Error::from(error)),
    };
    if let Some(endpoint) = read(id(network.id))? {
        return Ok(vec![endpoint]);
    }
    let named = hcn.enumerate(Kind::Endpoint, &Query::filter("Name", &name()))?;
    named.into_iter().filter_map(|id| read(id).transpose()).collect()
}

/// Whether an endpoint of the network is the node's own: the agent makes it, and removes it with the network.
#[must_use]
pub fn is_of_node(endpoint: &Endpoint) -> bool {
    endpoint.name.eq_ignore_ascii_case(&name())
}

/// Ensures that the endpoint exists, with an address of each subnet, and is attached to the node's compartment. One without them is
/// recreated. If HNS does not give it an IPv6 address, that is recorded in `host`.
pub(crate) fn ensure_node_endpoint(
    hcn: &(impl Hcn + ?Sized),
    host: &Host,
    network: &Network,
    block: Ipv4Net,
) -> Result<(), Error> {
    let ipv6 = ipv6_subnet(network);
    let wanted = configurations(block, ipv6.filter(|_| host.ipv6_refused().is_none()));
    let mut known: Option<Endpoint> = None;
    for endpoint in find(hcn, network)? {
        if has_all(&endpoint, &wanted) && known.is_none() {
            known = Some(endpoint);
        } else {
            warn!(endpoint = %endpoint.id, "the node's own endpoint differs; recreating it");
            remove(hcn, &endpoint)?;
        }
    }
    let endpoint = match known {
        Some(endpoint) => endpoint,
        None if wanted.len() == 1 => hcn.endpoint(hcn.create_endpoint(&document(network, wanted))?)?,
        None => create_with_ipv6(hcn, host, network, wanted)?,
    };
    if endpoint.host_compute_namespace.is_zero() {
        hcn.attach_to_host(endpoint.id)?;
        let addresses: Vec<IpAddr> = of(&endpoint.ip_configurations).collect();
        info!(?addresses, "the node is connected to its pods");
    }
    Ok(())
}

/// The node's IPv6 address in the network, if the network has IPv6. Its endpoint may lack it.
pub(crate) fn end_v6(network: &Network) -> Option<Ipv6Addr> {
    ipv6_subnet(network).filter(|_| network.r#type == NetworkMode::L2Bridge).map(node_address_v6)
}

fn has_all(endpoint: &Endpoint, wanted: &[IpConfig]) -> bool {
    of(wanted).all(|address| of(&endpoint.ip_configurations).any(|found| found == address))
}

/// Creates the endpoint with addresses of both families. If HNS refuses that of IPv6 only, or ignores it, that is recorded.
fn create_with_ipv6(
    hcn: &(impl Hcn + ?Sized),
    host: &Host,
    network: &Network,
    wanted: Vec<IpConfig>,
) -> Result<Endpoint, Error> {
    let why = match hcn.create_endpoint(&document(network, wanted.clone())) {
        Ok(id) => {
            let endpoint = hcn.endpoint(id)?;
            if has_all(&endpoint, &wanted) {
                return Ok(endpoint);
            }
            hcn.delete_endpoint(id)?;
            "HNS gives the node's own endpoint no IPv6 address".to_owned()
        }
        Err(error) if !may_be_for_ipv6(&error) => return Err(error.into()),
        Err(error) => format!("HNS refuses the node's own endpoint with an IPv6 address: {error}"),
    };
    let ipv4 = wanted.into_iter().filter(|config| config.ip_address.parse::<Ipv4Addr>().is_ok()).collect();
    let id = hcn.create_endpoint(&document(network, ipv4))?;
    host.refuse_ipv6(why);
    Ok(hcn.endpoint(id)?)
}

/// Whether HNS may have refused a document because of its IPv6 addresses. Without them, too, it would refuse one that exists already,
/// or one for whose switch it is not ready.
pub(crate) fn may_be_for_ipv6(error: &tortie_hcn::Error) -> bool {
    match error.class() {
        Class::Unavailable | Class::AlreadyExists => false,
        Class::NotFound | Class::Other => !error.is_not_ready(),
    }
}

/// Whether the node is connected to its pods by IPv6.
pub(crate) fn has_ipv6(hcn: &(impl Hcn + ?Sized), network: &Network) -> Result<bool, Error> {
    let Some(end) = end_v6(network) else { return Ok(false) };
    Ok(find(hcn, network)?
        .iter()
        .any(|own| of(&own.ip_configurations).any(|address| address == IpAddr::V6(end))))
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

fn document(network: &Network, ip_configurations: Vec<IpConfig>) -> Endpoint {
    let mut endpoint = Endpoint {
        id: id(network.id),
        name: name(),
        host_compute_network: network.id,
        ip_configurations,
        ..Default::default()
    };
    endpoint.base.schema_version = Some(SchemaVersion::V2);
    endpoint
}

/// The node's addresses in its blocks.
fn configurations(block: Ipv4Net, ipv6: Option<Ipv6Net>) -> Vec<IpConfig> {
    let config = |address: IpAddr, prefix_length| IpConfig {
        ip_address: address.to_string(),
        prefix_length,
        ..Default::default()
    };
    let ipv4 = config(node_address(block).into(), block.prefix_len());
    let ipv6 = ipv6.map(|block| config(node_address_v6(block).into(), block.prefix_len()));
    std::iter::once(ipv4).chain(ipv6).collect()
}

fn of(configurations: &[IpConfig]) -> impl Iterator<Item = IpAddr> {
    configurations.iter().filter_map(|config| config.ip_address.parse().ok())
}
