//! IPAM over a store.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net};
use jiff::Timestamp;
use tokio::sync::Mutex;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_store::{Store, StoreError, Version, Write};

use crate::access::{Records, to_value};
use crate::error::{IpamError, RETRIES};
use crate::records::{Config, Handle};
use crate::request::{Assignment, Count, Family, Request, Use};
use crate::settings::Settings;
use crate::waiting::{Waiter, Waiting};

/// How long pools are cached: a disabled pool gives addresses no longer than this.
const POOLS_FRESH: Duration = Duration::from_secs(5);

/// The block that gave the last address, and the requests that pools allow it for.
#[derive(Default)]
pub(crate) struct AtHand {
    pub(crate) block: Option<(Version, Block)>,
    checked: Option<Checked>,
}

/// That the pools, when last read, allowed a block for this kind of request.
struct Checked {
    intended_use: Use,
    namespace_labels: BTreeMap<String, String>,
    block: IpNet,
    settings: Arc<Settings>,
    at: Instant,
}

impl Checked {
    fn now(request: &Request, block: IpNet, settings: Arc<Settings>) -> Self {
        let (intended_use, namespace_labels) = (request.intended_use, request.namespace_labels.clone());
        Self { intended_use, namespace_labels, block, settings, at: Instant::now() }
    }
}

impl AtHand {
    /// Keeps a block of the node. Addresses of other nodes' blocks are borrowed one at a time.
    pub(crate) fn keep(&mut self, node: &str, version: Version, block: Block) {
        self.block = Some((version, block)).filter(|(_, block)| block.belongs_to(node));
    }

    /// The addresses that may not be given.
    fn reserved(&self) -> Vec<IpNet> {
        self.checked.as_ref().map(|checked| checked.settings.reserved.clone()).unwrap_or_default()
    }

    /// Whether the request may use the current block, without reading the pools again.
    fn serves(&self, request: &Request) -> bool {
        let (Some((_, block)), Some(checked)) = (&self.block, &self.checked) else { return false };
        checked.block == block.cidr
            && checked.intended_use == request.intended_use
            && checked.namespace_labels == request.namespace_labels
            && checked.at.elapsed() < POOLS_FRESH
    }
}

/// The addresses of one node.
pub struct Ipam {
    pub(crate) records: Records,
    pub(crate) node: String,
    pub(crate) windows: bool,
    pub(crate) node_labels: BTreeMap<String, String>,
    v4: Side,
    v6: Side,
    /// The settings of the cluster that releases need, and when they were read.
    config: std::sync::Mutex<Option<(Instant, Config)>>,
}

/// The allocation of one family.
#[derive(Default)]
pub(crate) struct Side {
    /// The block that gave the last address, so that the next one costs one write and no read.
    pub(crate) current: Mutex<AtHand>,
    /// Requests that wait for the block, which are served together.
    waiting: Waiting,
}

impl Ipam {
    /// For a node with these labels; a Windows node reserves addresses and has one block.
    pub fn new(
        store: Arc<dyn Store>,
        node: impl Into<String>,
        node_labels: BTreeMap<String, String>,
    ) -> Self {
        let windows = node_labels.get("kubernetes.io/os").is_some_and(|os| os == "windows");
        let (records, v4, v6) = (Records::new(store), Side::default(), Side::default());
        Self { records, node: node.into(), windows, node_labels, v4, v6, config: std::sync::Mutex::default() }
    }

    pub(crate) fn side(&self, family: Family) -> &Side {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Allocates an address. The handle is counted first, so that releasing it frees everything, whatever happens
    /// next. Requests that arrive while another one is served are then served together by one write of the block.
    ///
    /// # Errors
    /// No address is available, or the store failed. Releasing the handle frees whatever was allocated.
    pub async fn assign(&self, request: &Request) -> Result<Assignment, IpamError> {
        let side = self.side(request.family);
        loop {
            let mut answer = side.waiting.join(request);
            let mut current = side.current.lock().await;
            if let Some(answer) = answer.take() {
                return answer;
            }
            // Nobody has served this request together with another one. (If somebody did and was cancelled, it joins
            // again.)
            let together = side.waiting.take_all();
            let alone = self.assign_together(together, &mut current).await;
            for waiter in alone {
                let answer = self.assign_alone(&waiter.request, 1, &mut current).await;
                waiter.answer(answer);
            }
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
            let mut current = self.side(family).current.lock().await;
            for enough in 1..=wanted {
                self.assign_alone(&request, enough, &mut current).await?;
            }
        }
        self.find(&request.handle).await
    }

    /// Serves requests from the current block, and returns those that it cannot serve.
    async fn assign_together(&self, waiters: Vec<Waiter>, current: &mut AtHand) -> Vec<Waiter> {
        let (waiters, mut alone): (Vec<_>, Vec<_>) =
            waiters.into_iter().partition(|waiter| current.serves(&waiter.request));
        let Some((version, block)) = current.block.take_if(|_| !waiters.is_empty()) else { return alone };
        let reserved = current.reserved();
        let mut changed = block.clone();
        let mut served = Vec::new();
        for waiter in waiters {
            match changed.assign(&waiter.request.handle, &waiter.request.owner, &reserved) {
                Some(address) => served.push((waiter, address)),
                None => alone.push(waiter),
            }
        }
        let cidr = block.cidr;
        let written = self.write_together(&served, &changed, version.clone()).await;
        match written {
            Ok(version) => {
                current.block = Some((version, changed));
                for (waiter, address) in served {
                    waiter.answer(Ok(Assignment { address, block: cidr }));
                }
                return alone;
            }
            // The handle may have an address already, so each request is served separately.
            Err(IpamError::Store(StoreError::AlreadyExists(_))) => current.block = Some((version, block)),
            Err(IpamError::Store(StoreError::Conflict(_) | StoreError::NotFound(_))) => {}
            Err(error) => {
                served.into_iter().for_each(|(waiter, _)| waiter.answer(Err(error.clone())));
                return alone;
            }
        }
        served.into_iter().map(|(waiter, _)| waiter).chain(alone).collect()
    }

    /// Writes the handles and then the block.
    async fn write_together(
        &self,
        served: &[(Waiter, IpAddr)],
        block: &Block,
        version: Version,
    ) -> Result<Version, IpamError> {
        if served.is_empty() {
            return Ok(version);
        }
        let cidr = block.cidr.to_string();
        let mut writes = Vec::with_capacity(served.len() + 1);
        for (waiter, _) in served {
            let key = Key::global(Kind::IpamHandle, &waiter.request.handle);
            let handle = Handle { block: BTreeMap::from([(cidr.clone(), 1)]), ..Handle::default() };
            writes.push(Write::Create(key.clone(), to_value(&key, &handle)?));
        }
        let key = Key::global(Kind::IpamBlock, cidr);
        writes.push(Write::Update(key.clone(), to_value(&key, block)?, version.clone()));
        let written = self.records.store.write_all(writes).await.map_err(|stopped| stopped.error)?;
        Ok(written.into_iter().last().map_or(version, |written| written.version))
    }

    /// Serves one request from any block that the node has or can claim. The handle then has at least `enough`
    /// addresses of the family; returns the last one.
    async fn assign_alone(
        &self,
        request: &Request,
        enough: usize,
        current: &mut AtHand,
    ) -> Result<Assignment, IpamError> {
        if current.serves(request)
            && let Some((version, block)) = current.block.take()
            && let Some(known) = self.assign_from(version, block, request, enough, current).await?
        {
            return Ok(known);
        }
        let family = request.family;
        // Before a block is claimed for what the handle has already.
        let mut known = self.find(&request.handle).await?;
        known.retain(|known| Family::of(&known.block) == family);
        if let Some(last) = known.pop().filter(|_| known.len() + 1 >= enough) {
            return Ok(last);
        }
        let pools = self.pools(request.intended_use, family, Some(&request.namespace_labels)).await?;
        let settings = self.current_settings().await?;
        for _ in 0..RETRIES {
            let (version, block) = self.block_with_room(family, &pools, &settings).await?;
            current.checked = Some(Checked::now(request, block.cidr, settings.clone()));
            if let Some(assignment) = self.assign_from(version, block, request, enough, current).await? {
                return Ok(assignment);
            }
        }
        Err(IpamError::Contended(Key::global(Kind::IpamBlock, format!("(any block of {})", self.node))))
    }

    /// The node's first IPv4 block, which is claimed if necessary. A Windows node's network is created from it. The future
    /// pods are unknown, so pools for certain namespaces count, too, after those for all namespaces.
    ///
    /// # Errors
    /// No block is available, or the store failed.
    pub async fn ensure_block(&self) -> Result<Ipv4Net, IpamError> {
        // The network exists already, so a pool that was disabled since does not matter.
        if let Some(block) = self.confirmed_block().await? {
            return Ok(block);
        }
        let pools = self.pools(Use::Workload, Family::V4, None).await?;
        let settings = self.current_settings().await?;
        let usable = self.own_blocks(Family::V4, &pools, &settings).await?.usable.into_iter().next();
        let (_, block) = match usable {
            Some(known) => known,
            None => self.block_with_room(Family::V4, &pools, &settings).await?,
        };
        match block.cidr {
            IpNet::V4(cidr) => Ok(cidr),
            IpNet::V6(_) => Err(IpamError::NoPool(format!("node {}", self.node))),
        }
    }

    /// The settings, which are read now.
    async fn current_settings(&self) -> Result<Arc<Settings>, IpamError> {
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
        version: Version,
        mut block: Block,
        request: &Request,
        enough: usize,
        current: &mut AtHand,
    ) -> Result<Option<Assignment>, IpamError> {
        let cidr = block.cidr;
        let key = Key::global(Kind::IpamBlock, cidr.to_string());
        if let Some(known) = self.count_handle(request, enough, &cidr.to_string()).await? {
            current.keep(&self.node, version, block);
            return Ok(Some(known));
        }
        let reserved = current.reserved();
        let Some(address) = block.assign(&request.handle, &request.owner, &reserved) else { return Ok(None) };
        match self.records.store.update(&key, to_value(&key, &block)?, &version).await {
            Ok(stored) => {
                current.keep(&self.node, stored.version, block);
                Ok(Some(Assignment { address, block: cidr }))
            }
            Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Records that the handle has, or will have, an address of the block. If it already has enough of the family, in
    /// any blocks, returns the last of these.
    async fn count_handle(
        &self,
        request: &Request,
        enough: usize,
        cidr: &str,
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
            // Changed even if the block is there already: whoever is deleting the record must see that it is in use again.
            *handle.block.entry(cidr.to_owned()).or_default() += 1;
            match self.records.store.update(&key, to_value(&key, &handle)?, &version).await {
                Ok(_) => return Ok(None),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(IpamError::Contended(key))
    }
}

/// Now, in nanoseconds since 1970 and as RFC 3339.
pub(crate) fn now() -> (u64, String) {
    let now = Timestamp::now();
    (u64::try_from(now.as_nanosecond()).unwrap_or(0), now.to_string())
}
