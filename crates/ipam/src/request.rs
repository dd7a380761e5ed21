//! Requests for addresses, and their results.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// The purpose of an address (`IPPool.spec.allowedUses`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A pod.
    Workload,
    /// A node's VXLAN device.
    Tunnel,
}

/// A request for one address.
#[derive(Debug, Clone)]
pub struct Request {
    /// Identifies the address for lookup and release. The same handle gets the same address.
    pub handle: String,
    /// The attributes that the block stores with the address.
    pub owner: BTreeMap<String, String>,
    /// The purpose.
    pub intended_use: Use,
    /// The labels of the pod's namespace; empty if there is none.
    pub namespace_labels: BTreeMap<String, String>,
}

/// An address and its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assignment {
    /// The address.
    pub address: Ipv4Addr,
    /// The block.
    pub block: Ipv4Net,
}
