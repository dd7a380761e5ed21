//! Routes of the node itself to the pods of other nodes, for packets without encapsulation (as in
//! `pkg/backend/hostgw/hostgw_windows.go` of flannel).
//!
//! Windows does not keep who made a route. So the agent's routes have metrics of their own, by which they are found again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_dataplane::{Condition, NodeState, Reason, RouteTarget};
use tortie_hcn::{Adapter, IpHelper, IpHelperError, IpRoute};
use tracing::info;

use crate::adapter::usable;

/// The metric of routes to nodes in the same network.
pub(crate) const DIRECT: u32 = 8_501;
/// The metric of routes that BGP has learned.
pub(crate) const LEARNED: u32 = 8_502;

/// Whether the agent makes routes with this metric.
pub(crate) fn is_of_agent(metric: u32) -> bool {
    [DIRECT, LEARNED].contains(&metric)
}

/// Where the packets of a route go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RouterHop {
    /// The router's address.
    pub(crate) router: IpAddr,
    /// The number of the adapter on whose link the router is. Without it, the networks of the adapters tell; an address of the link
    /// (fe80::/10) needs it, because each link has such addresses.
    pub(crate) interface: Option<u32>,
}

impl From<IpAddr> for RouterHop {
    fn from(router: IpAddr) -> RouterHop {
        RouterHop { router, interface: None }
    }
}

/// Destinations with their next hops, which are never empty.
pub(crate) type DesiredRoutes = BTreeMap<IpNet, BTreeSet<RouterHop>>;

/// What happens to routes with the metric that are not desired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Surplus {
    /// They go.
    Goes,
    /// Those to desired destinations go. The others stay, because what is desired is not completely known.
    OfOtherDestinationsStays,
}

/// What makes the routes of a machine as desired.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    add: Vec<IpRoute>,
    remove: Vec<IpRoute>,
    /// Why desired routes are not in force.
    problems: Vec<String>,
}

/// Makes the routes with a metric equal the desired ones. Returns why some are not in force.
///
/// # Errors
/// The machine does not tell its adapters or routes. Nothing has changed then.
pub(crate) fn sync(
    ip: &dyn IpHelper,
    metric: u32,
    desired: &DesiredRoutes,
    surplus: Surplus,
) -> Result<Vec<String>, IpHelperError> {
    let Changes { add, mut remove, mut problems } = changes(desired, metric, &ip.adapters()?, &ip.routes()?);
    remove.retain(|route| surplus == Surplus::Goes || desired.contains_key(&route.destination));
    // Additions come first: a changed next hop leaves no gap.
    for route in add {
        match ip.add_route(&route) {
            Ok(()) => {
                info!(destination = %route.destination, via = %route.next_hop, "added a route to pods of another node")
            }
            Err(error) => {
                problems.push(format!("the route to {} by {}: {error}", route.destination, route.next_hop));
            }
        }
    }
    for route in remove {
        match ip.delete_route(&route) {
            Ok(()) => {
                info!(destination = %route.destination, via = %route.next_hop, "removed a route to pods of another node");
            }
            Err(error) => problems.push(format!("the outdated route to {}: {error}", route.destination)),
        }
    }
    Ok(problems)
}

/// Removes all routes with a metric. Returns how many there were.
///
/// # Errors
/// The machine does not answer, or refuses it.
pub(crate) fn remove_all(ip: &dyn IpHelper, metric: u32) -> Result<usize, IpHelperError> {
    let routes: Vec<IpRoute> = ip.routes()?.into_iter().filter(|route| route.metric == metric).collect();
    routes.iter().try_for_each(|route| ip.delete_route(route))?;
    Ok(routes.len())
}

/// Removes all routes that the agent has made, also an earlier process. Returns how many there were.
///
/// # Errors
/// The machine does not answer, or refuses it.
pub fn remove_node_routes(ip: &dyn IpHelper) -> Result<usize, IpHelperError> {
    Ok(remove_all(ip, DIRECT)? + remove_all(ip, LEARNED)?)
}

fn changes(desired: &DesiredRoutes, metric: u32, adapters: &[Adapter], routes: &[IpRoute]) -> Changes {
    let mut changes = Changes::default();
    let mut kept: Vec<&IpRoute> = Vec::new();
    for (destination, hop) in desired.iter().flat_map(|(net, hops)| hops.iter().map(move |hop| (net, hop))) {
        let router = &hop.router;
        let Some(interface) = interface_to(*hop, adapters, routes) else {
            changes
                .problems
                .push(format!("no adapter is in the network of {router}, the next hop to {destination}"));
            continue;
        };
        let route =
            IpRoute { interface, destination: *destination, next_hop: *router, metric, is_own: false };
        let place = (route.interface, route.destination, route.next_hop);
        let same_place = |it: &&IpRoute| (it.interface, it.destination, it.next_hop) == place;
        match routes.iter().find(same_place) {
            // Windows has one route for these three. That of somebody else leads there, too.
            Some(known) => kept.push(known),
            None => changes.add.push(route),
        }
        let precedes = |it: &&IpRoute| it.destination == *destination && it.metric < metric;
        let other = routes.iter().find(|it| precedes(it) && !is_of_agent(it.metric) && !same_place(it));
        changes.problems.extend(other.map(|other| {
            format!(
                "another program's route to {destination} by {} has precedence over that by {router}: delete it",
                other.next_hop
            )
        }));
    }
    let is_outdated = |route: &&IpRoute| route.metric == metric && !kept.contains(route);
    changes.remove = routes.iter().filter(is_outdated).cloned().collect();
    changes
}

/// The adapter on whose link the router is: by the network of an address, or by a route.
fn interface_to(hop: RouterHop, adapters: &[Adapter], routes: &[IpRoute]) -> Option<u32> {
    let RouterHop { router, interface } = hop;
    let is_up = |index: u32| adapters.iter().any(|adapter| adapter.is_up && adapter.index == index);
    if interface.is_some() || is_of_link(router) {
        return interface.filter(|index| is_up(*index));
    }
    let is_near = |adapter: &&Adapter| adapter.is_up && networks(adapter).any(|own| own.contains(&router));
    let by_network = adapters.iter().find(is_near).map(|adapter| adapter.index);
    let on_link = |route: &&IpRoute| {
        route.next_hop.is_unspecified() && route.destination.prefix_len() > 0 && !is_of_agent(route.metric)
    };
    let by_route = routes.iter().filter(on_link).filter(|it| it.destination.contains(&router));
    by_network.or_else(|| by_route.map(|route| route.interface).find(|index| is_up(*index)))
}

/// Whether each link has such addresses.
pub(crate) fn is_of_link(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// The networks of an adapter's addresses.
fn networks(adapter: &Adapter) -> impl Iterator<Item = IpNet> {
    let ipv6 = adapter.addresses.iter().filter(|net| net.addr().is_ipv6() && !is_of_link(net.addr()));
    usable(adapter).map(IpNet::V4).chain(ipv6.copied())
}

/// The routes to other nodes in the node's network, and conditions about those that need an overlay. Without IPv6 pods, there are none
/// of IPv6.
pub(crate) fn direct(state: &NodeState, has_ipv6: bool) -> (DesiredRoutes, Vec<Condition>) {
    let (mut direct, mut conditions): (DesiredRoutes, _) = (DesiredRoutes::new(), Vec::new());
    for (destination, target) in state.routes.iter().filter(|(net, _)| has_ipv6 || net.addr().is_ipv4()) {
        match target {
            RouteTarget::Direct { router } => {
                direct.entry(*destination).or_default().insert((*router).into());
            }
            RouteTarget::Vxlan { node } => conditions.push(Condition::new(
                Reason::RouteRefused,
                format!(
                    "no route leads to {destination} of node {node}: its pool has VXLAN, and the network of this node is of type \
                     L2Bridge, which has none; use a pool without encapsulation, or --windows-network overlay"
                ),
            )),
            RouteTarget::Ipip { .. } | RouteTarget::Local => {}
        }
    }
    conditions.extend(crate::routes::ipip(state));
    (direct, conditions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(index: u32, address: &str) -> Adapter {
        Adapter {
            index,
            name: format!("Ethernet {index}"),
            mac: None,
            mtu: 1500,
            is_up: true,
            addresses: vec![address.parse().unwrap()],
        }
    }

    fn route(interface: u32, destination: &str, next_hop: &str, metric: u32) -> IpRoute {
        IpRoute {
            interface,
            destination: destination.parse().unwrap(),
            next_hop: next_hop.parse().unwrap(),
            metric,
            is_own: false,
        }
    }

    fn desired(routes: &[(&str, &str)]) -> DesiredRoutes {
        let mut desired = DesiredRoutes::new();
        for (net, hop) in routes {
            let hop: IpAddr = hop.parse().unwrap();
            desired.entry(net.parse().unwrap()).or_default().insert(hop.into());
        }
        desired
    }

    const BLOCK: &str = "10.244.1.0/26";

    #[test]
    fn routes_become_the_desired_ones_and_those_of_others_stay() {
        let adapters = [adapter(3, "192.0.2.14/24"), adapter(7, "10.244.9.2/26")];
        let ours = route(3, BLOCK, "192.0.2.11", DIRECT);
        let outdated = route(3, "10.244.5.0/26", "192.0.2.12", DIRECT);
        let learned = route(3, "10.244.6.0/26", "192.0.2.12", LEARNED);
        let foreign = route(3, "10.244.7.0/26", "192.0.2.99", 0);
        let routes = [ours.clone(), outdated.clone(), learned, foreign];
        let wanted = desired(&[(BLOCK, "192.0.2.11"), ("10.244.8.0/26", "192.0.2.12")]);
        let expected = Changes {
            add: vec![route(3, "10.244.8.0/26", "192.0.2.12", DIRECT)],
            remove: vec![outdated],
            problems: vec![],
        };
        assert_eq!(changes(&wanted, DIRECT, &adapters, &routes), expected);
    }

    #[test]
    fn a_changed_next_hop_or_adapter_replaces_the_route() {
        let wanted = desired(&[(BLOCK, "192.0.2.12")]);
        let old = route(3, BLOCK, "192.0.2.11", DIRECT);
        let found = changes(&wanted, DIRECT, &[adapter(3, "192.0.2.14/24")], std::slice::from_ref(&old));
        assert_eq!((found.add, found.remove), (vec![route(3, BLOCK, "192.0.2.12", DIRECT)], vec![old]));
        // The switch has taken the adapter over.
        let old = route(3, BLOCK, "192.0.2.12", DIRECT);
        let found = changes(&wanted, DIRECT, &[adapter(103, "192.0.2.14/24")], std::slice::from_ref(&old));
        assert_eq!((found.add, found.remove), (vec![route(103, BLOCK, "192.0.2.12", DIRECT)], vec![old]));
    }

    /// Every adapter has the network fe80::/64.
    #[test]
    fn a_router_with_an_address_of_the_link_is_on_its_own_adapter() {
        let link =
            |index| Adapter { addresses: vec!["fe80::5/64".parse().unwrap()], ..adapter(index, "::/0") };
        let adapters = [link(3), link(7), Adapter { is_up: false, ..link(9) }];
        let routes = adapters.each_ref().map(|it| route(it.index, "fe80::/64", "::", 0));
        for (interface, expected) in [(None, None), (Some(3), Some(3)), (Some(7), Some(7)), (Some(9), None)] {
            let hop = RouterHop { router: "fe80::1".parse().unwrap(), interface };
            assert_eq!(interface_to(hop, &adapters, &routes), expected, "{interface:?}");
        }
    }

    #[test]
    fn what_keeps_a_route_from_working_is_a_problem() {
        let wanted = desired(&[(BLOCK, "198.51.100.1")]);
        let found = changes(&wanted, DIRECT, &[adapter(3, "192.0.2.14/24")], &[]);
        assert_eq!(
            found.problems,
            ["no adapter is in the network of 198.51.100.1, the next hop to 10.244.1.0/26"]
        );
        assert!(found.add.is_empty());
        let wanted = desired(&[(BLOCK, "192.0.2.11")]);
        let foreign = route(3, BLOCK, "192.0.2.99", 5);
        let found = changes(&wanted, DIRECT, &[adapter(3, "192.0.2.14/24")], &[foreign]);
        assert!(found.problems[0].contains("by 192.0.2.99 has precedence"), "{:?}", found.problems);
        assert!(found.remove.is_empty(), "it is not ours");
        // The same route of somebody else is as good.
        let same = route(3, BLOCK, "192.0.2.11", 5);
        assert_eq!(changes(&wanted, DIRECT, &[adapter(3, "192.0.2.14/24")], &[same]), Changes::default());
    }
}
