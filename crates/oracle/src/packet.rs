//! A packet and its two ends.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tortie_api::net::Protocol;

use super::Question;
use super::world::{Identity, LabelledNode, NamedPort, World};

/// A packet as policy sees it.
#[derive(Clone)]
pub(super) struct Packet<'a> {
    world: &'a World,
    pub(super) source: PacketEnd<'a>,
    pub(super) destination: PacketEnd<'a>,
    pub(super) protocol: Protocol,
    pub(super) icmp: Option<(u8, u8)>,
}

/// One end of a packet.
#[derive(Clone)]
pub(super) struct PacketEnd<'a> {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    /// The pods and host endpoints that have the address (none or one pod, or two for a moment), and the network sets
    /// that contain it.
    pub(super) present: Vec<&'a Identity>,
    /// The nodes that have the address.
    pub(super) nodes: Vec<&'a LabelledNode>,
}

impl<'a> Packet<'a> {
    pub(super) fn new(world: &'a World, source: IpAddr, destination: IpAddr, question: &Question) -> Self {
        Self {
            world,
            source: PacketEnd::new(world, source, question.source_port),
            destination: PacketEnd::new(world, destination, question.destination_port),
            protocol: question.protocol,
            icmp: question.icmp,
        }
    }

    /// The packet with this source address, if there is one.
    pub(super) fn with_source(&self, address: Option<IpAddr>) -> Self {
        let source = address.map_or_else(
            || self.source.clone(),
            |address| PacketEnd::new(self.world, address, self.source.port),
        );
        Self { source, ..self.clone() }
    }

    /// The packet with another destination.
    pub(super) fn towards(&self, address: IpAddr, port: u16) -> Self {
        Self { destination: PacketEnd::new(self.world, address, port), ..self.clone() }
    }

    /// True if neighbours find each other by it, or routers.
    pub(super) fn is_neighbour_discovery(&self) -> bool {
        let is_type = |(icmp_type, _): (u8, u8)| (133..=136).contains(&icmp_type);
        self.protocol == Protocol::ICMPV6 && self.icmp.is_some_and(is_type)
    }

    /// The packet that answers this one.
    pub(super) fn reply(&self) -> Self {
        let answer = |(icmp_type, code)| match (self.protocol, icmp_type) {
            (Protocol::ICMP, 8) => (0, code),
            (Protocol::ICMPV6, 128) => (129, code),
            (_, other) => (other, code),
        };
        Self {
            source: self.destination.clone(),
            destination: self.source.clone(),
            icmp: self.icmp.map(answer),
            ..self.clone()
        }
    }

    /// The packet's protocol and destination port for readers.
    pub(super) fn shown_port(&self, side: &PacketEnd<'_>) -> String {
        match self.protocol.has_ports() {
            true => format!("the packet has {} {}", self.protocol, side.port),
            false => format!("the packet is {}", self.protocol),
        }
    }

    /// Whether the Service has a backend with this side's address, and with `with_port` also with the packet's
    /// protocol and this side's port.
    pub(super) fn is_backend(
        &self,
        side: &PacketEnd<'_>,
        namespace: &str,
        name: &str,
        with_port: bool,
    ) -> bool {
        let Some(backends) = self.world.backends.get(&(namespace.to_owned(), name.to_owned())) else {
            return false;
        };
        match with_port {
            true => backends.ports.contains(&(side.address, self.protocol, side.port)),
            false => backends.addresses.contains(&side.address),
        }
    }

    /// Whether the pod declares this name for the packet's protocol and port (policy decision 12).
    pub(super) fn is_named(&self, side: &PacketEnd<'_>, pod: &Identity, name: &str) -> bool {
        let is =
            |port: &NamedPort| port.name == name && port.protocol == self.protocol && port.port == side.port;
        pod.ports.iter().any(is)
    }
}

impl<'a> PacketEnd<'a> {
    fn new(world: &'a World, address: IpAddr, port: u16) -> Self {
        let pods = world.at(address);
        let sets = world.network_sets.iter().filter(|set| set.nets.iter().any(|net| net.contains(&address)));
        let identities = pods.map(|pod| &pod.identity).chain(sets.map(|set| &set.identity));
        let hosts = world.hosts_at(address).map(|host| &host.identity);
        let nodes = world.nodes_at(address).collect();
        Self { address, port, present: identities.chain(hosts).collect(), nodes }
    }

    /// Whether any pod at this side matches the condition.
    pub(super) fn any_pod(&self, condition: impl Fn(&Identity) -> bool) -> bool {
        self.present.iter().any(|present| present.is_pod() && condition(present))
    }

    /// The first pod at this side that matches the condition.
    pub(super) fn pod(&self, condition: impl Fn(&Identity) -> bool) -> Option<&'a Identity> {
        self.present.iter().copied().find(|present| present.is_pod() && condition(present))
    }

    /// The objects at this side with their own labels.
    pub(super) fn described(&self) -> String {
        match (self.present.first(), self.nodes.first()) {
            (Some(present), _) => format!("{present} has {}", shown(&present.own_labels)),
            (None, Some(node)) => format!("node {} has {}", node.name, shown(&node.labels)),
            (None, None) => format!("{} is no pod's and in no network set", self.address),
        }
    }
}

impl Identity {
    /// Its namespace with the labels that selectors of namespaces see.
    pub(super) fn described_namespace(&self) -> String {
        format!("namespace {} has {}", self.namespace, shown(&self.namespace_labels))
    }
}

/// Labels as text for readers.
pub(super) fn shown(labels: &BTreeMap<String, String>) -> String {
    if labels.is_empty() {
        return "no labels".to_owned();
    }
    let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    labels.join(",")
}
