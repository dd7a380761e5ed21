//! Keeps endpoints from being created while their network is replaced.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A lock that the dataplane, which replaces the network, shares with the wiring, which creates endpoints on it: HNS may delete
/// endpoints together with their network. All clones are one lock.
#[derive(Debug, Clone, Default)]
pub struct NetworkLock(Arc<RwLock<()>>);

impl NetworkLock {
    /// Waits until the network is not being replaced. It stays while the guard lives.
    pub(crate) fn use_network(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no endpoint is being created. None is created while the guard lives.
    pub(crate) fn replace_network(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
