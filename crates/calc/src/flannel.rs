//! Clusters with flannel: each node has one network of pods (`Node.spec.podCIDR`) instead of blocks, and announces the way
//! there by annotations of flannel.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tortie_api::calico::EncapsulationMode;
use tortie_api::kubernetes::{FlannelBackend, FlannelLease, Node};
use tortie_api::net::IpVersion;
use tortie_dataplane::ClusterNetwork;

use crate::input::BlockNodes;
use crate::network::{Network, is_plain};

/// A node as calc knows nodes: what it has announced in annotations of flannel is in those of Calico.
pub(crate) fn translated(mut node: Node) -> Node {
    let Some(FlannelLease { subnet, public_ip, backend }) = node.flannel_lease() else { return node };
    // Calico's annotation has the length of the prefix, too.
    let is_known = node.address() == Some(public_ip);
    let annotations = &mut node.metadata.annotations;
    if !is_known {
        annotations.insert(Node::ADDRESS.to_owned(), public_ip.to_string());
    }
    annotations.remove(Node::VXLAN_ADDRESS);
    annotations.remove(Node::VXLAN_MAC);
    if let FlannelBackend::Vxlan { vni: _, mac } = backend {
        annotations.insert(Node::VXLAN_ADDRESS.to_owned(), subnet.network().to_string());
        annotations.insert(Node::VXLAN_MAC.to_owned(), mac.to_string());
    }
    node
}

impl Network {
    /// Ingests the network of a node's pods.
    pub(crate) fn update_pod_network(&mut self, name: &str, node: Option<&Node>) {
        let subnet = node.and_then(|node| node.flannel_lease()).map(|lease| IpNet::from(lease.subnet));
        let former = match subnet {
            Some(subnet) => self.pod_networks.insert(name.to_owned(), subnet),
            None => self.pod_networks.remove(name),
        };
        // If two nodes have one network, which a controller prevents, one of them keeps it.
        for net in [former, subnet].into_iter().flatten() {
            let owner = self.pod_networks.iter().find(|(_, own)| **own == net);
            let owner = owner.map(|(name, _)| name.clone());
            self.update_block(net, BlockNodes { owner, ..BlockNodes::default() });
        }
    }

    /// The other nodes whose pods cannot be reached in the way that they have announced, with the reason.
    pub(crate) fn flannel_problems(&self, local: &str) -> BTreeMap<&str, String> {
        let others = self
            .nodes()
            .iter()
            .filter(|(name, node)| self.flannel && *name != local && node.pod_cidr().is_some());
        others.filter_map(|(name, node)| Some((name.as_str(), self.flannel_problem(node, local)?))).collect()
    }

    fn flannel_problem(&self, node: &Node, local: &str) -> Option<String> {
        let Some(FlannelLease { subnet, public_ip, backend }) = node.flannel_lease() else {
            return Some(format!(
                "it has no annotations of flannel ({} and others); run flanneld there, or Tortie's agent with --flannel",
                Node::FLANNEL_MANAGED
            ));
        };
        let net = IpNet::from(subnet);
        let Some(pool) = self.pools().find(|pool| pool.spec.cidr.contains(&net)) else {
            return Some(format!(
                "no IPPool contains the network {subnet} of its pods; create one for flannel's network"
            ));
        };
        let (name, vni) = (&pool.metadata.name, ClusterNetwork::new(&self.felix(local)).vni);
        let is_vxlan = pool.spec.vxlan_mode != EncapsulationMode::Never;
        match backend {
            FlannelBackend::Other(backend) => {
                Some(format!("its flannel has the backend {backend}; Tortie knows vxlan and host-gw"))
            }
            FlannelBackend::Vxlan { vni: other, .. } if is_vxlan && other != vni => Some(format!(
                "its flannel has the VNI {other}, and this node {vni}; use one of them in net-conf.json and FelixConfiguration (vxlanVNI)"
            )),
            FlannelBackend::Vxlan { .. } if is_vxlan => None,
            FlannelBackend::Vxlan { .. } => Some(format!(
                "its flannel has the backend vxlan, and IPPool {name} has no VXLAN; set vxlanMode Always there"
            )),
            FlannelBackend::HostGw if is_vxlan => Some(format!(
                "its flannel has the backend host-gw, and IPPool {name} has VXLAN; set vxlanMode Never there"
            )),
            FlannelBackend::HostGw if is_plain(pool) && self.neighbour_address(node, local) => None,
            FlannelBackend::HostGw => Some(format!(
                "its flannel has the backend host-gw, and its address {public_ip} is not in the network of this node; use the backend vxlan"
            )),
        }
    }

    /// Whether the node's own address is in the network of this one.
    fn neighbour_address(&self, node: &Node, local: &str) -> bool {
        let own = self.nodes().get(local).and_then(|local| local.own_network(IpVersion::V4));
        own.zip(node.own_address(IpVersion::V4)).is_some_and(|(own, address)| own.contains(&address))
    }
}
