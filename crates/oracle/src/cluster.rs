//! Policies of cluster administrators, judged from their own text (policy decision 9).

use tortie_api::Cidr;
use tortie_api::kubernetes::{ClusterPeer, ClusterPolicy, ClusterPort, ClusterRule, LabelSelector};
use tortie_api::net::{Action, Direction};

use super::kubernetes::{selects, shown_selector};
use super::packet::Packet;
use super::trace::Mismatch;
use super::world::Identity;

/// The rules of one direction.
pub(super) fn rules(policy: &ClusterPolicy, direction: Direction) -> &[ClusterRule] {
    match direction {
        Direction::Ingress => &policy.ingress,
        Direction::Egress => &policy.egress,
    }
}

/// The action of a rule. A rule that was not understood denies everything, except if it would have allowed.
pub(super) fn action(rule: &ClusterRule) -> Action {
    match rule.action {
        Action::Pass if rule.not_understood().is_some() => Action::Deny,
        action => action,
    }
}

/// Whether one of the rule's peers and one of its ports match.
pub(super) fn matches(
    policy: &ClusterPolicy,
    rule: &ClusterRule,
    direction: Direction,
    packet: &Packet<'_>,
) -> Result<(), Mismatch> {
    if let Some(problem) = rule.not_understood() {
        return match rule.action {
            Action::Allow => Err(Mismatch::new("rule", "to be understood", problem)),
            _ => Ok(()),
        };
    }
    let (field, side) = match direction {
        Direction::Ingress => ("from", &packet.source),
        Direction::Egress => ("to", &packet.destination),
    };
    let is_peer = |peer: &ClusterPeer| match peer {
        ClusterPeer::Networks(nets) => nets.iter().any(|Cidr(net)| net.contains(&side.address)),
        ClusterPeer::Nodes(nodes) => side.nodes.iter().any(|node| selects(nodes, &node.labels)),
        peer => side.any_pod(|pod| is_pod(peer, pod)),
    };
    if !rule.peers.iter().any(is_peer) {
        let wanted: Vec<String> = rule.peers.iter().map(shown_peer).collect();
        let selects_labels = |peer: &ClusterPeer, pod: &Identity| match peer {
            ClusterPeer::Namespaces(_) => true,
            ClusterPeer::Pods { pods, .. } => selects(pods, &pod.own_labels),
            ClusterPeer::Nodes(_) | ClusterPeer::Networks(_) | ClusterPeer::Unknown(_) => false,
        };
        // The namespace, if only that differs, or the labels.
        let pod = side.pod(|pod| rule.peers.iter().any(|peer| selects_labels(peer, pod)));
        let found = pod.map_or_else(|| side.described(), Identity::described_namespace);
        return Err(Mismatch::new(field, wanted.join("; or "), found));
    }
    // If two pods share an address for a moment, a named port counts only on the pods that the rule selects.
    let is_destination = |pod: &Identity| match direction {
        Direction::Ingress => is_pod(&policy.subject, pod),
        Direction::Egress => rule.peers.iter().any(|peer| is_pod(peer, pod)),
    };
    let destination = &packet.destination;
    let is_port = |port: &ClusterPort| match port {
        ClusterPort::Numbers(protocol, range) => {
            *protocol == packet.protocol && range.is_none_or(|range| range.contains(destination.port))
        }
        ClusterPort::Named(name) => {
            destination.any_pod(|pod| is_destination(pod) && packet.is_named(destination, pod, name))
        }
        ClusterPort::Unknown(_) => false,
    };
    if !rule.ports.is_empty() && !rule.ports.iter().any(is_port) {
        let wanted: Vec<String> = rule.ports.iter().map(shown_port).collect();
        return Err(Mismatch::new("ports", wanted.join(", "), packet.shown_port(destination)));
    }
    Ok(())
}

/// Whether a subject or peer selects this pod.
pub(super) fn is_pod(peer: &ClusterPeer, pod: &Identity) -> bool {
    match peer {
        ClusterPeer::Namespaces(namespaces) => selects(namespaces, &pod.namespace_labels),
        ClusterPeer::Pods { namespaces, pods } => {
            selects(namespaces, &pod.namespace_labels) && selects(pods, &pod.own_labels)
        }
        ClusterPeer::Nodes(_) | ClusterPeer::Networks(_) | ClusterPeer::Unknown(_) => false,
    }
}

fn shown_peer(peer: &ClusterPeer) -> String {
    let namespaces = |selector: &LabelSelector| shown_selector("namespaces", selector);
    match peer {
        ClusterPeer::Namespaces(selector) => format!("any pod in {}", namespaces(selector)),
        ClusterPeer::Pods { namespaces: selector, pods } => {
            format!("{} in {}", shown_selector("pods", pods), namespaces(selector))
        }
        ClusterPeer::Nodes(nodes) => shown_selector("nodes", nodes),
        ClusterPeer::Networks(nets) => {
            nets.iter().map(|Cidr(net)| net.to_string()).collect::<Vec<_>>().join(", ")
        }
        ClusterPeer::Unknown(problem) => problem.clone(),
    }
}

fn shown_port(port: &ClusterPort) -> String {
    match port {
        ClusterPort::Numbers(protocol, None) => protocol.to_string(),
        ClusterPort::Numbers(protocol, Some(range)) => format!("{protocol} {range}"),
        ClusterPort::Named(name) => name.clone(),
        ClusterPort::Unknown(problem) => problem.clone(),
    }
}
