//! What an agent announces in a cluster with flannel, so that daemons of flannel on other nodes reach its pods
//! (`pkg/subnet/kube` and `pkg/backend` of flannel).

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};
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
        return match &extras.flannel_etcd {
            Some(_) => refuse("--flannel-etcd (TORTIE_FLANNEL_ETCD) needs --flannel (TORTIE_FLANNEL)"),
            None => Ok(()),
        };
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

/// The nodes whose pods cannot be reached in the way that they have announced. This node names machines that are no Nodes.
pub(crate) fn unreachable(local: &str, problems: BTreeMap<&str, String>) -> Vec<Unsupported> {
    let unsupported = problems.into_iter().map(|(node, problem)| {
        let is_machine = node.starts_with('/');
        let message = match is_machine {
            true => format!(
                "packets to pods of the machine with flannel's lease {node} may not arrive: {problem}"
            ),
            false => format!("packets to its pods may not arrive: {problem}"),
        };
        let node = if is_machine { local } else { node };
        Unsupported { object: Key::global(Kind::Node, node), reason: Reason::RouteRefused, message }
    });
    unsupported.collect()
}

/// Whether a Windows node's network can have the backend.
pub(crate) fn check_network(node: &str, network: WindowsNetwork, is_vxlan: bool) -> Result<(), AgentError> {
    let problem = match (is_vxlan, network) {
        (true, WindowsNetwork::Overlay) | (false, WindowsNetwork::L2Bridge) => return Ok(()),
        (true, WindowsNetwork::L2Bridge) => {
            "flannel's IPPool has VXLAN, which a network of type L2Bridge has not: remove --windows-network l2bridge \
             (TORTIE_WINDOWS_NETWORK)"
        }
        (false, WindowsNetwork::Overlay) => {
            "flannel's IPPool has no VXLAN (backend host-gw), and the node's network is an overlay: add --windows-network \
             l2bridge (TORTIE_WINDOWS_NETWORK)"
        }
    };
    Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() })
}

/// The networks of the node's pods, and how packets travel there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnLease {
    /// At least one, at most one of each family, IPv4 first.
    subnets: Vec<IpNet>,
    /// The VXLAN network identifier, if packets travel by VXLAN.
    vni: Option<u32>,
}

impl OwnLease {
    /// From the Node, the pools of flannel's networks, and the properties of the overlay.
    pub(crate) async fn read(
        store: &dyn Store,
        node: &str,
        families: &[IpVersion],
    ) -> Result<Self, AgentError> {
        let key = Key::global(Kind::Node, node);
        let stored = store.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        let read = match Resource::read_what_can_be(&key, &stored.value).0 {
            Some(Resource::Node(read)) => Some(read),
            _ => None,
        };
        let nets = families.iter().filter_map(|version| read.as_ref()?.pod_cidr(*version)).collect();
        let refuse = |problem: String| AgentError::Node { node: node.to_owned(), problem };
        let (subnets, is_vxlan) = of_networks(store, nets).await?.map_err(refuse)?;
        let vni = if is_vxlan { Some(cluster_network(store, node).await?.vni) } else { None };
        Ok(Self { subnets, vni })
    }

    /// With these networks, at least one, IPv4 first.
    pub(crate) fn of_subnets(subnets: Vec<IpNet>, vni: Option<u32>) -> Self {
        Self { subnets, vni }
    }

    fn ipv4(&self) -> Option<Ipv4Net> {
        self.subnets.iter().find_map(|net| match net {
            IpNet::V4(net) => Some(*net),
            IpNet::V6(_) => None,
        })
    }

    /// The network of a Windows node's pods, if its type can have the backend.
    ///
    /// # Errors
    /// The type does not fit the pool of flannel's network.
    pub(crate) fn windows_block(&self, node: &str, network: WindowsNetwork) -> Result<Ipv4Net, AgentError> {
        check_network(node, network, self.vni.is_some())?;
        let refuse = || AgentError::Node { node: node.to_owned(), problem: NO_NETWORK.to_owned() };
        self.ipv4().ok_or_else(refuse)
    }

    /// The addresses of a Windows node's pods: those of its network without the first two, which are gateways. kube-proxy uses the
    /// second one, too.
    pub(crate) fn windows_addresses(&self) -> Option<CniIpam> {
        let subnet = self.ipv4()?;
        Some(CniIpam::host_local_from(subnet, subnet.network().to_bits().saturating_add(3).into()))
    }

    /// The families of the networks.
    pub(crate) fn families(&self) -> Vec<IpVersion> {
        self.subnets.iter().map(|net| IpVersion::of(&net.addr())).collect()
    }

    /// The addresses of the node's tunnels, if it has any: daemons of flannel derive them from the networks.
    pub(crate) fn tunnel_addresses(&self) -> Vec<IpAddr> {
        self.subnets.iter().filter(|_| self.vni.is_some()).map(IpNet::network).collect()
    }

    /// The annotations of a node with these addresses. The MAC addresses of its tunnels are derived from its name, unless IPv4 has
    /// another one. Without an IPv6 address, it announces IPv4 only, which is a condition of all nodes.
    ///
    /// # Errors
    /// The node has no address of the only family, or no IPv4 address.
    pub(crate) fn annotations(
        &self,
        node: &str,
        mac: Option<&str>,
        address: impl Fn(IpVersion) -> Option<String>,
    ) -> Result<BTreeMap<&'static str, Option<String>>, AgentError> {
        let backend = if self.vni.is_some() { "vxlan" } else { "host-gw" };
        let mut values = BTreeMap::from([
            (Node::FLANNEL_MANAGED, Some("true".to_owned())),
            (Node::FLANNEL_BACKEND, Some(backend.to_owned())),
        ]);
        for version in IpVersion::ALL {
            let (mut own, mut data) = (None, None);
            if self.subnets.iter().any(|net| IpVersion::of(&net.addr()) == version) {
                own = address(version);
                let is_needed = version == IpVersion::V4 || self.ipv4().is_none();
                if own.is_none() && is_needed {
                    let option = if version == IpVersion::V4 { "ip" } else { "ip6" };
                    let problem = format!(
                        "it has no {version} address in its status or in annotations, which flannel needs; use --{option}-autodetection-method"
                    );
                    return Err(AgentError::Node { node: node.to_owned(), problem });
                }
                let derived = || vtep_mac(node, version).to_string();
                let mac = mac.filter(|_| version == IpVersion::V4).map_or_else(derived, str::to_owned);
                data = own.as_ref().map(|_| match self.vni {
                    None => "null".to_owned(),
                    Some(vni) => json!({"VNI": vni, "VtepMAC": mac}).to_string(),
                });
            }
            values.insert(Node::FLANNEL_ADDRESS.of(version), own);
            values.insert(Node::FLANNEL_DATA.of(version), data);
        }
        Ok(values)
    }
}

const NO_NETWORK: &str = "it has no network in spec.podCIDRs, which flannel needs (IPv4 on a Windows node); let the controller manager \
                          allocate them (--allocate-node-cidrs), or remove --flannel (TORTIE_FLANNEL)";

/// As [`of_pools`], with the pools of the datastore.
pub(crate) async fn of_networks(
    store: &dyn Store,
    nets: Vec<IpNet>,
) -> Result<Result<(Vec<IpNet>, bool), String>, StoreError> {
    let pools = store.list(Kind::IpPool).await?.items;
    let pools: Vec<IpPool> = pools
        .iter()
        .filter_map(|stored| match Resource::read(&stored.key, &stored.value) {
            Ok(Resource::IpPool(pool)) => Some(pool),
            _ => None,
        })
        .collect();
    Ok(of_pools(nets, &pools))
}

/// The networks that a node announces, and whether packets travel there by VXLAN. Without a pool for IPv6, pods have IPv4 only.
fn of_pools(nets: Vec<IpNet>, pools: &[IpPool]) -> Result<(Vec<IpNet>, bool), String> {
    let mut found: Vec<(IpNet, &IpPool)> = Vec::new();
    for net in nets {
        match tortie_calc::pool_of_network(pools.iter(), &net) {
            Some(pool) => found.push((net, pool)),
            None if !found.is_empty() => {}
            None => {
                return Err(format!(
                    "no IPPool contains the network {net} of its pods; create one with flannel's network, assignmentMode \
                     Manual, and vxlanMode Always (backend vxlan) or Never (backend host-gw)"
                ));
            }
        }
    }
    if let Some(problem) = found.iter().find_map(|(_, pool)| tortie_calc::unfit_for_flannel(pool)) {
        return Err(problem);
    }
    let is_vxlan = |pool: &IpPool| pool.spec.vxlan_mode != EncapsulationMode::Never;
    match &found[..] {
        [] => Err(NO_NETWORK.to_owned()),
        [(_, one), (_, other)] if is_vxlan(one) != is_vxlan(other) => Err(format!(
            "IPPools {} and {} differ in vxlanMode, and flannel has one backend for both families; set the same mode",
            one.metadata.name, other.metadata.name
        )),
        [(_, pool), ..] => {
            let is_vxlan = is_vxlan(pool);
            Ok((found.into_iter().map(|(net, _)| net).collect(), is_vxlan))
        }
    }
}

/// The annotations to take out of a Node whose agent has announced itself to flannel, and no longer does. Those of flanneld
/// have another MAC address than that which is derived from the name, or announced beside (Windows); with the backend host-gw, nobody
/// can tell.
pub(crate) fn stale_annotations(node: &str, current: &Value) -> BTreeMap<&'static str, Option<String>> {
    let announced = current[Node::VXLAN_MAC].as_str().filter(|mac| !mac.is_empty());
    let is_own = IpVersion::ALL.into_iter().any(|version| {
        let derived = vtep_mac(node, version).to_string();
        let announced = announced.filter(|_| version == IpVersion::V4);
        let data = current[Node::FLANNEL_DATA.of(version)].as_str().unwrap_or_default();
        data.contains(&derived) || announced.is_some_and(|mac| data.contains(mac))
    });
    let of_families = [Node::FLANNEL_DATA, Node::FLANNEL_ADDRESS].into_iter();
    let of_families = of_families.flat_map(|names| IpVersion::ALL.map(|version| names.of(version)));
    let names = [Node::FLANNEL_MANAGED, Node::FLANNEL_BACKEND].into_iter().chain(of_families);
    names.filter(|name| is_own && !current[*name].is_null()).map(|name| (name, None)).collect()
}

#[cfg(test)]
mod tests {
    use tortie_store::Embedded;

    use super::*;

    /// The lease of a Node with this `spec` and pools `flannel` and `flannel-v6` of these modes.
    async fn read_both(spec: Value, pools: [Option<&str>; 2], vni: Option<u32>) -> Result<OwnLease, String> {
        let store = Embedded::in_memory().unwrap();
        let node = json!({"metadata": {"name": "n"}, "spec": spec});
        store.create(&Key::global(Kind::Node, "n"), node).await.unwrap();
        for (name, cidr, mode) in
            [("flannel", "10.244.0.0/16", pools[0]), ("flannel-v6", "fd00:244::/48", pools[1])]
        {
            let Some(mode) = mode else { continue };
            let pool = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name},
                "spec": {"cidr": cidr, "vxlanMode": mode, "ipipMode": "Never", "assignmentMode": "Manual"},
            });
            store.create(&Key::global(Kind::IpPool, name), pool).await.unwrap();
        }
        if let Some(vni) = vni {
            let felix = json!({
                "apiVersion": "projectcalico.org/v3", "kind": "FelixConfiguration", "metadata": {"name": "default"},
                "spec": {"vxlanVNI": vni},
            });
            store.create(&Key::global(Kind::FelixConfiguration, "default"), felix).await.unwrap();
        }
        OwnLease::read(&store, "n", &IpVersion::ALL).await.map_err(|error| error.to_string())
    }

    async fn read(spec: Value, pool: Option<&str>, vni: Option<u32>) -> Result<OwnLease, String> {
        read_both(spec, [pool, None], vni).await
    }

    fn address(version: IpVersion) -> Option<String> {
        Some(if version == IpVersion::V4 { "192.0.2.7".to_owned() } else { "2001:db8::7".to_owned() })
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
            let tunnels: Vec<IpAddr> = tunnel.into_iter().map(|tunnel| tunnel.parse().unwrap()).collect();
            assert_eq!(lease.tunnel_addresses(), tunnels, "{mode}");
            let written = lease.annotations("n", None, address).unwrap();
            let written = |name: &str| written[name].clone();
            assert_eq!(written(Node::FLANNEL_BACKEND).as_deref(), Some(backend));
            assert_eq!(written(Node::FLANNEL_DATA.of(IpVersion::V4)).as_deref(), Some(data));
            assert_eq!(written(Node::FLANNEL_ADDRESS.of(IpVersion::V4)), address(IpVersion::V4));
            assert_eq!(written(Node::FLANNEL_MANAGED).as_deref(), Some("true"));
            assert_eq!(written(Node::FLANNEL_DATA.of(IpVersion::V6)), None);
            assert_eq!(written(Node::FLANNEL_ADDRESS.of(IpVersion::V6)), None);
        }
        for (spec, pool, expected) in [
            (json!({}), Some("Always"), "--allocate-node-cidrs"),
            (json!({"podCIDR": "fd00::/64"}), Some("Always"), "no IPPool contains the network fd00::/64"),
            (spec(), None, "assignmentMode Manual"),
            (json!({"podCIDR": "10.9.7.0/24"}), Some("Always"), "no IPPool contains the network 10.9.7.0/24"),
            (spec(), Some("CrossSubnet"), "IPPool flannel has vxlanMode CrossSubnet"),
        ] {
            let error = read(spec, pool, None).await.unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }

    #[tokio::test]
    async fn a_node_announces_both_families_if_both_have_a_pool() {
        let [v4, v6] = [IpVersion::V4, IpVersion::V6];
        let spec = |cidrs: &[&str]| json!({"podCIDR": cidrs[0], "podCIDRs": cidrs});
        let both = ["10.244.7.0/24", "fd00:244:0:7::/64"];
        let ipam = |sets: &[&str]| {
            let ranges: Vec<Value> = sets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
            json!({"type": "host-local", "ranges": ranges}).to_string()
        };
        let only_v4 = json!({"type": "host-local"}).to_string();
        for (cidrs, pools, data, data_v6, expected) in [
            (
                &both[..],
                [Some("Always"), Some("Always")],
                true,
                true,
                ipam(&["usePodCidr", "usePodCidrIPv6"]),
            ),
            (&both, [Some("Never"), Some("Never")], true, true, ipam(&["usePodCidr", "usePodCidrIPv6"])),
            (&both, [Some("Always"), None], true, false, only_v4.clone()),
            (&both[..1], [Some("Always"), Some("Always")], true, false, only_v4),
            (&both[1..], [None, Some("Always")], false, true, ipam(&["usePodCidrIPv6"])),
        ] {
            let lease = read_both(spec(cidrs), pools, None).await.unwrap();
            let written = lease.annotations("n", None, address).unwrap();
            for (version, has) in [(v4, data), (v6, data_v6)] {
                let of = |names: tortie_api::kubernetes::OfFamilies| written[names.of(version)].clone();
                let mac = vtep_mac("n", version);
                let data = match pools {
                    [_, Some("Never")] => "null".to_owned(),
                    _ => format!(r#"{{"VNI":4096,"VtepMAC":"{mac}"}}"#),
                };
                assert_eq!(of(Node::FLANNEL_DATA), has.then_some(data), "{cidrs:?} {pools:?}");
                assert_eq!(
                    of(Node::FLANNEL_ADDRESS),
                    address(version).filter(|_| has),
                    "{cidrs:?} {pools:?}"
                );
            }
            assert_eq!(CniIpam::host_local_of(&lease.families(), true), expected.parse().unwrap());
            // A node without an IPv6 address stays reachable by IPv4.
            let lacks = lease.annotations("n", None, |version| address(version).filter(|_| version == v4));
            assert_eq!(lacks.is_ok(), data, "{lacks:?}");
            let Ok(lacks) = lacks else { continue };
            for (version, has) in [(v4, true), (v6, false)] {
                assert_eq!(lacks[Node::FLANNEL_ADDRESS.of(version)], address(version).filter(|_| has));
                assert_eq!(lacks[Node::FLANNEL_DATA.of(version)].is_some(), has);
            }
        }
        let tunnels = read_both(spec(&both), [Some("Always"), Some("Always")], None).await.unwrap();
        let expected: Vec<IpAddr> =
            ["10.244.7.0", "fd00:244:0:7::"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(tunnels.tunnel_addresses(), expected);
        let differ = read_both(spec(&both), [Some("Always"), Some("Never")], None).await.unwrap_err();
        assert!(differ.contains("IPPools flannel and flannel-v6 differ in vxlanMode"), "{differ}");
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
            assert_eq!(lease.windows_addresses(), Some(section.to_string().parse().unwrap()));
        }
    }

    #[test]
    fn only_own_annotations_are_stale() {
        let [data, data_v6] = IpVersion::ALL.map(|version| Node::FLANNEL_DATA.of(version));
        let stale = |name: &str, data: &str| {
            let current = json!({Node::FLANNEL_MANAGED: "true", name: data});
            stale_annotations("n", &current).len()
        };
        assert_eq!(stale(data, r#"{"VNI":4096,"VtepMAC":"66:d1:85:4c:ae:89"}"#), 2);
        assert_eq!(stale(data, r#"{"VNI":4096,"VtepMAC":"66:d1:85:4c:ae:88"}"#), 0);
        let of_v6 = format!(r#"{{"VNI":4096,"VtepMAC":"{}"}}"#, vtep_mac("n", IpVersion::V6));
        assert_eq!((stale(data_v6, &of_v6), stale(data, &of_v6)), (2, 0));
        assert_eq!(stale(data, "null"), 0);
        assert_eq!(stale_annotations("n", &Value::Null).len(), 0);
        // HNS has chosen the MAC address of a Windows node.
        let own = r#"{"VNI":4096,"VtepMAC":"00:15:5d:01:02:03"}"#;
        for (mac, expected) in [("00:15:5d:01:02:03", 1), ("00:15:5d:01:02:04", 0), ("", 0)] {
            let current = json!({data: own, Node::VXLAN_MAC: mac});
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
