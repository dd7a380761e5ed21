//! Runs what replaces Kubernetes' controllers: a pure function says which writes are missing.

use std::sync::Arc;

use tokio::task::JoinHandle;
use tortie_api::{Key, Kind};
use tortie_store::{Cache, Interest, Store, StoreError, Stored, Write, identify};

use crate::LabError;

/// The writes after which the objects are as they should be. After a conflict, the cache receives the change, and the function
/// is called again.
pub(crate) type MissingWrites = fn(&[&Stored]) -> Vec<Write>;

/// Starts a controller that reads these kinds. `what` is what it keeps.
pub(crate) async fn start(
    store: Arc<dyn Store>,
    what: &'static str,
    kinds: &[Kind],
    missing_writes: MissingWrites,
) -> Result<JoinHandle<()>, LabError> {
    let mut cache = Cache::new(&*store, kinds.iter().copied().map(Interest::all).collect());
    cache.complete().await?;
    Ok(tokio::spawn(async move {
        loop {
            let objects: Vec<&Stored> = cache.objects().collect();
            let mut is_done = true;
            for write in missing_writes(&objects) {
                is_done &= carry_out(&*store, write).await;
            }
            let changed = match is_done {
                true => cache.changed().await,
                false => tokio::time::timeout(RETRY, cache.changed()).await.unwrap_or(Ok(())),
            };
            if let Err(error) = changed {
                tracing::error!(what, %error, "a controller of the lab has lost the datastore and misses changes");
                return;
            }
        }
    }))
}

/// The delay before a failed write is tried again.
const RETRY: std::time::Duration = std::time::Duration::from_secs(1);

/// Returns whether nothing is left to do about the write.
async fn carry_out(store: &dyn Store, mut write: Write) -> bool {
    // Slices are compared with what Services imply (`tortie apply --wait`).
    if let Write::Create(key, value) = &mut write
        && key.kind != Kind::EndpointSlice
    {
        identify(value);
    }
    let key = write.key().clone();
    let done = store.write_all(vec![write]).await.map(drop);
    log_failure(&key, done.map_err(|stopped| stopped.error))
}

/// Returns whether nothing is left to do: after a conflict, a change is on its way, and an invalid object stays so.
fn log_failure(key: &Key, result: Result<(), StoreError>) -> bool {
    let Err(error) = result else { return true };
    match error {
        StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_) => true,
        error => {
            tracing::error!(object = %key, %error, "a controller of the lab cannot write the object");
            matches!(error, StoreError::Invalid { .. })
        }
    }
}
