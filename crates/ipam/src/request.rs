//! Requests for addresses, and their results.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use tortie_store::Write;

/// The purpose of an address (`IPPool.spec.allowedUses`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Use {
    /// A pod.
    #[default]
    Workload,
    /// A node's VXLAN device.
    Tunnel,
    /// A node's IPIP device: only pools with IPIP give an address, so that answers take the way of what the node has sent.
    IpipTunnel,
    /// A Service of type LoadBalancer.
    LoadBalancer,
}

/// A family of addresses. Each one has its own pools, blocks and limit of blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    #[default]
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of a network.
    #[must_use]
    pub fn of(net: &IpNet) -> Self {
        if net.addr().is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// A request for addresses of one family.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Identifies the address for lookup and release. The same handle gets the same address.
    pub handle: String,
    /// The attributes that the block stores with the address.
    pub owner: BTreeMap<String, String>,
    /// The purpose.
    pub intended_use: Use,
    /// The labels of the pod's namespace; empty if there is none.
    pub namespace_labels: BTreeMap<String, String>,
    /// The family of the address.
    pub family: Family,
    /// The names or networks of the pools to use; if it is empty, those that select the node and the namespace.
    pub pools: Vec<String>,
}

/// Makes the write that follows the allocation of an address.
pub type FollowUp = Arc<dyn Fn(Assignment) -> Option<Write> + Send + Sync>;

/// The number of addresses that a handle needs of each family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// IPv4 addresses.
    pub ipv4: usize,
    /// IPv6 addresses.
    pub ipv6: usize,
}

/// An address and its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assignment {
    /// The address.
    pub address: IpAddr,
    /// The block.
    pub block: IpNet,
}
