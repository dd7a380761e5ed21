//! Sets that ACLs name, on an HNS that does not do as it is told, and on one that was there before the agent.
#![allow(clippy::unwrap_used, reason = "a test says what it expects by unwrap")]

mod node;

use std::collections::BTreeSet;

use node::*;
use serde_json::Value;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{Dataplane, Delta, Report};
use tortie_hcn::schema::SetPolicy;
use tortie_hcn::{Call, Failure, HResult, HcnExt, Kind};
use tortie_hns_emulator::Config;
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow, Member, Rule, SetId, SetKind};
use tortie_windows::NETWORK;

/// A pod that takes in what is in one set and not in another.
fn node() -> Node {
    let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), WindowsPolicySets::Enabled);
    node.connect();
    let rule = |action, set: &str| {
        let mut rule = Rule::all(action);
        rule.source.sets = vec![SetId::new(set)];
        rule
    };
    let rules = vec![rule(Action::Deny, "s:denied"), rule(Action::Allow, "s:allowed")];
    let tiers = vec![tier("default", &["web"], EndOfTier::Deny)];
    let program = EndpointProgram { ingress: tiers, ..open_program() };
    let set = |name: &str| Delta::SetCreated(SetId::new(name), SetKind::Nets, [member(1)].into());
    let deltas = [
        local_node(),
        own_block(),
        allow_all(),
        policy("web", rules, vec![]),
        set("s:denied"),
        set("s:allowed"),
        endpoint(program),
    ];
    assert_eq!(node.apply(&deltas), Report::default());
    node
}

fn member(last: u8) -> Member {
    Member::Net(ipnet::Ipv4Net::from(std::net::Ipv4Addr::new(10, 0, 0, last)).into())
}

fn change(set: &str, added: &[u8], removed: &[u8]) -> Delta {
    let members = |of: &[u8]| of.iter().map(|last| member(*last)).collect();
    Delta::SetChanged { id: SetId::new(set), added: members(added), removed: members(removed) }
}

fn lets_in(node: &Node, last: u8) -> bool {
    let flow = Flow {
        source: [10, 0, 0, last].into(),
        destination: POD.into(),
        protocol: Protocol::TCP,
        source_port: 1,
        destination_port: 1,
        icmp: None,
    };
    node.passes(Direction::Ingress, &flow)
}

fn names_sets(node: &Node) -> bool {
    node.acls().iter().any(|acl| acl.remote_addresses.contains("tortie-"))
}

/// The sets of the network.
fn sets(node: &Node) -> BTreeSet<String> {
    let network = node.hns.inner().network_by_name(NETWORK).unwrap().unwrap();
    network.policies.iter().filter_map(|policy| Some(policy.settings::<SetPolicy>().ok()??.id)).collect()
}

fn is_update_of_sets(call: &Call) -> bool {
    let Call::Modify { kind: Kind::Network, settings, .. } = call else { return false };
    let request: Value = serde_json::from_str(settings).unwrap();
    request["RequestType"] == "Update"
}

/// Both sets get a peer that is denied before and after. HNS refuses, or pretends: the peer is never let in, and what is
/// wanted is reached with its addresses, without the sets being written again and again.
#[test]
fn sets_that_hns_does_not_change_are_spelled_out() {
    for pretends in [false, true] {
        let mut node = node();
        node.hns.set_fault(move |call| {
            let refusal = || Failure::new(HResult::HCN_E_INVALID_POLICY, "no".to_owned());
            is_update_of_sets(call).then(|| if pretends { Ok(String::new()) } else { Err(refusal()) })
        });
        let report = node.apply(&[change("s:denied", &[2], &[]), change("s:allowed", &[2, 3], &[])]);
        let reasons: Vec<_> = report.node.iter().map(|told| told.reason).collect();
        assert_eq!(reasons, ["PolicySetRefused"; 2], "{report:?}");
        assert!(report.endpoints.is_empty(), "{report:?}");
        assert_eq!([1, 2, 3].map(|last| lets_in(&node, last)), [false, false, true]);
        assert!(!names_sets(&node));
        // A change more is none of sets, and for ten minutes none is tried.
        assert!(!node.apply(&[change("s:allowed", &[4], &[3])]).retry);
        assert_eq!([3, 4].map(|last| lets_in(&node, last)), [false, true]);
        node.hns.take();
        for _ in 0..9 {
            node.wait(60);
            node.dataplane.resync();
        }
        assert!(!node.hns.take_changes().iter().any(is_update_of_sets));
        assert!(!names_sets(&node));
        node.hns.clear_fault();
        node.wait(120);
        assert_eq!(node.dataplane.resync(), Report::default());
        assert!(names_sets(&node));
        assert_eq!([1, 2, 3, 4].map(|last| lets_in(&node, last)), [false, false, false, true]);
    }
}

/// A pod that HNS does not have is no reason to leave sets as they are.
#[test]
fn a_pod_without_an_endpoint_holds_up_no_set() {
    let mut node = node();
    let stale = Delta::Endpoint(
        tortie_dataplane::EndpointId { pod: "stale".into(), ..pod_id() },
        std::sync::Arc::new(tortie_dataplane::Endpoint {
            container_id: "gone".into(),
            ..match endpoint(open_program()) {
                Delta::Endpoint(_, endpoint) => (*endpoint).clone(),
                other => panic!("{other:?}"),
            }
        }),
    );
    let report = node.apply(&[stale]);
    assert_eq!(report.endpoints.len(), 1);
    let acls = node.acls();
    node.apply(&[change("s:allowed", &[5], &[])]);
    assert!(lets_in(&node, 5));
    assert_eq!(node.acls(), acls, "by its set");
}

/// An agent that comes up while its network is in trouble leaves the lists as they are.
#[test]
fn a_network_in_trouble_changes_no_list() {
    let node = node();
    let acls = node.acls();
    let mut restarted = Node::over(node.hns.clone());
    let mut deltas = vec![policy_sets(WindowsPolicySets::Enabled)];
    // The same state, but for a block that the network does not have.
    let block = tortie_dataplane::Route {
        destination: "10.244.9.0/26".parse().unwrap(),
        target: tortie_dataplane::RouteTarget::Local,
    };
    deltas.extend([local_node(), Delta::Route(block)]);
    deltas.extend(
        node.state
            .sets
            .iter()
            .map(|(id, (kind, members))| Delta::SetCreated(id.clone(), *kind, members.clone())),
    );
    deltas.extend(node.state.policies.iter().map(|(id, rules)| Delta::Policy(id.clone(), rules.clone())));
    deltas.extend(
        node.state.endpoints.iter().map(|(id, endpoint)| Delta::Endpoint(id.clone(), endpoint.clone())),
    );
    let report = restarted.apply(&deltas);
    assert_eq!(report.node[0].reason, "NetworkDiffers");
    assert_eq!(node.acls(), acls);
}

/// What nothing names goes; what an endpoint names that nobody told of stays.
#[test]
fn sets_go_when_nothing_names_them() {
    let mut node = node();
    let before = sets(&node);
    assert_eq!(before.len(), 2);
    let mut restarted = Node::over(node.hns.clone());
    restarted.apply(&[policy_sets(WindowsPolicySets::Enabled), local_node(), own_block()]);
    restarted.wait(60);
    restarted.dataplane.resync();
    assert_eq!(sets(&node), before, "its pods are not known yet");
    node.apply(&[endpoint(open_program())]);
    node.wait(60);
    node.dataplane.resync();
    assert_eq!(sets(&node), BTreeSet::new());
}
