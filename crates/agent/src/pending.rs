//! Changes that wait for the dataplane's thread. Only the last value of each object is kept, so a stuck dataplane costs
//! no more memory than the objects that have changed.
//!
//! Nothing is lost by this: calc's result depends only on the final objects, whatever the order and the batching of
//! updates. A deletion followed by a creation is a change like any other.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::{Key, Kind, Positions};
use tortie_flannel::LeaseSnapshot;
use tortie_store::{StoreError, size_of_value};

/// Changes that belong together: nothing is applied between them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Batch {
    /// Objects with their new values; `None` means deleted.
    pub(crate) changes: BTreeMap<Key, Option<Value>>,
    /// The batch contains the history of these kinds up to here.
    pub(crate) positions: Positions,
    /// Kinds whose history has begun again before that position, as that of a datastore that was restored.
    pub(crate) restarted: BTreeSet<Kind>,
    /// Kinds that cannot be read, with the error; `None` if the kind can be read now.
    pub(crate) unavailable: BTreeMap<Kind, Option<StoreError>>,
    /// flannel's leases in etcd, if they have changed.
    pub(crate) leases: Option<Arc<LeaseSnapshot>>,
    /// Nothing is applied before the next batch: this is a part of the first snapshot of the cluster.
    pub(crate) more_follows: bool,
}

impl Batch {
    /// Moves positions to the end of the batch.
    pub(crate) fn advance(&self, positions: &mut Positions) {
        self.restarted.iter().for_each(|kind| positions.reset(*kind));
        positions.advance_all(&self.positions);
        let lost = self.unavailable.iter().filter(|(_, error)| error.is_some());
        lost.for_each(|(kind, _)| positions.forget(*kind));
    }
}

/// Everything that waits, as one batch.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    batch: Option<Batch>,
    bytes: usize,
}

impl Pending {
    /// Adds a batch. Its values replace older ones of the same objects.
    pub(crate) fn add(&mut self, batch: Batch) {
        let pending = self.batch.get_or_insert_default();
        batch.advance(&mut pending.positions);
        let Batch { changes, positions: _, restarted, unavailable, leases, more_follows } = batch;
        pending.leases = leases.or(pending.leases.take());
        pending.restarted.extend(restarted);
        pending.unavailable.extend(unavailable);
        pending.more_follows = more_follows;
        for (key, value) in changes {
            self.bytes += size(&key, value.as_ref());
            let (old_key, old) = (key.clone(), pending.changes.insert(key, value));
            if let Some(old) = old {
                self.bytes -= size(&old_key, old.as_ref());
            }
        }
    }

    /// Takes everything, if anything has been added.
    pub(crate) fn take(&mut self) -> Option<Batch> {
        mem::take(self).batch
    }

    /// The approximate memory of the changes, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of changed objects.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.batch.as_ref().map_or(0, |batch| batch.changes.len())
    }
}

fn size(key: &Key, value: Option<&Value>) -> usize {
    size_of::<(Key, Option<Value>)>() + key.namespace.len() + key.name.len() + value.map_or(0, size_of_value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tortie_api::Position;

    use super::*;

    fn batch(position: u64, changes: &[(&str, Option<Value>)]) -> Batch {
        let key = |name: &str| Key::global(Kind::Namespace, name);
        Batch {
            changes: changes.iter().map(|(name, value)| (key(name), value.clone())).collect(),
            positions: [(Kind::Namespace, Position(position))].into_iter().collect(),
            ..Batch::default()
        }
    }

    #[test]
    fn a_history_that_begins_again_has_a_lower_position() {
        let restored = Batch { restarted: [Kind::Namespace].into(), ..batch(3, &[]) };
        let mut pending = Pending::default();
        for (batch, expected) in [(batch(7, &[]), 7), (batch(5, &[]), 7), (restored, 3), (batch(4, &[]), 4)] {
            pending.add(batch);
            let waiting = pending.batch.as_ref().unwrap();
            assert_eq!(waiting.positions.of(Kind::Namespace), Some(Position(expected)));
        }
        assert_eq!(pending.take().unwrap().restarted, [Kind::Namespace].into());
    }

    #[test]
    fn the_last_value_of_each_object_waits() {
        let (one, two) = (Some(json!(1)), Some(json!(2)));
        let table: [(&str, &[Batch], Option<Batch>); 6] = [
            ("nothing", &[], None),
            ("no change, only a position", &[batch(7, &[])], Some(batch(7, &[]))),
            (
                "an update",
                &[batch(1, &[("a", one.clone())]), batch(2, &[("a", two.clone())])],
                Some(batch(2, &[("a", two.clone())])),
            ),
            (
                "a deletion, which calc must see: it may know the object",
                &[batch(1, &[("a", one.clone())]), batch(2, &[("a", None)])],
                Some(batch(2, &[("a", None)])),
            ),
            (
                "a deletion and a creation",
                &[batch(1, &[("a", one.clone())]), batch(2, &[("a", None)]), batch(3, &[("a", two.clone())])],
                Some(batch(3, &[("a", two.clone())])),
            ),
            (
                "two objects, then a position",
                &[batch(1, &[("a", one.clone())]), batch(2, &[("b", two.clone())]), batch(9, &[])],
                Some(batch(9, &[("a", one.clone()), ("b", two.clone())])),
            ),
        ];
        for (name, batches, expected) in table {
            let mut pending = Pending::default();
            batches.iter().cloned().for_each(|batch| pending.add(batch));
            assert_eq!(pending.take(), expected, "{name}");
            assert_eq!((pending.take(), pending.bytes(), pending.len()), (None, 0, 0), "{name}: taken");
        }
    }

    #[test]
    fn replaced_values_do_not_count() {
        let (mut once, mut often) = (Pending::default(), Pending::default());
        let large = || Some(json!({"text": "x".repeat(80_000)}));
        once.add(batch(1, &[("a", large())]));
        for position in 1..=3_000 {
            often.add(batch(position, &[("a", if position % 7 == 0 { None } else { large() })]));
        }
        assert_eq!((often.len(), often.bytes()), (1, once.bytes()));
        assert!(once.bytes() >= 80_000);
        often.add(batch(3_001, &[("a", None)]));
        assert!(often.bytes() < 1_000, "a deletion is small: {}", often.bytes());
    }
}
