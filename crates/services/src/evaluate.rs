//! The destination of a packet that begins a connection. A dataplane translates as this function says.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use tortie_api::net::{IpVersion, Protocol};

use crate::state::{
    Backend, Frontend, FrontendAddress, FrontendKey, FrontendKind, NodePortPlace, NodeServices, TrafficPolicy,
};

/// A packet that begins a connection, as it arrives at the node or leaves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Its source address.
    pub source: IpAddr,
    /// Its sender.
    pub sender: Sender,
    /// Its destination address.
    pub destination: IpAddr,
    /// True if that is an address of the node.
    pub is_to_node: bool,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its destination port; 0 if the protocol has none.
    pub port: u16,
}

/// The sender of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sender {
    /// A pod.
    Pod,
    /// The node itself: the source is one of its addresses.
    Node,
    /// Anything else.
    Other,
}

/// The operator's choice about sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Masquerading {
    /// Packets to clusterIPs always get the node's address as their source.
    pub all: bool,
    /// The node can tell pods from others. If it cannot, packets to clusterIPs keep their source, and pods count as others.
    pub knows_pods: bool,
}

/// The destination of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// No Service takes it.
    Untouched,
    /// One of these backends gets it.
    Translated(BTreeSet<Translation>),
    /// It is dropped.
    Dropped,
    /// It is rejected: by a reset of TCP, otherwise by ICMP.
    Rejected,
}

/// The translation of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Translation {
    /// The new destination.
    pub backend: Backend,
    /// True if the node's address becomes the source.
    pub masquerade: bool,
}

impl NodeServices {
    /// The destination of a packet. `remembered` has the backends of the client's earlier connections to the same port of the Service, while
    /// they are remembered ([`Affinities::of`](crate::Affinities::of)).
    #[must_use]
    pub fn evaluate(
        &self,
        packet: &Packet,
        masquerading: Masquerading,
        remembered: &BTreeSet<SocketAddr>,
    ) -> Outcome {
        match self.frontend(packet) {
            Some(frontend) => self.through(frontend, packet, masquerading, remembered),
            None if self.cluster_ips.contains(&packet.destination) => Outcome::Rejected,
            None if !packet.is_to_node && self.is_unused_address(packet.destination) => Outcome::Dropped,
            None => Outcome::Untouched,
        }
    }

    /// The frontend that takes a packet. Addresses of Services take precedence over node ports.
    #[must_use]
    pub fn frontend(&self, packet: &Packet) -> Option<&Frontend> {
        let at = |address| FrontendKey { address, protocol: packet.protocol, port: packet.port };
        let by_address = self.frontends.get(&at(FrontendAddress::Address(packet.destination)));
        let family = IpVersion::of(&packet.destination);
        by_address.or_else(|| {
            let is_there = self.has_node_ports(packet, family);
            self.frontends.get(&at(FrontendAddress::NodePort(family))).filter(|_| is_there)
        })
    }

    /// True for an address that a Service could have, and none has. An operator may have given it to the node.
    fn is_unused_address(&self, address: IpAddr) -> bool {
        self.service_cidrs.iter().any(|network| network.contains(&address))
    }

    fn has_node_ports(&self, packet: &Packet, family: IpVersion) -> bool {
        if packet.destination.is_loopback() {
            return false;
        }
        match self.node_ports.get(&family) {
            Some(NodePortPlace::Primary(address)) => *address == Some(packet.destination),
            Some(NodePortPlace::AllLocal) => packet.is_to_node,
            Some(NodePortPlace::LocalIn(networks)) => {
                packet.is_to_node && networks.iter().any(|network| network.contains(&packet.destination))
            }
            None => false,
        }
    }

    fn through(
        &self,
        frontend: &Frontend,
        packet: &Packet,
        masquerading: Masquerading,
        remembered: &BTreeSet<SocketAddr>,
    ) -> Outcome {
        let is_allowed =
            |ranges: &Vec<ipnet::IpNet>| ranges.iter().any(|range| range.contains(&packet.source));
        if !frontend.source_ranges.as_ref().is_none_or(is_allowed) {
            return Outcome::Dropped;
        }
        let Some(port) = self.ports.get(&frontend.service_port).filter(|port| port.has_endpoints) else {
            return Outcome::Rejected;
        };
        let (policy, masquerade) = handling(frontend, packet.sender, masquerading);
        let pool = match policy {
            TrafficPolicy::Cluster => &port.cluster,
            TrafficPolicy::Local => &port.local,
        };
        let known = pool.iter().filter(|backend| remembered.contains(&backend.socket()));
        let known: BTreeSet<Backend> = known.copied().collect();
        let chosen = if port.affinity.is_some() && !known.is_empty() { &known } else { pool };
        if chosen.is_empty() {
            return Outcome::Dropped;
        }
        let translation = |backend: &Backend| {
            let is_itself = backend.is_local && backend.address == packet.source;
            Translation { backend: *backend, masquerade: masquerade || is_itself }
        };
        Outcome::Translated(chosen.iter().map(translation).collect())
    }
}

/// The pool of a packet to a frontend, and whether the node's address becomes its source.
fn handling(frontend: &Frontend, sender: Sender, masquerading: Masquerading) -> (TrafficPolicy, bool) {
    let is_pod = masquerading.knows_pods && sender == Sender::Pod;
    if frontend.kind == FrontendKind::ClusterIp {
        return (frontend.policy, masquerading.all || masquerading.knows_pods && !is_pod);
    }
    match frontend.policy {
        TrafficPolicy::Cluster => (TrafficPolicy::Cluster, true),
        // As if the packet had gone out of the cluster and come back on any node.
        TrafficPolicy::Local if is_pod => (TrafficPolicy::Cluster, false),
        TrafficPolicy::Local if sender == Sender::Node => (TrafficPolicy::Cluster, true),
        TrafficPolicy::Local => (TrafficPolicy::Local, false),
    }
}
