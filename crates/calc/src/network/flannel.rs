//! Clusters with flannel: each node has one network of pods (`Node.spec.podCIDR`) instead of blocks, and announces the way
//! there by annotations of flannel.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use tortie_api::calico::{EncapsulationMode, IpPool};
use tortie_api::kubernetes::{FlannelBackend, FlannelLease, Node};
use tortie_api::net::IpVersion;
use tortie_dataplane::{ClusterNetwork, RouteTarget};

use super::{Network, is_plain};

/// A node as calc knows nodes: what it has announced in annotations of flannel is in those of Calico. The local node's own
/// address stays as it is: it may announce that of a router before it.
pub(crate) fn translated(mut node: Node, is_local: bool) -> Node {
    let Some(FlannelLease { subnet, public_ip, backend }) = node.flannel_lease() else { return node };
    // Calico's annotation has the length of the prefix, too.
    let is_known = node.address() == Some(public_ip) || is_local;
    let node_is_linux = !node.is_windows();
    let annotations = &mut node.metadata.annotations;
    if !is_known {
        annotations.insert(Node::ADDRESS.to_owned(), public_ip.to_string());
    }
    annotations.remove(Node::VXLAN_ADDRESS);
    annotations.remove(Node::VXLAN_MAC);
    if backend == FlannelBackend::HostGw && !node_is_linux {
        // flanneld's backend host-gw makes such a network on Windows nodes.
        annotations.insert(Node::HNS_NETWORK.to_owned(), Node::L2BRIDGE.to_owned());
    }
    if let FlannelBackend::Vxlan { vni: _, mac } = backend {
        annotations.insert(Node::VXLAN_ADDRESS.to_owned(), subnet.network().to_string());
        annotations.insert(Node::VXLAN_MAC.to_owned(), mac.to_string());
    }
    node
}

/// The networks of the nodes' pods.
#[derive(Default)]
pub(crate) struct PodNetworks {
    of: BTreeMap<String, IpNet>,
    /// The nodes that have each network. A controller gives it to one.
    owners: BTreeMap<IpNet, BTreeSet<String>>,
}

impl PodNetworks {
    /// Ingests the network of a node. Returns the networks that have changed.
    pub(crate) fn update(&mut self, node: &str, net: Option<IpNet>) -> Vec<IpNet> {
        let former = match net {
            Some(net) => self.of.insert(node.to_owned(), net),
            None => self.of.remove(node),
        };
        if former == net {
            return Vec::new();
        }
        if let Some(former) = former
            && let Some(owners) = self.owners.get_mut(&former)
        {
            owners.remove(node);
            if owners.is_empty() {
                self.owners.remove(&former);
            }
        }
        if let Some(net) = net {
            self.owners.entry(net).or_default().insert(node.to_owned());
        }
        former.into_iter().chain(net).collect()
    }

    /// The node to which packets to a network go.
    pub(crate) fn owner(&self, net: &IpNet) -> Option<&str> {
        self.owners.get(net)?.first().map(String::as_str)
    }

    pub(crate) fn of(&self, node: &str) -> Option<IpNet> {
        self.of.get(node).copied()
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
        let pool = pool_of_network(self.pools(), net)?;
        if pool.spec.vxlan_mode != EncapsulationMode::Never {
            let vtep = self.vtep(node, local, IpVersion::V4);
            return vtep.map(|_| RouteTarget::Vxlan { node: node.to_owned() });
        }
        let router =
            (self.direct && is_plain(pool)).then(|| self.neighbour(node, local, IpVersion::V4)).flatten();
        router.map(|router| RouteTarget::Direct { router })
    }

    /// With flannel, the nodes whose pods cannot be reached in the way that they have announced, with the reason.
    pub(crate) fn flannel_problems(&self, local: &str) -> BTreeMap<&str, String> {
        if !self.flannel {
            return BTreeMap::new();
        }
        let mut overlaps = self.pod_networks.overlaps();
        let nodes = self.nodes().iter().filter(|(_, node)| node.pod_cidr().is_some());
        let problems = nodes.filter_map(|(name, node)| {
            let overlap = overlaps.remove(name.as_str()).map(|other| {
                format!(
                    "the network of its pods and that of node {other} overlap; give each node one of its own"
                )
            });
            let problem = overlap.or_else(|| self.flannel_problem(node, local, name == local))?;
            Some((name.as_str(), problem))
        });
        problems.collect()
    }

    fn flannel_problem(&self, node: &Node, local: &str, is_local: bool) -> Option<String> {
        let Some(FlannelLease { subnet, public_ip, backend }) = node.flannel_lease() else {
            return Some(format!(
                "it has no valid annotations of flannel ({}, {} and others); run flanneld there, or Tortie's agent with --flannel",
                Node::FLANNEL_MANAGED,
                Node::FLANNEL_ADDRESS
            ));
        };
        let Some(pool) = pool_of_network(self.pools(), &subnet.into()) else {
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
            FlannelBackend::HostGw if self.is_in_own_network(node, local) => None,
            FlannelBackend::HostGw => Some(format!(
                "with the backend host-gw, its address {public_ip} must be in the network of this node, and neither may be a Windows node with an overlay network; use \
                 the backend vxlan"
            )),
        }
    }

    /// Whether packets reach the node without a router. Windows nodes take none of pods then.
    fn is_in_own_network(&self, node: &Node, local: &str) -> bool {
        let own = self.nodes().get(local).and_then(|local| local.own_network(IpVersion::V4));
        let is_near =
            own.zip(node.own_address(IpVersion::V4)).is_some_and(|(own, address)| own.contains(&address));
        is_near && node.takes_plain_packets()
    }
}
