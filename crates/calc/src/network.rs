//! The overlay: this node, the other nodes' tunnel ends, and the routes to blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use sha1::{Digest, Sha1};
use tortie_api::calico::{EncapsulationMode, FelixConfigurationSpec, IpPool};
use tortie_api::kubernetes::Node;
use tortie_dataplane::{ClusterNetwork, Delta, LocalNode, MacAddress, Route, RouteTarget, Settings, Vtep};

use crate::Calc;

/// The inputs of the overlay.
#[derive(Default)]
pub(crate) struct Network {
    nodes: BTreeMap<String, Node>,
    pools: BTreeMap<String, IpPool>,
    /// FelixConfigurations by name: `default`, and `node.<name>`.
    felix: BTreeMap<String, FelixConfigurationSpec>,
    /// The node of each block.
    blocks: BTreeMap<Ipv4Net, String>,
    /// Whether anything has changed since the last flush.
    touched: bool,
}

impl Calc {
    pub(crate) fn network_deltas(&mut self, deltas: &mut Vec<Delta>) {
        if !std::mem::take(&mut self.network.touched) {
            return;
        }
        let node = self.network.local_node(&self.node);
        if let Some(node) = node.filter(|node| self.state.node.as_ref() != Some(node)) {
            deltas.push(Delta::Node(node));
        }
        let settings = self.network.settings(&self.node);
        if settings != *self.state.settings {
            deltas.push(Delta::Settings(Arc::new(settings)));
        }
        let vteps = self.network.vteps(&self.node);
        let routes = self.network.routes(&self.node, &vteps);

        // A VTEP comes before the routes that name it, and is removed after them.
        for (name, vtep) in &vteps {
            if self.state.vteps.get(name) != Some(vtep) {
                deltas.push(Delta::Vtep(vtep.clone()));
            }
        }
        for (destination, target) in &routes {
            if self.state.routes.get(destination) != Some(target) {
                deltas.push(Delta::Route(Route { destination: *destination, target: target.clone() }));
            }
        }
        let gone = self.state.routes.keys().filter(|destination| !routes.contains_key(*destination));
        deltas.extend(gone.copied().map(Delta::RouteRemoved));
        let gone = self.state.vteps.keys().filter(|name| !vteps.contains_key(*name));
        deltas.extend(gone.cloned().map(Delta::VtepRemoved));
    }
}

impl Network {
    pub(crate) fn update_node(&mut self, name: &str, node: Option<Node>) {
        self.touched |= put(&mut self.nodes, name.to_owned(), node);
    }

    pub(crate) fn update_pool(&mut self, name: &str, pool: Option<IpPool>) {
        self.touched |= put(&mut self.pools, name.to_owned(), pool);
    }

    pub(crate) fn update_felix(&mut self, name: &str, spec: Option<FelixConfigurationSpec>) {
        self.touched |= put(&mut self.felix, name.to_owned(), spec);
    }

    /// Ingests the node that owns a block, if any.
    pub(crate) fn update_block(&mut self, cidr: Ipv4Net, node: Option<String>) {
        self.touched |= put(&mut self.blocks, cidr, node);
    }

    fn local_node(&self, name: &str) -> Option<LocalNode> {
        let node = self.nodes.get(name)?;
        Some(LocalNode {
            name: name.to_owned(),
            address: node.address()?,
            vtep: vtep(name, node),
            network: ClusterNetwork::default(),
        })
    }

    /// The node's settings: its own take precedence over those of all nodes.
    fn settings(&self, name: &str) -> Settings {
        let felix = |name: &str| self.felix.get(name).cloned().unwrap_or_default();
        let pools = self.pools.values().map(|pool| (pool.spec.cidr, pool.spec.nat_outgoing));
        Settings::new(&felix(&format!("node.{name}")).or(&felix("default")), pools.collect())
    }

    fn vteps(&self, local: &str) -> BTreeMap<String, Vtep> {
        let remote = self.nodes.iter().filter(|(name, _)| *name != local);
        remote.filter_map(|(name, node)| Some((name.clone(), vtep(name, node)?))).collect()
    }

    /// Routes to the blocks of VXLAN pools. Blocks of a node with an unknown tunnel end have no route yet.
    fn routes(&self, local: &str, vteps: &BTreeMap<String, Vtep>) -> BTreeMap<Ipv4Net, RouteTarget> {
        let overlaid = |block: &Ipv4Net| {
            let pools = self.pools.values().filter(|pool| pool.spec.vxlan_mode != EncapsulationMode::Never);
            pools.into_iter().any(|pool| pool.spec.cidr.contains(&IpNet::V4(*block)))
        };
        let target = |block: &Ipv4Net, node: &String| {
            if node == local {
                Some(RouteTarget::Local)
            } else {
                (overlaid(block) && vteps.contains_key(node))
                    .then(|| RouteTarget::Vxlan { node: node.clone() })
            }
        };
        self.blocks.iter().filter_map(|(block, node)| Some((*block, target(block, node)?))).collect()
    }
}

/// Sets or removes a value; returns whether it has changed.
fn put<K: Ord, V: Clone + PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> bool {
    let before = match value.clone() {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    };
    before != value
}

/// The node's tunnel end, once both its tunnel address and its own address are known.
fn vtep(name: &str, node: &Node) -> Option<Vtep> {
    Some(Vtep {
        node: name.to_owned(),
        address: node.vxlan_address()?,
        mac: node.vxlan_mac().and_then(|mac| mac.parse().ok()).unwrap_or_else(|| vtep_mac(name)),
        parent: node.address()?,
    })
}

/// The MAC address of a node's VXLAN device if none is stored: `66` and the first five bytes of the SHA-1 of its name
/// (`felix/calc/vxlan_resolver.go` of Calico).
#[must_use]
pub fn vtep_mac(node: &str) -> MacAddress {
    let hash = Sha1::digest(node.as_bytes());
    let mut mac = [0x66; 6];
    mac[1..].copy_from_slice(&hash[..5]);
    MacAddress(mac)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_mac_of_a_vtep_equals_calicos() {
        assert_eq!(super::vtep_mac("node-a").to_string(), "66:07:02:c1:cc:60");
    }
}
