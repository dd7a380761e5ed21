//! The own Node: its zone, and the addresses that accept node ports.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;

use crate::address::address;
use crate::state::NodePortPlace;

/// The addresses that accept node ports, as the operator chooses (`nodePortAddresses` of kube-proxy).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// The first address of each family that the Node has.
    #[default]
    Primary,
    /// The addresses of the node in these networks. If none of them is of a family, all addresses of that family.
    In(Vec<IpNet>),
}

/// The own Node, as far as Services depend on it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OwnNode {
    /// Its zone, if it has one.
    pub(crate) zone: Option<String>,
    primary: BTreeMap<IpVersion, IpAddr>,
}

impl OwnNode {
    pub(crate) fn new(node: &Node) -> Self {
        let zone = node.metadata.labels.get(Node::ZONE).filter(|zone| !zone.is_empty()).cloned();
        let primary =
            IpVersion::ALL.into_iter().filter_map(|family| Some((family, primary_address(node, family)?)));
        Self { zone, primary: primary.collect() }
    }

    /// The node's first address of a family.
    pub(crate) fn primary(&self, family: IpVersion) -> Option<IpAddr> {
        self.primary.get(&family).copied()
    }

    /// Where node ports of a family are.
    pub(crate) fn node_ports(&self, chosen: &NodePortAddresses, family: IpVersion) -> NodePortPlace {
        let networks = match chosen {
            NodePortAddresses::Primary => return NodePortPlace::Primary(self.primary(family)),
            NodePortAddresses::In(networks) => networks,
        };
        let own = networks.iter().filter(|network| IpVersion::of(&network.addr()) == family);
        let own: Vec<IpNet> = own.map(IpNet::trunc).collect();
        if own.is_empty() { NodePortPlace::AllLocal } else { NodePortPlace::LocalIn(own) }
    }
}

/// The first `InternalIP`, otherwise the first `ExternalIP` (`GetNodeHostIPs` of `k8s.io/kubernetes/pkg/util/node`). A datastore
/// without kubelets has neither; there it is the address that the agent announces.
fn primary_address(node: &Node, family: IpVersion) -> Option<IpAddr> {
    let of_kind = |kind: &str| {
        let listed = node.status.addresses.iter().filter(|listed| listed.kind == kind);
        let mut addresses = listed.filter_map(|listed| address(&listed.address));
        addresses.find(|address| IpVersion::of(address) == family)
    };
    of_kind("InternalIP").or_else(|| of_kind("ExternalIP")).or_else(|| node.own_address(family))
}
