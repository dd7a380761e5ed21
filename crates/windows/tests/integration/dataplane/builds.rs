//! The behaviour of certain builds of HNS: they drop ids of ACLs, or are not ready for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::dataplane::node::*;
use serde_json::Value;
use tortie_dataplane::{Delta, HostEndpoint, PodWiring, Reason};
use tortie_hcn::schema::{Acl, Modify, Policy, RequestType};
use tortie_hcn::{Call, Failure, HResult, Hcn, HcnExt, Kind};
use tortie_policy::program::EndpointProgram;
use tortie_windows::endpoint_id;

/// The policies of the pod's endpoint, with each ACL replaced by the result of `change`.
fn policies(node: &Node, change: impl Fn(Acl) -> Option<Acl>) -> Vec<Policy> {
    let policies = node.hns.inner().endpoint(endpoint_id(CONTAINER)).unwrap().policies;
    let changed = |policy: Policy| match policy.settings::<Acl>().unwrap() {
        Some(acl) => change(acl).map(|acl| Policy::of(&acl)),
        None => Some(policy),
    };
    policies.into_iter().filter_map(changed).collect()
}

#[test]
fn acls_without_ids_and_missing_acls_are_restored() {
    let mut node = Node::usual();
    node.connect();
    let deltas = [local_node(), own_block(), allow_all(), endpoint(open_program())];
    assert_eq!(node.apply(&deltas), Default::default());
    let acls = node.acls();
    let without_ids = policies(&node, |acl| Some(Acl { id: String::new(), ..acl }));
    let one_less = policies(&node, |acl| (!acl.id.ends_with("allow-all")).then_some(acl));
    for instead in [without_ids, one_less] {
        let update = Modify::policies(RequestType::Update, instead);
        node.hns.inner().modify_endpoint(endpoint_id(CONTAINER), &update).unwrap();
        assert_ne!(node.acls(), acls);
        assert_eq!(node.dataplane.resync(), Default::default());
        let mut now = node.acls();
        now.sort_by_key(|acl| acls.iter().position(|other| other == acl));
        assert_eq!(now, acls, "each once, with its id");
        node.hns.take();
        node.dataplane.resync();
        assert_eq!(node.hns.take_changes(), []);
    }
}

/// A build that keeps no ids: nothing accumulates, permissions disappear with their policy, and it is reported.
#[test]
fn a_build_that_drops_all_ids_keeps_no_old_acl() {
    let mut node = Node::usual();
    node.connect();
    let inner = Arc::clone(&node.hns);
    node.hns.set_fault(move |call| match call {
        Call::Modify { kind: Kind::Endpoint, settings, .. } if settings.contains("ACL") => {
            let mut document: Value = serde_json::from_str(settings).unwrap();
            for policy in document["Settings"]["Policies"].as_array_mut().unwrap() {
                policy["Settings"].as_object_mut().unwrap().remove("Id");
            }
            let mut changed = call.clone();
            if let Call::Modify { settings, .. } = &mut changed {
                *settings = document.to_string();
            }
            Some(inner.inner().call(&changed))
        }
        _ => None,
    });
    let report = node.apply(&[local_node(), own_block(), allow_all(), endpoint(open_program())]);
    assert_eq!(report.endpoints[&pod_id()][0].reason, Reason::HnsDidNotTake);
    let count = node.acls().len();
    for _ in 0..3 {
        node.wait(700);
        assert!(node.dataplane.resync().retry);
        assert_eq!(node.acls().len(), count, "nothing piles up");
    }
    node.apply(&[endpoint(EndpointProgram::default())]);
    let allows = node.acls().iter().filter(|acl| acl.action == tortie_hcn::schema::AclAction::Allow).count();
    let fresh = {
        let mut other = Node::usual();
        other.connect();
        other.apply(&[local_node(), own_block(), allow_all(), endpoint(EndpointProgram::default())]);
        other.acls().iter().filter(|acl| acl.action == tortie_hcn::schema::AclAction::Allow).count()
    };
    assert_eq!(allows, fresh, "{:#?}", node.acls());
}

/// Makes the first calls of this kind fail.
fn fail_first(node: &Node, times: usize, code: HResult, which: fn(&Call) -> bool) -> Arc<AtomicUsize> {
    let attempts = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&attempts);
    node.hns.set_fault(move |call| {
        let fails = which(call) && counter.fetch_add(1, Ordering::Relaxed) < times;
        fails.then(|| Err(Failure::new(code, "not yet")))
    });
    attempts
}

#[test]
fn a_pod_is_connected_when_hns_becomes_ready() {
    let creates = |call: &Call| matches!(call, Call::Create { kind: Kind::Endpoint, .. });
    let node = Node::usual();
    let attempts = fail_first(&node, 3, HResult::HCN_E_SWITCH_NOT_FOUND, creates);
    node.connect();
    assert_eq!(attempts.load(Ordering::Relaxed), 4);

    let node = Node::usual();
    let attempts = fail_first(&node, usize::MAX, HResult::HCN_E_PORT_NOT_FOUND, creates);
    assert!(node.wiring.connect(&attachment(node.namespace())).is_err());
    assert_eq!(attempts.load(Ordering::Relaxed), 5, "it is not repeated for ever");

    let node = Node::usual();
    let attempts = fail_first(&node, usize::MAX, HResult::HCN_E_INVALID_ENDPOINT, creates);
    assert!(node.wiring.connect(&attachment(node.namespace())).is_err());
    assert_eq!(attempts.load(Ordering::Relaxed), 1, "a refusal stays one");
}

#[test]
fn a_missing_network_is_requested_with_growing_delays() {
    let mut node = Node::usual();
    let network = node.hns.inner().network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    node.hns.inner().delete_network(network.id).unwrap();
    let creates = |call: &Call| matches!(call, Call::Create { kind: Kind::Network, .. });
    let attempts = fail_first(&node, usize::MAX, HResult::HCN_E_ADAPTER_NOT_FOUND, creates);
    let deltas = [local_node(), own_block()];
    assert!(node.apply(&deltas).retry);
    for _ in 0..120 {
        let report = node.dataplane.resync();
        assert!(report.retry && report.node[0].reason == Reason::HnsRefused, "{report:?}");
        node.wait(1);
    }
    let attempts = attempts.load(Ordering::Relaxed);
    assert!((6..=10).contains(&attempts), "{attempts} times in two minutes");
    node.hns.clear_fault();
    node.wait(60);
    assert!(node.dataplane.resync().node.iter().all(|it| it.reason != Reason::HnsRefused));
    assert!(node.hns.inner().network_by_name(tortie_windows::NETWORK).unwrap().is_some());
}

/// Host endpoints concern the node's own adapter, which HNS does not police: the node reports it (policy decision
/// 27).
#[test]
fn host_endpoints_are_reported_as_not_enforced() {
    let mut node = Node::usual();
    let endpoint =
        HostEndpoint { interface: Some("*".into()), addresses: vec![], program: Default::default() };
    let report = node.apply(&[Delta::HostEndpoint("h".into(), endpoint.into())]);
    let reported = report.node.iter().find(|reported| reported.reason == Reason::HostEndpointNotEnforced);
    assert!(
        reported.is_some_and(|reported| reported.to_string().starts_with("HostEndpoint h: not enforced")),
        "{:?}",
        report.node
    );
    assert_eq!(report.node_failures().count(), 0, "{:?}", report.node);
}
