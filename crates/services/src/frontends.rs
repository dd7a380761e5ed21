//! The frontends of a Service, and the pools that they use.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use crate::node::OwnNode;
use crate::pools::UsedPools;
use crate::service::{Family, Port, Translated};
use crate::state::{Frontend, FrontendAddress, FrontendKey, FrontendKind, ServicePortId, TrafficPolicy};

/// The frontends of a port of a Service of one family.
pub(crate) fn of_port(
    service: &Translated,
    addresses: &Family,
    port: &Port,
    id: &Arc<ServicePortId>,
    node: &OwnNode,
) -> Vec<(FrontendKey, Frontend)> {
    let at = |address, number| FrontendKey { address, protocol: port.protocol, port: number };
    let frontend = |kind, policy| Frontend { service_port: id.clone(), kind, policy, source_ranges: None };
    let own = at(FrontendAddress::Address(addresses.cluster_ip), port.number);
    let mut frontends = vec![(own, frontend(FrontendKind::ClusterIp, service.internal))];
    let load_balancer = Frontend {
        source_ranges: source_ranges(addresses, node),
        ..frontend(FrontendKind::LoadBalancer, service.external)
    };
    let external = frontend(FrontendKind::ExternalIp, service.external);
    for (all, frontend) in
        [(&addresses.load_balancer_ips, load_balancer), (&addresses.external_ips, external)]
    {
        let keys = all.iter().map(|address| at(FrontendAddress::Address(*address), port.number));
        frontends.extend(keys.map(|key| (key, frontend.clone())));
    }
    if let Some(number) = port.node_port {
        let key = at(FrontendAddress::NodePort(addresses.family), number);
        frontends.push((key, frontend(FrontendKind::NodePort, service.external)));
    }
    frontends
}

/// The pools that those frontends use.
pub(crate) fn used_pools(service: &Translated, addresses: &Family, port: &Port) -> UsedPools {
    let is_external = port.node_port.is_some()
        || !addresses.external_ips.is_empty()
        || !addresses.load_balancer_ips.is_empty();
    UsedPools {
        cluster: is_external || service.internal == TrafficPolicy::Cluster,
        local: is_external && service.external == TrafficPolicy::Local
            || service.internal == TrafficPolicy::Local,
    }
}

/// If the node may use the load balancer, its packets may have the balancer's address as their source, where that address is on one of
/// its interfaces.
fn source_ranges(addresses: &Family, node: &OwnNode) -> Option<Vec<IpNet>> {
    let mut ranges = addresses.source_ranges.clone()?;
    let node = node.primary(addresses.family);
    if node.is_some_and(|node| ranges.iter().any(|range| range.contains(&node))) {
        ranges.extend(addresses.load_balancer_ips.iter().map(|address: &IpAddr| IpNet::from(*address)));
    }
    ranges.sort();
    ranges.dedup();
    Some(ranges)
}
