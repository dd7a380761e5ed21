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
            for write in missing_writes(&objects) {
                carry_out(&*store, write).await;
            }
            if let Err(error) = cache.changed().await {
                tracing::error!(what, %error, "a controller of the lab has lost the datastore and misses changes");
                return;
            }
        }
    }))
}

async fn carry_out(store: &dyn Store, mut write: Write) {
    // Slices are compared with what Services imply (`tortie apply --wait`).
    if let Write::Create(key, value) = &mut write
        && key.kind != Kind::EndpointSlice
    {
        identify(value);
    }
    let key = write.key().clone();
    let done = store.write_all(vec![write]).await.map(drop);
    log_failure(&key, done.map_err(|stopped| stopped.error));
}

fn log_failure(key: &Key, result: Result<(), StoreError>) {
    match result {
        Ok(()) | Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
        Err(error) => {
            tracing::error!(object = %key, %error, "a controller of the lab cannot write the object")
        }
    }
}
