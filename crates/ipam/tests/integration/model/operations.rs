//! Allocators that execute random operations.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::sync::Arc;

use serde_json::json;
use tortie_api::ipam::Block;
use tortie_api::{Key, Kind};
use tortie_ipam::{Assignment, Count, Family, FollowUp, Ipam, IpamError, Request};
use tortie_store::{Store, StoreError, Write};

use crate::common::{ipam, request};
use crate::model::GONE;
use crate::model::client::Client;
use crate::model::memory::{Dice, Memory};

const ONE: Count = Count { ipv4: 1, ipv6: 0 };
/// The number of handles of each node.
pub(crate) const HANDLES: u64 = 12;

/// The disturbances of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Otherwise nodes borrow addresses, and take over empty blocks.
    pub(crate) strict: bool,
    pub(crate) with_crashes: bool,
    /// Several operations on one handle at the same time.
    pub(crate) with_races: bool,
    /// Connections break.
    pub(crate) breaks: bool,
    /// `ipCooldownSeconds`.
    pub(crate) cooldown: u32,
}

impl Options {
    /// The disturbances of a seed.
    pub(crate) fn of(seed: u64, strict: bool) -> Self {
        Self {
            strict,
            with_crashes: seed.is_multiple_of(2),
            with_races: seed % 4 < 2,
            breaks: seed.is_multiple_of(3),
            cooldown: if seed.is_multiple_of(5) { 3600 } else { 0 },
        }
    }
}

/// What has happened.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) assigned: usize,
    pub(crate) of_ipv6: usize,
    pub(crate) fixed: usize,
    /// Allocations with a write that followed.
    pub(crate) followed: usize,
    pub(crate) borrowed: usize,
    pub(crate) crashes: usize,
    pub(crate) repaired: usize,
    /// Addresses and blocks of the vanished node.
    pub(crate) cleared: usize,
    pub(crate) released_by_address: usize,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.assigned += other.assigned;
        self.of_ipv6 += other.of_ipv6;
        self.fixed += other.fixed;
        self.followed += other.followed;
        self.borrowed += other.borrowed;
        self.crashes += other.crashes;
        self.repaired += other.repaired;
        self.cleared += other.cleared;
        self.released_by_address += other.released_by_address;
    }
}

/// Whether the caller is dead, or has no connection: somebody else continues.
pub(crate) fn is_cut(error: &IpamError) -> bool {
    matches!(error, IpamError::Store(StoreError::Unavailable(_)))
}

/// The state of one run.
pub(crate) struct Model {
    pub(crate) memory: Arc<Memory>,
    pub(crate) dice: Arc<Dice>,
    pub(crate) options: Options,
    pub(crate) counts: RefCell<Counts>,
    /// The number of operations on each handle that have begun.
    begun: RefCell<BTreeMap<String, u32>>,
    /// One operation per handle at a time, as an agent does it, except in the runs with races.
    pub(crate) busy: RefCell<BTreeMap<String, u32>>,
    /// The handles with which nobody may begin an operation.
    pub(crate) stopped: RefCell<Vec<String>>,
    /// Whether somebody repairs, or releases the vanished node.
    pub(crate) is_repairing: Cell<bool>,
    pub(crate) done: Cell<usize>,
    /// How many writes were to follow allocations.
    follow_ups: Cell<usize>,
}

impl Model {
    pub(crate) fn new(memory: Arc<Memory>, dice: Arc<Dice>, options: Options) -> Rc<Self> {
        Rc::new(Self {
            memory,
            dice,
            options,
            counts: RefCell::default(),
            begun: RefCell::default(),
            busy: RefCell::default(),
            stopped: RefCell::default(),
            is_repairing: Cell::new(false),
            done: Cell::new(0),
            follow_ups: Cell::new(0),
        })
    }

    pub(crate) fn client(&self) -> Arc<Client> {
        let transactions = self.dice.below(2) == 0;
        let writes = if self.options.with_crashes { 1 + self.dice.below(40) } else { u64::MAX };
        let client = Client::new(self.memory.clone(), self.dice.clone(), writes, transactions);
        Arc::new(client.breaking(self.options.breaks))
    }

    /// An allocator that dies and is born again, and executes random operations until enough are done.
    pub(crate) async fn allocator(self: Rc<Self>, node: (&str, &str), enough: usize) {
        let mut client = self.client();
        let mut allocator = ipam(client.clone(), node);
        while self.done.get() < enough {
            self.done.set(self.done.get() + 1);
            if client.is_dead() {
                self.counts.borrow_mut().crashes += 1;
                client = self.client();
                allocator = ipam(client.clone(), node);
            }
            let handle = format!("{}.{}", node.0, self.dice.below(HANDLES));
            if !self.begin(&handle) {
                tokio::task::yield_now().await;
                continue;
            }
            match self.dice.below(8) {
                0 => self.assign_fixed(&allocator, node.0, &handle).await,
                1..4 => {
                    let count = self.count();
                    self.assign(&allocator, node.0, &handle, count).await;
                }
                _ => {
                    self.memory.give_back(&handle);
                    match allocator.release(&handle).await {
                        Ok(_) => {}
                        Err(error) if is_cut(&error) => {}
                        Err(error) => panic!("release {handle}: {error}"),
                    }
                }
            }
            self.end(&handle);
        }
    }

    /// Begins an operation on a handle, if that is possible now.
    pub(crate) fn begin(&self, handle: &str) -> bool {
        let is_busy = !self.options.with_races && self.busy.borrow().contains_key(handle);
        if is_busy || self.stopped.borrow().iter().any(|stopped| stopped == handle) {
            return false;
        }
        for counts in [&self.begun, &self.busy] {
            *counts.borrow_mut().entry(handle.to_owned()).or_default() += 1;
        }
        true
    }

    pub(crate) fn end(&self, handle: &str) {
        let mut busy = self.busy.borrow_mut();
        let others = busy.get_mut(handle).unwrap();
        *others -= 1;
        if *others == 0 {
            busy.remove(handle);
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
        let request = request(node, handle);
        let before = self.so_far(handle);
        let assigned = match count {
            ONE if self.dice.below(2) == 0 => self.assign_and_write(allocator, &request).await,
            ONE => allocator.assign(&request).await.map(|one| vec![one]),
            count => allocator.assign_all(&request, count).await,
        };
        match assigned {
            Ok(assigned) => {
                self.counts.borrow_mut().assigned += assigned.len();
                for assignment in assigned {
                    self.check(assignment, node, handle, before).await;
                }
            }
            Err(IpamError::Exhausted { .. }) => {}
            Err(error) if is_cut(&error) => {}
            Err(error) => panic!("assign {handle}: {error}"),
        }
    }

    /// Allocates an address, and stores it in an object of its own by the same sequence of writes.
    async fn assign_and_write(
        &self,
        allocator: &Ipam,
        request: &Request,
    ) -> Result<Vec<Assignment>, IpamError> {
        let number = self.follow_ups.get();
        self.follow_ups.set(number + 1);
        let key = Key::namespaced(Kind::WorkloadEndpoint, "default", number.to_string());
        let own = key.clone();
        let follow_up: FollowUp =
            Arc::new(move |one| Some(Write::Create(own.clone(), json!({"address": one.address}))));
        let (one, position) = allocator.assign_and_write(request, Some(follow_up)).await?;
        let stored = self.memory.get(&key).await.unwrap();
        // Without a position, the write was not executed, or its answer is lost.
        if let Some(position) = position {
            self.counts.borrow_mut().followed += 1;
            assert_eq!(stored.as_ref().map(|stored| stored.position), Some(position), "{}", request.handle);
        }
        if let Some(stored) = stored {
            assert_eq!(stored.value["address"], json!(one.address), "{}", request.handle);
            self.memory.delete(&key, None).await.unwrap();
        }
        Ok(vec![one])
    }

    async fn assign_fixed(&self, allocator: &Ipam, node: &str, handle: &str) {
        let last = u8::try_from(self.dice.below(if self.options.strict { 64 } else { 32 })).unwrap();
        let address = IpAddr::from(Ipv4Addr::new(10, 0, 0, last));
        let before = self.so_far(handle);
        match allocator.assign_address(&request(node, handle), address).await {
            Ok(assigned) => {
                assert_eq!(assigned.address, address);
                self.counts.borrow_mut().fixed += 1;
                self.check(assigned, node, handle, before).await;
            }
            Err(
                IpamError::Taken { .. }
                | IpamError::OfAnother { .. }
                | IpamError::HasAnother { .. }
                | IpamError::Exhausted { .. },
            ) => {}
            Err(error) if is_cut(&error) => {}
            Err(error) => panic!("assign {address} to {handle}: {error}"),
        }
    }

    /// How many operations on the handle are under way, and how many have begun.
    fn so_far(&self, handle: &str) -> (u32, u32) {
        (self.busy.borrow()[handle], self.begun.borrow()[handle])
    }

    async fn check(&self, assignment: Assignment, node: &str, handle: &str, before: (u32, u32)) {
        if Family::of(&assignment.block) == Family::V6 {
            self.counts.borrow_mut().of_ipv6 += 1;
        }
        // If somebody releases the same handle meanwhile, nobody knows who was first.
        if before != (1, self.begun.borrow()[handle]) {
            return;
        }
        let key = Key::global(Kind::IpamBlock, assignment.block.to_string());
        let stored = self.memory.get(&key).await.unwrap().unwrap();
        let block: Block = serde_json::from_value(stored.value).unwrap();
        if block.node() != Some(node) && node != GONE.0 {
            assert!(!self.options.strict, "{handle} has an address of another node's block");
            self.counts.borrow_mut().borrowed += 1;
        }
        self.memory.take(assignment.address, handle);
    }
}
