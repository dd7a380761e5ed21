//! Whether the new pool has room, and whether the nodes may claim blocks of it.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use tortie_api::calico::IpReservation;
use tortie_api::ipam::Block;
use tortie_api::{Key, Resource};
use tortie_ipam::DEFAULT_MAX_BLOCKS;

use super::observed::{MigratingCluster, Objects, ReadPool, is_kept, pod_of};

/// What the old pool has and the new one must get.
struct Need<'a> {
    new: &'a ReadPool,
    blocks: &'a [Block],
    /// The networks that IPAM does not give. No two overlap.
    reserved: Vec<IpNet>,
    /// The addresses that move, by the owner of blocks that needs them (a node or a virtual one).
    moving: BTreeMap<String, u128>,
    has_begun: bool,
}

/// What speaks against the size of the new pool, and against blocks of it on the nodes.
pub(super) fn room(
    objects: &Objects,
    old: &ReadPool,
    new: &ReadPool,
    blocks: &[Block],
    cluster: &MigratingCluster,
) -> Vec<String> {
    let reserved = match reserved(objects) {
        Ok(reserved) => reserved,
        Err(problem) => return vec![problem],
    };
    let has_begun = cluster.old.as_ref().is_some_and(|old| old.record.is_some());
    let moving = moving(objects, old, blocks, has_begun);
    let need = Need { new, blocks, reserved, moving, has_begun };
    if let Some(problem) = need.addresses(&old.name).or_else(|| need.slots()) {
        return vec![problem];
    }
    need.claims(objects)
}

/// The reserved networks, without overlaps.
fn reserved(objects: &Objects) -> Result<Vec<IpNet>, String> {
    let mut reserved = Vec::new();
    for stored in &objects.reservations {
        match Resource::read(&stored.key, &stored.value) {
            Ok(Resource::IpReservation(IpReservation { spec, .. })) => {
                reserved.extend(spec.reserved_cidrs.into_iter().map(|net| net.0.trunc()));
            }
            _ => {
                return Err(format!(
                    "{} cannot be read, so no node gets an address; correct or delete it",
                    stored.key
                ));
            }
        }
    }
    Ok(IpNet::aggregate(&reserved))
}

/// The addresses of the old pool that move. When a migration has begun, a pod that ends, or is gone, has a successor already.
fn moving(objects: &Objects, old: &ReadPool, blocks: &[Block], has_begun: bool) -> BTreeMap<String, u128> {
    let kept: BTreeSet<&Key> = objects.pods.iter().filter(|pod| is_kept(pod)).map(|pod| &pod.key).collect();
    let mut moving: BTreeMap<String, u128> = BTreeMap::new();
    for block in blocks.iter().filter(|block| old.pool.spec.cidr.contains(&block.cidr)) {
        // Pods of other nodes may come to a node whose block is empty.
        if let Some(node) = block.node().filter(|_| !has_begun) {
            moving.entry(node.to_owned()).or_default();
        }
        for (_, attribute) in block.allocated() {
            let owner = |name: &str| attribute.owner.as_ref().and_then(|it| it.get(name)).map(String::as_str);
            if has_begun && pod_of(attribute).is_some_and(|key| !kept.contains(&key)) {
                continue;
            }
            let claimant = owner("node").or_else(|| block.owner()).unwrap_or_default();
            *moving.entry(claimant.to_owned()).or_default() += 1;
        }
    }
    moving
}

/// The number of values of so many bits.
fn values(bits: u8) -> u128 {
    1_u128.checked_shl(u32::from(bits)).unwrap_or(u128::MAX)
}

impl Need<'_> {
    fn cidr(&self) -> IpNet {
        self.new.pool.spec.cidr
    }

    /// The blocks of the new pool.
    fn taken(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| self.cidr().contains(&block.cidr))
    }

    /// The number of reserved addresses in a network.
    fn reserved_in(&self, net: IpNet) -> u128 {
        let inside = |each: &IpNet| match (net.contains(each), each.contains(&net)) {
            (true, _) => values(each.max_prefix_len() - each.prefix_len()),
            (false, true) => values(net.max_prefix_len() - net.prefix_len()),
            (false, false) => 0,
        };
        self.reserved.iter().map(inside).fold(0, u128::saturating_add)
    }

    fn addresses(&self, old: &str) -> Option<String> {
        let to = self.cidr();
        let used: u128 = self.taken().map(|block| block.allocations.iter().flatten().count() as u128).sum();
        // Nobody got them from IPAM's choice, but they count once only.
        let is_reserved = |address| self.reserved.iter().any(|net| net.contains(&address));
        let both =
            self.taken().flat_map(Block::allocated).filter(|(address, _)| is_reserved(*address)).count();
        let unavailable = self.reserved_in(to).saturating_add(used).saturating_sub(both as u128);
        let free = values(to.max_prefix_len() - to.prefix_len()).saturating_sub(unavailable);
        let needed: u128 = self.moving.values().sum();
        (needed > free).then(|| {
            format!(
                "IPPool {}: spec.cidr: {needed} addresses of {old} are in use, and {to} has {free} free ones{}; use a larger network",
                self.new.name,
                if self.reserved_in(to) > 0 { " outside of IPReservations" } else { "" }
            )
        })
    }

    /// The free addresses in an owner's blocks of the new pool.
    fn free_of(&self, owner: &str) -> u128 {
        let own = self.taken().filter(|block| block.owner() == Some(owner));
        let free =
            |block: &Block| (block.unallocated.len() as u128).saturating_sub(self.reserved_in(block.cidr));
        own.map(free).sum()
    }

    /// How many addresses each new block has. Reservations may take some.
    fn of_block(&self) -> u128 {
        let (size, bits) = (self.new.pool.block_size(), self.cidr().max_prefix_len());
        let mut parts: BTreeMap<IpNet, u128> = BTreeMap::new();
        for net in self.reserved.iter().filter(|net| self.cidr().contains(*net) && net.prefix_len() > size) {
            if let Ok(block) = IpNet::new(net.addr(), size) {
                *parts.entry(block.trunc()).or_default() += values(bits - net.prefix_len());
            }
        }
        let most = parts.values().max().copied().unwrap_or_default();
        values(bits.saturating_sub(size)).saturating_sub(most).max(1)
    }

    /// How many blocks of the new pool an owner needs for so many addresses, besides its own.
    fn more(&self, owner: &str, count: u128) -> u128 {
        count.saturating_sub(self.free_of(owner)).div_ceil(self.of_block())
    }

    /// While nothing has moved, each owner also needs its blocks.
    fn slots(&self) -> Option<String> {
        let (size, to) = (self.new.pool.block_size(), self.cidr());
        if self.has_begun || size < to.prefix_len() {
            return None;
        }
        let whole = |net: &&IpNet| net.prefix_len() <= size && (to.contains(*net) || net.contains(&to));
        let reserved = self.reserved.iter().filter(whole);
        let reserved: u128 = reserved.map(|net| values(size - net.prefix_len().max(to.prefix_len()))).sum();
        let is_open = |block: &&Block| !self.reserved.iter().any(|net| net.contains(&block.cidr));
        let taken = self.taken().filter(is_open).count() as u128;
        let left = values(size - to.prefix_len()).saturating_sub(reserved).saturating_sub(taken);
        let needed: u128 = self.moving.iter().map(|(owner, count)| self.more(owner, *count)).sum();
        (needed > left).then(|| {
            format!(
                "IPPool {}: spec.blockSize: the nodes need {needed} more blocks of /{size}, and {to} has {left}; use a larger network or \
                 smaller blocks",
                self.new.name
            )
        })
    }

    /// Whether nodes may claim the blocks that they need. The blocks of the old pool are theirs to the end.
    fn claims(&self, objects: &Objects) -> Vec<String> {
        let config = &objects.config;
        let limit = match config.max_blocks_per_host {
            0 => DEFAULT_MAX_BLOCKS,
            configured => configured,
        };
        let (name, is_ipv4) = (&self.new.name, self.cidr().addr().is_ipv4());
        let mut found = Vec::new();
        for (owner, count) in &self.moving {
            let more = self.more(owner, (*count).max(1));
            if more > 0 && !config.auto_allocate_blocks {
                found.push(format!(
                    "IPAMConfig default: autoAllocateBlocks: it is false, and {owner} has no block of IPPool {name} with room; set it \
                     to true for the migration"
                ));
                continue;
            }
            let is_own = |stored: &&tortie_store::Stored| {
                let cidr = stored.key.name.strip_prefix(owner.as_str()).and_then(|it| it.strip_prefix('/'));
                cidr.and_then(|it| it.parse::<IpNet>().ok())
                    .is_some_and(|net| net.addr().is_ipv4() == is_ipv4)
            };
            let has = objects.affinities.iter().filter(is_own).count() as u128;
            // The limit is one of nodes.
            let is_node = objects.nodes.iter().any(|node| node.key.name == *owner);
            if is_node && more > 0 && has + more > u128::from(limit) {
                found.push(format!(
                    "IPAMConfig default: maxBlocksPerHost: node {owner} has {has} blocks, those of all pools, and needs {more} more of \
                     IPPool {name}, but the limit is {limit}; raise it (`tortie ipam \
                     configure --max-blocks-per-host`, which needs strict affinity), or give {name} larger blocks"
                ));
            }
        }
        found
    }
}
