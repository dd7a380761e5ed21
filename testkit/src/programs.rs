//! Judges whole flows by compiled programs: every node's calc, and the order in which a packet meets their programs.
//!
//! This order is implemented a second time here, separately from the oracle, so that each can contradict the other.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::Value;
use tortie_api::calico::EndpointToHostAction;
use tortie_api::net::Direction;
use tortie_api::{Key, Kind, Resource};
use tortie_calc::{Calc, Finding};
use tortie_dataplane::{Endpoint, EndpointId, Failsafe, HostEndpoint, NodeState};
use tortie_policy::program::{EndpointProgram, Flow, evaluate, evaluate_tiers};

/// The interface of every node towards other nodes and the world.
const OUTSIDE_INTERFACE: &str = "eth0";

/// The nodes of a cluster, each with the programs that calc compiles for it.
pub struct Programs {
    nodes: BTreeMap<String, Node>,
    pods: BTreeMap<IpAddr, (String, EndpointId)>,
}

struct Node {
    calc: Calc,
    /// Its own addresses.
    addresses: Vec<IpAddr>,
}

/// The verdict of each side on a flow; `None` if the side is not involved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sides {
    /// The sending pod's egress.
    pub egress: Option<bool>,
    /// All host endpoints on the way, and the action of a node for packets from its own pods.
    pub hosts: Option<bool>,
    /// The receiving pod's ingress.
    pub ingress: Option<bool>,
}

impl Sides {
    /// Whether the flow passes: every side allows it.
    #[must_use]
    pub fn passes(&self) -> bool {
        [self.egress, self.hosts, self.ingress].into_iter().all(|side| side != Some(false))
    }

    fn host(&mut self, allows: bool) {
        self.hosts = Some(self.hosts.unwrap_or(true) && allows);
    }
}

/// One end of a flow.
enum End<'a> {
    Pod(&'a Node, &'a str, &'a Endpoint),
    Node(&'a Node, &'a str),
    Outside,
}

impl<'a> End<'a> {
    fn node(&self) -> Option<(&'a Node, &'a str)> {
        match self {
            Self::Pod(node, name, _) | Self::Node(node, name) => Some((node, name)),
            Self::Outside => None,
        }
    }
}

impl Programs {
    /// Compiles the cluster for each of its nodes. Pods are identified by their WorkloadEndpoints.
    #[must_use]
    pub fn new(objects: &[(Key, Value)]) -> Self {
        let mut nodes = BTreeMap::new();
        for (key, value) in objects.iter().filter(|(key, _)| key.kind == Kind::Node) {
            let mut calc = Calc::new(&*key.name);
            for (key, value) in objects {
                calc.update(key, Some(value));
            }
            calc.flush();
            let addresses = match Resource::read(key, value) {
                Ok(Resource::Node(node)) => {
                    let v4 = node.address().map(IpAddr::V4);
                    v4.into_iter().chain(node.address_v6().map(IpAddr::V6)).collect()
                }
                _ => Vec::new(),
            };
            nodes.insert(key.name.clone(), Node { calc, addresses });
        }
        let mut pods = BTreeMap::new();
        for (name, node) in &nodes {
            for (id, endpoint) in &node.calc.state().endpoints {
                pods.extend(endpoint.addresses.iter().map(|address| (*address, (name.clone(), id.clone()))));
            }
        }
        Self { nodes, pods }
    }

    /// Calc's findings on all nodes.
    pub fn findings(&self) -> impl Iterator<Item = Finding> {
        self.nodes.values().flat_map(|node| node.calc.findings())
    }

    /// Evaluates all programs on the flow's way.
    #[must_use]
    pub fn judge(&self, flow: &Flow) -> Sides {
        let (from, to) = (self.end(flow.source), self.end(flow.destination));
        let mut sides = Sides::default();
        let same_node = match (from.node(), to.node()) {
            (Some((_, from)), Some((_, to))) => from == to,
            _ => false,
        };
        if let End::Pod(node, _, endpoint) = &from {
            let state = node.calc.state();
            let encapsulated =
                flow.protocol.0 == 4 || (flow.protocol.0 == 17 && flow.destination_port == 4789);
            let allows = !encapsulated && evaluate(&endpoint.program, Direction::Egress, flow, state);
            sides.egress = Some(allows);
        }
        match (&from, &to) {
            (End::Pod(node, ..), End::Node(..)) if same_node => {
                let state = node.calc.state();
                if let Some(allows) = star_pre_dnat(state, flow) {
                    sides.host(allows);
                }
                sides.host(state.settings.endpoint_to_host != EndpointToHostAction::Drop);
                return sides;
            }
            (End::Node(..), _) | (_, End::Node(..)) if same_node => return sides,
            _ => {}
        }
        // A node judges a packet at the interface where it arrives, and at the one where it leaves.
        if let End::Pod(node, ..) = &from {
            forwarded(
                node.calc.state(),
                Interface::Pod,
                if same_node { Interface::Pod } else { node.outside() },
                flow,
            )
            .into_iter()
            .for_each(|allows| sides.host(allows));
        }
        if !same_node {
            match &from {
                End::Node(node, _) => {
                    own(node, Direction::Egress, flow).into_iter().for_each(|allows| sides.host(allows))
                }
                End::Pod(..) | End::Outside => {}
            }
            match &to {
                End::Node(node, _) => {
                    own(node, Direction::Ingress, flow).into_iter().for_each(|allows| sides.host(allows))
                }
                End::Pod(node, ..) => forwarded(node.calc.state(), node.outside(), Interface::Pod, flow)
                    .into_iter()
                    .for_each(|allows| sides.host(allows)),
                End::Outside => {}
            }
        }
        if let End::Pod(node, _, endpoint) = &to {
            sides.ingress = Some(evaluate(&endpoint.program, Direction::Ingress, flow, node.calc.state()));
        }
        sides
    }

    fn end(&self, address: IpAddr) -> End<'_> {
        if let Some((name, id)) = self.pods.get(&address)
            && let Some((name, node)) = self.nodes.get_key_value(name)
            && let Some(endpoint) = node.calc.state().endpoints.get(id)
        {
            return End::Pod(node, name, endpoint);
        }
        let found = self.nodes.iter().find(|(_, node)| node.addresses.contains(&address));
        found.map_or(End::Outside, |(name, node)| End::Node(node, name))
    }
}

/// An interface of a node, with its host endpoint.
#[derive(Clone, Copy)]
enum Interface<'a> {
    /// A pod's interface: only forward and preDNAT policies of `*` apply to it.
    Pod,
    Outside(Option<&'a HostEndpoint>),
}

impl Node {
    fn outside(&self) -> Interface<'_> {
        Interface::Outside(self.host_endpoint())
    }

    /// The host endpoint of the outside interface: one that names it or has its address, the first by name; otherwise
    /// `*`.
    fn host_endpoint(&self) -> Option<&HostEndpoint> {
        let hosts = || self.calc.state().host_endpoints.values().map(|host| &**host);
        let means = |host: &&HostEndpoint| match &host.interface {
            Some(name) => name == OUTSIDE_INTERFACE,
            None => host.addresses.iter().any(|address| self.addresses.contains(address)),
        };
        hosts().find(means).or_else(|| hosts().find(is_star))
    }
}

fn is_star(host: &&HostEndpoint) -> bool {
    host.interface.as_deref() == Some("*")
}

fn star(state: &NodeState) -> Option<&HostEndpoint> {
    state.host_endpoints.values().map(|host| &**host).find(is_star)
}

/// The verdict of the preDNAT policies of `*` on a packet that arrives at any interface.
fn star_pre_dnat(state: &NodeState, flow: &Flow) -> Option<bool> {
    if is_failsafe(state, Direction::Ingress, flow) {
        return None;
    }
    evaluate_tiers(&star(state)?.program.pre_dnat, Direction::Ingress, flow, state)
}

/// The verdict of the preDNAT policies on a packet that arrives at an interface.
fn before_dnat(state: &NodeState, interface: Interface<'_>, flow: &Flow) -> Option<bool> {
    match interface {
        Interface::Outside(Some(host)) if host.interface.as_deref() != Some("*") => {
            if is_failsafe(state, Direction::Ingress, flow) {
                return None;
            }
            if !answers_failsafe(state, Direction::Ingress, flow)
                && let Some(allows) = evaluate_tiers(&host.program.untracked, Direction::Ingress, flow, state)
            {
                return Some(allows);
            }
            match has_policies(&host.program.pre_dnat) {
                true => evaluate_tiers(&host.program.pre_dnat, Direction::Ingress, flow, state),
                false => star_pre_dnat(state, flow),
            }
        }
        _ => star_pre_dnat(state, flow),
    }
}

fn has_policies(program: &EndpointProgram) -> bool {
    !program.ingress.is_empty()
}

/// The verdict of a node's host endpoints on a packet that it forwards.
fn forwarded(
    state: &NodeState,
    incoming: Interface<'_>,
    outgoing: Interface<'_>,
    flow: &Flow,
) -> Option<bool> {
    let of = |interface| match interface {
        Interface::Pod => star(state),
        Interface::Outside(host) => host,
    };
    let ask = |interface, direction| {
        let host = of(interface)?;
        Some(evaluate_tiers(&host.program.forward, direction, flow, state).unwrap_or(true))
    };
    let came_in = before_dnat(state, incoming, flow).or_else(|| ask(incoming, Direction::Ingress));
    let goes_out = ask(outgoing, Direction::Egress);
    [came_in, goes_out].into_iter().flatten().reduce(|a, b| a && b)
}

/// The verdict of a node's host endpoint on a packet of the node itself.
fn own(node: &Node, direction: Direction, flow: &Flow) -> Option<bool> {
    let state = node.calc.state();
    let interface = node.outside();
    if direction == Direction::Ingress
        && let Some(allows) = before_dnat(state, interface, flow)
    {
        return Some(allows);
    }
    let Interface::Outside(Some(host)) = interface else { return None };
    if is_failsafe(state, direction, flow) {
        return Some(true);
    }
    if direction == Direction::Egress
        && !is_star(&host)
        && !answers_failsafe(state, direction, flow)
        && let Some(allows) = evaluate_tiers(&host.program.untracked, direction, flow, state)
    {
        return Some(allows);
    }
    Some(evaluate(&host.program.normal, direction, flow, state))
}

/// Whether a packet is addressed to a failsafe port.
#[must_use]
pub fn is_failsafe(state: &NodeState, direction: Direction, flow: &Flow) -> bool {
    match direction {
        Direction::Ingress => {
            holds(&state.settings.failsafe_inbound, flow, flow.destination_port, flow.source)
        }
        Direction::Egress => {
            holds(&state.settings.failsafe_outbound, flow, flow.destination_port, flow.destination)
        }
    }
}

/// Whether a packet comes from a failsafe port of the other direction: untracked policies do not apply to answers.
#[must_use]
pub fn answers_failsafe(state: &NodeState, direction: Direction, flow: &Flow) -> bool {
    match direction {
        Direction::Ingress => holds(&state.settings.failsafe_outbound, flow, flow.source_port, flow.source),
        Direction::Egress => {
            holds(&state.settings.failsafe_inbound, flow, flow.source_port, flow.destination)
        }
    }
}

fn holds(open: &[Failsafe], flow: &Flow, port: u16, other: IpAddr) -> bool {
    open.iter().any(|open| {
        flow.protocol.has_ports()
            && (open.protocol, open.port) == (flow.protocol, port)
            && open.net.is_none_or(|net| net.contains(&other))
    })
}
