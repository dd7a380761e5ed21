//! Requests that wait for the node's blocks are served together: one write of a block gives addresses to many of them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use jiff::Timestamp;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_store::{StoreError, Unfinished, Version, Write};

use crate::block_cache::BlockCache;
use crate::driver::Ipam;
use crate::error::IpamError;
use crate::records::Handle;
use crate::request::{Assignment, Request};
use crate::waiting::Waiter;

/// How many requests one write serves at most, because etcd limits the size of a transaction.
const MOST_SHARED: usize = 100;

impl Ipam {
    /// Answers all of these requests: as many as possible with each write of a cached block. Otherwise one of them
    /// reads or claims a block, which is then cached for the others.
    pub(crate) async fn serve(&self, mut waiters: Vec<Waiter>, cache: &mut BlockCache) {
        while !waiters.is_empty() {
            let mut alone = self.serve_some(&mut waiters, cache).await;
            let is_cached = |waiter: &Waiter| cache.block_for(&waiter.request).is_some();
            if alone.is_empty() && !waiters.is_empty() && !waiters.iter().any(is_cached) {
                alone.push(waiters.remove(0));
            }
            for waiter in alone {
                let answer = self.assign_alone(&waiter.request, 1, cache).await;
                waiter.answer(answer);
            }
        }
    }

    /// Serves requests from one cached block, and takes them out. Returns those that must be served separately.
    async fn serve_some(&self, waiters: &mut Vec<Waiter>, cache: &mut BlockCache) -> Vec<Waiter> {
        let first = waiters.iter().find_map(|waiter| cache.block_for(&waiter.request));
        let Some((version, block)) = first.and_then(|cidr| cache.take(&cidr)) else { return Vec::new() };
        let mut changed = block.clone();
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
            Ok(version) => {
                cache.keep_using(&self.node, version, changed);
                for (waiter, address) in served {
                    waiter.answer(Ok(Assignment { address, block: block.cidr }));
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
        alone
    }

    /// Gives an address of the block to a request, if it may have one.
    fn address_for(&self, request: &Request, block: &mut Block, cache: &BlockCache) -> Option<IpAddr> {
        let settings = cache.settings_for(request, &block.cidr)?;
        if !block.has_room(&settings.reserved) {
            settings.config.end_cooldowns(block, Timestamp::now());
        }
        block.assign(&request.handle, &request.owner, &settings.reserved)
    }

    /// Writes the handles and then the block.
    async fn write_together(
        &self,
        served: &[(Waiter, IpAddr)],
        block: &Block,
        version: Version,
    ) -> Result<Version, Unfinished> {
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
        Ok(self.records.store.write_before(handles, write).await?.version)
    }
}
