//! Deletion of a pool by a command (`tortie delete`, `tortie apply --prune`).
//!
//! A pool with the finalizer stays until [`Pools`](crate::Pools) have seen that nothing uses it. Without it, whoever deletes the pool
//! does the same: close the pool, wait until agents know that, look whether its addresses are in use, and give up its empty blocks.

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_api::calico::IpPool;
use tortie_api::support::{Pool, is_protected, is_terminating};
use tortie_api::{Key, Kind};
use tortie_ipam::{InUse, IpamError, Records, in_use};
use tortie_store::{Endpoints, Store, StoreError, Stored};

use crate::decision::annotation;
use crate::pool_blocks::{blocks_outside, empty_blocks, give_up_blocks, networks_of_others};
use crate::pools::{MIGRATION, SETTLE};

/// How often it looks again if somebody has changed blocks meanwhile.
const ATTEMPTS: usize = 5;

/// What came of the deletion of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolDeletion {
    /// It did not exist.
    Missing,
    /// It is gone.
    Gone,
    /// It gives no more addresses, and goes later. The text says who removes it.
    Waits(String),
    /// Its addresses are in use, so it stays as it was.
    InUse(InUse),
}

/// How a pool is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeletionMode {
    /// The API server keeps it until its finalizers are removed.
    Kept,
    /// Nobody can get an address that no pool has then.
    AtOnce,
    /// Agents and controllers that have read it may still give its addresses, so it is closed before.
    AfterClosing,
}

/// How this pool is deleted. `others` are the networks of the pools that stay.
fn deletion_mode(pool: &Stored, others: &[IpNet], in_kubernetes: bool, has_nodes: bool) -> DeletionMode {
    if is_kept(pool, in_kubernetes) {
        return DeletionMode::Kept;
    }
    // A pool that cannot be read gives no addresses.
    let Some(read) = Pool::of(&pool.key, &pool.value) else { return DeletionMode::AtOnce };
    // The controllers give addresses to Services, and agents to pods of their nodes.
    let gives = has_nodes || read.is_for_load_balancers;
    match gives && !others.iter().any(|other| other.contains(&read.cidr)) {
        true => DeletionMode::AfterClosing,
        false => DeletionMode::AtOnce,
    }
}

/// Whether the datastore keeps the pool when it is deleted. Only a Kubernetes API looks at finalizers.
fn is_kept(pool: &Stored, in_kubernetes: bool) -> bool {
    in_kubernetes && (is_protected(&pool.value) || is_terminating(&pool.value))
}

/// Deletes a pool, unless its addresses are in use. If it must be closed before, `settle` is called then, and waits for so long:
/// agents may use the pool as they knew it.
///
/// # Errors
/// The store failed, or somebody has changed the pool or its blocks meanwhile. A pool that was closed stays closed.
pub async fn remove_pool(
    store: &Arc<dyn Endpoints>,
    key: &Key,
    settle: impl AsyncFnOnce(Duration),
) -> Result<PoolDeletion, IpamError> {
    let in_kubernetes = store.derives_from_kubernetes();
    let Some(mut pool) = store.get(key).await? else { return Ok(PoolDeletion::Missing) };
    let others = networks_of_others(&list(&**store, Kind::IpPool).await?, &[key]);
    let has_nodes = !list(&**store, Kind::Node).await?.is_empty();
    let mode = deletion_mode(&pool, &others, in_kubernetes, has_nodes);
    let before = pool.value.pointer("/spec/disabled").cloned();
    if mode == DeletionMode::AfterClosing {
        if before != Some(json!(true)) {
            set_disabled(&mut pool.value, Some(json!(true)));
            store.update(key, pool.value, &pool.version).await?;
        }
        settle(SETTLE).await;
        let Some(now) = store.get(key).await? else { return Ok(PoolDeletion::Gone) };
        if now.value.pointer("/spec/disabled") != Some(&json!(true)) {
            return Err(StoreError::Conflict(key.clone()).into());
        }
        pool = now;
    }
    // The controllers may have begun to protect it meanwhile, and do the rest then.
    if !is_kept(&pool, in_kubernetes)
        && let Some(net) = Pool::of(key, &pool.value).map(|pool| pool.cidr)
        && let Some(used) = give_up(store, key, &net).await?
    {
        if mode == DeletionMode::AfterClosing {
            reopen(&**store, key, before).await?;
        }
        return Ok(PoolDeletion::InUse(used));
    }
    match store.delete(key, Some(&pool.version)).await {
        Ok(_) | Err(StoreError::NotFound(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let left = store.get(key).await?.filter(|left| is_terminating(&left.value));
    Ok(left.map_or(PoolDeletion::Gone, |left| PoolDeletion::Waits(waits_for(&left))))
}

/// Gives up the empty blocks of a pool, unless its addresses are in use: it returns by whom.
async fn give_up(store: &Arc<dyn Endpoints>, key: &Key, net: &IpNet) -> Result<Option<InUse>, IpamError> {
    let records = Records::new(store.clone());
    for _ in 0..ATTEMPTS {
        let others = networks_of_others(&list(&**store, Kind::IpPool).await?, &[key]);
        let blocks = blocks_outside(list(&**store, Kind::IpamBlock).await?, &others);
        let affinities = list(&**store, Kind::BlockAffinity).await?;
        let used = in_use(net, blocks.iter().map(|block| &block.value));
        if used.is_some() {
            return Ok(used);
        }
        if give_up_blocks(&records, &empty_blocks(net, &others, &blocks, &affinities)).await? {
            return Ok(None);
        }
    }
    Err(IpamError::Contended(key.clone()))
}

/// Undoes the closing of a pool, whatever else has changed since.
async fn reopen(store: &dyn Store, key: &Key, before: Option<Value>) -> Result<(), StoreError> {
    while let Some(Stored { mut value, version, .. }) = store.get(key).await? {
        set_disabled(&mut value, before.clone());
        match store.update(key, value, &version).await {
            Err(StoreError::Conflict(_)) => {}
            Ok(_) | Err(StoreError::NotFound(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn set_disabled(pool: &mut Value, disabled: Option<Value>) {
    let Some(spec) = pool.pointer_mut("/spec").and_then(Value::as_object_mut) else { return };
    match disabled {
        Some(disabled) => drop(spec.insert("disabled".to_owned(), disabled)),
        None => drop(spec.remove("disabled")),
    }
}

/// Who removes a deleted pool that still exists.
fn waits_for(pool: &Stored) -> String {
    if annotation(&pool.value, MIGRATION).is_some() {
        return "`tortie pool migrate`, which moves it to another pool, removes it with its last step"
            .to_owned();
    }
    if is_protected(&pool.value) {
        return format!(
            "`tortie controllers` remove it, by its finalizer {}, when none of its addresses is in use; if they run, within a minute",
            IpPool::FINALIZER
        );
    }
    let finalizers = pool.value.pointer("/metadata/finalizers").and_then(Value::as_array);
    let names: Vec<&str> = finalizers.into_iter().flatten().filter_map(Value::as_str).collect();
    format!("it stays until whoever has added its finalizers removes them: {}", names.join(", "))
}

/// The objects of a kind; none if the datastore does not have it.
async fn list(store: &dyn Store, kind: Kind) -> Result<Vec<Stored>, StoreError> {
    match store.list(kind).await {
        Ok(listing) => Ok(listing.items),
        Err(StoreError::KindAbsent(_)) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use tortie_store::Written;

    use super::*;

    fn pool(metadata: &Value, spec: &Value) -> Stored {
        let value = json!({ "metadata": metadata, "spec": spec });
        Stored::new(Key::global(Kind::IpPool, "a"), value, Written::at(1))
    }

    #[test]
    fn a_pool_is_closed_before_unless_it_is_kept_or_nobody_can_be_without_a_pool() {
        let (plain, protected) = (json!({}), json!({"finalizers": [IpPool::FINALIZER]}));
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x"]});
        let spec = json!({"cidr": "10.1.0.0/24"});
        let of_services = json!({"cidr": "10.1.0.0/24", "allowedUses": ["LoadBalancer"]});
        let net = |text: &str| vec![text.parse::<IpNet>().unwrap()];
        for (metadata, spec, others, in_kubernetes, has_nodes, expected) in [
            (&plain, &spec, vec![], false, true, DeletionMode::AfterClosing),
            (&plain, &spec, vec![], true, true, DeletionMode::AfterClosing),
            (&protected, &spec, vec![], true, true, DeletionMode::Kept),
            (&protected, &spec, vec![], true, false, DeletionMode::Kept),
            (&deleted, &spec, vec![], true, true, DeletionMode::Kept),
            // Another datastore does not look at finalizers.
            (&protected, &spec, vec![], false, true, DeletionMode::AfterClosing),
            (&plain, &spec, vec![], false, false, DeletionMode::AtOnce),
            (&plain, &of_services, vec![], false, false, DeletionMode::AfterClosing),
            (&plain, &spec, net("10.1.0.0/16"), false, true, DeletionMode::AtOnce),
            (&plain, &spec, net("10.1.0.0/25"), false, true, DeletionMode::AfterClosing),
            (&plain, &json!({"cidr": "x"}), vec![], false, true, DeletionMode::AtOnce),
        ] {
            let pool = pool(metadata, spec);
            let found = deletion_mode(&pool, &others, in_kubernetes, has_nodes);
            assert_eq!(found, expected, "{} {others:?} {in_kubernetes} {has_nodes}", pool.value);
        }
    }

    #[test]
    fn a_pool_that_waits_says_for_whom() {
        for (metadata, expected) in [
            (json!({"finalizers": [IpPool::FINALIZER]}), "`tortie controllers` remove it, by its finalizer"),
            (
                json!({"finalizers": ["x/y", IpPool::FINALIZER]}),
                "`tortie controllers` remove it, by its finalizer",
            ),
            (
                json!({"finalizers": [IpPool::FINALIZER], "annotations": {MIGRATION: "{}"}}),
                "`tortie pool migrate`, which moves it",
            ),
            (json!({"finalizers": ["x/y", "z"]}), "removes them: x/y, z"),
        ] {
            let found = waits_for(&pool(&metadata, &json!({})));
            assert!(found.contains(expected), "{found}");
        }
    }
}
