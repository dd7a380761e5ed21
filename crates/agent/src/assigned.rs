//! The addresses and sandboxes that the agent has given to its pods. The dataplane's thread learns them before the datastore has
//! them: until the kubelet reports the addresses of a pod, anybody who may annotate the pod could name others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tortie_api::Key;
use tortie_calc::Assigned;

use crate::queue::Asker;

/// The changes since the thread has looked, by the key of the WorkloadEndpoint; none if a pod has lost its addresses.
type Changes = BTreeMap<Key, Option<Assigned>>;

/// The addresses and sandboxes that ADD has given to pods, and that DEL has not taken yet.
#[derive(Debug, Clone, Default)]
pub(crate) struct AssignedPods {
    inner: Arc<Mutex<Inner>>,
    thread: Arc<OnceLock<Asker>>,
}

#[derive(Debug, Default)]
struct Inner {
    containers: BTreeMap<Key, String>,
    changes: Changes,
}

impl AssignedPods {
    /// The thread that learns the changes.
    pub(crate) fn tell(&self, thread: Asker) {
        let _ = self.thread.set(thread); // There is one.
    }

    /// ADD has given this to a pod, and publishes it next. No change of the pod may follow, if an earlier agent has published the same.
    pub(crate) fn insert(&self, endpoint: Key, assigned: Assigned) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.containers.insert(endpoint.clone(), assigned.container_id.clone());
        inner.changes.insert(endpoint, Some(assigned));
        drop(inner);
        self.thread.get().into_iter().for_each(Asker::assigned);
    }

    /// The sandbox has lost its addresses. A new sandbox of the pod keeps what it has.
    pub(crate) fn remove(&self, endpoint: &Key, container_id: &str) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.containers.get(endpoint).is_some_and(|known| known == container_id) {
            inner.containers.remove(endpoint);
            inner.changes.insert(endpoint.clone(), None);
        }
    }

    /// The changes since the last call.
    pub(crate) fn take_changes(&self) -> Changes {
        std::mem::take(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner).changes)
    }
}

#[cfg(test)]
mod tests {
    use tortie_api::Kind;

    use super::*;

    fn of(container: &str) -> Assigned {
        Assigned { container_id: container.to_owned(), addresses: [[10, 0, 0, 1].into()].into() }
    }

    #[test]
    fn the_end_of_an_old_sandbox_takes_nothing_from_the_new_one() {
        let (pods, key) = (AssignedPods::default(), Key::namespaced(Kind::WorkloadEndpoint, "n", "p"));
        pods.insert(key.clone(), of("old"));
        pods.insert(key.clone(), of("new"));
        pods.remove(&key, "old");
        assert_eq!(pods.take_changes(), [(key.clone(), Some(of("new")))].into());
        pods.remove(&key, "new");
        pods.remove(&key, "new");
        assert_eq!(pods.take_changes(), [(key, None)].into());
        assert_eq!(pods.take_changes(), Changes::new());
    }
}
