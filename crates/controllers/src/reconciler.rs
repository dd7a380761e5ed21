//! The loop that carries out decisions: follows both sides, and writes what differs.

use std::collections::BTreeMap;
use std::future::pending;

use futures::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep_until};
use tortie_api::{Key, Kind, Position};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Follow, Interest, Store, StoreError, Stored};

use crate::decision::Decision;

/// How many writes run at the same time.
const AT_ONCE: usize = 16;
/// The maximum number of changes that are read before something is written.
const MAX_BATCH: usize = 4096;

/// Where a change comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// What the controllers read only.
    Source,
    /// What they write.
    Target,
}

/// What is known of both sides, and what to do about it.
pub(crate) trait Reconciler {
    /// Takes note of a change.
    fn note(&mut self, side: Side, change: Change);
    /// The objects that may differ from what they should be, and forgets them.
    fn take_due(&mut self) -> Vec<Key>;
    /// Takes an object back that could not be written.
    fn retry(&mut self, key: Key);
    /// What to do about an object.
    fn decide(&self, key: &Key) -> Decision;
}

/// The stores of the two sides.
#[derive(Clone, Copy)]
pub(crate) struct Stores<'a> {
    pub(crate) source: &'a dyn Store,
    pub(crate) target: &'a dyn Store,
}

/// What came of a decision.
enum Outcome {
    Done,
    /// The change to note at once; the followers report it later.
    Changed(Side, Change),
    /// The store rejects the object itself. It is tried again when it changes.
    Rejected(StoreError),
    Failed(StoreError),
}

/// Reconciles until the future is dropped.
pub(crate) async fn run(
    mut reconciler: impl Reconciler,
    stores: Stores<'_>,
    mut sources: Follow,
    mut targets: Follow,
) {
    let mut backoff = Backoff::new(random_seed());
    let mut retry_at: Option<Instant> = None;
    let mut reported = BTreeMap::new();
    loop {
        let at = retry_at;
        let retry = async move {
            match at {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            Some(change) = sources.next() => reconciler.note(Side::Source, change),
            Some(change) = targets.next() => reconciler.note(Side::Target, change),
            () = retry => retry_at = None,
        }
        for _ in 0..MAX_BATCH {
            if let Some(Some(change)) = sources.next().now_or_never() {
                reconciler.note(Side::Source, change);
            } else if let Some(Some(change)) = targets.next().now_or_never() {
                reconciler.note(Side::Target, change);
            } else {
                break;
            }
        }
        if retry_at.is_some() {
            continue;
        }
        match round(&mut reconciler, stores, &mut reported).await {
            Ok(()) => backoff.succeeded(),
            Err(error) => {
                tracing::warn!(%error, "not everything could be written; the controllers retry");
                retry_at = Some(backoff.failed(Instant::now().into_std()).into());
            }
        }
    }
}

/// Writes what differs: objects after those that they depend on. If a write fails, what depends on it waits.
async fn round(
    reconciler: &mut impl Reconciler,
    stores: Stores<'_>,
    reported: &mut BTreeMap<Key, &'static str>,
) -> Result<(), StoreError> {
    let mut phases: BTreeMap<u8, Vec<(Key, Decision)>> = BTreeMap::new();
    for key in reconciler.take_due() {
        match reconciler.decide(&key) {
            Decision::Nothing => drop(reported.remove(&key)),
            Decision::Foreign(what) => {
                if reported.insert(key.clone(), what) != Some(what) {
                    tracing::warn!(object = %key, "somebody else created the object, so the controllers leave it as it is; delete it, and Tortie {what}");
                }
            }
            decision => phases.entry(key.kind.apply_order()).or_default().push((key, decision)),
        }
    }
    let mut failure: Option<StoreError> = None;
    for decisions in phases.into_values() {
        let goes_on = |(key, decision): &(Key, Decision)| match &failure {
            None => true,
            Some(StoreError::Full { .. }) => needs_no_room(key, decision),
            Some(_) => false,
        };
        let (decisions, waiting): (Vec<_>, Vec<_>) = decisions.into_iter().partition(goes_on);
        waiting.into_iter().for_each(|(key, _)| reconciler.retry(key));
        let outcomes = futures::stream::iter(decisions).map(|(key, decision)| async {
            let outcome = carry_out(stores, &key, decision).await;
            (key, outcome)
        });
        let mut outcomes = outcomes.buffer_unordered(AT_ONCE);
        while let Some((key, outcome)) = outcomes.next().await {
            match outcome {
                Outcome::Done => {}
                Outcome::Changed(side, change) => reconciler.note(side, change),
                Outcome::Rejected(error) => tracing::error!(%error, "the object cannot be written"),
                Outcome::Failed(error) => {
                    reconciler.retry(key);
                    // What a store without room refuses holds up less than other errors do.
                    let is_full = matches!(error, StoreError::Full { .. });
                    failure = failure.filter(|_| is_full).or(Some(error));
                }
            }
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Whether a write is done while a store has no room for others: pods that are gone make room, and a policy that has changed must not wait
/// for an operator. Nothing else is: what depends on an object that the store has refused would open something.
fn needs_no_room(key: &Key, decision: &Decision) -> bool {
    match decision {
        Decision::Delete(..) => [Kind::Pod, Kind::WorkloadEndpoint].contains(&key.kind),
        Decision::Update(..) => key.kind.is_policy(),
        Decision::Create(_) | Decision::Nothing | Decision::Foreign(_) => false,
    }
}

async fn carry_out(stores: Stores<'_>, key: &Key, decision: Decision) -> Outcome {
    let written = match decision {
        Decision::Nothing | Decision::Foreign(_) => return Outcome::Done,
        Decision::Create(value) => stores.target.create(key, value).await,
        Decision::Update(value, version) => stores.target.update(key, value, &version).await,
        Decision::Delete(version, source) => {
            // A list may lack what exists.
            if let Some(source) = source {
                match stores.source.get(&source).await {
                    Ok(None) => match is_empty(stores.source).await {
                        Ok(false) => {}
                        Ok(true) => return Outcome::Failed(no_namespace()),
                        Err(error) => return Outcome::Failed(error),
                    },
                    Ok(Some(stored)) => {
                        tracing::warn!(object = %source, "a list or watch lacks an object that exists; its copy stays");
                        return Outcome::Changed(Side::Source, Change::Put(stored));
                    }
                    Err(error) => return Outcome::Failed(error),
                }
            }
            return match stores.target.delete(key, Some(&version)).await {
                Ok(position) => gone(key, position),
                Err(StoreError::NotFound(_)) => Outcome::Done,
                Err(error) => Outcome::Failed(error),
            };
        }
    };
    match written {
        Ok(stored) => put(stored),
        Err(error @ StoreError::Invalid { .. }) => Outcome::Rejected(error),
        Err(error) => Outcome::Failed(error),
    }
}

/// Whether a Kubernetes API has lost its data: each has namespaces.
pub(crate) async fn is_empty(source: &dyn Store) -> Result<bool, StoreError> {
    Ok(source.list_page(&Interest::all(Kind::Namespace), None).await?.items.is_empty())
}

pub(crate) fn no_namespace() -> StoreError {
    let problem =
        "the Kubernetes API has no Namespace, so it may have lost its data; copies stay until it has one";
    StoreError::Unavailable(problem.to_owned())
}

fn put(stored: Stored) -> Outcome {
    Outcome::Changed(Side::Target, Change::Put(stored))
}

fn gone(key: &Key, position: Position) -> Outcome {
    Outcome::Changed(Side::Target, Change::Gone { key: key.clone(), position })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};
    use tortie_store::Embedded;

    use super::*;

    /// Decisions about single objects, and those that wait.
    #[derive(Default)]
    struct Decided {
        decisions: BTreeMap<Key, Decision>,
        waiting: Vec<Key>,
    }

    impl Reconciler for Decided {
        fn note(&mut self, _: Side, _: Change) {}

        fn take_due(&mut self) -> Vec<Key> {
            self.decisions.keys().cloned().collect()
        }

        fn retry(&mut self, key: Key) {
            self.waiting.push(key);
        }

        fn decide(&self, key: &Key) -> Decision {
            self.decisions[key].clone()
        }
    }

    fn of_size(bytes: usize) -> Value {
        json!({"note": "x".repeat(bytes)})
    }

    /// What the store refuses waits, and what depends on it. Policies that have changed and pods that are gone do not.
    #[tokio::test]
    async fn a_full_store_holds_up_what_needs_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        Embedded::init(&path, None).unwrap();
        let (source, target) =
            (Embedded::in_memory().unwrap(), Embedded::open_with_quota(&path, 10_000).unwrap());
        let key = |kind, name: &str| Key::namespaced(kind, "n", name);
        let (policy, gone) = (key(Kind::KubernetesNetworkPolicy, "p"), key(Kind::Pod, "gone"));
        let stored = target.create(&policy, of_size(4_000)).await.unwrap();
        let pod = target.create(&gone, of_size(4_000)).await.unwrap();
        let (namespace, new) = (Key::global(Kind::Namespace, "new"), key(Kind::Pod, "new"));
        let decisions = [
            (namespace.clone(), Decision::Create(of_size(4_000))),
            (policy.clone(), Decision::Update(of_size(3_000), stored.version)),
            (gone.clone(), Decision::Delete(pod.version, None)),
            (new.clone(), Decision::Create(of_size(10))),
        ];
        let mut decided = Decided { decisions: decisions.into(), waiting: Vec::new() };
        let stores = Stores { source: &source, target: &target };
        let failed = round(&mut decided, stores, &mut BTreeMap::new()).await;
        assert!(matches!(failed, Err(StoreError::Full { .. })), "{failed:?}");
        assert_eq!(target.get(&policy).await.unwrap().unwrap().value, of_size(3_000));
        assert_eq!(target.get(&gone).await.unwrap(), None);
        assert_eq!(target.get(&new).await.unwrap(), None);
        decided.waiting.sort();
        let mut expected = vec![namespace, new];
        expected.sort();
        assert_eq!(decided.waiting, expected);
    }
}
