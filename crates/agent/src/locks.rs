//! A lock for each of many things, as long as somebody wants it.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Locks by what they lock. Those who wait get their turns in the order in which they came.
pub(crate) struct Locks<T>(Mutex<HashMap<T, Arc<AsyncMutex<()>>>>);

impl<T> Default for Locks<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Eq + Hash + Clone> Locks<T> {
    /// Waits for its turn; the turn ends when what it gives is dropped.
    pub(crate) async fn lock(&self, what: &T) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody has or wants those that only the map knows.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(what.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }
}
