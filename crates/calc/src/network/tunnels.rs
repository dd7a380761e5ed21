//! The tunnel addresses of other nodes that count (policy decision 51).
//!
//! Each node with an overlay has a route to the tunnel address of each other node. Whoever may annotate a Node could lead the
//! packets to any address to that node. So the address must be one that only the node can have: in its own network of pods, or
//! in an IPPool and in no block of another node, unless the node has borrowed it there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;

use super::Network;

/// The nodes by their tunnel addresses.
#[derive(Default)]
pub(super) struct Tunnels(BTreeMap<IpAddr, BTreeSet<String>>);

impl Tunnels {
    /// Replaces the addresses of a node.
    pub(super) fn update(&mut self, name: &str, former: Option<&Node>, node: Option<&Node>) {
        for address in former.into_iter().flat_map(addresses) {
            if let Some(nodes) = self.0.get_mut(&address) {
                nodes.remove(name);
                if nodes.is_empty() {
                    self.0.remove(&address);
                }
            }
        }
        for address in node.into_iter().flat_map(addresses) {
            self.0.entry(address).or_default().insert(name.to_owned());
        }
    }

    /// The nodes with a tunnel address in a network.
    pub(super) fn within(&self, net: &IpNet) -> impl Iterator<Item = &String> {
        self.0.range(net.network()..=net.broadcast()).flat_map(|(_, nodes)| nodes)
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &String> {
        self.0.values().flatten()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn addresses(node: &Node) -> impl Iterator<Item = IpAddr> {
    IpVersion::ALL.into_iter().filter_map(|version| node.vxlan_address(version))
}

impl Network {
    /// Why a node cannot have a tunnel address, with the remedy, if it cannot.
    pub(super) fn tunnel_problem(&self, name: &str, node: &Node, address: IpAddr) -> Option<String> {
        let problem = self.why_foreign(name, node, address)?;
        Some(format!("{problem}; restart the agent of that node, so that it takes an address from IPAM"))
    }

    fn why_foreign(&self, name: &str, node: &Node, address: IpAddr) -> Option<String> {
        let mut own = self.pod_networks.of(name).copied().chain(node.pod_cidr(IpVersion::of(&address)));
        if own.any(|net| net.contains(&address)) {
            return None;
        }
        if let Some(block) = self.smallest_block(address) {
            let owner = self.blocks.get(&block).map(String::as_str);
            let borrower = self.borrowed.get(&block).and_then(|borrowed| borrowed.get(&address));
            let holder = borrower.map(String::as_str).or(owner);
            return (holder != Some(name)).then(|| {
                let of = holder.map(|holder| format!(" of node {holder}")).unwrap_or_default();
                format!("its tunnel address {address} is in the block {block}{of}, and IPAM has not given it to this node")
            });
        }
        let is_in_pool = self.pools.values().any(|pool| pool.spec.cidr.contains(&address));
        (!is_in_pool)
            .then(|| format!("its tunnel address {address} is in no IPPool, and not in its podCIDRs"))
    }

    /// The smallest block that has an address.
    fn smallest_block(&self, address: IpAddr) -> Option<IpNet> {
        let lengths = (0..=IpNet::from(address).prefix_len()).rev();
        let mut nets = lengths.filter_map(|length| IpNet::new(address, length).ok()).map(|net| net.trunc());
        nets.find(|net| self.blocks.contains_key(net) || self.borrowed.contains_key(net))
    }
}
