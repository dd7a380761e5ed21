//! Passes changes from the store to the dataplane's thread: first everything, then changes as they come.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt;
use tortie_api::Kind;
use tortie_store::{Change, Interest, Store};

use crate::pending::{Batch, Pending};
use crate::queue::Batches;

/// The maximum number of changes in a batch.
const MAX_BATCH: usize = 1_024;

/// Feeds the thread with objects of these kinds until it ends.
pub(crate) async fn run(store: Arc<dyn Store>, kinds: Vec<Kind>, batches: Batches) {
    let interests = kinds.iter().copied().map(Interest::all).collect();
    let mut changes = store.follow(interests).ready_chunks(MAX_BATCH);
    // Nothing is passed on before the whole cluster is known, because half of it may allow too much.
    let mut missing: BTreeSet<Kind> = kinds.into_iter().collect();
    let mut first = Pending::default();
    // While the thread does not keep up, nothing is read. In the end, the store ends the watch and lists again.
    while batches.wait_for_room().await {
        let Some(changes) = changes.next().await else { return };
        let batch = batch(changes, &mut missing);
        if missing.is_empty() && first.is_empty() {
            batches.send(batch);
            continue;
        }
        first.add(batch);
        if missing.is_empty() {
            tracing::info!("the node knows the whole cluster");
            if let Some(first) = first.take() {
                batches.send(first);
            }
        }
    }
}

/// Puts changes together, and removes the kinds from `missing` that are complete or cannot be read.
fn batch(changes: Vec<Change>, missing: &mut BTreeSet<Kind>) -> Batch {
    let mut batch = Batch::default();
    for change in changes {
        match change {
            Change::Put(stored) => drop(batch.changes.insert(stored.key, Some(stored.value))),
            Change::Gone { key, .. } => drop(batch.changes.insert(key, None)),
            Change::Progress(kind, position) => batch.positions.advance(kind, position),
            Change::InSync(kind, position) => {
                batch.positions.advance(kind, position);
                missing.remove(&kind);
                batch.unavailable.insert(kind, None);
            }
            Change::Unavailable(kind, error) => {
                missing.remove(&kind);
                batch.unavailable.insert(kind, Some(error));
            }
            Change::Restarted(_) => {}
        }
    }
    batch
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
