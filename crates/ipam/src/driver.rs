//! IPAM over a store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiff::Timestamp;
use tokio::sync::Mutex;
use tortie_api::ipam::{Block, LOAD_BALANCERS, is_virtual};
use tortie_api::kubernetes::Node;
use tortie_api::{Key, Kind, Position};
use tortie_store::{Store, StoreError, Version};

use crate::access::{Records, to_value};
use crate::block_cache::{BlockCache, POOLS_FRESH};
use crate::criteria::Criteria;
use crate::error::{IpamError, RETRIES};
use crate::records::{Config, Handle};
use crate::request::{Assignment, Count, Family, FollowUp, Request};
use crate::settings::Settings;
use crate::waiting::Waiting;

pub(crate) type Labels = BTreeMap<String, String>;

/// The operating system of a Windows node, as its label has it.
pub(crate) const WINDOWS: &str = "windows";

/// The addresses of one node, or of Services of type LoadBalancer.
pub struct Ipam {
    pub(crate) records: Records,
    /// The owner of its blocks: the name of the node, or [`LOAD_BALANCERS`].
    pub(crate) node: String,
    pub(crate) windows: bool,
    /// How many blocks of each family its network can have.
    pub(crate) most_blocks: u32,
    /// The labels of the node, as they were last read.
    pub(crate) node_labels: std::sync::Mutex<Labels>,
    v4: Side,
    v6: Side,
    /// The settings of the cluster that releases need, and when they were read.
    config: std::sync::Mutex<Option<(Instant, Config)>>,
    /// When the cluster had no IPv6 pool.
    pub(crate) without_ipv6: std::sync::Mutex<Option<Instant>>,
}

/// The allocation of one family.
#[derive(Default)]
pub(crate) struct Side {
    pub(crate) cache: Mutex<BlockCache>,
    /// Requests that wait for the blocks, which are served together.
    waiting: Waiting,
}

impl Ipam {
    /// For a node with these labels. Those of its Node count as they are when pools are chosen; these count while it has no Node. A Windows
    /// node stays one. It reserves addresses, and has one block unless [`Ipam::with_most_blocks`] says otherwise.
    pub fn new(store: Arc<dyn Store>, node: impl Into<String>, node_labels: Labels) -> Self {
        let windows = node_labels.get(Node::OS).is_some_and(|os| os == WINDOWS);
        Self {
            records: Records::new(store),
            node: node.into(),
            windows,
            most_blocks: if windows { 1 } else { u32::MAX },
            node_labels: std::sync::Mutex::new(node_labels),
            v4: Side::default(),
            v6: Side::default(),
            config: std::sync::Mutex::default(),
            without_ipv6: std::sync::Mutex::default(),
        }
    }

    /// For Services of type LoadBalancer. Their addresses belong to no node.
    pub fn of_load_balancers(store: Arc<dyn Store>) -> Self {
        Self::new(store, LOAD_BALANCERS, BTreeMap::new())
    }

    /// The node's network can have this many blocks.
    #[must_use]
    pub fn with_most_blocks(self, most_blocks: u32) -> Self {
        Self { most_blocks, ..self }
    }

    /// Whether the node's network can have one block of each family only.
    #[must_use]
    pub fn has_one_block(&self) -> bool {
        self.most_blocks == 1
    }

    /// Who asks for addresses.
    pub(crate) fn in_words(&self) -> String {
        if is_virtual(&self.node) { "load balancers".to_owned() } else { format!("node {}", self.node) }
    }

    pub(crate) fn side(&self, family: Family) -> &Side {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Allocates an address. The handle is counted first, so that releasing it frees everything, whatever happens
    /// next. Requests that arrive while others are served are then served together, by one write of a block.
    ///
    /// # Errors
    /// No address is available, or the store failed. Releasing the handle frees whatever was allocated.
    pub async fn assign(&self, request: &Request) -> Result<Assignment, IpamError> {
        Ok(self.assign_and_write(request, None).await?.0)
    }

    /// Allocates an address, and executes a write that depends on it. Returns the position of that write, or `None` if it
    /// was not executed, which the caller then does: together with an allocation it costs a datastore with transactions no
    /// further flush, but the allocation does not depend on it.
    ///
    /// # Errors
    /// As [`assign`](Self::assign). The write was not executed, or the store's answer is lost.
    pub async fn assign_and_write(
        &self,
        request: &Request,
        follow_up: Option<FollowUp>,
    ) -> Result<(Assignment, Option<Position>), IpamError> {
        let side = self.side(request.family);
        loop {
            let mut answer = side.waiting.join(request, follow_up.clone());
            let mut cache = side.cache.lock().await;
            if let Some(answer) = answer.take() {
                return answer;
            }
            // Nobody has served this request together with another one. (If somebody did and was cancelled, it joins
            // again.)
            self.serve(side.waiting.take_all(), &mut cache).await;
            if let Some(answer) = answer.take() {
                return answer;
            }
        }
    }

    /// Allocates addresses until the handle has as many of each family as it needs, and returns all of them: IPv4 first.
    /// The family of the request does not matter.
    ///
    /// # Errors
    /// Some of the addresses are not available, or the store failed. Releasing the handle frees whatever was allocated.
    pub async fn assign_all(&self, request: &Request, count: Count) -> Result<Vec<Assignment>, IpamError> {
        for (family, wanted) in [(Family::V4, count.ipv4), (Family::V6, count.ipv6)] {
            let request = Request { family, ..request.clone() };
            let mut cache = self.side(family).cache.lock().await;
            for enough in 1..=wanted {
                self.assign_alone(&request, enough, &mut cache, None).await?;
            }
        }
        self.find(&request.handle).await
    }

    /// Serves one request from any block that the node has or can claim. The handle then has at least `enough`
    /// addresses of the family; returns the last one. `counted` is a block of which an earlier attempt may have counted an address.
    pub(crate) async fn assign_alone(
        &self,
        request: &Request,
        enough: usize,
        cache: &mut BlockCache,
        counted: Option<IpNet>,
    ) -> Result<Assignment, IpamError> {
        let mut counted: BTreeSet<IpNet> = counted.into_iter().collect();
        let assigned = self.assign_from_any(request, enough, cache, &mut counted).await;
        for block in counted {
            let key = Key::global(Kind::IpamBlock, block.to_string());
            // The address is given. A count that is too high is what `tortie ipam check` finds and repairs.
            if let Err(error) = self.records.settle(&request.handle, &key).await {
                tracing::debug!(%error, handle = request.handle, "the record of the handle counts an address too many");
            }
        }
        assigned
    }

    /// Like [`assign_alone`](Self::assign_alone). Leaves the blocks of which the record of the handle may count an address too many.
    async fn assign_from_any(
        &self,
        request: &Request,
        enough: usize,
        cache: &mut BlockCache,
        counted: &mut BTreeSet<IpNet>,
    ) -> Result<Assignment, IpamError> {
        if let Some(cidr) = cache.block_for(request)
            && let Some(settings) = cache.settings_for(request, &cidr)
            && let Some(block) = cache.take(&cidr)
            && let Some(known) = self.assign_from(block, request, enough, &settings, cache, counted).await?
        {
            return Ok(known);
        }
        // Before a block is claimed for what the handle has already.
        let mut known = self.find_of(request).await?;
        if let Some(last) = known.pop().filter(|_| known.len() + 1 >= enough) {
            return Ok(last);
        }
        let criteria = Criteria::of(request);
        let pools = self.pools(request.family, &criteria).await?;
        let settings = self.current_settings().await?;
        cache.allow(criteria, pools.clone(), settings.clone());
        for _ in 0..RETRIES {
            let block = self.block_with_room(request.family, &pools, &settings, cache).await?;
            let assigned = self.assign_from(block, request, enough, &settings, cache, counted).await?;
            if let Some(assignment) = assigned {
                return Ok(assignment);
            }
        }
        Err(IpamError::Contended(Key::global(Kind::IpamBlock, format!("(any block of {})", self.node))))
    }

    /// The node's IPv4 blocks; without one, it claims one. A Windows node's network is created from them.
    ///
    /// # Errors
    /// No block is available, or the store failed.
    pub async fn ensure_blocks(&self) -> Result<Vec<Ipv4Net>, IpamError> {
        let blocks = self.ensure_blocks_of(Family::V4).await?.into_iter();
        Ok(blocks.filter_map(|cidr| if let IpNet::V4(cidr) = cidr { Some(cidr) } else { None }).collect())
    }

    /// The node's first IPv6 block; without one, it claims one if an IPv6 pool is for its pods.
    ///
    /// # Errors
    /// The pools have no block for it, or the store failed.
    pub async fn ensure_ipv6_block(&self) -> Result<Option<Ipv6Net>, IpamError> {
        let blocks = match self.ensure_blocks_of(Family::V6).await {
            Err(IpamError::NoPool(_)) => Vec::new(),
            blocks => blocks?,
        };
        Ok(first_ipv6(blocks))
    }

    /// The node's first IPv6 block, if it has one.
    ///
    /// # Errors
    /// The store failed.
    pub async fn ipv6_block(&self) -> Result<Option<Ipv6Net>, IpamError> {
        Ok(first_ipv6(self.confirmed_blocks(Family::V6).await?))
    }

    /// Whether an IPv6 pool is for pods of the node.
    ///
    /// # Errors
    /// The store failed.
    pub async fn has_ipv6_pool(&self) -> Result<bool, IpamError> {
        match self.pools(Family::V6, &Criteria::of_future_pods()).await {
            Err(IpamError::NoPool(_)) => Ok(false),
            pools => pools.map(|_| true),
        }
    }

    /// The node's blocks of a family; without one, it claims one. The future pods are unknown, so pools for certain namespaces
    /// count, too, after those for all namespaces.
    async fn ensure_blocks_of(&self, family: Family) -> Result<Vec<IpNet>, IpamError> {
        // The network exists already, so a pool that was disabled since does not matter.
        let confirmed = self.confirmed_blocks(family).await?;
        if !confirmed.is_empty() {
            return Ok(confirmed);
        }
        let pools = self.pools(family, &Criteria::of_future_pods()).await?;
        let settings = self.current_settings().await?;
        let usable = self.own_blocks(family, &pools, &settings).await?.usable.into_iter().next();
        let (_, block) = match usable {
            Some(known) => known,
            None => self.block_with_room(family, &pools, &settings, &mut BlockCache::default()).await?,
        };
        Ok(vec![block.cidr])
    }

    /// The settings, which are read now.
    pub(crate) async fn current_settings(&self) -> Result<Arc<Settings>, IpamError> {
        let settings = Arc::new(self.records.settings().await?);
        if self.windows && !settings.config.strict_affinity {
            return Err(IpamError::StrictAffinityNeeded);
        }
        self.keep(&settings.config);
        Ok(settings)
    }

    /// The part of the settings that releases need, which was read a moment ago.
    pub(crate) async fn recent_config(&self) -> Result<Config, IpamError> {
        let known = self.config.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, config)) = known.filter(|(read, _)| read.elapsed() < POOLS_FRESH) {
            return Ok(config);
        }
        let config = self.records.config().await?;
        self.keep(&config);
        Ok(config)
    }

    fn keep(&self, config: &Config) {
        let mut known = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some((Instant::now(), config.clone()));
    }

    /// The addresses of a handle, IPv4 first.
    ///
    /// # Errors
    /// The store failed.
    pub async fn find(&self, handle: &str) -> Result<Vec<Assignment>, IpamError> {
        let Some((_, record)) = self.records.read::<Handle>(&Key::global(Kind::IpamHandle, handle)).await?
        else {
            return Ok(Vec::new());
        };
        let mut found = self.addresses(handle, &record).await?;
        found.sort_by_key(|assignment| (assignment.address, assignment.block));
        Ok(found)
    }

    /// The addresses of the request's family that its handle has already.
    pub(crate) async fn find_of(&self, request: &Request) -> Result<Vec<Assignment>, IpamError> {
        let mut known = self.find(&request.handle).await?;
        known.retain(|known| Family::of(&known.block) == request.family);
        Ok(known)
    }

    /// The addresses that a handle has in the blocks of its record.
    async fn addresses(&self, handle: &str, record: &Handle) -> Result<Vec<Assignment>, IpamError> {
        let mut found = Vec::new();
        for cidr in record.block.keys() {
            if let Some((_, block)) = self.records.read_block(&Key::global(Kind::IpamBlock, cidr)).await? {
                let all = block.addresses_of(handle);
                found.extend(all.map(|address| Assignment { address, block: block.cidr }));
            }
        }
        Ok(found)
    }

    /// Allocates an address from this block, or finds that the handle already has enough. `None` if the block is
    /// full or was changed by somebody else.
    async fn assign_from(
        &self,
        (version, mut block): (Version, Block),
        request: &Request,
        enough: usize,
        settings: &Settings,
        cache: &mut BlockCache,
        counted: &mut BTreeSet<IpNet>,
    ) -> Result<Option<Assignment>, IpamError> {
        let cidr = block.cidr;
        let key = Key::global(Kind::IpamBlock, cidr.to_string());
        let before = block.clone();
        settings.config.end_cooldowns(&mut block, Timestamp::now());
        // First in memory: of a full block, nothing is counted.
        let assigned = block.assign(&request.handle, &request.owner, &settings.reserved);
        let Some(address) = assigned else { return Ok(None) };
        let is_counted = counted.contains(&cidr);
        if let Some(known) = self.count_handle(request, enough, &cidr.to_string(), is_counted).await? {
            cache.keep(&self.node, version, before);
            return Ok(Some(known));
        }
        counted.insert(cidr);
        match self.records.store.update(&key, to_value(&key, &block)?, &version).await {
            Ok(stored) => {
                counted.remove(&cidr);
                cache.keep_using(&self.node, stored.version, block);
                Ok(Some(Assignment { address, block: cidr }))
            }
            Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Records that the handle has, or will have, another address of the block. If it already has enough of the family, in
    /// any blocks, returns the last of these. An attempt that has counted the address already does not count it again. Any other
    /// adds one, as Calico's client does: a count above the number of addresses may be that of a client that has released one and has
    /// not lowered the count yet.
    pub(crate) async fn count_handle(
        &self,
        request: &Request,
        enough: usize,
        cidr: &str,
        is_counted: bool,
    ) -> Result<Option<Assignment>, IpamError> {
        let key = Key::global(Kind::IpamHandle, &request.handle);
        let new = Handle { block: BTreeMap::from([(cidr.to_owned(), 1)]), ..Handle::default() };
        for _ in 0..RETRIES {
            match self.records.store.create(&key, to_value(&key, &new)?).await {
                Ok(_) => return Ok(None),
                Err(StoreError::AlreadyExists(_)) => {}
                Err(error) => return Err(error.into()),
            }
            // Somebody may release the handle just now.
            let Some((version, mut handle)) = self.records.read::<Handle>(&key).await? else { continue };
            let mut known = self.addresses(&request.handle, &handle).await?;
            known.retain(|known| Family::of(&known.block) == request.family);
            if known.len() >= enough {
                return Ok(known.pop());
            }
            let has = known.iter().filter(|known| known.block.to_string() == cidr).count();
            let count = handle.block.entry(cidr.to_owned()).or_default();
            let least = u64::try_from(has).unwrap_or(u64::MAX).saturating_add(1);
            *count = if is_counted { (*count).max(least) } else { count.saturating_add(1).max(least) };
            // Written even if nothing differs: whoever is deleting the record must see that it is in use again.
            match self.records.store.update(&key, to_value(&key, &handle)?, &version).await {
                Ok(_) => return Ok(None),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }
}

fn first_ipv6(blocks: Vec<IpNet>) -> Option<Ipv6Net> {
    blocks.into_iter().find_map(|block| match block {
        IpNet::V6(block) => Some(block),
        IpNet::V4(_) => None,
    })
}

/// Now, in nanoseconds since 1970 and as RFC 3339.
pub(crate) fn now() -> (u64, String) {
    let now = Timestamp::now();
    (u64::try_from(now.as_nanosecond()).unwrap_or(0), now.to_string())
}
