//! `tortie delete ippool`: nobody is left with an address that no pool has, and no empty block stays.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_api::Kind;
use tortie_api::support::is_terminating;
use tortie_controllers::{PoolDeletion, Pools, remove_pool};
use tortie_ipam::{Ipam, IpamError, POOLS_FRESH, Request};
use tortie_store::{Embedded, Endpoints, Store, StoreError};

use crate::common::{global, memory, put, value};
use crate::pools::{Cluster, SETTLED};

async fn with_pool(spec: Value) -> Arc<Embedded> {
    let store = memory();
    put(&*store, &global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
    put_pool(&*store, "a", spec).await;
    store
}

async fn put_pool(store: &dyn Store, name: &str, spec: Value) {
    put(store, &global(Kind::IpPool, name), json!({"metadata": {"name": name}, "spec": spec})).await;
}

fn request(handle: &str) -> Request {
    Request { handle: handle.to_owned(), ..Request::default() }
}

/// An agent that has just given an address of a pool, which was released again.
async fn agent(store: &Arc<Embedded>) -> Ipam {
    let agent = Ipam::new(store.clone(), "one", BTreeMap::new());
    agent.assign(&request("first")).await.unwrap();
    agent.release("first").await.unwrap();
    agent
}

/// Deletes pool `a`; returns what came of it, and for how long it waited.
async fn remove(
    store: &Arc<dyn Endpoints>,
    meanwhile: impl AsyncFnOnce(),
) -> (Result<PoolDeletion, IpamError>, Option<Duration>) {
    let mut waited = None;
    let settle = async |time| {
        waited = Some(time);
        meanwhile().await;
    };
    let removed = remove_pool(store, &global(Kind::IpPool, "a"), settle).await;
    (removed, waited)
}

async fn count(store: &dyn Store) -> usize {
    let mut count = 0;
    for kind in [Kind::IpamBlock, Kind::BlockAffinity] {
        count += store.list(kind).await.unwrap().items.len();
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_pool_goes_with_its_blocks_when_agents_know_that_it_is_closed() {
    for disabled in [json!(null), json!(false), json!(true)] {
        let store = with_pool(json!({"cidr": "10.1.0.0/24"})).await;
        agent(&store).await;
        put_pool(&*store, "a", json!({"cidr": "10.1.0.0/24", "disabled": disabled})).await;
        // Of a claim that was interrupted.
        let affinity = json!({"state": "pending"});
        put(&*store, &global(Kind::BlockAffinity, "two/10.1.0.192/26"), affinity).await;
        // It stays, and is in nobody's way.
        let damaged = global(Kind::BlockAffinity, "two/10.1.0.128/26");
        put(&*store, &damaged, json!({"state": 7})).await;
        assert_eq!(count(&*store).await, 4);
        let key = global(Kind::IpPool, "a");
        let is_closed = async || assert_eq!(value(&*store, &key).await["spec"]["disabled"], true);
        let (removed, waited) = remove(&(store.clone() as _), is_closed).await;
        assert_eq!(removed.unwrap(), PoolDeletion::Gone);
        assert!(waited.unwrap() > POOLS_FRESH, "{disabled}");
        assert!(store.get(&key).await.unwrap().is_none());
        assert!(count(&*store).await == 1 && store.get(&damaged).await.unwrap().is_some(), "{disabled}");
        assert_eq!(remove(&(store.clone() as _), async || {}).await.0.unwrap(), PoolDeletion::Missing);
    }
}

/// The agent gives an address of the pool that it has read before.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_which_a_pod_gets_an_address_meanwhile_is_open_again() {
    for spec in [json!({"cidr": "10.1.0.0/24"}), json!({"cidr": "10.1.0.0/24", "disabled": false})] {
        let store = with_pool(spec.clone()).await;
        let agent = agent(&store).await;
        let late = async || {
            agent.assign(&request("late")).await.unwrap();
            // Others may change the pool, too.
            let mut changed = value(&*store, &global(Kind::IpPool, "a")).await;
            changed["metadata"]["labels"] = json!({"x": "y"});
            put(&*store, &global(Kind::IpPool, "a"), changed).await;
        };
        let (removed, _) = remove(&(store.clone() as _), late).await;
        let PoolDeletion::InUse(used) = removed.unwrap() else { panic!("it is deleted") };
        assert_eq!(used.to_string(), "1 address, the first of handle late");
        let pool = value(&*store, &global(Kind::IpPool, "a")).await;
        assert_eq!((&pool["spec"], &pool["metadata"]["labels"]["x"]), (&spec, &json!("y")));
        assert_eq!(count(&*store).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_somebody_enables_meanwhile_is_not_deleted() {
    let store = with_pool(json!({"cidr": "10.1.0.0/24"})).await;
    let enable = async || put_pool(&*store, "a", json!({"cidr": "10.1.0.0/24"})).await;
    let (removed, _) = remove(&(store.clone() as _), enable).await;
    assert!(matches!(removed, Err(IpamError::Store(StoreError::Conflict(_)))), "{removed:?}");
    assert!(store.get(&global(Kind::IpPool, "a")).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_without_nodes_or_if_another_pool_has_the_addresses() {
    let store = with_pool(json!({"cidr": "10.1.0.0/24"})).await;
    agent(&store).await;
    store.delete(&global(Kind::Node, "one"), None).await.unwrap();
    let (removed, waited) = remove(&(store.clone() as _), async || {}).await;
    assert_eq!((removed.unwrap(), waited), (PoolDeletion::Gone, None));
    assert_eq!(count(&*store).await, 0);

    let store = with_pool(json!({"cidr": "10.1.0.0/24"})).await;
    let agent = agent(&store).await;
    agent.assign(&request("pod")).await.unwrap();
    put_pool(&*store, "outer", json!({"cidr": "10.1.0.0/16"})).await;
    let (removed, waited) = remove(&(store.clone() as _), async || {}).await;
    assert_eq!((removed.unwrap(), waited), (PoolDeletion::Gone, None));
    assert_eq!(count(&*store).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_controllers_a_pool_of_a_kubernetes_api_is_closed_before() {
    let Some(cluster) = Cluster::start().await else { return };
    let store: Arc<dyn Endpoints> = cluster.store.clone();
    cluster.create("a", "10.1.0.0/24");
    put(&*store, &global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
    let agent = cluster.ipam();
    agent.assign(&request("first")).await.unwrap();
    agent.release("first").await.unwrap();
    let late = async || {
        agent.assign(&request("late")).await.unwrap();
    };
    let (removed, _) = remove(&store, late).await;
    assert!(matches!(removed.unwrap(), PoolDeletion::InUse(_)));
    assert!(cluster.pool("a").await.unwrap().value["spec"]["disabled"] != true);
    agent.release("late").await.unwrap();
    let (removed, waited) = remove(&store, async || {}).await;
    assert_eq!(removed.unwrap(), PoolDeletion::Gone);
    assert!(waited.is_some() && cluster.pool("a").await.is_none());
    assert_eq!(cluster.blocks().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_delete_a_pool_that_they_protect() {
    let Some(cluster) = Cluster::start().await else { return };
    let store: Arc<dyn Endpoints> = cluster.store.clone();
    put(&*store, &global(Kind::Node, "one"), json!({"metadata": {"name": "one"}})).await;
    let (start, mut pools) = (Instant::now(), Pools::new(cluster.store.clone()));
    for protects_meanwhile in [false, true] {
        cluster.create("a", "10.1.0.0/24");
        let agent = cluster.ipam();
        agent.assign(&request("first")).await.unwrap();
        if !protects_meanwhile {
            pools.round(start).await.unwrap();
        }
        let (removed, waited) = remove(&store, async || pools.round(start).await.unwrap()).await;
        assert_eq!(waited.is_some(), protects_meanwhile);
        let PoolDeletion::Waits(what) = removed.unwrap() else { panic!("it is gone, or in use") };
        assert!(what.contains("`tortie controllers` remove it"), "{what}");
        assert!(is_terminating(&cluster.pool("a").await.unwrap().value));
        // The pod that has the address keeps the pool.
        pools.round(start).await.unwrap();
        pools.round(start + SETTLED).await.unwrap();
        assert!(cluster.pool("a").await.is_some());
        agent.release("first").await.unwrap();
        pools.round(start + SETTLED).await.unwrap();
        assert!(cluster.pool("a").await.is_none());
        assert_eq!(cluster.blocks().await, 0);
    }
}
