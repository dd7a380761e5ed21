//! What is asked for, and what is given.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// What the address is for (`IPPool.spec.allowedUses`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A pod.
    Workload,
    /// A node's VXLAN device.
    Tunnel,
}

/// A wish for one address.
#[derive(Debug, Clone)]
pub struct Request {
    /// By which the address is found and released again. The same handle gets the same address.
    pub handle: String,
    /// What stands beside the address in the block.
    pub owner: BTreeMap<String, String>,
    /// What it is for.
    pub intended_use: Use,
    /// The labels of the pod's namespace; empty where there is none.
    pub namespace_labels: BTreeMap<String, String>,
}

/// An address, and the block that it is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assignment {
    /// The address.
    pub address: Ipv4Addr,
    /// The block.
    pub block: Ipv4Net,
}
