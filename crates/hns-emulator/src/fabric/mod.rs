//! The forwarding decisions of overlay and L2Bridge networks: pure functions of HNS documents.
//!
//! [`Fabric`] takes an incoming frame and returns the outgoing frames. The switch does the I/O.

mod balance;
mod checksum;
mod forward;
mod frame;
mod host_ports;
mod judge;
mod outbound;
mod packet;
mod plan;
mod segment;

#[cfg(test)]
mod tests;

pub(crate) use forward::{Fabric, Output, Port};
pub(crate) use frame::Frame;
pub(crate) use host_ports::{HostPort, HostPorts};
pub(crate) use outbound::{OutboundNat, OutboundNats};
pub(crate) use plan::{NodeLeg, Plan, PodAddress, PodPort};
