//! What is removed after the agent.

use std::sync::Arc;

use crate::dataplane::node::*;
use tortie_hcn::{FirewallError, HResult, Hcn, HcnExt, IpHelper, IpRoute};
use tortie_hns_emulator::{Config, EmulatedFirewall, EmulatedHost, Emulator};
use tortie_windows::{NetworkSpec, clean_up, ensure_network};

#[test]
fn an_error_does_not_keep_the_rest_from_being_removed() {
    let route = |metric| IpRoute {
        interface: 4,
        destination: "10.244.1.0/26".parse().unwrap(),
        next_hop: "172.16.0.1".parse().unwrap(),
        metric,
        is_own: false,
    };
    let hns = Emulator::new(Config::new(Config::SERVER_2022, NODE));
    ensure_network(&hns, &NetworkSpec { name: "Tortie-anchor".to_owned(), ..spec() }).unwrap();
    let machine = Arc::new(EmulatedHost::new(vec![], vec![route(8501), route(8502), route(10)]));
    let firewall = EmulatedFirewall::default();
    let stopped =
        FirewallError::Failed { operation: "list its rules", code: HResult::ERROR_SERVICE_NOT_ACTIVE };
    firewall.change(|state| state.fails = Some(stopped));
    machine.change(|state| state.fails = true);
    let done = clean_up(&firewall, &*machine, Ok(&hns as &dyn Hcn));
    assert_eq!((hns.networks().unwrap(), done.failed.len()), (vec![], 4));
    assert!(done.failed.iter().any(|line| line.starts_with("the routes of BGP: ")), "{done:?}");
    machine.change(|state| state.fails = false);
    let done = clean_up(&firewall, &*machine, Err("there is no HNS".to_owned()));
    assert_eq!(machine.routes().unwrap(), [route(10)]);
    let last = done.failed.last().unwrap();
    assert_eq!(last, "the network that keeps the adapter's switch: there is no HNS");
}
