//! What the store holds when a CNI ADD starts. An ADD succeeds only when all of it is in force on the node, because each
//! kind has a watch of its own in some datastores, and the watch of policies may lag behind that of pods.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;
use tortie_api::{Kind, Positions};
use tortie_store::{Store, StoreError};

/// Requests the positions of what is stored. Callers that wait at the same time share a request.
pub(crate) struct Barrier {
    store: Arc<dyn Store>,
    kinds: Vec<Kind>,
    /// The number of requests that have been started.
    started: AtomicU64,
    /// The last successful request: its number, and its result.
    last: Mutex<(u64, Positions)>,
}

impl Barrier {
    /// For the kinds that policy depends on.
    pub(crate) fn new(store: Arc<dyn Store>, kinds: Vec<Kind>) -> Self {
        Self { store, kinds, started: AtomicU64::new(0), last: Mutex::default() }
    }

    /// The positions of everything that was stored before this call.
    pub(crate) async fn positions(&self) -> Result<Positions, StoreError> {
        let before = self.started.load(Ordering::SeqCst);
        let mut last = self.last.lock().await;
        // A request that was started after this call covers it.
        if last.0 <= before {
            let number = self.started.fetch_add(1, Ordering::SeqCst) + 1;
            *last = (number, self.store.barrier(&self.kinds).await?);
        }
        Ok(last.1.clone())
    }
}
