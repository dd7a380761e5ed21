//! A cluster in memory, with players for whatever else runs there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use ipnet::IpNet;
use jiff::Timestamp;
use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_controllers::{MIGRATION, MigrationRequest, MigrationStep, PoolMigration, WhichPods, pool_like};
use tortie_ipam::{Ipam, Request, Snapshot, Use, service_handle, service_owner};
use tortie_store::{Embedded, Eviction, Evictions, Permission, Store, StoreError, Stored, Version};

use crate::common::{Disturbed, memory, put};

pub(super) const OLD: &str = "10.1.0.0/24";
pub(super) const NEW: &str = "10.2.0.0/23";
/// A pool that has nothing to do with it.
const THIRD: &str = "10.3.0.0/24";
pub(super) const TUNNEL: &str = "projectcalico.org/IPv4VXLANTunnelAddr";

pub(super) fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// Numbers that look random (xorshift).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    /// True once in so many times.
    pub(super) fn one_of(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

/// Marks pods as ending, unless their budget refuses it.
struct Budgets {
    store: Arc<Disturbed>,
    refusals: Arc<Mutex<BTreeMap<String, usize>>>,
    forbidden: Option<Permission>,
}

#[async_trait]
impl Evictions for Budgets {
    async fn evict(&self, pod: &Key, uid: &str) -> Result<Eviction, StoreError> {
        let left = self.refusals.lock().unwrap().get_mut(&pod.name).map(|left| {
            *left = left.saturating_sub(1);
            *left
        });
        if left.is_some_and(|left| left > 0) {
            return Ok(Eviction::Refused("the budget has no room".to_owned()));
        }
        let Some(stored) = self.store.get(pod).await? else { return Ok(Eviction::Begun) };
        let mut value = stored.value;
        assert!(
            value["spec"]["hostNetwork"] != true && pod.name.starts_with("old"),
            "{pod} has nothing to do with it"
        );
        if value["metadata"]["uid"] == uid {
            value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            self.store.update(pod, value, &stored.version).await?;
        }
        Ok(Eviction::Begun)
    }

    async fn missing_permissions(&self, needed: &[Permission]) -> Result<Vec<Permission>, StoreError> {
        Ok(needed.iter().filter(|needed| self.forbidden == Some(**needed)).copied().collect())
    }
}

pub(super) struct World {
    pub(super) inner: Arc<Embedded>,
    /// Nodes that somebody had cordoned before.
    pub(super) closed: BTreeSet<String>,
    /// Whether everybody does their work at once.
    is_calm: bool,
    /// Pods that never end.
    stuck: BTreeSet<String>,
    refusals: Arc<Mutex<BTreeMap<String, usize>>>,
    /// A permission that the migration does not have.
    pub(super) forbidden: Option<Permission>,
    serial: usize,
    /// How many pods have got an address of the closed pool.
    late: usize,
    /// The Nodes as their agents have seen them last.
    seen: BTreeMap<String, Version>,
}

impl World {
    /// A cluster with up to four nodes, pods, a Service, blocks without addresses.
    pub(super) async fn new(random: &mut Random) -> Self {
        let count = 1 + random.below(4);
        let closed: Vec<usize> = (0..count).filter(|_| random.one_of(4)).collect();
        let mut world = match random.one_of(4) {
            true => return Self::of_services(random, count, &closed).await,
            false => Self::with(random, count, &closed).await,
        };
        for node in world.nodes().await {
            for _ in 0..random.below(5) {
                let name = world.name("old");
                world.add_pod(&node, &name, OLD, true).await;
                if random.one_of(3) {
                    world.refusals.lock().unwrap().insert(name, 1 + random.below(4));
                }
            }
            let other = world.name("other");
            world.add_pod(&node, &other, THIRD, true).await;
            let host = world.name("host");
            let spec = json!({"nodeName": node, "hostNetwork": true});
            let pod = json!({"metadata": {"name": host, "namespace": "n"}, "spec": spec, "status": {"podIP": "10.1.0.77"}});
            put(&*world.inner, &pod_key(&host), pod).await;
        }
        world
    }

    pub(super) async fn with(random: &mut Random, nodes: usize, closed: &[usize]) -> Self {
        let inner = memory();
        for (name, cidr) in [("old", OLD), ("third", THIRD)] {
            let spec = json!({"cidr": cidr, "blockSize": 29, "vxlanMode": "Always"});
            put(&*inner, &Key::global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec}))
                .await;
        }
        put(&*inner, &Key::global(Kind::Namespace, "n"), json!({"metadata": {"name": "n"}})).await;
        let mut world = Self {
            inner,
            closed: BTreeSet::new(),
            is_calm: false,
            stuck: BTreeSet::new(),
            refusals: Arc::default(),
            forbidden: None,
            serial: 0,
            late: 0,
            seen: BTreeMap::new(),
        };
        world.closed = world.add_nodes(nodes, closed).await;
        for name in world.nodes().await {
            if !random.one_of(4) {
                world.tunnel(&name, Some(OLD)).await;
                world.look(&name).await;
            }
        }
        world
    }

    /// A cluster whose old pool is for Services.
    pub(super) async fn of_services(random: &mut Random, nodes: usize, closed: &[usize]) -> Self {
        let mut world = Self::with(random, 0, &[]).await;
        let spec = json!({"cidr": OLD, "blockSize": 29, "allowedUses": ["LoadBalancer"]});
        put(
            &*world.inner,
            &Key::global(Kind::IpPool, "old"),
            json!({"metadata": {"name": "old"}, "spec": spec}),
        )
        .await;
        world.closed = world.add_nodes(nodes, closed).await;
        for node in world.nodes().await {
            let other = world.name("other");
            world.add_pod(&node, &other, THIRD, true).await;
        }
        for _ in 0..random.below(4) {
            let name = world.name("service");
            let key = Key::namespaced(Kind::Service, "n", &name);
            let metadata = json!({"name": name, "namespace": "n", "uid": format!("u-{name}")});
            put(&*world.inner, &key, json!({"metadata": metadata, "spec": {"type": "LoadBalancer"}})).await;
            world.serve(&key).await;
        }
        world
    }

    /// Adds nodes; returns the names of those that somebody has cordoned.
    async fn add_nodes(&self, count: usize, closed: &[usize]) -> BTreeSet<String> {
        let names = ["one", "two", "three", "four"];
        for (index, name) in names.into_iter().take(count).enumerate() {
            let mut node =
                json!({"metadata": {"name": name, "labels": {"kubernetes.io/os": "linux"}}, "spec": {}});
            if closed.contains(&index) {
                node["spec"]["unschedulable"] = json!(true);
            }
            put(&*self.inner, &Key::global(Kind::Node, name), node).await;
        }
        closed.iter().map(|index| names[*index].to_owned()).collect()
    }

    fn name(&mut self, prefix: &str) -> String {
        self.serial += 1;
        format!("{prefix}-{}", self.serial)
    }

    pub(super) async fn nodes(&self) -> Vec<String> {
        let nodes = self.inner.list(Kind::Node).await.unwrap().items;
        nodes.into_iter().map(|node| node.key.name).collect()
    }

    /// IPAM as the agent of a node has it.
    fn ipam(&self, node: &str) -> Ipam {
        Ipam::new(self.inner.clone(), node, BTreeMap::new())
    }

    /// A pod of a controller, with an address of this pool, or of whichever one gives one.
    pub(super) async fn add_pod(&mut self, node: &str, name: &str, pool: &str, ends: bool) {
        let owner = [("namespace", "n"), ("pod", name), ("node", node)];
        let request = Request {
            handle: format!("k8s-pod-network.{name}"),
            owner: owner.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            pools: if pool.is_empty() { Vec::new() } else { vec![pool.to_owned()] },
            ..Request::default()
        };
        let address = self.ipam(node).assign(&request).await.unwrap().address;
        let owner = json!([{"kind": "ReplicaSet", "name": "r", "controller": true}]);
        let metadata =
            json!({"name": name, "namespace": "n", "uid": format!("u-{name}"), "ownerReferences": owner});
        let pod = json!({"metadata": metadata, "spec": {"nodeName": node}, "status": {"podIPs": [{"ip": address.to_string()}]}});
        put(&*self.inner, &pod_key(name), pod).await;
        if !ends {
            self.stuck.insert(name.to_owned());
        }
    }

    /// What an agent does: a node without a tunnel address gets one, and announces what it has.
    async fn tunnel(&self, node: &str, pool: Option<&str>) {
        let ipam = self.ipam(node);
        let handle = format!("vxlan-tunnel-addr-{node}");
        let known = ipam.find(&handle).await.unwrap().first().map(|one| one.address);
        let address = match known {
            Some(address) => address,
            None => {
                let owner = [("node", node), ("type", "vxlanTunnelAddress")];
                let request = Request {
                    handle,
                    owner: owner
                        .into_iter()
                        .map(|(name, value)| (name.to_owned(), value.to_owned()))
                        .collect(),
                    intended_use: Use::Tunnel,
                    pools: pool.map(str::to_owned).into_iter().collect(),
                    ..Request::default()
                };
                ipam.assign(&request).await.unwrap().address
            }
        };
        let key = Key::global(Kind::Node, node);
        let mut value = self.inner.get(&key).await.unwrap().unwrap().value;
        set_annotation(&mut value, TUNNEL, &address.to_string());
        put(&*self.inner, &key, value).await;
    }

    /// The new pool has the settings of the old one.
    pub(super) fn request(spec: &Value) -> MigrationRequest {
        let planned = Some(pool_like(spec, "new", net(NEW), None));
        MigrationRequest { old: "old".into(), new: "new".into(), planned, pods: WhichPods::default() }
    }

    /// A migration that is killed after so many writes.
    pub(super) async fn migration(&self, writes: usize) -> (PoolMigration, Arc<Disturbed>) {
        let old = self.inner.get(&Key::global(Kind::IpPool, "old")).await.unwrap();
        let request = Self::request(&old.map(|old| old.value).unwrap_or_default());
        let store = Arc::new(Disturbed::crashing_after(self.inner.clone(), writes));
        let (refusals, forbidden) = (self.refusals.clone(), self.forbidden);
        let evictions = Arc::new(Budgets { store: store.clone(), refusals, forbidden });
        (PoolMigration { store: store.clone(), evictions, request }, store)
    }

    /// One step of somebody who knows nothing of those before. `None` if it was killed.
    pub(super) async fn step(&mut self, writes: usize, _: &mut Random) -> Option<MigrationStep> {
        let (migration, store) = self.migration(writes).await;
        match migration.step(Duration::ZERO, Duration::MAX).await {
            Ok(progress) => Some(progress.step),
            Err(error) => {
                assert!(store.has_crashed(), "{error}");
                None
            }
        }
    }

    /// The old pool was closed a minute ago.
    pub(super) async fn pass_time(&self) {
        let key = Key::global(Kind::IpPool, "old");
        let Some(stored) = self.inner.get(&key).await.unwrap() else { return };
        let mut value = stored.value;
        let Some(text) = value["metadata"]["annotations"][MIGRATION].as_str() else { return };
        let mut record: Value = serde_json::from_str(text).unwrap();
        // Once: the records of nodes name this time.
        let since: Timestamp = record["since"].as_str().unwrap().parse().unwrap();
        if Timestamp::now().duration_since(since) > jiff::SignedDuration::from_secs(30) {
            return;
        }
        record["since"] = json!((Timestamp::now() - jiff::SignedDuration::from_mins(1)).to_string());
        set_annotation(&mut value, MIGRATION, &record.to_string());
        put(&*self.inner, &key, value).await;
    }

    /// Kubelets end pods, and controllers and schedulers start them again; agents announce tunnels; the controllers serve
    /// Services. Each is late sometimes.
    pub(super) async fn play(&mut self, random: &mut Random) {
        for stored in self.inner.list(Kind::Pod).await.unwrap().items {
            let is_ending = !stored.value["metadata"]["deletionTimestamp"].is_null();
            let is_late = !self.is_calm && random.one_of(2);
            if !is_ending || is_late || self.stuck.contains(&stored.key.name) {
                continue;
            }
            let node = stored.value["spec"]["nodeName"].as_str().unwrap().to_owned();
            let released =
                self.ipam(&node).release(&format!("k8s-pod-network.{}", stored.key.name)).await.unwrap();
            assert_eq!(released.len(), 1);
            self.inner.delete(&stored.key, None).await.unwrap();
            // A DaemonSet's pod returns to its node.
            let nodes = self.inner.list(Kind::Node).await.unwrap().items;
            let open: Vec<_> = nodes.iter().filter(|it| it.value["spec"]["unschedulable"] != true).collect();
            let target = match open.is_empty() || random.one_of(3) {
                true => node,
                false => open[random.below(open.len())].key.name.clone(),
            };
            let name = self.name("new");
            self.add_pod(&target, &name, "", true).await;
        }
        if !self.is_calm && self.late < 5 && random.one_of(6) {
            self.late_pod(random).await;
        }
        for node in self.nodes().await {
            if self.is_calm || !random.one_of(3) {
                self.look(&node).await;
            }
        }
        for stored in self.inner.list(Kind::Service).await.unwrap().items {
            if self.is_calm || !random.one_of(3) {
                self.serve(&stored.key).await;
            }
        }
    }

    /// An agent that has not noticed that the old pool is closed gives an address of it.
    async fn late_pod(&mut self, random: &mut Random) {
        let key = Key::global(Kind::IpPool, "old");
        let Some(stored) = self.inner.get(&key).await.unwrap() else { return };
        let nodes = self.nodes().await;
        if stored.value["spec"]["allowedUses"].is_array() {
            return;
        }
        self.late += 1;
        let mut open = stored.value.clone();
        open["spec"]["disabled"] = json!(false);
        put(&*self.inner, &key, open).await;
        let name = self.name("old");
        self.add_pod(&nodes[random.below(nodes.len())], &name, OLD, true).await;
        put(&*self.inner, &key, stored.value).await;
    }

    /// An agent looks at its Node when that has changed. One that had no tunnel gets none.
    pub(super) async fn look(&mut self, node: &str) {
        let key = Key::global(Kind::Node, node);
        let Stored { value, version, .. } = self.inner.get(&key).await.unwrap().unwrap();
        if self.seen.get(node) == Some(&version) {
            return;
        }
        if value["metadata"]["annotations"][TUNNEL].is_string() {
            self.tunnel(node, None).await;
        }
        let now = self.inner.get(&key).await.unwrap().unwrap().version;
        self.seen.insert(node.to_owned(), now);
    }

    /// A Service of type LoadBalancer shows what it has, and gets an address if it has none.
    pub(super) async fn serve(&self, key: &Key) {
        let mut service = self.inner.get(key).await.unwrap().unwrap().value;
        let uid = service["metadata"]["uid"].as_str().unwrap().to_owned();
        let request = Request {
            handle: service_handle(&key.namespace, &key.name, &uid),
            owner: service_owner(&key.namespace, &key.name, String::new()),
            intended_use: Use::LoadBalancer,
            ..Request::default()
        };
        let address = Ipam::of_load_balancers(self.inner.clone()).assign(&request).await.unwrap().address;
        service["status"] = json!({"loadBalancer": {"ingress": [{"ip": address.to_string()}]}});
        put(&*self.inner, key, service).await;
    }

    /// From here on, nobody is late, and no budget refuses anything.
    pub(super) fn calm(&mut self) {
        self.is_calm = true;
        self.refusals.lock().unwrap().clear();
    }

    /// Everybody finishes their work.
    pub(super) async fn settle(&mut self) {
        self.calm();
        self.play(&mut Random::new(1)).await;
    }

    pub(super) async fn has_old(&self) -> bool {
        self.inner.get(&Key::global(Kind::IpPool, "old")).await.unwrap().is_some()
    }

    /// Blocks, affinities and addresses in the old pool.
    pub(super) async fn addresses_in_old(&self) -> Vec<String> {
        let in_old = |name: &str| {
            name.rsplit_once('/').is_some_and(|_| {
                let text = name.split_once('/').filter(|(first, _)| first.parse::<IpAddr>().is_err());
                let text = text.map_or(name, |(_, net)| net);
                text.parse::<IpNet>().is_ok_and(|block| net(OLD).contains(&block))
            })
        };
        let mut found = Vec::new();
        for kind in [Kind::IpamBlock, Kind::BlockAffinity] {
            let names = self.inner.list(kind).await.unwrap().items.into_iter().map(|stored| stored.key.name);
            found.extend(names.filter(|name| in_old(name)));
        }
        found
    }

    pub(super) async fn assert_moved(&self, seed: u64) {
        assert_eq!(self.addresses_in_old().await, [""; 0], "seed {seed}");
        let list = async |kind| self.inner.list(kind).await.unwrap().items;
        for node in list(Kind::Node).await {
            let annotations = &node.value["metadata"]["annotations"];
            assert!(annotations[MIGRATION].is_null(), "seed {seed}: {}", node.value);
            if let Some(tunnel) = annotations[TUNNEL].as_str() {
                assert!(!net(OLD).contains(&tunnel.parse::<IpAddr>().unwrap()), "seed {seed}");
            }
        }
        for pod in list(Kind::Pod).await {
            let address =
                pod.value["status"]["podIPs"][0]["ip"].as_str().map(|text| text.parse::<IpAddr>().unwrap());
            assert!(address.is_none_or(|address| !net(OLD).contains(&address)), "seed {seed}: {}", pod.value);
        }
        let snapshot = Snapshot {
            blocks: list(Kind::IpamBlock).await,
            handles: list(Kind::IpamHandle).await,
            affinities: list(Kind::BlockAffinity).await,
            pools: list(Kind::IpPool).await,
            endpoints: Vec::new(),
            pods: list(Kind::Pod).await,
            nodes: list(Kind::Node).await,
            services: list(Kind::Service).await,
        };
        let findings = tortie_ipam::check(&snapshot, Timestamp::now(), 0);
        assert_eq!(findings, [], "seed {seed}");
    }
}

pub(super) fn pod_key(name: &str) -> Key {
    Key::namespaced(Kind::Pod, "n", name)
}

pub(super) fn set_annotation(object: &mut Value, name: &str, text: &str) {
    if object["metadata"]["annotations"].is_null() {
        object["metadata"]["annotations"] = json!({});
    }
    object["metadata"]["annotations"][name] = json!(text);
}
