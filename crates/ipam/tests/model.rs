//! Many allocators on one store: nodes of both systems, two allocators on each node, every order of their requests, crashes
//! between any two writes. The rules are checked with every single write.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod memory;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use memory::{Client, Dice, Memory};
use serde_json::json;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_ipam::{Assignment, Count, Family, Ipam, IpamError, Request};
use tortie_store::{Store, StoreError};

const NODES: [(&str, &str); 4] = [("a", "linux"), ("b", "linux"), ("c", "linux"), ("w", "windows")];
const ONE: Count = Count { ipv4: 1, ipv6: 0 };
/// The number of handles of each node.
const HANDLES: u64 = 12;

fn request(handle: &str) -> Request {
    Request {
        handle: handle.to_owned(),
        owner: BTreeMap::from([("pod".to_owned(), handle.to_owned())]),
        ..Request::default()
    }
}

fn ipam(store: Arc<dyn Store>, (node, os): (&str, &str)) -> Ipam {
    Ipam::new(store, node, BTreeMap::from([("kubernetes.io/os".to_owned(), os.to_owned())]))
}

async fn cluster(memory: &Memory, pools: &[(&str, &str, u8)], strict: bool) {
    for (name, cidr, block_size) in pools {
        let pool = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": name},
            "spec": {"cidr": cidr, "blockSize": block_size, "vxlanMode": "Always"},
        });
        memory.create(&Key::global(Kind::IpPool, *name), pool).await.unwrap();
    }
    let config = json!({"strict_affinity": strict, "auto_allocate_blocks": true});
    memory.create(&Key::global(Kind::IpamConfig, "default"), config).await.unwrap();
}

/// The state of one run.
struct Model {
    memory: Arc<Memory>,
    dice: Arc<Dice>,
    /// The number of operations on each handle that have begun.
    begun: RefCell<BTreeMap<String, u32>>,
    /// One operation per handle at a time, as an agent does it, except in the runs with races.
    busy: RefCell<BTreeMap<String, u32>>,
    done: Cell<usize>,
    assigned: Cell<usize>,
    of_ipv6: Cell<usize>,
    crashes: Cell<usize>,
    with_crashes: bool,
    with_races: bool,
    /// Otherwise nodes borrow addresses, and take over empty blocks.
    strict: bool,
    borrowed: Cell<usize>,
}

impl Model {
    fn client(&self, transactions: bool) -> Arc<Client> {
        let writes = if self.with_crashes { 1 + self.dice.below(40) } else { u64::MAX };
        Arc::new(Client::new(self.memory.clone(), self.dice.clone(), writes, transactions))
    }

    /// An allocator that dies and is born again, and executes random operations until enough are done.
    async fn allocator(self: Rc<Self>, node: (&str, &str), enough: usize) {
        let transactions = self.dice.below(2) == 0;
        let mut client = self.client(transactions);
        let mut allocator = ipam(client.clone(), node);
        while self.done.get() < enough {
            self.done.set(self.done.get() + 1);
            if client.is_dead() {
                self.crashes.set(self.crashes.get() + 1);
                client = self.client(transactions);
                allocator = ipam(client.clone(), node);
            }
            let handle = format!("{}.{}", node.0, self.dice.below(HANDLES));
            if !self.with_races && self.busy.borrow().contains_key(&handle) {
                tokio::task::yield_now().await;
                continue;
            }
            for counts in [&self.begun, &self.busy] {
                *counts.borrow_mut().entry(handle.clone()).or_default() += 1;
            }
            if self.dice.below(2) == 0 {
                let count = self.count();
                self.assign(&allocator, node.0, &handle, count).await;
            } else {
                self.memory.give_back(&handle);
                // After a crash, somebody else continues.
                match allocator.release(&handle).await {
                    Ok(_) | Err(IpamError::Store(StoreError::Unavailable(_))) => {}
                    Err(error) => panic!("release {handle}: {error}"),
                }
            }
            let mut busy = self.busy.borrow_mut();
            let others = busy.get_mut(&handle).unwrap();
            *others -= 1;
            if *others == 0 {
                busy.remove(&handle);
            }
        }
    }

    /// Most requests are for one IPv4 address, as those of agents.
    fn count(&self) -> Count {
        match self.dice.below(4) {
            0 => Count { ipv4: 1, ipv6: 1 },
            1 => Count { ipv4: 2, ipv6: 0 },
            _ => ONE,
        }
    }

    async fn assign(&self, allocator: &Ipam, node: &str, handle: &str, count: Count) {
        let request = request(handle);
        let before = (self.busy.borrow()[handle], self.begun.borrow()[handle]);
        let assigned = match count {
            ONE => allocator.assign(&request).await.map(|one| vec![one]),
            count => allocator.assign_all(&request, count).await,
        };
        // If somebody releases the same handle meanwhile, nobody knows who was first.
        let is_alone = before == (1, self.begun.borrow()[handle]);
        match assigned {
            Ok(assigned) => {
                self.assigned.set(self.assigned.get() + assigned.len());
                for assignment in assigned {
                    self.check(assignment, node, handle, is_alone).await;
                }
            }
            Err(IpamError::Exhausted { .. } | IpamError::Store(StoreError::Unavailable(_))) => {}
            Err(error) => panic!("assign {handle}: {error}"),
        }
    }

    async fn check(&self, assignment: Assignment, node: &str, handle: &str, is_alone: bool) {
        if Family::of(&assignment.block) == Family::V6 {
            self.of_ipv6.set(self.of_ipv6.get() + 1);
        }
        if is_alone {
            let key = Key::global(Kind::IpamBlock, assignment.block.to_string());
            let stored = self.memory.get(&key).await.unwrap().unwrap();
            let block: Block = serde_json::from_value(stored.value).unwrap();
            if block.node() != Some(node) {
                assert!(!self.strict, "{handle} has an address of another node's block");
                self.borrowed.set(self.borrowed.get() + 1);
            }
            self.memory.take(assignment.address, handle);
        }
    }
}

fn run(seed: u64, operations: usize, with_crashes: bool, with_races: bool, strict: bool) -> Rc<Model> {
    let memory = Arc::new(Memory::default());
    let dice = Arc::new(Dice::new(seed));
    let model = Rc::new(Model {
        memory: memory.clone(),
        dice,
        begun: RefCell::default(),
        busy: RefCell::default(),
        done: Cell::new(0),
        assigned: Cell::new(0),
        of_ipv6: Cell::new(0),
        crashes: Cell::new(0),
        with_crashes,
        with_races,
        strict,
        borrowed: Cell::new(0),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let pools = match strict {
            true => [("default", "10.0.0.0/26", 29), ("six", "fd00::/122", 125)],
            // A block for each node, which is not enough.
            false => [("default", "10.0.0.0/27", 29), ("six", "fd00::/123", 125)],
        };
        cluster(&memory, &pools, strict).await;
        // Windows nodes need strict affinity.
        let nodes = if strict { &NODES[..] } else { &NODES[..3] };
        let allocators = nodes.iter().chain(nodes).map(|node| model.clone().allocator(*node, operations));
        futures::future::join_all(allocators).await;
        // Whatever crashed, a release by handle finds everything.
        for node in NODES {
            let survivor = ipam(memory.clone(), node);
            for number in 0..HANDLES {
                let handle = format!("{}.{number}", node.0);
                memory.give_back(&handle);
                survivor.release(&handle).await.unwrap();
            }
        }
    });
    assert_eq!(memory.allocated(), BTreeMap::<IpAddr, String>::new(), "seed {seed}: addresses are leaked");
    assert_eq!(memory.count(Kind::IpamHandle), 0, "seed {seed}: records of handles are leaked");
    model
}

#[test]
fn no_address_is_given_twice_and_none_is_lost() {
    let (mut assigned, mut of_ipv6, mut crashes) = (0, 0, 0);
    for seed in 0..100 {
        let model = run(seed, 1_000, seed % 2 == 0, seed % 4 < 2, true);
        assigned += model.assigned.get();
        of_ipv6 += model.of_ipv6.get();
        crashes += model.crashes.get();
    }
    assert!(assigned > 20_000 && of_ipv6 > 3_000, "{assigned} addresses, {of_ipv6} of IPv6");
    assert!(crashes > 1_000, "{crashes} crashes");
}

/// The same where nodes borrow addresses, and take over empty blocks at once.
#[test]
fn borrowed_addresses_are_given_once_and_not_lost() {
    let (mut assigned, mut borrowed) = (0, 0);
    for seed in 0..40 {
        let model = run(seed, 400, seed % 2 == 0, seed % 4 < 2, false);
        assigned += model.assigned.get();
        borrowed += model.borrowed.get();
    }
    assert!(assigned > 3_000 && borrowed > 200, "{assigned} addresses, {borrowed} borrowed");
}

/// Pools that overlap, with blocks of different sizes: whatever order two nodes claim in, no address is in two blocks
/// from which addresses are taken.
#[test]
fn blocks_of_overlapping_pools_do_not_share_addresses() {
    for seed in 0..300 {
        let memory = Arc::new(Memory::default());
        let dice = Arc::new(Dice::new(seed));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            cluster(&memory, &[("large", "10.0.0.0/27", 28), ("small", "10.0.0.0/28", 30)], true).await;
            let nodes = NODES[..3].iter().chain(&NODES[..3]).enumerate().map(|(number, node)| {
                let client = Client::new(memory.clone(), dice.clone(), u64::MAX, false);
                let (allocator, memory) = (ipam(Arc::new(client), *node), memory.clone());
                async move {
                    for pod in 0..6 {
                        let handle = format!("{}.{number}.{pod}", node.0);
                        // Where the pools overlap, a node may find no block; it may not get an address twice.
                        if let Ok(assignment) = allocator.assign(&request(&handle)).await {
                            memory.take(assignment.address, &handle);
                        }
                    }
                }
            });
            futures::future::join_all(nodes).await;
        });
        // Fails if an address is allocated in two blocks.
        assert!(!memory.allocated().is_empty());
        let blocks = memory.blocks();
        for block in &blocks {
            let others = blocks.iter().filter(|other| *other != block);
            let overlapping: Vec<_> = others.filter(|other| block.contains(*other)).collect();
            assert!(overlapping.is_empty(), "seed {seed}: {block} and {overlapping:?} are left");
        }
    }
}
