//! The slots of a pool: its backends, numbered from 0. A connection gets the backend in a random slot.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use tortie_services::{Backend, PoolChange};

/// The backends of a pool in the order of their slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Slots {
    order: Vec<Backend>,
    /// The slot of each backend.
    places: BTreeMap<Backend, usize>,
}

impl Slots {
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn get(&self, slot: usize) -> Option<&Backend> {
        self.order.get(slot)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Backend> {
        self.order.iter()
    }

    /// Makes a change, and returns the slots that have another backend than before. Gaps are filled with backends that come,
    /// then with the last ones, so that the work does not depend on the size of the pool.
    pub(super) fn change(&mut self, change: &PoolChange) -> BTreeSet<usize> {
        let mut changed = BTreeSet::new();
        let mut gaps = BTreeSet::new();
        for backend in &change.removed {
            gaps.extend(self.places.remove(backend));
        }
        for backend in &change.added {
            if self.places.contains_key(backend) {
                continue;
            }
            let slot = gaps.pop_first().unwrap_or(self.order.len());
            match self.order.get_mut(slot) {
                Some(place) => *place = *backend,
                None => self.order.push(*backend),
            }
            self.places.insert(*backend, slot);
            changed.insert(slot);
        }
        // From the last gap on, so that the last backend is never itself in a gap.
        for gap in gaps.into_iter().rev() {
            self.order.swap_remove(gap);
            if let Some(moved) = self.order.get(gap) {
                self.places.insert(*moved, gap);
                changed.insert(gap);
            }
        }
        changed.retain(|slot| *slot < self.order.len());
        changed
    }

    /// Puts backends into the slots in which an earlier process had them, as far as they are still in the pool.
    pub(super) fn adopt(&mut self, earlier: &[SocketAddr]) {
        let by_socket: BTreeMap<SocketAddr, Backend> =
            self.order.iter().map(|backend| (backend.socket(), *backend)).collect();
        let mut left: BTreeSet<Backend> = self.order.iter().copied().collect();
        let mut order: Vec<Option<Backend>> = vec![None; self.order.len()];
        for (place, socket) in order.iter_mut().zip(earlier) {
            *place = by_socket.get(socket).filter(|backend| left.remove(*backend)).copied();
        }
        let order: Vec<Backend> =
            order.into_iter().filter_map(|place| place.or_else(|| left.pop_first())).collect();
        self.places = order.iter().copied().zip(0..).collect();
        self.order = order;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn backend(number: u8) -> Backend {
        Backend { address: [10, 0, 0, number].into(), port: 80, is_local: number.is_multiple_of(2) }
    }

    proptest! {
        /// The changed slots are those that differ, and they are few.
        #[test]
        fn slots_have_the_backends_of_the_pool(pools in prop::collection::vec(prop::collection::btree_set(0u8..12, 0..9), 1..12)) {
            let mut slots = Slots::default();
            let mut before = BTreeSet::new();
            for pool in pools {
                let pool: BTreeSet<Backend> = pool.into_iter().map(backend).collect();
                let change = PoolChange {
                    added: pool.difference(&before).copied().collect(),
                    removed: before.difference(&pool).copied().collect(),
                };
                let old = slots.clone();
                let changed = slots.change(&change);
                let all: BTreeSet<Backend> = slots.iter().copied().collect();
                prop_assert_eq!((&all, slots.len()), (&pool, pool.len()));
                for (slot, backend) in slots.iter().enumerate() {
                    prop_assert_eq!(slots.places.get(backend), Some(&slot));
                    prop_assert_eq!(changed.contains(&slot), old.get(slot) != Some(backend));
                }
                prop_assert!(changed.len() <= change.added.len() + change.removed.len());
                prop_assert_eq!(slots.places.len(), pool.len());
                before = pool;
            }
        }

        #[test]
        fn an_earlier_order_is_kept(pool in prop::collection::btree_set(0u8..12, 0..9), earlier in prop::collection::vec(0u8..12, 0..9)) {
            let mut slots = Slots::default();
            slots.change(&PoolChange { added: pool.iter().copied().map(backend).collect(), removed: Vec::new() });
            let sockets: Vec<SocketAddr> = earlier.iter().map(|number| backend(*number).socket()).collect();
            slots.adopt(&sockets);
            let all: BTreeSet<Backend> = slots.iter().copied().collect();
            prop_assert_eq!(all.len(), slots.len());
            prop_assert_eq!(all, pool.iter().copied().map(backend).collect::<BTreeSet<_>>());
            for (slot, number) in earlier.iter().enumerate().take(slots.len()) {
                let is_first = !earlier[..slot].contains(number);
                if pool.contains(number) && is_first {
                    prop_assert_eq!(slots.get(slot), Some(&backend(*number)));
                }
            }
        }
    }
}
