//! flannel's leases in etcd, as if the nodes had announced them by annotations: each becomes part of the Node with its address. A
//! machine that is no Node of the cluster becomes one by the name of its key, which no Node can have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::Metadata;
use tortie_api::kubernetes::{FlannelLease, Node, NodeSpec, ObservedNode};
use tortie_api::net::IpVersion;

/// The annotations of the ends of tunnels, which come with leases.
const TUNNEL_ENDS: [&str; 4] =
    [Node::VXLAN_ADDRESS, Node::VXLAN_MAC, Node::VXLAN_ADDRESS_V6, Node::VXLAN_MAC_V6];

/// The leases, and the Nodes as they are stored.
#[derive(Default)]
pub(crate) struct FlannelLeases {
    own: Vec<FlannelLease>,
    /// By key; at least one lease of each.
    others: BTreeMap<String, Vec<FlannelLease>>,
    /// The keys by the addresses of their nodes.
    keys: BTreeMap<IpAddr, BTreeSet<String>>,
    nodes: BTreeMap<String, Node>,
    /// The names of Nodes by their addresses, without this node.
    names: BTreeMap<IpAddr, BTreeSet<String>>,
    /// The other Nodes with an address, and without a lease.
    without_lease: BTreeSet<String>,
}

impl FlannelLeases {
    /// Whether the name is that of a machine that is no Node.
    pub(crate) fn is_machine(name: &str) -> bool {
        name.starts_with('/')
    }

    /// Ingests all leases. Returns the nodes that may have changed, with their leases; `None` means that a node is gone.
    pub(crate) fn update(
        &mut self,
        local: &str,
        own: Vec<FlannelLease>,
        others: BTreeMap<String, Vec<FlannelLease>>,
    ) -> BTreeMap<String, Option<Node>> {
        let mut changed = BTreeSet::new();
        if self.own != own {
            changed.insert(local.to_owned());
            self.own = own;
        }
        let keys: BTreeSet<String> = self.others.keys().chain(others.keys()).cloned().collect();
        for key in keys {
            let new = others.get(&key).filter(|leases| !leases.is_empty());
            if self.others.get(&key) == new {
                continue;
            }
            for address in self.others.remove(&key).iter().filter_map(|former| address_of(former)) {
                changed.extend(self.around(address));
                remove(&mut self.keys, address, &key);
            }
            if let Some(new) = new {
                if let Some(address) = address_of(new) {
                    self.keys.entry(address).or_default().insert(key.clone());
                    changed.extend(self.around(address));
                }
                self.others.insert(key.clone(), new.clone());
            }
            changed.insert(key);
        }
        self.nodes_of(local, changed)
    }

    /// Ingests a Node as it is stored. Returns as [`update`](Self::update).
    pub(crate) fn update_node(
        &mut self,
        local: &str,
        name: &str,
        node: Option<Node>,
    ) -> BTreeMap<String, Option<Node>> {
        let mut changed = BTreeSet::from([name.to_owned()]);
        if name != local {
            for address in self.nodes.get(name).map(addresses_of).into_iter().flatten() {
                changed.extend(self.around(address));
                remove(&mut self.names, address, name);
            }
            for address in node.as_ref().map(addresses_of).into_iter().flatten() {
                self.names.entry(address).or_default().insert(name.to_owned());
                changed.extend(self.around(address));
            }
        }
        match node {
            Some(node) => drop(self.nodes.insert(name.to_owned(), node)),
            None => drop(self.nodes.remove(name)),
        }
        self.nodes_of(local, changed)
    }

    /// The Nodes and the keys with an address. A Node has one key at most, so it may change those of its other addresses.
    fn around(&self, address: IpAddr) -> BTreeSet<String> {
        let names = self.names.get(&address).into_iter().flatten();
        let nodes = names.clone().filter_map(|name| self.nodes.get(name));
        let addresses = nodes.flat_map(addresses_of).chain([address]);
        let keys = addresses.filter_map(|address| self.keys.get(&address)).flatten();
        keys.chain(names).cloned().collect()
    }

    /// The other Nodes that no lease is part of. A Node without an address is left out, because no lease can name it.
    pub(crate) fn without_lease(&self) -> &BTreeSet<String> {
        &self.without_lease
    }

    fn nodes_of(&mut self, local: &str, names: BTreeSet<String>) -> BTreeMap<String, Option<Node>> {
        for name in &names {
            match self.lacks_lease(local, name) {
                true => drop(self.without_lease.insert(name.clone())),
                false => drop(self.without_lease.remove(name)),
            }
        }
        names.into_iter().map(|name| (name.clone(), self.node(local, &name))).collect()
    }

    fn lacks_lease(&self, local: &str, name: &str) -> bool {
        let has_address = self.nodes.get(name).is_some_and(|node| !addresses_of(node).is_empty());
        name != local && has_address && self.key_of(name).is_none()
    }

    /// A node with its leases.
    fn node(&self, local: &str, name: &str) -> Option<Node> {
        if Self::is_machine(name) {
            let leases = self.others.get(name).filter(|_| !self.is_of_a_node(name))?;
            let metadata = Metadata { name: name.to_owned(), ..Metadata::default() };
            let machine = Node { metadata, spec: NodeSpec::default(), status: ObservedNode::default() };
            return Some(machine.with_flannel_leases(leases));
        }
        let node = self.nodes.get(name)?;
        let of_key = || Some(self.others.get(self.key_of(name)?)?.as_slice());
        let leases = if name == local { &self.own } else { of_key().unwrap_or_default() };
        let mut node = node.clone().with_flannel_leases(leases);
        if leases.is_empty() {
            TUNNEL_ENDS.iter().for_each(|end| drop(node.metadata.annotations.remove(*end)));
        }
        Some(node)
    }

    /// The key whose leases are part of a Node: the first one with one of its addresses.
    fn key_of(&self, name: &str) -> Option<&String> {
        let addresses = addresses_of(self.nodes.get(name)?);
        let is_first = |address: &IpAddr| {
            self.names.get(address).and_then(BTreeSet::first).is_some_and(|first| first == name)
        };
        addresses
            .iter()
            .filter(|address| is_first(address))
            .filter_map(|address| self.keys.get(address))
            .flatten()
            .min()
    }

    fn is_of_a_node(&self, key: &str) -> bool {
        let address = self.others.get(key).and_then(|leases| address_of(leases));
        let names = address.and_then(|address| self.names.get(&address));
        names
            .and_then(BTreeSet::first)
            .is_some_and(|name| self.key_of(name).is_some_and(|first| first == key))
    }
}

/// The addresses by which flannel may know a Node.
fn addresses_of(node: &Node) -> BTreeSet<IpAddr> {
    let overwritten = IpVersion::ALL.into_iter().filter_map(|version| {
        node.metadata.annotations.get(Node::FLANNEL_OVERWRITE.of(version))?.parse::<IpAddr>().ok()
    });
    node.addresses().into_iter().chain(overwritten).collect()
}

/// The address of a node by which others know it.
fn address_of(leases: &[FlannelLease]) -> Option<IpAddr> {
    leases.first().map(|lease| lease.public_ip)
}

fn remove(index: &mut BTreeMap<IpAddr, BTreeSet<String>>, address: IpAddr, name: &str) {
    if let Some(names) = index.get_mut(&address) {
        names.remove(name);
        if names.is_empty() {
            index.remove(&address);
        }
    }
}
