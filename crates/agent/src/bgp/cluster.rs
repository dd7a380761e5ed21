//! The objects on which the speaker of a node depends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::{
    BgpConfiguration, BgpConfigurationSpec, BgpFilter, BgpPeer, ClusterInformation, IpPool, SecretKey,
    WorkloadEndpoint,
};
use tortie_api::ipam::Block;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind, Resource};
use tortie_bgp::calico::{
    Derived, Name, NoSecret, PodAddress, Resources, ServiceRoutes, ServiceSettings, derive,
};
use tortie_ipam::{Affinity, AffinityState};
use tortie_store::{Change, Interest, StoreError, Stored};

/// The kinds that a BGP speaker follows.
pub const KINDS: [Kind; 9] = [
    Kind::Node,
    Kind::BgpConfiguration,
    Kind::BgpPeer,
    Kind::BgpFilter,
    Kind::IpPool,
    Kind::BlockAffinity,
    Kind::IpamBlock,
    Kind::ClusterInformation,
    Kind::WorkloadEndpoint,
];

/// The kinds that it follows besides, while BGPConfiguration `default` names networks of Services.
pub const SERVICE_KINDS: [Kind; 2] = [Kind::Service, Kind::EndpointSlice];

/// What the speaker of a node must know of them.
pub(super) fn interests(node: &str) -> Vec<Interest> {
    let interest = |kind| match kind {
        Kind::WorkloadEndpoint | Kind::BlockAffinity => Interest::of_node(kind, node),
        _ => Interest::all(kind),
    };
    KINDS.into_iter().map(interest).collect()
}

/// What is known of the cluster.
#[derive(Debug)]
pub(super) struct Cluster {
    node: String,
    nodes: BTreeMap<String, Node>,
    /// The nodes whose kubelets do not report that they are ready, or report nothing any more. A datastore without kubelets has none.
    not_ready: BTreeSet<String>,
    configurations: BTreeMap<String, BgpConfiguration>,
    peers: BTreeMap<String, BgpPeer>,
    filters: BTreeMap<String, BgpFilter>,
    pools: BTreeMap<String, IpPool>,
    /// The blocks of the node, by the names of their affinities.
    blocks: BTreeMap<String, IpNet>,
    /// The blocks of all nodes, and whose they are.
    all_blocks: BTreeMap<IpNet, String>,
    /// The addresses that the node has borrowed, by the names of their blocks.
    borrowed: BTreeMap<String, BTreeSet<IpAddr>>,
    information: BTreeMap<String, ClusterInformation>,
    /// The addresses of the node's pods, by their endpoints.
    pods: BTreeMap<Key, Vec<PodAddress>>,
    services: ServiceRoutes,
    /// How often Services became necessary. What was known of them before is forgotten each time.
    times_services_began: u32,
    /// Objects that cannot be read, and why.
    unreadable: BTreeMap<Key, String>,
    /// The kinds that have not been delivered completely, and why not.
    missing: BTreeMap<Kind, Option<String>>,
}

impl Cluster {
    pub(super) fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            nodes: BTreeMap::new(),
            not_ready: BTreeSet::new(),
            configurations: BTreeMap::new(),
            peers: BTreeMap::new(),
            filters: BTreeMap::new(),
            pools: BTreeMap::new(),
            blocks: BTreeMap::new(),
            all_blocks: BTreeMap::new(),
            borrowed: BTreeMap::new(),
            information: BTreeMap::new(),
            pods: BTreeMap::new(),
            services: ServiceRoutes::new(node),
            times_services_began: 0,
            unreadable: BTreeMap::new(),
            missing: KINDS.into_iter().map(|kind| (kind, None)).collect(),
        }
    }

    /// Takes a change. Returns whether the speaker may have to change.
    pub(super) fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Put(stored) => return self.put(&stored),
            Change::Gone { key, .. } => return self.gone(&key),
            // A kind that the datastore does not have has no objects.
            Change::InSync(kind, _) | Change::Unavailable(kind, StoreError::KindAbsent(_)) => {
                drop(self.missing.remove(&kind));
            }
            Change::Unavailable(kind, error) => drop(self.missing.insert(kind, Some(error.to_string()))),
            Change::Progress(..) | Change::Restarted(_) => return false,
        }
        true
    }

    /// Takes an object. Returns whether it differs: kubelets write the status of their Nodes all the time.
    fn put(&mut self, stored: &Stored) -> bool {
        let Stored { key, value, .. } = stored;
        if key.kind == Kind::BlockAffinity {
            return self.put_affinity(stored);
        }
        if key.kind == Kind::IpamBlock {
            return self.put_block(stored);
        }
        if key.kind == Kind::Node {
            match is_ready(value) {
                true => drop(self.not_ready.remove(&key.name)),
                false => drop(self.not_ready.insert(key.name.clone())),
            }
        }
        let resource = match Resource::read(key, value) {
            Ok(resource) => resource,
            Err(problems) => {
                let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
                self.unreadable.insert(key.clone(), problems.join("; "));
                // The last readable version of other kinds stays in force. Without a filter, its peers get no routes.
                if let Kind::BgpPeer | Kind::BgpFilter = key.kind {
                    self.forget(key);
                }
                return true;
            }
        };
        let was_unreadable = self.unreadable.remove(key).is_some();
        let name = &key.name;
        let differs = match resource {
            Resource::Node(it) => replace(&mut self.nodes, name, it),
            Resource::BgpConfiguration(it) => {
                let differs = replace(&mut self.configurations, name, it);
                self.set_service_settings();
                differs
            }
            Resource::BgpPeer(it) => replace(&mut self.peers, name, it),
            Resource::BgpFilter(it) => replace(&mut self.filters, name, it),
            Resource::IpPool(it) => replace(&mut self.pools, name, it),
            Resource::ClusterInformation(it) => replace(&mut self.information, name, it),
            Resource::WorkloadEndpoint(it) => {
                let addresses = pod_addresses(&it, &self.node);
                self.pods.insert(key.clone(), addresses.clone()) != Some(addresses)
            }
            Resource::Service(it) => self.services.set_service(&full_name(key), Some(&it)),
            Resource::EndpointSlice(it) => self.services.set_slice(&full_name(key), Some(&it)),
            _ => false,
        };
        differs || was_unreadable
    }

    fn put_affinity(&mut self, Stored { key, value, .. }: &Stored) -> bool {
        let of_node = key.name.split_once('/').filter(|(node, _)| *node == self.node);
        let Some((_, cidr)) = of_node else { return false };
        let affinity = serde_json::from_value::<Affinity>(value.clone()).map_err(|error| error.to_string());
        let block = affinity.and_then(|affinity| {
            let is_own = affinity.state == AffinityState::Confirmed && !affinity.deleted;
            let cidr: IpNet = cidr.parse().map_err(|_| format!("{cidr} is no network"))?;
            Ok(is_own.then_some(cidr))
        });
        match block {
            Ok(block) => {
                self.unreadable.remove(key);
                match block {
                    Some(block) => drop(self.blocks.insert(key.name.clone(), block)),
                    None => drop(self.blocks.remove(&key.name)),
                }
            }
            Err(problem) => drop(self.unreadable.insert(key.clone(), problem)),
        }
        true
    }

    /// Takes a block of any node. Returns whether it is in no pool and new or another node's than before, or the node has borrowed other
    /// addresses of it.
    fn put_block(&mut self, Stored { key, value, .. }: &Stored) -> bool {
        let owner = value["affinity"].as_str().and_then(|affinity| affinity.strip_prefix("host:"));
        let block = key.name.parse::<IpNet>().ok().filter(|block| block.prefix_len() >= shortest(block));
        let is_changed = match (block, owner) {
            (Some(block), Some(owner)) => {
                self.all_blocks.insert(block, owner.to_owned()).as_deref() != Some(owner)
            }
            (Some(block), None) => self.all_blocks.remove(&block).is_some(),
            (None, _) => false,
        };
        let is_stray = is_changed && block.is_some_and(|block| self.is_stray(&block));
        is_stray | self.put_borrowed(key, value)
    }

    fn stray_blocks(&self) -> Vec<(IpNet, String)> {
        let stray = self.all_blocks.iter().filter(|(block, _)| self.is_stray(block));
        stray.map(|(block, owner)| (*block, owner.clone())).collect()
    }

    /// Whether no pool has the block: its pool was deleted, and its pods go on.
    fn is_stray(&self, block: &IpNet) -> bool {
        !self.pools.values().any(|pool| pool.spec.cidr.contains(block))
    }

    fn put_borrowed(&mut self, key: &Key, value: &serde_json::Value) -> bool {
        match serde_json::from_value::<Block>(value.clone()) {
            Ok(block) => {
                let was_unreadable = self.unreadable.remove(key).is_some();
                let of_other = block.node() != Some(self.node.as_str());
                let addresses = block.allocated().filter(|(_, attribute)| {
                    let node = attribute.owner.as_ref().and_then(|owner| owner.get("node"));
                    of_other && node == Some(&self.node)
                });
                let addresses: BTreeSet<IpAddr> = addresses.map(|(address, _)| address).collect();
                let before = match addresses.is_empty() {
                    true => self.borrowed.remove(&key.name),
                    false => self.borrowed.insert(key.name.clone(), addresses.clone()),
                };
                before.unwrap_or_default() != addresses || was_unreadable
            }
            Err(problem) => self.unreadable.insert(key.clone(), problem.to_string()).is_none(),
        }
    }

    /// Takes the end of an object. Returns whether the speaker may have to change.
    fn gone(&mut self, key: &Key) -> bool {
        let was_unreadable = self.unreadable.remove(key).is_some();
        self.forget(key) || was_unreadable
    }

    fn forget(&mut self, key: &Key) -> bool {
        let name = &key.name;
        match key.kind {
            Kind::Service => return self.services.set_service(&full_name(key), None),
            Kind::EndpointSlice => return self.services.set_slice(&full_name(key), None),
            Kind::Node => {
                self.nodes.remove(name);
                self.not_ready.remove(name);
            }
            Kind::BgpConfiguration => {
                self.configurations.remove(name);
                self.set_service_settings();
            }
            Kind::BgpPeer => drop(self.peers.remove(name)),
            Kind::BgpFilter => drop(self.filters.remove(name)),
            Kind::IpPool => drop(self.pools.remove(name)),
            Kind::BlockAffinity => drop(self.blocks.remove(name)),
            Kind::IpamBlock => {
                name.parse().ok().and_then(|block: IpNet| self.all_blocks.remove(&block));
                self.borrowed.remove(name);
            }
            Kind::ClusterInformation => drop(self.information.remove(name)),
            Kind::WorkloadEndpoint => drop(self.pods.remove(key)),
            _ => {}
        }
        true
    }

    /// Whether the speaker must know Services. Another number than before asks for all of them again.
    pub(super) fn follows_services(&self) -> Option<u32> {
        self.services.settings().need_services().then_some(self.times_services_began)
    }

    /// Takes the settings for Services. Services are awaited if they are needed now, and forgotten if they no longer are.
    fn set_service_settings(&mut self) {
        let followed = self.services.settings().need_services();
        self.services.set_settings(ServiceSettings::new(&self.settings()));
        match (followed, self.services.settings().need_services()) {
            (false, true) => {
                self.times_services_began += 1;
                self.missing.extend(SERVICE_KINDS.map(|kind| (kind, None)));
            }
            (true, false) => {
                self.services.clear();
                self.missing.retain(|kind, _| !SERVICE_KINDS.contains(kind));
                self.unreadable.retain(|key, _| !SERVICE_KINDS.contains(&key.kind));
            }
            (true, true) | (false, false) => {}
        }
    }

    /// Whether the speaker may be configured from what is known: everything was delivered, nobody has locked the
    /// datastore, and the settings for all nodes and for this one can be read. Of those for another node, only the port of a session
    /// counts.
    pub(super) fn is_usable(&self) -> bool {
        let is_locked =
            self.information.values().any(|information| information.spec.datastore_ready == Some(false));
        self.missing.is_empty() && !is_locked && !self.unreadable.keys().any(|key| self.is_awaited(key))
    }

    /// Whether the speaker waits until an unreadable object can be read. What was readable before counts.
    fn is_awaited(&self, key: &Key) -> bool {
        let is_own = key.name == "default" || key.name.strip_prefix("node.") == Some(self.node.as_str());
        key.kind == Kind::BgpConfiguration && is_own && !self.configurations.contains_key(&key.name)
    }

    /// What the speaker does. `secret` returns the value of a key of a Secret.
    pub(super) fn derived(&self, secret: &dyn Fn(&SecretKey) -> Result<Vec<u8>, NoSecret>) -> Derived {
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        let configurations: Vec<BgpConfiguration> = self.configurations.values().cloned().collect();
        let peers: Vec<BgpPeer> = self.peers.values().cloned().collect();
        let filters: Vec<BgpFilter> = self.filters.values().cloned().collect();
        let blocks: Vec<IpNet> = self.blocks.values().copied().collect();
        let stray_blocks = self.stray_blocks();
        // Whoever creates pods may write any address into their annotations; IPAM says which ones the node has borrowed.
        let is_borrowed = |pod: &&PodAddress| self.borrowed.values().any(|all| all.contains(&pod.address));
        let pods: Vec<PodAddress> = self.pods.values().flatten().filter(is_borrowed).cloned().collect();
        let resources = Resources {
            nodes: &nodes,
            configurations: &configurations,
            peers: &peers,
            filters: &filters,
            pools: &self.pools(),
            blocks: &blocks,
            stray_blocks: &stray_blocks,
            pods: &pods,
            service_addresses: &self.services.addresses(),
            secret,
        };
        derive(&self.node, &resources)
    }

    pub(super) fn pools(&self) -> Vec<IpPool> {
        self.pools.values().cloned().collect()
    }

    /// The blocks of other nodes that are there and ready.
    pub(super) fn blocks_of_others(&self) -> impl Iterator<Item = (&IpNet, &str)> {
        let is_other =
            |node: &str| node != self.node && self.nodes.contains_key(node) && !self.not_ready.contains(node);
        let blocks = self.all_blocks.iter().map(|(block, node)| (block, node.as_str()));
        blocks.filter(move |(_, node)| is_other(node))
    }

    /// The node with this address that is not ready.
    pub(super) fn not_ready_at(&self, address: IpAddr) -> Option<&str> {
        let not_ready = self.nodes_at(address).find(|node| self.not_ready.contains(&node.metadata.name));
        not_ready.map(|node| node.metadata.name.as_str())
    }

    /// Returns whether the address is that of a node.
    pub(super) fn is_node(&self, address: IpAddr) -> bool {
        self.nodes_at(address).next().is_some()
    }

    fn nodes_at(&self, address: IpAddr) -> impl Iterator<Item = &Node> {
        self.nodes.values().filter(move |node| {
            IpVersion::ALL.into_iter().any(|version| node.own_address(version) == Some(address))
        })
    }

    /// The settings for all nodes.
    pub(super) fn settings(&self) -> BgpConfigurationSpec {
        self.configurations.get("default").map(|it| it.spec.clone()).unwrap_or_default()
    }

    /// What cannot be read.
    pub(super) fn problems(&self) -> Vec<String> {
        let unreadable = self.unreadable.iter().map(|(key, problem)| {
            let waits = if self.is_awaited(key) { ", so the BGP speaker waits" } else { "" };
            format!("{key} cannot be read{waits}: {problem}")
        });
        let missing = self.missing.iter().filter_map(|(kind, problem)| {
            let problem = problem.as_ref()?;
            Some(format!("{} cannot be read, so the BGP speaker waits: {problem}", kind.plural()))
        });
        unreadable.chain(missing).collect()
    }
}

/// Returns whether a Node does not say that it is not ready.
fn is_ready(node: &serde_json::Value) -> bool {
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter(|one| one["type"] == "Ready").all(|one| one["status"] == "True")
}

/// The namespace and name of an object.
fn full_name(key: &Key) -> Name {
    (key.namespace.clone(), key.name.clone())
}

/// The addresses of a pod of this node.
fn pod_addresses(endpoint: &WorkloadEndpoint, node: &str) -> Vec<PodAddress> {
    let WorkloadEndpoint { spec, .. } = endpoint;
    let of_node = spec.ip_networks.iter().filter(|_| spec.node == node);
    let address = |net: &IpNet| PodAddress { address: net.addr(), interface: spec.interface_name.clone() };
    of_node.map(address).collect()
}

/// Stores a value. Returns whether it differs from the one before.
fn replace<T: PartialEq>(values: &mut BTreeMap<String, T>, name: &str, value: T) -> bool {
    if values.get(name) == Some(&value) {
        return false;
    }
    values.insert(name.to_owned(), value);
    true
}

/// The shortest prefix of a block of the family in Calico.
fn shortest(block: &IpNet) -> u8 {
    match block {
        IpNet::V4(_) => 20,
        IpNet::V6(_) => 116,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tortie_api::Position;
    use tortie_store::Version;

    use super::*;

    fn put(cluster: &mut Cluster, kind: Kind, name: &str, value: Value) -> bool {
        let key = Key::global(kind, name);
        let (version, position) = (Version::new("1"), Position::default());
        cluster.apply(Change::Put(Stored { key, value, version, position }))
    }

    #[test]
    fn pods_addresses_count_only_if_the_node_has_borrowed_them() {
        let mut cluster = Cluster::new("one");
        let endpoint = |nets: Value| {
            json!({"apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint", "metadata": {"name": "one-k8s-p-eth0", "namespace": "n"}, "spec": {"node": "one", "orchestrator": "k8s", "pod": "p",
                "endpoint": "eth0", "containerID": "c", "ipNetworks": nets, "interfaceName": "cali1", "profiles": []}})
        };
        let owner = |node: &str| json!({"handle_id": node, "secondary": {"node": node}});
        let block = json!({"cidr": "10.0.0.4/30", "affinity": "host:two", "allocations": [null, 0, 1, null],
            "unallocated": [0, 3], "attributes": [owner("one"), owner("two")]});
        let advertised = |cluster: &Cluster| {
            let derived = cluster.derived(&|_| Err(NoSecret::Unreadable("none".to_owned())));
            derived.own.keys().map(ToString::to_string).collect::<Vec<_>>()
        };
        put(
            &mut cluster,
            Kind::IpPool,
            "pool",
            json!({"metadata": {"name": "pool"}, "spec": {"cidr": "10.0.0.0/16"}}),
        );
        let address = json!({"projectcalico.org/IPv4Address": "192.0.2.1/24"});
        put(&mut cluster, Kind::Node, "one", json!({"metadata": {"name": "one", "annotations": address}}));
        // What the pod claims: an address that it has, one of another node's pod, and one of nobody.
        let nets = json!(["10.0.0.5/32", "10.0.0.6/32", "10.0.0.7/32"]);
        let key = Key::namespaced(Kind::WorkloadEndpoint, "n", "one-k8s-p-eth0");
        let (version, position) = (Version::new("1"), Position::default());
        cluster.apply(Change::Put(Stored { key, value: endpoint(nets), version, position }));
        assert_eq!(advertised(&cluster), Vec::<String>::new());
        assert!(put(&mut cluster, Kind::IpamBlock, "10.0.0.4/30", block.clone()));
        assert_eq!(advertised(&cluster), ["10.0.0.5/32"], "{cluster:?}");
        assert!(!put(&mut cluster, Kind::IpamBlock, "10.0.0.4/30", block));
    }

    fn in_sync(cluster: &mut Cluster, kinds: &[Kind]) {
        for kind in kinds {
            cluster.apply(Change::InSync(*kind, Position::default()));
        }
    }

    /// Services are awaited, and count, only while the settings name networks of Services.
    #[test]
    fn services_count_while_the_settings_name_their_networks() {
        let mut cluster = Cluster::new("one");
        in_sync(&mut cluster, &KINDS);
        let settings = |spec: Value| json!({"metadata": {"name": "default"}, "spec": spec});
        let networks = settings(json!({"serviceExternalIPs": [{"cidr": "198.51.100.0/24"}]}));
        let service = json!({"metadata": {"name": "s"}, "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.7",
            "externalIPs": ["198.51.100.7"], "externalTrafficPolicy": "Local"}});
        let slice = |node: &str| {
            json!({"metadata": {"name": "e", "labels": {"kubernetes.io/service-name": "s"}}, "addressType": "IPv4",
                "endpoints": [{"addresses": ["10.0.0.5"], "nodeName": node}]})
        };
        let addresses = |cluster: &Cluster| {
            let derived = cluster.derived(&|_| Err(NoSecret::Unreadable("none".to_owned())));
            derived.own.into_keys().filter(|net| net.prefix_len() == 32).collect::<Vec<_>>()
        };
        assert!(cluster.is_usable() && cluster.follows_services().is_none());
        assert!(put(&mut cluster, Kind::BgpConfiguration, "default", networks.clone()));
        assert_eq!(cluster.follows_services(), Some(1));
        assert!(!cluster.is_usable(), "Services are awaited");
        assert!(!put(&mut cluster, Kind::Service, "s", service.clone()), "it has no backend yet");
        assert!(put(&mut cluster, Kind::EndpointSlice, "e", slice("one")));
        assert!(!put(&mut cluster, Kind::EndpointSlice, "e", slice("one")), "nothing differs");
        in_sync(&mut cluster, &[Kind::Service]);
        assert!(!cluster.is_usable());
        in_sync(&mut cluster, &[Kind::EndpointSlice]);
        assert!(cluster.is_usable());
        assert_eq!(addresses(&cluster), ["198.51.100.7/32".parse().unwrap()]);
        let gone =
            |kind, name: &str| Change::Gone { key: Key::global(kind, name), position: Position::default() };
        assert!(put(&mut cluster, Kind::EndpointSlice, "e", slice("two")));
        assert!(!cluster.apply(gone(Kind::EndpointSlice, "e")), "its backend was elsewhere");
        assert!(put(&mut cluster, Kind::EndpointSlice, "e", slice("one")));

        // A datastore without the kind has no Services. One that does not answer is waited for.
        let denied = StoreError::Forbidden("no".to_owned());
        cluster.apply(Change::Unavailable(Kind::Service, denied));
        assert!(!cluster.is_usable() && cluster.problems()[0].starts_with("services cannot be read"));
        cluster.apply(Change::Unavailable(Kind::Service, StoreError::KindAbsent(Kind::Service)));
        assert!(cluster.is_usable());

        // Without the settings, what is known of Services is forgotten: nobody follows them.
        assert!(put(&mut cluster, Kind::BgpConfiguration, "default", settings(json!({}))));
        assert!(cluster.is_usable() && cluster.follows_services().is_none());
        put(&mut cluster, Kind::BgpConfiguration, "default", networks.clone());
        assert_eq!(cluster.follows_services(), Some(2), "they are asked for again");
        in_sync(&mut cluster, &SERVICE_KINDS);
        assert_eq!(addresses(&cluster), Vec::<IpNet>::new());
        cluster.apply(gone(Kind::BgpConfiguration, "default"));
        assert_eq!(cluster.follows_services(), None);
        // Nobody waits for Services that are awaited and no longer necessary.
        put(&mut cluster, Kind::BgpConfiguration, "default", networks);
        assert!(!cluster.is_usable());
        cluster.apply(gone(Kind::BgpConfiguration, "default"));
        assert!(cluster.is_usable());
    }

    /// Somebody stores a field of a newer Calico for one node. The others go on.
    #[test]
    fn settings_for_another_node_that_cannot_be_read_keep_no_speaker_from_running() {
        let bad = json!({"spec": {"asNumber": 64512, "fieldOfTheFuture": 1}});
        for (name, runs) in [("default", false), ("node.one", false), ("node.two", true)] {
            let mut cluster = Cluster::new("one");
            in_sync(&mut cluster, &KINDS);
            put(&mut cluster, Kind::BgpConfiguration, name, bad.clone());
            assert_eq!(cluster.is_usable(), runs, "{name}");
            let problem = &cluster.problems()[0];
            assert_eq!(problem.contains("the BGP speaker waits"), !runs, "{problem}");
        }
    }

    /// A node of the mesh may announce the blocks of a deleted pool.
    #[test]
    fn blocks_of_all_nodes_that_are_in_no_pool_are_known() {
        let mut cluster = Cluster::new("one");
        let block = |cidr: &str| json!({"cidr": cidr, "affinity": "host:two", "allocations": [], "unallocated": [], "attributes": []});
        let pool = json!({"metadata": {"name": "p"}, "spec": {"cidr": "10.1.0.0/16"}});
        put(&mut cluster, Kind::IpPool, "p", pool);
        assert!(!put(&mut cluster, Kind::IpamBlock, "10.1.0.0/26", block("10.1.0.0/26")), "the pool has it");
        assert!(put(&mut cluster, Kind::IpamBlock, "10.2.0.0/26", block("10.2.0.0/26")));
        assert!(!put(&mut cluster, Kind::IpamBlock, "10.2.0.0/26", block("10.2.0.0/26")));
        let text = |(block, owner): &(IpNet, String)| format!("{block} of {owner}");
        let stray = |cluster: &Cluster| cluster.stray_blocks().iter().map(text).collect::<Vec<_>>();
        assert_eq!(stray(&cluster), ["10.2.0.0/26 of two"]);
        assert!(!put(&mut cluster, Kind::IpamBlock, "0.0.0.0/1", block("0.0.0.0/1")), "no block is so large");
        assert!(cluster.gone(&Key::global(Kind::IpPool, "p")));
        assert_eq!(stray(&cluster), ["10.1.0.0/26 of two", "10.2.0.0/26 of two"]);
        assert!(cluster.gone(&Key::global(Kind::IpamBlock, "10.2.0.0/26")));
        assert_eq!(stray(&cluster), ["10.1.0.0/26 of two"]);
    }

    #[test]
    fn only_what_differs_is_a_reason_to_configure_the_speaker() {
        let mut cluster = Cluster::new("one");
        let node = |label: &str, phase: &str| json!({"metadata": {"name": "n", "labels": {"rack": label}}, "status": {"phase": phase}});
        for (value, expected) in
            [(node("a", "x"), true), (node("a", "x"), false), (node("a", "y"), false), (node("b", "y"), true)]
        {
            assert_eq!(put(&mut cluster, Kind::Node, "n", value.clone()), expected, "{value}");
        }
        let affinity = json!({"state": "confirmed", "deleted": "false"});
        assert!(put(&mut cluster, Kind::BlockAffinity, "one/10.0.0.0/26", affinity.clone()));
        assert!(!put(&mut cluster, Kind::BlockAffinity, "two/10.0.1.0/26", affinity));
        let peer = |number: Value| json!({"metadata": {"name": "p"}, "spec": {"peerIP": "192.0.2.9", "asNumber": number}});
        assert!(put(&mut cluster, Kind::BgpPeer, "p", peer(json!(64512))));
        assert!(
            put(&mut cluster, Kind::BgpPeer, "p", peer(json!("none"))),
            "an unreadable peer has no session"
        );
        assert!(put(&mut cluster, Kind::BgpPeer, "p", peer(json!(64512))), "it is readable again");
    }
}
