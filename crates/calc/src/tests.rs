//! Properties that results do not show: indexes forget removed objects, and lookups use indexes.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_dataplane::NodeState;
use tortie_selector::Selector;

use crate::Calc;

#[path = "../tests/integration/random_objects/mod.rs"]
mod random_objects;

fn any_object() -> impl Strategy<Value = (Key, Value)> {
    use random_objects::{block_of_pods, claim, object};
    prop_oneof![4 => object(), 1 => claim(), 1 => block_of_pods()]
}

proptest! {
    /// An index that does not forget gives correct results, and grows forever.
    #[test]
    fn deleted_objects_leave_nothing_behind(
        objects in prop::collection::vec((any_object(), any::<bool>(), any::<bool>()), 0..60),
    ) {
        let mut calc = Calc::new("n0").with_services();
        for ((key, value), stays, flush) in &objects {
            calc.update(key, Some(value));
            if !stays {
                calc.update(key, None);
            }
            if *flush {
                calc.flush();
                prop_assert!(calc.subjects.memberships().all(|set| calc.sets.knows(set)), "of a set that is gone");
            }
        }
        for ((key, _), ..) in &objects {
            calc.update(key, None);
        }
        calc.flush();
        prop_assert!(calc.subjects.is_empty() && calc.policies.is_empty() && calc.sets.is_empty());
        prop_assert!(calc.network.is_empty() && calc.claims.is_empty());
        prop_assert!(calc.services.as_ref().is_some_and(crate::services::Services::is_empty));
        prop_assert!(calc.in_use.is_empty() && calc.problems.is_empty() && calc.findings().is_empty());
    }
}

/// With another CNI plugin, policy is as usual, and there is nothing else.
#[test]
fn policy_only_leaves_out_overlay_routes_pools_and_ports_of_the_node() {
    let mut objects = Vec::new();
    let mut put = |kind, name: &str, value: Value| objects.push((Key::global(kind, name), value));
    for (node, number) in [("n0", 1), ("n1", 2)] {
        let annotations = json!({
            "projectcalico.org/IPv4Address": format!("192.0.2.{number}/24"),
            "projectcalico.org/IPv4VXLANTunnelAddr": format!("10.1.{number}.0"),
        });
        put(Kind::Node, node, json!({"metadata": {"name": node, "annotations": annotations}}));
        let block = format!("10.1.{number}.0/30");
        let value = json!({"cidr": block, "affinity": format!("host:{node}"), "allocations": [null, null, null, null], "unallocated": [0, 1, 2, 3], "attributes": []});
        put(Kind::IpamBlock, &block, value);
    }
    let pool = json!({"cidr": "10.1.0.0/16", "vxlanMode": "Always", "natOutgoing": true});
    put(Kind::IpPool, "pool", json!({"metadata": {"name": "pool"}, "spec": pool}));
    put(Kind::Namespace, "ns", json!({"metadata": {"name": "ns"}}));
    let (key, mut value) = pod("ns", "n0", "p", "x");
    value["spec"]["ports"] = json!([{"name": "http", "protocol": "TCP", "port": 80, "hostPort": 8080}]);
    objects.push((key, value));
    let policy = json!({"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]});
    let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "ns", "policy");
    objects.push((key, json!({"metadata": {"name": "policy"}, "spec": policy})));
    let state = |mut calc: Calc| {
        objects.iter().for_each(|(key, value)| calc.update(key, Some(value)));
        calc.flush();
        calc.state().clone()
    };
    let (usual, only) = (state(Calc::new("n0")), state(Calc::new("n0").with_policy_only()));
    let host_ports =
        |state: &NodeState| state.endpoints.values().map(|it| it.host_ports.len()).sum::<usize>();
    let vteps =
        |state: &NodeState| state.node.iter().flat_map(|node| node.vteps()).count() + state.vteps.len();
    let counts =
        |state: &NodeState| (state.routes.len(), vteps(state), state.settings.pools.len(), host_ports(state));
    assert_eq!(counts(&usual), (2, 2, 1, 1));
    assert_eq!(counts(&only), (0, 0, 0, 0));
    assert_eq!((&only.policies, &only.sets), (&usual.policies, &usual.sets));
    let programs =
        |state: &NodeState| state.endpoints.values().map(|it| it.program.clone()).collect::<Vec<_>>();
    assert_eq!((programs(&only), only.policies.len()), (programs(&usual), 1));
}

/// Nobody annotates the Node there. What the kubelet reports is the node's own, which is never closed.
#[test]
fn policy_only_knows_the_nodes_addresses_from_the_kubelet() {
    let addresses = json!([{"type": "Hostname", "address": "n0"}, {"type": "ExternalIP", "address": "203.0.113.1"},
        {"type": "InternalIP", "address": "192.0.2.1"}, {"type": "InternalIP", "address": "fd00::1"}]);
    let node = json!({"metadata": {"name": "n0"}, "status": {"addresses": addresses}});
    let own = |mut calc: Calc| {
        calc.update(&Key::global(Kind::Node, "n0"), Some(&node));
        calc.flush();
        let node = calc.state().node.clone();
        node.into_iter()
            .flat_map(|node| node.ends.into_values().map(|end| end.address.to_string()))
            .collect::<Vec<_>>()
    };
    assert_eq!(own(Calc::new("n0").with_policy_only()), ["192.0.2.1", "fd00::1"]);
    assert_eq!(own(Calc::new("n0")), [""; 0], "its agent announces one");
}

/// Namespaces with two pods each, one of them on the node, and a policy that admits the neighbours.
fn cluster(namespaces: usize) -> Calc {
    let mut calc = Calc::new("n0");
    for number in 0..namespaces {
        let (name, neighbour) = (format!("ns{number}"), format!("ns{}", (number + 1) % namespaces));
        let namespace = json!({"metadata": {"name": name, "labels": {"app": name}}});
        calc.update(&Key::global(Kind::Namespace, &name), Some(&namespace));
        let from = json!([{"namespaceSelector": {"matchLabels": {"app": neighbour}}}]);
        let spec = json!({"podSelector": {"matchLabels": {"a": "x"}}, "ingress": [{"from": from}]});
        let policy = json!({"metadata": {"name": "p"}, "spec": spec});
        calc.update(&Key::namespaced(Kind::KubernetesNetworkPolicy, &name, "p"), Some(&policy));
        for node in ["n0", "n1"] {
            let (key, value) = pod(&name, node, "p", "x");
            calc.update(&key, Some(&value));
        }
    }
    calc.flush();
    calc
}

fn pod(namespace: &str, node: &str, name: &str, label: &str) -> (Key, Value) {
    let object = tortie_api::calico::WorkloadEndpoint::name_for(node, name, "eth0");
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": object, "namespace": namespace, "labels": {"a": label}},
        "spec": {"node": node, "pod": name, "endpoint": "eth0", "ipNetworks": ["10.0.0.1/32"]},
    });
    (Key::namespaced(Kind::WorkloadEndpoint, namespace, object), value)
}

/// A node's memory depends on it, because most pods are one of many.
#[test]
fn pods_with_the_same_policies_share_a_program() {
    let mut calc = cluster(2);
    for (name, label) in [("q", "x"), ("r", "x"), ("s", "y")] {
        let (key, value) = pod("ns1", "n0", name, label);
        calc.update(&key, Some(&value));
    }
    calc.flush();
    let endpoints = calc.state().endpoints.iter().filter(|(id, _)| *id.namespace == *"ns1");
    let programs: Vec<_> = endpoints.map(|(_, endpoint)| &endpoint.program).collect();
    let [before, q, r, s] = programs[..] else { panic!("{programs:?}") };
    assert!(Arc::ptr_eq(q, r) && q != s);
    assert_eq!(before, q, "the same, though made before");
}

/// Shared values must be forgotten, too.
#[test]
fn unused_labels_are_forgotten() {
    let mut calc = cluster(2);
    for number in 0..1_000 {
        let (key, value) = pod("ns1", "n1", "p", &number.to_string());
        calc.update(&key, Some(&value));
    }
    let kept = calc.subjects.labels_kept();
    assert!(kept <= 5, "{kept} for two kinds of pod");
}

/// A change must cost what it touches, however large the cluster is, so few selectors are evaluated.
#[test]
fn the_number_of_evaluations_does_not_grow_with_the_cluster() {
    for namespaces in [10, 300] {
        let calc = cluster(namespaces);
        // And that of all nodes.
        assert_eq!(calc.state().sets.len(), namespaces + 1);
        let key = Key::namespaced(Kind::WorkloadEndpoint, "ns7", "n0-k8s-p-eth0");
        let subject = calc.subjects.number(&key).and_then(|no| calc.subjects.get(no)).unwrap();
        let (policies, sets) =
            (calc.policies.candidates(&subject.labels), calc.sets.candidates(&subject.labels));
        assert!(policies <= 3 && sets <= 3, "{policies} policies and {sets} sets of {namespaces} namespaces");

        for (selector, most) in [
            ("a == 'x' && projectcalico.org/namespace == 'ns7'", 2),
            ("a == 'x' && pcns.app == 'ns7'", 2),
            ("a == 'x' && pcns.kubernetes.io/metadata.name in {'ns7', 'ns8'}", 4),
            ("a == 'x' && has(nobody)", 0),
            ("a == 'x'", 2 * namespaces),
            ("a != 'x'", 2 * namespaces),
        ] {
            let selector: Selector = selector.parse().unwrap();
            let demands = selector.restrictions();
            assert_eq!(calc.subjects.candidates(&demands).len(), most, "{selector}");
            let local = calc.subjects.local_candidates(&demands).len();
            assert!(local <= most.min(namespaces), "{local} endpoints for {selector}");
        }
    }
}
