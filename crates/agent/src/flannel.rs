//! What an agent announces in a cluster with flannel, so that daemons of flannel on other nodes reach its pods
//! (`pkg/subnet/kube` and `pkg/backend` of flannel).

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde_json::{Value, json};
use tortie_api::calico::{EncapsulationMode, IpPool};
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_calc::vtep_mac;
use tortie_dataplane::Reason;
use tortie_store::{Store, StoreError};

use crate::cluster_network::cluster_network;
use crate::unsupported::Unsupported;
use crate::{AgentError, CniIpam, Extras, Platform, WindowsNetwork};

/// What does not fit flannel.
pub(crate) fn check(node: &str, extras: &Extras, platform: &Platform) -> Result<(), AgentError> {
    let refuse = |problem: &str| Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() });
    if !extras.flannel {
        return Ok(());
    }
    if extras.bgp {
        return refuse(
            "routes come from BGP or from flannel; remove --bgp (TORTIE_BGP) or --flannel (TORTIE_FLANNEL)",
        );
    }
    if extras.cni_ipam.is_other_than_host_local() {
        return refuse(
            "with flannel, pods have the addresses of spec.podCIDRs; remove --cni-ipam (TORTIE_CNI_IPAM) or --flannel \
             (TORTIE_FLANNEL)",
        );
    }
    match platform {
        #[cfg(target_os = "linux")]
        Platform::Linux => Ok(()),
        Platform::Windows { .. } => Ok(()),
        Platform::Other { .. } => refuse("it cannot take part in flannel; remove --flannel (TORTIE_FLANNEL)"),
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
        let pools = store.list(Kind::IpPool).await?.items;
        let pools: Vec<IpPool> = pools
            .iter()
            .filter_map(|stored| match Resource::read(&stored.key, &stored.value) {
                Ok(Resource::IpPool(pool)) => Some(pool),
                _ => None,
            })
            .collect();
        let pool = tortie_calc::pool_of_network(pools.iter(), &subnet.into()).ok_or_else(|| {
            refuse(format!(
                "no IPPool contains the network {subnet} of its pods; create one with flannel's network, assignmentMode \
                 Manual, and vxlanMode Always (backend vxlan) or Never (backend host-gw)"
            ))
        })?;
        if let Some(problem) = tortie_calc::unfit_for_flannel(pool) {
            return Err(refuse(problem));
        }
        let vni = match pool.spec.vxlan_mode {
            EncapsulationMode::Never => None,
            EncapsulationMode::Always | EncapsulationMode::CrossSubnet => {
                Some(cluster_network(store, node).await?.vni)
            }
        };
        Ok(Self { subnet, vni })
    }

    /// The network of a Windows node's pods, if its type can have the backend.
    ///
    /// # Errors
    /// The type does not fit the pool of flannel's network.
    pub(crate) fn windows_block(&self, node: &str, network: WindowsNetwork) -> Result<Ipv4Net, AgentError> {
        let problem = match (self.vni, network) {
            (Some(_), WindowsNetwork::Overlay) | (None, WindowsNetwork::L2Bridge) => return Ok(self.subnet),
            (Some(_), WindowsNetwork::L2Bridge) => {
                "flannel's IPPool has VXLAN, which a network of type L2Bridge has not: remove --windows-network l2bridge \
                 (TORTIE_WINDOWS_NETWORK)"
            }
            (None, WindowsNetwork::Overlay) => {
                "flannel's IPPool has no VXLAN (backend host-gw), and the node's network is an overlay: add --windows-network \
                 l2bridge (TORTIE_WINDOWS_NETWORK)"
            }
        };
        Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() })
    }

    /// The addresses of a Windows node's pods: those of its network without the first two, which are gateways. kube-proxy uses the
    /// second one, too.
    pub(crate) fn windows_addresses(&self) -> CniIpam {
        CniIpam::host_local_from(self.subnet, self.subnet.network().to_bits().saturating_add(3).into())
    }

    /// The address of the node's tunnel, if it has one: daemons of flannel derive it from the network.
    pub(crate) fn tunnel_address(&self) -> Option<Ipv4Addr> {
        self.vni.map(|_| self.subnet.network())
    }

    /// The annotations of a node with this address. The MAC address of its tunnel is derived from its name, unless there is another
    /// one.
    pub(crate) fn annotations(
        &self,
        node: &str,
        mac: Option<&str>,
        address: &str,
    ) -> BTreeMap<&'static str, Option<String>> {
        let (backend, data) = match self.vni {
            None => ("host-gw", "null".to_owned()),
            Some(vni) => {
                let mac = mac.map_or_else(|| vtep_mac(node, IpVersion::V4).to_string(), str::to_owned);
                ("vxlan", json!({"VNI": vni, "VtepMAC": mac}).to_string())
            }
        };
        let values = [
            (Node::FLANNEL_MANAGED, "true"),
            (Node::FLANNEL_BACKEND, backend),
            (Node::FLANNEL_DATA, &data),
            (Node::FLANNEL_ADDRESS, address),
        ];
        let values = values.into_iter().map(|(name, value)| (name, Some(value.to_owned())));
        values.chain(Node::FLANNEL_V6.map(|name| (name, None))).collect()
    }
}

/// The annotations to take out of a Node whose agent has announced itself to flannel, and no longer does. Those of flanneld
/// have another MAC address than that which is derived from the name, or announced beside (Windows); with the backend host-gw, nobody
/// can tell.
pub(crate) fn stale_annotations(node: &str, current: &Value) -> BTreeMap<&'static str, Option<String>> {
    let derived = vtep_mac(node, IpVersion::V4).to_string();
    let announced = current[Node::VXLAN_MAC].as_str().filter(|mac| !mac.is_empty());
    let is_own = current[Node::FLANNEL_DATA]
        .as_str()
        .is_some_and(|data| data.contains(&derived) || announced.is_some_and(|mac| data.contains(mac)));
    let names = [Node::FLANNEL_MANAGED, Node::FLANNEL_BACKEND, Node::FLANNEL_DATA, Node::FLANNEL_ADDRESS];
    names.into_iter().filter(|_| is_own).map(|name| (name, None)).collect()
}

#[cfg(test)]
mod tests {
    use tortie_store::Embedded;

    use super::*;

    async fn read(spec: Value, pool: Option<&str>, vni: Option<u32>) -> Result<OwnLease, String> {
        let store = Embedded::in_memory().unwrap();
        let node = json!({"metadata": {"name": "n"}, "spec": spec});
        store.create(&Key::global(Kind::Node, "n"), node).await.unwrap();
        if let Some(mode) = pool {
            let pool = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "flannel"},
                "spec": {"cidr": "10.244.0.0/16", "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"},
            });
            store.create(&Key::global(Kind::IpPool, "flannel"), pool).await.unwrap();
        }
        if let Some(vni) = vni {
            let felix = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "FelixConfiguration", "metadata": {"name": "default"},
                "spec": {"vxlanVNI": vni},
            });
            store.create(&Key::global(Kind::FelixConfiguration, "default"), felix).await.unwrap();
        }
        OwnLease::read(&store, "n").await.map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn a_node_announces_what_daemons_of_flannel_need() {
        let spec = || json!({"podCIDR": "10.244.7.0/24"});
        for (mode, vni, backend, data, tunnel) in [
            ("Never", None, "host-gw", "null", None),
            ("Always", None, "vxlan", r#"{"VNI":4096,"VtepMAC":"66:d1:85:4c:ae:89"}"#, Some("10.244.7.0")),
            (
                "Always",
                Some(5000),
                "vxlan",
                r#"{"VNI":5000,"VtepMAC":"66:d1:85:4c:ae:89"}"#,
                Some("10.244.7.0"),
            ),
        ] {
            let lease = read(spec(), Some(mode), vni).await.unwrap();
            assert_eq!(
                lease.tunnel_address().map(|address| address.to_string()).as_deref(),
                tunnel,
                "{mode}"
            );
            let written = lease.annotations("n", None, "192.0.2.7");
            let written = |name: &str| written[name].clone().unwrap();
            assert_eq!(written(Node::FLANNEL_BACKEND), backend);
            assert_eq!(written(Node::FLANNEL_DATA), data);
            assert_eq!(written(Node::FLANNEL_ADDRESS), "192.0.2.7");
            assert_eq!(written(Node::FLANNEL_MANAGED), "true");
        }
        for (spec, pool, expected) in [
            (json!({}), Some("Always"), "--allocate-node-cidrs"),
            (json!({"podCIDR": "fd00::/64"}), Some("Always"), "no IPv4 network"),
            (spec(), None, "assignmentMode Manual"),
            (json!({"podCIDR": "10.9.7.0/24"}), Some("Always"), "no IPPool contains the network 10.9.7.0/24"),
            (spec(), Some("CrossSubnet"), "IPPool flannel has vxlanMode CrossSubnet"),
        ] {
            let error = read(spec, pool, None).await.unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[tokio::test]
    async fn the_network_of_a_windows_node_must_fit_the_backend() {
        for (mode, fits, other, remedy) in [
            (
                "Always",
                WindowsNetwork::Overlay,
                WindowsNetwork::L2Bridge,
                "remove --windows-network l2bridge",
            ),
            ("Never", WindowsNetwork::L2Bridge, WindowsNetwork::Overlay, "add --windows-network l2bridge"),
        ] {
            let lease = read(json!({"podCIDR": "10.244.7.0/24"}), Some(mode), None).await.unwrap();
            assert_eq!(lease.windows_block("n", fits).unwrap().to_string(), "10.244.7.0/24");
            let error = lease.windows_block("n", other).unwrap_err().to_string();
            assert!(error.contains(remedy), "{error}");
            let section = json!({"type": "host-local",
                "ranges": [[{"subnet": "10.244.7.0/24", "rangeStart": "10.244.7.3"}]]});
            assert_eq!(lease.windows_addresses(), section.to_string().parse().unwrap());
        }
    }

    #[test]
    fn only_own_annotations_are_stale() {
        let stale = |data: &str| stale_annotations("n", &json!({Node::FLANNEL_DATA: data})).len();
        assert_eq!(stale(r#"{"VNI":4096,"VtepMAC":"66:d1:85:4c:ae:89"}"#), 4);
        assert_eq!(stale(r#"{"VNI":4096,"VtepMAC":"66:d1:85:4c:ae:88"}"#), 0);
        assert_eq!(stale("null"), 0);
        assert_eq!(stale_annotations("n", &Value::Null).len(), 0);
        // HNS has chosen the MAC address of a Windows node.
        let data = r#"{"VNI":4096,"VtepMAC":"00:15:5d:01:02:03"}"#;
        for (mac, expected) in [("00:15:5d:01:02:03", 4), ("00:15:5d:01:02:04", 0), ("", 0)] {
            let current = json!({Node::FLANNEL_DATA: data, Node::VXLAN_MAC: mac});
            assert_eq!(stale_annotations("n", &current).len(), expected, "{mac:?}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn options_that_do_not_fit_are_refused() {
        let flannel = || Extras { flannel: true, ..Extras::default() };
        for (extras, expected) in [
            (Extras::default(), None),
            (flannel(), None),
            (Extras { cni_ipam: r#"{"type": "host-local"}"#.parse().unwrap(), ..flannel() }, None),
            (
                Extras { cni_ipam: r#"{"type": "calico-ipam"}"#.parse().unwrap(), ..flannel() },
                Some("TORTIE_CNI_IPAM"),
            ),
            (Extras { bgp: true, ..flannel() }, Some("TORTIE_BGP")),
        ] {
            let refused = check("n", &extras, &Platform::Linux).err().map(|error| error.to_string());
            assert_eq!(refused.is_some(), expected.is_some(), "{refused:?}");
            assert!(
                expected.is_none_or(|expected| refused.clone().unwrap().contains(expected)),
                "{refused:?}"
            );
        }
    }
}
