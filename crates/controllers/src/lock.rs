//! Works while the datastore is not locked, as `calicoctl datastore migrate` does.

use futures::{Stream, StreamExt};
use tortie_api::calico::ClusterInformation;
use tortie_api::{Key, Kind};
use tortie_store::{Change, Interest, Store, StoreError};

/// Does the work whenever the datastore is known and not locked. The work is dropped when the datastore is locked.
pub(crate) async fn run<F: Future<Output = ()>>(store: &dyn Store, work: impl Fn() -> F) {
    let key = Key::global(Kind::ClusterInformation, ClusterInformation::NAME);
    let mut changes = store.follow(vec![Interest::in_object(&key)]);
    let mut is_locked = None;
    loop {
        let unlocked = async {
            match is_locked {
                Some(false) => work().await,
                _ => std::future::pending().await,
            }
        };
        let next = tokio::select! {
            () = unlocked => return,
            next = next(&mut changes, is_locked) => next,
        };
        match next {
            None => return,
            Some(true) => tracing::warn!("{key} locks the datastore; the controllers wait"),
            Some(false) if is_locked == Some(true) => {
                tracing::info!("{key} does not lock the datastore any more")
            }
            Some(false) => {}
        }
        is_locked = next;
    }
}

/// Waits until it is known whether the datastore is locked, and differs from before. `None` if the store has ended.
async fn next(changes: &mut (impl Stream<Item = Change> + Unpin), before: Option<bool>) -> Option<bool> {
    loop {
        let now = match changes.next().await? {
            Change::Put(stored) => Some(ClusterInformation::is_locked(&stored.value)),
            Change::Gone { .. } | Change::Unavailable(_, StoreError::KindAbsent(_)) => Some(false),
            // The object would have come before.
            Change::InSync(..) => before.or(Some(false)),
            Change::Unavailable(kind, error) => {
                tracing::warn!(%error, "the controllers cannot read {} and wait", kind.name());
                before
            }
            Change::Restarted(_) | Change::Progress(..) => before,
        };
        if now != before {
            return now;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use serde_json::json;
    use tortie_api::Position;
    use tortie_store::{Stored, Written};

    use super::*;

    #[test]
    fn the_lock_is_known_when_the_object_or_its_absence_is() {
        let kind = Kind::ClusterInformation;
        let put = |ready: bool| {
            let value = json!({"spec": {"datastoreReady": ready}});
            Change::Put(Stored::new(Key::global(kind, "default"), value, Written::at(1)))
        };
        let in_sync = || Change::InSync(kind, Position(1));
        let forbidden = || Change::Unavailable(kind, StoreError::Forbidden("no".to_owned()));
        let gone = || Change::Gone { key: Key::global(kind, "default"), position: Position(2) };
        for (changes, before, expected) in [
            (vec![Change::Restarted(kind), in_sync()], None, Some(Some(false))),
            (vec![Change::Restarted(kind), put(false), in_sync()], None, Some(Some(true))),
            (vec![put(true)], None, Some(Some(false))),
            (vec![in_sync(), put(false)], Some(true), None),
            (vec![put(false), put(true)], Some(true), Some(Some(false))),
            (vec![gone()], Some(true), Some(Some(false))),
            (vec![put(true), put(false)], Some(false), Some(Some(true))),
            (vec![forbidden()], None, None),
            (vec![forbidden(), Change::Progress(kind, Position(1))], Some(true), None),
            (vec![Change::Unavailable(kind, StoreError::KindAbsent(kind))], None, Some(Some(false))),
        ] {
            let shown = format!("{changes:?} after {before:?}");
            let rest = futures::stream::pending();
            let mut changes = Box::pin(futures::stream::iter(changes).chain(rest));
            assert_eq!(next(&mut changes, before).now_or_never(), expected, "{shown}");
        }
    }
}
