//! Replaces Kubernetes' EndpointSlice controller: Services with a selector get slices of the pods that it selects.

use std::sync::Arc;

use tokio::task::JoinHandle;
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_api::{Key, Kind};
use tortie_store::{Cache, Interest, Store, StoreError, Write};

use crate::LabError;

/// The inputs of slices, and slices themselves.
const KINDS: [Kind; 3] = [Kind::Service, Kind::Pod, Kind::EndpointSlice];

/// Starts the controller.
pub(crate) async fn start(store: Arc<dyn Store>) -> Result<JoinHandle<()>, LabError> {
    let mut cache = Cache::new(&*store, KINDS.map(Interest::all).to_vec());
    cache.complete().await?;
    Ok(tokio::spawn(async move {
        loop {
            for write in missing_writes(&cache) {
                carry_out(&*store, write).await;
            }
            if let Err(error) = cache.changed().await {
                tracing::error!(%error, "the lab's EndpointSlice controller has lost the datastore and misses changes of backends");
                return;
            }
        }
    }))
}

/// The writes after which the slices in the store match those that Services and pods imply. After a conflict, the
/// cache receives the change, and this runs again.
fn missing_writes(cache: &Cache) -> Vec<Write> {
    let mut wanted = implied_slices(cache.objects().map(|stored| (&stored.key, &stored.value)));
    let mut writes = Vec::new();
    for stored in cache.objects().filter(|stored| stored.key.kind == Kind::EndpointSlice) {
        let (key, version) = (stored.key.clone(), stored.version.clone());
        match wanted.remove(&key) {
            Some(value) if value == stored.value => {}
            Some(value) => writes.push(Write::Update(key, value, version)),
            None if is_implied(&stored.value) => writes.push(Write::Delete(key, Some(version))),
            None => {}
        }
    }
    writes.extend(wanted.into_iter().map(|(key, value)| Write::Create(key, value)));
    writes
}

async fn carry_out(store: &dyn Store, write: Write) {
    let key = write.key().clone();
    let done = store.write_all(vec![write]).await.map(drop);
    log_failure(&key, done.map_err(|stopped| stopped.error));
}

fn log_failure(key: &Key, result: Result<(), StoreError>) {
    match result {
        Ok(()) | Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
        Err(error) => tracing::error!(slice = %key, %error, "cannot write the EndpointSlice"),
    }
}
