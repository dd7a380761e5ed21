//! Compiles Kubernetes NetworkPolicy (policy decisions 10–12) to Allow rules in tier `default` at order 1000. The end
//! of the tier denies what none of them allows.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::Cidr;
use tortie_api::calico::PolicyType;
use tortie_api::kubernetes::{
    IntOrString, KubernetesNetworkPolicy, LabelSelector, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicyRule,
};
use tortie_api::net::{Action, Direction, PortRange, Protocol};
use tortie_selector::Selector;

use crate::calico::{Sets, named, of_namespaces, port_set};
use crate::compiled::{Compiled, Hook, Order};
use crate::labels::{POD_PREFIX, all_pods, of_namespace};
use crate::program::{EntityMatch, PolicyId, PolicyRules, Rule};

/// The order of Kubernetes policies among Calico's.
pub(crate) const ORDER: f64 = 1000.0;

/// Compiles a validated policy.
pub(crate) fn compile(id: PolicyId, policy: &KubernetesNetworkPolicy) -> Compiled {
    let types = policy.effective_types();
    let mut sets = Sets::new();
    let selector = pods_of(&id.namespace, &policy.spec.pod_selector);
    let mut rules = |of: PolicyType, direction: Direction, rules: &[NetworkPolicyRule]| {
        let mut compiled = Vec::new();
        for rule in rules.iter().filter(|_| types.contains(&of)) {
            compile_rule(&id.namespace, &selector, direction, rule, &mut sets, &mut compiled);
        }
        compiled
    };
    let ingress = rules(PolicyType::Ingress, Direction::Ingress, &policy.spec.ingress);
    let egress = rules(PolicyType::Egress, Direction::Egress, &policy.spec.egress);
    Compiled {
        tier: "default".to_owned(),
        order: Order::new(Some(ORDER), &id),
        selector,
        ingress: types.contains(&PolicyType::Ingress),
        egress: types.contains(&PolicyType::Egress),
        rules: Arc::new(PolicyRules { ingress, egress }),
        hook: Hook::default(),
        sets,
        left_out: Vec::new(),
        not_understood: None,
        id,
    }
}

/// The pods that a policy selects if it was not read completely: all that the readable part of its selector allows.
pub(crate) fn readable_selector(namespace: &Arc<str>, pods: &Value) -> Selector {
    pods_of(namespace, &LabelSelector::readable(pods).unwrap_or_default())
}

/// Compiles to one rule for each peer and protocol. `own` selects the policy's own pods.
fn compile_rule(
    namespace: &Arc<str>,
    own: &Selector,
    direction: Direction,
    rule: &NetworkPolicyRule,
    sets: &mut Sets,
    rules: &mut Vec<Rule>,
) {
    let everyone = || vec![(EntityMatch::default(), all_pods())];
    let peers: Vec<(EntityMatch, Selector)> = match rule.peers.as_slice() {
        [] => everyone(),
        peers => peers.iter().map(|peer| compile_peer(namespace, peer, sets)).collect(),
    };
    let by_protocol = by_protocol(&rule.ports);
    // Reserved exactly: rules are large and most policies have few, so spare capacity would need more memory than the
    // policy.
    rules.reserve_exact(peers.len() * by_protocol.len());
    for (protocol, ports) in by_protocol {
        for (peer, peers_pods) in &peers {
            let mut compiled = Rule { protocol, ..Rule::all(Action::Allow) };
            // Named ports are those of the destination (policy decision 12).
            let declaring = match direction {
                Direction::Ingress => {
                    compiled.source = peer.clone();
                    own
                }
                Direction::Egress => {
                    compiled.destination = peer.clone();
                    peers_pods
                }
            };
            let names = ports.iter().filter_map(|port| port.name);
            compiled.destination.port_sets =
                names.map(|name| port_set(declaring, protocol, name, sets)).collect();
            compiled.destination.ports = ports.iter().filter_map(|port| port.range).collect();
            rules.push(compiled);
        }
    }
}

/// A port of a rule: a range of numbers, or a name.
#[derive(Debug, Clone, Default)]
struct WantedPort<'a> {
    range: Option<PortRange>,
    name: Option<&'a str>,
}

/// The ports of each protocol. An empty list means every protocol. An entry without a port means all ports of its
/// protocol.
fn by_protocol(ports: &[NetworkPolicyPort]) -> Vec<(Option<Protocol>, Vec<WantedPort<'_>>)> {
    if ports.is_empty() {
        return vec![(None, Vec::new())];
    }
    let mut protocols: BTreeMap<Protocol, Option<Vec<WantedPort<'_>>>> = BTreeMap::new();
    for port in ports {
        let protocol = port.protocol.as_deref().and_then(Protocol::from_name).unwrap_or(Protocol::TCP);
        let wanted = protocols.entry(protocol).or_insert_with(|| Some(Vec::new()));
        match (&port.port, wanted.as_mut()) {
            (Some(IntOrString::Number(first)), Some(wanted)) => {
                let range = PortRange { first: *first, last: port.end_port.unwrap_or(*first) };
                wanted.push(WantedPort { range: Some(range), name: None });
            }
            (Some(IntOrString::Name(name)), Some(wanted)) => {
                wanted.push(WantedPort { range: None, name: Some(name) })
            }
            (Some(_), None) => {}
            (None, _) => *wanted = None,
        }
    }
    protocols.into_iter().map(|(protocol, wanted)| (Some(protocol), wanted.unwrap_or_default())).collect()
}

/// A peer, and its pods, whose named ports a rule may name.
fn compile_peer(namespace: &Arc<str>, peer: &NetworkPolicyPeer, sets: &mut Sets) -> (EntityMatch, Selector) {
    if let Some(block) = &peer.ip_block {
        let addresses = EntityMatch {
            nets: vec![block.cidr.0],
            not_nets: block.except.iter().map(|Cidr(net)| *net).collect(),
            ..EntityMatch::default()
        };
        return (addresses, all_pods());
    }
    let namespaces = match &peer.namespace_selector {
        None => of_namespace(namespace),
        Some(labels) => of_namespaces(&Selector::all_of(requirements(labels))),
    };
    let pods = peer.pod_selector.clone().unwrap_or_default();
    let mut terms = vec![namespaces];
    terms.extend(of_kubernetes(&pods));
    let pods = Selector::all_of(terms);
    (EntityMatch { sets: vec![named(pods.clone(), sets)], ..EntityMatch::default() }, pods)
}

fn pods_of(namespace: &Arc<str>, pods: &LabelSelector) -> Selector {
    let mut terms = of_kubernetes(pods);
    terms.push(of_namespace(namespace));
    Selector::all_of(terms)
}

pub(crate) fn of_kubernetes(pods: &LabelSelector) -> Vec<Selector> {
    let mut terms = vec![all_pods()];
    terms.extend(requirements(pods).into_iter().map(|term| term.over_prefixed(POD_PREFIX, POD_PREFIX)));
    terms
}

pub(crate) fn requirements(labels: &LabelSelector) -> Vec<Selector> {
    let equal =
        labels.match_labels.iter().map(|(name, value)| Selector::equal(name.as_str(), value.as_str()));
    let expressions = labels.match_expressions.iter().map(|requirement| {
        let values = requirement.values.iter().cloned();
        match requirement.operator.as_str() {
            "In" => Selector::one_of(&requirement.key, values),
            "NotIn" => Selector::none_of(&requirement.key, values),
            "DoesNotExist" => Selector::has(&requirement.key).negated(),
            // Only `Exists` is left: validation has rejected everything else.
            _ => Selector::has(&requirement.key),
        }
    });
    equal.chain(expressions).collect()
}
