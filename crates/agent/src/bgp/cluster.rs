//! The objects on which the speaker of a node depends.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tortie_api::calico::{
    BgpConfiguration, BgpConfigurationSpec, BgpFilter, BgpPeer, ClusterInformation, IpPool,
};
use tortie_api::kubernetes::Node;
use tortie_api::{Key, Kind, Resource};
use tortie_bgp::calico::{Derived, Resources, derive};
use tortie_ipam::{Affinity, AffinityState};
use tortie_store::{Change, StoreError, Stored};

/// The kinds that a BGP speaker follows.
pub const KINDS: [Kind; 7] = [
    Kind::Node,
    Kind::BgpConfiguration,
    Kind::BgpPeer,
    Kind::BgpFilter,
    Kind::IpPool,
    Kind::BlockAffinity,
    Kind::ClusterInformation,
];

/// What is known of the cluster.
#[derive(Debug)]
pub(super) struct Cluster {
    node: String,
    nodes: BTreeMap<String, Node>,
    configurations: BTreeMap<String, BgpConfiguration>,
    peers: BTreeMap<String, BgpPeer>,
    filters: BTreeMap<String, BgpFilter>,
    pools: BTreeMap<String, IpPool>,
    /// The blocks of the node, by the names of their affinities.
    blocks: BTreeMap<String, IpNet>,
    information: BTreeMap<String, ClusterInformation>,
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
            configurations: BTreeMap::new(),
            peers: BTreeMap::new(),
            filters: BTreeMap::new(),
            pools: BTreeMap::new(),
            blocks: BTreeMap::new(),
            information: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            missing: KINDS.into_iter().map(|kind| (kind, None)).collect(),
        }
    }

    /// Takes a change. Returns whether the speaker may have to change.
    pub(super) fn apply(&mut self, change: Change) -> bool {
        match change {
            Change::Put(stored) => self.put(&stored),
            Change::Gone { key, .. } => self.gone(&key),
            // A kind that the datastore does not have has no objects.
            Change::InSync(kind, _) | Change::Unavailable(kind, StoreError::KindAbsent(_)) => {
                drop(self.missing.remove(&kind));
            }
            Change::Unavailable(kind, error) => drop(self.missing.insert(kind, Some(error.to_string()))),
            Change::Progress(..) | Change::Restarted(_) => return false,
        }
        true
    }

    fn put(&mut self, stored: &Stored) {
        let Stored { key, value, .. } = stored;
        if key.kind == Kind::BlockAffinity {
            return self.put_affinity(stored);
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
                return;
            }
        };
        self.unreadable.remove(key);
        let name = key.name.clone();
        match resource {
            Resource::Node(node) => drop(self.nodes.insert(name, node)),
            Resource::BgpConfiguration(it) => drop(self.configurations.insert(name, it)),
            Resource::BgpPeer(peer) => drop(self.peers.insert(name, peer)),
            Resource::BgpFilter(filter) => drop(self.filters.insert(name, filter)),
            Resource::IpPool(pool) => drop(self.pools.insert(name, pool)),
            Resource::ClusterInformation(it) => drop(self.information.insert(name, it)),
            _ => {}
        }
    }

    fn put_affinity(&mut self, Stored { key, value, .. }: &Stored) {
        let of_node = key.name.split_once('/').filter(|(node, _)| *node == self.node);
        let Some((_, cidr)) = of_node else { return };
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
    }

    fn gone(&mut self, key: &Key) {
        self.unreadable.remove(key);
        self.forget(key);
    }

    fn forget(&mut self, key: &Key) {
        let name = &key.name;
        match key.kind {
            Kind::Node => drop(self.nodes.remove(name)),
            Kind::BgpConfiguration => drop(self.configurations.remove(name)),
            Kind::BgpPeer => drop(self.peers.remove(name)),
            Kind::BgpFilter => drop(self.filters.remove(name)),
            Kind::IpPool => drop(self.pools.remove(name)),
            Kind::BlockAffinity => drop(self.blocks.remove(name)),
            Kind::ClusterInformation => drop(self.information.remove(name)),
            _ => {}
        }
    }

    /// Whether the speaker may be configured from what is known: everything was delivered, nobody has locked the
    /// datastore, and the settings for all nodes can be read.
    pub(super) fn is_usable(&self) -> bool {
        let is_locked =
            self.information.values().any(|information| information.spec.datastore_ready == Some(false));
        let is_unknown =
            |key: &Key| key.kind == Kind::BgpConfiguration && !self.configurations.contains_key(&key.name);
        self.missing.is_empty() && !is_locked && !self.unreadable.keys().any(is_unknown)
    }

    /// What the speaker does.
    pub(super) fn derived(&self) -> Derived {
        let nodes: Vec<Node> = self.nodes.values().cloned().collect();
        let configurations: Vec<BgpConfiguration> = self.configurations.values().cloned().collect();
        let peers: Vec<BgpPeer> = self.peers.values().cloned().collect();
        let filters: Vec<BgpFilter> = self.filters.values().cloned().collect();
        let blocks: Vec<IpNet> = self.blocks.values().copied().collect();
        let resources = Resources {
            nodes: &nodes,
            configurations: &configurations,
            peers: &peers,
            filters: &filters,
            pools: &self.pools(),
            blocks: &blocks,
            // Agents may not read secrets yet, and a peer whose password is unknown gets no session.
            secret: &|_, _| None,
        };
        derive(&self.node, &resources)
    }

    pub(super) fn pools(&self) -> Vec<IpPool> {
        self.pools.values().cloned().collect()
    }

    /// The settings for all nodes.
    pub(super) fn settings(&self) -> BgpConfigurationSpec {
        self.configurations.get("default").map(|it| it.spec.clone()).unwrap_or_default()
    }

    /// What cannot be read.
    pub(super) fn problems(&self) -> Vec<String> {
        let unreadable =
            self.unreadable.iter().map(|(key, problem)| format!("{key} cannot be read: {problem}"));
        let missing = self.missing.iter().filter_map(|(kind, problem)| {
            let problem = problem.as_ref()?;
            Some(format!("{} cannot be read, so the BGP speaker waits: {problem}", kind.plural()))
        });
        unreadable.chain(missing).collect()
    }
}
