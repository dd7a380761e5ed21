//! Whoever may annotate a pod gets no other pod's rules and routes (policy decision 50).

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};
use tortie_calc::{Assigned, Calc};
use tortie_dataplane::{EndpointId, NodeState};
use tortie_policy::ALL_NODES;

/// A pod with one address, on a node.
fn pod(name: &str, node: &str, address: &str, reported: bool) -> (Key, Value) {
    let mut metadata = json!({"name": "x", "namespace": "n", "labels": {"pod": name}});
    if !reported {
        metadata["annotations"] = json!({(WorkloadEndpoint::UNREPORTED): "true"});
    }
    let spec = json!({
        "orchestrator": "k8s", "node": node, "pod": name, "endpoint": "eth0", "containerID": "annotated",
        "ipNetworks": [format!("{address}/32")], "interfaceName": format!("cali{name}"),
    });
    let key = Key::namespaced(Kind::WorkloadEndpoint, "n", WorkloadEndpoint::name_for(node, name, "eth0"));
    let (api, kind) = (Kind::WorkloadEndpoint.api_version(), Kind::WorkloadEndpoint.name());
    (key, json!({"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}))
}

/// A block of four addresses with the owners of some of them.
fn block(owners: &[(usize, &str)]) -> (Key, Value) {
    block_of("NODE", owners)
}

/// The same with pods of this node.
fn block_of(node: &str, owners: &[(usize, &str)]) -> (Key, Value) {
    let mut allocations = vec![json!(null); 4];
    owners.iter().enumerate().for_each(|(index, (offset, _))| allocations[*offset] = json!(index));
    let attributes: Vec<Value> = owners
        .iter()
        .map(|(_, pod)| json!({"handle_id": pod, "secondary": {"namespace": "n", "pod": pod, "node": node}}))
        .collect();
    let unallocated: Vec<usize> = (0..4).filter(|offset| allocations[*offset].is_null()).collect();
    let value = json!({
        "cidr": "10.0.0.0/30", "affinity": "host:other", "allocations": allocations,
        "unallocated": unallocated, "attributes": attributes,
    });
    (Key::global(Kind::IpamBlock, "10.0.0.0/30"), value)
}

fn node(name: &str, address: &str) -> (Key, Value) {
    let status = json!({"addresses": [{"type": "InternalIP", "address": address}]});
    (Key::global(Kind::Node, name), json!({"metadata": {"name": name}, "status": status}))
}

fn host(address: &str) -> (Key, Value) {
    let spec = json!({"node": "other", "interfaceName": "eth0", "expectedIPs": [address]});
    (Key::global(Kind::HostEndpoint, "h"), json!({"metadata": {"name": "h"}, "spec": spec}))
}

/// An open pod of this node that takes packets from the pod of each name.
fn server(names: &[&str]) -> Vec<(Key, Value)> {
    let rule = |name: &&str| json!({"action": "Allow", "source": {"selector": format!("pod == '{name}'")}});
    let rules: Vec<Value> = names.iter().map(rule).collect();
    let spec = json!({"selector": "pod == 'server'", "ingress": rules});
    let policy = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec});
    vec![
        pod("server", "own", "10.9.9.9", true),
        (Key::namespaced(Kind::NetworkPolicy, "n", "p"), policy),
        (Key::global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}})),
    ]
}

/// The members of all sets of policies, and the addresses of a pod of this node.
fn counted(state: &NodeState, pod: &str) -> (Vec<String>, Vec<String>) {
    let sets = state.sets.iter().filter(|(id, _)| **id != *ALL_NODES);
    let mut members: Vec<String> =
        sets.flat_map(|(_, (_, all))| all.iter().map(|it| format!("{it:?}"))).collect();
    members.sort();
    let id = EndpointId { namespace: "n".into(), pod: pod.into(), interface: "eth0".into() };
    let local = state.endpoints.get(&id).into_iter().flat_map(|endpoint| &endpoint.addresses);
    (members, local.map(ToString::to_string).collect())
}

#[test]
fn an_annotated_address_counts_if_somebody_else_says_so() {
    let (victim, forged) = ("10.0.0.1", false);
    for (what, objects, remote, local) in [
        ("the kubelet has reported it", vec![pod("a", "NODE", victim, true)], true, true),
        ("IPAM gave it to the pod", vec![block(&[(1, "a")]), pod("a", "NODE", victim, forged)], true, true),
        (
            "IPAM gave it to another one",
            vec![block(&[(1, "b")]), pod("a", "NODE", victim, forged)],
            false,
            false,
        ),
        (
            "IPAM gave it to a pod of this name on another node",
            vec![block_of("third", &[(1, "a")]), pod("a", "NODE", victim, forged)],
            false,
            false,
        ),
        ("IPAM gave it to nobody", vec![block(&[(2, "a")]), pod("a", "NODE", victim, forged)], false, false),
        (
            "the block has other addresses",
            vec![block(&[]), pod("a", "NODE", "10.0.0.4", forged)],
            true,
            false,
        ),
        ("no block has it", vec![pod("a", "NODE", victim, forged)], true, false),
        (
            "another pod has it",
            vec![pod("a", "NODE", victim, forged), pod("v", "other", victim, true)],
            false,
            false,
        ),
        ("a Node has it", vec![pod("a", "NODE", victim, forged), node("third", victim)], false, false),
        ("a HostEndpoint has it", vec![pod("a", "NODE", victim, forged), host(victim)], false, false),
        (
            "another pod claims it, too",
            vec![pod("a", "NODE", victim, forged), pod("v", "other", victim, forged)],
            true,
            false,
        ),
    ] {
        for (of_pod, expected) in [("other", remote), ("own", local)] {
            let mut calc = Calc::new("own");
            let nodes = [node("own", "192.0.2.1"), node("other", "192.0.2.2")];
            for (key, value) in server(&["a"]).into_iter().chain(nodes) {
                calc.update(&key, Some(&value));
            }
            for (key, mut value) in objects.clone() {
                let name = key.name.replace("NODE", of_pod);
                value = serde_json::from_str(&value.to_string().replace("NODE", of_pod)).unwrap();
                calc.update(&Key { name, ..key }, Some(&value));
                calc.flush();
            }
            let (members, of_a) = counted(calc.state(), "a");
            assert_eq!(!members.is_empty(), expected, "{what}, on {of_pod}: {members:?}");
            assert_eq!(!of_a.is_empty(), expected && of_pod == "own", "{what}, on {of_pod}");
        }
    }
}

#[test]
fn a_pod_of_a_node_that_does_not_exist_has_no_annotated_address() {
    let mut calc = Calc::new("own");
    server(&["a"]).iter().for_each(|(key, value)| calc.update(key, Some(value)));
    let (key, value) = pod("a", "other", "192.0.2.7", false);
    calc.update(&key, Some(&value));
    for exists in [false, true, false] {
        let (key, value) = node("other", "192.0.2.1");
        calc.update(&key, exists.then_some(&value));
        calc.flush();
        assert_eq!(!counted(calc.state(), "a").0.is_empty(), exists);
    }
}

/// The agent of a node knows what it has given to its pods, also outside of IPAM, and to which sandbox.
#[test]
fn what_the_own_agent_has_given_counts_at_once() {
    let (mut calc, (key, value)) = (Calc::new("own"), pod("a", "own", "192.0.2.7", false));
    let id = EndpointId { namespace: "n".into(), pod: "a".into(), interface: "eth0".into() };
    calc.update(&key, Some(&value));
    calc.flush();
    assert!(!calc.state().endpoints.contains_key(&id));
    let assigned = Assigned { container_id: "sandbox".into(), addresses: [[192, 0, 2, 7].into()].into() };
    calc.update_assigned(&key, Some(assigned.clone()));
    calc.flush();
    assert_eq!(&*calc.state().endpoints[&id].container_id, "sandbox");
    // The kubelet reports it. The annotation still names another sandbox.
    calc.update(&key, Some(&pod("a", "own", "192.0.2.7", true).1));
    calc.flush();
    assert_eq!(&*calc.state().endpoints[&id].container_id, "sandbox");
    // Somebody names another address before the kubelet does.
    calc.update(&key, Some(&pod("a", "own", "192.0.2.8", false).1));
    calc.flush();
    assert!(!calc.state().endpoints.contains_key(&id));
    calc.update(&key, Some(&value));
    calc.flush();
    assert!(calc.state().endpoints.contains_key(&id));
    calc.update_assigned(&key, None);
    calc.flush();
    assert!(!calc.state().endpoints.contains_key(&id));
    // It counts for nothing on another node.
    let mut other = Calc::new("third");
    other.update_assigned(&key, Some(assigned));
    server(&["a"]).iter().for_each(|(key, value)| other.update(key, Some(value)));
    other.update(&key, Some(&value));
    other.flush();
    assert!(other.state().endpoints.is_empty());
}

/// With another plugin, the address leads to no route, and the pod would have no policy until the kubelet reports it.
#[test]
fn beside_another_plugin_an_annotated_address_counts_on_its_own_node() {
    for (objects, expected) in [
        (vec![pod("a", "own", "192.0.2.7", false)], true),
        (vec![pod("a", "own", "192.0.2.7", false), pod("v", "own", "192.0.2.7", true)], false),
    ] {
        let mut calc = Calc::new("own").with_policy_only();
        objects.iter().for_each(|(key, value)| calc.update(key, Some(value)));
        calc.flush();
        assert_eq!(!counted(calc.state(), "a").1.is_empty(), expected);
    }
}

#[test]
fn claims_to_addresses_of_others_are_named_on_their_own_node() {
    for (node_of_pod, others, expected) in [
        ("own", vec![block(&[(1, "b")])], Some("IPAM has given to another one")),
        ("own", vec![pod("v", "other", "10.0.0.1", true)], Some("another pod has")),
        ("own", vec![node("other", "10.0.0.1")], Some("is an address of a Node")),
        ("other", vec![block(&[(1, "b")])], None),
        // A moment later, the block has it.
        ("own", vec![block(&[])], None),
    ] {
        let mut calc = Calc::new("own");
        let (key, value) = pod("a", node_of_pod, "10.0.0.1", false);
        calc.update(&key, Some(&value));
        others.iter().for_each(|(key, value)| calc.update(key, Some(value)));
        calc.flush();
        let findings = calc.findings();
        assert_eq!(findings.len(), usize::from(expected.is_some()), "{findings:?}");
        let problem = findings.first().map(|finding| finding.problem.as_str()).unwrap_or_default();
        assert!(problem.contains(expected.unwrap_or_default()), "{problem}");
        // The kubelet reports another address, and all is well.
        calc.update(&key, Some(&pod("a", node_of_pod, "10.0.0.2", true).1));
        calc.flush();
        assert_eq!(calc.findings(), []);
    }
}
