//! A packet, and who is at its two ends.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tortie_api::net::Protocol;

use super::Question;
use super::world::{NamedPort, Workload, World};

/// A packet as policy sees it.
pub(super) struct Packet<'a> {
    pub(super) source: Side<'a>,
    pub(super) destination: Side<'a>,
    pub(super) protocol: Protocol,
    pub(super) icmp: Option<(u8, u8)>,
}

/// One end of a packet.
pub(super) struct Side<'a> {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    /// The pods that have the address: one, none, or for a moment two.
    pub(super) pods: Vec<&'a Workload>,
}

impl<'a> Packet<'a> {
    pub(super) fn new(world: &'a World, source: IpAddr, destination: IpAddr, question: &Question) -> Self {
        let side = |address: IpAddr, port| Side {
            address,
            port,
            pods: world.workloads.iter().filter(|pod| pod.addresses.contains(&address)).collect(),
        };
        Self {
            source: side(source, question.source_port),
            destination: side(destination, question.destination_port),
            protocol: question.protocol,
            icmp: question.icmp,
        }
    }

    /// What is said of the packet's protocol and destination port.
    pub(super) fn shown_port(&self, side: &Side<'_>) -> String {
        match self.protocol.has_ports() {
            true => format!("{} {}", self.protocol, side.port),
            false => self.protocol.to_string(),
        }
    }

    /// Whether the pod declares this name for the packet's protocol and port (semantics 12).
    pub(super) fn is_named(&self, side: &Side<'_>, pod: &Workload, name: &str) -> bool {
        let is =
            |port: &NamedPort| port.name == name && port.protocol == self.protocol && port.port == side.port;
        pod.ports.iter().any(is)
    }
}

impl Side<'_> {
    /// Whether any of the pods here fulfils the condition.
    pub(super) fn any(&self, condition: impl Fn(&Workload) -> bool) -> bool {
        self.pods.iter().any(|pod| condition(pod))
    }

    /// Who is here, with its own labels.
    pub(super) fn described(&self) -> String {
        match self.pods.first() {
            Some(pod) => format!("{pod} has {}", shown(&pod.own_labels)),
            None => format!("{} is no pod's", self.address),
        }
    }
}

/// Labels for a reader.
pub(super) fn shown(labels: &BTreeMap<String, String>) -> String {
    if labels.is_empty() {
        return "no labels".to_owned();
    }
    let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
    labels.join(",")
}
