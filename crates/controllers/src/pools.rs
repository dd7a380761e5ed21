//! Deletion of IPPools in a Kubernetes API (`kube-controllers/pkg/controllers/ippool` of Calico): a finalizer keeps a deleted pool until
//! none of its addresses is in use, because other nodes need it for routes, and IPAM for its blocks.
//!
//! A pool that was deleted gives no new addresses, and its empty blocks are taken from Linux nodes. Blocks of Windows nodes stay,
//! because they are subnets of the node's network.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tortie_api::calico::IpPool;
use tortie_api::support::{Pool, is_protected, is_terminating};
use tortie_api::{Key, Kind};
use tortie_ipam::{IpamError, POOLS_FRESH, Records, in_use};
use tortie_store::{Store, StoreError, Stored, Version};

use crate::decision::annotation;
use crate::pool_blocks::{EmptyBlock, blocks_outside, empty_blocks, give_up_blocks};

/// The annotation of a pool that moves to another one, and of a node whose pods move (`tortie pool migrate`).
pub const MIGRATION: &str = "tortie.io/pool-migration";
/// How long agents may give addresses of a pool that was closed or deleted. One that has just read the pools may use them for
/// [`POOLS_FRESH`]; the rest is for a request on its way.
pub(crate) const SETTLE: Duration = POOLS_FRESH.saturating_mul(2);

/// Protects pools in use from deletion.
pub struct Pools {
    store: Arc<dyn Store>,
    records: Records,
    /// The deleted pools by name, with the time of the first look at them, and the last use that was logged.
    terminating: BTreeMap<String, (Instant, String)>,
}

/// Deletes a pool without waiting for [`Pools`] to remove its finalizer. The caller knows that no agent gives addresses of it, or that
/// other pools have its blocks. Returns false if it did not exist.
///
/// # Errors
/// The pool has another version now, or the store failed.
pub async fn delete_pool(
    store: &dyn Store,
    key: &Key,
    expected: Option<&Version>,
) -> Result<bool, StoreError> {
    match store.delete(key, expected).await {
        Ok(_) => {}
        Err(StoreError::NotFound(_)) => return Ok(false),
        Err(error) => return Err(error),
    }
    release(store, key).await?;
    Ok(true)
}

/// Removes the finalizer of a pool, so that the API server deletes it at once.
///
/// # Errors
/// The store failed.
pub async fn release(store: &dyn Store, key: &Key) -> Result<(), StoreError> {
    while let Some(Stored { value, version, .. }) = store.get(key).await?
        && is_protected(&value)
    {
        match store.set_finalizer(key, IpPool::FINALIZER, false, &version).await {
            // Somebody has changed it meanwhile.
            Err(StoreError::Conflict(_)) => {}
            Ok(()) | Err(StoreError::NotFound(_)) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Pools {
    /// Pools of this datastore, which must be a Kubernetes API.
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { records: Records::new(store.clone()), store, terminating: BTreeMap::new() }
    }

    /// Gives new pools the finalizer, and removes it from deleted ones that are not in use.
    ///
    /// # Errors
    /// The store failed. The next round continues.
    pub async fn round(&mut self, now: Instant) -> Result<(), IpamError> {
        let mut read = Vec::new();
        for stored in self.store.list(Kind::IpPool).await?.items {
            match Pool::of(&stored.key, &stored.value) {
                Some(pool) => read.push((pool, stored)),
                // A pool that cannot be read has no addresses.
                None if is_terminating(&stored.value) => release(&*self.store, &stored.key).await?,
                None => {}
            }
        }
        let (deleted, open): (Vec<_>, Vec<_>) = read.into_iter().partition(|(pool, _)| pool.is_terminating);
        // `tortie pool migrate` deletes the pool that it moves.
        let is_due =
            |stored: &Stored| is_protected(&stored.value) && annotation(&stored.value, MIGRATION).is_none();
        let deleted: Vec<(Pool, Stored)> = deleted.into_iter().filter(|(_, stored)| is_due(stored)).collect();
        self.terminating.retain(|name, _| deleted.iter().any(|(pool, _)| pool.name == *name));
        let open_nets: Vec<IpNet> = open.iter().map(|(pool, _)| pool.cidr).collect();
        let mut result = Ok(());
        if !deleted.is_empty() {
            // Agents that do not know of the deletion yet may still claim blocks, so the pool stays for `SETTLE`.
            let blocks = blocks_outside(self.store.list(Kind::IpamBlock).await?.items, &open_nets);
            let affinities = self.store.list(Kind::BlockAffinity).await?.items;
            for (pool, stored) in deleted {
                let used = in_use(&pool.cidr, blocks.iter().map(|block| &block.value));
                let empty = empty_blocks(&pool.cidr, &open_nets, &blocks, &affinities);
                let used = used.map(|used| used.to_string());
                result = result.and(self.finalize(stored, &pool, (used, &empty), now).await);
            }
        }
        // A pool that the API server rejects does not delay the others.
        for (_, stored) in open.into_iter().filter(|(_, stored)| !is_protected(&stored.value)) {
            result = result.and(self.write(stored, true).await.map(drop));
        }
        result
    }

    /// Gives up the empty blocks of a deleted pool. Removes its finalizer, unless it is in use.
    async fn finalize(
        &mut self,
        stored: Stored,
        pool: &Pool,
        (used, empty): (Option<String>, &[EmptyBlock]),
        now: Instant,
    ) -> Result<(), IpamError> {
        let (since, logged) =
            self.terminating.entry(pool.name.clone()).or_insert_with(|| (now, String::new()));
        let has_settled = now.saturating_duration_since(*since) >= SETTLE;
        if let Some(used) = used.as_ref().filter(|used| *used != logged) {
            tracing::info!(
                pool = pool.name,
                "the pool was deleted, and stays until its addresses are released: {used}; `tortie pool migrate {} NEW` moves what \
                 has them to another pool",
                pool.name
            );
            logged.clone_from(used);
        }
        if !has_settled {
            return Ok(());
        }
        let are_as_read = give_up_blocks(&self.records, empty).await?;
        if used.is_none() && are_as_read && self.write(stored, false).await? {
            tracing::info!(pool = pool.name, "none of the deleted pool's addresses is in use, so it is gone");
        }
        Ok(())
    }

    /// Adds or removes the finalizer. Returns false if the pool has changed meanwhile: the next round looks again.
    async fn write(&self, stored: Stored, protected: bool) -> Result<bool, IpamError> {
        let Stored { key, version, .. } = stored;
        match self.store.set_finalizer(&key, IpPool::FINALIZER, protected, &version).await {
            Ok(()) => Ok(true),
            Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
