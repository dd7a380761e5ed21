//! Routes to other nodes: RemoteSubnetRoute policies of the overlay network (as in
//! `felix/dataplane/windows/vxlan_mgr.go`).

use std::collections::BTreeMap;

use ipnet::{IpNet, Ipv4Net};
use tortie_dataplane::{Condition, MacAddress, NodeState, Reason, RouteTarget};
use tortie_hcn::schema::{Modify, Network, Policy, RemoteSubnetRoute, RequestType};
use tortie_hcn::{Class, Guid, Hcn, HcnExt};
use tracing::{debug, info};

use crate::Error;
use crate::network_spec::vni;

/// A route to another node, in a form that can be compared.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NextHop {
    vni: u32,
    provider: String,
    /// `None` if HNS has an invalid MAC address.
    mac: Option<MacAddress>,
}

/// Makes the network's routes match the state. Removals come first, because HNS has one route for a prefix. Returns
/// the conditions of refused routes; the others are in force. Prefixes for which `is_left_out` holds get no route.
pub(crate) fn sync(
    hcn: &(impl Hcn + ?Sized),
    network: Guid,
    state: &NodeState,
    is_left_out: impl Fn(&IpNet) -> bool,
) -> Result<Vec<Condition>, Error> {
    let unsuitable = unsuitable(state);
    let found = hcn.network(network)?;
    // HNS knows the network by this VNI. A network that is kept for its pods may have another one than the node should have.
    let mut desired = desired(state, vni(&found));
    desired.retain(|prefix, _| !is_left_out(&IpNet::V4(*prefix)));
    let mut missing = desired.clone();
    let mut surplus = Vec::new();
    for policy in actual(&found) {
        match policy.settings::<RemoteSubnetRoute>().ok().flatten().and_then(next_hop) {
            Some((prefix, hop)) if missing.get(&prefix) == Some(&hop) => drop(missing.remove(&prefix)),
            _ => surplus.push(policy),
        }
    }
    if missing.is_empty() && surplus.is_empty() {
        return Ok(unsuitable);
    }
    info!(add = missing.len(), remove = surplus.len(), "changing the routes to other nodes");
    let additions = missing.iter().map(|(prefix, hop)| Policy::of(&document(*prefix, hop))).collect();
    let mut refused = send(hcn, network, &RequestType::Remove, surplus)?;
    refused.extend(send(hcn, network, &RequestType::Add, additions)?);
    let read_back = actual(&hcn.network(network)?);
    let there: BTreeMap<Ipv4Net, NextHop> =
        read_back.iter().filter_map(|policy| policy.settings().ok().flatten().and_then(next_hop)).collect();
    if there == desired && there.len() == read_back.len() {
        return Ok(unsuitable);
    }
    refused.extend(unsuitable);
    if !refused.is_empty() {
        return Ok(refused);
    }
    Err(Error::NotTaken { object: format!("network {network}"), what: "RemoteSubnetRoute policies" })
}

/// Sends routes all at once, or one by one if HNS refuses that, so that one bad route does not prevent the others.
fn send(
    hcn: &(impl Hcn + ?Sized),
    network: Guid,
    request: &RequestType,
    policies: Vec<Policy>,
) -> Result<Vec<Condition>, Error> {
    let send = |policies| match hcn.modify_network(network, &Modify::policies(request.clone(), policies)) {
        Ok(()) => Ok(None),
        // The network is gone, or nothing is known.
        Err(error) if matches!(error.class(), Class::NotFound | Class::Unavailable) => Err(error),
        Err(error) => Ok(Some(error)),
    };
    if policies.is_empty() || send(policies.clone())?.is_none() {
        return Ok(vec![]);
    }
    let mut refused = Vec::new();
    for policy in policies {
        if let Some(error) = send(vec![policy.clone()])? {
            let message = format!("{request} of the route {}: {error}", policy.settings);
            refused.push(Condition::new(Reason::RouteRefused, message));
        }
    }
    Ok(refused)
}

fn actual(network: &Network) -> Vec<Policy> {
    network.policies.iter().filter(|policy| policy.is::<RemoteSubnetRoute>()).cloned().collect()
}

fn desired(state: &NodeState, vni: u32) -> BTreeMap<Ipv4Net, NextHop> {
    let routes = state.routes.iter().filter_map(|(prefix, target)| {
        let IpNet::V4(prefix) = prefix else { return None };
        let other = match target {
            RouteTarget::Vxlan { node } => node,
            RouteTarget::Direct { .. } | RouteTarget::Ipip { .. } | RouteTarget::Local => return None,
        };
        let Some(vtep) = state.vtep(other, &prefix.addr().into()) else {
            debug!(%prefix, node = other, "no route yet: the node's end of the tunnel is not known");
            return None;
        };
        let hop = NextHop { vni, provider: vtep.parent.to_string(), mac: Some(vtep.mac) };
        Some((*prefix, hop))
    });
    routes.collect()
}

/// The conditions of routes without encapsulation, which the overlay network cannot have.
fn unsuitable(state: &NodeState) -> Vec<Condition> {
    let direct = state.routes.iter().filter(|(_, target)| matches!(target, RouteTarget::Direct { .. }));
    let condition = |(prefix, _): (&IpNet, _)| {
        let message = format!(
            "no route leads to {prefix}: its pool is CrossSubnet, and a Windows node uses VXLAN in any case; give the Node the \
             label kubernetes.io/os: windows"
        );
        Condition::new(Reason::RouteRefused, message)
    };
    direct.map(condition).chain(ipip(state)).collect()
}

/// The conditions of routes by IPIP, which Windows does not have.
pub(crate) fn ipip(state: &NodeState) -> impl Iterator<Item = Condition> {
    let by_ipip = state.routes.iter().filter(|(_, target)| matches!(target, RouteTarget::Ipip { .. }));
    by_ipip.map(|(prefix, _)| {
        let message = format!(
            "no route leads to {prefix}: its pool has IPIP, and Windows nodes have none; move its pods to a pool with vxlanMode: Always \
             (tortie pool migrate)"
        );
        Condition::new(Reason::RouteRefused, message)
    })
}

fn next_hop(route: RemoteSubnetRoute) -> Option<(Ipv4Net, NextHop)> {
    let mac = route.distributed_router_mac_address.parse().ok();
    let hop = NextHop { vni: route.isolation_id, provider: route.provider_address, mac };
    Some((route.destination_prefix.parse().ok()?, hop))
}

fn document(prefix: Ipv4Net, hop: &NextHop) -> RemoteSubnetRoute {
    RemoteSubnetRoute {
        destination_prefix: prefix.to_string(),
        isolation_id: hop.vni,
        provider_address: hop.provider.clone(),
        distributed_router_mac_address: hop.mac.map(MacAddress::dashed).unwrap_or_default(),
        ..Default::default()
    }
}
