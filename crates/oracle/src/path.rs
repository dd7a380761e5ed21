//! The path of a packet, as plain data: the points where it is judged.

use std::net::IpAddr;

use tortie_api::net::Direction;

use super::world::{HostInterface, Workload};

/// The path of a packet: its addresses, and the hops that judge it.
pub(super) struct PacketPath<'a> {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// The hops that judge it, in order.
    pub(super) hops: Vec<Hop<'a>>,
    pub(super) notes: Vec<String>,
}

/// A point on the path where a packet is judged.
pub(super) enum Hop<'a> {
    /// A pod, as the sender (egress) or the receiver (ingress); with the packet's source at this point, if a later node replaces it.
    Pod(&'a Workload, Direction, Option<IpAddr>),
    /// A pod that receives a packet from its own node: policy is not evaluated (policy decision 2).
    Probed(&'a Workload),
    /// An interface of a node that has a host endpoint.
    Host(HostHop<'a>),
    /// The node of a pod that sends to its own node.
    OwnNode(&'a str),
}

/// The kind of interface that a packet passes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HostLink {
    /// An interface through which the node reaches others.
    Outside,
    /// An interface between the node and one of its pods. Only a host endpoint of all interfaces covers it, before
    /// DNAT and for packets that the node forwards.
    Pod,
}

/// A packet at an interface of a node.
pub(super) struct HostHop<'a> {
    pub(super) interface: &'a HostInterface,
    pub(super) at: HostLink,
    /// Whether the node is the sender's; otherwise it is the receiver's.
    pub(super) near: bool,
    /// Whether the packet enters the node (ingress) or leaves it (egress).
    pub(super) direction: Direction,
    /// Whether the node forwards the packet, instead of being its sender or receiver.
    pub(super) forwarded: bool,
    /// The packet's source at this point, if a previous node has replaced it with its own address.
    pub(super) source: Option<IpAddr>,
    /// The packet's destination before this node translates it.
    pub(super) before: Option<(IpAddr, u16)>,
}
