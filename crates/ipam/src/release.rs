//! Releasing addresses: all of a handle, some of a block, or all of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::{Attribute, Block};
use tortie_api::{Key, Kind};
use tortie_store::{Stopped, StoreError, Version, Write};

use crate::access::{Records, from_value, to_value};
use crate::affinities::Given;
use crate::driver::{Ipam, now};
use crate::error::{IpamError, RETRIES};
use crate::records::Handle;
use crate::request::{Assignment, Family};

impl Ipam {
    /// The handles of this node's addresses, each with a block and the attributes of an address. An address belongs to the
    /// node that its attributes name, whose block it may be borrowed from, otherwise to the block's. Damaged blocks are
    /// left out.
    ///
    /// # Errors
    /// The store failed.
    pub async fn handles(&self) -> Result<BTreeMap<String, (IpNet, BTreeMap<String, String>)>, IpamError> {
        let mut handles = BTreeMap::new();
        for stored in self.records.store.list(Kind::IpamBlock).await?.items {
            let Ok(block) = from_value::<Block>(&stored.key, stored.value) else { continue };
            if block.deleted || block.check().is_err() {
                continue;
            }
            for (_, attribute) in
                block.allocated().filter(|(_, one)| node_of(&block, one) == Some(&self.node))
            {
                if let (Some(handle), Some(owner)) = (&attribute.handle_id, &attribute.owner) {
                    handles.insert(handle.clone(), (block.cidr, owner.clone()));
                }
            }
        }
        Ok(handles)
    }

    /// Releases the addresses that a handle has in this block, also if the handle has no record any more.
    ///
    /// # Errors
    /// The store failed.
    pub async fn release_in(&self, handle: &str, block: IpNet) -> Result<Vec<IpAddr>, IpamError> {
        self.release_from(&Key::global(Kind::IpamBlock, block.to_string()), handle, &mut None).await
    }

    /// Releases every address of a handle. If it has no record any more, these are its addresses, as far as they are known.
    ///
    /// # Errors
    /// The store failed.
    pub async fn release_with(&self, handle: &str, addresses: &[IpAddr]) -> Result<Vec<IpAddr>, IpamError> {
        let mut released = self.release(handle).await?;
        if released.is_empty() && !addresses.is_empty() {
            let blocks = self.records.blocks().await?;
            for block in blocks.into_iter().filter(|block| addresses.iter().any(|one| block.contains(one))) {
                released.extend(self.release_in(handle, block).await?);
            }
        }
        Ok(released)
    }

    /// The addresses of a handle with their blocks, as they are now: whoever releases them fails if they change meanwhile.
    ///
    /// # Errors
    /// The store failed, or a block cannot be read.
    pub async fn releases(&self, handle: &str) -> Result<Vec<(IpNet, Release)>, IpamError> {
        let mut found = Vec::new();
        let record = self.records.read::<Handle>(&Key::global(Kind::IpamHandle, handle)).await?;
        for cidr in record.iter().flat_map(|(_, record)| record.block.keys()) {
            let Some((_, block)) = self.records.read_block(&Key::global(Kind::IpamBlock, cidr)).await? else {
                continue;
            };
            found.extend(block.addresses_of(handle).map(|address| {
                let handle = Some(handle.to_owned());
                (block.cidr, Release { address, handle, sequence_number: block.sequence_of(address) })
            }));
        }
        Ok(found)
    }

    /// Gives an allocated address a new sequence number, so that whoever has seen the former one cannot release it. Returns
    /// whether the handle still had the address.
    ///
    /// # Errors
    /// The store failed, or the block cannot be read.
    pub async fn renew(&self, handle: &str, one: Assignment) -> Result<bool, IpamError> {
        let key = Key::global(Kind::IpamBlock, one.block.to_string());
        let has_it = |block: &Block| block.addresses_of(handle).any(|address| address == one.address);
        let mut cache = self.side(Family::of(&one.block)).cache.lock().await;
        for _ in 0..RETRIES {
            let cached = cache.take(&one.block).filter(|(_, block)| has_it(block));
            let found = match cached {
                Some(found) => Some(found),
                None => self.records.read_block(&key).await?,
            };
            let Some((version, mut block)) = found.filter(|(_, block)| has_it(block)) else {
                return Ok(false);
            };
            block.renew(one.address, now().0);
            match self.records.store.update(&key, to_value(&key, &block)?, &version).await {
                Ok(stored) => {
                    cache.keep(&self.node, stored.version, block);
                    return Ok(true);
                }
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }

    /// Releases every address of a handle, and returns them. A handle without addresses is no error.
    ///
    /// # Errors
    /// The store failed. A retry continues where the release stopped.
    pub async fn release(&self, handle: &str) -> Result<Vec<IpAddr>, IpamError> {
        let key = Key::global(Kind::IpamHandle, handle);
        let mut released = Vec::new();
        for _ in 0..RETRIES {
            let Some((version, record)) = self.records.read::<Handle>(&key).await? else {
                return Ok(released);
            };
            let mut forget = Some(Write::Delete(key.clone(), Some(version)));
            let blocks = record.block.len();
            for (number, cidr) in record.block.keys().enumerate() {
                // The record is deleted after the last address, so it exists while an address is allocated.
                let last = if number + 1 == blocks { &mut forget } else { &mut None };
                let some = self.release_from(&Key::global(Kind::IpamBlock, cidr), handle, last).await?;
                released.extend(some);
            }
            let Some(forget) = forget else { return Ok(released) };
            match self.records.store.write_all(vec![forget]).await.map_err(|stopped| stopped.error) {
                Ok(_) | Err(StoreError::NotFound(_)) => return Ok(released),
                // An allocator has counted another address meanwhile.
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }

    /// Releases the handle's addresses of one block, and executes `last` with the same request if possible; then it is
    /// `None` afterwards.
    ///
    /// A block without addresses of the handle is written, too: an allocator that has counted the handle and not yet
    /// written the block must fail, because the handle's record is deleted next.
    async fn release_from(
        &self,
        key: &Key,
        handle: &str,
        last: &mut Option<Write>,
    ) -> Result<Vec<IpAddr>, IpamError> {
        // A reservation that cannot be read keeps no address from being released.
        let config = self.recent_config().await?;
        let family = key.name.parse().map_or(Family::V4, |cidr| Family::of(&cidr));
        let mut cache = self.side(family).cache.lock().await;
        for attempt in 0..RETRIES {
            let cached = key.name.parse().ok().and_then(|cidr| cache.take(&cidr));
            // If somebody else has allocated what the cache does not know, the write fails.
            let found = match cached {
                Some(found) => Some(found),
                None => self.records.read_block(key).await?,
            };
            let Some((version, mut block)) = found else { return Ok(Vec::new()) };
            let released = block.release(handle, config.resting_since(Timestamp::now()).as_deref());
            if released.is_empty() {
                block.bump();
            }
            let write = write_or_delete(key, &block, version)?;
            // Only once: it may be what was refused, and some stores refuse both writes then.
            let together = last.clone().filter(|_| attempt == 0);
            let is_together = together.is_some();
            let written =
                self.records.store.write_all(std::iter::once(write).chain(together).collect()).await;
            let (done, refusal) = match written {
                Ok(done) => (done, None),
                Err(Stopped { done, error }) => (done, Some(error)),
            };
            if let Some(written) = done.first() {
                cache.keep(&self.node, written.version.clone(), block);
            }
            match (done.is_empty(), refusal) {
                (_, None) => {
                    last.take_if(|_| is_together);
                    return Ok(released);
                }
                (true, Some(StoreError::NotFound(gone))) if gone == *key => return Ok(Vec::new()),
                (true, Some(StoreError::Conflict(_) | StoreError::NotFound(_))) => {}
                // The record has changed, or is gone; the caller reads it again.
                (false, Some(StoreError::NotFound(_) | StoreError::Conflict(_))) => return Ok(released),
                (_, Some(error)) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key.clone()))
    }
}

/// The node of an address.
pub(crate) fn node_of<'a>(block: &'a Block, attribute: &'a Attribute) -> Option<&'a str> {
    let named = attribute.owner.as_ref().and_then(|owner| owner.get("node"));
    named.map(String::as_str).or_else(|| block.node())
}

/// The write of a changed block. One without addresses and without owner is deleted, as Calico does.
fn write_or_delete(key: &Key, block: &Block, version: Version) -> Result<Write, IpamError> {
    if block.affinity.is_none() && block.is_empty() {
        return Ok(Write::Delete(key.clone(), Some(version)));
    }
    Ok(Write::Update(key.clone(), to_value(key, block)?, version))
}

/// An address to release, if it still is what the caller has seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// The address.
    pub address: IpAddr,
    /// Its handle; `None` releases it whatever its handle is.
    pub handle: Option<String>,
    /// The sequence number of its allocation; `None` releases it whatever that is.
    pub sequence_number: Option<u64>,
}

impl Release {
    fn check(&self, block: &Block) -> Result<(), IpamError> {
        let changed = |problem: String| Err(IpamError::Changed { address: self.address, problem });
        let Some((_, attribute)) = block.allocated().find(|(address, _)| *address == self.address) else {
            return Ok(());
        };
        if self.handle.is_some() && self.handle != attribute.handle_id {
            return changed(format!("it belongs to the handle {:?} now", attribute.handle_id));
        }
        let number = block.sequence_of(self.address);
        match self.sequence_number {
            Some(expected) if number != Some(expected) => {
                changed(format!("its sequence number is {number:?}, not {expected}"))
            }
            _ => Ok(()),
        }
    }
}

/// What belonged to a node and was released.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleared {
    /// The addresses.
    pub addresses: Vec<IpAddr>,
    /// The blocks. Those with addresses of other nodes stay, without owner.
    pub blocks: Vec<IpNet>,
}

impl Records {
    /// Releases some addresses of a block together, and returns those that were allocated.
    ///
    /// # Errors
    /// [`IpamError::Changed`] if one of them is not what the caller has seen; then nothing is released. The store failed,
    /// or the block cannot be read.
    pub async fn release_addresses(
        &self,
        block: IpNet,
        releases: &[Release],
    ) -> Result<Vec<IpAddr>, IpamError> {
        let key = Key::global(Kind::IpamBlock, block.to_string());
        let config = self.config().await?;
        let addresses: Vec<IpAddr> = releases.iter().map(|release| release.address).collect();
        for _ in 0..RETRIES {
            let Some((version, mut block)) = self.read_block(&key).await? else { return Ok(Vec::new()) };
            releases.iter().try_for_each(|release| release.check(&block))?;
            let of_these = block.allocated().filter(|(address, _)| addresses.contains(address));
            let handles: BTreeSet<String> =
                of_these.filter_map(|(_, attribute)| attribute.handle_id.clone()).collect();
            // An allocator that counts a handle from now on changes the record's version.
            let mut records = Vec::new();
            for handle in handles {
                let record = self.read::<Handle>(&Key::global(Kind::IpamHandle, &handle)).await?;
                records.push((handle, record));
            }
            let since = config.resting_since(Timestamp::now());
            let released = block.release_addresses(&addresses, since.as_deref());
            if released.is_empty() {
                return Ok(released);
            }
            let write = write_or_delete(&key, &block, version)?;
            match self.store.write_all(vec![write]).await.map_err(|stopped| stopped.error) {
                Ok(_) => {}
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => continue,
                Err(error) => return Err(error.into()),
            }
            for (handle, record) in records {
                let is_left = block.addresses_of(&handle).next().is_some();
                match record {
                    Some(record) if !is_left => self.forget_with(&handle, &key, Some(record)).await?,
                    Some(_) => drop(self.lower_count(&handle, &key).await?),
                    None => {}
                }
            }
            return Ok(released);
        }
        Err(IpamError::Contended(key))
    }

    /// Removes a block without addresses of the handle from its record, which is deleted with the last one. `known` is
    /// the record from before the block was last written.
    pub(crate) async fn forget_with(
        &self,
        handle: &str,
        block: &Key,
        mut known: Option<(Version, Handle)>,
    ) -> Result<(), IpamError> {
        let key = Key::global(Kind::IpamHandle, handle);
        for _ in 0..RETRIES {
            let (version, mut record) = match known.take() {
                Some(known) => known,
                None => match self.fence(handle, &key, block).await? {
                    Some(known) => known,
                    None => return Ok(()),
                },
            };
            record.block.remove(&block.name);
            let written = if record.block.is_empty() {
                self.store.delete(&key, Some(&version)).await.map(|_| ())
            } else {
                self.store.update(&key, to_value(&key, &record)?, &version).await.map(|_| ())
            };
            match written {
                Ok(()) | Err(StoreError::NotFound(_)) => return Ok(()),
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }

    /// Takes an address of a block that was counted and not allocated off the record of its handle, which is deleted with the last one.
    ///
    /// By one only, as Calico's client does it: another address above the number of allocated ones may be that of a client that has
    /// released it and not lowered the count yet.
    ///
    /// # Errors
    /// The store failed, or the block cannot be read.
    pub(crate) async fn settle(&self, handle: &str, block_key: &Key) -> Result<(), IpamError> {
        let key = Key::global(Kind::IpamHandle, handle);
        for _ in 0..RETRIES {
            let Some((version, mut record)) = self.read::<Handle>(&key).await? else { return Ok(()) };
            let Some(count) = record.block.get(&block_key.name).copied() else { return Ok(()) };
            if let Some((block_version, mut block)) = self.read_block(block_key).await? {
                let has = u64::try_from(block.addresses_of(handle).count()).unwrap_or(u64::MAX);
                if count <= has {
                    return Ok(());
                }
                // An allocator that has counted the handle, and not yet written the block, must fail.
                block.bump();
                match self.store.update(block_key, to_value(block_key, &block)?, &block_version).await {
                    Ok(_) => {}
                    Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => continue,
                    Err(error) => return Err(error.into()),
                }
            }
            match count.saturating_sub(1) {
                0 => record.block.remove(&block_key.name),
                left => record.block.insert(block_key.name.clone(), left),
            };
            let written = if record.block.is_empty() {
                self.store.delete(&key, Some(&version)).await.map(drop)
            } else {
                self.store.update(&key, to_value(&key, &record)?, &version).await.map(drop)
            };
            match written {
                Ok(()) | Err(StoreError::NotFound(_)) => return Ok(()),
                Err(StoreError::Conflict(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }

    /// Lowers the number of addresses of a block in the record of a handle to those that the handle has, unless there are none. Returns whether
    /// it was too high.
    ///
    /// # Errors
    /// The store failed, or the block cannot be read.
    pub(crate) async fn lower_count(&self, handle: &str, block_key: &Key) -> Result<bool, IpamError> {
        let key = Key::global(Kind::IpamHandle, handle);
        for _ in 0..RETRIES {
            // An allocator that counts the handle from now on changes the record's version.
            let Some((version, mut record)) = self.read::<Handle>(&key).await? else { return Ok(false) };
            let Some((block_version, mut block)) = self.read_block(block_key).await? else {
                return Ok(false);
            };
            let has = u64::try_from(block.addresses_of(handle).count()).unwrap_or(u64::MAX);
            let Some(count) = record.block.get_mut(&block_key.name).filter(|count| **count > has && has > 0)
            else {
                return Ok(false);
            };
            *count = has;
            // One that has counted it before, and not yet written the block, must fail.
            block.bump();
            match self.store.update(block_key, to_value(block_key, &block)?, &block_version).await {
                Ok(_) => {}
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => continue,
                Err(error) => return Err(error.into()),
            }
            match self.store.update(&key, to_value(&key, &record)?, &version).await {
                Ok(_) => return Ok(true),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }

    /// Reads a record and then writes its block, so that an allocator that has counted the handle fails. `None` if the
    /// handle has addresses of the block, or its record does not name the block.
    async fn fence(
        &self,
        handle: &str,
        key: &Key,
        block_key: &Key,
    ) -> Result<Option<(Version, Handle)>, IpamError> {
        for _ in 0..RETRIES {
            let Some((version, record)) = self.read::<Handle>(key).await? else { return Ok(None) };
            if !record.block.contains_key(&block_key.name) {
                return Ok(None);
            }
            let Some((block_version, mut block)) = self.read_block(block_key).await? else {
                return Ok(Some((version, record)));
            };
            if block.addresses_of(handle).next().is_some() {
                return Ok(None);
            }
            block.bump();
            match self.store.update(block_key, to_value(block_key, &block)?, &block_version).await {
                Ok(_) => return Ok(Some((version, record))),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(block_key.clone()))
    }

    /// Releases everything of a node that has left the cluster: its addresses, also borrowed ones, and its blocks. The
    /// caller must know that the node is gone. Addresses that other nodes have borrowed stay.
    ///
    /// # Errors
    /// The store failed, or a block that may belong to the node cannot be read. A retry continues.
    pub async fn release_node(&self, node: &str) -> Result<Cleared, IpamError> {
        let mut cleared = Cleared::default();
        let mut damaged = None;
        for stored in self.store.list(Kind::IpamBlock).await?.items {
            let block: Block = match from_value(&stored.key, stored.value) {
                Ok(block) => block,
                Err(error) => {
                    damaged = Some(error);
                    continue;
                }
            };
            let of_node = block.allocated().filter(|(_, attribute)| node_of(&block, attribute) == Some(node));
            let releases: Vec<Release> = of_node
                .map(|(address, attribute)| Release {
                    address,
                    handle: attribute.handle_id.clone(),
                    sequence_number: block.sequence_of(address),
                })
                .collect();
            if !releases.is_empty() {
                match self.release_addresses(block.cidr, &releases).await {
                    Ok(released) => cleared.addresses.extend(released),
                    Err(error @ IpamError::Damaged { .. }) => damaged = Some(error),
                    Err(error) => return Err(error),
                }
            }
        }
        for cidr in self.blocks_of(node).await? {
            match self.give_up_block(node, cidr, false, None).await {
                Ok(Given::Up) => cleared.blocks.push(cidr),
                Ok(Given::InUse | Given::Changed) => {}
                Err(error @ IpamError::Damaged { .. }) => damaged = Some(error),
                Err(error) => return Err(error),
            }
        }
        damaged.map_or(Ok(cleared), Err)
    }

    /// The blocks that belong to a node, by their own record or by an affinity.
    async fn blocks_of(&self, node: &str) -> Result<BTreeSet<IpNet>, IpamError> {
        let prefix = format!("{node}/");
        let affinities = self.store.list(Kind::BlockAffinity).await?.items;
        let named =
            affinities.iter().filter_map(|stored| stored.key.name.strip_prefix(&prefix)?.parse().ok());
        let mut blocks: BTreeSet<IpNet> = named.collect();
        for stored in self.store.list(Kind::IpamBlock).await?.items {
            if stored.value["affinity"].as_str() == Some(&format!("host:{node}")) {
                blocks.extend(stored.key.name.parse::<IpNet>().ok());
            }
        }
        Ok(blocks)
    }
}
