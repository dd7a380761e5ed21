//! Host endpoints: which tables a packet goes through at a node's interface (semantics 3, 16, 17).

use std::net::IpAddr;

use tortie_api::Cidr;
use tortie_api::calico::{EndpointToHostAction, FailsafePort, FelixConfigurationSpec};
use tortie_api::net::{Direction, Protocol};

use super::Oracle;
use super::judge::Asked;
use super::packet::Packet;
use super::trace::{DecidedBy, Table, Trace, Verdict};
use super::world::HostInterface;

/// A packet at an interface of a node.
pub(super) struct HostHop<'a> {
    pub(super) interface: &'a HostInterface,
    /// Into the node by it, or out.
    pub(super) direction: Direction,
    /// Whether the node passes the packet on, rather than being its sender or receiver.
    pub(super) forwarded: bool,
    /// The source that the packet has by now, where a node before this one has put its own address there.
    pub(super) source: Option<IpAddr>,
    /// The destination that the packet has before this node translates it.
    pub(super) before: Option<(IpAddr, u16)>,
}

impl Oracle<'_> {
    /// What each table says, in order, until one settles it.
    pub(super) fn judge_host(
        &self,
        hop: &HostHop<'_>,
        packet: &Packet<'_>,
        notes: &mut Vec<String>,
    ) -> Vec<Trace> {
        let HostHop { interface, direction, forwarded, before, .. } = hop;
        let early = before.map_or_else(|| packet.clone(), |(address, port)| packet.towards(address, port));
        let ask = |table, packet: &Packet<'_>, direction| {
            self.judge(
                &Asked { identity: &interface.identity, profiles: &interface.profiles, table },
                direction,
                packet,
            )
        };
        let felix = self.world.felix(&interface.node);
        let failsafe = is_failsafe(felix, *direction, &early);
        if failsafe && *forwarded {
            notes.push(format!(
                "{}: a failsafe port: only its policies for what is forwarded are asked",
                interface.identity
            ));
        }
        let mut traces = Vec::new();
        // The host's own packets pass the raw table; what it forwards passes it on the way in only.
        if !failsafe && (!forwarded || *direction == Direction::Ingress) {
            traces.push(ask(Table::Untracked, &early, *direction));
            if traces[0].decided_by != DecidedBy::Nobody {
                if traces[0].verdict == Verdict::Allow {
                    traces.push(self.reply(interface, *direction, &early));
                }
                return traces;
            }
            if *direction == Direction::Ingress {
                traces.push(ask(Table::PreDnat, &early, *direction));
                if traces[1].decided_by != DecidedBy::Nobody {
                    return traces;
                }
            }
        }
        match (*forwarded, failsafe) {
            (true, _) => traces.push(ask(Table::Forward, packet, *direction)),
            (false, false) => traces.push(ask(Table::Normal, packet, *direction)),
            (false, true) => {
                let mut trace = Trace::begin(interface.identity.to_string(), *direction, Table::Normal);
                traces.push(trace.decided(Verdict::Allow, DecidedBy::Failsafe));
            }
        }
        // Tables that nobody wrote anything for are not worth a word.
        traces.retain(|trace| trace.decided_by != DecidedBy::Nobody || !trace.tiers.is_empty());
        traces
    }

    /// A packet that is not tracked has no connection to which the reply belongs: the reply needs a rule of its own.
    fn reply(&self, interface: &HostInterface, direction: Direction, packet: &Packet<'_>) -> Trace {
        let (back, packet) = match direction {
            Direction::Ingress => (Direction::Egress, packet.reply()),
            Direction::Egress => (Direction::Ingress, packet.reply()),
        };
        let asked =
            Asked { identity: &interface.identity, profiles: &interface.profiles, table: Table::Untracked };
        let mut trace = self.judge(&asked, back, &packet);
        trace.reply = true;
        if trace.decided_by == DecidedBy::Nobody {
            trace.verdict = Verdict::Deny;
        }
        trace
    }

    /// From a pod to its own node: what the node is told to do with such packets.
    pub(super) fn to_own_node(&self, node: &str) -> Trace {
        let action = self.world.felix(node).default_endpoint_to_host_action.unwrap_or_default();
        let verdict = Verdict::from(action != EndpointToHostAction::Drop);
        Trace::begin(format!("node {node}"), Direction::Ingress, Table::Normal)
            .decided(verdict, DecidedBy::EndpointToHost { action: format!("{action:?}") })
    }
}

fn is_failsafe(felix: &FelixConfigurationSpec, direction: Direction, packet: &Packet<'_>) -> bool {
    let (ports, other) = match direction {
        Direction::Ingress => (felix.failsafe_inbound(), packet.source.address),
        Direction::Egress => (felix.failsafe_outbound(), packet.destination.address),
    };
    holds(&ports, packet.protocol, packet.destination.port, other)
}

fn holds(ports: &[FailsafePort], protocol: Protocol, number: u16, other: IpAddr) -> bool {
    let from = |port: &FailsafePort| port.net.is_none_or(|Cidr(net)| net.contains(&other));
    protocol.has_ports()
        && ports.iter().any(|port| port.protocol.0 == protocol && port.port == number && from(port))
}
