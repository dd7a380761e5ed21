//! Decides where a frame goes.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use tortie_hcn::Guid;
use tracing::{debug, trace};

use super::balance::{Balancing, Connection, Connections, Sender};
use super::frame::{Frame, Mac, ip_frame, unvxlan, vxlan};
use super::host_ports::Returns;
use super::judge::{self, Decision};
use super::packet::{IpPacket, Ipv4Packet};
use super::plan::{MTU, Plan, PodPort, Remote, is_of_link};
use super::segment::complete;
use crate::acl::PacketDirection;
use crate::config::EgressSees;
use crate::counters::Counters;
use crate::flows::Flows;

/// A port where frames enter and leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Port {
    /// An attached endpoint.
    Pod(Guid),
    /// The node's own interface on a network.
    Node(Guid),
}

/// Output of the fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    /// A frame, out of a port.
    Frame(Port, Vec<u8>),
    /// A VXLAN datagram to another node.
    Tunnel(Ipv4Addr, Vec<u8>),
}

/// The networks of a node, with the flows of their ports.
#[derive(Debug, Default)]
pub(crate) struct Fabric {
    plans: BTreeMap<Guid, Arc<Plan>>,
    flows: HashMap<Guid, Flows>,
    connections: Connections,
    returns: Returns,
    pub(crate) counters: Counters,
}

impl Fabric {
    /// Replaces the plans. Flows of endpoints that still exist continue, unless they were reset: then the returned
    /// packets end their connections.
    pub(crate) fn set_plans(&mut self, plans: BTreeMap<Guid, Arc<Plan>>, now: Instant) -> Vec<Output> {
        let is_there = |endpoint: &Guid| plans.values().any(|plan| plan.pods.contains_key(endpoint));
        self.flows.retain(|endpoint, _| is_there(endpoint));
        self.counters.retain(is_there);
        self.plans = plans.clone();
        let balanced = |balancer| {
            plans.values().any(|plan| plan.fronts.values().any(|front| front.balancer() == balancer))
        };
        let has_pod = |address| plans.values().any(|plan| plan.pod(IpAddr::V4(address)).is_some());
        let pods = plans.iter().flat_map(|(id, plan)| plan.pods.values().map(move |pod| (*id, plan, pod)));
        let mut outputs = Vec::new();
        for (network, plan, pod) in pods {
            let Some(flows) = self.flows.get_mut(&pod.endpoint) else { continue };
            for (key, expected) in flows.follow(pod.resets) {
                debug!(endpoint = %pod.endpoint, ?key, "the connection is reset: the ACLs were written");
                let [mut to_pod, mut to_peer] = judge::resets(&key, &expected);
                if let Some(connection) = self.connections.of_flow(&key) {
                    to_pod = to_pod.map(|packet| connection.answer_by_service(&packet));
                    to_peer = to_peer.map(|packet| connection.on_the_way(&packet));
                }
                outputs.extend(to_pod.map(|packet| answer(plan, pod, &packet)));
                outputs.extend(
                    to_peer.into_iter().flat_map(|packet| self.send_for(network, plan, pod, &packet, now)),
                );
            }
        }
        self.connections.keep(|balancer, pod| balanced(balancer) && pod.is_none_or(has_pod));
        outputs
    }

    /// Handles a frame that arrived at a port.
    pub(crate) fn arrive(&mut self, port: Port, frame: &[u8], now: Instant) -> Vec<Output> {
        let has = |network: &Guid, plan: &Plan| match port {
            Port::Node(id) => id == *network,
            Port::Pod(id) => plan.pods.contains_key(&id),
        };
        let Some((network, plan)) = self.plans.iter().find(|(network, plan)| has(network, plan)) else {
            return vec![];
        };
        let (network, plan) = (*network, Arc::clone(plan));
        let pod = match port {
            Port::Pod(id) => plan.pods.get(&id),
            Port::Node(_) => None,
        };
        let resolve = |target| mac_of(&plan, pod.map(Arc::as_ref), target);
        let reply = |frame| Output::Frame(port, frame);
        match Frame::parse(frame) {
            Frame::ArpRequest(request) => {
                resolve(request.target.into()).map(|mac| reply(request.reply(mac))).into_iter().collect()
            }
            Frame::Solicitation(request) => {
                resolve(request.target.into()).map(|mac| reply(request.reply(mac))).into_iter().collect()
            }
            Frame::Ip { source, packet, .. } => {
                if let Some(pod) = pod {
                    if source != pod.mac || !pod.has(packet.source()) {
                        debug!(?port, source = %packet.source(), "dropped: not the endpoint's own address");
                        return vec![];
                    }
                    return self.leave(network, &plan, pod, &packet, now);
                }
                self.returns.note(&plan.host_ports, &packet, now);
                self.leave_node(network, &plan, source, &packet, now)
            }
            Frame::Other => vec![],
        }
    }

    /// Handles a packet that a pod sends.
    fn leave(
        &mut self,
        network: Guid,
        plan: &Plan,
        pod: &PodPort,
        packet: &IpPacket<'_>,
        now: Instant,
    ) -> Vec<Output> {
        let connection = match self.connections.leaves(&plan.fronts, packet, Sender::Pod, now) {
            Balancing::Unchanged => None,
            Balancing::ToBackend(connection) => Some(connection),
            Balancing::NoBackend => {
                debug!(endpoint = %pod.endpoint, to = %packet.destination(), "dropped: no backend is left");
                return vec![];
            }
        };
        let to_backend = connection.map(|connection| connection.for_backend(packet.bytes()));
        let to_backend = to_backend.as_deref().and_then(IpPacket::parse);
        let seen = to_backend.as_ref().filter(|_| plan.egress_sees == EgressSees::Backend).unwrap_or(packet);
        match (self.judge(pod, seen, PacketDirection::Out, now), connection) {
            (Decision::Drop, _) => vec![],
            (Decision::Pass, None) => self.send_for(network, plan, pod, packet.bytes(), now),
            (Decision::Pass, Some(connection)) => {
                let packet = connection.on_the_way(packet.bytes());
                self.send_for(network, plan, pod, &packet, now)
            }
            (Decision::Answer(packet), None) => vec![answer(plan, pod, &packet)],
            (Decision::Answer(packet), Some(connection)) => {
                vec![answer(plan, pod, &connection.answer_by_service(&packet))]
            }
        }
    }

    /// Handles a packet that the node's stack sends.
    fn leave_node(
        &mut self,
        network: Guid,
        plan: &Plan,
        source: Mac,
        packet: &IpPacket<'_>,
        now: Instant,
    ) -> Vec<Output> {
        match self.connections.leaves(&plan.node_fronts, packet, Sender::Node, now) {
            Balancing::Unchanged => self.forward(network, plan, source, packet, now),
            Balancing::ToBackend(connection) => {
                let packet = connection.on_the_way(packet.bytes());
                let Some(packet) = IpPacket::parse(&packet) else { return vec![] };
                if plan.is_behind_adapter(packet.destination()) {
                    return vec![to_node(network, plan, source, packet.bytes())];
                }
                self.forward(network, plan, source, &packet, now)
            }
            Balancing::NoBackend => {
                debug!(to = %packet.destination(), "dropped: no backend is left for the node's packet");
                vec![]
            }
        }
    }

    /// Handles a VXLAN datagram from another node.
    pub(crate) fn arrive_by_tunnel(
        &mut self,
        sender: Ipv4Addr,
        datagram: &[u8],
        now: Instant,
    ) -> Vec<Output> {
        let Some((vni, frame)) = unvxlan(datagram) else { return vec![] };
        let takes = |plan: &Plan| {
            plan.vni == Some(vni) && plan.remotes.iter().any(|remote| remote.provider == sender)
        };
        let Some((network, plan)) = self.plans.iter().find(|(_, plan)| takes(plan)) else {
            debug!(%sender, vni, "dropped a VXLAN packet: no network has that VNI and a route to the sender");
            return vec![];
        };
        let (network, plan) = (*network, Arc::clone(plan));
        let Frame::Ip { destination, packet: IpPacket::V4(packet), .. } = Frame::parse(frame) else {
            return vec![];
        };
        let for_us = destination == plan.router_mac || plan.pods.values().any(|pod| pod.mac == destination);
        if !for_us {
            debug!(%sender, ?destination, "dropped a VXLAN packet: its inner MAC address is not ours");
            return vec![];
        }
        if !plan.may_come_by_tunnel(packet.source()) {
            debug!(%sender, source = %packet.source(), "dropped a VXLAN packet: its inner source is of this node");
            return vec![];
        }
        let pod = plan.pod(packet.destination().into());
        let mtu = pod.map_or(MTU, |pod| pod.mtu);
        let packets = match complete(&packet, mtu as usize) {
            Ok(packets) => packets,
            Err(unfit) => {
                debug!(%sender, ?unfit, length = packet.bytes().len(), "dropped a packet from a tunnel");
                return vec![];
            }
        };
        let packets = packets.iter().filter_map(|packet| Ipv4Packet::parse(packet)).map(IpPacket::V4);
        packets.flat_map(|packet| self.deliver(network, &plan, plan.router_mac, &packet, now)).collect()
    }

    /// Sends a packet to a port of this node, or through a tunnel.
    fn forward(
        &mut self,
        network: Guid,
        plan: &Plan,
        source: Mac,
        packet: &IpPacket<'_>,
        now: Instant,
    ) -> Vec<Output> {
        if self.returns.has(packet, now) {
            // The node translates it back, and sends it to the client.
            return vec![to_node(network, plan, source, packet.bytes())];
        }
        let to = packet.destination();
        if let Some(remote) = plan.remote(to).filter(|_| plan.pod(to).is_none()) {
            return vec![encapsulate(plan, remote, packet)];
        }
        self.deliver(network, plan, source, packet, now)
    }

    /// Sends a packet on behalf of a pod.
    fn send_for(
        &mut self,
        network: Guid,
        plan: &Plan,
        pod: &PodPort,
        packet: &[u8],
        now: Instant,
    ) -> Vec<Output> {
        let Some(packet) = IpPacket::parse(packet) else { return vec![] };
        if let Some(connection) = self.connections.answered_by(&packet, now) {
            return self.come_back(network, plan, pod.mac, (&packet, &connection), now);
        }
        if plan.leaves(pod, packet.destination()) {
            return vec![to_node(network, plan, pod.mac, packet.bytes())];
        }
        self.forward(network, plan, pod.mac, &packet, now)
    }

    /// Delivers a packet to a port of this node, if one has the address.
    fn deliver(
        &mut self,
        network: Guid,
        plan: &Plan,
        source: Mac,
        packet: &IpPacket<'_>,
        now: Instant,
    ) -> Vec<Output> {
        if let Some(connection) = self.connections.answered_by(packet, now) {
            return self.come_back(network, plan, source, (packet, &connection), now);
        }
        let to = packet.destination();
        if let Some(pod) = plan.pod(to) {
            return match self.judge(pod, packet, PacketDirection::In, now) {
                Decision::Pass => vec![to_pod(pod, source, packet.bytes())],
                Decision::Drop => vec![],
                Decision::Answer(packet) => self.send_for(network, plan, pod, &packet, now),
            };
        }
        if plan.connects_node(to) && plan.is_node(to) {
            return vec![to_node(network, plan, source, packet.bytes())];
        }
        debug!(from = %packet.source(), %to, "dropped: no port and no route has this address");
        vec![]
    }

    /// Delivers an answer to the pod or the node that sent to a Service. The ACLs of a pod see the same address as on the way
    /// there.
    fn come_back(
        &mut self,
        network: Guid,
        plan: &Plan,
        source: Mac,
        (packet, connection): (&IpPacket<'_>, &Connection),
        now: Instant,
    ) -> Vec<Output> {
        let from_service = connection.answer_by_service(packet.bytes());
        if connection.is_of_node() {
            return vec![to_node(network, plan, source, &from_service)];
        }
        let seen = match plan.egress_sees {
            EgressSees::Vip => from_service.clone(),
            EgressSees::Backend => connection.answer_by_backend(packet.bytes()),
        };
        let Some(seen) = IpPacket::parse(&seen) else { return vec![] };
        let Some(pod) = plan.pod(seen.destination()) else { return vec![] };
        match self.judge(pod, &seen, PacketDirection::In, now) {
            Decision::Pass => vec![to_pod(pod, source, &from_service)],
            Decision::Drop => vec![],
            Decision::Answer(packet) => {
                self.send_for(network, plan, pod, &connection.on_the_way(&packet), now)
            }
        }
    }

    fn judge(
        &mut self,
        pod: &PodPort,
        packet: &IpPacket<'_>,
        direction: PacketDirection,
        now: Instant,
    ) -> Decision {
        let flows = self.flows.entry(pod.endpoint).or_insert_with(|| Flows::new(pod.resets));
        let decision = judge::judge(flows, packet, direction, &pod.acl, now);
        if decision != Decision::Pass {
            let (from, to, protocol) = (packet.source(), packet.destination(), packet.protocol());
            trace!(endpoint = %pod.endpoint, ?direction, %from, %to, protocol, "blocked");
            self.counters.dropped(pod.endpoint, direction);
        }
        decision
    }
}

fn to_pod(pod: &PodPort, source: Mac, packet: &[u8]) -> Output {
    Output::Frame(Port::Pod(pod.endpoint), ip_frame(pod.mac, source, packet))
}

/// A packet to the node's own stack, which takes it or sends it on.
fn to_node(network: Guid, plan: &Plan, source: Mac, packet: &[u8]) -> Output {
    Output::Frame(Port::Node(network), ip_frame(plan.node_mac(), source, packet))
}

/// A packet to a pod that the switch itself creates.
fn answer(plan: &Plan, pod: &PodPort, packet: &[u8]) -> Output {
    to_pod(pod, plan.router_mac, packet)
}

fn encapsulate(plan: &Plan, remote: &Remote, packet: &IpPacket<'_>) -> Output {
    let frame = ip_frame(remote.router_mac, plan.router_mac, packet.bytes());
    Output::Tunnel(remote.provider, vxlan(remote.vni, &frame))
}

/// The MAC address by which the switch answers a request for an address (ARP, neighbour solicitation). It answers all: for an
/// endpoint of the network with its MAC address, for addresses of another node with the MAC address of that node's tunnel end,
/// and for the gateway and everything behind it with the router's.
fn mac_of(plan: &Plan, pod: Option<&PodPort>, target: IpAddr) -> Option<Mac> {
    let is_own = match pod {
        Some(pod) => pod.has(target),
        None => plan.node.as_ref().is_some_and(|node| node.addresses.contains(&target)),
    };
    match (plan.pod(target), plan.remote(target)) {
        // The sender checks whether its own address is in use. Nobody else has it.
        _ if is_own => None,
        (Some(other), _) => Some(other.mac),
        (None, Some(remote)) => Some(remote.router_mac),
        (None, None) if plan.is_node(target) => Some(plan.node_mac()),
        (None, None) if plan.is_gateway(target) => Some(plan.router_mac),
        (None, None) if plan.subnet(target).is_none() && !is_of_link(target) => Some(plan.router_mac),
        (None, None) if plan.hides_behind(target) => Some(plan.router_mac),
        (None, None) => None,
    }
}
