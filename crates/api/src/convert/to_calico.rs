//! From Kubernetes' network policies to Calico's (`libcalico-go/lib/backend/k8s/conversion/conversion.go`).

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::PODS;
use crate::calico::PolicyType;
use crate::kubernetes::{
    IntOrString, KubernetesNetworkPolicy, LabelSelector, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicyRule, Requirement,
};

/// The order of these policies among Calico's.
const ORDER: f64 = 1000.0;

/// The `spec` of a Calico policy that means the same as a Kubernetes policy.
#[must_use]
pub fn calico_spec(policy: &KubernetesNetworkPolicy) -> Value {
    let types = policy.effective_types();
    let mut spec = closed_calico_spec(&policy.spec.pod_selector, &types);
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

/// The `spec` of a Calico policy for these pods that allows nothing in these directions.
#[must_use]
pub fn closed_calico_spec(pods: &LabelSelector, types: &[PolicyType]) -> Value {
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
