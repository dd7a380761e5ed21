//! The node's blocks as this process has last read or written them, so that an address costs one write and no read.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::Block;
use tortie_store::Version;

use crate::criteria::{Criteria, Pools};
use crate::request::Request;
use crate::settings::Settings;

/// How long pools and settings are cached: a disabled pool gives addresses no longer than this.
pub const POOLS_FRESH: Duration = Duration::from_secs(5);

/// Blocks of the node, and what requests may have addresses of them.
#[derive(Default)]
pub(crate) struct BlockCache {
    blocks: BTreeMap<IpNet, (Version, Block)>,
    /// The block that gave the last address. It is used first, so that addresses of other blocks rest longer.
    last: Option<IpNet>,
    allowed: Vec<Allowed>,
}

/// The pools that a kind of request may use, when they were last read.
struct Allowed {
    criteria: Criteria,
    pools: Pools,
    settings: Arc<Settings>,
    at: Instant,
}

impl BlockCache {
    /// Keeps a block if it belongs to the node. Addresses of other nodes' blocks are borrowed one at a time.
    pub(crate) fn keep(&mut self, node: &str, version: Version, block: Block) {
        if block.belongs_to(node) {
            self.blocks.insert(block.cidr, (version, block));
        }
    }

    /// Keeps a block that has given an address.
    pub(crate) fn keep_using(&mut self, node: &str, version: Version, block: Block) {
        self.last = Some(block.cidr);
        self.keep(node, version, block);
    }

    /// Replaces what is known of the node's blocks of these pools.
    pub(crate) fn replace(&mut self, pools: &[(IpNet, u8)], blocks: &[(Version, Block)]) {
        self.blocks.retain(|cidr, _| !pools.iter().any(|(pool, _)| pool.contains(cidr)));
        self.blocks
            .extend(blocks.iter().map(|(version, block)| (block.cidr, (version.clone(), block.clone()))));
    }

    /// Takes a block out: whoever writes it keeps it again afterwards.
    pub(crate) fn take(&mut self, cidr: &IpNet) -> Option<(Version, Block)> {
        self.blocks.remove(cidr)
    }

    /// Takes note of the pools of such requests, which were read just now.
    pub(crate) fn allow(&mut self, criteria: Criteria, pools: Pools, settings: Arc<Settings>) {
        self.allowed.retain(|known| known.is_fresh() && known.criteria != criteria);
        self.allowed.push(Allowed { criteria, pools, settings, at: Instant::now() });
    }

    /// A block with room for this request, without reading anything.
    pub(crate) fn block_for(&self, request: &Request) -> Option<IpNet> {
        let allowed = self.allowed(request)?;
        let has_room = |cidr: &&IpNet| {
            allowed.contains(cidr)
                && self.blocks.get(*cidr).is_some_and(|(_, block)| {
                    block.has_room(&allowed.settings.reserved) || allowed.has_rested(block)
                })
        };
        self.last.iter().chain(self.blocks.keys()).find(has_room).copied()
    }

    /// The settings, if the request may have addresses of this block.
    pub(crate) fn settings_for(&self, request: &Request, cidr: &IpNet) -> Option<Arc<Settings>> {
        self.allowed(request).filter(|allowed| allowed.contains(cidr)).map(|allowed| allowed.settings.clone())
    }

    fn allowed(&self, request: &Request) -> Option<&Allowed> {
        let mut known = self.allowed.iter().filter(|known| known.is_fresh());
        known.find(|known| known.criteria.are_of(request))
    }
}

impl Allowed {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < POOLS_FRESH
    }

    fn contains(&self, cidr: &IpNet) -> bool {
        self.pools.iter().any(|(pool, _)| pool.contains(cidr))
    }

    /// Whether the block has room as soon as the rests that are over end.
    fn has_rested(&self, block: &Block) -> bool {
        let mut rested = block.clone();
        self.settings.config.end_cooldowns(&mut rested, Timestamp::now());
        rested.has_room(&self.settings.reserved)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A pool may have been disabled since, or an address reserved.
    #[test]
    fn what_was_read_long_ago_is_read_again() {
        let (mut cache, request) = (BlockCache::default(), Request::default());
        let cidr: IpNet = "10.0.0.0/30".parse().unwrap();
        cache.keep("n", Version::new("1"), Block::new(cidr, "n", false, 1, String::new()));
        cache.allow(Criteria::of(&request), vec![(cidr, 30)], Arc::default());
        assert_eq!(cache.block_for(&request), Some(cidr));
        assert!(cache.settings_for(&request, &cidr).is_some());
        cache.allow(Criteria::of(&request), Vec::new(), Arc::default());
        assert_eq!(cache.block_for(&request), None, "what was read last counts");
        cache.allow(Criteria::of(&request), vec![(cidr, 30)], Arc::default());
        assert_eq!(cache.block_for(&request), Some(cidr));
        cache.allowed[0].at = Instant::now().checked_sub(POOLS_FRESH).unwrap();
        assert_eq!(cache.block_for(&request), None);
        assert!(cache.settings_for(&request, &cidr).is_none());
    }
}
