//! Kubernetes' network policies as Calico keeps them in etcd (`libcalico-go/lib/backend/k8s/conversion/conversion.go` and
//! `kube-controllers/pkg/converter/networkpolicy_converter.go`).

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use tortie_api::calico::PolicyType;
use tortie_api::kubernetes::{
    IntOrString, KubernetesNetworkPolicy, LabelSelector, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicyRule, Requirement,
};
use tortie_api::{Key, Kind, Resource};

/// The prefix of the copies' names.
pub(crate) const PREFIX: &str = "knp.default.";
/// The order of these policies among Calico's.
const ORDER: f64 = 1000.0;
/// The first criterion of every selector for pods.
const PODS: &str = "projectcalico.org/orchestrator == 'k8s'";

/// The key of the copy of a policy.
pub(crate) fn copy_of(policy: &Key) -> Key {
    Key::namespaced(Kind::NetworkPolicy, &policy.namespace, format!("{PREFIX}{}", policy.name))
}

/// The `spec` of the copy. A policy that cannot be understood becomes one that denies everything to the pods that the
/// readable part of its selector allows.
pub(crate) fn spec(key: &Key, value: &Value) -> Value {
    match Resource::read(key, value) {
        Ok(Resource::KubernetesNetworkPolicy(policy)) => understood(&policy),
        _ => {
            let pods = LabelSelector::readable(&value["spec"]["podSelector"]).unwrap_or_default();
            of_tier(&pods, &[PolicyType::Ingress, PolicyType::Egress])
        }
    }
}

fn understood(policy: &KubernetesNetworkPolicy) -> Value {
    let types = policy.effective_types();
    let mut spec = of_tier(&policy.spec.pod_selector, &types);
    for (of, field, peer_side, rules) in [
        (PolicyType::Ingress, "ingress", "source", &policy.spec.ingress),
        (PolicyType::Egress, "egress", "destination", &policy.spec.egress),
    ] {
        if types.contains(&of) && !rules.is_empty() {
            let rules: Vec<Value> = rules.iter().flat_map(|rule| of_rule(rule, peer_side)).collect();
            spec[field] = Value::Array(rules);
        }
    }
    spec
}

fn of_tier(pods: &LabelSelector, types: &[PolicyType]) -> Value {
    let types: Vec<&str> = types
        .iter()
        .map(|of| match of {
            PolicyType::Ingress => "Ingress",
            PolicyType::Egress => "Egress",
        })
        .collect();
    json!({"tier": "default", "order": ORDER, "selector": of_pods(Some(pods)), "types": types})
}

/// One rule for each protocol and peer.
fn of_rule(rule: &NetworkPolicyRule, peer_side: &str) -> Vec<Value> {
    let peers: Vec<Value> = match rule.peers.as_slice() {
        [] => vec![json!({})],
        peers => peers.iter().map(of_peer).collect(),
    };
    let mut rules = Vec::new();
    for (protocol, ports) in by_protocol(&rule.ports) {
        for peer in &peers {
            let mut rule = json!({"action": "Allow", "source": {}, "destination": {}});
            rule[peer_side] = peer.clone();
            if let Some(protocol) = protocol {
                rule["protocol"] = json!(protocol);
            }
            if !ports.is_empty() {
                rule["destination"]["ports"] = json!(ports);
            }
            rules.push(rule);
        }
    }
    rules
}

/// The ports of each protocol; none means all. Without any entry, the protocol does not matter.
fn by_protocol(ports: &[NetworkPolicyPort]) -> Vec<(Option<&str>, Vec<Value>)> {
    if ports.is_empty() {
        return vec![(None, Vec::new())];
    }
    let mut protocols: BTreeMap<&str, Vec<&NetworkPolicyPort>> = BTreeMap::new();
    for port in ports {
        protocols.entry(port.protocol.as_deref().unwrap_or("TCP")).or_default().push(port);
    }
    protocols.into_iter().map(|(protocol, ports)| (Some(protocol), ports_of(&ports))).collect()
}

/// Names in their order, then numbers as few ranges. An entry without a port means all ports.
fn ports_of(ports: &[&NetworkPolicyPort]) -> Vec<Value> {
    let (mut names, mut ranges) = (Vec::new(), Vec::new());
    for port in ports {
        match &port.port {
            None => return Vec::new(),
            Some(IntOrString::Name(name)) => names.push(json!(name)),
            Some(IntOrString::Number(first)) => ranges.push((*first, port.end_port.unwrap_or(*first))),
        }
    }
    ranges.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    names.extend(merged.into_iter().map(|(first, last)| match first == last {
        true => json!(first),
        false => json!(format!("{first}:{last}")),
    }));
    names
}

fn of_peer(peer: &NetworkPolicyPeer) -> Value {
    let mut entity = Map::new();
    if let Some(block) = &peer.ip_block {
        entity.insert("nets".to_owned(), json!([block.cidr.0.to_string()]));
        if !block.except.is_empty() {
            let except: Vec<String> = block.except.iter().map(|except| except.0.to_string()).collect();
            entity.insert("notNets".to_owned(), json!(except));
        }
        return Value::Object(entity);
    }
    entity.insert("selector".to_owned(), json!(of_pods(peer.pod_selector.as_ref())));
    if let Some(namespaces) = &peer.namespace_selector {
        let criteria = criteria(namespaces);
        let selector = if criteria.is_empty() { "all()".to_owned() } else { criteria.join(" && ") };
        entity.insert("namespaceSelector".to_owned(), json!(selector));
    }
    Value::Object(entity)
}

fn of_pods(selector: Option<&LabelSelector>) -> String {
    let own = selector.map(criteria).unwrap_or_default();
    let all: Vec<String> = std::iter::once(PODS.to_owned()).chain(own).collect();
    all.join(" && ")
}

fn criteria(selector: &LabelSelector) -> Vec<String> {
    let labels = selector.match_labels.iter().map(|(name, value)| format!("{name} == '{value}'"));
    labels.chain(selector.match_expressions.iter().map(criterion)).collect()
}

fn criterion(Requirement { key, operator, values }: &Requirement) -> String {
    let values = || {
        let quoted: Vec<String> = values.iter().map(|value| format!("'{value}'")).collect();
        quoted.join(", ")
    };
    match operator.as_str() {
        "In" => format!("{key} in {{ {} }}", values()),
        "NotIn" => format!("{key} not in {{ {} }}", values()),
        "Exists" => format!("has({key})"),
        // Validation knows no other operator.
        _ => format!("! has({key})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(spec: Value) -> Value {
        let key = Key::namespaced(Kind::KubernetesNetworkPolicy, "n", "p");
        let value = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec});
        let copy = super::spec(&key, &value);
        // Tortie understands what it writes.
        let of_calico = json!({"metadata": {"name": "knp.default.p", "namespace": "n"}, "spec": copy});
        Resource::read(&copy_of(&key), &of_calico).unwrap_or_else(|problems| panic!("{copy}: {problems:?}"));
        copy
    }

    #[test]
    fn policies_are_as_calico_converts_them() {
        let with = |fields: Value| {
            let mut spec =
                json!({"tier": "default", "order": 1000.0, "selector": PODS, "types": ["Ingress"]});
            for (name, value) in fields.as_object().into_iter().flatten() {
                spec[name] = value.clone();
            }
            spec
        };
        let table = [
            (json!({"podSelector": {}}), with(json!({}))),
            (
                json!({"podSelector": {"matchLabels": {"b": "2", "a": "1"}, "matchExpressions": [
                    {"key": "x", "operator": "In", "values": ["1", "2"]}, {"key": "y", "operator": "NotIn", "values": ["3"]},
                    {"key": "z", "operator": "Exists"}, {"key": "w", "operator": "DoesNotExist"}]},
                    "policyTypes": ["Ingress", "Egress"]}),
                with(json!({"types": ["Ingress", "Egress"], "selector": format!(
                    "{PODS} && a == '1' && b == '2' && x in {{ '1', '2' }} && y not in {{ '3' }} && has(z) && ! has(w)")})),
            ),
            (
                json!({"podSelector": {}, "ingress": [{}]}),
                with(json!({"ingress": [{"action": "Allow", "source": {}, "destination": {}}]})),
            ),
            (
                json!({"podSelector": {}, "ingress": [{
                    "from": [
                        {"podSelector": {"matchLabels": {"a": "b"}}}, {"namespaceSelector": {}},
                        {"namespaceSelector": {"matchLabels": {"c": "d"}}, "podSelector": {}},
                        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
                    ],
                }]}),
                with(json!({"ingress": [
                    {"action": "Allow", "source": {"selector": format!("{PODS} && a == 'b'")}, "destination": {}},
                    {"action": "Allow", "source": {"selector": PODS, "namespaceSelector": "all()"}, "destination": {}},
                    {"action": "Allow", "source": {"selector": PODS, "namespaceSelector": "c == 'd'"}, "destination": {}},
                    {"action": "Allow", "source": {"nets": ["10.0.0.0/8"], "notNets": ["10.1.0.0/16"]}, "destination": {}},
                ]})),
            ),
            (
                json!({"podSelector": {}, "policyTypes": ["Egress"], "ingress": [{}], "egress": [{"ports": [
                    {"port": 90, "endPort": 95}, {"port": "http"}, {"port": 80}, {"port": 81, "protocol": "TCP"},
                    {"protocol": "UDP"}, {"protocol": "UDP", "port": 53}, {"protocol": "SCTP", "port": 7, "endPort": 7},
                ], "to": [{"ipBlock": {"cidr": "fd00::/8"}}]}]}),
                with(json!({"types": ["Egress"], "egress": [
                    {"action": "Allow", "protocol": "SCTP", "source": {}, "destination": {"nets": ["fd00::/8"], "ports": [7]}},
                    {"action": "Allow", "protocol": "TCP", "source": {}, "destination":
                        {"nets": ["fd00::/8"], "ports": ["http", "80:81", "90:95"]}},
                    {"action": "Allow", "protocol": "UDP", "source": {}, "destination": {"nets": ["fd00::/8"]}},
                ]})),
            ),
        ];
        for (spec, expected) in table {
            assert_eq!(convert(spec.clone()), expected, "{spec}");
        }
    }

    /// Nothing opens because a policy is not understood.
    #[test]
    fn a_policy_that_is_not_understood_denies_everything() {
        let closed = |selector: &str| json!({"tier": "default", "order": 1000.0, "selector": selector, "types": ["Ingress", "Egress"]});
        let chosen = json!({"matchLabels": {"a": "b"}});
        let table = [
            (json!({"podSelector": chosen, "newField": 1}), closed(&format!("{PODS} && a == 'b'"))),
            (json!({"podSelector": {"matchLabels": {"a": 1}}, "ingress": [{}]}), closed(PODS)),
            (
                json!({"podSelector": chosen, "ingress": [{"from": [{}]}]}),
                closed(&format!("{PODS} && a == 'b'")),
            ),
            (json!("damaged"), closed(PODS)),
        ];
        for (spec, expected) in table {
            assert_eq!(convert(spec.clone()), expected, "{spec}");
        }
    }
}
