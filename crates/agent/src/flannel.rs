//! What an agent announces in a cluster with flannel, so that daemons of flannel on other nodes reach its pods
//! (`pkg/subnet/kube` and `pkg/backend` of flannel).

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};
use serde_json::json;
use tortie_api::calico::EncapsulationMode;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_calc::vtep_mac;
use tortie_dataplane::Reason;
use tortie_store::{Store, StoreError};

use crate::node::cluster_network;
use crate::unsupported::Unsupported;
use crate::{AgentError, Extras, Platform};

/// What does not fit flannel.
pub(crate) fn check(node: &str, extras: &Extras, platform: &Platform) -> Result<(), AgentError> {
    let refuse = |problem: &str| Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() });
    match platform {
        _ if !extras.flannel => Ok(()),
        Platform::Windows { .. } => refuse(
            "agents of Windows nodes cannot take part in flannel; remove --flannel (TORTIE_FLANNEL), and run flanneld there",
        ),
        _ if extras.bgp => refuse(
            "routes come from BGP or from flannel; remove --bgp (TORTIE_BGP) or --flannel (TORTIE_FLANNEL)",
        ),
        _ if extras.cni_ipam.is_other_than_host_local() => refuse(
            "with flannel, pods have the addresses of spec.podCIDRs; remove --cni-ipam (TORTIE_CNI_IPAM) or --flannel (TORTIE_FLANNEL)",
        ),
        _ => Ok(()),
    }
}

/// The nodes whose pods cannot be reached in the way that they have announced.
pub(crate) fn unreachable(problems: BTreeMap<&str, String>) -> Vec<Unsupported> {
    let unsupported = problems.into_iter().map(|(node, problem)| Unsupported {
        object: Key::global(Kind::Node, node),
        reason: Reason::RouteRefused,
        message: format!("packets to its pods may not arrive: {problem}"),
    });
    unsupported.collect()
}

/// The network of the node's pods, and how packets travel there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnLease {
    subnet: Ipv4Net,
    /// The VXLAN network identifier, if packets travel by VXLAN.
    vni: Option<u32>,
}

impl OwnLease {
    /// From the Node, the pool of flannel's network, and the properties of the overlay.
    pub(crate) async fn read(store: &dyn Store, node: &str) -> Result<Self, AgentError> {
        let key = Key::global(Kind::Node, node);
        let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let subnet = match Resource::read_what_can_be(&key, &stored.value).0 {
            Some(Resource::Node(read)) => read.pod_cidr(),
            _ => None,
        };
        let refuse = |problem: String| AgentError::Node { node: node.to_owned(), problem };
        let subnet = subnet.ok_or_else(|| {
            let problem = "it has no IPv4 network in spec.podCIDRs, which flannel needs; let the controller manager allocate \
                           them (--allocate-node-cidrs), or remove --flannel (TORTIE_FLANNEL)";
            refuse(problem.to_owned())
        })?;
        let net = IpNet::from(subnet);
        let pools = store.list(Kind::IpPool).await?.items;
        let mut pools = pools.iter().filter_map(|stored| match Resource::read(&stored.key, &stored.value) {
            Ok(Resource::IpPool(pool)) if pool.spec.cidr.contains(&net) => Some(pool),
            _ => None,
        });
        let pool = pools.next().ok_or_else(|| {
            refuse(format!(
                "no IPPool contains the network {subnet} of its pods; create one with flannel's network, assignmentMode \
                 Manual, and vxlanMode Always (backend vxlan) or Never (backend host-gw)"
            ))
        })?;
        let vni = match pool.spec.vxlan_mode {
            EncapsulationMode::Never => None,
            EncapsulationMode::Always => Some(cluster_network(store, node).await?.vni),
            EncapsulationMode::CrossSubnet => {
                return Err(refuse(format!(
                    "IPPool {} has vxlanMode CrossSubnet, which daemons of flannel do not know; set Always or Never",
                    pool.metadata.name
                )));
            }
        };
        Ok(Self { subnet, vni })
    }

    /// The address of the node's tunnel, if it has one: daemons of flannel derive it from the network.
    pub(crate) fn tunnel_address(&self) -> Option<Ipv4Addr> {
        self.vni.map(|_| self.subnet.network())
    }

    /// The annotations of a node with this address.
    pub(crate) fn annotations(&self, node: &str, address: &str) -> BTreeMap<&'static str, Option<String>> {
        let (backend, data) = match self.vni {
            None => ("host-gw", "null".to_owned()),
            Some(vni) => {
                let mac = vtep_mac(node, IpVersion::V4).to_string();
                ("vxlan", json!({"VNI": vni, "VtepMAC": mac}).to_string())
            }
        };
        let values = [
            (Node::FLANNEL_MANAGED, "true"),
            (Node::FLANNEL_BACKEND, backend),
            (Node::FLANNEL_DATA, &data),
            (Node::FLANNEL_ADDRESS, address),
        ];
        values.into_iter().map(|(name, value)| (name, Some(value.to_owned()))).collect()
    }
}
