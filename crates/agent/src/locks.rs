//! A lock for each of many objects, which exists while somebody wants it.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Locks by object. Waiting tasks get the lock in order of arrival.
pub(crate) struct Locks<T>(Mutex<HashMap<T, Arc<AsyncMutex<()>>>>);

impl<T> Default for Locks<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Eq + Hash + Clone> Locks<T> {
    /// Waits for the lock, which is released when the returned guard is dropped.
    pub(crate) async fn lock(&self, what: &T) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Remove locks that only the map refers to.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            locks.entry(what.clone()).or_default().clone()
        };
        lock.lock_owned().await
    }
}
