//! A store in memory that checks the rules of IPAM with every write, and clients that are slow and die.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::StreamExt;
use serde_json::Value;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_ipam::Handle;
use tortie_store::{
    Follow, Interest, Page, PageToken, Stopped, Store, StoreError, Stored, Version, Write, Written,
};

/// A sequence that looks random, and is the same for the same seed.
pub(crate) struct Dice(AtomicU64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1))
    }

    pub(crate) fn below(&self, limit: u64) -> u64 {
        let mut state = self.0.load(Ordering::Relaxed);
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.0.store(state, Ordering::Relaxed);
        (state >> 11) % limit
    }
}

#[derive(Default)]
struct Objects {
    stored: BTreeMap<Key, (Value, u64)>,
    written: u64,
    /// The addresses that allocators have answered, until their release begins.
    held: BTreeMap<IpAddr, String>,
}

/// The objects.
#[derive(Default)]
pub(crate) struct Memory(Mutex<Objects>);

impl Memory {
    /// Records that an allocator has answered this address.
    pub(crate) fn take(&self, address: IpAddr, handle: &str) {
        let other = self.0.lock().unwrap().held.insert(address, handle.to_owned());
        assert!(other.as_deref().is_none_or(|other| other == handle), "{address}: {other:?} and {handle}");
    }

    /// Records that somebody begins to release this handle.
    pub(crate) fn give_back(&self, handle: &str) {
        self.0.lock().unwrap().held.retain(|_, holder| holder != handle);
    }

    /// Every allocated address and its handle.
    pub(crate) fn allocated(&self) -> BTreeMap<IpAddr, String> {
        let mut all = BTreeMap::new();
        let objects = self.0.lock().unwrap();
        for (_, (value, _)) in objects.stored.iter().filter(|(key, _)| key.kind == Kind::IpamBlock) {
            for (address, handle) in allocations(&serde_json::from_value(value.clone()).unwrap()) {
                assert_eq!(all.insert(address, handle), None, "{address} is allocated in two blocks");
            }
        }
        all
    }

    /// The addresses of all blocks.
    pub(crate) fn blocks(&self) -> Vec<ipnet::IpNet> {
        let objects = self.0.lock().unwrap();
        let blocks = objects.stored.keys().filter(|key| key.kind == Kind::IpamBlock);
        blocks.map(|key| key.name.parse().unwrap()).collect()
    }

    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.0.lock().unwrap().stored.keys().filter(|key| key.kind == kind).count()
    }

    /// Executes all writes or none.
    fn execute_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, StoreError> {
        let before = self.0.lock().unwrap().stored.clone();
        let written: Result<_, _> = writes.into_iter().map(|write| self.execute(write)).collect();
        if written.is_err() {
            self.0.lock().unwrap().stored = before;
        }
        written
    }

    fn execute(&self, write: Write) -> Result<Written, StoreError> {
        let mut objects = self.0.lock().unwrap();
        let key = write.key().clone();
        let known = objects.stored.get(&key).map(|(_, version)| *version);
        let expected = |version: &Version| version.as_str().parse() == Ok(known.unwrap_or_default());
        match (&write, known) {
            (Write::Create(..), Some(_)) => return Err(StoreError::AlreadyExists(key)),
            (Write::Update(..) | Write::Delete(..), None) => return Err(StoreError::NotFound(key)),
            (Write::Update(_, _, version) | Write::Delete(_, Some(version)), _) if !expected(version) => {
                return Err(StoreError::Conflict(key));
            }
            _ => {}
        }
        objects.written += 1;
        let written = objects.written;
        let value = match write {
            Write::Create(_, mut value) | Write::Update(_, mut value, _) => {
                // Blocks count as old, so that other nodes may take them over.
                value
                    .as_object_mut()
                    .into_iter()
                    .for_each(|fields| drop(fields.remove("affinity_claim_time")));
                objects.stored.insert(key.clone(), (value.clone(), written));
                Some(value)
            }
            Write::Delete(..) => {
                objects.stored.remove(&key);
                None
            }
        };
        objects.check(&key, value.as_ref());
        Ok(Written { version: version(written), position: Position(written) })
    }
}

impl Objects {
    /// The rules that hold after every write.
    fn check(&self, key: &Key, value: Option<&Value>) {
        match key.kind {
            Kind::IpamBlock => self.check_block(&key.name, value),
            Kind::IpamHandle if value.is_none() => {
                for (_, (value, _)) in self.stored.iter().filter(|(key, _)| key.kind == Kind::IpamBlock) {
                    let block: Block = serde_json::from_value(value.clone()).unwrap();
                    let held = block.addresses_of(&key.name).next();
                    assert_eq!(held, None, "the record of {} is deleted before its address", key.name);
                }
            }
            _ => {}
        }
    }

    fn check_block(&self, cidr: &str, value: Option<&Value>) {
        let block: Option<Block> = value.map(|value| serde_json::from_value(value.clone()).unwrap());
        let now: BTreeMap<IpAddr, String> = block.iter().flat_map(allocations).collect();
        for (address, handle) in &now {
            let record = self.stored.get(&Key::global(Kind::IpamHandle, handle));
            let record: Option<Handle> =
                record.map(|(value, _)| serde_json::from_value(value.clone()).unwrap());
            let is_counted = record.is_some_and(|record| record.block.contains_key(cidr));
            assert!(is_counted, "{address} is allocated to {handle}, whose record does not name {cidr}");
        }
        if let Some(block) = &block {
            block.check().unwrap();
        }
        let net: ipnet::IpNet = cidr.parse().unwrap();
        for (address, holder) in self.held.iter().filter(|(address, _)| net.contains(*address)) {
            assert_eq!(now.get(address), Some(holder), "{holder} has {address}, and nobody has released it");
        }
    }
}

fn allocations(block: &Block) -> Vec<(IpAddr, String)> {
    let allocated = block.allocated();
    allocated.map(|(address, attribute)| (address, attribute.handle_id.clone().unwrap())).collect()
}

fn version(number: u64) -> Version {
    Version::new(&number.to_string())
}

#[async_trait]
impl Store for Memory {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        let objects = self.0.lock().unwrap();
        Ok(objects.stored.get(key).map(|(value, written)| stored(key, value, *written)))
    }

    async fn list_page(&self, interest: &Interest, _: Option<PageToken>) -> Result<Page, StoreError> {
        let objects = self.0.lock().unwrap();
        let items = objects.stored.iter().filter(|(key, (value, _))| interest.covers(key, value));
        let items = items.map(|(key, (value, written))| stored(key, value, *written)).collect();
        Ok(Page { items, position: Position(objects.written), next: None })
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        let written = self.execute(Write::Create(key.clone(), value.clone()))?;
        Ok(stored(key, &value, written.position.0))
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        let written = self.execute(Write::Update(key.clone(), value.clone(), expected.clone()))?;
        Ok(stored(key, &value, written.position.0))
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        Ok(self.execute(Write::Delete(key.clone(), expected.cloned()))?.position)
    }

    fn follow(&self, _: Vec<Interest>) -> Follow {
        futures::stream::pending().boxed()
    }

    async fn barrier(&self, _: &[Kind]) -> Result<Positions, StoreError> {
        Ok(Positions::default())
    }
}

fn stored(key: &Key, value: &Value, written: u64) -> Stored {
    Stored { key: key.clone(), value: value.clone(), version: version(written), position: Position(written) }
}

/// A client whose requests take time, and which dies at some write: before it, or after it and before its answer.
pub(crate) struct Client {
    memory: Arc<Memory>,
    dice: Arc<Dice>,
    writes_left: AtomicU64,
    /// Whether writes that are given together are executed together or not at all, as in etcd.
    transactions: bool,
}

impl Client {
    pub(crate) fn new(memory: Arc<Memory>, dice: Arc<Dice>, writes_left: u64, transactions: bool) -> Self {
        Self { memory, dice, writes_left: AtomicU64::new(writes_left), transactions }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.writes_left.load(Ordering::Relaxed) == 0
    }

    async fn wait(&self) -> Result<(), StoreError> {
        for _ in 0..self.dice.below(4) {
            tokio::task::yield_now().await;
        }
        if self.is_dead() { Err(dead()) } else { Ok(()) }
    }

    async fn write<T>(&self, write: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.wait().await?;
        let left = self.writes_left.load(Ordering::Relaxed) - 1;
        self.writes_left.store(left, Ordering::Relaxed);
        if left > 0 {
            return write.await;
        }
        if self.dice.below(2) == 0 {
            let _ = write.await; // the answer is lost
        }
        Err(dead())
    }
}

fn dead() -> StoreError {
    StoreError::Unavailable("the caller died".to_owned())
}

#[async_trait]
impl Store for Client {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.wait().await?;
        self.memory.get(key).await
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        self.wait().await?;
        self.memory.list_page(interest, after).await
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.write(self.memory.create(key, value)).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.write(self.memory.update(key, value, expected)).await
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        self.write(self.memory.delete(key, expected)).await
    }

    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        let mut done = Vec::new();
        if self.transactions {
            let all = self.write(async { self.memory.execute_all(writes) }).await;
            return all.map_err(|error| Stopped { done: Vec::new(), error });
        }
        for write in writes {
            match self.write(async { self.memory.execute(write) }).await {
                Ok(written) => done.push(written),
                Err(error) => return Err(Stopped { done, error }),
            }
        }
        Ok(done)
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        self.memory.follow(interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        self.memory.barrier(kinds).await
    }
}
