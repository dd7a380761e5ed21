//! Deletion of pools in a real Kubernetes API, by kubectl and by Tortie.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tortie_api::Kind;
use tortie_api::calico::IpPool;
use tortie_api::support::is_protected;
use tortie_controllers::{MIGRATION, Pools, delete_pool};
use tortie_ipam::{Ipam, IpamError, Request};
use tortie_servers::programs::{Program, can_run};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::Kubernetes;
use tortie_store::{Store, Stored};

use crate::common::{global, memory, put, value};
use crate::servers::open;

/// More than agents need to notice a deletion.
pub(crate) const SETTLED: Duration = Duration::from_secs(10);

pub(crate) struct Cluster {
    servers: KubeApi,
    pub(crate) store: Arc<Kubernetes>,
}

impl Cluster {
    pub(crate) async fn start() -> Option<Self> {
        if !can_run(&[Program::Kube]) {
            return None;
        }
        let servers = KubeApi::start(&KubeOptions { definitions: true, ..KubeOptions::default() }).unwrap();
        let store = Arc::new(open(servers.kubeconfig()).await);
        Some(Self { servers, store })
    }

    pub(crate) fn create(&self, name: &str, cidr: &str) {
        let pool = format!(
            "apiVersion: crd.projectcalico.org/v1\nkind: IPPool\nmetadata: {{name: {name}, labels: {{a: b}}}}\nspec: {{cidr: {cidr}, vxlanMode: Always}}\n"
        );
        self.servers.apply(&pool).unwrap();
    }

    pub(crate) async fn pool(&self, name: &str) -> Option<Stored> {
        self.store.get(&global(Kind::IpPool, name)).await.unwrap()
    }

    fn kubectl(&self, arguments: &str) -> Result<String, String> {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        self.servers.kubectl(&arguments).map_err(|error| error.to_string())
    }

    /// An agent that has just started, so it knows no pools yet.
    pub(crate) fn ipam(&self) -> Ipam {
        Ipam::new(self.store.clone(), "one", BTreeMap::new())
    }

    pub(crate) async fn blocks(&self) -> usize {
        self.store.list(Kind::IpamBlock).await.unwrap().items.len()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pool_stays_while_its_addresses_are_in_use() {
    let Some(cluster) = Cluster::start().await else { return };
    cluster.create("used", "10.1.0.0/24");
    cluster.create("unused", "10.2.0.0/24");
    let start = Instant::now();
    let mut pools = Pools::new(cluster.store.clone());
    pools.round(start).await.unwrap();
    for name in ["used", "unused"] {
        let pool = cluster.pool(name).await.unwrap();
        assert!(is_protected(&pool.value), "{}", pool.value);
        assert_eq!(pool.value["metadata"]["labels"]["a"], "b");
    }
    let seen = cluster.kubectl("get ippool used -o jsonpath={.metadata.finalizers}").unwrap();
    assert_eq!(seen, r#"["projectcalico.org/ippool-finalizer"]"#);
    // What kubectl wrote is as it was, so that it can apply its manifest again.
    let kept =
        cluster.kubectl("get ippool used -o jsonpath={.metadata.labels}{.metadata.annotations}").unwrap();
    assert!(kept.starts_with(r#"{"a":"b"}{"kubectl.kubernetes.io/last-applied-configuration":"#), "{kept}");

    let request = |handle: &str| Request { handle: handle.to_owned(), ..Request::default() };
    let first = Request { pools: vec!["used".into()], ..request("first") };
    cluster.ipam().assign(&first).await.unwrap();
    cluster.kubectl("delete ippool used unused --wait=false").unwrap();
    // IPAM gives no address of it any more, whether it is asked for the pool or not.
    let chosen = Request { pools: vec!["used".into()], ..request("second") };
    assert!(matches!(cluster.ipam().assign(&chosen).await, Err(IpamError::ChosenPool { .. })));
    assert!(matches!(cluster.ipam().assign(&request("third")).await, Err(IpamError::NoPool(_))));

    // Agents may not have noticed it yet.
    pools.round(start).await.unwrap();
    assert!(cluster.pool("unused").await.is_some());
    pools.round(start + SETTLED).await.unwrap();
    assert!(cluster.pool("unused").await.is_none());
    assert!(cluster.pool("used").await.is_some());
    // Another process that begins to lead waits again.
    cluster.ipam().release("first").await.unwrap();
    let mut successor = Pools::new(cluster.store.clone());
    successor.round(start + SETTLED).await.unwrap();
    assert!(cluster.pool("used").await.is_some());
    assert_eq!(cluster.blocks().await, 1);
    successor.round(start + SETTLED * 2).await.unwrap();
    assert!(cluster.pool("used").await.is_none());
    assert_eq!(cluster.blocks().await, 0);
}

/// Pools overlap if kubectl makes them so. The addresses belong to the pool that stays.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pool_whose_addresses_another_one_has_goes() {
    let Some(cluster) = Cluster::start().await else { return };
    cluster.create("outer", "10.1.0.0/16");
    let start = Instant::now();
    let mut pools = Pools::new(cluster.store.clone());
    let given =
        cluster.ipam().assign(&Request { handle: "h".to_owned(), ..Request::default() }).await.unwrap();
    let block = given.block.to_string();
    cluster.create("inner", &block);
    pools.round(start).await.unwrap();
    cluster.kubectl("delete ippool inner --wait=false").unwrap();
    pools.round(start).await.unwrap();
    pools.round(start + SETTLED).await.unwrap();
    assert!(cluster.pool("inner").await.is_none());
    // An empty block of the other pool stays with its node, too.
    cluster.create("inner", &block);
    pools.round(start).await.unwrap();
    cluster.ipam().release("h").await.unwrap();
    cluster.kubectl("delete ippool inner --wait=false").unwrap();
    pools.round(start).await.unwrap();
    pools.round(start + SETTLED).await.unwrap();
    assert!(cluster.pool("inner").await.is_none());
    assert_eq!(cluster.blocks().await, 1);
}

/// Without an API server: the test is whoever deletes the pool, and the store keeps it.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pool_loses_its_finalizer_while_an_open_one_has_its_used_block() {
    for (open, is_free) in [("10.1.0.0/16", true), ("10.1.0.0/26", true), ("10.1.0.0/27", false)] {
        let store = memory();
        let finalizers = json!([IpPool::FINALIZER]);
        for (name, cidr, deleted) in
            [("inner", "10.1.0.0/26", json!("2026-01-01T00:00:00Z")), ("outer", open, json!(null))]
        {
            let metadata = json!({"name": name, "finalizers": finalizers, "deletionTimestamp": deleted});
            let pool = json!({"metadata": metadata, "spec": {"cidr": cidr, "vxlanMode": "Always"}});
            put(&*store, &global(Kind::IpPool, name), pool).await;
        }
        let used = json!({"cidr": "10.1.0.0/26", "affinity": "host:one", "allocations": [0], "unallocated": [],
            "attributes": [{"handle_id": "h"}]});
        put(&*store, &global(Kind::IpamBlock, "10.1.0.0/26"), used).await;
        let (start, mut pools) = (Instant::now(), Pools::new(store.clone()));
        for time in [start, start + SETTLED] {
            pools.round(time).await.unwrap();
        }
        let inner = value(&*store, &global(Kind::IpPool, "inner")).await;
        assert_eq!(is_protected(&inner), !is_free, "{open}: {inner}");
    }
}

/// `tortie pool migrate` ends with the deletion of the pool, and must find it until then.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pool_that_moves_is_left_to_the_migration() {
    let Some(cluster) = Cluster::start().await else { return };
    cluster.create("old", "10.1.0.0/24");
    let start = Instant::now();
    let mut pools = Pools::new(cluster.store.clone());
    pools.round(start).await.unwrap();
    let Stored { key, mut value, version, .. } = cluster.pool("old").await.unwrap();
    value["metadata"]["annotations"] = json!({MIGRATION: "{}"});
    cluster.store.update(&key, value, &version).await.unwrap();
    cluster.kubectl("delete ippool old --wait=false").unwrap();
    for time in [start, start + SETTLED] {
        pools.round(time).await.unwrap();
    }
    assert!(cluster.pool("old").await.is_some());
    assert!(delete_pool(&*cluster.store, &key, None).await.unwrap());
    assert!(cluster.pool("old").await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn tortie_deletes_a_pool_without_waiting_for_the_controllers() {
    let Some(cluster) = Cluster::start().await else { return };
    cluster.create("a", "10.1.0.0/24");
    Pools::new(cluster.store.clone()).round(Instant::now()).await.unwrap();
    let key = global(Kind::IpPool, "a");
    let stored = cluster.pool("a").await.unwrap();
    assert!(is_protected(&stored.value));
    assert!(delete_pool(&*cluster.store, &key, Some(&stored.version)).await.unwrap());
    assert!(cluster.pool("a").await.is_none());
    assert!(!delete_pool(&*cluster.store, &key, None).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_refuses_to_change_the_blocks_of_a_pool() {
    let Some(cluster) = Cluster::start().await else { return };
    cluster.create("four", "10.1.0.0/24");
    cluster.create("six", "fd00::/112");
    let cases = [
        ("four", r#"{"cidr":"10.1.0.0/25"}"#, Some("cidr cannot change")),
        ("four", r#"{"blockSize":27}"#, Some("blockSize cannot change")),
        ("four", r#"{"blockSize":26}"#, None),
        ("four", r#"{"blockSize":null}"#, None),
        ("four", r#"{"blockSize":0}"#, None),
        ("four", r#"{"disabled":true,"vxlanMode":"Never"}"#, None),
        ("six", r#"{"blockSize":123}"#, Some("blockSize cannot change")),
        ("six", r#"{"blockSize":122}"#, None),
    ];
    for (pool, spec, refusal) in cases {
        let patched = cluster.kubectl(&format!(r#"patch ippool {pool} --type=merge -p {{"spec":{spec}}}"#));
        match (&patched, refusal) {
            (Ok(_), None) => {}
            (Err(error), Some(refusal)) if error.contains(refusal) => {}
            _ => panic!("{pool} {spec}: {patched:?}"),
        }
    }
}
