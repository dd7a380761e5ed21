//! Many policies of one pod, each with many networks.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::net::Action;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Chain, Nft, Set};
use tortie_policy::program::{EndOfTier, EntityMatch, PolicyRules, Rule};

use crate::common::cluster::*;

/// More than are evaluated one after another, so that policies with few networks would be joined.
const POLICIES: u8 = 40;
const NETWORKS: u32 = 1_100;

/// A policy for networks of its own, and for this address.
fn policy(state: &mut NodeState, number: u8, action: Action, also: Option<Ipv4Addr>) {
    let first = |n: u32| Ipv4Addr::from_bits((0x0b00_0000 | u32::from(number) << 16) + n * 4);
    let networks = (0..NETWORKS).map(|n| IpNet::new(first(n).into(), 31).unwrap());
    let nets = networks.chain(also.map(|address| IpNet::from(IpAddr::from(address)))).collect();
    let source = EntityMatch { nets, ..EntityMatch::default() };
    let rules = PolicyRules { ingress: vec![Rule { source, ..Rule::all(action) }], egress: Vec::new() };
    state.policies.insert(policy_id(&name(number)), Arc::new(rules));
}

fn name(number: u8) -> String {
    format!("p{number}")
}

fn sets_and_chains(node: &Node) -> (BTreeMap<String, Set>, BTreeMap<String, Chain>) {
    let table = node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap().unwrap()).unwrap();
    (table.sets, table.chains)
}

/// The names of objects that are in one of the two only, or differ.
fn different<T: PartialEq>(one: &BTreeMap<String, T>, other: &BTreeMap<String, T>) -> Vec<String> {
    let names = one.keys().chain(other.keys().filter(|name| !one.contains_key(*name)));
    names.filter(|name| one.get(*name) != other.get(*name)).cloned().collect()
}

/// Otherwise whoever writes many policies makes each change take as long as all of them.
#[test]
fn a_change_of_a_policy_with_many_networks_writes_no_other_one() {
    let mut node = Node::new(&Underlay::new(), 1);
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    node.change(|state| {
        open_profile(state);
        (0..POLICIES).for_each(|number| policy(state, number, Action::Allow, None));
    });
    node.add(&client, open());
    let all: Vec<String> = (0..POLICIES).map(name).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    node.add(&server, ingress(&all, EndOfTier::Deny));
    assert!(client.is_cut_off(server.address, 80), "no policy allows it");
    let last = POLICIES - 1;
    let steps = [
        ("the last one allows it", last, Action::Allow, Some(client.address), true),
        ("the one before denies it", last - 1, Action::Deny, Some(client.address), false),
        ("the one before allows it, too", last - 1, Action::Allow, Some(client.address), true),
        ("the first one denies it", 0, Action::Deny, Some(client.address), false),
        ("it denies other networks", 0, Action::Deny, None, true),
    ];
    for (what, number, action, also, allowed) in steps {
        let before = sets_and_chains(&node);
        node.change(|state| policy(state, number, action, also));
        let is_right =
            if allowed { client.reaches(&server, 80) } else { client.is_cut_off(server.address, 80) };
        assert!(is_right, "{what}");
        let after = sets_and_chains(&node);
        let sets = different(&before.0, &after.0);
        assert!(sets.len() <= 2, "{what}: the networks before and after it, not {sets:?}");
        let chains = different(&before.1, &after.1);
        assert!(chains.len() <= 1, "{what}: the policy's chain, not {chains:?}");
    }
    // Another program, with the same policies but one.
    let before = sets_and_chains(&node);
    node.program(&server, ingress(&all[1..], EndOfTier::Deny));
    let after = sets_and_chains(&node);
    assert!(client.reaches(&server, 80));
    let sets = different(&before.0, &after.0);
    let literals: Vec<_> = sets.iter().filter(|name| name.starts_with("l-")).collect();
    assert_eq!(literals.len(), 1, "the networks of the policy that no pod has any more, of {sets:?}");
    assert!(!after.1.keys().any(|name| !before.1.contains_key(name) && name.starts_with("pi-")));
    let gone = before.1.keys().filter(|name| !after.1.contains_key(*name) && name.starts_with("pi-"));
    assert_eq!(gone.count(), 1, "its chain");
}
