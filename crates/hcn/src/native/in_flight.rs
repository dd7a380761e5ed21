//! Calls without an answer. HNS may carry out a call long after its deadline, so a later change of the same object waits for
//! its end: otherwise an old document could replace a new one, or an object appear that was given up.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{Call, Guid, Kind};

/// The changes that HNS has not finished, by number.
#[derive(Clone, Default)]
pub(super) struct InFlight(Arc<Mutex<Changes>>);

#[derive(Default)]
struct Changes {
    next: u64,
    under_way: BTreeMap<u64, (Kind, Guid, Instant)>,
}

/// A change that is under way. It ends when this is dropped.
pub(super) struct Change {
    all: InFlight,
    number: u64,
}

impl Drop for Change {
    fn drop(&mut self) {
        self.all.locked().under_way.remove(&self.number);
    }
}

impl InFlight {
    /// Begins a call. A call that only reads begins always, and is not counted.
    ///
    /// # Errors
    /// A change of the same object began before `now - deadline`, and has not ended.
    pub(super) fn begin(
        &self,
        call: &Call,
        now: Instant,
        deadline: Duration,
    ) -> Result<Option<Change>, (Kind, Guid)> {
        let Some((kind, id)) = object(call) else { return Ok(None) };
        let mut changes = self.locked();
        let is_late = |(of, other, began): &(Kind, Guid, Instant)| {
            (*of, *other) == (kind, id) && now.saturating_duration_since(*began) >= deadline
        };
        if changes.under_way.values().any(is_late) {
            return Err((kind, id));
        }
        let number = changes.next;
        changes.next += 1;
        changes.under_way.insert(number, (kind, id, now));
        Ok(Some(Change { all: self.clone(), number }))
    }

    fn locked(&self) -> MutexGuard<'_, Changes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The object that a call changes. An object whose identifier HNS chooses counts as a change of its network.
fn object(call: &Call) -> Option<(Kind, Guid)> {
    match call {
        Call::Enumerate { .. } | Call::Query { .. } | Call::Version | Call::Emulator { .. } => None,
        Call::AttachToHost { endpoint } => Some((Kind::Endpoint, *endpoint)),
        Call::Create { kind, network, id, .. } if *id == Guid::default() && *network == Guid::default() => {
            Some((*kind, *id))
        }
        Call::Create { network, id, .. } if *id == Guid::default() => Some((Kind::Network, *network)),
        Call::Create { kind, id, .. } | Call::Modify { kind, id, .. } | Call::Delete { kind, id } => {
            Some((*kind, *id))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(30);

    fn modify(id: Guid) -> Call {
        Call::Modify { kind: Kind::Endpoint, id, settings: String::new() }
    }

    #[test]
    fn a_change_waits_for_a_late_one_of_the_same_object() {
        let (one, other): (Guid, Guid) = (
            "0e2a0000-0000-4000-8000-000000000001".parse().unwrap(),
            "0e2a0000-0000-4000-8000-000000000002".parse().unwrap(),
        );
        let (all, start) = (InFlight::default(), Instant::now());
        let begin =
            |call: &Call, seconds: u64| all.begin(call, start + Duration::from_secs(seconds), DEADLINE);
        let first = begin(&modify(one), 0).unwrap().unwrap();
        let second = begin(&modify(one), 29).unwrap().unwrap();
        assert!(begin(&modify(one), 30).is_err());
        let delete = Call::Delete { kind: Kind::Endpoint, id: one };
        assert_eq!(begin(&delete, 30).err(), Some((Kind::Endpoint, one)));
        // Neither reads nor other objects wait.
        let query = Call::Query { kind: Kind::Endpoint, id: one, query: String::new() };
        assert!(begin(&query, 99).unwrap().is_none());
        assert!(begin(&modify(other), 99).is_ok());
        assert!(begin(&Call::Delete { kind: Kind::Network, id: one }, 99).is_ok());
        drop(first);
        assert!(begin(&modify(one), 30).is_ok(), "the second one is not late yet");
        assert!(begin(&modify(one), 59).is_err(), "and now it is");
        drop(second);
        assert!(begin(&modify(one), 99).is_ok());
        // A creation whose identifier is not known yet.
        let network = other;
        let create =
            Call::Create { kind: Kind::Endpoint, network, id: Guid::default(), settings: String::new() };
        let created = begin(&create, 100).unwrap().unwrap();
        assert!(begin(&create, 130).is_err());
        assert!(begin(&Call::Delete { kind: Kind::Network, id: network }, 130).is_err());
        drop(created);
        assert!(begin(&create, 130).is_ok());
    }
}
