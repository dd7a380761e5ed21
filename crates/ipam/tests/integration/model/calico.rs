//! Calico's client beside Tortie's allocators, on the same nodes, blocks and handles.
//!
//! The client does the writes of `libcalico-go/lib/ipam/ipam.go` (v3.32) in their order. It shares no code with the
//! allocators except for the form of a block.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ipnet::IpNet;
use serde_json::{Value, json};
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_ipam::{Count, Ipam, IpamError};
use tortie_store::{Store, StoreError, Stored};

use crate::common::{ipam, request};
use crate::model::client::Client;
use crate::model::memory::{Dice, Memory};
use crate::model::{cluster, runs};

/// `datastoreRetries`.
const RETRIES: usize = 100;
const NODES: [&str; 2] = ["a", "b"];
/// Releases are of one of so many newest handles, so that several writers have the same one at a time.
const NEWEST: u64 = 8;

/// The handles so far. Each names a container, so that it is allocated for once, and released by anybody, also several times and while
/// it is allocated. (If a handle were used again, Calico's client could take off a count that is another writer's: it lowers a record
/// without looking at the block.)
struct Handles<'a> {
    made: &'a AtomicU64,
    dice: &'a Dice,
}

impl Handles<'_> {
    fn new_one(&self) -> String {
        format!("handle.{}", self.made.fetch_add(1, Ordering::Relaxed))
    }

    fn used(&self) -> String {
        let made = self.made.load(Ordering::Relaxed);
        format!("handle.{}", made.saturating_sub(1 + self.dice.below(NEWEST)))
    }
}

/// How often each operation was done.
#[derive(Debug, Default)]
struct Counts {
    assigned_by_tortie: AtomicUsize,
    released_by_tortie: AtomicUsize,
    /// Requests that Tortie gave up after a hundred attempts, because sixteen writers without any pause were faster each time.
    contended: AtomicUsize,
    assigned_by_calico: AtomicUsize,
    released_by_calico: AtomicUsize,
    /// Writes of Calico's client that failed because somebody else had written.
    conflicts: AtomicUsize,
}

fn count(counter: &AtomicUsize, number: usize) {
    counter.fetch_add(number, Ordering::Relaxed);
}

/// Calico's client on one node.
struct Calico<'a> {
    store: Client,
    node: &'static str,
    counts: &'a Counts,
}

impl Calico<'_> {
    /// Allocates addresses (`assignFromExistingBlock`): the record counts them before the block has them.
    async fn assign(&self, handle: &str, number: usize) {
        for stored in self.store.list(Kind::IpamBlock).await.unwrap().items {
            let mut newest = Some(stored);
            while let Some(stored) = newest {
                let mut block = block(&stored.value);
                if block.node() != Some(self.node) {
                    break;
                }
                let owner = request(self.node, handle).owner;
                let given = (0..number).map_while(|_| block.assign(handle, &owner, &[])).count();
                if given == 0 {
                    break;
                }
                // As upstream: the count is of what was asked for, which here is what was given.
                self.increment(handle, &block.cidr, given).await;
                if self.update(&stored, &block).await {
                    return count(&self.counts.assigned_by_calico, given);
                }
                self.decrement(handle, &block.cidr, given, None).await;
                newest = self.store.get(&stored.key).await.unwrap();
            }
        }
    }

    /// Releases all addresses of a handle (`ReleaseByHandle`): in the blocks of its record, the block first.
    async fn release(&self, handle: &str) {
        let Some(record) = self.store.get(&record(handle)).await.unwrap() else { return };
        for cidr in record.value["block"].as_object().unwrap().keys() {
            self.release_in_block(cidr, None, |block| {
                let released = block.release(handle, None).len();
                BTreeMap::from([(handle.to_owned(), released)])
            })
            .await;
        }
    }

    /// Releases addresses of any handles in a block (`ReleaseIPs`), with records that were listed before.
    async fn release_addresses(&self, stored: &Stored, at_most: usize) {
        let listed = self.store.list(Kind::IpamHandle).await.unwrap().items;
        let addresses: Vec<(IpAddr, Option<String>)> = block(&stored.value)
            .allocated()
            .map(|(address, attribute)| (address, attribute.handle_id.clone()))
            .take(at_most)
            .collect();
        self.release_in_block(&stored.key.name, Some(listed), |block| {
            let mut of_handles = BTreeMap::new();
            for (address, handle) in &addresses {
                let now = block.attribute_of(*address).and_then(|attribute| attribute.handle_id.clone());
                // Options name the handle, so that an address of a newer pod stays.
                if let Some(handle) = now.filter(|now| Some(now) == handle.as_ref()) {
                    block.release_addresses(&[*address], None);
                    *of_handles.entry(handle).or_default() += 1;
                }
            }
            of_handles
        })
        .await;
    }

    async fn release_in_block(
        &self,
        cidr: &str,
        listed: Option<Vec<Stored>>,
        release: impl Fn(&mut Block) -> BTreeMap<String, usize>,
    ) {
        let key = Key::global(Kind::IpamBlock, cidr);
        for _ in 0..RETRIES {
            let Some(stored) = self.store.get(&key).await.unwrap() else { return };
            let mut block = block(&stored.value);
            let of_handles = release(&mut block);
            let released: usize = of_handles.values().sum();
            if released == 0 {
                return;
            }
            let written = if block.is_empty() && block.affinity.is_none() {
                self.done(self.store.delete(&key, Some(&stored.version)).await)
            } else {
                self.update(&stored, &block).await
            };
            if !written {
                continue;
            }
            count(&self.counts.released_by_calico, released);
            for (handle, number) in of_handles {
                let known = listed.iter().flatten().find(|stored| stored.key.name == handle);
                self.decrement(&handle, &block.cidr, number, known.cloned()).await;
            }
            return;
        }
        panic!("{cidr}: too many conflicts");
    }

    /// Counts addresses in a handle's record (`incrementHandle`).
    async fn increment(&self, handle: &str, cidr: &IpNet, number: usize) {
        for _ in 0..RETRIES {
            let known = self.store.get(&record(handle)).await.unwrap();
            let mut value = known.as_ref().map_or_else(
                || json!({"handleID": handle, "block": {}, "deleted": false}),
                |known| known.value.clone(),
            );
            let counted = counted(&value, cidr);
            value["block"][cidr.to_string()] = json!(counted + number);
            let done = match known {
                Some(known) => self.done(self.store.update(&known.key, value, &known.version).await),
                None => self.done(self.store.create(&record(handle), value).await),
            };
            if done {
                return;
            }
        }
        panic!("{handle}: too many conflicts");
    }

    /// Takes addresses off a handle's record (`decrementHandle`), and deletes an empty one. A record that lacks them stays.
    async fn decrement(&self, handle: &str, cidr: &IpNet, number: usize, known: Option<Stored>) {
        let mut known = known;
        for _ in 0..RETRIES {
            let newest = match known.take() {
                Some(known) => Some(known),
                None => self.store.get(&record(handle)).await.unwrap(),
            };
            let Some(stored) = newest else { return };
            let mut value = stored.value.clone();
            let Some(left) = counted(&value, cidr).checked_sub(number) else { return };
            let blocks = value["block"].as_object_mut().unwrap();
            match left {
                0 => blocks.remove(&cidr.to_string()),
                left => blocks.insert(cidr.to_string(), json!(left)),
            };
            let done = if blocks.is_empty() {
                self.done(self.store.delete(&stored.key, Some(&stored.version)).await)
            } else {
                self.done(self.store.update(&stored.key, value, &stored.version).await)
            };
            if done {
                return;
            }
        }
        panic!("{handle}: too many conflicts");
    }

    async fn update(&self, stored: &Stored, block: &Block) -> bool {
        let value = serde_json::to_value(block).unwrap();
        self.done(self.store.update(&stored.key, value, &stored.version).await)
    }

    /// Returns whether a write was done. Another writer may have been first.
    fn done<T>(&self, written: Result<T, StoreError>) -> bool {
        match written {
            Ok(_) => true,
            Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {
                count(&self.counts.conflicts, 1);
                false
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn record(handle: &str) -> Key {
    Key::global(Kind::IpamHandle, handle)
}

fn block(value: &Value) -> Block {
    serde_json::from_value(value.clone()).unwrap()
}

fn counted(record: &Value, cidr: &IpNet) -> usize {
    record["block"][cidr.to_string()].as_u64().map_or(0, |number| usize::try_from(number).unwrap())
}

/// The number of addresses of each handle in each block: by the blocks, and by the records.
async fn both_counts(store: &Memory) -> [BTreeMap<(String, String), u64>; 2] {
    let mut of_blocks = BTreeMap::new();
    for stored in store.list(Kind::IpamBlock).await.unwrap().items {
        for (_, attribute) in block(&stored.value).allocated() {
            let handle = attribute.handle_id.clone().unwrap();
            *of_blocks.entry((handle, stored.key.name.clone())).or_default() += 1;
        }
    }
    let mut of_records = BTreeMap::new();
    for stored in store.list(Kind::IpamHandle).await.unwrap().items {
        let blocks = stored.value["block"].as_object().unwrap();
        assert!(!blocks.is_empty(), "the record of {} is empty", stored.key.name);
        let blocks = blocks.iter().map(|(cidr, number)| (cidr.clone(), number.as_u64().unwrap()));
        of_records.extend(blocks.map(|(cidr, number)| ((stored.key.name.clone(), cidr), number)));
    }
    [of_blocks, of_records]
}

async fn as_calico(calico: &Calico<'_>, handles: &Handles<'_>, operations: usize) {
    let dice = handles.dice;
    for _ in 0..operations {
        match dice.below(6) {
            0 | 1 => calico.assign(&handles.new_one(), 1).await,
            2 => calico.assign(&handles.new_one(), 2).await,
            3 | 4 => calico.release(&handles.used()).await,
            _ => {
                let blocks = calico.store.list(Kind::IpamBlock).await.unwrap().items;
                let number = dice.below(blocks.len().max(1) as u64);
                if let Some(stored) = blocks.get(usize::try_from(number).unwrap()) {
                    calico.release_addresses(stored, 4).await;
                }
            }
        }
    }
}

async fn as_tortie(allocator: &Ipam, node: &str, handles: &Handles<'_>, operations: usize, counts: &Counts) {
    for _ in 0..operations {
        let assigns = handles.dice.below(4);
        let handle = if assigns < 2 { handles.new_one() } else { handles.used() };
        let request = request(node, &handle);
        match assigns {
            0 => match allocator.assign(&request).await {
                Ok(_) => count(&counts.assigned_by_tortie, 1),
                Err(IpamError::Exhausted { .. }) => {}
                Err(IpamError::Contended(_)) => count(&counts.contended, 1),
                Err(error) => panic!("{handle}: {error}"),
            },
            1 => match allocator.assign_all(&request, Count { ipv4: 2, ipv6: 0 }).await {
                Ok(_) => count(&counts.assigned_by_tortie, 2),
                Err(IpamError::Exhausted { .. }) => {}
                Err(IpamError::Contended(_)) => count(&counts.contended, 1),
                Err(error) => panic!("{handle}: {error}"),
            },
            _ => {
                let released = allocator.release(&handle).await;
                count(&counts.released_by_tortie, released.unwrap().len());
            }
        }
    }
}

/// A hundred thousand operations. Nobody dies, so nothing excuses a wrong count.
#[test]
fn records_count_exactly_beside_calicos_client() {
    let counts = Counts::default();
    for seed in 0..runs(50) {
        let (memory, dice) = (Arc::new(Memory::default()), Arc::new(Dice::new(seed)));
        let made = AtomicU64::new(0);
        let handles = Handles { made: &made, dice: &dice };
        let client = || Client::new(memory.clone(), dice.clone(), u64::MAX, seed % 2 == 0);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            cluster(&memory, &[("default", "10.0.0.0/26", 29)], true, 0).await;
            let of_tortie = NODES.iter().chain(&NODES).map(|node| {
                let allocator = ipam(Arc::new(client()), (node, "linux"));
                let (handles, counts) = (&handles, &counts);
                async move { as_tortie(&allocator, node, handles, 250, counts).await }
            });
            let of_calico = NODES.iter().chain(&NODES).map(|node| {
                let calico = Calico { store: client(), node, counts: &counts };
                let handles = &handles;
                async move { as_calico(&calico, handles, 250).await }
            });
            tokio::join!(futures::future::join_all(of_tortie), futures::future::join_all(of_calico));
            let [of_blocks, of_records] = both_counts(&memory).await;
            assert_eq!(of_blocks, of_records, "seed {seed}");
        });
    }
    println!("{counts:?}");
    assert!(counts.contended.load(Ordering::Relaxed) as u64 <= runs(50), "{counts:?}");
    let all = [
        &counts.assigned_by_tortie,
        &counts.released_by_tortie,
        &counts.assigned_by_calico,
        &counts.released_by_calico,
        &counts.conflicts,
    ];
    for counter in all {
        assert!(counter.load(Ordering::Relaxed) as u64 > 40 * runs(50), "{counts:?}");
    }
}
