//! The current objects of some interests, in memory.

use std::collections::{BTreeMap, BTreeSet};

use futures::StreamExt;
use futures::stream::ReadyChunks;
use tortie_api::{Key, Kind};

use crate::{Change, Follow, Interest, Store, StoreError, Stored};

/// The maximum number of changes between two looks at the objects.
const MAX_CHANGES: usize = 1_024;

/// Objects that are kept current by following them.
pub struct Cache {
    changes: ReadyChunks<Follow>,
    objects: BTreeMap<Key, Stored>,
    /// The kinds that are not complete yet.
    missing: BTreeSet<Kind>,
}

impl Cache {
    /// Begins to follow the interests.
    #[must_use]
    pub fn new(store: &dyn Store, interests: Vec<Interest>) -> Self {
        let missing = interests.iter().map(|interest| interest.kind).collect();
        let changes = store.follow(interests).ready_chunks(MAX_CHANGES);
        Self { changes, objects: BTreeMap::new(), missing }
    }

    /// Whether everything that was stored is in the cache.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// The object of this key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.objects.get(key)
    }

    /// The objects, by key.
    pub fn objects(&self) -> impl Iterator<Item = &Stored> {
        self.objects.values()
    }

    /// Waits until something changes.
    ///
    /// # Errors
    /// A kind is absent or forbidden.
    pub async fn changed(&mut self) -> Result<(), StoreError> {
        let ended = || StoreError::Unavailable("the store has ended".to_owned());
        for change in self.changes.next().await.ok_or_else(ended)? {
            match change {
                Change::Put(stored) => drop(self.objects.insert(stored.key.clone(), stored)),
                Change::Gone { key, .. } => drop(self.objects.remove(&key)),
                Change::InSync(kind, _) => drop(self.missing.remove(&kind)),
                Change::Unavailable(_, error) => return Err(error),
                Change::Progress(..) | Change::Restarted(_) => {}
            }
        }
        Ok(())
    }

    /// Waits until everything that was stored is in the cache.
    ///
    /// # Errors
    /// A kind is absent or forbidden.
    pub async fn complete(&mut self) -> Result<(), StoreError> {
        while !self.is_complete() {
            self.changed().await?;
        }
        Ok(())
    }
}
