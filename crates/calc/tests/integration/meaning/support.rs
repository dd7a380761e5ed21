//! A small cluster, and both ways to a verdict in it.

use std::net::IpAddr;

use serde_json::{Value, json};
use tortie_api::net::{Direction, Protocol};
use tortie_api::{Key, Kind, manifest};
use tortie_calc::Calc;
use tortie_dataplane::EndpointId;
use tortie_oracle::{Peer, Question, Snapshot, Verdict};
use tortie_policy::program::{Flow, evaluate};

/// Pods of namespace `web` (label `team=a`) and `db` (label `team=b`), all on one node; `namespace/name` → address.
pub(crate) const PODS: [(&str, &str, &str, &str); 5] = [
    ("web/front", "10.0.0.1", "app=front", "default"),
    ("web/back", "10.0.0.2", "app=back", "runner"),
    ("db/main", "10.0.0.3", "app=db,tier=main", "default"),
    ("db/copy", "10.0.0.4", "app=db", "default"),
    ("lost/pod", "10.0.0.5", "app=front", "default"),
];
pub(crate) const OUTSIDE: &str = "203.0.113.9";

/// The cluster with these policies, as objects.
pub(crate) fn objects(policies: &str) -> Vec<(Key, Value)> {
    let mut objects = Vec::new();
    for (name, team) in [("web", "a"), ("db", "b")] {
        let value = json!({"metadata": {"name": name, "labels": {"team": team}}});
        objects.push((Key::global(Kind::Namespace, name), value));
    }
    let account = json!({"metadata": {"name": "runner", "namespace": "web", "labels": {"trusted": "yes"}}});
    objects.push((Key::namespaced(Kind::ServiceAccount, "web", "runner"), account));
    for (pod, address, labels, account) in PODS {
        let (namespace, name) = pod.split_once('/').unwrap();
        let labels: Value = labels
            .split(',')
            .map(|label| label.split_once('=').unwrap())
            .map(|(k, v)| (k.to_owned(), json!(v)))
            .collect::<serde_json::Map<_, _>>()
            .into();
        let value = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint", "metadata": {"name": name, "labels": labels},
            "spec": {
                "node": "n", "pod": name, "endpoint": "eth0", "serviceAccountName": account, "ipNetworks": [format!("{address}/32")],
                "profiles": [format!("kns.{namespace}")],
                "ports": [{"name": "sql", "protocol": "TCP", "port": if name == "copy" { 5433 } else { 5432 }}],
            },
        });
        let key = tortie_api::calico::WorkloadEndpoint::name_for("n", name, "eth0");
        objects.push((Key::namespaced(Kind::WorkloadEndpoint, namespace, key), value));
    }
    // Stored by somebody without validation: labels that it must not have, and unreadable parts.
    let value = json!({
        "metadata": {"name": "impostor", "namespace": "lost", "labels": {
            "pcns.team": "a", "projectcalico.org/serviceaccount": "runner", "pcsa.trusted": "yes",
        }},
        "spec": {"nets": [format!("{OUTSIDE}/32"), "fast", "10.0.0.300/8"], "colour": "blue"},
    });
    objects.push((Key::namespaced(Kind::NetworkSet, "lost", "impostor"), value));
    for object in manifest::read("policies.yml", policies).unwrap_or_else(|problems| panic!("{problems:?}")) {
        objects.push((object.key, object.value));
    }
    objects
}

pub(crate) fn calc_of(policies: &str) -> Calc {
    let mut calc = Calc::new("n");
    for (key, value) in objects(policies) {
        calc.update(&key, Some(&value));
    }
    calc.flush();
    calc
}

pub(crate) fn address(name: &str) -> IpAddr {
    let pod = PODS.iter().find(|(pod, ..)| *pod == name).map(|(_, address, ..)| address.parse().unwrap());
    pod.or_else(|| name.parse().ok()).unwrap_or_else(|| OUTSIDE.parse().unwrap())
}

/// Whether a flow passes: the source's egress and the destination's ingress both allow (5).
pub(crate) fn passes(calc: &Calc, from: &str, to: &str, port: &str) -> bool {
    let (protocol, number) = port.split_once('/').unwrap();
    let protocol = Protocol::from_name(protocol).unwrap();
    let number: u16 = number.parse().unwrap();
    let icmp = (protocol == Protocol::ICMP).then(|| (u8::try_from(number).unwrap(), 0));
    let destination_port = if icmp.is_some() { 0 } else { number };
    let flow = Flow {
        source: address(from),
        destination: address(to),
        protocol,
        source_port: 40_000,
        destination_port,
        icmp,
    };
    let judge = |pod: &str, direction| {
        let Some((namespace, name)) = pod.split_once('/') else { return true };
        let id = EndpointId { namespace: namespace.into(), pod: name.into(), interface: "eth0".into() };
        let endpoint = &calc.state().endpoints[&id];
        evaluate(&endpoint.program, direction, &flow, calc.state())
    };
    judge(from, Direction::Egress) && judge(to, Direction::Ingress)
}

/// The same by the oracle, from the resources themselves.
pub(crate) fn oracle_says(objects: &[(Key, Value)], from: &str, to: &str, port: &str) -> bool {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let (protocol, number) = port.split_once('/').unwrap();
    let (protocol, number) = (Protocol::from_name(protocol).unwrap(), number.parse::<u16>().unwrap());
    let icmp = (protocol == Protocol::ICMP).then(|| (u8::try_from(number).unwrap(), 0));
    let peer = |name: &str| match name.split_once('/') {
        Some((namespace, name)) => Peer::Pod { namespace: namespace.into(), name: name.into() },
        None => Peer::Address(address(name)),
    };
    let destination_port = if icmp.is_some() { 0 } else { number };
    let question = Question {
        from: peer(from),
        to: peer(to),
        protocol,
        source_port: 40_000,
        destination_port,
        icmp,
        via: None,
        by_node: None,
    };
    tortie_oracle::evaluate(&snapshot, &question).unwrap().verdict == Verdict::Allow
}

pub(crate) fn calico(namespace: &str, name: &str, spec: &str) -> String {
    let kind = if namespace.is_empty() { "GlobalNetworkPolicy" } else { "NetworkPolicy" };
    let namespace = if namespace.is_empty() { String::new() } else { format!(", namespace: {namespace}") };
    format!(
        "---\napiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: '{name}'{namespace}}}\nspec: {spec}\n"
    )
}

pub(crate) fn tier(name: &str, spec: &str) -> String {
    format!("---\napiVersion: projectcalico.org/v3\nkind: Tier\nmetadata: {{name: '{name}'}}\nspec: {spec}\n")
}

pub(crate) fn cluster(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: '{name}'}}\nspec: {spec}\n"
    )
}

pub(crate) fn kubernetes(namespace: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: k, namespace: {namespace}}}\nspec: {spec}\n"
    )
}

/// The verdict of both on a flow, which must be the same.
pub(crate) fn both_say(objects: &[(Key, Value)], flow: &str) -> bool {
    let mut calc = Calc::new("n");
    for (key, value) in objects {
        calc.update(key, Some(value));
    }
    calc.flush();
    let (from, rest) = flow.split_once(" > ").unwrap();
    let (to, port) = rest.split_once(' ').unwrap();
    let (program, oracle) = (passes(&calc, from, to, port), oracle_says(objects, from, to, port));
    assert_eq!(program, oracle, "{flow}: the program, the oracle");
    program
}
