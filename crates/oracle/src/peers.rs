//! Resolves the ends of a question to addresses, and to the endpoints whose policies apply (policy decisions 1–5).

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tortie_api::net::{Direction, IpVersion};

use super::Question;
use super::path::{Hop, HostHop, HostLink, PacketPath};
use super::world::{NodeAddresses, Workload, World};

/// One end of a flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub enum Peer {
    /// A pod.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// A node's own network.
    Node(String),
    /// An address; if a pod or node has it, it stands for that pod or node.
    Address(IpAddr),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Pod { namespace, name } => write!(f, "{namespace}/{name}"),
            Peer::Node(name) => write!(f, "node/{name}"),
            Peer::Address(address) => address.fmt(f),
        }
    }
}

/// The reason why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum QuestionError {
    /// The pod does not exist.
    #[error("pod {namespace}/{name} does not exist")]
    UnknownPod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The pod has ended.
    #[error("pod {namespace}/{name} has ended ({phase}): it has no network any more")]
    EndedPod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// `Succeeded` or `Failed`.
        phase: String,
    },
    /// The node does not exist.
    #[error("node {0} does not exist")]
    UnknownNode(String),
    /// The pod or node has no address yet.
    #[error("{0} has no address yet, so no packet can come from it or go to it")]
    NoAddress(Peer),
    /// The two ends have no common address family.
    #[error("{from} and {to} have no address of the same family")]
    NoCommonFamily {
        /// The sender.
        from: Peer,
        /// The receiver.
        to: Peer,
    },
}

/// A resolved end of a flow.
enum End<'a> {
    Pod(&'a Workload, Vec<IpAddr>),
    Node(&'a str, &'a NodeAddresses),
    /// A node, by an address from the question.
    NodeAt(&'a str, IpAddr),
    Outside(IpAddr),
}

/// The path of the question's packet, by the given family. Without one, it is IPv4 if both ends have it.
pub(super) fn resolve<'a>(
    world: &'a World,
    question: &Question,
    family: Option<IpVersion>,
) -> Result<PacketPath<'a>, QuestionError> {
    let mut notes = Vec::new();
    let from = end(world, &question.from, &mut notes)?;
    let to = end(world, &question.to, &mut notes)?;
    let no_common = || QuestionError::NoCommonFamily { from: question.from.clone(), to: question.to.clone() };
    for (peer, end) in [(&question.from, &from), (&question.to, &to)] {
        if end.addresses().is_empty() {
            return Err(QuestionError::NoAddress(peer.clone()));
        }
    }
    // If an end has several addresses of a family, the lowest is judged.
    let lowest =
        |end: &End<'_>, family| end.addresses().into_iter().filter(|it| family_of(*it) == family).min();
    let families = IpVersion::ALL.into_iter().filter(|each| family.is_none_or(|wanted| wanted == *each));
    let mut common = families.filter_map(|family| lowest(&from, family).zip(lowest(&to, family)));
    let (own, destination) = common.next().ok_or_else(no_common)?;
    if let Some(node) = relay(question, &from, &to) {
        return Ok(relayed(world, (node, question.via), (&from, own), (&to, destination)));
    }
    let source = source(world, &from, own, &to, destination);
    remark(&from, &to, (source, question.via.is_some()), &mut notes);
    let translated = translated(world, &from, source, destination);
    if let Some(address) = translated {
        notes.push(format!(
            "outside of all pools the packet bears the address of its node, {address} (natOutgoing)"
        ));
    }
    notes.extend(alternatives(world, &from, &to, destination));
    let hops = hops(world, &from, &to, destination, (translated, question.via));
    Ok(PacketPath { source, destination, hops, notes })
}

/// A note that the interface by which a packet leaves the sender's node is not known: its routes decide.
fn alternatives(world: &World, from: &End<'_>, to: &End<'_>, destination: IpAddr) -> Option<String> {
    let near = from.node().filter(|_| !matches!(from, End::NodeAt(..)))?;
    let is_overlaid = to.node().is_some_and(|far| far == near || world.encapsulates(near, far, destination));
    let names: Vec<&str> = world.single_interfaces(near).map(|host| host.identity.name.as_str()).collect();
    let taken = world.interface(near, false)?;
    (names.len() > 1 && !is_overlaid).then(|| {
        format!(
            "node {near} has host endpoints for several interfaces ({}); its routes decide by which one the packet leaves, and this answer \
             takes {}",
            names.join(", "),
            taken.identity.name
        )
    })
}

/// The node that translates its own port to a backend elsewhere, for a sender outside of the cluster or for its own pod.
fn relay<'a>(question: &'a Question, from: &End<'_>, to: &End<'_>) -> Option<&'a str> {
    let node = question.by_node.as_deref()?;
    let is_relayed = match from {
        End::Outside(_) => true,
        End::Pod(pod, _) => pod.node == node,
        End::Node(..) | End::NodeAt(..) => false,
    };
    (is_relayed && to.node() != Some(node)).then_some(node)
}

/// The path of a packet to a port of a node that passes it on to a backend elsewhere. The node puts its own address in place of the
/// sender's when the packet leaves it, after its policy (kube-proxy, `externalTrafficPolicy: Cluster`).
fn relayed<'a>(
    world: &'a World,
    (relay, via): (&str, Option<(IpAddr, u16)>),
    (from, sender): (&End<'a>, IpAddr),
    (to, destination): (&End<'a>, IpAddr),
) -> PacketPath<'a> {
    let relay_end = world.nodes.get_key_value(relay).map(|(name, node)| (End::Node(name, node), &node.own));
    let own = relay_end
        .as_ref()
        .and_then(|(_, own)| own.iter().copied().filter(|own| own.is_ipv4() == destination.is_ipv4()).min());
    let source = relay_end
        .as_ref()
        .zip(own)
        .map_or(sender, |((relay, _), own)| self::source(world, relay, own, to, destination));
    let far = to.node();
    let overlaid = far.is_some_and(|far| world.encapsulates(relay, far, destination));
    let host = |node: &str, (overlaid, near, forwarded), before| {
        let interface = world.interface(node, overlaid)?;
        let direction = if near { Direction::Egress } else { Direction::Ingress };
        // At the node that passes it on, policy sees the sender.
        let source = Some(if node == relay { sender } else { source });
        let at = HostLink::Outside;
        Some(Hop::Host(HostHop { interface, at, near, direction, forwarded, source, before }))
    };
    let of_pod = |end: &End<'a>, direction, source, via| match end {
        End::Pod(pod, _) => at_pod(world, pod, direction, true, via)
            .map(|hop| Hop::Host(HostHop { source: Some(source), ..hop })),
        _ => None,
    };
    let is_pod = matches!(to, End::Pod(..));
    let (leaves, enters) = match from {
        End::Pod(pod, _) => (
            Some(Hop::Pod(pod, Direction::Egress, Some(sender))),
            of_pod(from, Direction::Ingress, sender, via),
        ),
        _ => (None, host(relay, (false, false, true), via)),
    };
    let hops = [
        leaves,
        enters,
        host(relay, (overlaid, true, true), None),
        far.and_then(|far| host(far, (overlaid, false, is_pod), None)),
        of_pod(to, Direction::Egress, source, None),
        match to {
            End::Pod(pod, _) => Some(Hop::Pod(pod, Direction::Ingress, None)),
            _ => None,
        },
    ];
    let note = format!(
        "node {relay} translates the packet, and sends it on with its own address {source}: what comes after sees that one"
    );
    PacketPath { source, destination, hops: hops.into_iter().flatten().collect(), notes: vec![note] }
}

/// The family of an address.
pub fn family_of(address: IpAddr) -> IpVersion {
    if address.is_ipv4() { IpVersion::V4 } else { IpVersion::V6 }
}

fn end<'a>(world: &'a World, peer: &Peer, notes: &mut Vec<String>) -> Result<End<'a>, QuestionError> {
    match peer {
        Peer::Pod { namespace, name } => {
            if let Some(pod) = world.pod(namespace, name) {
                return Ok(End::Pod(pod, pod.addresses.clone()));
            }
            if let Some(node) = world.on_the_host.get(&(namespace.clone(), name.clone())) {
                notes.push(format!(
                    "{peer} uses the network of node {node}: it is that node, and under no policy"
                ));
                return node_of(world, node);
            }
            if let Some(phase) = world.ended.get(&(namespace.clone(), name.clone())) {
                let (namespace, name, phase) = (namespace.clone(), name.clone(), phase.clone());
                return Err(QuestionError::EndedPod { namespace, name, phase });
            }
            Err(QuestionError::UnknownPod { namespace: namespace.clone(), name: name.clone() })
        }
        Peer::Node(name) => node_of(world, name),
        Peer::Address(address) => {
            if let Some(pod) = world.at(*address).next() {
                return Ok(End::Pod(pod, vec![*address]));
            }
            let has = |node: &NodeAddresses| {
                node.own.contains(address) || node.tunnels().any(|tunnel| tunnel == *address)
            };
            let by_node = world.nodes.iter().find(|(_, node)| has(node)).map(|(name, _)| name.as_str());
            match by_node.or_else(|| world.node_with(*address)) {
                Some(name) => Ok(End::NodeAt(name, *address)),
                None => Ok(End::Outside(*address)),
            }
        }
    }
}

fn node_of<'a>(world: &'a World, name: &str) -> Result<End<'a>, QuestionError> {
    let known = world.nodes.get_key_value(name);
    let (name, node) = known.ok_or_else(|| QuestionError::UnknownNode(name.to_owned()))?;
    Ok(End::Node(name, node))
}

/// The source of a packet from an end with this address. A node uses its tunnel's address for pods of other nodes that it
/// reaches by the tunnel, and its own address for everything else (policy decision 2). A Linux node does so also if a program is bound to
/// another address of the node.
fn source(world: &World, from: &End<'_>, own: IpAddr, to: &End<'_>, destination: IpAddr) -> IpAddr {
    let End::Pod(pod, _) = to else { return own };
    let (name, node) = match from {
        End::Node(name, node) => (*name, *node),
        End::NodeAt(name, _) => match world.nodes.get(*name).filter(|node| !node.is_windows) {
            Some(node) => (*name, node),
            None => return own,
        },
        End::Pod(..) | End::Outside(_) => return own,
    };
    if pod.node == *name || !world.encapsulates(name, &pod.node, destination) {
        return own;
    }
    if world.has_ipip(destination) {
        return node.ipip.unwrap_or(own);
    }
    let mut tunnels = node.vxlan.iter().copied();
    tunnels.find(|tunnel| family_of(*tunnel) == family_of(destination)).unwrap_or(own)
}

/// The hops that judge the packet, in the order of its path (policy decisions 2–5, 16).
fn hops<'a>(
    world: &'a World,
    from: &End<'a>,
    to: &End<'a>,
    destination: IpAddr,
    (translated, via): (Option<IpAddr>, Option<(IpAddr, u16)>),
) -> Vec<Hop<'a>> {
    let (near, far) = (from.node(), to.node());
    let pod = |end: &End<'a>, direction| match end {
        End::Pod(pod, _) => Some(Hop::Pod(pod, direction, None)),
        _ => None,
    };
    let is_same_pod = matches!((from, to), (End::Pod(from, _), End::Pod(to, _)) if std::ptr::eq(*from, *to));
    // A packet to a Service's address leaves the pod, whichever backend its node chooses.
    if is_same_pod && via.is_none() {
        return vec![];
    }
    // The interface between a pod and its node, which only a host endpoint of all interfaces covers.
    let of_pod = |end: &End<'a>, direction, forwarded| match end {
        End::Pod(pod, _) => at_pod(world, pod, direction, forwarded, via).map(Hop::Host),
        _ => None,
    };
    if is_same_pod || near.is_some() && near == far {
        // Inside one node, packets pass no other interface that could have a host endpoint.
        let hops = match (from, to) {
            (End::Pod(..), End::Pod(..)) => vec![
                pod(from, Direction::Egress),
                of_pod(from, Direction::Ingress, true),
                of_pod(to, Direction::Egress, true),
                pod(to, Direction::Ingress),
            ],
            (End::Pod(..), End::Node(node, _) | End::NodeAt(node, _)) => vec![
                pod(from, Direction::Egress),
                of_pod(from, Direction::Ingress, false),
                Some(Hop::OwnNode(node)),
            ],
            (End::Node(..) | End::NodeAt(..), End::Pod(receiver, _)) => vec![Some(Hop::Probed(receiver))],
            _ => vec![],
        };
        return hops.into_iter().flatten().collect();
    }
    // Nodes encapsulate packets to another node's pods, or to its tunnel address.
    let overlaid = near.zip(far).is_some_and(|(near, far)| world.encapsulates(near, far, destination));
    let host = |end: &End<'a>, direction| {
        let interface = match end {
            End::NodeAt(node, address) if !overlaid => world.interface_with(node, *address)?,
            _ => world.interface(end.node()?, overlaid)?,
        };
        // The first node on the path translates a Service's address. If the sender's node replaced the source with its
        // own address, the receiver's node sees that address.
        let first = direction == Direction::Egress || near.is_none();
        let source = translated.filter(|_| direction == Direction::Ingress);
        let forwarded = matches!(end, End::Pod(..));
        let (at, before) = (HostLink::Outside, via.filter(|_| first));
        let near = direction == Direction::Egress;
        Some(Hop::Host(HostHop { interface, at, near, direction, forwarded, source, before }))
    };
    let hops = [
        pod(from, Direction::Egress),
        of_pod(from, Direction::Ingress, true),
        host(from, Direction::Egress),
        host(to, Direction::Ingress),
        of_pod(to, Direction::Egress, true),
        pod(to, Direction::Ingress),
    ];
    hops.into_iter().flatten().collect()
}

/// The interface between a pod and its node, if a host endpoint of all interfaces covers it. Packets that the pod
/// sends enter the node there; packets that it receives leave the node there.
pub(super) fn at_pod<'a>(
    world: &'a World,
    pod: &Workload,
    direction: Direction,
    forwarded: bool,
    via: Option<(IpAddr, u16)>,
) -> Option<HostHop<'a>> {
    let interface = world.all_interfaces(&pod.node)?;
    let near = direction == Direction::Ingress;
    let before = via.filter(|_| near);
    Some(HostHop { interface, at: HostLink::Pod, near, direction, forwarded, source: None, before })
}

/// The address of the sender's node, if a pool with natOutgoing makes it the packet's source.
fn translated(world: &World, from: &End<'_>, source: IpAddr, destination: IpAddr) -> Option<IpAddr> {
    let End::Pod(pod, _) = from else { return None };
    world.translated(&pod.node, source).filter(|_| !world.is_excluded(&pod.node, destination))
}

impl<'a> End<'a> {
    /// Its own addresses.
    fn addresses(&self) -> Vec<IpAddr> {
        match self {
            End::Pod(_, addresses) => addresses.clone(),
            End::NodeAt(_, address) | End::Outside(address) => vec![*address],
            End::Node(_, node) => node.own.clone(),
        }
    }

    /// The node that it is, or that it runs on.
    fn node(&self) -> Option<&'a str> {
        match self {
            End::Pod(pod, _) => Some(&pod.node).filter(|node| !node.is_empty()).map(String::as_str),
            End::Node(node, _) | End::NodeAt(node, _) => Some(node),
            End::Outside(_) => None,
        }
    }
}

/// Adds remarks about the path for readers.
fn remark(from: &End<'_>, to: &End<'_>, (source, by_service): (IpAddr, bool), notes: &mut Vec<String>) {
    let remark = match (from, to) {
        (End::Pod(from, _), End::Pod(to, _)) if std::ptr::eq(*from, *to) && by_service => {
            format!(
                "the packet leaves {from}, and its node translates the Service's address and sends it back: \
                 the pod's own policies judge it in both directions"
            )
        }
        (End::Pod(from, _), End::Pod(to, _)) if std::ptr::eq(*from, *to) => {
            format!("{from} reaches itself: the packet never leaves the pod, so no policy is evaluated")
        }
        (End::Node(node, _) | End::NodeAt(node, _), End::Pod(pod, _)) if pod.node == *node => {
            format!("{pod} runs on node {node}: a node always reaches its own pods (probes)")
        }
        (End::Node(node, _) | End::NodeAt(node, _), End::Pod(pod, _)) => {
            format!("{pod} does not run on node {node}, whose packets come from {source}")
        }
        (End::Pod(pod, _), End::Node(node, _) | End::NodeAt(node, _)) => {
            let own = if pod.node == **node { "its own node" } else { "node" };
            format!("{own} {node} is under no policy of pods: of pods, only what leaves {pod} is judged")
        }
        (End::Pod(..), _) | (_, End::Pod(..)) => return,
        _ => "neither end is a pod with a network of its own: no policy for pods is evaluated".to_owned(),
    };
    notes.push(remark);
}
