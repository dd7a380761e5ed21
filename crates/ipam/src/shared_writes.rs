//! Requests that wait for the node's blocks are served together: one write of a block gives addresses to many of them,
//! and what follows the allocations is written with it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use jiff::Timestamp;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position};
use tortie_store::{Stopped, StoreError, Unfinished, Version, Write, size_of_value};

use crate::block_cache::BlockCache;
use crate::driver::Ipam;
use crate::error::IpamError;
use crate::records::Handle;
use crate::request::{Assignment, Request};
use crate::waiting::Waiter;

/// How many requests one write serves at most: etcd takes 128 operations in a transaction, and each request may have a handle
/// and a follow-up.
const MOST_SHARED: usize = 63;

/// How much memory the value of a follow-up write takes at most, in bytes: etcd rejects transactions of 1.5 MiB, and a large
/// value must not make the allocations of others fail.
const MAX_FOLLOW_UP: usize = 12 << 10;

impl Ipam {
    /// Answers all of these requests: as many as possible with each write of a cached block. Otherwise one of them
    /// reads or claims a block, which is then cached for the others.
    pub(crate) async fn serve(&self, mut waiters: Vec<Waiter>, cache: &mut BlockCache) {
        while !waiters.is_empty() {
            let mut alone = self.serve_some(&mut waiters, cache).await;
            let is_cached = |waiter: &Waiter| cache.block_for(&waiter.request).is_some();
            if alone.is_empty() && !waiters.is_empty() && !waiters.iter().any(is_cached) {
                alone.push((waiters.remove(0), None));
            }
            for (waiter, counted) in alone {
                let answer = self.assign_alone(&waiter.request, 1, cache, counted).await;
                waiter.answer(answer.map(|assignment| (assignment, None)));
            }
        }
    }

    /// Serves requests from one cached block, and takes them out. Returns those that must be served separately, each with the block of which
    /// its handle's record may count an address.
    async fn serve_some(
        &self,
        waiters: &mut Vec<Waiter>,
        cache: &mut BlockCache,
    ) -> Vec<(Waiter, Option<IpNet>)> {
        let first = waiters.iter().find_map(|waiter| cache.block_for(&waiter.request));
        let Some((version, block)) = first.and_then(|cidr| cache.take(&cidr)) else { return Vec::new() };
        let (cidr, mut changed) = (block.cidr, block.clone());
        let (mut served, mut left): (Vec<(Waiter, IpAddr)>, Vec<Waiter>) = Default::default();
        let mut handles = BTreeSet::new();
        for waiter in std::mem::take(waiters) {
            // Each handle has one record: a repeated request finds the address that the first one got.
            let is_next = served.len() < MOST_SHARED && handles.insert(waiter.request.handle.clone());
            let address = is_next.then(|| self.address_for(&waiter.request, &mut changed, cache)).flatten();
            match address {
                Some(address) => served.push((waiter, address)),
                None => left.push(waiter),
            }
        }
        *waiters = left;
        if served.is_empty() {
            return Vec::new();
        }
        let Unfinished { tried, error } = match self.write_together(&served, &changed, version.clone()).await
        {
            Ok((version, followed)) => {
                cache.keep_using(&self.node, version, changed);
                for ((waiter, address), position) in served.into_iter().zip(followed) {
                    waiter.answer(Ok((Assignment { address, block: block.cidr }, position)));
                }
                return Vec::new();
            }
            Err(unfinished) => unfinished,
        };
        match error {
            StoreError::AlreadyExists(_) => cache.keep(&self.node, version, block),
            // Somebody else has changed the block, so it is read again.
            StoreError::Conflict(_) | StoreError::NotFound(_) => {}
            error => {
                let error = IpamError::from(error);
                served.into_iter().for_each(|(waiter, _)| waiter.answer(Err(error.clone())));
                return Vec::new();
            }
        }
        // Handles that have a record may have an address already.
        let mut alone: Vec<Waiter> = served.into_iter().map(|(waiter, _)| waiter).collect();
        waiters.extend(alone.split_off(tried.min(alone.len())));
        alone.into_iter().map(|waiter| (waiter, Some(cidr))).collect()
    }

    /// Gives an address of the block to a request, if it may have one.
    fn address_for(&self, request: &Request, block: &mut Block, cache: &BlockCache) -> Option<IpAddr> {
        let settings = cache.settings_for(request, &block.cidr)?;
        if !block.has_room(&settings.reserved) {
            settings.config.end_cooldowns(block, Timestamp::now());
        }
        block.assign(&request.handle, &request.owner, &settings.reserved)
    }

    /// Writes the handles and then the block, and then what follows the allocations. Returns the block's version, and the
    /// positions of what follows each allocation, as far as it was executed.
    async fn write_together(
        &self,
        served: &[(Waiter, IpAddr)],
        block: &Block,
        version: Version,
    ) -> Result<(Version, Vec<Option<Position>>), Unfinished> {
        let cidr = block.cidr.to_string();
        let mut handles = Vec::with_capacity(served.len());
        let damaged =
            |error: serde_json::Error| Unfinished { tried: 0, error: StoreError::Damaged(error.to_string()) };
        for (waiter, _) in served {
            let key = Key::global(Kind::IpamHandle, &waiter.request.handle);
            let handle = Handle { block: BTreeMap::from([(cidr.clone(), 1)]), ..Handle::default() };
            handles.push(Write::Create(key, serde_json::to_value(&handle).map_err(damaged)?));
        }
        let key = Key::global(Kind::IpamBlock, cidr);
        let write = Write::Update(key, serde_json::to_value(block).map_err(damaged)?, version);
        let follow_ups: Vec<Option<Write>> = served
            .iter()
            .map(|(waiter, address)| {
                let assignment = Assignment { address: *address, block: block.cidr };
                waiter.follow_up.as_ref().and_then(|follow_up| follow_up(assignment)).filter(is_small)
            })
            .collect();
        if follow_ups.iter().all(Option::is_none) {
            let written = self.records.store.write_before(handles, write).await?;
            return Ok((written.version, vec![None; served.len()]));
        }
        let count = handles.len();
        let follows: Vec<bool> = follow_ups.iter().map(Option::is_some).collect();
        let writes = handles.into_iter().chain([write]).chain(follow_ups.into_iter().flatten()).collect();
        let done = match self.records.store.write_all(writes).await {
            Ok(done) => done,
            // The block is written, so the addresses are given.
            Err(Stopped { done, .. }) if done.len() > count => done,
            Err(stopped) => return Err(stopped.before(count)),
        };
        let mut done = done.into_iter().skip(count);
        let block = done.next().ok_or_else(|| {
            let error = StoreError::Damaged("a write has no result".to_owned());
            Unfinished { tried: count, error }
        })?;
        let positions = follows.into_iter().map(|follows| follows.then(|| done.next()).flatten());
        Ok((block.version, positions.map(|written| written.map(|it| it.position)).collect()))
    }
}

fn is_small(write: &Write) -> bool {
    match write {
        Write::Create(_, value) | Write::Update(_, value, _) => size_of_value(value) <= MAX_FOLLOW_UP,
        Write::Delete(..) => true,
    }
}
