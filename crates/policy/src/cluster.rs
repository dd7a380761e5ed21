//! Compiles policies of cluster administrators (policy decision 9) into the tiers `kube-admin` and `kube-baseline`.

use std::sync::{Arc, LazyLock};

use serde_json::Value;
use tortie_api::Cidr;
use tortie_api::kubernetes::{ClusterPeer, ClusterPolicy, ClusterPort, ClusterRule, LabelSelector};
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_selector::Selector;

use crate::calico::{Sets, named, of_namespaces, port_set};
use crate::compiled::{Compiled, Hook, Order, SetSource};
use crate::kubernetes::{of_kubernetes, requirements};
use crate::labels::all_pods;
use crate::program::{EntityMatch, PolicyId, PolicyRules, Rule, SetId};

/// Compiles a validated policy.
pub(crate) fn compile(id: PolicyId, policy: &ClusterPolicy) -> Compiled {
    let mut sets = Sets::new();
    let mut left_out = Vec::new();
    let selector = pods(&policy.subject).unwrap_or_else(Selector::all);
    let mut rules = |direction: Direction, rules: &[ClusterRule]| {
        let name = if direction == Direction::Ingress { "ingress" } else { "egress" };
        let mut compiled = Vec::new();
        for (index, rule) in rules.iter().enumerate() {
            if let Some(problem) = rule.not_understood() {
                let instead = if rule.action == Action::Allow {
                    "the rule allows nothing"
                } else {
                    "the rule denies everything"
                };
                left_out.push(format!("spec.{name}[{index}]: {problem}; {instead}"));
            }
            compiled.extend(compile_rule(&selector, direction, rule, &mut sets));
        }
        compiled
    };
    let ingress = rules(Direction::Ingress, &policy.ingress);
    let egress = rules(Direction::Egress, &policy.egress);
    Compiled {
        tier: policy.tier.name().to_owned(),
        order: Order::new(policy.priority.map(f64::from), &id),
        // A policy without rules for a direction does not affect that direction.
        ingress: !policy.ingress.is_empty(),
        egress: !policy.egress.is_empty(),
        selector,
        rules: Arc::new(PolicyRules { ingress, egress }),
        hook: Hook::default(),
        sets,
        left_out,
        not_understood: None,
        id,
    }
}

/// The readable parts of a policy that was not understood: its tier, order and subject, and the directions of its
/// rules (both directions if these are unreadable).
pub(crate) fn readable(
    spec: &Value,
    tier: Option<&'static str>,
) -> (String, Option<f64>, Selector, (bool, bool)) {
    let given = match spec.get("tier").and_then(Value::as_str) {
        Some("Admin") => Some("kube-admin"),
        Some("Baseline") => Some("kube-baseline"),
        _ => None,
    };
    let priority = match (spec.get("priority"), tier) {
        (None | Some(Value::Null), Some("kube-baseline")) => None,
        (priority, _) => Some(priority.and_then(Value::as_f64).unwrap_or(f64::NEG_INFINITY)),
    };
    let subject = spec.get("subject").and_then(ClusterPeer::readable);
    // An unreadable policy denies for pods, never for hosts, because such a policy cannot select a host.
    let selector = subject.as_ref().and_then(pods).unwrap_or_else(all_pods);
    let has = |direction: &str| {
        spec.get(direction)
            .is_some_and(|rules| !rules.is_null() && !rules.as_array().is_some_and(Vec::is_empty))
    };
    let directions = match (has("ingress"), has("egress")) {
        (false, false) => (true, true),
        named => named,
    };
    (tier.or(given).unwrap_or("").to_owned(), priority, selector, directions)
}

/// Compiles to one rule for each peer and protocol. A rule that was not understood denies: an Accept matches nothing;
/// a Deny denies everything, and so does a Pass, because the intended Pass could have skipped a later Allow.
fn compile_rule(own: &Selector, direction: Direction, rule: &ClusterRule, sets: &mut Sets) -> Vec<Rule> {
    if rule.not_understood().is_some() {
        return if rule.action == Action::Allow { Vec::new() } else { vec![Rule::all(Action::Deny)] };
    }
    let mut rules = Vec::new();
    for peer in &rule.peers {
        let (entity, peers_pods) = compile_peer(peer, sets);
        for (protocol, range, name) in ports(&rule.ports) {
            let mut compiled = Rule { protocol, ..Rule::all(rule.action) };
            let declaring = match direction {
                Direction::Ingress => {
                    compiled.source = entity.clone();
                    own
                }
                Direction::Egress => {
                    compiled.destination = entity.clone();
                    &peers_pods
                }
            };
            compiled.destination.ports = range.into_iter().collect();
            compiled.destination.port_sets =
                name.into_iter().map(|name| port_set(declaring, None, name, sets)).collect();
            rules.push(compiled);
        }
    }
    rules
}

/// The criteria of each port of a rule; no ports match everything.
fn ports(ports: &[ClusterPort]) -> Vec<(Option<Protocol>, Option<PortRange>, Option<&str>)> {
    if ports.is_empty() {
        return vec![(None, None, None)];
    }
    let one = |port| match port {
        &ClusterPort::Numbers(protocol, range) => Some((Some(protocol), range, None)),
        ClusterPort::Named(name) => Some((None, None, Some(name.as_str()))),
        ClusterPort::Unknown(_) => None,
    };
    ports.iter().filter_map(one).collect()
}

/// A peer, and its pods, whose named ports a rule may name.
fn compile_peer(peer: &ClusterPeer, sets: &mut Sets) -> (EntityMatch, Selector) {
    if let ClusterPeer::Networks(nets) = peer {
        let nets = nets.iter().map(|Cidr(net)| *net).collect();
        return (EntityMatch { nets, ..EntityMatch::default() }, Selector::all());
    }
    if let ClusterPeer::Nodes(nodes) = peer {
        let sets = vec![node_set(Selector::all_of(requirements(nodes)), sets)];
        return (EntityMatch { sets, ..EntityMatch::default() }, Selector::all());
    }
    let pods = pods(peer).unwrap_or_else(Selector::all);
    (EntityMatch { sets: vec![named(pods.clone(), sets)], ..EntityMatch::default() }, pods)
}

/// Adds the set of the addresses of these nodes to `sets` and returns its id. A selector of endpoints with the same text has
/// another id.
fn node_set(nodes: Selector, sets: &mut Sets) -> SetId {
    let id = id_of_nodes(&nodes);
    sets.insert(id.clone(), SetSource::Nodes(nodes));
    id
}

fn id_of_nodes(nodes: &Selector) -> SetId {
    SetId::new(tortie_selector::unique_id("nodes", &nodes.id()))
}

/// The id of the set of the addresses of all nodes. Every node has it, because pods do not connect to the nodes' ports of BGP (policy
/// decision 48). Policies with a peer `nodes` that selects all of them name it, too.
pub static ALL_NODES: LazyLock<SetId> = LazyLock::new(|| id_of_nodes(&Selector::all()));

/// The pods that a subject or peer selects, if it selects pods.
fn pods(peer: &ClusterPeer) -> Option<Selector> {
    let (namespaces, pods) = match peer {
        ClusterPeer::Namespaces(namespaces) => (namespaces, LabelSelector::default()),
        ClusterPeer::Pods { namespaces, pods } => (namespaces, pods.clone()),
        ClusterPeer::Nodes(_) | ClusterPeer::Networks(_) | ClusterPeer::Unknown(_) => return None,
    };
    let mut terms = vec![of_namespaces(&Selector::all_of(requirements(namespaces)))];
    terms.extend(of_kubernetes(&pods));
    Some(Selector::all_of(terms))
}
