//! Sets that ACLs name, on an HNS that misbehaves, and on one with state from before the agent.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::dataplane::node::*;
use serde_json::Value;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{Delta, EndpointId, PodWiring, Reason, Report};
use tortie_hcn::schema::SetPolicy;
use tortie_hcn::{Call, Failure, HResult, HcnExt, Kind};
use tortie_hns_emulator::{Config, Emulator, Recorder, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow, Member, Rule, SetId, SetKind};
use tortie_windows::{NETWORK, endpoint_id};

/// A pod that admits members of one set that are not in another.
fn node() -> Node {
    let rules = vec![of_set(Action::Deny, "s:denied"), of_set(Action::Allow, "s:allowed")];
    node_with(rules, ["s:denied", "s:allowed"])
}

fn of_set(action: Action, set: &str) -> Rule {
    let mut rule = Rule::all(action);
    rule.source.sets = vec![SetId::new(set)];
    rule
}

/// A pod with these rules, and sets of one member.
fn node_with(rules: Vec<Rule>, sets: [&str; 2]) -> Node {
    let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), WindowsPolicySets::Enabled);
    node.connect();
    let tiers = vec![tier("default", &["web"], EndOfTier::Deny)];
    let program = EndpointProgram { ingress: tiers, ..open_program() };
    let [one, other] =
        sets.map(|name| Delta::SetCreated(SetId::new(name), SetKind::Nets, [member(1)].into()));
    let web = policy("web", rules, vec![]);
    let deltas = [local_node(), own_block(), allow_all(), web, one, other, endpoint(program)];
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

fn lets_in(hns: &Recorder<Emulator>, last: u8) -> bool {
    let flow = Flow {
        source: [10, 0, 0, last].into(),
        destination: POD.into(),
        protocol: Protocol::TCP,
        source_port: 1,
        destination_port: 1,
        icmp: None,
    };
    let verdict = hns.inner().judge(endpoint_id(CONTAINER), &packet(Direction::Ingress, &flow));
    verdict.unwrap() == Verdict::Allow
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

/// Both sets get a peer that is denied before and after. HNS refuses or pretends: the peer is never admitted, and the
/// desired state is reached with addresses, without writing the sets repeatedly.
#[test]
fn sets_that_hns_refuses_are_listed_in_acls() {
    for pretends in [false, true] {
        let mut node = node();
        node.hns.set_fault(move |call| {
            is_update_of_sets(call).then(|| if pretends { Ok(String::new()) } else { Err(refusal()) })
        });
        let report = node.apply(&[change("s:denied", &[2], &[]), change("s:allowed", &[2, 3], &[])]);
        let reasons: Vec<_> = report.node.iter().map(|conditions| conditions.reason).collect();
        assert_eq!(reasons, [Reason::PolicySetRefused; 2], "{report:?}");
        assert!(report.endpoints.is_empty(), "{report:?}");
        assert_eq!(report.node_failures().next(), None, "policy holds with the addresses spelled out");
        assert_eq!([1, 2, 3].map(|last| lets_in(&node.hns, last)), [false, false, true]);
        assert!(!names_sets(&node));
        // A further change does not touch sets, and for ten minutes none is retried.
        assert!(!node.apply(&[change("s:allowed", &[4], &[3])]).retry);
        assert_eq!([3, 4].map(|last| lets_in(&node.hns, last)), [false, true]);
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
        assert_eq!([1, 2, 3, 4].map(|last| lets_in(&node.hns, last)), [false, false, false, true]);
    }
}

/// A peer moves from one denied set to another, and everybody else is admitted. The list names both all the time.
#[test]
fn a_peer_that_moves_between_sets_is_in_one_of_them_all_the_time() {
    let rules =
        vec![of_set(Action::Deny, "s:one"), of_set(Action::Deny, "s:other"), Rule::all(Action::Allow)];
    let mut node = node_with(rules, ["s:one", "s:other"]);
    node.apply(&[change("s:one", &[2], &[]), change("s:other", &[3], &[])]);
    assert_eq!([1, 2, 3, 4].map(|last| lets_in(&node.hns, last)), [false, false, false, true]);
    let (acls, hns, opened) = (node.acls(), node.hns.clone(), Arc::new(Mutex::new(0)));
    assert!(names_sets(&node));
    let count = Arc::clone(&opened);
    node.hns.set_fault(move |_| {
        *count.lock().unwrap() += usize::from(lets_in(&hns, 2));
        None
    });
    assert_eq!(node.apply(&[change("s:one", &[], &[2]), change("s:other", &[2], &[3])]), Report::default());
    assert_eq!(*opened.lock().unwrap(), 0, "calls of HNS while it was let in");
    assert_eq!([1, 2, 3, 4].map(|last| lets_in(&node.hns, last)), [false, false, true, true]);
    assert_eq!(node.acls(), acls, "by its sets");
}

/// A pod without an HNS endpoint does not keep sets unchanged.
#[test]
fn a_pod_without_an_endpoint_blocks_no_set() {
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
    assert!(lets_in(&node.hns, 5));
    assert_eq!(node.acls(), acls, "by its set");
}

/// An agent that starts while its network has problems leaves the lists unchanged.
#[test]
fn a_failing_network_changes_no_list() {
    let node = node();
    let acls = node.acls();
    let mut restarted = Node::over(node.hns.clone());
    let mut deltas = vec![policy_sets(WindowsPolicySets::Enabled)];
    // The same state, except for a block that the network does not have.
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
    assert_eq!(report.node[0].reason, Reason::NetworkDiffers);
    assert_eq!(node.acls(), acls);
}

/// Unused sets are removed; sets that an unknown endpoint names stay.
#[test]
fn unused_sets_are_removed() {
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

/// Gives the node another pod, which admits everything outside one set with this protocol.
fn connect_other(node: &mut Node, protocol: Protocol) -> EndpointId {
    let id = EndpointId { pod: "other".into(), ..pod_id() };
    let mut pod = attachment(node.namespace());
    (pod.endpoint, pod.container_id) = (id.clone(), "other".into());
    pod.addresses[0].address = std::net::IpAddr::from([10, 244, 3, 6]);
    node.wiring.connect(&pod).unwrap();
    let tiers = vec![tier("default", &["other"], EndOfTier::Deny)];
    let Delta::Endpoint(_, usual) = endpoint(EndpointProgram { ingress: tiers, ..open_program() }) else {
        panic!()
    };
    let (container_id, addresses) = ("other".into(), vec![pod.addresses[0].address]);
    let endpoint = tortie_dataplane::Endpoint { container_id, addresses, ..(*usual).clone() };
    let deltas = [other_policy(protocol), Delta::Endpoint(id.clone(), Arc::new(endpoint))];
    assert_eq!(node.apply(&deltas), Report::default());
    id
}

fn other_policy(protocol: Protocol) -> Delta {
    let [mut deny, mut allow] = [Action::Deny, Action::Allow].map(Rule::all);
    deny.source.sets = vec![SetId::new("s:denied")];
    allow.protocol = Some(protocol);
    policy("other", vec![deny, allow], vec![])
}

fn is_change_of_other(call: &Call) -> bool {
    matches!(call, Call::Modify { id, .. } if *id == endpoint_id("other"))
}

fn refusal() -> Failure {
    Failure::new(HResult::HCN_E_INVALID_POLICY, "no")
}

/// Both sets get a peer that is denied before and after. One of them stays unchanged, because another pod names it
/// whose ACLs HNS does not change: a list with both is never in a mixed state.
#[test]
fn a_held_set_does_not_affect_other_sets() {
    let mut node = node();
    connect_other(&mut node, Protocol::TCP);
    let (hns, opened) = (node.hns.clone(), Arc::new(Mutex::new(0)));
    let count = Arc::clone(&opened);
    node.hns.set_fault(move |call| {
        *count.lock().unwrap() += usize::from(lets_in(&hns, 2));
        is_change_of_other(call).then(|| Err(refusal()))
    });
    let changes = [change("s:denied", &[2], &[]), change("s:allowed", &[2, 3], &[])];
    let report = node.apply(&[[other_policy(Protocol::UDP)].as_slice(), &changes].concat());
    assert_eq!(
        report.node.iter().map(|conditions| conditions.reason).collect::<Vec<_>>(),
        [Reason::PolicySetHeld],
        "{report:?}"
    );
    assert_eq!(report.node_failures().next(), None, "what failed is reported of its endpoint");
    assert_eq!(*opened.lock().unwrap(), 0, "calls of HNS while it was let in");
    assert_eq!([1, 2, 3].map(|last| lets_in(&node.hns, last)), [false, false, true]);
    node.hns.clear_fault();
    node.wait(60);
    assert_eq!(node.dataplane.resync(), Report::default());
    assert_eq!([1, 2, 3].map(|last| lets_in(&node.hns, last)), [false, false, true]);
}

/// A held set is retried as rarely as whatever else failed, and its condition says why.
#[test]
fn a_pod_that_holds_a_set_is_retried_after_its_delay() {
    let mut node = node();
    let other = connect_other(&mut node, Protocol::TCP);
    node.hns.set_fault(|call| is_change_of_other(call).then(|| Err(refusal())));
    node.apply(&[other_policy(Protocol::UDP)]);
    node.apply(&[change("s:denied", &[2], &[])]);
    node.hns.take();
    let mut reasons = BTreeSet::new();
    for _ in 0..120 {
        node.wait(1);
        reasons.insert(node.dataplane.resync().endpoints[&other][0].reason);
    }
    let attempts = node.hns.take_changes().into_iter().filter(is_change_of_other).count();
    assert!((10..20).contains(&attempts), "{attempts} (what changes, and the whole list)");
    assert_eq!(reasons, [Reason::HnsRefused].into());
}
