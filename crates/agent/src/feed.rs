//! Passes changes from the store to the dataplane's thread: lists everything once, then watches. After a lost watch,
//! lists again and passes on what was deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::Value;
use tortie_api::{Key, Kind};
use tortie_store::{Event, Revision, Store, StoreError};

use crate::plane::{Batch, Batches};

/// The delay before the store is read again after an error.
const RECONNECT_DELAY: Duration = Duration::from_millis(500);
/// The maximum number of events in a batch.
const BATCH: usize = 1_024;

/// Feeds the thread with objects of these kinds until it ends.
pub(crate) async fn run(store: Arc<dyn Store>, wanted: Vec<Kind>, batches: Batches) {
    let mut known = BTreeSet::new();
    loop {
        match follow(&*store, &wanted, &batches, &mut known).await {
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

/// Returns without an error when the thread has ended.
async fn follow(
    store: &dyn Store,
    wanted: &[Kind],
    batches: &Batches,
    known: &mut BTreeSet<Key>,
) -> Result<(), StoreError> {
    let (objects, revision) = snapshot(store, wanted).await?;
    let gone = known.iter().filter(|key| !objects.contains_key(*key)).map(|key| (key.clone(), None));
    let mut changes: Vec<_> = gone.collect();
    *known = objects.keys().cloned().collect();
    changes.extend(objects.into_iter().map(|(key, value)| (key, Some(value))));
    if !batches.send(Batch { changes, revision }) {
        return Ok(());
    }

    // Other kinds change nothing on the node, but somebody may wait until the node has processed such a write. A
    // write of a report would only cause more reports.
    let kinds: Vec<Kind> = Kind::all().filter(|kind| *kind != Kind::NodeReport).collect();
    let mut events = store.watch(&kinds, revision).await?.ready_chunks(BATCH);
    while let Some(chunk) = events.next().await {
        let mut batch = Batch { changes: Vec::new(), revision };
        for event in chunk {
            let event = event?;
            batch.revision = event.revision();
            if !wanted.contains(&event.key().kind) {
                continue;
            }
            let (key, value) = change(event);
            match value {
                Some(_) => drop(known.insert(key.clone())),
                None => drop(known.remove(&key)),
            }
            batch.changes.push((key, value));
        }
        if !batches.send(batch) {
            return Ok(());
        }
    }
    Err(ended())
}

/// All objects that a node's state depends on, at one moment. The kinds are listed one after another while changes
/// continue. Changes between the first and the last list are applied, so that no policy is missing that existed
/// before a pod.
async fn snapshot(
    store: &dyn Store,
    wanted: &[Kind],
) -> Result<(BTreeMap<Key, Value>, Revision), StoreError> {
    let mut objects = BTreeMap::new();
    let mut listed = BTreeMap::new();
    for kind in wanted.iter().copied() {
        let listing = store.list(kind).await?;
        listed.insert(kind, listing.revision);
        objects.extend(listing.items.into_iter().map(|stored| (stored.key, stored.value)));
    }
    let mut reached = listed.values().copied().min().unwrap_or(0);
    let moment = listed.values().copied().max().unwrap_or(0);
    if reached == moment {
        return Ok((objects, moment));
    }
    // Of all kinds, because the last write may be of any kind.
    let mut events = store.watch(&Kind::all().collect::<Vec<_>>(), reached).await?;
    while reached < moment {
        let event = events.next().await.ok_or_else(ended)??;
        reached = event.revision();
        if reached > moment || listed.get(&event.key().kind).is_none_or(|at| reached <= *at) {
            continue;
        }
        match change(event) {
            (key, Some(value)) => drop(objects.insert(key, value)),
            (key, None) => drop(objects.remove(&key)),
        }
    }
    Ok((objects, moment))
}

fn change(event: Event) -> (Key, Option<Value>) {
    match event {
        Event::Put(stored) => (stored.key, Some(stored.value)),
        Event::Deleted { key, .. } => (key, None),
    }
}

fn ended() -> StoreError {
    StoreError::Unavailable("the watch ended".to_owned())
}
