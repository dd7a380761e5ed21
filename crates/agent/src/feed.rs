//! Passes changes from the store to the dataplane's thread: first everything, then changes as they come.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::StreamExt;
use futures::stream::ReadyChunks;
use tokio::sync::watch;
use tortie_api::{Kind, Positions};
use tortie_flannel::LeaseSnapshot;
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Follow, Interest, Store, StoreError};

use crate::pending::Batch;
use crate::queue::Batches;

/// The maximum number of changes in a batch.
pub(crate) const MAX_BATCH: usize = 1_024;

/// flannel's leases in etcd, if there are any.
pub(crate) type Leases = Option<watch::Receiver<Arc<LeaseSnapshot>>>;

/// Feeds the thread with objects of these kinds, and with flannel's leases, until it ends.
pub(crate) async fn run(store: Arc<dyn Store>, kinds: Vec<Kind>, batches: Batches, mut leases: Leases) {
    let interests = kinds.iter().copied().map(Interest::all).collect();
    let mut changes = store.follow(interests).ready_chunks(MAX_BATCH);
    // They are there before the first routes.
    let known = leases.as_mut().map(|leases| leases.borrow_and_update().clone());
    batches.send(Batch { leases: known, more_follows: true, ..Batch::default() });
    if snapshot(&*store, &kinds, &mut changes, &batches).await.is_none() {
        return;
    }
    tracing::info!("the node knows the whole cluster");
    // While the thread does not keep up, nothing is read. In the end, the store ends the watch and lists again.
    while batches.wait_for_room().await {
        tokio::select! {
            changes = changes.next() => match changes {
                Some(changes) => batches.send(batch(changes)),
                None => return,
            },
            leases = changed(&mut leases) => batches.send(Batch { leases: Some(leases), ..Batch::default() }),
        };
    }
}

/// The leases, when they have changed.
async fn changed(leases: &mut Leases) -> Arc<LeaseSnapshot> {
    if let Some(leases) = leases
        && leases.changed().await.is_ok()
    {
        return leases.borrow_and_update().clone();
    }
    std::future::pending().await
}

/// Sends everything that is stored, in parts, so that it never is in memory as a whole. It contains everything that was
/// stored before any object in it, so that no policy is missing that existed before a pod, although each kind is listed
/// at another time. It is not complete while a kind is forbidden, because policy could depend on its objects. A kind that
/// the store does not have has none. `None` if the thread or the store has ended.
async fn snapshot(
    store: &dyn Store,
    kinds: &[Kind],
    changes: &mut ReadyChunks<Follow>,
    batches: &Batches,
) -> Option<()> {
    let mut missing: BTreeSet<Kind> = kinds.iter().copied().collect();
    let (mut positions, mut end) = (Positions::default(), None);
    while batches.wait_for_room().await {
        let mut part = batch(changes.next().await?);
        for (kind, error) in &part.unavailable {
            match error {
                None | Some(StoreError::KindAbsent(_)) => drop(missing.remove(kind)),
                Some(_) => drop(missing.insert(*kind)),
            }
        }
        part.advance(&mut positions);
        // The store may have gone back, and would never reach a position that it told before.
        if !part.restarted.is_empty() {
            end = None;
        }
        if missing.is_empty() && end.is_none() {
            end = Some(barrier(store, kinds).await);
        }
        let complete = missing.is_empty() && end.as_ref().is_some_and(|end| positions.reach(end));
        part.more_follows = !complete;
        batches.send(part);
        if complete {
            return Some(());
        }
    }
    None
}

async fn barrier(store: &dyn Store, kinds: &[Kind]) -> Positions {
    let mut backoff = Backoff::new(random_seed());
    loop {
        match store.barrier(kinds).await {
            Ok(positions) => return positions,
            Err(error) => {
                tracing::warn!(%error, "cannot read how far the store is; Tortie retries");
                backoff.wait().await;
            }
        }
    }
}

/// Puts changes together.
pub(crate) fn batch(changes: Vec<Change>) -> Batch {
    let mut batch = Batch::default();
    for change in changes {
        match change {
            Change::Put(stored) => drop(batch.changes.insert(stored.key, Some(stored.value))),
            Change::Gone { key, .. } => drop(batch.changes.insert(key, None)),
            Change::Progress(kind, position) => batch.positions.advance(kind, position),
            Change::InSync(kind, position) => {
                batch.positions.advance(kind, position);
                batch.unavailable.insert(kind, None);
            }
            Change::Unavailable(kind, error) => {
                // Nobody waits for the kind, as nobody knows how far it is.
                batch.positions.forget(kind);
                batch.unavailable.insert(kind, Some(error));
            }
            Change::Restarted(kind) => {
                batch.positions.reset(kind);
                batch.restarted.insert(kind);
            }
        }
    }
    batch
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use async_trait::async_trait;
    use futures::FutureExt;
    use serde_json::{Value, json};
    use tokio::sync::mpsc::UnboundedReceiver;
    use tortie_api::{Key, Position};
    use tortie_store::{Embedded, Endpoints, Page, PageToken, Stored, Version, Write};

    use super::*;
    use crate::queue::{Inbox, bounded};

    const KINDS: [Kind; 2] = [Kind::Namespace, Kind::Node];

    fn key(name: &str) -> Key {
        Key::global(Kind::Namespace, name)
    }

    /// Takes batches until these positions are reached; returns the objects.
    async fn objects_at(inbox: &Inbox, positions: &Positions) -> BTreeMap<Key, Value> {
        let (mut objects, mut reached) = (BTreeMap::new(), Positions::default());
        while !reached.reach(positions) {
            let work = inbox.take(Some(std::time::Instant::now())).expect("the feed runs");
            let Some(batch) = work.batch else {
                tokio::task::yield_now().await;
                continue;
            };
            reached.advance_all(&batch.positions);
            for (key, value) in batch.changes {
                match value {
                    Some(value) => drop(objects.insert(key, value)),
                    None => drop(objects.remove(&key)),
                }
            }
        }
        objects
    }

    async fn stored(store: &Embedded) -> BTreeMap<Key, Value> {
        let listing = store.list(Kind::Namespace).await.unwrap();
        listing.items.into_iter().map(|stored| (stored.key, stored.value)).collect()
    }

    /// The feed does not read more than there is room for, and passes everything on in the end: in one watch with
    /// many events at once, and also if it lags far behind.
    #[tokio::test]
    async fn a_queue_that_is_full_stops_the_feed_and_loses_nothing() {
        for (limit, count) in [(usize::MAX, 3_000), (1, 3_000), (1, 10_000)] {
            let store = Arc::new(Embedded::in_memory().unwrap());
            for name in ["stays", "goes"] {
                store.create(&key(name), json!(0)).await.unwrap();
            }
            let (batches, inbox) = bounded(limit);
            tokio::spawn(run(store.clone(), KINDS.to_vec(), batches, None));
            while inbox.waiting().0 == 0 {
                tokio::task::yield_now().await;
            }
            let writes = (0..count).map(|n| Write::Create(key(&format!("n{n}")), json!(n)));
            let writes = writes.chain([Write::Delete(key("goes"), None)]);
            store.write_all(writes.collect()).await.unwrap();
            let (expected, positions) = (stored(&store).await, store.barrier(&KINDS).await.unwrap());
            for _ in 0..10_000 {
                tokio::task::yield_now().await;
            }
            if limit == 1 {
                assert_eq!(inbox.waiting().0, 2, "nothing is read while the queue is full");
            }
            let given = objects_at(&inbox, &positions).await;
            assert!(given == expected, "{limit}, {count}: {} of {}", given.len(), expected.len());
        }
    }

    /// A store that tells one position after another, and has nothing else.
    struct Told(Mutex<Vec<u64>>, Embedded);

    impl Endpoints for Told {}

    #[async_trait]
    impl Store for Told {
        async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
            self.1.get(key).await
        }

        async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
            self.1.list_page(interest, after).await
        }

        async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
            self.1.create(key, value).await
        }

        async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
            self.1.update(key, value, expected).await
        }

        async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
            self.1.delete(key, expected).await
        }

        fn follow(&self, interests: Vec<Interest>) -> Follow {
            self.1.follow(interests)
        }

        async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
            let position = Position(self.0.lock().unwrap().pop().unwrap());
            Ok(kinds.iter().map(|kind| (*kind, position)).collect())
        }
    }

    /// An agent starts while an older copy of the store replaces it: nobody reaches the positions of the former one.
    #[tokio::test]
    async fn a_store_that_goes_back_lets_the_first_snapshot_end() {
        let store = Told(Mutex::new(vec![40, 90]), Embedded::in_memory().unwrap());
        let at = |position| KINDS.map(|kind| Change::InSync(kind, Position(position)));
        let parts = [at(10).to_vec(), KINDS.map(Change::Restarted).to_vec(), at(40).to_vec()];
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let changes = futures::stream::unfold(receiver, async |mut receiver: UnboundedReceiver<Change>| {
            Some((receiver.recv().await?, receiver))
        });
        let mut changes = changes.boxed().ready_chunks(MAX_BATCH);
        let (batches, _inbox) = bounded(usize::MAX);
        let mut ended = Box::pin(snapshot(&store, &KINDS, &mut changes, &batches));
        for part in parts {
            assert!(ended.as_mut().now_or_never().is_none(), "positions are missing");
            part.into_iter().for_each(|change| sender.send(change).unwrap());
        }
        assert_eq!(ended.as_mut().now_or_never(), Some(Some(())));
    }
}
