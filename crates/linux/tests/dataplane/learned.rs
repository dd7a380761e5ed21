//! Routes of BGP in the kernel's table.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_kernel::interface_index;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};
use tortie_linux::{Applied, LearnedRoutes};

use crate::common::cluster::*;

const PROTOCOL: u8 = 85;

fn learned() -> Vec<Route> {
    let routes = RouteSocket::open().unwrap().routes().unwrap();
    routes.into_iter().filter(|route| route.protocol == PROTOCOL).collect()
}

/// Both families have metrics of their own in the kernel: what was written must be found again.
#[test]
fn routes_of_both_families_are_written_once_and_found_again() {
    let underlay = Underlay::new();
    let node = Node::new(&underlay, 1);
    node.namespace
        .run(|| {
            let link = interface_index("eth0").unwrap();
            let address = Address { link, address: "fd31::1".parse().unwrap(), prefix_length: 64 };
            RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
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
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), Applied::default());
            let written = learned();
            assert_eq!(written.iter().filter_map(|route| route.gateway).collect::<Vec<_>>(), hops);
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), Applied::default(), "there is nothing to do");
            assert_eq!(learned(), written);

            // Another process takes them over, changes them in place, and removes what nobody wants.
            let mut routes = LearnedRoutes::open().unwrap();
            assert!(routes.exist().unwrap());
            let others = [ip("172.31.0.3"), ip("fd31::3")];
            want(&mut routes, others);
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), Applied::default());
            assert_eq!(learned().iter().filter_map(|route| route.gateway).collect::<Vec<_>>(), others);
            nets.into_iter().for_each(|net| routes.set(net, BTreeSet::new()));
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), Applied::default());
            assert_eq!(learned().len(), 2, "the peers' routes are not complete");
            routes.complete();
            assert_eq!(routes.apply(&BTreeSet::new()).unwrap(), Applied::default());
            assert_eq!(learned(), []);
        })
        .unwrap();
}
