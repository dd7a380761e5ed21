//! Passes changes from the store to the dataplane's thread: lists everything once, then watches. After a lost watch,
//! lists again and passes on what was deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{FutureExt, StreamExt};
use serde_json::Value;
use tortie_api::{Key, Kind};
use tortie_store::{Event, Revision, Store, StoreError, Watch};

use crate::backoff::{Backoff, random_seed};
use crate::pending::{Batch, Pending};
use crate::queue::Batches;

/// The maximum number of events in a batch.
const MAX_BATCH_EVENTS: usize = 1_024;
/// The size at which a batch is full, in bytes.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Feeds the thread with objects of these kinds until it ends.
pub(crate) async fn run(store: Arc<dyn Store>, wanted: Vec<Kind>, batches: Batches) {
    let mut known = BTreeSet::new();
    let mut backoff = Backoff::new(random_seed());
    loop {
        match follow(&*store, &wanted, &batches, &mut known, &mut backoff).await {
            Ok(()) => return,
            Err(error @ (StoreError::Compacted(_) | StoreError::FellBehind)) => {
                tracing::info!(%error, "the watch cannot continue; Tortie lists everything again");
            }
            Err(error) => {
                tracing::warn!(%error, "the store is unreachable; policy stays in force, and Tortie reconnects");
            }
        }
        // Also after lost history, because a burst of writes makes every agent lose it at the same time.
        backoff.wait().await;
    }
}

/// Returns without an error when the thread has ended.
async fn follow(
    store: &dyn Store,
    wanted: &[Kind],
    batches: &Batches,
    known: &mut BTreeSet<Key>,
    backoff: &mut Backoff,
) -> Result<(), StoreError> {
    // A listing is as large as the cluster, so it is not read before there is room for it.
    if !batches.wait_for_room().await {
        return Ok(());
    }
    let (objects, revision) = snapshot(store, wanted).await?;
    let gone = known.iter().filter(|key| !objects.contains_key(*key)).map(|key| (key.clone(), None));
    let mut changes: BTreeMap<_, _> = gone.collect();
    *known = objects.keys().cloned().collect();
    changes.extend(objects.into_iter().map(|(key, value)| (key, Some(value))));
    if !batches.send(Batch { changes, revision }) {
        return Ok(());
    }

    // Other kinds change nothing on the node, but somebody may wait until the node has processed such a write. A
    // write of a report would only cause more reports.
    let kinds: Vec<Kind> = Kind::all().filter(|kind| *kind != Kind::NodeReport).collect();
    let mut events = store.watch(&kinds, revision).await?;
    // While the thread does not keep up, no events are read. In the end, the store ends the watch.
    while batches.wait_for_room().await {
        let (batch, error) = next_batch(&mut events, wanted).await;
        // What came before an error is passed on, because a deletion would not be in the next listing.
        if let Some(batch) = batch {
            for (key, value) in &batch.changes {
                match value {
                    Some(_) => drop(known.insert(key.clone())),
                    None => drop(known.remove(key)),
                }
            }
            batches.send(batch);
            backoff.succeeded();
        }
        if let Some(error) = error {
            return Err(error);
        }
    }
    Ok(())
}

/// Waits for the next event and reads those that are there already, up to a limit. Returns them, and the error after
/// them.
async fn next_batch(events: &mut Watch, wanted: &[Kind]) -> (Option<Batch>, Option<StoreError>) {
    let mut read = Pending::default();
    let mut next = Some(events.next().await);
    let mut count = 0;
    while let Some(item) = next {
        match item {
            Some(Ok(event)) => {
                let revision = event.revision();
                tracing::debug!(revision, object = %event.key(), "an object has changed in the store");
                let change = wanted.contains(&event.key().kind).then(|| change(event));
                read.add(Batch { changes: change.into_iter().collect(), revision });
            }
            Some(Err(error)) => return (read.take(), Some(error)),
            None => return (read.take(), Some(ended())),
        }
        count += 1;
        if count == MAX_BATCH_EVENTS || read.bytes() >= MAX_BATCH_BYTES {
            break;
        }
        next = events.next().now_or_never();
    }
    (read.take(), None)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use async_trait::async_trait;
    use serde_json::json;
    use tortie_store::{Embedded, Listing, Stored, Write};

    use super::*;
    use crate::queue::{Inbox, bounded};

    const WANTED: [Kind; 2] = [Kind::Namespace, Kind::Node];

    fn key(name: &str) -> Key {
        Key::global(Kind::Namespace, name)
    }

    /// What the thread has been given.
    #[derive(Debug, Default, PartialEq)]
    struct Given(BTreeMap<Key, Value>, Revision);

    impl Given {
        /// Takes batches until the revision is reached.
        async fn take_until(mut self, inbox: &Inbox, revision: Revision) -> Self {
            while self.1 < revision {
                let work = inbox.take(Some(std::time::Instant::now())).expect("the feed runs");
                let Some(batch) = work.batch else {
                    tokio::task::yield_now().await;
                    continue;
                };
                self.1 = batch.revision;
                for (key, value) in batch.changes {
                    match value {
                        Some(value) => drop(self.0.insert(key, value)),
                        None => drop(self.0.remove(&key)),
                    }
                }
            }
            self
        }
    }

    async fn stored(store: &Embedded) -> Given {
        let listing = store.list(Kind::Namespace).await.unwrap();
        Given(listing.items.into_iter().map(|stored| (stored.key, stored.value)).collect(), listing.revision)
    }

    /// The feed does not read more than there is room for, and passes everything on in the end: in one watch with
    /// many events at once, and also if the store has ended its watch meanwhile.
    #[tokio::test]
    async fn a_queue_that_is_full_stops_the_feed_and_loses_nothing() {
        for (limit, count) in [(usize::MAX, 3_000), (1, 3_000), (1, 10_000)] {
            let store = Arc::new(Embedded::in_memory().unwrap());
            for name in ["stays", "goes"] {
                store.create(&key(name), json!(0)).await.unwrap();
            }
            let (batches, inbox) = bounded(limit);
            tokio::spawn(run(store.clone(), WANTED.to_vec(), batches));
            while inbox.waiting().0 == 0 {
                tokio::task::yield_now().await;
            }
            let writes = (0..count).map(|n| Write::Create(key(&format!("n{n}")), json!(n)));
            let writes = writes.chain([Write::Delete(key("goes"), None)]);
            store.write_all(writes.collect()).await.unwrap();
            let expected = stored(&store).await;
            for _ in 0..10_000 {
                tokio::task::yield_now().await;
            }
            if limit == 1 {
                assert_eq!(inbox.waiting().0, 2, "nothing is read while the queue is full");
            }
            let given = Given::default().take_until(&inbox, expected.1).await;
            assert!(given == expected, "{limit}, {count}: {} of {}", given.0.len(), expected.0.len());
        }
    }

    /// A store whose watch delivers a deletion, if there is something to delete, and then an error.
    struct Breaking(Embedded, AtomicUsize);

    impl Breaking {
        fn new() -> Self {
            Self(Embedded::in_memory().unwrap(), AtomicUsize::new(0))
        }
    }

    #[async_trait]
    impl Store for Breaking {
        async fn watch(&self, kinds: &[Kind], after: Revision) -> Result<Watch, StoreError> {
            self.1.fetch_add(1, Ordering::Relaxed);
            let exists = self.0.get(&key("goes")).await?.is_some();
            if exists {
                self.0.delete(&key("goes"), None).await?;
            }
            let events = self.0.watch(kinds, after).await?.take(usize::from(exists));
            Ok(events.chain(futures::stream::iter([Err(StoreError::FellBehind)])).boxed())
        }

        async fn list(&self, kind: Kind) -> Result<Listing, StoreError> {
            self.0.list(kind).await
        }
        async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
            self.0.get(key).await
        }
        async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
            self.0.create(key, value).await
        }
        async fn update(&self, key: &Key, value: Value, expected: Revision) -> Result<Stored, StoreError> {
            self.0.update(key, value, expected).await
        }
        async fn delete(&self, key: &Key, expected: Option<Revision>) -> Result<Revision, StoreError> {
            self.0.delete(key, expected).await
        }
    }

    /// The next listing lacks the object, so nobody would notice later that it is gone.
    #[tokio::test]
    async fn a_deletion_before_the_end_of_a_watch_is_not_lost() {
        let store = Breaking::new();
        for name in ["goes", "stays"] {
            store.create(&key(name), json!(0)).await.unwrap();
        }
        let (batches, inbox) = bounded(usize::MAX);
        let mut known = BTreeSet::new();
        let error = follow(&store, &WANTED, &batches, &mut known, &mut Backoff::new(0)).await.unwrap_err();
        assert_eq!(error, StoreError::FellBehind);
        let batch = inbox.take(None).unwrap().batch.unwrap();
        assert_eq!(batch.changes, BTreeMap::from([(key("goes"), None), (key("stays"), Some(json!(0)))]));
        assert_eq!(known, BTreeSet::from([key("stays")]));
    }

    /// Agents that all list everything again at once, and fall behind again, would never come to an end.
    #[tokio::test(start_paused = true)]
    async fn a_feed_that_loses_its_watch_again_and_again_waits_longer() {
        let store = Arc::new(Breaking::new());
        store.create(&key("stays"), json!(0)).await.unwrap();
        let (batches, _inbox) = bounded(usize::MAX);
        let feed = run(store.clone(), WANTED.to_vec(), batches);
        assert!(tokio::time::timeout(Duration::from_secs(60), feed).await.is_err(), "it goes on");
        let watches = store.1.load(Ordering::Relaxed);
        assert!((10..40).contains(&watches), "{watches} watches in a minute");
    }
}
