//! Clusters with flannel: each node has one network of pods (`Node.spec.podCIDR`) instead of blocks, and announces the way
//! there by annotations of flannel.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use tortie_api::calico::{EncapsulationMode, IpPool};
use tortie_api::kubernetes::{FlannelBackend, FlannelLease, Node};
use tortie_api::net::IpVersion;
use tortie_dataplane::{ClusterNetwork, RouteTarget};

use super::{Network, is_plain};

/// The annotation with which calc marks a node whose last valid data stays in force, because it announces data that cannot be read.
/// No Node has it.
const OUTDATED: &str = "tortie.io/outdated-flannel-data";

/// A node as calc knows nodes: what it has announced in annotations of flannel is in those of Calico. The local node's own
/// addresses stay as they are: it may announce that of a router before it.
pub(crate) fn translated(mut node: Node, is_local: bool, former: Option<&Node>) -> Node {
    node.metadata.annotations.remove(OUTDATED);
    if let Some(former) = former {
        IpVersion::ALL.into_iter().for_each(|version| keep_valid_data(&mut node, former, version));
    }
    let leases = IpVersion::ALL.map(|version| (version, node.flannel_lease(version)));
    if leases.iter().all(|(_, lease)| lease.is_none()) {
        return node;
    }
    for (version, lease) in leases {
        let (own, address, mac_name) = match version {
            IpVersion::V4 => (Node::ADDRESS, Node::VXLAN_ADDRESS, Node::VXLAN_MAC),
            IpVersion::V6 => (Node::ADDRESS_V6, Node::VXLAN_ADDRESS_V6, Node::VXLAN_MAC_V6),
        };
        node.metadata.annotations.remove(address);
        node.metadata.annotations.remove(mac_name);
        let Some(FlannelLease { subnet, public_ip, backend }) = lease else { continue };
        // Calico's annotation has the length of the prefix, too.
        let is_known = node.own_address(version) == Some(public_ip) || is_local;
        let is_windows = node.is_windows();
        let mut put =
            |name: &str, value: String| drop(node.metadata.annotations.insert(name.to_owned(), value));
        if !is_known {
            put(own, public_ip.to_string());
        }
        match backend {
            FlannelBackend::Vxlan { vni: _, mac } => {
                put(address, subnet.network().to_string());
                put(mac_name, mac.to_string());
            }
            // flanneld's backend host-gw makes such a network on Windows nodes.
            FlannelBackend::HostGw if is_windows => put(Node::HNS_NETWORK, Node::L2BRIDGE.to_owned()),
            FlannelBackend::HostGw | FlannelBackend::Unreadable | FlannelBackend::Other(_) => {}
        }
    }
    node
}

/// Data that cannot be read leaves the last valid data in force, as for daemons of flannel (`pkg/backend/vxlan/vxlan_network.go`).
/// flanneld on Windows writes an empty MAC address when it starts, and the right one a moment later.
fn keep_valid_data(node: &mut Node, former: &Node, version: IpVersion) {
    let name = Node::FLANNEL_DATA.of(version);
    let (Some(lease), Some(valid)) = (node.flannel_lease(version), former.flannel_lease(version)) else {
        return;
    };
    if lease.backend == FlannelBackend::Unreadable
        && matches!(valid.backend, FlannelBackend::Vxlan { .. })
        && lease.subnet == valid.subnet
        && let Some(data) = former.metadata.annotations.get(name)
    {
        node.metadata.annotations.insert(name.to_owned(), data.clone());
        node.metadata.annotations.insert(OUTDATED.to_owned(), name.to_owned());
    }
}

/// The networks of the nodes' pods.
#[derive(Default)]
pub(crate) struct PodNetworks {
    of: BTreeMap<String, BTreeSet<IpNet>>,
    /// The nodes that have each network. A controller gives it to one.
    owners: BTreeMap<IpNet, BTreeSet<String>>,
}

impl PodNetworks {
    /// Ingests the networks of a node. Returns the networks that have changed.
    pub(crate) fn update(&mut self, node: &str, nets: BTreeSet<IpNet>) -> Vec<IpNet> {
        let former = self.of.remove(node).unwrap_or_default();
        let changed: Vec<IpNet> = former.symmetric_difference(&nets).copied().collect();
        for net in &changed {
            let owners = self.owners.entry(*net).or_default();
            if nets.contains(net) {
                owners.insert(node.to_owned());
            } else {
                owners.remove(node);
            }
            if owners.is_empty() {
                self.owners.remove(net);
            }
        }
        if !nets.is_empty() {
            self.of.insert(node.to_owned(), nets);
        }
        changed
    }

    /// The node to which packets to a network go.
    pub(crate) fn owner(&self, net: &IpNet) -> Option<&str> {
        self.owners.get(net)?.first().map(String::as_str)
    }

    pub(crate) fn of(&self, node: &str) -> impl Iterator<Item = &IpNet> {
        self.of.get(node).into_iter().flatten()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &IpNet> {
        self.owners.keys()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.of.is_empty() && self.owners.is_empty()
    }

    /// The nodes whose networks overlap that of another node, with the latter.
    fn overlaps(&self) -> BTreeMap<&str, &str> {
        let mut found = BTreeMap::new();
        // By their first addresses; the one before that reaches furthest.
        let mut before: Option<(IpNet, &str)> = None;
        for (net, owners) in &self.owners {
            for node in owners {
                match before {
                    Some((other_net, other)) if other_net.contains(&net.addr()) => {
                        found.insert(node.as_str(), other);
                        found.insert(other, node);
                    }
                    _ => before = Some((*net, node)),
                }
            }
        }
        found
    }
}

/// The pool that contains a network: of several, the smallest.
#[must_use]
pub fn pool_of_network<'a>(pools: impl Iterator<Item = &'a IpPool>, net: &IpNet) -> Option<&'a IpPool> {
    pools.filter(|pool| pool.spec.cidr.contains(net)).max_by_key(|pool| pool.spec.cidr.prefix_len())
}

/// Why a pool cannot be that of flannel's network, with the remedy.
#[must_use]
pub fn unfit_for_flannel(pool: &IpPool) -> Option<String> {
    let name = &pool.metadata.name;
    let gives_none = pool.spec.disabled || pool.spec.assignment_mode.as_deref() == Some("Manual");
    match (pool.spec.vxlan_mode, pool.spec.ipip_mode) {
        (EncapsulationMode::CrossSubnet, _) => Some(format!(
            "IPPool {name} has vxlanMode CrossSubnet, which flanneld does not know; set Always or Never"
        )),
        (EncapsulationMode::Never, mode) if mode != EncapsulationMode::Never => {
            Some(format!("IPPool {name} has IPIP, which flanneld does not use here; set ipipMode Never"))
        }
        _ if !gives_none => Some(format!(
            "Tortie's IPAM may give addresses of IPPool {name}, which belong to flannel; set assignmentMode Manual"
        )),
        _ => None,
    }
}

impl Network {
    /// The target of the route to a node's network of pods.
    pub(crate) fn pod_network_target(&self, net: &IpNet, node: &str, local: &str) -> Option<RouteTarget> {
        if node == local {
            return Some(RouteTarget::Local);
        }
        let (pool, version) = (pool_of_network(self.pools(), net)?, IpVersion::of(&net.addr()));
        if pool.spec.vxlan_mode != EncapsulationMode::Never {
            let vtep = self.vtep(node, local, version);
            return vtep.map(|_| RouteTarget::Vxlan { node: node.to_owned() });
        }
        let router = (self.direct && is_plain(pool)).then(|| self.neighbour(node, local, version)).flatten();
        router.map(|router| RouteTarget::Direct { router })
    }

    /// With flannel, the nodes whose pods cannot be reached in the way that they have announced, with the reason.
    pub(crate) fn flannel_problems(&self, local: &str) -> BTreeMap<&str, String> {
        if !self.flannel {
            return BTreeMap::new();
        }
        let mut overlaps = self.pod_networks.overlaps();
        let problems = self.nodes().iter().filter_map(|(name, node)| {
            let overlap = overlaps.remove(name.as_str()).map(|other| {
                format!(
                    "the network of its pods and that of node {other} overlap; give each node one of its own"
                )
            });
            let mut families = IpVersion::ALL.into_iter();
            let problem = overlap
                .or_else(|| {
                    families.find_map(|version| self.flannel_problem(node, version, local, name == local))
                })
                .or_else(|| outdated(node))?;
            Some((name.as_str(), problem))
        });
        problems.collect()
    }

    fn flannel_problem(
        &self,
        node: &Node,
        version: IpVersion,
        local: &str,
        is_local: bool,
    ) -> Option<String> {
        let subnet = node.pod_cidr(version)?;
        let Some(FlannelLease { subnet, public_ip, backend }) = node.flannel_lease(version) else {
            // Without a pool, and on Windows nodes, pods have no IPv6.
            let has_ipv6 = || !node.is_windows() && pool_of_network(self.pools(), &subnet).is_some();
            let is_wanted = version == IpVersion::V4 || has_ipv6();
            let own = if version == IpVersion::V4 { "" } else { ", on a node with an IPv6 address" };
            return is_wanted.then(|| {
                format!(
                    "it has no valid annotations of flannel for {version} ({}, {} and others); run flanneld there, or Tortie's agent \
                     with --flannel{own}",
                    Node::FLANNEL_MANAGED,
                    Node::FLANNEL_ADDRESS.of(version)
                )
            });
        };
        let Some(pool) = pool_of_network(self.pools(), &subnet) else {
            return Some(format!(
                "no IPPool contains the network {subnet} of its pods; create one for flannel's network"
            ));
        };
        let unfit = unfit_for_flannel(pool);
        if unfit.is_some() || is_local {
            return unfit;
        }
        let (name, vni) = (&pool.metadata.name, ClusterNetwork::new(&self.felix(local)).vni);
        let is_vxlan = pool.spec.vxlan_mode != EncapsulationMode::Never;
        match backend {
            FlannelBackend::Unreadable => {
                let name = Node::FLANNEL_DATA.of(version);
                Some(format!("its annotation {name} cannot be read; see the log of flanneld there"))
            }
            FlannelBackend::Other(backend) => {
                Some(format!("its flanneld has the backend {backend}; Tortie knows vxlan and host-gw"))
            }
            FlannelBackend::Vxlan { vni: other, .. } if is_vxlan && other != vni => Some(format!(
                "its flanneld has the VNI {other}, and this node {vni}; use one of them in net-conf.json and FelixConfiguration (vxlanVNI)"
            )),
            FlannelBackend::Vxlan { .. } if is_vxlan => None,
            FlannelBackend::Vxlan { .. } => Some(format!(
                "its flanneld has the backend vxlan, and IPPool {name} has no VXLAN; set vxlanMode Always there"
            )),
            FlannelBackend::HostGw if is_vxlan => Some(format!(
                "its flanneld has the backend host-gw, and IPPool {name} has VXLAN; set vxlanMode Never there"
            )),
            FlannelBackend::HostGw if self.is_in_own_network(node, local, version) => None,
            FlannelBackend::HostGw => Some(format!(
                "with the backend host-gw, its address {public_ip} must be in the network of this node, and neither may be a Windows node with an overlay network; use \
                 the backend vxlan"
            )),
        }
    }

    /// Whether packets reach the node without a router. Windows nodes take none of pods then.
    fn is_in_own_network(&self, node: &Node, local: &str, version: IpVersion) -> bool {
        let own = self.nodes().get(local).and_then(|local| local.own_network(version));
        let is_near = own.zip(node.own_address(version)).is_some_and(|(own, address)| own.contains(&address));
        is_near && node.takes_plain_packets()
    }
}

/// That a node's last valid data is in force.
fn outdated(node: &Node) -> Option<String> {
    let name = node.metadata.annotations.get(OUTDATED)?;
    Some(format!(
        "its annotation {name} cannot be read, so packets go by what it had before; see the log of flanneld there"
    ))
}
