//! How a node comes to a block (`calico.md` 5.5): affinity `pending`, the block, affinity `confirmed`.

use std::collections::BTreeSet;

use ipnet::Ipv4Net;
use tortie_api::{Key, Kind};
use tortie_store::{Revision, StoreError};

use crate::block::Block;
use crate::driver::{Ipam, IpamError, RETRIES, now, to_value};
use crate::records::{Affinity, AffinityState};

impl Ipam {
    /// A block of this node with a free address, from one of these pools; a new one is claimed where none has room.
    pub(crate) async fn block_with_room(
        &self,
        pools: &[(Ipv4Net, u8)],
    ) -> Result<(Revision, Block), IpamError> {
        for _ in 0..RETRIES {
            let own = self.own_blocks(pools).await?;
            let blocks = own.len();
            if let Some(found) = own.into_iter().find(|(_, block)| !block.unallocated.is_empty()) {
                return Ok(found);
            }
            let (config, limit) = self.limit().await?;
            let full = |hint| IpamError::Exhausted { node: self.node.clone(), blocks, limit, hint };
            if blocks >= usize::try_from(limit).unwrap_or(usize::MAX) {
                return Err(full(if self.windows {
                    "give the pool a smaller blockSize number (larger blocks), as a Windows node has one block"
                } else {
                    "raise maxBlocksPerHost, or give the pool larger blocks"
                }));
            }
            if !config.auto_allocate_blocks {
                return Err(full("auto_allocate_blocks is off"));
            }
            let Some(cidr) = self.unused_cidr(pools).await? else {
                return Err(full("every block of its pools belongs to another node; add a pool"));
            };
            if let Some(claimed) = self.claim(cidr).await? {
                return Ok(claimed);
            }
        }
        Err(IpamError::Contended(Key::global(Kind::BlockAffinity, format!("{}/…", self.node))))
    }

    /// The node's confirmed blocks that lie in one of these pools. Claims that a crash left half-way are completed.
    pub(crate) async fn own_blocks(
        &self,
        pools: &[(Ipv4Net, u8)],
    ) -> Result<Vec<(Revision, Block)>, IpamError> {
        let prefix = format!("{}/", self.node);
        let mut own = Vec::new();
        for stored in self.store.list(Kind::BlockAffinity).await?.items {
            let Some(cidr) =
                stored.key.name.strip_prefix(&prefix).and_then(|cidr| cidr.parse::<Ipv4Net>().ok())
            else {
                continue;
            };
            if !pools.iter().any(|(pool, _)| pool.contains(&cidr)) {
                continue;
            }
            let confirmed = self
                .read::<Affinity>(&stored.key)
                .await?
                .is_some_and(|(_, affinity)| affinity.state == AffinityState::Confirmed && !affinity.deleted);
            let block = self.read_block(&Key::global(Kind::IpamBlock, cidr.to_string())).await?;
            match block {
                Some((revision, block)) if confirmed && block.belongs_to(&self.node) => {
                    own.push((revision, block))
                }
                _ => own.extend(self.claim(cidr).await?),
            }
        }
        Ok(own)
    }

    /// Makes the block this node's. `None` where another node was faster.
    async fn claim(&self, cidr: Ipv4Net) -> Result<Option<(Revision, Block)>, IpamError> {
        let affinity_key = Key::global(Kind::BlockAffinity, format!("{}/{cidr}", self.node));
        self.set_affinity(&affinity_key, AffinityState::Pending).await?;
        let block_key = Key::global(Kind::IpamBlock, cidr.to_string());
        let (nanos, time) = now();
        let fresh = Block::new(cidr, &self.node, self.windows, nanos, time);
        match self.store.create(&block_key, to_value(&block_key, &fresh)?).await {
            Ok(_) | Err(StoreError::AlreadyExists(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let claimed = match self.read_block(&block_key).await? {
            Some((revision, block)) if block.belongs_to(&self.node) => Some((revision, block)),
            _ => None,
        };
        if claimed.is_some() {
            self.set_affinity(&affinity_key, AffinityState::Confirmed).await?;
        } else {
            tracing::info!(block = %cidr, node = self.node, "another node has the block; its claim is withdrawn");
            match self.store.delete(&affinity_key, None).await {
                Ok(_) | Err(StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(claimed)
    }

    async fn set_affinity(&self, key: &Key, state: AffinityState) -> Result<(), IpamError> {
        for _ in 0..RETRIES {
            let written = match self.read::<Affinity>(key).await? {
                None => {
                    let affinity = Affinity { state, ..Affinity::default() };
                    self.store.create(key, to_value(key, &affinity)?).await
                }
                Some((revision, mut affinity)) => {
                    affinity.state = state;
                    self.store.update(key, to_value(key, &affinity)?, revision).await
                }
            };
            match written {
                Ok(_) => return Ok(()),
                Err(StoreError::AlreadyExists(_) | StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key.clone()))
    }

    /// The first range without a block, from a place in the pool that depends on the node, so that nodes seldom meet.
    async fn unused_cidr(&self, pools: &[(Ipv4Net, u8)]) -> Result<Option<Ipv4Net>, IpamError> {
        let listing = self.store.list(Kind::IpamBlock).await?;
        let used: Vec<Ipv4Net> =
            listing.items.iter().filter_map(|stored| stored.key.name.parse().ok()).collect();
        let exact: BTreeSet<Ipv4Net> = used.iter().copied().collect();
        for (pool, block_size) in pools {
            let Ok(subnets) = pool.subnets(*block_size) else { continue };
            let count = 1_usize << (block_size - pool.prefix_len());
            let start = usize::try_from(fnv1(&self.node)).unwrap_or(0) % count;
            let free = |cidr: &Ipv4Net| {
                // Blocks of another size may overlap: a pool that was made anew with another blockSize.
                !exact.contains(cidr)
                    && !used.iter().any(|block| block.contains(cidr) || cidr.contains(block))
            };
            let ring = subnets.skip(start).chain(subnets.take(start));
            if let Some(cidr) = ring.into_iter().find(free) {
                return Ok(Some(cidr));
            }
        }
        Ok(None)
    }
}

/// FNV-1, 32 bits.
fn fnv1(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash: u32, byte| hash.wrapping_mul(0x0100_0193) ^ u32::from(byte))
}
