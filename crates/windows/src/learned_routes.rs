//! Routes that BGP learned, in the tables of the machine.
//!
//! A next hop is looked up among the routes of others, as on Linux. Only routes with the metric of learned ones are changed or deleted
//! ([`node_routes`]).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_dataplane::{AppliedRoutes, LearnedRouteTable, RouteTableError, SystemRoutes, destinations_led};
use tortie_hcn::{IpHelperError, IpRoute};

use crate::host::Host;
use crate::node_routes::{self, DesiredRoutes, LEARNED, RouterHop, Surplus, is_of_agent, is_of_link};

/// The learned routes of a node.
pub struct LearnedRoutes {
    host: Host,
    /// The next hops of each destination; never empty.
    wanted: BTreeMap<IpNet, BTreeSet<IpAddr>>,
    /// Whether routes that are not wanted are left alone, because the peers' routes are not complete.
    keeps_unknown: bool,
}

impl LearnedRoutes {
    /// The routes of a machine. Those of an earlier process stay until [`complete`](LearnedRouteTable::complete).
    pub fn new(host: Host) -> Self {
        Self { host, wanted: BTreeMap::new(), keeps_unknown: true }
    }

    /// Deletes all learned routes of the node, also those of an earlier process. Returns how many there were.
    ///
    /// # Errors
    /// The machine does not answer, or refuses it.
    pub fn remove_all(self) -> Result<usize, IpHelperError> {
        node_routes::remove_all(self.host.ip(), LEARNED)
    }
}

impl LearnedRouteTable for LearnedRoutes {
    fn exist(&mut self) -> Result<bool, RouteTableError> {
        Ok(self.host.ip().routes()?.iter().any(is_learned))
    }

    fn set(&mut self, destination: IpNet, next_hops: BTreeSet<IpAddr>) {
        match next_hops.is_empty() {
            true => drop(self.wanted.remove(&destination)),
            false => drop(self.wanted.insert(destination, next_hops)),
        }
    }

    fn complete(&mut self) {
        self.keeps_unknown = false;
    }

    fn restart(&mut self) {
        self.wanted.clear();
        self.keeps_unknown = true;
    }

    fn apply(&mut self, watched: &BTreeSet<IpAddr>) -> Result<AppliedRoutes, RouteTableError> {
        let routes = self.host.ip().routes()?;
        let mut applied = AppliedRoutes::default();
        let mut desired = DesiredRoutes::new();
        for (destination, next_hops) in &self.wanted {
            for next_hop in next_hops {
                match resolve(*next_hop, &routes) {
                    Some(router) => drop(desired.entry(*destination).or_default().insert(router)),
                    None => drop(applied.unreachable.insert(*next_hop)),
                }
            }
        }
        let is_lost = |next_hop: &&IpAddr| resolve(**next_hop, &routes).is_none();
        applied.unreachable.extend(watched.iter().filter(is_lost));
        let surplus = if self.keeps_unknown { Surplus::OfOtherDestinationsStays } else { Surplus::Goes };
        applied.problems = node_routes::sync(self.host.ip(), LEARNED, &desired, surplus)?;
        Ok(applied)
    }

    fn routes_to(&mut self, destination: &IpNet) -> Result<SystemRoutes, RouteTableError> {
        let routes = self.host.ip().routes()?.into_iter().filter(|route| route.destination == *destination);
        let (learned, others): (Vec<IpRoute>, Vec<IpRoute>) = routes.partition(is_learned);
        let learned: Vec<String> = learned.iter().map(shown).collect();
        Ok(SystemRoutes {
            learned: (!learned.is_empty()).then(|| learned.join(", ")),
            others: others.iter().map(shown).collect(),
        })
    }

    fn led_by_others(
        &mut self,
        destinations: &[IpNet],
        peers: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpNet>, RouteTableError> {
        let leads = |route: &IpRoute| !is_of_agent(route.metric) && !route.next_hop.is_unspecified();
        let routes = self.host.ip().routes()?.into_iter().filter(leads);
        let ways: Vec<_> = routes.map(|route| (route.destination, route.next_hop)).collect();
        Ok(destinations_led(destinations, &ways, peers))
    }
}

fn is_learned(route: &IpRoute) -> bool {
    route.metric == LEARNED
}

fn shown(route: &IpRoute) -> String {
    let IpRoute { interface, destination, next_hop, metric, is_own: _ } = route;
    format!("route to {destination} via {next_hop} on adapter {interface}, metric {metric}")
}

/// The router by which packets reach the next hop; `None` if there is no route.
fn resolve(next_hop: IpAddr, routes: &[IpRoute]) -> Option<RouterHop> {
    let of_others = routes.iter().filter(|route| !is_of_agent(route.metric));
    let leading = of_others.filter(|route| route.destination.contains(&next_hop));
    let best =
        leading.max_by_key(|route| (route.destination.prefix_len(), std::cmp::Reverse(route.metric)))?;
    let router = if best.next_hop.is_unspecified() { next_hop } else { best.next_hop };
    Some(RouterHop { router, interface: is_of_link(router).then_some(best.interface) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_hops_resolve_by_the_longest_prefix_and_the_lowest_metric() {
        let route = |destination: &str, next_hop: &str, metric| IpRoute {
            interface: 3,
            destination: destination.parse().unwrap(),
            next_hop: next_hop.parse().unwrap(),
            metric,
            is_own: false,
        };
        let routes = [
            route("10.9.0.0/24", "0.0.0.0", 256),
            route("0.0.0.0/0", "10.9.0.254", 0),
            route("192.0.2.0/24", "10.9.0.7", 4),
            route("192.0.2.0/24", "10.9.0.8", 5),
            route("192.0.2.3/32", "10.9.0.66", LEARNED),
        ];
        for (next_hop, expected) in [
            ("10.9.0.3", Some("10.9.0.3")),
            ("192.0.2.3", Some("10.9.0.7")),
            ("203.0.113.1", Some("10.9.0.254")),
        ] {
            let expected = expected.map(|text: &str| text.parse::<IpAddr>().unwrap().into());
            assert_eq!(resolve(next_hop.parse().unwrap(), &routes), expected, "{next_hop}");
        }
        assert_eq!(resolve("203.0.113.1".parse().unwrap(), &routes[..1]), None);
    }

    /// A default route by a router's advertisement.
    #[test]
    fn a_router_of_the_link_keeps_its_adapter() {
        let route = |interface, destination: &str, next_hop: &str| IpRoute {
            interface,
            destination: destination.parse().unwrap(),
            next_hop: next_hop.parse().unwrap(),
            metric: 256,
            is_own: true,
        };
        let routes = [
            route(3, "fe80::/64", "::"),
            route(7, "fe80::/64", "::"),
            route(7, "::/0", "fe80::1"),
            route(7, "2001:db8::/64", "::"),
        ];
        for (next_hop, router, interface) in
            [("2001:db8:1::3", "fe80::1", Some(7)), ("2001:db8::3", "2001:db8::3", None)]
        {
            let expected = RouterHop { router: router.parse().unwrap(), interface };
            assert_eq!(resolve(next_hop.parse().unwrap(), &routes), Some(expected));
        }
    }
}
