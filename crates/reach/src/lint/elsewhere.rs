//! Parts of a policy that Calico for Windows (`felix/dataplane/windows` of Calico v3.32) leaves out or treats as
//! something else. That matters for users who come from there, or whose manifests are also used there. The parts work
//! here.

use tortie_api::calico::{EntityRule, PolicySpec, Rule};
use tortie_api::kubernetes::{
    ClusterPeer, ClusterPolicy, ClusterPort, IntOrString, NetworkPolicyRule, NetworkPolicySpec,
};
use tortie_api::net::{Action, Protocol};
use tortie_api::{Cidr, Key, Port, ProtocolName, Resource};

use super::{Code, FindingText, Findings, Level};
use tortie_oracle::Stored;

pub(super) fn check(key: &Key, stored: &Stored, resource: &Resource, found: &mut Findings) {
    let mut features = Vec::new();
    match resource {
        Resource::NetworkPolicy(policy) => calico(&policy.spec, &mut features),
        Resource::GlobalNetworkPolicy(policy) => calico(&policy.spec, &mut features),
        Resource::KubernetesNetworkPolicy(policy) => kubernetes(&policy.spec, &mut features),
        Resource::ClusterPolicy(policy) => cluster(policy, &mut features),
        _ => {}
    }
    for Feature { field, what, action } in features {
        let witness = match action {
            Some(Action::Deny | Action::Pass) if what == BY_NODES => "there the rule denies everything",
            Some(Action::Deny) => {
                "there the rule is left out: packets that it denies continue to later rules, and may pass"
            }
            Some(Action::Pass) if what.starts_with("Pass") => {
                "there it denies, and here the profiles are evaluated"
            }
            Some(Action::Pass) => "there the rule is left out, and later rules of the policy are evaluated",
            Some(Action::Log) => "there nothing is logged",
            Some(Action::Allow) => "there the rule is left out: packets that it allows are denied",
            None => "there it has no effect",
        };
        let calico = if what == BY_NODES { "Calico" } else { "Calico for Windows" };
        let problem = format!("{what} does not work on {calico}");
        let advice = match what {
            FOR_HOSTS => {
                "nothing for Linux nodes; host endpoints of Windows nodes are not enforced here either"
            }
            LOG => "look for the log on Linux nodes only; Windows nodes log nothing here either",
            _ => "nothing here: it works on Linux and Windows nodes alike",
        };
        found.add(
            (key, stored),
            &field,
            (Level::Note, Code::Elsewhere),
            FindingText::new(problem, witness, advice),
        );
    }
}

const FOR_HOSTS: &str = "policy for host endpoints";
const LOG: &str = "the action Log";
/// Calico has no such peers on any system (`libcalico-go/lib/backend/k8s/conversion/clusternetworkpolicy.go`).
const BY_NODES: &str = "a peer by nodes";

/// A feature that does not work on Calico for Windows.
struct Feature {
    field: String,
    what: &'static str,
    action: Option<Action>,
}

fn calico(spec: &PolicySpec, features: &mut Vec<Feature>) {
    for (set, field) in [
        (spec.do_not_track, "spec.doNotTrack"),
        (spec.pre_dnat, "spec.preDNAT"),
        (spec.apply_on_forward, "spec.applyOnForward"),
    ] {
        if set {
            features.push(Feature { field: field.to_owned(), what: FOR_HOSTS, action: None });
        }
    }
    // The profiles follow this tier, and only there Calico for Windows treats Pass as Deny.
    let last = spec.tier_name() == "default";
    for (rules, direction) in [(&spec.ingress, "ingress"), (&spec.egress, "egress")] {
        for (index, rule) in rules.iter().enumerate() {
            of_rule(rule, &format!("spec.{direction}[{index}]"), last, features);
        }
    }
}

fn of_rule(rule: &Rule, path: &str, last: bool, features: &mut Vec<Feature>) {
    let action = Some(rule.action);
    let mut add = |used: bool, field: &str, what: &'static str| {
        if used {
            features.push(Feature { field: format!("{path}.{field}"), what, action });
        }
    };
    let v6 = |ProtocolName(protocol): ProtocolName| protocol == Protocol::ICMPV6;
    add(rule.action == Action::Log, "action", LOG);
    add(rule.action == Action::Pass && last, "action", "Pass in tier default");
    add(rule.ip_version == Some(6), "ipVersion", "IPv6");
    add(rule.protocol.is_some_and(v6), "protocol", "IPv6");
    add(rule.not_protocol.is_some(), "notProtocol", "a negation");
    add(rule.icmp.is_some(), "icmp", "an ICMP type");
    add(rule.not_icmp.is_some(), "notICMP", "a negation");
    add(rule.http.is_some(), "http", "a criterion of HTTP");
    for (side, name) in [(&rule.source, "source"), (&rule.destination, "destination")] {
        of_side(side, &format!("{path}.{name}"), action, features);
    }
}

fn of_side(side: &EntityRule, path: &str, action: Option<Action>, features: &mut Vec<Feature>) {
    let mut add = |used: bool, field: &str, what: &'static str| {
        if used {
            features.push(Feature { field: format!("{path}.{field}"), what, action });
        }
    };
    let named = |ports: &[Port]| ports.iter().any(|port| matches!(port, Port::Named(_)));
    let numbers = |ports: &[Port]| ports.iter().any(|port| matches!(port, Port::Range(_)));
    let mix = named(&side.ports) && numbers(&side.ports);
    add(side.nets.iter().any(is_v6), "nets", "IPv6");
    add(!side.not_nets.is_empty(), "notNets", "a negation");
    let with = side.selector.is_some() || side.namespace_selector.is_some();
    // With a selector, it becomes part of that selector's set.
    add(side.not_selector.is_some() && !with, "notSelector", "a negation");
    add(mix, "ports", "a mixture of named ports and numbers");
    add(named(&side.ports) && !mix, "ports", "a named port");
    add(!side.not_ports.is_empty(), "notPorts", "a negation");
}

fn is_v6(Cidr(net): &Cidr) -> bool {
    net.addr().is_ipv6()
}

fn kubernetes(spec: &NetworkPolicySpec, features: &mut Vec<Feature>) {
    for (rules, direction, side) in [(&spec.ingress, "ingress", "from"), (&spec.egress, "egress", "to")] {
        for (index, rule) in rules.iter().enumerate() {
            of_kubernetes_rule(rule, &format!("spec.{direction}[{index}]"), side, features);
        }
    }
}

fn of_kubernetes_rule(rule: &NetworkPolicyRule, path: &str, side: &str, features: &mut Vec<Feature>) {
    let mut add = |field: String, what: &'static str| {
        features.push(Feature { field: format!("{path}.{field}"), what, action: Some(Action::Allow) });
    };
    for (number, peer) in rule.peers.iter().enumerate() {
        let Some(block) = &peer.ip_block else { continue };
        if is_v6(&block.cidr) {
            add(format!("{side}[{number}].ipBlock.cidr"), "IPv6");
        } else if !block.except.is_empty() {
            add(format!("{side}[{number}].ipBlock.except"), "a negation (except)");
        }
    }
    for (number, port) in rule.ports.iter().enumerate() {
        if matches!(port.port, Some(IntOrString::Name(_))) {
            add(format!("ports[{number}].port"), "a named port");
        }
    }
}

fn cluster(policy: &ClusterPolicy, features: &mut Vec<Feature>) {
    for (rules, direction, side) in [(&policy.ingress, "ingress", "from"), (&policy.egress, "egress", "to")] {
        for (index, rule) in rules.iter().enumerate() {
            let mut add = |field: String, what: &'static str| {
                let field = format!("spec.{direction}[{index}].{field}");
                features.push(Feature { field, what, action: Some(rule.action) });
            };
            for (number, peer) in rule.peers.iter().enumerate() {
                match peer {
                    ClusterPeer::Networks(nets) if nets.iter().any(is_v6) => {
                        add(format!("{side}[{number}].networks"), "IPv6");
                    }
                    ClusterPeer::Nodes(_) => add(format!("{side}[{number}].nodes"), BY_NODES),
                    _ => {}
                }
            }
            if rule.ports.iter().any(|port| matches!(port, ClusterPort::Named(_))) {
                add("ports".to_owned(), "a named port");
            }
        }
    }
}
