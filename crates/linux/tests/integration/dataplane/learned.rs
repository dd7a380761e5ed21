//! Routes of BGP in the kernel's table.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_dataplane::{AppliedRoutes, LearnedRouteTable};
use tortie_kernel::interface_index;
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, NextHop, Route, RouteSocket};
use tortie_linux::LearnedRoutes;

use crate::common::cluster::*;

const PROTOCOL: u8 = 85;

fn learned() -> Vec<Route> {
    let routes = RouteSocket::open().unwrap().routes().unwrap();
    routes.into_iter().filter(|route| route.protocol == PROTOCOL).collect()
}

/// The next hops of each learned route, by destination.
fn next_hops() -> Vec<(IpNet, Vec<IpAddr>)> {
    let mut all: Vec<(IpNet, Vec<IpAddr>)> = learned()
        .iter()
        .map(|route| {
            let mut gateways: Vec<IpAddr> = route.next_hops().iter().filter_map(|hop| hop.gateway).collect();
            gateways.sort_unstable();
            (route.destination, gateways)
        })
        .collect();
    all.sort_unstable();
    all
}

/// A node with 172.31.0.1 and fd31::1.
fn node_of_both_families() -> Node {
    let node = Node::new(&Underlay::new(), 1);
    let add = || {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: "fd31::1".parse().unwrap(), prefix_length: 64 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    };
    node.namespace.run(add).unwrap();
    node
}

/// Multipath routes come, change in every direction, and go; nothing is written twice. A foreign one is left alone, and next hops
/// are looked up in it.
#[test]
fn several_next_hops_become_one_multipath_route() {
    let node = node_of_both_families();
    node.namespace
        .run(|| {
            let link = interface_index("eth0").unwrap();
            let mut socket = RouteSocket::open().unwrap();
            let nets: [IpNet; 2] = ["10.65.2.0/26", "fd65:0:0:2::/122"].map(|net| net.parse().unwrap());
            let hops = |numbers: &[u8]| -> [BTreeSet<IpAddr>; 2] {
                let of =
                    |prefix: &str| numbers.iter().map(|n| format!("{prefix}{n}").parse().unwrap()).collect();
                [of("172.31.0."), of("fd31::")]
            };
            let mut routes = LearnedRoutes::open().unwrap();
            routes.complete();
            for numbers in
                [&[2, 3][..], &[2, 3, 4], &[3, 4, 5], &[4], &[6, 7], &[2, 3, 4, 5, 6, 7], &[9], &[2, 9], &[]]
            {
                for (net, hops) in nets.into_iter().zip(hops(numbers)) {
                    routes.set(net, hops);
                }
                assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default(), "{numbers:?}");
                let expected =
                    nets.into_iter().zip(hops(numbers)).map(|(net, hops)| (net, Vec::from_iter(hops)));
                let expected: Vec<_> = expected.filter(|(_, hops)| !hops.is_empty()).collect();
                assert_eq!(next_hops(), expected, "{numbers:?}");
                let before = learned();
                assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
                assert_eq!(learned(), before, "{numbers:?}: there is nothing to do");
                // What somebody else changes is repaired.
                for route in before.iter().filter(|route| !route.others.is_empty()) {
                    let single = Route { others: Vec::new(), ..route.clone() };
                    socket.change(&Change::ReplaceRoute(single)).unwrap();
                }
                assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
                assert_eq!(next_hops(), expected, "{numbers:?}: repaired");
            }

            let foreign: Vec<Route> = ["172.31.0.8", "fd31::8"]
                .into_iter()
                .zip(["172.31.0.9", "fd31::9"])
                .zip(["10.99.0.0/24", "fd99::/64"])
                .map(|((one, two), to)| {
                    let next_hop = |gateway: &str| NextHop {
                        link,
                        gateway: Some(gateway.parse().unwrap()),
                        onlink: true,
                    };
                    Route {
                        others: vec![next_hop(two)],
                        ..Route::via(to.parse().unwrap(), one.parse().unwrap(), link, 4)
                    }
                })
                .collect();
            for route in &foreign {
                socket.change(&Change::AddRoute(route.clone())).unwrap();
            }
            for (net, hop) in nets.into_iter().zip(["10.99.0.1", "fd99::1"]) {
                routes.set(net, [hop.parse().unwrap()].into());
            }
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
            let kept = socket.routes().unwrap().into_iter().filter(|route| route.protocol == 4).count();
            assert_eq!((kept, next_hops().len()), (2, 2), "{:?}", next_hops());
            assert!(routes.remove_all().unwrap() == 2 && next_hops().is_empty());
        })
        .unwrap();
}

/// Both families have metrics of their own in the kernel: what was written must be found again.
#[test]
fn routes_of_both_families_are_written_once_and_found_again() {
    let node = node_of_both_families();
    node.namespace
        .run(|| {
            let ip = |text: &str| text.parse::<IpAddr>().unwrap();
            let nets: [IpNet; 2] = ["10.65.2.0/26", "fd65:0:0:2::/122"].map(|net| net.parse().unwrap());
            let hops = [ip("172.31.0.2"), ip("fd31::2")];
            let want = |routes: &mut LearnedRoutes, hops: [IpAddr; 2]| {
                for (net, hop) in nets.into_iter().zip(hops) {
                    routes.set(net, [hop].into());
                }
            };
            let mut routes = LearnedRoutes::open().unwrap();
            assert!(!routes.exist().unwrap());
            want(&mut routes, hops);
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
            let written = learned();
            assert_eq!(written.iter().filter_map(|route| route.gateway).collect::<Vec<_>>(), hops);
            assert_eq!(
                routes.apply(&BTreeSet::new()).unwrap(),
                AppliedRoutes::default(),
                "there is nothing to do"
            );
            assert_eq!(learned(), written);

            // Another process takes them over, changes them in place, and removes what nobody wants.
            let mut routes = LearnedRoutes::open().unwrap();
            assert!(routes.exist().unwrap());
            let others = [ip("172.31.0.3"), ip("fd31::3")];
            want(&mut routes, others);
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
            assert_eq!(learned().iter().filter_map(|route| route.gateway).collect::<Vec<_>>(), others);
            nets.into_iter().for_each(|net| routes.set(net, BTreeSet::new()));
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
            assert_eq!(learned().len(), 2, "the peers' routes are not complete");
            routes.complete();
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
            assert_eq!(learned(), []);
        })
        .unwrap();
}

/// A next hop behind two routers, one of which is on a link that goes down: the kernel keeps the other one in its route, and so does
/// the learned route, which can be withdrawn meanwhile.
#[test]
fn a_link_that_is_down_is_left_out_of_learned_routes() {
    let node = node_of_both_families();
    node.namespace
        .run(|| {
            let ip = |text: &str| text.parse::<IpAddr>().unwrap();
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new("spare", NewLinkKind::Bridge) }).unwrap();
            let [first, spare] = ["eth0", "spare"].map(|name| interface_index(name).unwrap());
            let address = Address { link: spare, address: ip("172.32.0.1"), prefix_length: 24 };
            socket.change(&Change::AddAddress(address)).unwrap();
            let other = NextHop { link: spare, gateway: Some(ip("172.32.0.9")), onlink: true };
            let way = Route::via("10.99.0.0/24".parse().unwrap(), ip("172.31.0.9"), first, 4);
            socket.change(&Change::AddRoute(Route { others: vec![other], ..way })).unwrap();
            let up = |socket: &mut RouteSocket, up: bool| {
                socket.change(&Change::SetLink(spare, vec![LinkSetting::Up(up)])).unwrap();
            };

            let to: IpNet = "10.65.2.0/26".parse().unwrap();
            let mut routes = LearnedRoutes::open().unwrap();
            routes.complete();
            routes.set(to, [ip("10.99.0.1")].into());
            let (both, one) = (vec![ip("172.31.0.9"), ip("172.32.0.9")], vec![ip("172.31.0.9")]);
            for (is_up, expected) in [(true, &both), (false, &one), (true, &both)] {
                up(&mut socket, is_up);
                assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
                assert_eq!(next_hops(), [(to, expected.clone())], "{is_up}");
                let before = learned();
                assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
                assert_eq!(learned(), before, "{is_up}: there is nothing to do");
            }
            up(&mut socket, false);
            routes.set(to, BTreeSet::new());
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
            assert_eq!(learned(), [], "withdrawn while the link is down");
        })
        .unwrap();
}

/// IPv4 by a router of the other family, as in networks without IPv4 addresses between nodes.
#[test]
fn a_next_hop_behind_a_router_of_the_other_family_gets_a_route_by_it() {
    let node = node_of_both_families();
    node.namespace
        .run(|| {
            let ip = |text: &str| text.parse::<IpAddr>().unwrap();
            let link = interface_index("eth0").unwrap();
            let mut socket = RouteSocket::open().unwrap();
            let way = Route::via("10.99.0.0/24".parse().unwrap(), ip("fe80::9"), link, 4);
            socket.change(&Change::AddRoute(way)).unwrap();
            let mut routes = LearnedRoutes::open().unwrap();
            let to: IpNet = "10.65.2.0/26".parse().unwrap();
            routes.set(to, [ip("10.99.0.1")].into());
            for _ in 0..2 {
                assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), AppliedRoutes::default());
                assert_eq!(next_hops(), [(to, vec![ip("fe80::9")])]);
            }
        })
        .unwrap();
}
