//! Kubernetes NetworkPolicy, judged from its own text (policy decisions 10–12).

use tortie_api::Cidr;
use tortie_api::kubernetes::{
    IntOrString, LabelSelector, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicyRule, NetworkPolicySpec,
};
use tortie_api::net::{Direction, Protocol};

use super::packet::{Packet, PacketEnd};
use super::trace::Mismatch;
use super::world::{Identity, Labels};

/// The rules of one direction.
pub(super) fn rules(spec: &NetworkPolicySpec, direction: Direction) -> &[NetworkPolicyRule] {
    match direction {
        Direction::Ingress => &spec.ingress,
        Direction::Egress => &spec.egress,
    }
}

/// Whether one of the rule's peers and one of its ports match; an empty list matches everything. `namespace` is the
/// policy's.
pub(super) fn matches(
    namespace: &str,
    spec: &NetworkPolicySpec,
    rule: &NetworkPolicyRule,
    direction: Direction,
    packet: &Packet<'_>,
) -> Result<(), Mismatch> {
    let (field, side) = match direction {
        Direction::Ingress => ("from", &packet.source),
        Direction::Egress => ("to", &packet.destination),
    };
    if !rule.peers.is_empty() && !rule.peers.iter().any(|peer| is_peer(namespace, peer, side)) {
        let wanted: Vec<String> = rule.peers.iter().map(|peer| shown_peer(namespace, peer)).collect();
        return Err(Mismatch::new(field, wanted.join("; or "), difference(&rule.peers, side)));
    }
    // If two pods share an address for a moment, a named port counts only on the pods that the policy selects.
    let is_destination = |pod: &Identity| match direction {
        Direction::Ingress => pod.namespace == namespace && selects(&spec.pod_selector, &pod.own_labels),
        Direction::Egress => {
            rule.peers.is_empty() || rule.peers.iter().any(|peer| is_pod(namespace, peer, pod))
        }
    };
    if !rule.ports.is_empty() && !rule.ports.iter().any(|port| is_port(port, packet, is_destination)) {
        let wanted: Vec<String> = rule.ports.iter().map(shown_port).collect();
        return Err(Mismatch::new("ports", wanted.join(", "), packet.shown_port(&packet.destination)));
    }
    Ok(())
}

/// The reason why no peer matches: the namespace of a pod, if only that differs, or the labels.
fn difference(peers: &[NetworkPolicyPeer], side: &PacketEnd<'_>) -> String {
    let selects_labels = |peer: &NetworkPolicyPeer, pod: &Identity| {
        let selector = peer.pod_selector.as_ref();
        peer.ip_block.is_none() && selector.is_none_or(|selector| selects(selector, &pod.own_labels))
    };
    let meant = peers.iter().find_map(|peer| Some((peer, side.pod(|pod| selects_labels(peer, pod))?)));
    match meant {
        Some((peer, pod)) if peer.namespace_selector.is_some() => pod.described_namespace(),
        Some((_, pod)) => format!("{pod} is in namespace {}", pod.namespace),
        None => side.described(),
    }
}

/// Whether the labels match every requirement.
pub(super) fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    let equal = selector.match_labels.iter().all(|(name, value)| labels.get(name) == Some(value));
    let fulfilled = selector.match_expressions.iter().all(|requirement| {
        let value = labels.get(&requirement.key);
        match requirement.operator.as_str() {
            "In" => value.is_some_and(|value| requirement.values.contains(value)),
            "NotIn" => value.is_none_or(|value| !requirement.values.contains(value)),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            // Validation rejects every other operator.
            _ => false,
        }
    });
    equal && fulfilled
}

fn is_peer(namespace: &str, peer: &NetworkPolicyPeer, side: &PacketEnd<'_>) -> bool {
    if let Some(block) = &peer.ip_block {
        let inside = |Cidr(net): &Cidr| net.contains(&side.address);
        return inside(&block.cidr) && !block.except.iter().any(inside);
    }
    side.any_pod(|pod| is_pod(namespace, peer, pod))
}

/// Whether the peer selects this pod; a peer with an `ipBlock` selects by address, whoever has it.
fn is_pod(namespace: &str, peer: &NetworkPolicyPeer, pod: &Identity) -> bool {
    let namespace_matches = match &peer.namespace_selector {
        Some(selector) => selects(selector, &pod.namespace_labels),
        None => peer.ip_block.is_some() || pod.namespace == namespace,
    };
    let pod_matches = match &peer.pod_selector {
        Some(selector) => selects(selector, &pod.own_labels),
        None => true,
    };
    namespace_matches && pod_matches
}

fn is_port(
    wanted: &NetworkPolicyPort,
    packet: &Packet<'_>,
    is_destination: impl Fn(&Identity) -> bool,
) -> bool {
    let protocol = wanted.protocol.as_deref().unwrap_or("TCP");
    let destination = &packet.destination;
    Protocol::from_name(protocol) == Some(packet.protocol)
        && match &wanted.port {
            None => true,
            Some(IntOrString::Number(first)) => {
                (*first..=wanted.end_port.unwrap_or(*first)).contains(&destination.port)
            }
            Some(IntOrString::Name(name)) => {
                destination.any_pod(|pod| is_destination(pod) && packet.is_named(destination, pod, name))
            }
        }
}

fn shown_peer(namespace: &str, peer: &NetworkPolicyPeer) -> String {
    if let Some(block) = &peer.ip_block {
        let except: Vec<String> = block.except.iter().map(|Cidr(net)| net.to_string()).collect();
        return match except.is_empty() {
            true => block.cidr.0.to_string(),
            false => format!("{} except {}", block.cidr.0, except.join(", ")),
        };
    }
    let pods = match &peer.pod_selector {
        Some(selector) => shown_selector("pods", selector),
        None => "any pod".to_owned(),
    };
    match &peer.namespace_selector {
        Some(selector) => format!("{pods} in {}", shown_selector("namespaces", selector)),
        None => format!("{pods} in namespace {namespace}"),
    }
}

pub(super) fn shown_selector(what: &str, selector: &LabelSelector) -> String {
    let equal = selector.match_labels.iter().map(|(name, value)| format!("{name}={value}"));
    let others = selector.match_expressions.iter().map(|requirement| {
        let values = requirement.values.join(", ");
        match requirement.operator.as_str() {
            "Exists" | "DoesNotExist" => format!("{} {}", requirement.key, requirement.operator),
            operator => format!("{} {operator} ({values})", requirement.key),
        }
    });
    let all: Vec<String> = equal.chain(others).collect();
    if all.is_empty() { format!("all {what}") } else { format!("{what} with {}", all.join(" and ")) }
}

fn shown_port(port: &NetworkPolicyPort) -> String {
    let protocol = port.protocol.as_deref().unwrap_or("TCP");
    match (&port.port, port.end_port) {
        (None, _) => protocol.to_owned(),
        (Some(IntOrString::Number(first)), Some(last)) => format!("{protocol} {first}:{last}"),
        (Some(IntOrString::Number(port)), None) => format!("{protocol} {port}"),
        (Some(IntOrString::Name(name)), _) => format!("{protocol} {name}"),
    }
}
