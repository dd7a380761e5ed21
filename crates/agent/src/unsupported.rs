//! Stored objects that are not in force: fields without effect, conflicting pools, and pools deleted while pods use
//! them. `tortie apply` rejects them or warns; the nodes concerned report those that somebody else stored.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tortie_api::calico::ClusterInformation;
use tortie_api::ipam::{Attribute, Block};
use tortie_api::support::{self, Pool};
use tortie_api::{FieldError, Key, Kind};
use tortie_dataplane::Reason;
use tortie_ipam::in_use;

/// A problem of an object in the datastore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unsupported {
    pub(crate) object: Key,
    pub(crate) reason: Reason,
    pub(crate) message: String,
}

/// How nodes get routes to the pods of pools without encapsulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum PlainRoutes {
    /// The network has them.
    #[default]
    OfNetwork,
    /// A BGP speaker learns them.
    Bgp,
    /// They lead to the nodes themselves, which are in one network.
    Direct,
}

/// The objects that may be in force only in part.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    node: String,
    /// The fields without effect, by object.
    fields: BTreeMap<Key, Vec<FieldError>>,
    pools: BTreeMap<String, Pool>,
    /// `ipipEnabled` of the FelixConfigurations that count for this node.
    ipip_enabled: BTreeMap<String, bool>,
    /// The networks of nodes.
    nodes: BTreeMap<String, Vec<IpNet>>,
    /// The Windows nodes.
    windows: BTreeSet<String>,
    /// This node's blocks with addresses in use.
    blocks: BTreeMap<Key, IpNet>,
    /// The blocks of this node, if it is a Windows node, with the number of addresses that pods can have.
    of_windows: BTreeMap<IpNet, usize>,
    /// How many pods this node may have.
    most_pods: Option<usize>,
    /// How many blocks this node may have.
    most_blocks: usize,
    /// How pools without encapsulation get routes.
    plain_routes: PlainRoutes,
    flannel: bool,
    /// Whether flannel's leases are in etcd.
    leases: bool,
    /// Whether another CNI plugin connects the pods.
    policy_only: bool,
    /// Somebody has locked the datastore.
    is_locked: bool,
    /// The version of Calico that used the datastore last, if it is unknown.
    unknown_version: Option<String>,
}

/// What a locked datastore means, and the remedy.
pub(crate) const LOCKED: &str = "datastoreReady is false, so the datastore is locked, as during a migration to another one: the \
     node keeps what is in force, applies no changes, and adds and removes no pods. If nobody migrates it, run \
     tortie datastore unlock";

impl Watched {
    pub(crate) fn new(node: &str) -> Self {
        Self { node: node.to_owned(), most_blocks: 1, ..Self::default() }
    }

    /// The node may have this many blocks, but not more than the default of IPAM.
    pub(crate) fn with_most_blocks(self, most_blocks: u32) -> Self {
        let most_blocks = usize::try_from(most_blocks.min(tortie_ipam::DEFAULT_MAX_BLOCKS)).unwrap_or(1);
        Self { most_blocks, ..self }
    }

    /// By these routes, packets of pools without encapsulation pass between nodes.
    pub(crate) fn with_plain_routes(self, plain_routes: PlainRoutes) -> Self {
        Self { plain_routes, ..self }
    }

    /// Whether nodes announce the networks of their pods by flannel's annotations. Its backend host-gw needs direct routes.
    pub(crate) fn with_flannel(self, flannel: bool) -> Self {
        let plain_routes = if flannel { PlainRoutes::Direct } else { self.plain_routes };
        Self { flannel, plain_routes, ..self }
    }

    /// flannel's leases are in etcd.
    pub(crate) fn with_leases(self, leases: bool) -> Self {
        Self { leases, ..self }
    }

    /// Another CNI plugin connects the pods.
    pub(crate) fn with_policy_only(self, policy_only: bool) -> Self {
        Self { policy_only, ..self }
    }

    pub(crate) fn has_policy_only(&self) -> bool {
        self.policy_only
    }

    pub(crate) fn has_flannel(&self) -> bool {
        self.flannel
    }

    pub(crate) fn has_leases(&self) -> bool {
        self.leases
    }

    /// Whether pools without encapsulation get direct routes.
    pub(crate) fn has_direct_routes(&self) -> bool {
        self.plain_routes == PlainRoutes::Direct
    }

    /// The name of the node.
    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    /// Ingests an object; `None` means deleted.
    pub(crate) fn update(&mut self, key: &Key, value: Option<&Value>) {
        match key.kind {
            Kind::FelixConfiguration | Kind::IpPool => {
                // Another node reports its own object.
                let other = key.name.strip_prefix("node.").is_some_and(|node| node != self.node);
                let mut wrong =
                    value.filter(|_| !other).map_or_else(Vec::new, |value| support::not_in_force(key, value));
                if key.kind == Kind::IpPool && self.plain_routes == PlainRoutes::OfNetwork {
                    wrong.extend(value.and_then(support::without_encapsulation));
                }
                set(&mut self.fields, key.clone(), Some(wrong).filter(|wrong| !wrong.is_empty()));
                if key.kind == Kind::FelixConfiguration {
                    let enabled =
                        value.filter(|_| !other).and_then(|value| value["spec"]["ipipEnabled"].as_bool());
                    set(&mut self.ipip_enabled, key.name.clone(), enabled);
                }
                if key.kind == Kind::IpPool {
                    let pool = value.and_then(|value| Pool::of(key, value));
                    set(&mut self.pools, key.name.clone(), pool);
                }
            }
            // Agents do not read all pods. A pod with such an annotation is not connected; CNI ADD says why.
            Kind::Namespace => {
                let wrong = value.and_then(|value| support::unsupported_annotation(Kind::Namespace, value));
                set(&mut self.fields, key.clone(), wrong.map(|wrong| vec![wrong]));
            }
            Kind::Node => {
                let networks = value.map(support::node_networks).filter(|networks| !networks.is_empty());
                set(&mut self.nodes, key.name.clone(), networks);
                match value.is_some_and(support::is_windows) {
                    true => drop(self.windows.insert(key.name.clone())),
                    false => drop(self.windows.remove(&key.name)),
                }
                if key.name == self.node {
                    self.most_pods = value.and_then(most_pods);
                }
            }
            Kind::ClusterInformation if key.name == ClusterInformation::NAME => {
                self.is_locked = value.is_some_and(ClusterInformation::is_locked);
                self.unknown_version =
                    value.and_then(ClusterInformation::unknown_version).map(ToOwned::to_owned);
            }
            Kind::IpamBlock => {
                let net = value.and_then(|value| used_block(&self.node, value));
                set(&mut self.blocks, key.clone(), net);
                if let Ok(cidr) = key.name.parse() {
                    let room = value.and_then(|value| room_of_windows(&self.node, value));
                    set(&mut self.of_windows, cidr, room);
                }
            }
            _ => {}
        }
    }

    /// Everything to report.
    pub(crate) fn all(&self) -> Vec<Unsupported> {
        let fields = self.fields.iter().flat_map(|(key, wrong)| {
            wrong.iter().map(|error| Unsupported {
                object: key.clone(),
                reason: Reason::FieldNotSupported,
                message: error.to_string(),
            })
        });
        let others = self.conflicts().chain(self.without_pool()).chain(self.terminating());
        let others = others
            .chain(self.small_blocks())
            .chain(self.pools_without_effect())
            .chain(self.ipip_beside_windows())
            .chain(self.ipip_disabled());
        fields.chain(others).chain(self.version()).collect()
    }

    /// Why nothing of the datastore may be applied now.
    pub(crate) fn lock(&self) -> Option<Unsupported> {
        let object = Key::global(Kind::ClusterInformation, ClusterInformation::NAME);
        self.is_locked.then(|| Unsupported {
            object,
            reason: Reason::DatastoreLocked,
            message: LOCKED.to_owned(),
        })
    }

    fn version(&self) -> Option<Unsupported> {
        let version = self.unknown_version.as_ref()?;
        let message = format!(
            "Calico {version} used this datastore, and Tortie knows v3.30 to v3.32: it may misread objects of other \
             versions. Bring Calico and its CustomResourceDefinitions to one of these versions. If Calico is gone and its \
             objects have been converted, remove calicoVersion from the object"
        );
        let object = Key::global(Kind::ClusterInformation, ClusterInformation::NAME);
        Some(Unsupported { object, reason: Reason::CalicoVersionUnknown, message })
    }

    /// With another CNI plugin, no pod of this node has an address of an IPPool.
    fn pools_without_effect(&self) -> impl Iterator<Item = Unsupported> {
        let pools = self.pools.keys().filter(|_| self.policy_only);
        pools.map(|name| Unsupported {
            object: Key::global(Kind::IpPool, name),
            reason: Reason::FieldNotSupported,
            message: "it has no effect on this node, whose agent runs with --policy-only: another CNI plugin gives the pods their \
                      addresses. Delete the pool if no node uses it"
                .to_owned(),
        })
    }

    fn ipip_beside_windows(&self) -> impl Iterator<Item = Unsupported> {
        self.pools.values().filter_map(|pool| {
            let message = support::ipip_beside_windows(pool, self.windows.iter().map(String::as_str))?;
            let object = Key::global(Kind::IpPool, &pool.name);
            Some(Unsupported {
                object,
                reason: Reason::RouteRefused,
                message: format!("spec.ipipMode: {message}"),
            })
        })
    }

    /// Packets of these pods have no way between nodes.
    fn ipip_disabled(&self) -> impl Iterator<Item = Unsupported> {
        let own = format!("node.{}", self.node);
        let by = [own.as_str(), "default"].into_iter().find(|name| self.ipip_enabled.contains_key(*name));
        // Another plugin knows no pools.
        let by = by.filter(|_| !self.policy_only);
        let by = by.filter(|name| self.ipip_enabled.get(*name) == Some(&false)).map(str::to_owned);
        let pools = by.into_iter().flat_map(|by| {
            self.pools.values().filter(|pool| pool.has_ipip).map(move |pool| (by.clone(), pool))
        });
        pools.map(|(by, pool)| Unsupported {
            object: Key::global(Kind::IpPool, &pool.name),
            reason: Reason::NetworkPartNotInForce,
            message: format!(
                "spec.ipipMode: FelixConfiguration {by} has ipipEnabled false, so this node has no IPIP, and packets of this pool that need it have no \
                 way to or from other nodes; remove that setting, or use another mode (tortie pool migrate moves the pods of a pool in use)"
            ),
        })
    }

    fn conflicts(&self) -> impl Iterator<Item = Unsupported> {
        self.pools.values().filter_map(|pool| {
            let nodes =
                self.nodes.iter().flat_map(|(name, nets)| nets.iter().map(|net| (name.as_str(), *net)));
            let problem = support::conflicts(pool, self.pools.values())
                .or_else(|| support::overlapping_nodes(pool, nodes))?;
            let message = format!("{problem}; choose another cidr");
            let object = Key::global(Kind::IpPool, &pool.name);
            Some(Unsupported { object, reason: Reason::PoolConflict, message })
        })
    }

    /// A Windows node does not borrow addresses, so the pods that are too many do not start.
    fn small_blocks(&self) -> impl Iterator<Item = Unsupported> {
        [false, true].into_iter().filter_map(|of_ipv6| self.small_blocks_of(of_ipv6))
    }

    fn small_blocks_of(&self, of_ipv6: bool) -> Option<Unsupported> {
        let most_pods = self.most_pods?;
        let own = self.of_windows.iter().filter(|(block, _)| block.addr().is_ipv6() == of_ipv6);
        let own: Vec<(&IpNet, &usize)> = own.collect();
        let (first, of_each) = own.first()?;
        let more = self.most_blocks.saturating_sub(own.len());
        let room = own.iter().map(|(_, room)| *room).sum::<usize>() + more * *of_each;
        if room >= most_pods {
            return None;
        }
        // With the four addresses that Windows needs.
        let bits = (most_pods + 4).next_power_of_two().trailing_zeros();
        let blocks: Vec<String> = own.iter().map(|(block, _)| block.to_string()).collect();
        let message = format!(
            "{} of {} pods can have an address: the node has {} and can have {more} more blocks, and Windows needs four \
             addresses of each. Let it have fewer pods (maxPods of its kubelet), or larger blocks (blockSize {} of the IPPool)",
            room,
            most_pods,
            blocks.join(", "),
            u32::from(first.max_prefix_len()).saturating_sub(bits),
        );
        let object = Key::global(Kind::Node, &self.node);
        Some(Unsupported { object, reason: Reason::BlocksTooSmall, message })
    }

    fn without_pool(&self) -> impl Iterator<Item = Unsupported> {
        let in_a_pool = |block: &IpNet| self.pools.values().any(|pool| pool.cidr.contains(block));
        let lost = self.blocks.iter().filter(move |(_, block)| !in_a_pool(block));
        lost.map(|(key, block)| Unsupported {
            object: key.clone(),
            reason: Reason::PoolMissing,
            message: format!(
                "pods of this node have addresses of {block}, which no IPPool has any more: other nodes may not reach them. \
                 Store the pool as it was; `tortie pool migrate` moves the pods to another one"
            ),
        })
    }

    fn terminating(&self) -> impl Iterator<Item = Unsupported> {
        self.pools.values().filter(|pool| pool.is_terminating).filter_map(|pool| {
            let block = self.blocks.values().find(|block| pool.cidr.contains(*block))?;
            Some(Unsupported {
                object: Key::global(Kind::IpPool, &pool.name),
                reason: Reason::PoolTerminating,
                message: format!(
                    "it was deleted, and stays until none of its addresses is in use; this node uses addresses of {block}. It gives no new \
                     ones. `tortie pool migrate {} NEW` moves pods, tunnels and Services to another pool",
                    pool.name
                ),
            })
        })
    }
}

/// How many pods a node may have.
fn most_pods(node: &Value) -> Option<usize> {
    let status = &node["status"];
    [&status["allocatable"]["pods"], &status["capacity"]["pods"]].into_iter().find_map(|pods| match pods {
        Value::String(text) => text.parse().ok(),
        other => usize::try_from(other.as_u64()?).ok(),
    })
}

/// How many pods can have addresses of a block of this node, if Windows has reserved some of them.
fn room_of_windows(node: &str, value: &Value) -> Option<usize> {
    // Blocks of other nodes change often.
    if value["affinity"].as_str()?.strip_prefix("host:")? != node {
        return None;
    }
    let block = Block::deserialize(value).ok()?;
    let reserved = block.allocations.iter().flatten();
    let reserved = reserved.filter(|index| block.attributes.get(**index).is_some_and(Attribute::is_windows));
    let reserved = reserved.count();
    (reserved > 0).then(|| block.allocations.len().saturating_sub(reserved))
}

fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => drop(map.insert(key, value)),
        None => drop(map.remove(&key)),
    }
}

/// The network of a block of this node with addresses in use.
fn used_block(node: &str, value: &Value) -> Option<IpNet> {
    let is_ours = value["affinity"].as_str() == Some(&format!("host:{node}"));
    let cidr: IpNet = value["cidr"].as_str()?.parse().ok()?;
    (is_ours && in_use(&cidr, [value]).is_some()).then_some(cidr)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reasons(watched: &Watched) -> Vec<(String, Reason)> {
        watched.all().into_iter().map(|it| (it.object.to_string(), it.reason)).collect()
    }

    fn pool(watched: &mut Watched, name: &str, cidr: Option<&str>) {
        let value = cidr
            .map(|cidr| json!({"metadata": {"name": name}, "spec": {"cidr": cidr, "vxlanMode": "Always"}}));
        watched.update(&Key::global(Kind::IpPool, name), value.as_ref());
    }

    #[test]
    fn settings_apply_to_their_own_nodes() {
        let spec = json!({"spec": {"bpfEnabled": true}});
        for (name, expected) in [("default", 1), ("node.one", 1), ("node.two", 0), ("other", 2)] {
            let mut watched = Watched::new("one");
            let key = Key::global(Kind::FelixConfiguration, name);
            watched.update(&key, Some(&spec));
            assert_eq!(watched.all().len(), expected, "{name}: {:?}", watched.all());
            watched.update(&key, None);
            assert_eq!(watched.all(), []);
        }
    }

    #[test]
    fn a_pool_without_encapsulation_is_reported_by_agents_without_routes_for_it() {
        let key = Key::global(Kind::IpPool, "p");
        use PlainRoutes::*;
        for (runs_bgp, mode, expected) in
            [(OfNetwork, "Never", 1), (Bgp, "Never", 0), (Direct, "Never", 0), (OfNetwork, "Always", 0)]
        {
            let mut watched = Watched::new("one").with_plain_routes(runs_bgp);
            let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.0.0.0/16", "vxlanMode": mode}});
            watched.update(&key, Some(&pool));
            let all = watched.all();
            assert_eq!(all.len(), expected, "{runs_bgp:?} {mode}: {all:?}");
        }
    }

    #[test]
    fn a_pool_with_ipip_is_reported_while_a_node_runs_windows() {
        let mut watched = Watched::new("one");
        let pool = Key::global(Kind::IpPool, "p");
        watched.update(&pool, Some(&json!({"spec": {"cidr": "10.0.0.0/16", "ipipMode": "CrossSubnet"}})));
        assert_eq!(watched.all(), []);
        let node = Key::global(Kind::Node, "w");
        let value = json!({"metadata": {"labels": {"kubernetes.io/os": "windows"}}});
        watched.update(&node, Some(&value));
        let all = watched.all();
        assert_eq!(reasons(&watched), [("IPPool p".to_owned(), Reason::RouteRefused)]);
        assert!(all[0].message.starts_with("spec.ipipMode: node w runs Windows"), "{all:?}");
        watched.update(&node, None);
        assert_eq!(watched.all(), []);
    }

    #[test]
    fn a_pool_with_ipip_is_reported_while_the_node_has_none() {
        let mut watched = Watched::new("one");
        let felix = |name: &str| Key::global(Kind::FelixConfiguration, name);
        let enabled = |enabled: bool| json!({"spec": {"ipipEnabled": enabled}});
        watched.update(&felix("default"), Some(&enabled(false)));
        let vxlan = json!({"spec": {"cidr": "10.1.0.0/16", "vxlanMode": "Always"}});
        watched.update(&Key::global(Kind::IpPool, "v"), Some(&vxlan));
        assert_eq!(watched.all(), [], "no pool asks for it");
        let pool = Key::global(Kind::IpPool, "p");
        watched.update(&pool, Some(&json!({"spec": {"cidr": "10.0.0.0/16", "ipipMode": "Always"}})));
        let all = watched.all();
        assert_eq!(reasons(&watched), [("IPPool p".to_owned(), Reason::NetworkPartNotInForce)]);
        assert!(all[0].message.contains("FelixConfiguration default has ipipEnabled false"), "{all:?}");
        for (name, value, count) in [
            ("node.other", Some(enabled(true)), 1),
            ("node.one", Some(enabled(true)), 0),
            ("node.one", Some(enabled(false)), 1),
            ("default", Some(enabled(true)), 1),
            ("node.one", None, 0),
        ] {
            watched.update(&felix(name), value.as_ref());
            assert_eq!(watched.all().len(), count, "{name} {value:?}");
        }
    }

    #[test]
    fn locks_and_unknown_versions_are_reported() {
        let mut watched = Watched::new("one");
        let key = Key::global(Kind::ClusterInformation, "default");
        let other = Key::global(Kind::ClusterInformation, "other");
        let both = json!({"spec": {"datastoreReady": false, "calicoVersion": "v3.29.1"}});
        watched.update(&other, Some(&both));
        assert!(watched.lock().is_none() && watched.all().is_empty(), "only the object default is read");
        watched.update(&key, Some(&both));
        assert_eq!(watched.lock().unwrap().reason, Reason::DatastoreLocked);
        assert_eq!(reasons(&watched), [(key.to_string(), Reason::CalicoVersionUnknown)]);
        let fine = json!({"spec": {"datastoreReady": true, "calicoVersion": "v3.32.0"}});
        watched.update(&key, Some(&fine));
        assert!(watched.lock().is_none() && watched.all().is_empty());
        watched.update(&key, Some(&both));
        watched.update(&key, None);
        assert!(watched.lock().is_none() && watched.all().is_empty());
    }

    #[test]
    fn annotations_of_namespaces_without_effect_are_reported() {
        let key = &Key::global(Kind::Namespace, "n");
        for (annotation, expected) in [
            ("cni.projectcalico.org/hwAddr", 1),
            ("cni.projectcalico.org/ipv4pools", 0),
            ("cni.projectcalico.org/ipv6pools", 0),
            ("example.org/pools", 0),
            ("cni.projectcalico.org/podIP", 0),
        ] {
            let value = json!({"metadata": {"annotations": {(annotation): "[]"}}});
            let mut watched = Watched::new("one");
            watched.update(key, Some(&value));
            let all = watched.all();
            assert_eq!(all.len(), expected, "{value}: {all:?}");
            for found in all {
                assert_eq!((found.object, found.reason), (key.clone(), Reason::FieldNotSupported));
                assert!(found.message.contains("metadata.annotations.cni.projectcalico.org/hwAddr"));
            }
            watched.update(key, None);
            assert_eq!(watched.all(), []);
        }
    }

    #[test]
    fn a_windows_node_with_more_pods_than_addresses_is_reported() {
        let block = |cidr: &str, node: &str, windows: bool| {
            let block = Block::new(cidr.parse().unwrap(), node, windows, 1, String::new());
            (Key::global(Kind::IpamBlock, cidr), serde_json::to_value(block).unwrap())
        };
        let node = |status: Value| json!({"metadata": {"name": "one"}, "status": status});
        for (blocks, status, expected) in [
            (
                vec![block("10.0.0.0/26", "one", true)],
                json!({"capacity": {"pods": "61"}}),
                Some("60 of 61 pods"),
            ),
            (vec![block("10.0.0.0/26", "one", true)], json!({"capacity": {"pods": "60"}}), None),
            (
                vec![block("10.0.0.0/26", "one", true)],
                json!({"capacity": {"pods": 110}}),
                Some("blockSize 25"),
            ),
            (vec![block("10.0.0.0/26", "one", true)], json!({}), None),
            (vec![block("10.0.0.0/26", "two", true)], json!({"capacity": {"pods": "110"}}), None),
            (vec![block("10.0.0.0/26", "one", false)], json!({"capacity": {"pods": "110"}}), None),
            (
                vec![block("10.0.0.0/26", "one", true), block("10.0.0.64/26", "one", true)],
                json!({"allocatable": {"pods": "120"}, "capacity": {"pods": "130"}}),
                None,
            ),
            (vec![], json!({"capacity": {"pods": "110"}}), None),
        ] {
            let mut watched = Watched::new("one");
            let blocks = blocks.into_iter().chain([(Key::global(Kind::Node, "one"), node(status.clone()))]);
            pool(&mut watched, "a", Some("10.0.0.0/16"));
            for (key, value) in blocks {
                watched.update(&key, Some(&value));
            }
            let found: Vec<Unsupported> = watched.all();
            assert_eq!(found.len(), usize::from(expected.is_some()), "{status}: {found:?}");
            if let (Some(found), Some(expected)) = (found.first(), expected) {
                assert_eq!(found.reason, Reason::BlocksTooSmall);
                assert!(found.message.contains(expected), "{}", found.message);
            }
        }
    }

    #[test]
    fn conflicting_and_deleted_pools_are_reported() {
        let mut watched = Watched::new("one");
        let addresses = json!({"projectcalico.org/IPv4Address": "192.0.2.11/24", "projectcalico.org/IPv6Address": "fd00:10::11/64"});
        let node = json!({"metadata": {"name": "one", "annotations": addresses}});
        watched.update(&Key::global(Kind::Node, "one"), Some(&node));
        pool(&mut watched, "a", Some("10.0.0.0/16"));
        assert_eq!(reasons(&watched), []);
        pool(&mut watched, "b", Some("10.0.128.0/17"));
        let both = ["IPPool a", "IPPool b"].map(|name| (name.to_owned(), Reason::PoolConflict));
        assert_eq!(reasons(&watched), both);
        for of_nodes in ["192.0.0.0/16", "fd00:10::/56"] {
            pool(&mut watched, "b", Some(of_nodes));
            assert_eq!(reasons(&watched), [("IPPool b".to_owned(), Reason::PoolConflict)], "{of_nodes}");
        }
        pool(&mut watched, "b", None);

        let block = Key::global(Kind::IpamBlock, "10-0-0-0-26");
        let value = |node: &str, used: Value| json!({"cidr": "10.0.0.0/26", "affinity": format!("host:{node}"), "allocations": [used, null]});
        for (value, expected) in
            [(value("one", json!(0)), 1), (value("one", Value::Null), 0), (value("two", json!(0)), 0)]
        {
            pool(&mut watched, "a", None);
            watched.update(&block, Some(&value));
            assert_eq!(reasons(&watched).len(), expected, "{value}");
            pool(&mut watched, "a", Some("10.0.0.0/16"));
            assert_eq!(reasons(&watched), [], "{value}");
            // It stays while its addresses are in use.
            let metadata = json!({"name": "a", "deletionTimestamp": "2026-11-27T00:00:00Z"});
            let deleted =
                json!({"metadata": metadata, "spec": {"cidr": "10.0.0.0/16", "vxlanMode": "Always"}});
            watched.update(&Key::global(Kind::IpPool, "a"), Some(&deleted));
            let terminating = vec![("IPPool a".to_owned(), Reason::PoolTerminating); expected];
            assert_eq!(reasons(&watched), terminating, "{value}");
        }
        // What Windows reserves is no address of a pod.
        let reserved = json!({"cidr": "10.0.0.0/26", "affinity": "host:one", "allocations": [0, null],
            "attributes": [{"handle_id": "windows-reserved-ipam-handle"}]});
        watched.update(&block, Some(&reserved));
        pool(&mut watched, "a", None);
        assert_eq!(reasons(&watched), []);
    }
}
