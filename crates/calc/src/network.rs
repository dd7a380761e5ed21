//! The overlay: this node, the other nodes' tunnel ends, and the routes to blocks.

mod flannel;
mod flannel_leases;
mod macs;
mod no_route;
mod tunnels;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use sha1::{Digest, Sha1};
use tortie_api::calico::{
    BgpConfigurationSpec, EncapsulationMode, FelixConfigurationSpec, IpPool, NatOutgoingExclusions,
};
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_dataplane::{
    ClusterNetwork, Delta, LocalEnd, LocalIpip, LocalNode, MacAddress, Route, RouteTarget, Settings, Vtep,
};

use crate::Calc;
use crate::input::BlockNodes;
use flannel::PodNetworks;
pub(crate) use flannel::translated;
pub use flannel::{pool_of_network, unfit_for_flannel};
pub(crate) use flannel_leases::FlannelLeases;
use macs::Macs;
pub use no_route::{NoRoute, Unrouted};
use tunnels::Tunnels;

/// The inputs of the overlay.
#[derive(Default)]
pub(crate) struct Network {
    nodes: BTreeMap<String, Node>,
    pools: BTreeMap<String, IpPool>,
    /// FelixConfigurations by name: `default`, and `node.<name>`.
    felix: BTreeMap<String, FelixConfigurationSpec>,
    /// BGPConfigurations by name: `default`, and `node.<name>`.
    bgp: BTreeMap<String, BgpConfigurationSpec>,
    /// The node of each block.
    blocks: BTreeMap<IpNet, String>,
    /// The addresses of each block that other nodes have borrowed.
    borrowed: BTreeMap<IpNet, BTreeMap<IpAddr, String>>,
    /// The node of each borrowed address.
    borrowers: BTreeMap<IpNet, String>,
    /// The blocks and borrowed addresses of each node.
    blocks_of: BTreeMap<String, BTreeSet<IpNet>>,
    /// Whether pools without encapsulation get direct routes.
    pub(crate) direct: bool,
    /// Whether nodes announce the networks of their pods as daemons of flannel do.
    pub(crate) flannel: bool,
    /// Whether another plugin connects the pods, so that there is no overlay, no pool and no block.
    pub(crate) policy_only: bool,
    /// With flannel, the networks of the nodes' pods.
    pub(crate) pod_networks: PodNetworks,
    /// The blocks and borrowed addresses of other nodes that should have a route of the dataplane and have none, with their nodes.
    without_route: BTreeMap<IpNet, (String, NoRoute)>,
    tunnels: Tunnels,
    macs: Macs,
    /// Why tunnel addresses of other nodes do not count.
    refused_tunnels: BTreeMap<(String, IpVersion), String>,
    dirty: Dirty,
}

/// What may have changed since the last flush.
#[derive(Default)]
struct Dirty {
    /// Pools, FelixConfigurations or BGPConfigurations.
    settings: bool,
    nodes: BTreeSet<String>,
    blocks: BTreeSet<IpNet>,
}

impl Calc {
    pub(crate) fn network_deltas(&mut self, deltas: &mut Vec<Delta>) {
        let Dirty { settings, mut nodes, mut blocks } = std::mem::take(&mut self.network.dirty);
        let mut is_due = settings;
        if settings {
            // Pools decide which tunnel addresses count.
            nodes.extend(self.network.tunnels.nodes().cloned());
        }
        if nodes.contains(&self.node) || settings {
            let node = self.network.local_node(&self.node);
            deltas.extend(node.filter(|node| self.state.node.as_ref() != Some(node)).map(Delta::Node));
            // Its networks decide which nodes are reached without encapsulation.
            is_due |= self.network.has_pools_by_subnet();
        }
        if settings || !nodes.is_empty() && self.network.excludes_nodes(&self.node) {
            let settings = self.network.settings(&self.node);
            if settings != *self.state.settings {
                deltas.push(Delta::Settings(Arc::new(settings)));
            }
        }
        if is_due {
            let all = self.network.blocks.keys().chain(self.network.borrowers.keys());
            let all = all.chain(self.network.pod_networks.all());
            blocks = all.copied().chain(blocks).collect();
        }
        // A VTEP comes before the routes that name it, and is removed after them.
        let mut gone = Vec::new();
        for name in nodes {
            blocks.extend(self.network.blocks_of.get(&name).into_iter().flatten());
            blocks.extend(self.network.pod_networks.of(&name));
            for version in IpVersion::ALL {
                self.network.judge_tunnel(&name, &self.node, version);
                let known = self.state.vteps.get(&(name.clone(), version));
                match self.network.vtep(&name, &self.node, version) {
                    Some(vtep) if known != Some(&vtep) => deltas.push(Delta::Vtep(vtep)),
                    None if known.is_some() => gone.push(Delta::VtepRemoved(name.clone(), version)),
                    _ => {}
                }
            }
        }
        let mut removed = Vec::new();
        for destination in blocks {
            let (target, cause) = match self.network.target(&destination, &self.node) {
                Ok(target) => (Some(target), None),
                Err(cause) => (None, cause),
            };
            self.network.note(destination, cause);
            let known = self.state.routes.get(&destination);
            match target {
                Some(target) if known != Some(&target) => {
                    deltas.push(Delta::Route(Route { destination, target }));
                }
                None if known.is_some() => removed.push(Delta::RouteRemoved(destination)),
                _ => {}
            }
        }
        deltas.extend(removed.into_iter().chain(gone));
    }
}

impl Network {
    /// The nodes of the cluster, by name.
    pub(crate) fn nodes(&self) -> &BTreeMap<String, Node> {
        &self.nodes
    }

    pub(crate) fn update_node(&mut self, name: &str, node: Option<Node>) {
        if self.flannel {
            let lease = |version| node.as_ref()?.flannel_lease(version);
            let subnets = IpVersion::ALL.into_iter().filter_map(|version| Some(lease(version)?.subnet));
            let changed = self.pod_networks.update(name, subnets.collect());
            self.dirty.blocks.extend(changed);
        }
        self.tunnels.update(name, self.nodes.get(name), node.as_ref());
        self.dirty.nodes.extend(self.macs.update(name, self.nodes.get(name), node.as_ref()));
        if put(&mut self.nodes, name.to_owned(), node) {
            self.dirty.nodes.insert(name.to_owned());
        }
    }

    pub(crate) fn update_pool(&mut self, name: &str, pool: Option<IpPool>) {
        if self.policy_only {
            return;
        }
        self.dirty.settings |= put(&mut self.pools, name.to_owned(), pool);
    }

    pub(crate) fn update_felix(&mut self, name: &str, spec: Option<FelixConfigurationSpec>) {
        self.dirty.settings |= put(&mut self.felix, name.to_owned(), spec);
    }

    pub(crate) fn update_bgp(&mut self, name: &str, spec: Option<BgpConfigurationSpec>) {
        self.dirty.settings |= put(&mut self.bgp, name.to_owned(), spec);
    }

    /// Ingests the node that owns a block, if any, and those that have borrowed addresses of it.
    pub(crate) fn update_block(&mut self, cidr: IpNet, nodes: BlockNodes) {
        if self.policy_only {
            return;
        }
        let BlockNodes { owner, borrowed } = nodes;
        let former = self.blocks.get(&cidr).cloned();
        if put(&mut self.blocks, cidr, owner.clone()) {
            self.dirty.blocks.insert(cidr);
            self.move_route(cidr, former, owner);
        }
        self.dirty.nodes.extend(self.tunnels.within(&cidr).cloned());
        let known = self.borrowed.get(&cidr).cloned().unwrap_or_default();
        if known == borrowed {
            return;
        }
        let addresses: BTreeSet<IpAddr> = known.keys().chain(borrowed.keys()).copied().collect();
        for address in addresses {
            let (former, node) = (known.get(&address), borrowed.get(&address));
            if former == node {
                continue;
            }
            let route = IpNet::from(address);
            put(&mut self.borrowers, route, node.cloned());
            self.dirty.blocks.insert(route);
            self.move_route(route, former.cloned(), node.cloned());
        }
        put(&mut self.borrowed, cidr, Some(borrowed).filter(|borrowed| !borrowed.is_empty()));
    }

    /// Notes that a route leads to another node.
    fn move_route(&mut self, route: IpNet, former: Option<String>, node: Option<String>) {
        // A block of one address has the route that its address has when it is borrowed.
        let is_left = |former: &String| {
            self.blocks.get(&route) != Some(former) && self.borrowers.get(&route) != Some(former)
        };
        if let Some(former) = former.filter(is_left)
            && let Some(routes) = self.blocks_of.get_mut(&former)
        {
            routes.remove(&route);
            if routes.is_empty() {
                self.blocks_of.remove(&former);
            }
        }
        if let Some(node) = node {
            self.blocks_of.entry(node).or_default().insert(route);
        }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let borrowed = self.borrowed.is_empty() && self.borrowers.is_empty();
        let blocks = self.blocks.is_empty() && self.blocks_of.is_empty() && borrowed;
        blocks
            && self.without_route.is_empty()
            && self.tunnels.is_empty()
            && self.macs.is_empty()
            && self.refused_tunnels.is_empty()
            && self.nodes.is_empty()
            && self.pod_networks.is_empty()
            && self.pools.is_empty()
            && self.felix.is_empty()
            && self.bgp.is_empty()
    }

    fn local_node(&self, name: &str) -> Option<LocalNode> {
        let node = self.nodes.get(name)?;
        let end = |version| {
            // Beside another plugin, nobody annotates the Node.
            let reported = || node.reported_address(version).filter(|_| self.policy_only);
            let address = node.own_address(version).or_else(reported)?;
            let vtep = vtep(name, node, version).filter(|_| !self.policy_only);
            Some((version, LocalEnd { address, vtep }))
        };
        let ends: BTreeMap<_, _> = IpVersion::ALL.into_iter().filter_map(end).collect();
        let network = ClusterNetwork::new(&self.felix(name));
        let may_have_ipip = ends.contains_key(&IpVersion::V4) && self.has_ipip(name);
        let has_ipip = may_have_ipip && self.pools.values().any(IpPool::has_ipip);
        let ipip = has_ipip.then(|| LocalIpip { address: node.ipip_address() });
        (!ends.is_empty()).then(|| LocalNode { name: name.to_owned(), ends, ipip, network })
    }

    /// Pools without encapsulation get routes by way of the nodes in the network of this one.
    pub(crate) fn use_direct_routes(&mut self) {
        self.direct = true;
    }

    /// Whether the subnets of nodes decide about routes.
    fn has_pools_by_subnet(&self) -> bool {
        let is_one = |pool: &IpPool| {
            pool.encapsulation() == EncapsulationMode::CrossSubnet || self.direct && is_plain(pool)
        };
        self.pools.values().any(is_one)
    }

    /// The node's settings: its own take precedence over those of all nodes.
    fn settings(&self, name: &str) -> Settings {
        let pools = self.pools.values().map(|pool| (pool.spec.cidr, pool.spec.nat_outgoing));
        let felix = self.felix.iter().map(|(name, spec)| (name.as_str(), spec));
        let vxlan_ports = FelixConfigurationSpec::vxlan_ports(felix);
        let bgp = self.bgp.iter().map(|(name, spec)| (name.as_str(), spec));
        let bgp_ports = BgpConfigurationSpec::listen_ports(bgp);
        let nodes = self.nodes.values().filter(|_| self.excludes_nodes(name));
        let nat_exceptions = nodes
            .flat_map(|node| IpVersion::ALL.map(|version| node.own_address(version)))
            .flatten()
            .collect();
        let settings = Settings::new(&self.felix(name), pools.collect());
        Settings { vxlan_ports, bgp_ports, nat_exceptions, ..settings }
    }

    /// Returns true if packets of the node's pods to nodes keep the pod's address.
    fn excludes_nodes(&self, name: &str) -> bool {
        self.felix(name).nat_outgoing_exclusions == Some(NatOutgoingExclusions::PoolsAndNodes)
    }

    pub(crate) fn pools(&self) -> impl Iterator<Item = &IpPool> {
        self.pools.values()
    }

    pub(crate) fn felix(&self, node: &str) -> FelixConfigurationSpec {
        let of = |name: &str| self.felix.get(name).cloned().unwrap_or_default();
        of(&format!("node.{node}")).or(&of("default"))
    }

    /// Returns whether the node may use IPIP. Felix has no link for it otherwise.
    fn has_ipip(&self, node: &str) -> bool {
        self.felix(node).ipip_enabled != Some(false)
    }

    /// The tunnel end of another node.
    pub(crate) fn vtep(&self, name: &str, local: &str, version: IpVersion) -> Option<Vtep> {
        let is_other = name != local && !self.policy_only;
        let vtep = self.nodes.get(name).filter(|_| is_other).and_then(|node| vtep(name, node, version));
        vtep.filter(|_| !self.refused_tunnels.contains_key(&(name.to_owned(), version)))
    }

    /// Judges the tunnel address of another node again.
    fn judge_tunnel(&mut self, name: &str, local: &str, version: IpVersion) {
        let is_other = name != local && !self.policy_only;
        let node = self.nodes.get(name).filter(|_| is_other);
        let problem = node.and_then(|node| {
            let address = node.vxlan_address(version)?;
            let of_address = self.tunnel_problem(name, node, address);
            of_address.or_else(|| self.macs.problem(name, node, version))
        });
        put(&mut self.refused_tunnels, (name.to_owned(), version), problem);
    }

    /// The nodes whose tunnel addresses do not count, with the reasons.
    pub(crate) fn refused_tunnels(&self) -> impl Iterator<Item = (&str, &str)> {
        self.refused_tunnels.iter().map(|((node, _), problem)| (node.as_str(), problem.as_str()))
    }

    /// The target of the route to a block or a borrowed address. It has none if its pool has neither an overlay nor direct
    /// routes, if the tunnel end of its node is unknown, or if one of the two nodes has no IPIP. The error says why the dataplane has no
    /// route that it should have; `None` means that nobody expects one of it.
    fn target(&self, block: &IpNet, local: &str) -> Result<RouteTarget, Option<NoRoute>> {
        if let Some(node) = self.pod_networks.owner(block) {
            // Problems of flannel's nodes have messages of their own.
            return self.pod_network_target(block, node, local).ok_or(None);
        }
        let node = match self.borrowers.get(block) {
            // The pod's own route leads there.
            Some(borrower) if borrower == local => return Err(None),
            Some(borrower) => borrower,
            None => self.blocks.get(block).ok_or(None)?,
        };
        if node == local {
            return Ok(RouteTarget::Local);
        }
        let version = IpVersion::of(&block.addr());
        let of_block = || self.pools.values().filter(|pool| pool.spec.cidr.contains(block));
        let mut overlays = of_block().filter(|pool| !is_plain(pool));
        let Some(pool) = overlays.next() else {
            if !self.direct || !of_block().any(is_plain) {
                return Err(None);
            }
            let router = self.neighbour(node, local, version);
            let router = router.ok_or_else(|| self.without_neighbour(node, local, version))?;
            return Ok(RouteTarget::Direct { router });
        };
        if pool.encapsulation() == EncapsulationMode::CrossSubnet
            && let Some(router) = self.neighbour(node, local, version)
        {
            return Ok(RouteTarget::Direct { router });
        }
        if pool.has_ipip() {
            return Ok(RouteTarget::Ipip { router: self.ipip_router(node, local)? });
        }
        match self.vtep(node, local, version) {
            Some(_) => Ok(RouteTarget::Vxlan { node: node.clone() }),
            None => Err(self.without_tunnel(node, version)),
        }
    }

    /// The other node's end of an IPIP tunnel.
    fn ipip_router(&self, node: &str, local: &str) -> Result<Ipv4Addr, NoRoute> {
        if let Some(disabled) = [local, node].into_iter().find(|node| !self.has_ipip(node)) {
            return Err(NoRoute::IpipDisabled(disabled.to_owned()));
        }
        let other = self.nodes.get(node);
        if other.is_some_and(Node::is_windows) {
            return Err(NoRoute::IpipToWindows);
        }
        other.and_then(Node::address).ok_or(NoRoute::NoAddress(IpVersion::V4))
    }

    /// The address of another node, if it is in the network of this node and both take packets of pods without
    /// encapsulation.
    pub(crate) fn neighbour(&self, name: &str, local: &str, version: IpVersion) -> Option<IpAddr> {
        let (node, local) = (self.nodes.get(name)?, self.nodes.get(local)?);
        let address = node.own_address(version)?;
        // Both directions must go the same way, or strict checks of the path back drop packets.
        let other = node.own_network(version)?;
        // A node with flanneld announces no prefix length, and presumes that all nodes are in one network.
        let is_unknown = self.flannel && other.prefix_len() == other.max_prefix_len();
        let is_near = local.own_network(version)?.contains(&address)
            && (is_unknown || other.contains(&local.own_address(version)?));
        (is_near && node.takes_plain_packets() && local.takes_plain_packets()).then_some(address)
    }
}

/// Whether packets of a pool travel between nodes as they are.
pub(crate) fn is_plain(pool: &IpPool) -> bool {
    pool.encapsulation() == EncapsulationMode::Never
}

/// Sets or removes a value; returns whether it has changed.
fn put<K: Ord, V: Clone + PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) -> bool {
    let before = match value.clone() {
        Some(value) => map.insert(key, value),
        None => map.remove(&key),
    };
    before != value
}

/// The MTU of pods of Windows nodes: HNS gives them that of an adapter with 1500 bytes less the headers of VXLAN, whatever the adapter
/// has.
const WINDOWS_MTU: u32 = 1450;

/// The node's tunnel end of a family, once both its tunnel address and its own address are known.
fn vtep(name: &str, node: &Node, version: IpVersion) -> Option<Vtep> {
    Some(Vtep {
        node: name.to_owned(),
        address: node.vxlan_address(version)?,
        mac: claimed_mac(name, node, version),
        parent: node.own_address(version)?,
        mtu: node.is_windows().then_some(WINDOWS_MTU),
    })
}

/// The MAC address of a node's VXLAN device.
fn claimed_mac(name: &str, node: &Node, version: IpVersion) -> MacAddress {
    let stored = node.vxlan_mac(version).and_then(|mac| mac.parse().ok());
    // Nobody has such an address. The kernel sends to the first one what it has no entry for.
    let is_of_a_device = |mac: &MacAddress| mac.0 != [0; 6] && mac.0[0] & 1 == 0;
    stored.filter(is_of_a_device).unwrap_or_else(|| vtep_mac(name, version))
}

/// The MAC address of a node's VXLAN device if none is stored: `66` and the first five bytes of the SHA-1 of its name,
/// which `-v6` follows for IPv6 (`felix/calc/vxlan_resolver.go` of Calico).
#[must_use]
pub fn vtep_mac(node: &str, version: IpVersion) -> MacAddress {
    let mut hash = Sha1::new();
    hash.update(node);
    if version == IpVersion::V6 {
        hash.update("-v6");
    }
    let mut mac = [0x66; 6];
    mac[1..].copy_from_slice(&hash.finalize()[..5]);
    MacAddress(mac)
}

#[cfg(test)]
mod tests {
    use tortie_api::net::IpVersion;

    #[test]
    fn the_mac_of_a_vtep_equals_calicos() {
        let mac = |version| super::vtep_mac("node-a", version).to_string();
        assert_eq!(mac(IpVersion::V4), "66:07:02:c1:cc:60");
        // printf node-a-v6 | sha1sum
        assert_eq!(mac(IpVersion::V6), "66:d4:d5:51:3d:42");
    }
}
