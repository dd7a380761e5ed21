//! How a node claims a block (`libcalico-go/lib/ipam/ipam_block_reader_writer.go`): affinity `pending`, the block,
//! affinity `confirmed`.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::{StreamExt, stream};
use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::{Block, is_virtual};
use tortie_api::{Key, Kind};
use tortie_store::{StoreError, Stored, Version};

use crate::access::{from_value, to_value};
use crate::block_cache::BlockCache;
use crate::driver::{Ipam, now};
use crate::error::{IpamError, RETRIES};
use crate::records::{Affinity, AffinityState};
use crate::request::Family;
use crate::settings::Settings;

/// The maximum number of blocks of a node, of each family, unless IPAMConfig says otherwise.
pub const DEFAULT_MAX_BLOCKS: u32 = 20;

/// How many blocks are read at the same time.
const READS_AT_ONCE: usize = 8;

/// The blocks of a node.
#[derive(Default)]
pub(crate) struct Own {
    /// The blocks that it may use for this purpose.
    pub(crate) usable: Vec<(Version, Block)>,
    /// The number of its blocks, whatever their pool and state.
    pub(crate) count: usize,
    /// The problems of blocks that cannot be read.
    pub(crate) damaged: Vec<IpamError>,
}

/// The block of an affinity of the node.
enum OwnBlock {
    Usable(Version, Box<Block>),
    /// The claim was not completed.
    Unfinished(IpNet),
    OfOtherPool,
}

/// The result of an attempt to claim a block.
enum BlockClaim {
    Claimed(Version, Box<Block>),
    /// Somebody has changed it meanwhile.
    Changed,
    OfAnother,
}

impl Ipam {
    /// A block with a free address, from one of these pools: a block of this node, then a new one, then another node's
    /// block if the cluster allows that.
    pub(crate) async fn block_with_room(
        &self,
        family: Family,
        pools: &[(IpNet, u8)],
        settings: &Settings,
        cache: &mut BlockCache,
    ) -> Result<(Version, Block), IpamError> {
        for _ in 0..RETRIES {
            let own = self.own_blocks(family, pools, settings).await?;
            cache.replace(pools, &own.usable);
            let (blocks, limit) = (own.count, self.max_blocks(settings));
            if let Some(found) = own.usable.into_iter().find(|(_, block)| block.has_room(&settings.reserved))
            {
                return Ok(found);
            }
            let full = |hint| {
                let damaged = own.damaged.iter().map(|error| format!("; damaged: {error}")).collect();
                IpamError::Exhausted { owner: self.in_words(), blocks, limit, hint, damaged }
            };
            if blocks >= usize::try_from(limit).unwrap_or(usize::MAX) {
                return Err(full(if self.windows {
                    "its network has no room for more blocks: give the pool a smaller blockSize number (larger blocks)"
                } else {
                    "raise maxBlocksPerHost, or give the pool larger blocks"
                }));
            }
            if settings.config.auto_allocate_blocks {
                if let Some(cidr) = self.unused_cidr(pools, settings).await? {
                    match self.claim(cidr).await? {
                        Some(claimed) => return Ok(claimed),
                        None => continue,
                    }
                }
                if self.reclaim_empty_block(pools, settings).await? {
                    continue;
                }
            }
            let may_borrow = !settings.config.strict_affinity && !self.windows && !is_virtual(&self.node);
            if may_borrow && let Some(borrowed) = self.block_to_borrow_from(pools, settings).await? {
                return Ok(borrowed);
            }
            return Err(full(if settings.config.auto_allocate_blocks {
                "every block of its pools belongs to another node, or is reserved; add a pool"
            } else {
                "autoAllocateBlocks is off"
            }));
        }
        Err(IpamError::Contended(Key::global(Kind::BlockAffinity, format!("{}/…", self.node))))
    }

    /// The maximum number of blocks of the node, of each family.
    pub(crate) fn max_blocks(&self, settings: &Settings) -> u32 {
        if is_virtual(&self.node) {
            // The limit is one of hosts.
            return self.most_blocks;
        }
        let of_cluster = match settings.config.max_blocks_per_host {
            0 => DEFAULT_MAX_BLOCKS,
            configured => configured,
        };
        of_cluster.min(self.most_blocks)
    }

    /// The blocks of a family that certainly belong to the node, of any pool.
    pub(crate) async fn confirmed_blocks(&self, family: Family) -> Result<Vec<IpNet>, IpamError> {
        let mut blocks = Vec::new();
        let prefix = format!("{}/", self.node);
        for stored in self.records.store.list(Kind::BlockAffinity).await?.items {
            let Some(Ok(cidr)) = stored.key.name.strip_prefix(&prefix).map(str::parse::<IpNet>) else {
                continue;
            };
            if Family::of(&cidr) != family {
                continue;
            }
            let Ok(affinity) = from_value::<Affinity>(&stored.key, stored.value) else { continue };
            if affinity.deleted || affinity.state != AffinityState::Confirmed {
                continue;
            }
            match self.records.read_block(&Key::global(Kind::IpamBlock, cidr.to_string())).await {
                Ok(Some((_, block))) if block.belongs_to(&self.node) => blocks.push(cidr),
                Ok(_) | Err(IpamError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(blocks)
    }

    /// The node's blocks of a family. Completes claims in one of these pools that a crash left unfinished.
    pub(crate) async fn own_blocks(
        &self,
        family: Family,
        pools: &[(IpNet, u8)],
        settings: &Settings,
    ) -> Result<Own, IpamError> {
        let prefix = format!("{}/", self.node);
        let affinities = self.records.store.list(Kind::BlockAffinity).await?.items;
        let mut reads = Vec::new();
        for stored in &affinities {
            let Some(cidr) = stored.key.name.strip_prefix(&prefix) else { continue };
            // Each family has a limit of its own.
            if cidr.parse::<IpNet>().is_ok_and(|cidr| Family::of(&cidr) != family) {
                continue;
            }
            reads.push(self.own_block(cidr, stored, pools));
        }
        let found: Vec<_> = stream::iter(reads).buffered(READS_AT_ONCE).collect().await;
        let mut own = Own { count: found.len(), ..Own::default() };
        for block in found {
            let block = match block {
                Ok(OwnBlock::Unfinished(cidr)) => self.claim(cidr).await,
                Ok(OwnBlock::Usable(version, block)) => Ok(Some((version, *block))),
                Ok(OwnBlock::OfOtherPool) => Ok(None),
                Err(error) => Err(error),
            };
            match block {
                Ok(Some((version, mut block))) => {
                    settings.config.end_cooldowns(&mut block, Timestamp::now());
                    own.usable.push((version, block));
                }
                Ok(None) => {}
                Err(error @ IpamError::Damaged { .. }) => {
                    tracing::warn!(%error, "a block of this node is damaged; it is not used");
                    own.damaged.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(own)
    }

    /// Reads the block of an affinity.
    async fn own_block(
        &self,
        cidr: &str,
        stored: &Stored,
        pools: &[(IpNet, u8)],
    ) -> Result<OwnBlock, IpamError> {
        let damaged = |problem: String| IpamError::Damaged { key: stored.key.clone(), problem };
        let no_network = |_| damaged(format!("its name says {cidr:?}, which is no network"));
        let cidr: IpNet = cidr.parse().map_err(no_network)?;
        let Some((pool, block_size)) = pools.iter().find(|(pool, _)| pool.contains(&cidr)) else {
            return Ok(OwnBlock::OfOtherPool);
        };
        let affinity: Affinity = from_value(&stored.key, stored.value.clone())?;
        let confirmed = affinity.state == AffinityState::Confirmed && !affinity.deleted;
        let block = self.records.read_block(&Key::global(Kind::IpamBlock, cidr.to_string())).await?;
        if cidr.prefix_len() != *block_size {
            // The pool was recreated with another blockSize.
            if block.is_none() {
                let problem = format!("its size is not the blockSize {block_size} of pool {pool}; delete it");
                return Err(damaged(problem));
            }
            if let Some(other) = self.records.blocks().await?.iter().find(|block| overlaps(block, &cidr)) {
                return Err(damaged(format!("the block {other} has addresses of it; release one of them")));
            }
        }
        Ok(match block {
            Some((version, block)) if confirmed && block.belongs_to(&self.node) => {
                OwnBlock::Usable(version, Box::new(block))
            }
            _ => OwnBlock::Unfinished(cidr),
        })
    }

    /// Claims the block for this node. `None` if another node was faster.
    pub(crate) async fn claim(&self, cidr: IpNet) -> Result<Option<(Version, Block)>, IpamError> {
        let affinity_key = Key::global(Kind::BlockAffinity, format!("{}/{cidr}", self.node));
        let block_key = Key::global(Kind::IpamBlock, cidr.to_string());
        for _ in 0..RETRIES {
            let affinity = self.set_pending(&affinity_key).await?;
            let claimed = match self.claim_block(&block_key, cidr).await? {
                BlockClaim::Claimed(version, block) => (version, *block),
                BlockClaim::Changed => continue,
                BlockClaim::OfAnother => return self.withdraw(&affinity_key, &affinity.0, cidr).await,
            };
            let (version, affinity) = affinity;
            let confirmed = Affinity { state: AffinityState::Confirmed, ..affinity };
            match self
                .records
                .store
                .update(&affinity_key, to_value(&affinity_key, &confirmed)?, &version)
                .await
            {
                Ok(_) => return Ok(Some(claimed)),
                // Somebody releases the affinity, or another process of this node confirms it.
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(affinity_key))
    }

    /// Deletes this version of the affinity to a block of another node.
    async fn withdraw(
        &self,
        affinity: &Key,
        version: &Version,
        cidr: IpNet,
    ) -> Result<Option<(Version, Block)>, IpamError> {
        tracing::info!(block = %cidr, node = self.node, "another node owns the block; this node withdraws its claim");
        match self.records.store.delete(affinity, Some(version)).await {
            // After a conflict, another process of this node claims it.
            Ok(_) | Err(StoreError::NotFound(_) | StoreError::Conflict(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Creates the block of a pending affinity, or writes it if it exists, so that whoever is releasing the block fails.
    async fn claim_block(&self, key: &Key, cidr: IpNet) -> Result<BlockClaim, IpamError> {
        let known = self.records.read_block(key).await?;
        let is_new = known.is_none();
        let (written, block) = match known {
            None => {
                let (nanos, time) = now();
                let fresh = Block::new(cidr, &self.node, self.windows, nanos, time);
                (self.records.store.create(key, to_value(key, &fresh)?).await, fresh)
            }
            Some((_, block)) if !block.belongs_to(&self.node) => return Ok(BlockClaim::OfAnother),
            Some((version, mut block)) => {
                block.bump();
                (self.records.store.update(key, to_value(key, &block)?, &version).await, block)
            }
        };
        let version = match written {
            Ok(stored) => stored.version,
            Err(StoreError::AlreadyExists(_) | StoreError::Conflict(_) | StoreError::NotFound(_)) => {
                return Ok(BlockClaim::Changed);
            }
            Err(error) => return Err(error.into()),
        };
        // Pools that overlap make it possible that two nodes create such blocks at the same time. Each sees the other's,
        // so at most one remains.
        let mut found = self.records.block_names().await?.into_iter().find(|other| overlaps(other, &cidr));
        if found.is_some() {
            // The other one may be on its way out.
            found = self.records.blocks().await?.into_iter().find(|other| overlaps(other, &cidr));
        }
        let Some(other) = found else {
            return Ok(BlockClaim::Claimed(version, Box::new(block)));
        };
        if is_new {
            self.records.store.delete(key, Some(&version)).await?;
        }
        let problem = format!("the block {other} has addresses of it; do its pools overlap?");
        Err(IpamError::Damaged { key: key.clone(), problem })
    }

    /// Writes the node's affinity as pending; returns it with its version.
    async fn set_pending(&self, key: &Key) -> Result<(Version, Affinity), IpamError> {
        for _ in 0..RETRIES {
            let (version, known) = self.records.read::<Affinity>(key).await?.unzip();
            let pending = Affinity { state: AffinityState::Pending, ..known.unwrap_or_default() };
            let value = to_value(key, &pending)?;
            let written = match version {
                None => self.records.store.create(key, value).await,
                Some(version) => self.records.store.update(key, value, &version).await,
            };
            match written {
                Ok(stored) => return Ok((stored.version, pending)),
                Err(StoreError::AlreadyExists(_) | StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key.clone()))
    }

    /// The first range without a block.
    async fn unused_cidr(
        &self,
        pools: &[(IpNet, u8)],
        settings: &Settings,
    ) -> Result<Option<IpNet>, IpamError> {
        let names = self.records.block_names().await?;
        if let Some(unused) = self.first_unused(&names, pools, settings) {
            return Ok(Some(unused));
        }
        // Some of them may be on their way out.
        Ok(self.first_unused(&self.records.blocks().await?, pools, settings))
    }

    /// The first range of these pools without a block. The search starts at a position that depends on the node, so that
    /// nodes rarely collide.
    fn first_unused(&self, used: &[IpNet], pools: &[(IpNet, u8)], settings: &Settings) -> Option<IpNet> {
        let exact: BTreeSet<IpNet> = used.iter().copied().collect();
        for (pool, block_size) in pools {
            let Some(ring) = Ring::new(*pool, *block_size) else { continue };
            let start = u128::from(fnv1(&self.node)) % ring.count;
            let mut passed = 0;
            while passed < ring.count {
                let number = (start + passed) % ring.count;
                let cidr = ring.nth(number);
                if let Some(all) = settings.reserved.iter().find(|net| net.contains(&cidr)) {
                    // A reservation may have more blocks than anybody can walk through.
                    passed += ring.after(all).saturating_sub(number).max(1);
                    continue;
                }
                // Blocks of another size may overlap if a pool was recreated with another blockSize.
                let is_used = exact.contains(&cidr) || used.iter().any(|block| overlaps(block, &cidr));
                if !is_used && has_unreserved(&cidr, &settings.reserved) {
                    return Some(cidr);
                }
                passed += 1;
            }
        }
        None
    }
}

/// The ranges of a pool that can be blocks. An IPv6 pool may have more of them than fit into 64 bits.
struct Ring {
    pool: IpNet,
    block_size: u8,
    count: u128,
}

impl Ring {
    fn new(pool: IpNet, block_size: u8) -> Option<Self> {
        let bits = block_size.checked_sub(pool.prefix_len())?;
        let count = 1_u128.checked_shl(bits.into())?;
        (block_size <= pool.max_prefix_len()).then_some(Self { pool, block_size, count })
    }

    /// The number of the first range after a network; the count if there is none.
    fn after(&self, net: &IpNet) -> u128 {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits(),
        };
        let offset = bits(net.broadcast()).saturating_sub(bits(self.pool.network()));
        ((offset >> (self.pool.max_prefix_len() - self.block_size)) + 1).min(self.count)
    }

    fn nth(&self, number: u128) -> IpNet {
        let offset = number << (self.pool.max_prefix_len() - self.block_size);
        let address = match self.pool.network() {
            IpAddr::V4(first) => {
                let offset = u32::try_from(offset).unwrap_or_default();
                Ipv4Addr::from_bits(first.to_bits().wrapping_add(offset)).into()
            }
            IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits().wrapping_add(offset)).into(),
        };
        IpNet::new(address, self.block_size).unwrap_or(self.pool)
    }
}

/// Whether some address of a block is not reserved.
fn has_unreserved(cidr: &IpNet, reserved: &[IpNet]) -> bool {
    let inside: Vec<IpNet> = reserved.iter().copied().filter(|net| cidr.contains(net)).collect();
    inside.is_empty() || Block::new(*cidr, "", false, 0, String::new()).has_room(&inside)
}

/// Whether two different blocks have an address in common.
pub(crate) fn overlaps(one: &IpNet, other: &IpNet) -> bool {
    one != other && (one.contains(other) || other.contains(one))
}

/// FNV-1, 32 bits.
pub(crate) fn fnv1(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash: u32, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(byte))
}
