//! Pods whose endpoints have lost their ACLs, before an agent knows the node's state.

use crate::dataplane::node::*;
use tortie_api::net::Direction;
use tortie_api::net::{Action, Protocol};
use tortie_dataplane::{Hold, NodeState, Report, SavedState};
use tortie_hcn::{Failure, HResult, HcnExt, schema};
use tortie_hns_emulator::Survives;
use tortie_policy::program::{EndOfTier, EndpointProgram, Flow, Rule};
use tortie_windows::HeldEndpoints;

const PEER: [u8; 4] = [10, 244, 7, 9];

/// A node with the pod. A policy, if there is one, allows all ingress.
fn node(has_policy: bool) -> Node {
    let mut node = Node::usual();
    node.connect();
    let ingress = has_policy.then(|| tier("default", &["web"], EndOfTier::Deny));
    let program = EndpointProgram { ingress: ingress.into_iter().collect(), ..open_program() };
    let rules = policy("web", vec![Rule::all(Action::Allow)], vec![]);
    let report = node.apply(&[local_node(), own_block(), allow_all(), rules, endpoint(program)]);
    assert_eq!(report, Report::default());
    node
}

/// Whether packets that begin a flow pass: into the pod, and out of it.
fn passes(node: &Node) -> [bool; 2] {
    let out = Flow {
        source: POD.into(),
        destination: PEER.into(),
        protocol: Protocol::TCP,
        source_port: 1,
        destination_port: 2,
        icmp: None,
    };
    [node.passes(Direction::Ingress, &back(out)), node.passes(Direction::Egress, &out)]
}

fn saved(node: &Node) -> NodeState {
    SavedState::of(&node.state).into_state()
}

#[test]
fn a_pod_with_policy_is_closed_if_its_acls_are_gone() {
    for (has_policy, survives) in
        [(true, Survives::AllButAcls), (true, Survives::AllButAclsAndSets), (false, Survives::AllButAcls)]
    {
        let mut node = node(has_policy);
        let before = passes(&node);
        assert_eq!(before, [true, true]);
        let mut hold = HeldEndpoints::new(node.hns.clone());
        node.hns.take();
        assert!(!hold.hold(&saved(&node)).unwrap(), "policy is in force");
        assert_eq!(node.hns.take_changes(), []);

        node.hns.inner().restart(survives).unwrap();
        assert!(!hold.hold(&saved(&node)).unwrap(), "it has just looked");
        let mut hold = HeldEndpoints::new(node.hns.clone());
        assert_eq!(hold.hold(&saved(&node)).unwrap(), has_policy);
        assert_eq!(passes(&node), [!has_policy; 2]);
        let mut hold = HeldEndpoints::new(node.hns.clone());
        node.hns.take();
        assert!(!hold.hold(&saved(&node)).unwrap(), "what it has closed is in force");
        assert_eq!(node.hns.take_changes(), []);

        node.wait(60);
        assert_eq!(node.dataplane.resync(), Report::default());
        assert_eq!(passes(&node), before, "the dataplane takes over");
    }
}

#[test]
fn what_hns_does_not_answer_or_have_is_no_success() {
    let node = node(true);
    node.hns.inner().restart(Survives::AllButAcls).unwrap();
    node.hns.set_fault(|_| Some(Err(Failure::new(HResult::RPC_S_SERVER_UNAVAILABLE, "it has stopped"))));
    let mut hold = HeldEndpoints::new(node.hns.clone());
    assert!(hold.hold(&saved(&node)).unwrap_err().to_string().contains("it has stopped"));
    node.hns.set_fault(|call| {
        (!call.is_read()).then(|| Err(Failure::new(HResult::E_INVALIDARG, "no ACL today")))
    });
    let mut hold = HeldEndpoints::new(node.hns.clone());
    let error = hold.hold(&saved(&node)).unwrap_err().to_string();
    assert!(error.contains("no ACL today"), "{error}");
    node.hns.clear_fault();
    node.hns.inner().delete_endpoint(tortie_windows::endpoint_id(CONTAINER)).unwrap();
    let mut hold = HeldEndpoints::new(node.hns.clone());
    assert!(!hold.hold(&saved(&node)).unwrap(), "the pod has ended");
}

/// The saved state may be lost, or the pod may be new. The node's own endpoints have other names.
#[test]
fn a_pod_that_is_not_saved_is_closed_and_the_nodes_own_endpoint_is_not() {
    let node = node(false);
    let network = node.hns.network_by_name(tortie_windows::NETWORK).unwrap().unwrap();
    let own = schema::Endpoint {
        name: "Calico_ep".to_owned(),
        host_compute_network: network.id,
        ..schema::Endpoint::default()
    };
    let own = node.hns.create_endpoint(&own).unwrap();
    node.hns.inner().restart(Survives::AllButAcls).unwrap();
    let mut hold = HeldEndpoints::new(node.hns.clone());
    assert!(hold.hold(&SavedState::unknown().into_state()).unwrap());
    assert_eq!(passes(&node), [false, false]);
    let of_own = node.hns.endpoint(own).unwrap().policies;
    assert!(of_own.iter().all(|policy| policy.settings::<schema::Acl>().unwrap().is_none()), "{of_own:?}");
}
