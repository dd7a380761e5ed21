//! Tables that close pods before the node's state is known.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use tortie_api::net::Protocol;
use tortie_dataplane::{Dataplane as _, Hold, HostPort, NodeState, SavedState};
use tortie_kernel::namespace::NetNs;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::{Config, HeldTable};
use tortie_policy::program::EndOfTier;

use super::dual_stack::{dual_nodes, is_cut_off_v6, pod_v6, reaches_v6};
use super::table::change_orphan;
use crate::common::cluster::*;

#[test]
fn a_held_table_counts_as_none_until_the_state_is_in_force() {
    let namespace = NetNs::create().unwrap();
    let saved = SavedState::default().into_state();
    let open = || namespace.run(|| HeldTable::open(Config::default()).unwrap()).unwrap();
    let hold = |held: &mut HeldTable| {
        once_released(|| namespace.run(|| held.hold(&saved)).unwrap().map_err(|error| format!("{error:?}")))
    };
    for of in ["the first process", "the process after a crash of the first one"] {
        let mut held = open();
        assert!(hold(&mut held), "{of}");
        assert!(!hold(&mut held), "{of} looks again");
    }
    let state = NodeState::default();
    let mut dataplane = namespace.run(|| Dataplane::open(Config::default()).unwrap()).unwrap();
    once_released(|| {
        let report = namespace.run(|| dataplane.resync(&state)).unwrap();
        match report.conditions().any(|condition| condition.reason.is_failure()) {
            true => Err(format!("{report:?}")),
            false => Ok(()),
        }
    });
    drop(dataplane);
    assert!(!hold(&mut open()), "a process after the state was in force");
}

/// Repeats an attempt for ten seconds. The kernel frees the table of a closed socket when its last copy is closed, and another thread of this
/// program that starts a process has one between `fork` and `exec`.
fn once_released<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        sleep(Duration::from_millis(10));
    }
}

/// Policy denies ingress to the pod. Its flow from before continues, as after a change of policy (decision 20).
#[test]
fn closed_pods_are_closed_for_both_families_and_by_ports_of_the_node() {
    let ([mut node, other], [pod, remote]) = dual_nodes();
    let to_node = |port| other.namespace.run(|| connect(node_address(1), port)).unwrap();
    let port = HostPort { protocol: Protocol::TCP, address: None, port: 8080, pod_port: 80 };
    node.change(|state| {
        let endpoint = Arc::make_mut(state.endpoints.get_mut(&pod.id()).unwrap());
        endpoint.host_ports = [port].into();
    });
    assert!(remote.reaches(&pod, 80) && reaches_v6(&remote.namespace, pod_v6(&pod), 81));
    assert!(to_node(8080).is_some_and(|stream| answers(&stream)));
    let established = remote.connect(pod.address, 80).unwrap();
    node.program(&pod, ingress(&[], EndOfTier::Deny));
    let saved = SavedState::of(&node.state).into_state();
    let Node { namespace, dataplane, .. } = node;
    drop(dataplane);

    change_orphan(&namespace, &["delete", "table", "inet", "tortie"]);
    assert!(remote.reaches(&pod, 80), "nothing is closed without the table");
    let mut held = namespace.run(|| HeldTable::open(Config::default()).unwrap()).unwrap();
    assert!(namespace.run(|| held.hold(&saved).unwrap()).unwrap());
    assert!(remote.is_cut_off(pod.address, 80), "IPv4, by VXLAN");
    assert!(is_cut_off_v6(&remote.namespace, pod_v6(&pod), 81), "IPv6, by VXLAN");
    assert!(other.is_cut_off(node_address(1), 8080), "by the port of the node");
    assert!(
        namespace.run(|| !is_cut_off(pod.address, 80)).unwrap(),
        "its own node, whose probes pass (decision 2)"
    );
    assert!(answers(&established), "a flow from before");
    assert!(
        pod.reaches(&remote, 80) && reaches_v6(&pod.namespace, pod_v6(&remote), 81),
        "no policy for egress"
    );
}
