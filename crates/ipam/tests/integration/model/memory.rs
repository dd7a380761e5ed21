//! A store in memory that checks the rules of IPAM with every write.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use futures::StreamExt;
use serde_json::Value;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_ipam::Handle;
use tortie_store::{Follow, Interest, Page, PageToken, Store, StoreError, Stored, Version, Write, Written};

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

/// The time of a release that is long ago.
const LONG_AGO: &str = "2020-01-01T00:00:00Z";

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

    /// The addresses that somebody has been given and nobody has begun to release, with their handles.
    pub(crate) fn held(&self) -> BTreeMap<IpAddr, String> {
        self.0.lock().unwrap().held.clone()
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
    pub(crate) fn execute_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, StoreError> {
        let before = self.0.lock().unwrap().stored.clone();
        let written: Result<_, _> = writes.into_iter().map(|write| self.execute(write)).collect();
        if written.is_err() {
            self.0.lock().unwrap().stored = before;
        }
        written
    }

    pub(crate) fn execute(&self, write: Write) -> Result<Written, StoreError> {
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
                if key.kind == Kind::IpamBlock {
                    let before = objects.stored.get(&key).map(|(value, _)| value.clone());
                    check_rests(before.as_ref(), &value);
                    make_older(&mut value, written);
                }
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

/// An address that rests stays so until its time is over.
fn check_rests(before: Option<&Value>, after: &Value) {
    let block = |value: &Value| serde_json::from_value::<Block>(value.clone()).unwrap();
    let Some(before) = before.filter(|value| value["attributes"].to_string().contains("releasedAt")) else {
        return;
    };
    let (before, after) = (block(before), block(after));
    for address in resting(&before) {
        let now = after.attribute_of(address);
        let rests = now.is_some_and(|attribute| attribute.released_at.is_some());
        assert!(rests, "{address} rests, and is now {now:?}");
    }
}

/// The addresses of a block that were released a moment ago.
fn resting(block: &Block) -> Vec<IpAddr> {
    let is_resting = |address: &IpAddr| {
        let released = block.attribute_of(*address).and_then(|attribute| attribute.released_at.as_deref());
        released.is_some_and(|released| released != LONG_AGO)
    };
    block.cidr.hosts().chain([block.cidr.network(), block.cidr.broadcast()]).filter(is_resting).collect()
}

/// Blocks count as old, so that other nodes may take them over. Most rests are over at the next write.
fn make_older(block: &mut Value, written: u64) {
    if let Some(fields) = block.as_object_mut() {
        fields.remove("affinity_claim_time");
    }
    for attribute in block["attributes"].as_array_mut().into_iter().flatten() {
        if attribute["releasedAt"].is_string() && !written.is_multiple_of(4) {
            attribute["releasedAt"] = LONG_AGO.into();
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
