//! Host endpoints: which tables a packet goes through at a node's interface (policy decisions 3, 16, 17).

use std::net::IpAddr;

use tortie_api::Cidr;
use tortie_api::calico::{EndpointToHostAction, FailsafePort, FelixConfigurationSpec};
use tortie_api::net::{Direction, Protocol};

use super::Oracle;
use super::judge::Asked;
use super::packet::Packet;
use super::trace::{DecidedBy, Table, TierOutcome, Trace, Verdict};
use super::world::HostInterface;

/// Which kind of interface a packet is at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HostLink {
    /// One by which the node reaches others.
    Outside,
    /// One between the node and a pod of its own. Only a host endpoint of all interfaces covers it, before DNAT and for
    /// what the node forwards.
    Pod,
}

/// A packet at an interface of a node.
pub(super) struct HostHop<'a> {
    pub(super) interface: &'a HostInterface,
    pub(super) at: HostLink,
    /// Whether the node is the sender's; the receiver's otherwise.
    pub(super) near: bool,
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
    /// What each table says, in order, until one settles it. Tables that nobody wrote anything for are left out.
    pub(super) fn judge_host(
        &self,
        hop: &HostHop<'_>,
        packet: &Packet<'_>,
        notes: &mut Vec<String>,
    ) -> Vec<Trace> {
        let mut traces = self.ask_tables(hop, packet, notes);
        traces
            .retain(|trace| trace.decided_by != DecidedBy::Nobody || !trace.tiers.is_empty() || trace.reply);
        traces.iter_mut().for_each(|trace| trace.at_pod = hop.at == HostLink::Pod);
        traces
    }

    fn ask_tables(&self, hop: &HostHop<'_>, packet: &Packet<'_>, notes: &mut Vec<String>) -> Vec<Trace> {
        let HostHop { interface, at, direction, forwarded, before, .. } = hop;
        let early = before.map_or_else(|| packet.clone(), |(address, port)| packet.towards(address, port));
        let ask_of = |interface: &HostInterface, table, packet: &Packet<'_>, direction| {
            let asked = Asked { identity: &interface.identity, profiles: &interface.profiles, table };
            self.judge(&asked, direction, packet)
        };
        let ask = |table, packet: &Packet<'_>, direction| ask_of(interface, table, packet, direction);
        let felix = self.world.felix(&interface.node);
        let failsafe = is_failsafe(felix, *direction, &early);
        if failsafe && *forwarded && *at == HostLink::Outside {
            notes.push(format!(
                "{}: a failsafe port: only its policies for what is forwarded are asked",
                interface.identity
            ));
        }
        let mut traces = Vec::new();
        // The host's own packets pass the raw table; what it forwards passes it on the way in only. Untracked policy does
        // not concern a host endpoint of all interfaces, nor answers of failsafe ports.
        let incoming = *direction == Direction::Ingress;
        let untracked = !interface.all_interfaces && (!forwarded || incoming);
        if !failsafe && untracked && !answers_failsafe(felix, *direction, &early) {
            let trace = ask(Table::Untracked, &early, *direction);
            if trace.decided_by != DecidedBy::Nobody {
                let allows = trace.verdict == Verdict::Allow;
                let reply = allows.then(|| self.reply(interface, *direction, &early));
                return std::iter::once(trace).chain(reply).collect();
            }
            traces.push(trace);
        }
        if !failsafe && incoming {
            let mut trace = ask(Table::PreDnat, &early, *direction);
            // Where the interface's own host endpoint has no such policy, that of all interfaces is asked.
            let has_none = trace.tiers.iter().all(|tier| tier.outcome == TierOutcome::OnlyStaged);
            let all = self.world.all_interfaces(&interface.node).filter(|_| has_none);
            if let Some(all) = all {
                trace = ask_of(all, Table::PreDnat, &early, *direction);
            }
            let decided = trace.decided_by != DecidedBy::Nobody;
            traces.push(trace);
            if decided {
                return traces;
            }
        }
        match (*forwarded, failsafe) {
            // To the node itself from a pod of its own: `Hop::OwnNode` says what becomes of it.
            (false, _) if *at == HostLink::Pod => {}
            (true, _) => traces.push(ask(Table::Forward, packet, *direction)),
            (false, false) => traces.push(ask(Table::Normal, packet, *direction)),
            (false, true) => {
                let mut trace = Trace::begin(interface.identity.to_string(), *direction, Table::Normal);
                traces.push(trace.decided(Verdict::Allow, DecidedBy::Failsafe));
            }
        }
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

/// Whether a packet comes from a failsafe port of the other direction: as an answer of it untracked policy is not asked.
fn answers_failsafe(felix: &FelixConfigurationSpec, direction: Direction, packet: &Packet<'_>) -> bool {
    let (ports, other) = match direction {
        Direction::Ingress => (felix.failsafe_outbound(), packet.source.address),
        Direction::Egress => (felix.failsafe_inbound(), packet.destination.address),
    };
    holds(&ports, packet.protocol, packet.source.port, other)
}

fn holds(ports: &[FailsafePort], protocol: Protocol, number: u16, other: IpAddr) -> bool {
    let from = |port: &FailsafePort| port.net.is_none_or(|Cidr(net)| net.contains(&other));
    protocol.has_ports()
        && ports.iter().any(|port| port.protocol.0 == protocol && port.port == number && from(port))
}
