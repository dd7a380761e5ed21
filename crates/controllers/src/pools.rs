//! Deletion of IPPools in a Kubernetes API (`kube-controllers/pkg/controllers/ippool` of Calico): a finalizer keeps a deleted pool until
//! none of its addresses is in use, because other nodes need it for routes, and IPAM for its blocks.
//!
//! A pool that was deleted gives no new addresses, and its empty blocks are taken from Linux nodes. Blocks of Windows nodes stay,
//! because they are subnets of the node's network.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tortie_api::{Key, Kind};
use tortie_api::ipam::{Block, is_virtual};
use tortie_api::support::{Pool, is_protected, is_terminating, set_protected};
use tortie_ipam::{IpamError, POOLS_FRESH, Records, in_use};
use tortie_store::{Store, StoreError, Stored, Version};

/// How long agents may give addresses of a pool that was closed or deleted. One that has just read the pools may use them for
/// [`POOLS_FRESH`]; the rest is for a request on its way.
pub(crate) const SETTLE: Duration = POOLS_FRESH.saturating_mul(2);

/// Protects pools in use from deletion.
pub struct Pools {
    store: Arc<dyn Store>,
    records: Records,
    /// Deleted pools, by name: since when this process knows it, and what the log says of their use.
    terminating: BTreeMap<String, (Instant, String)>,
}

/// Deletes a pool of which no address is in use, without waiting until [`Pools`] let it go. Returns false if it did not exist.
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
    let Some(Stored { mut value, version, .. }) = store.get(key).await? else { return Ok(true) };
    if !is_terminating(&value) || !is_protected(&value) {
        return Ok(true);
    }
    set_protected(&mut value, false);
    match store.update(key, value, &version).await {
        // Whoever changed or removed it meanwhile is one of the controllers.
        Ok(_) | Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => Ok(true),
        Err(error) => Err(error),
    }
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
        let pools = self.store.list(Kind::IpPool).await?.items;
        let deleted: Vec<(Stored, Pool)> = pools
            .iter()
            .filter(|stored| is_protected(&stored.value))
            .filter_map(|stored| Some((stored.clone(), Pool::of(&stored.key, &stored.value)?)))
            .filter(|(_, pool)| pool.is_terminating)
            .collect();
        self.terminating.retain(|name, _| deleted.iter().any(|(_, pool)| pool.name == *name));
        for stored in pools {
            let is_open = Pool::of(&stored.key, &stored.value).is_some_and(|pool| !pool.is_terminating);
            if is_open && !is_protected(&stored.value) {
                self.write(stored, true).await?;
            }
        }
        if deleted.is_empty() {
            return Ok(());
        }
        // A block that appears later belongs to an agent that did not know of the deletion: hence the time to settle.
        let blocks = self.store.list(Kind::IpamBlock).await?.items;
        for (stored, pool) in deleted {
            self.finalize(stored, &pool, &blocks, now).await?;
        }
        Ok(())
    }

    /// Lets a deleted pool go, unless it is in use.
    async fn finalize(
        &mut self,
        stored: Stored,
        pool: &Pool,
        blocks: &[Stored],
        now: Instant,
    ) -> Result<(), IpamError> {
        let used = in_use(&pool.cidr, blocks).map(|used| used.to_string());
        let (since, logged) =
            self.terminating.entry(pool.name.clone()).or_insert_with(|| (now, String::new()));
        let has_settled = now.saturating_duration_since(*since) >= SETTLE;
        if let Some(used) = &used
            && used != logged
        {
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
        self.give_up_empty_blocks(&pool.cidr, blocks).await?;
        if used.is_none() && self.write(stored, false).await? {
            tracing::info!(pool = pool.name, "none of the deleted pool's addresses is in use, so it is gone");
        }
        Ok(())
    }

    async fn give_up_empty_blocks(&self, net: &IpNet, blocks: &[Stored]) -> Result<(), IpamError> {
        for stored in blocks {
            let Ok(block) = serde_json::from_value::<Block>(stored.value.clone()) else { continue };
            let is_empty = !block.deleted && block.check().is_ok() && block.is_empty();
            let Some(owner) = block.owner().filter(|owner| !is_virtual(owner)) else { continue };
            if is_empty && net.contains(&block.cidr) && !block.is_of_windows() {
                self.records.give_up_block(owner, block.cidr, true, Some(block.sequence_number)).await?;
            }
        }
        Ok(())
    }

    /// Adds or removes the finalizer. Returns false if the pool has changed meanwhile: the next round looks again.
    async fn write(&self, stored: Stored, protected: bool) -> Result<bool, IpamError> {
        let Stored { key, mut value, version, .. } = stored;
        set_protected(&mut value, protected);
        match self.store.update(&key, value, &version).await {
            Ok(_) => Ok(true),
            Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => Ok(false),
            // A pool that the API server does not take back, whoever has written it, must not hold the others.
            Err(error @ StoreError::Invalid { .. }) => {
                tracing::error!(%error, "the pool cannot be written, so its deletion is not held while it is in use");
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}
