//! The routes that a routing protocol has learned, in the tables of the node's system.

use std::collections::BTreeSet;
use std::error::Error;
use std::net::IpAddr;

use ipnet::IpNet;

/// Why the system does not answer.
pub type RouteTableError = Box<dyn Error + Send + Sync>;

/// The result of [`LearnedRouteTable::apply`].
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct AppliedRoutes {
    /// Next hops to which the node has no route.
    pub unreachable: BTreeSet<IpAddr>,
    /// Why routes are not in force.
    pub problems: Vec<String>,
}

/// The system's routes to one destination, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SystemRoutes {
    /// The learned one.
    pub learned: Option<String>,
    /// Those of others.
    pub others: Vec<String>,
}

/// Returns the destinations to which one of the routes leads. Each route is a network with its router. A default route leads to everything,
/// so it counts only if its router is one of the `peers`: these may know routes that they do not announce.
pub fn destinations_led(
    destinations: &[IpNet],
    routes: &[(IpNet, IpAddr)],
    peers: &BTreeSet<IpAddr>,
) -> BTreeSet<IpNet> {
    let leads = |destination: &IpNet| {
        routes.iter().any(|(network, router)| {
            network.contains(destination) && (network.prefix_len() > 0 || peers.contains(router))
        })
    };
    destinations.iter().filter(|destination| leads(destination)).copied().collect()
}

/// The learned routes of a node. A next hop is looked up among the routes of others, so that learned routes cannot depend on each
/// other. Routes of others are left alone.
pub trait LearnedRouteTable: Send {
    /// Whether the system has learned routes, for instance of an earlier process.
    ///
    /// # Errors
    /// The system does not answer.
    fn exist(&mut self) -> Result<bool, RouteTableError>;

    /// Sets the next hops of a destination; none to have no route. The system gets them with [`apply`](Self::apply).
    fn set(&mut self, destination: IpNet, next_hops: BTreeSet<IpAddr>);

    /// From now on, routes of an earlier process that are not wanted are deleted.
    fn complete(&mut self);

    /// Forgets what is wanted, for a new speaker: the routes stay until [`complete`](Self::complete).
    fn restart(&mut self);

    /// Reads the system's routes, and makes the learned ones as they should be. The result also says which of the next hops in
    /// `watched` cannot be reached.
    ///
    /// # Errors
    /// The system does not answer. What it refuses is a problem in the result.
    fn apply(&mut self, watched: &BTreeSet<IpAddr>) -> Result<AppliedRoutes, RouteTableError>;

    /// What the system has for exactly this destination.
    ///
    /// # Errors
    /// The system does not answer.
    fn routes_to(&mut self, destination: &IpNet) -> Result<SystemRoutes, RouteTableError>;

    /// Those of these destinations to which routes of others lead by way of a router, such as those of an administrator
    /// ([`destinations_led`]).
    ///
    /// # Errors
    /// The system does not answer.
    fn led_by_others(
        &mut self,
        destinations: &[IpNet],
        peers: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpNet>, RouteTableError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_leads_to_what_is_in_it_and_a_default_route_by_way_of_a_peer() {
        let net = |text: &str| -> IpNet { text.parse().unwrap() };
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let blocks = ["10.1.0.0/26", "10.1.0.64/26", "10.2.0.0/26", "fd00::/122"].map(net);
        let peers = [ip("192.0.2.9")].into();
        for (ways, expected) in [
            (&[][..], &[][..]),
            (&[("0.0.0.0/0", "192.0.2.1"), ("::/0", "fe80::1")], &[]),
            (&[("0.0.0.0/0", "192.0.2.9")], &["10.1.0.0/26", "10.1.0.64/26", "10.2.0.0/26"]),
            (&[("10.1.0.0/26", "192.0.2.1")], &["10.1.0.0/26"]),
            (
                &[("10.1.0.0/24", "192.0.2.1"), ("fd00::/64", "fe80::1")],
                &["10.1.0.0/26", "10.1.0.64/26", "fd00::/122"],
            ),
            (&[("10.2.0.0/27", "192.0.2.1")], &[]),
        ] {
            let ways: Vec<(IpNet, IpAddr)> =
                ways.iter().map(|(network, router)| (net(network), ip(router))).collect();
            let expected: BTreeSet<IpNet> = expected.iter().map(|text: &&str| net(text)).collect();
            assert_eq!(destinations_led(&blocks, &ways, &peers), expected, "{ways:?}");
        }
    }
}
