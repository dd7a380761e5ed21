//! Host endpoints: the tables that a packet passes at a node's interface (policy decisions 3, 16, 17).

use std::net::IpAddr;

use tortie_api::Cidr;
use tortie_api::calico::{EndpointToHostAction, FailsafePort, FelixConfigurationSpec};
use tortie_api::net::{Direction, Protocol};

use super::Oracle;
use super::endpoint::JudgedEndpoint;
use super::packet::Packet;
use super::path::{HostHop, HostLink};
use super::trace::{DecidedBy, Table, TierOutcome, Trace, Verdict};
use super::world::HostInterface;

impl Oracle<'_> {
    /// The traces of the tables, in order, until one decides. Tables without policies are omitted.
    pub(super) fn judge_host(
        &self,
        hop: &HostHop<'_>,
        packet: &Packet<'_>,
        notes: &mut Vec<String>,
    ) -> Vec<Trace> {
        let mut traces = self.judge_tables(hop, packet, notes);
        traces
            .retain(|trace| trace.decided_by != DecidedBy::Nobody || !trace.tiers.is_empty() || trace.reply);
        traces.iter_mut().for_each(|trace| trace.at_pod = hop.at == HostLink::Pod);
        traces
    }

    fn judge_tables(&self, hop: &HostHop<'_>, packet: &Packet<'_>, notes: &mut Vec<String>) -> Vec<Trace> {
        let HostHop { interface, at, direction, forwarded, before, .. } = hop;
        if !forwarded && packet.is_neighbour_discovery() {
            return vec![built_in(interface, *direction, Verdict::Allow, "neighbours find each other")];
        }
        let early = before.map_or_else(|| packet.clone(), |(address, port)| packet.towards(address, port));
        let judge_at = |interface: &HostInterface, table, packet: &Packet<'_>, direction| {
            self.judge(&JudgedEndpoint::host(interface, table), direction, packet)
        };
        let judge = |table, packet: &Packet<'_>, direction| judge_at(interface, table, packet, direction);
        let felix = self.world.felix(&interface.node);
        let failsafe = is_failsafe(felix, *direction, &early);
        if failsafe && *forwarded && *at == HostLink::Outside {
            notes.push(format!(
                "{}: a failsafe port: only its policies for forwarded packets are evaluated",
                interface.identity
            ));
        }
        let mut traces = Vec::new();
        // Packets of the host itself pass the raw table in both directions; forwarded packets pass it only on the way
        // in. Untracked policy concerns neither a host endpoint of all interfaces nor answers of failsafe ports.
        let incoming = *direction == Direction::Ingress;
        let untracked = !interface.all_interfaces && (!forwarded || incoming);
        if !failsafe && untracked && !answers_failsafe(felix, *direction, &early) {
            let trace = judge(Table::Untracked, &early, *direction);
            if trace.decided_by != DecidedBy::Nobody {
                let next = match trace.verdict {
                    Verdict::Deny => None,
                    Verdict::Allow => {
                        let dropped = untracked_is_dropped(hop, packet).filter(|_| *forwarded);
                        Some(dropped.unwrap_or_else(|| self.reply(interface, *direction, &early)))
                    }
                };
                return std::iter::once(trace).chain(next).collect();
            }
            traces.push(trace);
        }
        if !failsafe && incoming {
            let mut trace = judge(Table::PreDnat, &early, *direction);
            // If the interface's own host endpoint has no such policy, that of all interfaces is evaluated.
            let has_none = trace.tiers.iter().all(|tier| tier.outcome == TierOutcome::OnlyStaged);
            let all = self.world.all_interfaces(&interface.node).filter(|_| has_none);
            if let Some(all) = all {
                trace = judge_at(all, Table::PreDnat, &early, *direction);
            }
            let decided = trace.decided_by != DecidedBy::Nobody;
            traces.push(trace);
            if decided {
                return traces;
            }
        }
        match (*forwarded, failsafe) {
            // From one of its own pods to the node itself: `Hop::OwnNode` decides.
            (false, _) if *at == HostLink::Pod => {}
            (true, _) => traces.push(judge(Table::Forward, packet, *direction)),
            (false, false) => traces.push(judge(Table::Normal, packet, *direction)),
            (false, true) => {
                let mut trace = Trace::begin(interface.identity.to_string(), *direction, Table::Normal);
                traces.push(trace.decided(Verdict::Allow, DecidedBy::Failsafe));
            }
        }
        traces
    }

    /// Evaluates the reply. An untracked packet has no connection that includes the reply, so the reply needs a rule
    /// of its own.
    fn reply(&self, interface: &HostInterface, direction: Direction, packet: &Packet<'_>) -> Trace {
        let (back, packet) = match direction {
            Direction::Ingress => (Direction::Egress, packet.reply()),
            Direction::Egress => (Direction::Ingress, packet.reply()),
        };
        let endpoint = JudgedEndpoint::host(interface, Table::Untracked);
        let mut trace = self.judge(&endpoint, back, &packet);
        trace.reply = true;
        if trace.decided_by == DecidedBy::Nobody {
            trace.verdict = Verdict::Deny;
        }
        trace
    }

    /// A packet from a pod to its own node: the node's `defaultEndpointToHostAction` decides.
    pub(super) fn to_own_node(&self, node: &str) -> Trace {
        let action = self.world.felix(node).default_endpoint_to_host_action.unwrap_or_default();
        let verdict = Verdict::from(action != EndpointToHostAction::Drop);
        Trace::begin(format!("node {node}"), Direction::Ingress, Table::Normal)
            .decided(verdict, DecidedBy::EndpointToHost { action: format!("{action:?}") })
    }
}

/// Drops a forwarded packet without connection tracking if it never reaches the pod, or if the pod's answers never come back (policy
/// decision 17).
fn untracked_is_dropped(hop: &HostHop<'_>, packet: &Packet<'_>) -> Option<Trace> {
    let rule = match (hop.before, packet.protocol) {
        (Some(_), _) => "without connection tracking, no address is translated",
        (None, Protocol::TCP) => "without connection tracking, answers of pods belong to no connection",
        (None, _) => return None,
    };
    Some(Trace { table: Table::Untracked, ..built_in(hop.interface, hop.direction, Verdict::Deny, rule) })
}

fn built_in(interface: &HostInterface, direction: Direction, verdict: Verdict, rule: &str) -> Trace {
    let mut trace = Trace::begin(interface.identity.to_string(), direction, Table::Normal);
    trace.decided(verdict, DecidedBy::BuiltIn { rule: rule.to_owned() })
}

fn is_failsafe(felix: &FelixConfigurationSpec, direction: Direction, packet: &Packet<'_>) -> bool {
    let (ports, other) = match direction {
        Direction::Ingress => (felix.failsafe_inbound(), packet.source.address),
        Direction::Egress => (felix.failsafe_outbound(), packet.destination.address),
    };
    holds(&ports, packet.protocol, packet.destination.port, other)
}

/// Whether a packet comes from a failsafe port of the other direction. Untracked policy is not evaluated for such
/// answers.
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
