//! Ports of the node that lead to pods (PortMapping policies of endpoints).
//!
//! The node's own stack translates such packets to the pod's address and port, and their answers back (the switch tells it
//! which). The client's address stays. So the fabric sees packets from anywhere to a pod's mapped port, at the node's
//! interface, and sends their answers there, wherever the client is. No source says what ACLs of Windows see; here, those of the
//! pod see the client's address and the pod's port (docs/hns.md, Host ports).

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::time::Instant;

use tortie_hcn::schema::{Endpoint, PortMapping};

use super::balance::Ends;
use super::checksum::{TCP, UDP};
use super::packet::IpPacket;
use crate::flows::lifetime;

/// The flag of a mapping that the node itself uses, too (`LocalRoutedVip`).
const LOCAL_ROUTED_VIP: u32 = 1;
/// Beyond this number of connections, expired ones are removed.
const MANY: usize = 4096;

/// The node's ports: protocol, address and port, and where each leads.
pub(crate) type HostPorts = BTreeMap<(u8, Ipv4Addr, u16), HostPort>;

/// Where a port of the node leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) pod: Ipv4Addr,
    pub(crate) port: u16,
    /// Whether it leads there for the node itself, too.
    pub(crate) from_node: bool,
}

/// The ports of the node with this address that lead to these pods.
pub(super) fn host_ports<'a>(
    pods: impl Iterator<Item = (Ipv4Addr, &'a Endpoint)>,
    node: Ipv4Addr,
) -> HostPorts {
    pods.flat_map(|(pod, endpoint)| of_pod(pod, endpoint, node)).collect()
}

fn of_pod(
    pod: Ipv4Addr,
    endpoint: &Endpoint,
    node: Ipv4Addr,
) -> impl Iterator<Item = ((u8, Ipv4Addr, u16), HostPort)> {
    let mappings = endpoint.policies.iter().filter_map(|it| it.settings::<PortMapping>().ok().flatten());
    mappings.filter_map(move |mapping| {
        let protocol = [TCP, UDP].into_iter().find(|it| mapping.protocol == u32::from(*it))?;
        let address = if mapping.vip.is_empty() { node } else { mapping.vip.parse().ok()? };
        let from_node = mapping.flags & LOCAL_ROUTED_VIP != 0;
        let to = HostPort { pod, port: mapping.internal_port, from_node };
        Some(((protocol, address, mapping.external_port), to))
    })
}

/// The connections that came by a port of the node, by the ends of their answers.
#[derive(Debug, Default)]
pub(super) struct Returns(HashMap<Ends, Instant>);

impl Returns {
    /// Notes a packet that came from the node.
    pub(super) fn note(&mut self, ports: &HostPorts, packet: &IpPacket<'_>, now: Instant) {
        let Some(ends) = Ends::of(packet) else { return };
        let leads = |to: &HostPort| ends.destination() == (to.pod, to.port);
        if !ports.iter().any(|((protocol, ..), to)| *protocol == packet.protocol() && leads(to)) {
            return;
        }
        if self.0.len() >= MANY {
            self.0.retain(|ends, seen| now.duration_since(*seen) < lifetime(ends.protocol()));
        }
        self.0.insert(ends.back(), now);
    }

    /// Whether the packet answers such a connection.
    pub(super) fn has(&mut self, packet: &IpPacket<'_>, now: Instant) -> bool {
        let seen = Ends::of(packet).and_then(|ends| self.0.get_mut(&ends));
        let alive = seen.filter(|seen| now.duration_since(**seen) < lifetime(packet.protocol()));
        alive.map(|seen| *seen = now).is_some()
    }
}
