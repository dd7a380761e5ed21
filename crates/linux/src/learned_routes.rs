//! Routes that BGP learned, in the main table of the kernel.
//!
//! A route leads to the router that the kernel uses for the BGP next hop, as BIRD's `gateway recursive` does. Next hops
//! are looked up among the routes of others, so that learned routes cannot depend on each other. A destination with several
//! next hops has one multipath route (ECMP). Only routes with [`PROTOCOL`] are changed or deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_dataplane::{AppliedRoutes, LearnedRouteTable, RouteTableError, SystemRoutes, destinations_led};
use tortie_kernel::route::{Change, NextHop, Route, RouteKind, RouteSocket, RouteWatch};

use crate::Result;
use crate::dataplane::ROUTE_PROTOCOL;
use crate::error::is_gone;

/// The protocol number of learned routes. Routes of the dataplane have another one, so that neither deletes the other's.
/// Nobody else has it in `rtnetlink.h` and iproute2's `rt_protos`.
pub(crate) const PROTOCOL: u8 = 85;
/// The metric of learned routes: that of Calico (`ipv4NormalRoutePriority`), and the kernel's default for IPv6. Routes of
/// administrators to the same destination have a lower one, and win.
const METRIC: u32 = 1024;
/// The maximum number of next hops of a route, as in BIRD (`merge paths`).
const MAX_NEXT_HOPS: usize = 16;

/// The metric as [`Route`] has it: 0 is the kernel's default.
fn metric(destination: &IpNet) -> u32 {
    if destination.addr().is_ipv4() { METRIC } else { 0 }
}

/// The learned routes of a node.
#[derive(Debug)]
pub struct LearnedRoutes {
    socket: RouteSocket,
    /// The next hops of each destination; never empty.
    wanted: BTreeMap<IpNet, BTreeSet<IpAddr>>,
    /// Whether routes that are not wanted are left alone, because the peers' routes are not complete.
    keeps_unknown: bool,
    watch: Option<RouteWatch>,
}

impl LearnedRoutes {
    /// Opens the tables of the calling thread's network namespace. Routes of an earlier process stay until
    /// [`complete`](LearnedRouteTable::complete).
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn open() -> Result<Self> {
        Ok(Self { socket: RouteSocket::open()?, wanted: BTreeMap::new(), keeps_unknown: true, watch: None })
    }

    /// Calls `on_change`, from another thread, when links or routes in the network namespace of the calling thread have changed,
    /// whoever changed them.
    pub fn watch(&mut self, on_change: impl Fn() + Send + 'static) {
        self.watch = RouteWatch::start(on_change)
            .inspect_err(|error| {
                tracing::error!(%error, "cannot watch links and routes; the BGP speaker notices changes at its next look");
            })
            .ok();
    }

    /// Deletes all learned routes of the node, also those of an earlier process. Returns how many there were.
    ///
    /// # Errors
    /// The kernel does not answer, or refuses it.
    pub fn remove_all(mut self) -> Result<usize> {
        self.wanted.clear();
        let Plan { changes, .. } = plan(&self.wanted, &self.socket.routes()?, &BTreeSet::new(), false);
        for result in self.socket.change_all(&changes)? {
            crate::error::tolerate_gone(result)?;
        }
        Ok(changes.len())
    }
}

impl LearnedRouteTable for LearnedRoutes {
    fn exist(&mut self) -> Result<bool, RouteTableError> {
        Ok(self.socket.routes()?.iter().any(is_learned))
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
        let (kernel, dead) = self.socket.routes_and_dead_links()?;
        let Plan { changes, mut applied } = plan(&self.wanted, &kernel, &dead, self.keeps_unknown);
        let others = NextHops::of_others(&kernel, &dead);
        applied.unreachable.extend(watched.iter().filter(|next_hop| others.resolve(**next_hop).is_empty()));
        for (change, result) in changes.iter().zip(self.socket.change_all(&changes)?) {
            match result {
                Err(error) if !(matches!(change, Change::DeleteRoute(_)) && is_gone(&error)) => {
                    applied.problems.push(format!("{error}; Tortie retries"));
                }
                _ => {}
            }
        }
        Ok(applied)
    }

    fn routes_to(&mut self, destination: &IpNet) -> Result<SystemRoutes, RouteTableError> {
        let routes = self.socket.routes()?.into_iter().filter(|route| route.destination == *destination);
        let (learned, others): (Vec<Route>, Vec<Route>) = routes.partition(is_learned);
        Ok(SystemRoutes {
            learned: learned.first().map(ToString::to_string),
            others: others.iter().map(ToString::to_string).collect(),
        })
    }

    fn led_by_others(
        &mut self,
        destinations: &[IpNet],
        peers: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpNet>, RouteTableError> {
        Ok(destinations_led(destinations, &ways(&self.socket.routes()?), peers))
    }
}

/// The networks to which routes of others lead by way of routers.
fn ways(kernel: &[Route]) -> Vec<(IpNet, IpAddr)> {
    let of_others = kernel.iter().filter(|route| !is_learned(route) && route.kind == RouteKind::Unicast);
    let routers = |route: &Route| {
        let gateways = route.others.iter().filter_map(|hop| hop.gateway).chain(route.gateway);
        gateways.map(|router| (route.destination, router)).collect::<Vec<_>>()
    };
    of_others.flat_map(routers).collect()
}

struct Plan {
    changes: Vec<Change>,
    applied: AppliedRoutes,
}

/// The changes after which the kernel has the wanted routes. Links in `dead` carry no packets.
fn plan(
    wanted: &BTreeMap<IpNet, BTreeSet<IpAddr>>,
    kernel: &[Route],
    dead: &BTreeSet<u32>,
    keeps_unknown: bool,
) -> Plan {
    let others = NextHops::of_others(kernel, dead);
    let mut there: BTreeMap<IpNet, &Route> = BTreeMap::new();
    let mut changes = Vec::new();
    for route in kernel {
        let has_place = route.metric == metric(&route.destination) && wanted.contains_key(&route.destination);
        if has_place {
            there.insert(route.destination, route);
        } else if route.protocol == PROTOCOL && !keeps_unknown {
            changes.push(Change::DeleteRoute(route.clone()));
        }
    }
    let mut applied = AppliedRoutes::default();
    for (destination, next_hops) in wanted {
        let current = there.get(destination).copied();
        // Several next hops may lead to one router.
        let mut reachable = BTreeSet::new();
        for next_hop in next_hops {
            let routers = others.resolve(*next_hop);
            if routers.is_empty() {
                applied.unreachable.insert(*next_hop);
            }
            let hop = |(gateway, link)| NextHop { link, gateway: Some(gateway), onlink: true };
            reachable.extend(routers.into_iter().map(hop));
        }
        let Some(route) = route_by(*destination, reachable) else {
            let learned = current.filter(|route| is_learned(route));
            changes.extend(learned.map(|route| Change::DeleteRoute(route.clone())));
            continue;
        };
        match current {
            None => changes.push(Change::AddRoute(route)),
            Some(current) if !is_learned(current) => applied.problems.push(format!(
                "the foreign route {current} occupies the place of {route}; Tortie leaves it alone"
            )),
            Some(current) if current.leads_like(&route) => {}
            Some(_) => changes.push(Change::ReplaceRoute(route)),
        }
    }
    Plan { changes, applied }
}

/// The learned route by these next hops, if there are any.
fn route_by(destination: IpNet, next_hops: BTreeSet<NextHop>) -> Option<Route> {
    let mut next_hops = next_hops.into_iter().take(MAX_NEXT_HOPS);
    let NextHop { link, gateway, onlink } = next_hops.next()?;
    let others = next_hops.collect();
    let metric = metric(&destination);
    Some(Route { gateway, onlink, others, metric, ..Route::on_link(destination, link, PROTOCOL) })
}

fn is_learned(route: &Route) -> bool {
    route.protocol == PROTOCOL
}

/// The routes by which next hops are reached.
struct NextHops<'a> {
    /// The best route to each destination that packets can take.
    routes: BTreeMap<IpNet, &'a Route>,
    dead: &'a BTreeSet<u32>,
}

impl<'a> NextHops<'a> {
    fn of_others(kernel: &'a [Route], dead: &'a BTreeSet<u32>) -> Self {
        let mut best: BTreeMap<IpNet, &Route> = BTreeMap::new();
        let is_alive = |route: &Route| {
            route.kind != RouteKind::Unicast || route.next_hops().iter().any(|hop| !dead.contains(&hop.link))
        };
        for route in kernel.iter().filter(|route| !is_learned(route) && is_alive(route)) {
            let known = best.entry(route.destination.trunc()).or_insert(route);
            if order(route) < order(known) {
                *known = route;
            }
        }
        Self { routes: best, dead }
    }

    /// The routers by which packets reach the next hop, with their links: several, if the route to it is a multipath route. None if
    /// there is no route, or none that packets of others can take: to the address of a pod, or into a block of this node.
    fn resolve(&self, next_hop: IpAddr) -> Vec<(IpAddr, u32)> {
        let longest = if next_hop.is_ipv4() { 32 } else { 128 };
        let route = (0..=longest).rev().find_map(|length| {
            let network = IpNet::new(next_hop, length).ok()?.trunc();
            self.routes.get(&network)
        });
        let Some(route) = route else { return Vec::new() };
        if route.kind != RouteKind::Unicast || route.protocol == ROUTE_PROTOCOL {
            return Vec::new();
        }
        let alive = route.next_hops().into_iter().filter(|hop| !self.dead.contains(&hop.link));
        alive.map(|hop| (hop.gateway.unwrap_or(next_hop), hop.link)).collect()
    }
}

/// The order of routes to one destination. Of IPv6, [`Route`] has the kernel's default as 0.
fn order(route: &Route) -> u32 {
    if route.destination.addr().is_ipv6() && route.metric == 0 { METRIC } else { route.metric }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn kernel() -> Vec<Route> {
        vec![
            Route::on_link(net("10.9.0.0/24"), 2, 2),
            Route { onlink: false, ..Route::via(net("0.0.0.0/0"), ip("10.9.0.254"), 2, 3) },
            Route { onlink: false, ..Route::via(net("192.0.2.0/24"), ip("10.9.0.7"), 2, 4) },
            Route { metric: 5, ..Route::via(net("192.0.2.0/24"), ip("10.9.0.8"), 2, 4) },
            Route::on_link(net("fd09::/64"), 3, 2),
            Route::on_link(net("10.10.0.5/32"), 9, ROUTE_PROTOCOL),
            Route::blackhole(net("10.10.0.0/26"), ROUTE_PROTOCOL),
        ]
    }

    fn planned(
        wanted: &[(&str, &[&str])],
        kernel: &[Route],
        keeps_unknown: bool,
    ) -> (Vec<String>, AppliedRoutes) {
        let wanted =
            wanted.iter().map(|(to, hops)| (net(to), hops.iter().map(|hop| ip(hop)).collect())).collect();
        let Plan { changes, applied } = plan(&wanted, kernel, &BTreeSet::new(), keeps_unknown);
        let shown = |change: &Change| match change {
            Change::AddRoute(route) => format!("add {route}"),
            Change::ReplaceRoute(route) => format!("replace {route}"),
            Change::DeleteRoute(route) => format!("delete {route}"),
            other => panic!("{other}"),
        };
        (changes.iter().map(shown).collect(), applied)
    }

    fn learned(to: &str, gateway: &str, link: u32) -> Route {
        Route { metric: metric(&net(to)), ..Route::via(net(to), ip(gateway), link, PROTOCOL) }
    }

    #[test]
    fn next_hops_resolve_by_the_longest_prefix_and_the_lowest_metric() {
        for (next_hop, expected) in [
            ("10.9.0.3", Some(("10.9.0.3", 2))),
            ("192.0.2.1", Some(("10.9.0.7", 2))),
            ("203.0.113.1", Some(("10.9.0.254", 2))),
            ("fd09::3", Some(("fd09::3", 3))),
            // No default route of this family.
            ("fd10::3", None),
            // A pod of this node, and a free address of one of its blocks.
            ("10.10.0.5", None),
            ("10.10.0.6", None),
        ] {
            let found = NextHops::of_others(&kernel(), &BTreeSet::new()).resolve(ip(next_hop));
            let expected = Vec::from_iter(expected.map(|(router, link)| (ip(router), link)));
            assert_eq!(found, expected, "{next_hop}");
        }
        assert_eq!(NextHops::of_others(&[], &BTreeSet::new()).resolve(ip("10.9.0.3")), []);
    }

    /// Links and blackholes lead to no node, and learned routes are not those of others.
    #[test]
    fn ways_are_routes_of_others_with_routers() {
        let to = |gateway: &str| NextHop { link: 3, gateway: Some(ip(gateway)), onlink: false };
        let both =
            Route { others: vec![to("10.9.0.2")], ..Route::via(net("10.6.0.0/16"), ip("10.9.0.1"), 2, 4) };
        let mut all = kernel();
        all.extend([both, learned("10.7.0.0/26", "10.9.0.3", 2)]);
        let mut found: Vec<String> =
            ways(&all).iter().map(|(network, router)| format!("{network} {router}")).collect();
        found.sort_unstable();
        assert_eq!(
            found,
            [
                "0.0.0.0/0 10.9.0.254",
                "10.6.0.0/16 10.9.0.1",
                "10.6.0.0/16 10.9.0.2",
                "192.0.2.0/24 10.9.0.7",
                "192.0.2.0/24 10.9.0.8",
            ]
        );
    }

    /// The kernel's default metric of IPv6 is 1024, and a route has 0 for it.
    #[test]
    fn the_default_metric_of_ipv6_is_a_high_one() {
        let by_default = Route::via(net("::/0"), ip("fd09::1"), 2, 3);
        let better = Route { metric: 100, ..Route::via(net("::/0"), ip("fd09::2"), 3, 4) };
        let worse = Route { metric: 2000, ..Route::via(net("::/0"), ip("fd09::3"), 4, 4) };
        for kernel in [[better.clone(), by_default.clone()], [by_default.clone(), better]] {
            assert_eq!(
                NextHops::of_others(&kernel, &BTreeSet::new()).resolve(ip("fd55::1")),
                [(ip("fd09::2"), 3)]
            );
        }
        let kernel = [worse, by_default];
        assert_eq!(
            NextHops::of_others(&kernel, &BTreeSet::new()).resolve(ip("fd55::1")),
            [(ip("fd09::1"), 2)]
        );
    }

    /// A link that is down carries nothing, and the kernel takes the next best route.
    #[test]
    fn links_that_are_down_are_not_taken() {
        let to = |gateway: &str, link| NextHop { link, gateway: Some(ip(gateway)), onlink: false };
        let both = Route {
            others: vec![to("10.8.0.254", 3)],
            ..Route::via(net("0.0.0.0/0"), ip("10.9.0.254"), 2, 3)
        };
        let backup = Route { metric: 9, ..Route::via(net("0.0.0.0/0"), ip("10.7.0.254"), 4, 3) };
        let kernel = [both, backup];
        for (dead, expected) in [
            (&[][..], vec![("10.9.0.254", 2), ("10.8.0.254", 3)]),
            (&[2], vec![("10.8.0.254", 3)]),
            (&[2, 3], vec![("10.7.0.254", 4)]),
            (&[2, 3, 4], vec![]),
        ] {
            let dead: BTreeSet<u32> = dead.iter().copied().collect();
            let found = NextHops::of_others(&kernel, &dead).resolve(ip("192.0.2.1"));
            let expected: Vec<_> = expected.into_iter().map(|(gateway, link)| (ip(gateway), link)).collect();
            assert_eq!(found, expected, "{dead:?}");
        }
    }

    /// Packets to other nodes take all ways of the nodes' network, also by routers of the other family.
    #[test]
    fn a_next_hop_behind_several_routers_gives_a_route_by_each() {
        let to = |gateway: &str, link| NextHop { link, gateway: Some(ip(gateway)), onlink: false };
        let default =
            Route { others: vec![to("fe80::1", 3)], ..Route::via(net("0.0.0.0/0"), ip("10.9.0.254"), 2, 3) };
        let (changes, applied) = planned(&[("10.20.0.0/26", &["192.0.2.1"])], &[default], true);
        let hops = [("10.9.0.254", 2), ("fe80::1", 3)];
        let hops = hops.map(|(gateway, link)| NextHop { onlink: true, ..to(gateway, link) });
        let expected = route_by(net("10.20.0.0/26"), hops.into()).unwrap();
        assert_eq!(changes, [format!("add {expected}")]);
        assert_eq!(applied, AppliedRoutes::default());
    }

    /// Administrators keep what is not there away from the default route so.
    #[test]
    fn routes_that_refuse_packets_lead_to_no_next_hop() {
        for kind in [RouteKind::Blackhole, RouteKind::Unreachable, RouteKind::Prohibit, RouteKind::Throw] {
            let mut kernel = kernel();
            kernel.push(Route { kind, ..Route::blackhole(net("10.64.0.0/10"), 4) });
            let dead = BTreeSet::new();
            let hops = NextHops::of_others(&kernel, &dead);
            assert_eq!(hops.resolve(ip("10.66.0.1")), [], "{kind:?}");
            assert_eq!(hops.resolve(ip("10.9.0.3")), [(ip("10.9.0.3"), 2)]);
        }
    }

    #[test]
    fn learned_routes_do_not_resolve_next_hops() {
        let mut kernel = kernel();
        kernel.push(learned("10.9.0.3/32", "10.9.0.66", 2));
        let (changes, applied) = planned(&[("10.20.0.0/26", &["10.9.0.3"])], &kernel, true);
        assert_eq!(changes, [format!("add {}", learned("10.20.0.0/26", "10.9.0.3", 2))]);
        assert_eq!(applied, AppliedRoutes::default());
    }

    #[test]
    fn routes_of_an_earlier_process_stay_until_the_peers_routes_are_complete() {
        let mut kernel = kernel();
        let (old, same) = (learned("10.20.1.0/26", "10.9.0.4", 2), learned("10.20.2.0/26", "10.9.0.5", 2));
        kernel.extend([old.clone(), same]);
        let wanted: &[(&str, &[&str])] = &[("10.20.2.0/26", &["10.9.0.5"])];
        assert_eq!(planned(wanted, &kernel, true), (vec![], AppliedRoutes::default()));
        assert_eq!(
            planned(wanted, &kernel, false),
            (vec![format!("delete {old}")], AppliedRoutes::default())
        );
    }

    #[test]
    fn routes_change_in_place_and_foreign_ones_are_left_alone() {
        let mut kernel = kernel();
        kernel.push(learned("10.20.1.0/26", "10.9.0.4", 2));
        let (changes, _) = planned(&[("10.20.1.0/26", &["10.9.0.6"])], &kernel, false);
        assert_eq!(changes, [format!("replace {}", learned("10.20.1.0/26", "10.9.0.6", 2))]);

        let foreign = Route { protocol: 4, ..learned("10.20.3.0/26", "10.9.0.9", 2) };
        kernel.push(foreign);
        let (changes, applied) =
            planned(&[("10.20.1.0/26", &["10.9.0.4"]), ("10.20.3.0/26", &["10.9.0.4"])], &kernel, false);
        assert_eq!(changes, Vec::<String>::new());
        assert!(applied.problems[0].contains("foreign"), "{applied:?}");
    }

    /// A learned route with these routers on link 2.
    fn by(to: &str, gateways: &[&str]) -> Route {
        let next_hop = |gateway: &&str| NextHop { link: 2, gateway: Some(ip(gateway)), onlink: true };
        route_by(net(to), gateways.iter().map(next_hop).collect()).unwrap()
    }

    #[test]
    fn several_next_hops_are_ways_of_one_route() {
        const TO: &str = "10.20.1.0/26";
        let three = by(TO, &["10.9.0.3", "10.9.0.4", "10.9.0.5"]);
        for (wanted, there, expected) in [
            (vec!["10.9.0.3", "10.9.0.4"], None, Some(format!("add {}", by(TO, &["10.9.0.3", "10.9.0.4"])))),
            // The kernel may give them in another order.
            (
                vec!["10.9.0.3", "10.9.0.4", "10.9.0.5"],
                Some(Route { others: three.others.iter().rev().copied().collect(), ..three.clone() }),
                None,
            ),
            (vec!["10.9.0.3"], Some(three.clone()), Some(format!("replace {}", by(TO, &["10.9.0.3"])))),
            (
                vec!["10.9.0.3", "10.9.0.6"],
                Some(by(TO, &["10.9.0.3"])),
                Some(format!("replace {}", by(TO, &["10.9.0.3", "10.9.0.6"]))),
            ),
            // Two next hops behind one router are one next hop.
            (vec!["192.0.2.1", "192.0.2.2"], Some(by(TO, &["10.9.0.7"])), None),
            // One of them cannot be reached.
            (vec!["10.9.0.3", "10.10.0.6"], Some(by(TO, &["10.9.0.3"])), None),
            (vec!["10.10.0.6"], Some(three.clone()), Some(format!("delete {three}"))),
        ] {
            let mut kernel = kernel();
            kernel.extend(there);
            let (changes, _) = planned(&[(TO, &wanted)], &kernel, false);
            assert_eq!(changes, Vec::from_iter(expected), "{wanted:?}");
        }
        let many: Vec<String> = (10..40).map(|number| format!("10.9.0.{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let (changes, _) = planned(&[(TO, &many)], &kernel(), false);
        assert_eq!(changes, [format!("add {}", by(TO, &many[..MAX_NEXT_HOPS]))]);
    }

    #[test]
    fn a_next_hop_without_a_route_costs_the_route() {
        let mut kernel = kernel();
        kernel.push(learned("fd20::/64", "fd10::3", 3));
        let (changes, applied) = planned(&[("fd20::/64", &["fd10::3"])], &kernel, true);
        assert_eq!(changes, [format!("delete {}", learned("fd20::/64", "fd10::3", 3))]);
        assert_eq!(applied.unreachable, [ip("fd10::3")].into());
        assert_eq!(applied.problems, Vec::<String>::new());
        // Of two next hops, one leads there.
        let (changes, applied) = planned(&[("fd20::/64", &["fd09::3", "fd10::3"])], &kernel, true);
        assert_eq!(changes, [format!("replace {}", learned("fd20::/64", "fd09::3", 3))]);
        assert_eq!(applied.unreachable, [ip("fd10::3")].into());
        assert_eq!(applied.problems, Vec::<String>::new());
    }
}
