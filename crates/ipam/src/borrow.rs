//! Addresses from other nodes' blocks, when no block is left (`libcalico-go/lib/ipam/ipam.go`): first a node takes over
//! an empty block, then it borrows single addresses, unless affinity is strict. Blocks of Windows nodes are never touched.

use std::time::Duration;

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_store::{StoreError, Version};

use crate::access::from_value;
use crate::affinities::Given;
use crate::claim::fnv1;
use crate::driver::Ipam;
use crate::error::IpamError;
use crate::settings::Settings;

/// How old the claim of an empty block must be before another node may take the block over (Calico's number).
const RECLAIM_AGE: Duration = Duration::from_secs(60);

impl Ipam {
    /// Takes an empty block from its owner. Returns whether one was taken: it is nobody's then.
    pub(crate) async fn reclaim_empty_block(
        &self,
        pools: &[(IpNet, u8)],
        settings: &Settings,
    ) -> Result<bool, IpamError> {
        let now = Timestamp::now();
        for (version, mut block) in self.blocks_of_others(pools).await? {
            settings.config.end_cooldowns(&mut block, now);
            if !block.is_empty() || (block.affinity.is_some() && is_younger(&block, now)) {
                continue;
            }
            let result = match block.node() {
                Some(owner) => {
                    let number = Some(block.sequence_number);
                    self.records.give_up_block(owner, block.cidr, true, number).await
                }
                None if block.affinity.is_none() => {
                    let key = Key::global(Kind::IpamBlock, block.cidr.to_string());
                    let deleted = self.records.store.delete(&key, Some(&version)).await;
                    deleted.map(|_| Given::Up).map_err(IpamError::from)
                }
                // It belongs to load balancers.
                None => continue,
            };
            match result {
                Ok(Given::Up) => {
                    tracing::info!(block = %block.cidr, owner = block.node(), node = self.node, "the block was empty; this node takes it over");
                    return Ok(true);
                }
                // A datastore may let a node change only its own affinities.
                Ok(Given::InUse | Given::Changed)
                | Err(IpamError::Store(
                    StoreError::Forbidden(_) | StoreError::Conflict(_) | StoreError::NotFound(_),
                )) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Another node's block with a free address.
    pub(crate) async fn block_to_borrow_from(
        &self,
        pools: &[(IpNet, u8)],
        settings: &Settings,
    ) -> Result<Option<(Version, Block)>, IpamError> {
        let mut blocks = self.blocks_of_others(pools).await?;
        // Nodes begin at different blocks, so that they rarely collide.
        let start = usize::try_from(fnv1(&self.node)).unwrap_or(0) % blocks.len().max(1);
        blocks.rotate_left(start);
        for (version, mut block) in blocks {
            settings.config.end_cooldowns(&mut block, Timestamp::now());
            let is_of_load_balancers = block.affinity.is_some() && block.node().is_none();
            if block.has_room(&settings.reserved) && !is_of_load_balancers && !block.is_of_windows() {
                return Ok(Some((version, block)));
            }
        }
        Ok(None)
    }

    /// The readable blocks of these pools that do not belong to this node or to a Windows node that exists.
    async fn blocks_of_others(&self, pools: &[(IpNet, u8)]) -> Result<Vec<(Version, Block)>, IpamError> {
        let listing = self.records.store.list(Kind::IpamBlock).await?;
        let blocks = listing.items.into_iter().filter_map(|stored| {
            let name = stored.key.name.clone();
            let block: Block = from_value(&stored.key, stored.value).ok()?;
            let is_sound = !block.deleted && block.check().is_ok() && block.cidr.to_string() == name;
            let in_pool = pools.iter().any(|(pool, _)| pool.contains(&block.cidr));
            let of_windows = block.affinity.is_some() && block.is_of_windows();
            let of_other = !block.belongs_to(&self.node) && !of_windows;
            (is_sound && in_pool && of_other).then_some((stored.version, block))
        });
        Ok(blocks.collect())
    }
}

/// Whether the block was claimed a moment ago. Old blocks have no time.
fn is_younger(block: &Block, now: Timestamp) -> bool {
    let claimed = block.affinity_claim_time.as_deref().and_then(|time| time.parse::<Timestamp>().ok());
    claimed.is_some_and(|claimed| {
        now.as_second().saturating_sub(claimed.as_second()) < RECLAIM_AGE.as_secs().cast_signed()
    })
}
