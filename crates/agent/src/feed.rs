//! From the store to the dataplane's thread: list everything once, then watch; after a loss, list again and say what
//! is gone.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use futures::StreamExt;
use tortie_api::Key;
use tortie_calc::KINDS;
use tortie_store::{Event, Store, StoreError};

use crate::plane::Batch;

/// How long to wait before the store is asked again after it failed.
const RECONNECT_DELAY: Duration = Duration::from_millis(500);
/// How many events go into one batch at the most.
const BATCH: usize = 1_024;

/// Feeds the thread until it ends.
pub(crate) async fn run(store: Arc<dyn Store>, batches: mpsc::Sender<Batch>) {
    let mut known = BTreeSet::new();
    loop {
        match follow(&*store, &batches, &mut known).await {
            Ok(()) => return,
            Err(error @ (StoreError::Compacted(_) | StoreError::FellBehind)) => {
                tracing::info!(%error, "the store's history was lost; everything is listed again");
            }
            Err(error) => {
                tracing::warn!(%error, "the store was lost; what is in force stays so, and the store is asked again");
                tokio::time::sleep(RECONNECT_DELAY).await;
            }
        }
    }
}

/// Ends without an error when the thread has ended.
async fn follow(
    store: &dyn Store,
    batches: &mpsc::Sender<Batch>,
    known: &mut BTreeSet<Key>,
) -> Result<(), StoreError> {
    let mut changes = Vec::new();
    let mut listed_at = Vec::new();
    let mut now_known = BTreeSet::new();
    for kind in KINDS {
        let listing = store.list(kind).await?;
        listed_at.push((kind, listing.revision));
        for stored in listing.items {
            now_known.insert(stored.key.clone());
            changes.push((stored.key, Some(stored.value)));
        }
    }
    changes.extend(known.difference(&now_known).map(|gone| (gone.clone(), None)));
    *known = now_known;
    let revision = listed_at.iter().map(|(_, revision)| *revision).min().unwrap_or(0);
    if batches.send(Batch { changes, revision }).is_err() {
        return Ok(());
    }

    let mut events = store.watch(&KINDS, revision).await?.ready_chunks(BATCH);
    while let Some(chunk) = events.next().await {
        let mut batch = Batch { changes: Vec::new(), revision };
        for event in chunk {
            let event = event?;
            batch.revision = event.revision();
            let contained =
                listed_at.iter().any(|(kind, at)| *kind == event.key().kind && event.revision() <= *at);
            if contained {
                continue;
            }
            batch.changes.push(match event {
                Event::Put(stored) => {
                    known.insert(stored.key.clone());
                    (stored.key, Some(stored.value))
                }
                Event::Deleted { key, .. } => {
                    known.remove(&key);
                    (key, None)
                }
            });
        }
        if batches.send(batch).is_err() {
            return Ok(());
        }
    }
    Err(StoreError::Unavailable("the watch ended".to_owned()))
}
