//! Random host endpoints with random pods, random failsafe ports, and flows to, from and through the node.

use std::net::IpAddr;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;
use tortie_api::net::{Direction, Protocol};
use tortie_dataplane::{Failsafe, HostEndpoint, NodeState};
use tortie_policy::program::*;

use crate::common::filtering::{NODE, UPLINK};
use crate::dataplane::random_states::{self, NETS, OUTSIDE, POD, PORTS, parse, policy_id, tiers};

/// The path of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PacketPath {
    OutsideToNode,
    NodeToOutside,
    OutsideToPod,
    PodToOutside,
}

impl PacketPath {
    pub(crate) const ALL: [Self; 4] =
        [Self::OutsideToNode, Self::NodeToOutside, Self::OutsideToPod, Self::PodToOutside];

    /// Into the node by its uplink, or out of it.
    pub(crate) fn direction(self) -> Direction {
        match self {
            Self::OutsideToNode | Self::OutsideToPod => Direction::Ingress,
            Self::NodeToOutside | Self::PodToOutside => Direction::Egress,
        }
    }

    pub(crate) fn forwarded(self) -> bool {
        matches!(self, Self::OutsideToPod | Self::PodToOutside)
    }
}

/// A state with some host endpoints, the name of the uplink's host endpoint, if any, and flows on each path.
pub(crate) fn state() -> impl Strategy<Value = NodeState> {
    let failsafes = (vec(failsafe(), 0..3), vec(failsafe(), 0..3));
    let open = prop::bool::weighted(0.5);
    (random_states::state(), hosts(), failsafes, open).prop_map(|(mut state, hosts, failsafes, open)| {
        state.host_endpoints = hosts.into_iter().map(|(name, host)| (name, Arc::new(host))).collect();
        let settings = Arc::make_mut(&mut state.settings);
        (settings.failsafe_inbound, settings.failsafe_outbound) = failsafes;
        if open {
            let program = state.endpoints[&random_states::id("sentinel")].program.clone();
            let pod = state.endpoints.get_mut(&random_states::id("pod"));
            Arc::make_mut(pod.unwrap()).program = program;
        }
        state
    })
}

/// The uplink's host endpoint: those that name the interface before `*`, and of these the first by name.
pub(crate) fn of_uplink(state: &NodeState) -> Option<&HostEndpoint> {
    let named = |host: &&Arc<HostEndpoint>| match &host.interface {
        Some(name) => name == UPLINK,
        None => host.addresses.iter().any(|address| NODE.iter().any(|own| parse::<IpAddr>(own) == *address)),
    };
    let every = |host: &&Arc<HostEndpoint>| host.interface.as_deref() == Some("*");
    let mut hosts = state.host_endpoints.values();
    hosts.clone().find(named).or_else(|| hosts.find(every)).map(|host| &**host)
}

fn hosts() -> impl Strategy<Value = Vec<(String, HostEndpoint)>> {
    let by_name = |name: &'static str| program().prop_map(move |program| host(Some(name), &[], program));
    let by_address =
        (program(), 0..2usize).prop_map(|(program, which)| host(None, &NODE[which..=which], program));
    let named = prop_oneof![by_name(UPLINK), by_address];
    (weighted(0.6, named), weighted(0.2, by_name(UPLINK)), weighted(0.5, by_name("*"))).prop_map(
        |(first, second, every)| {
            let named = [("a", first), ("b", second), ("all", every)];
            named.into_iter().filter_map(|(name, host)| Some((name.to_owned(), host?))).collect()
        },
    )
}

pub(crate) fn host(
    interface: Option<&str>,
    addresses: &[&str],
    program: HostEndpointProgram,
) -> HostEndpoint {
    let addresses = addresses.iter().map(|address| parse(address)).collect();
    HostEndpoint { interface: interface.map(str::to_owned), addresses, program }
}

fn program() -> impl Strategy<Value = HostEndpointProgram> {
    let tiers = |chance| weighted(chance, tiers()).prop_map(Option::unwrap_or_default);
    let table = move |chance| {
        (tiers(chance), tiers(chance)).prop_map(|(ingress, egress)| EndpointProgram {
            ingress,
            egress,
            profiles: Vec::new(),
        })
    };
    let profiles = vec(prop_oneof![4 => Just(99u8), 1 => 0u8..4], 0..3);
    (table(0.5), table(0.4), table(0.7), table(0.7), profiles).prop_map(
        |(untracked, pre_dnat, forward, mut normal, profiles)| {
            normal.profiles = profiles.into_iter().map(policy_id).collect();
            HostEndpointProgram { untracked, pre_dnat, forward, normal }
        },
    )
}

fn failsafe() -> impl Strategy<Value = Failsafe> {
    let net = weighted(0.4, select(NETS.to_vec()).prop_map(parse));
    let protocol = select(vec![6u8, 17, 132]).prop_map(Protocol);
    (protocol, select(PORTS.to_vec()), net).prop_map(|(protocol, port, net)| Failsafe { protocol, port, net })
}

/// Flows on a path.
pub(crate) fn flow(path: PacketPath) -> impl Strategy<Value = Flow> {
    let protocol = select(vec![1u8, 6, 6, 6, 17, 17, 132, 89]);
    let ports = (select(PORTS.to_vec()), select(PORTS.to_vec()));
    let icmp = (any::<bool>(), select(vec![0u8, 5]));
    (select(OUTSIDE.to_vec()), protocol, ports, icmp).prop_map(
        move |(outside, protocol, ports, (first, code))| {
            let outside: IpAddr = parse(outside);
            let v6 = outside.is_ipv6();
            let own: IpAddr = parse(if path.forwarded() { POD } else { NODE }[usize::from(v6)]);
            let (source, destination) = match path.direction() {
                Direction::Ingress => (outside, own),
                Direction::Egress => (own, outside),
            };
            let protocol = Protocol(if v6 && protocol == 1 { 58 } else { protocol });
            let ports = if protocol.has_ports() { ports } else { (0, 0) };
            let icmp_type = match (v6, first) {
                (true, _) => 128,
                (false, true) => 8,
                (false, false) => 13,
            };
            let icmp = matches!(protocol.0, 1 | 58).then_some((icmp_type, code));
            Flow { source, destination, protocol, source_port: ports.0, destination_port: ports.1, icmp }
        },
    )
}

/// What decides whether a flow may pass the uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum By {
    NoHostEndpoint,
    Failsafe,
    Untracked,
    PreDnat,
    Forward,
    Normal,
}

/// Whether host endpoints let a flow pass according to policy decisions 16, 17 and 43, and what decides: at the
/// uplink, and between the pod and its node.
pub(crate) fn judge(state: &NodeState, path: PacketPath, flow: &Flow) -> (bool, By) {
    let uplink = at_uplink(state, path, flow);
    let pod = at_pod(state, path, flow);
    match pod {
        Some(at_pod) if uplink.0 && (!at_pod.0 || uplink.1 == By::NoHostEndpoint) => at_pod,
        _ => uplink,
    }
}

fn every_interface(state: &NodeState) -> Option<&HostEndpoint> {
    state.host_endpoints.values().map(|host| &**host).find(|host| host.interface.as_deref() == Some("*"))
}

/// The verdict of a host endpoint for all interfaces on what a pod sends to others, or receives from them.
fn at_pod(state: &NodeState, path: PacketPath, flow: &Flow) -> Option<(bool, By)> {
    let host = every_interface(state).filter(|_| path.forwarded())?;
    let ask = |table, direction| evaluate_tiers(table, direction, flow, state);
    let forward = |direction| (ask(&host.program.forward, direction).unwrap_or(true), By::Forward);
    match path.direction() {
        Direction::Ingress => Some(forward(Direction::Egress)),
        Direction::Egress if is_failsafe(state, Direction::Ingress, flow) => {
            Some(forward(Direction::Ingress))
        }
        Direction::Egress => match ask(&host.program.pre_dnat, Direction::Ingress) {
            Some(allowed) => Some((allowed, By::PreDnat)),
            None => Some(forward(Direction::Ingress)),
        },
    }
}

fn at_uplink(state: &NodeState, path: PacketPath, flow: &Flow) -> (bool, By) {
    let Some(host) = of_uplink(state) else { return (true, By::NoHostEndpoint) };
    let direction = path.direction();
    let ask = |table| evaluate_tiers(table, direction, flow, state);
    let failsafe = is_failsafe(state, direction, flow);
    let incoming = direction == Direction::Ingress;
    // Untracked policy runs before connection tracking, so failsafe ports and their answers are exempt by port.
    if !failsafe
        && !answers_failsafe(state, direction, flow)
        && (incoming || !path.forwarded())
        && let Some(allowed) = ask(&host.program.untracked)
    {
        return (allowed, By::Untracked);
    }
    // If the interface's own host endpoint has no such policy, that of all interfaces applies.
    let before_dnat = match host.program.pre_dnat.ingress.is_empty() {
        true => every_interface(state).unwrap_or(host),
        false => host,
    };
    if !failsafe
        && incoming
        && let Some(allowed) = ask(&before_dnat.program.pre_dnat)
    {
        return (allowed, By::PreDnat);
    }
    match (path.forwarded(), failsafe) {
        (true, _) => (ask(&host.program.forward).unwrap_or(true), By::Forward),
        (false, true) => (true, By::Failsafe),
        (false, false) => (evaluate(&host.program.normal, direction, flow, state), By::Normal),
    }
}

fn is_failsafe(state: &NodeState, direction: Direction, flow: &Flow) -> bool {
    match direction {
        Direction::Ingress => {
            holds(&state.settings.failsafe_inbound, flow, flow.destination_port, flow.source)
        }
        Direction::Egress => {
            holds(&state.settings.failsafe_outbound, flow, flow.destination_port, flow.destination)
        }
    }
}

/// Whether it comes from a failsafe port of the other direction: only untracked policies skip answers.
fn answers_failsafe(state: &NodeState, direction: Direction, flow: &Flow) -> bool {
    match direction {
        Direction::Ingress => holds(&state.settings.failsafe_outbound, flow, flow.source_port, flow.source),
        Direction::Egress => {
            holds(&state.settings.failsafe_inbound, flow, flow.source_port, flow.destination)
        }
    }
}

fn holds(open: &[Failsafe], flow: &Flow, port: u16, other: IpAddr) -> bool {
    open.iter().any(|open| {
        (open.protocol, open.port) == (flow.protocol, port) && open.net.is_none_or(|net| net.contains(&other))
    })
}
