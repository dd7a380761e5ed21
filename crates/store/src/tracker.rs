//! What a follower knows of some kinds: pages and events in, changes out. Objects that have not changed since they were
//! last delivered are not delivered again, and deletions that nobody saw are derived from listings.

use std::collections::{HashMap, HashSet};

use tortie_api::{Key, Kind, Position};

use crate::{Change, Event, Interest, Page};

/// Kinds with a common order of events.
#[derive(Debug)]
pub(crate) struct Tracker {
    kinds: Vec<Tracked>,
}

#[derive(Debug)]
struct Tracked {
    interest: Interest,
    state: State,
    /// The delivered objects, with the position of their last write.
    known: HashMap<Key, Position>,
    /// Everything up to here was in the last listing. Events up to here are old.
    listed: Position,
    /// Everything up to here has been delivered.
    reached: Position,
    /// The last progress that was delivered.
    reported: Option<Position>,
}

#[derive(Debug)]
enum State {
    /// It has to be listed.
    Unlisted,
    /// Some pages are missing.
    Listing {
        /// The keys of the objects so far.
        seen: HashSet<Key>,
        /// The position of the newest page.
        newest: Position,
    },
    /// The pages are from different moments; the events up to this one make them consistent.
    Settling(Position),
    InSync,
    /// It cannot be read.
    Unavailable,
}

impl Tracker {
    pub(crate) fn new(interests: Vec<Interest>) -> Self {
        let tracked = |interest| Tracked {
            interest,
            state: State::Unlisted,
            known: HashMap::new(),
            listed: Position::default(),
            reached: Position::default(),
            reported: None,
        };
        Self { kinds: interests.into_iter().map(tracked).collect() }
    }

    /// The next interest that has to be listed from its first page.
    pub(crate) fn next_unlisted(&self) -> Option<Interest> {
        let unlisted =
            self.kinds.iter().find(|it| matches!(it.state, State::Unlisted | State::Listing { .. }));
        unlisted.map(|tracked| tracked.interest.clone())
    }

    /// The interests to watch, and the position to watch from; `None` if nothing can be watched.
    pub(crate) fn to_watch(&self) -> Option<(Vec<Interest>, Position)> {
        let watched =
            || self.kinds.iter().filter(|it| matches!(it.state, State::InSync | State::Settling(_)));
        let from = watched().map(|tracked| tracked.reached).min()?;
        Some((watched().map(|tracked| tracked.interest.clone()).collect(), from))
    }

    /// The kinds that cannot be read.
    pub(crate) fn unavailable(&self) -> impl Iterator<Item = Kind> {
        let unavailable = self.kinds.iter().filter(|it| matches!(it.state, State::Unavailable));
        unavailable.map(|tracked| tracked.interest.kind)
    }

    /// Every kind has to be listed again, except for those that cannot be read.
    pub(crate) fn restart(&mut self, changes: &mut Vec<Change>) {
        for tracked in &mut self.kinds {
            if matches!(tracked.state, State::InSync | State::Settling(_)) {
                tracked.state = State::Unlisted;
                changes.push(Change::Restarted(tracked.interest.kind));
            }
        }
    }

    /// The kind has to be listed from its first page.
    pub(crate) fn list_again(&mut self, kind: Kind) {
        if let Some(tracked) = self.of(kind) {
            tracked.state = State::Unlisted;
        }
    }

    /// The kind cannot be read. What was delivered stays.
    pub(crate) fn lose(&mut self, kind: Kind) {
        if let Some(tracked) = self.of(kind) {
            tracked.state = State::Unavailable;
        }
    }

    /// Ingests a page. The kind is complete with its last page.
    pub(crate) fn page(&mut self, kind: Kind, page: Page, changes: &mut Vec<Change>) {
        let Some(tracked) = self.of(kind) else { return };
        let Page { items, position, next } = page;
        let (mut seen, mut newest) = match std::mem::replace(&mut tracked.state, State::Unlisted) {
            State::Listing { seen, newest } => (seen, newest),
            _ => {
                tracked.listed = position;
                (HashSet::new(), position)
            }
        };
        newest = newest.max(position);
        for stored in items {
            if !tracked.interest.covers(&stored.key, &stored.value) {
                continue;
            }
            seen.insert(stored.key.clone());
            if tracked.known.get(&stored.key) != Some(&stored.position) {
                tracked.known.insert(stored.key.clone(), stored.position);
                changes.push(Change::Put(stored));
            }
        }
        if next.is_some() {
            tracked.state = State::Listing { seen, newest };
            return;
        }
        let listed = tracked.listed;
        tracked.known.retain(|key, _| {
            let exists = seen.contains(key);
            if !exists {
                changes.push(Change::Gone { key: key.clone(), position: listed });
            }
            exists
        });
        tracked.reached = listed;
        tracked.reported = None;
        tracked.state = State::Settling(newest);
        tracked.settle(changes);
    }

    /// Ingests an event of the watch.
    pub(crate) fn event(&mut self, event: Event, changes: &mut Vec<Change>) {
        let position = event.position();
        match event {
            Event::Put(stored) => {
                let Some(tracked) = self.of(stored.key.kind) else { return };
                let known = tracked.known.get(&stored.key).copied();
                if position > tracked.listed && known.is_none_or(|known| position > known) {
                    if tracked.interest.covers(&stored.key, &stored.value) {
                        tracked.known.insert(stored.key.clone(), position);
                        changes.push(Change::Put(stored));
                    } else if tracked.known.remove(&stored.key).is_some() {
                        changes.push(Change::Gone { key: stored.key, position });
                    }
                }
            }
            Event::Deleted { key, .. } => {
                let Some(tracked) = self.of(key.kind) else { return };
                let known = tracked.known.get(&key).copied();
                if known.is_some_and(|known| position > known) {
                    tracked.known.remove(&key);
                    changes.push(Change::Gone { key, position });
                }
            }
            Event::Progress(_) => {}
        }
        // The events of these kinds have a common order.
        for tracked in &mut self.kinds {
            tracked.reached = tracked.reached.max(position);
            tracked.settle(changes);
        }
    }

    /// Reports how far each kind has come since the last report.
    pub(crate) fn progress(&mut self, changes: &mut Vec<Change>) {
        for tracked in &mut self.kinds {
            if matches!(tracked.state, State::InSync) && tracked.reported != Some(tracked.reached) {
                tracked.reported = Some(tracked.reached);
                changes.push(Change::Progress(tracked.interest.kind, tracked.reached));
            }
        }
    }

    fn of(&mut self, kind: Kind) -> Option<&mut Tracked> {
        self.kinds.iter_mut().find(|tracked| tracked.interest.kind == kind)
    }
}

impl Tracked {
    fn settle(&mut self, changes: &mut Vec<Change>) {
        if let State::Settling(newest) = self.state
            && self.reached >= newest
        {
            self.state = State::InSync;
            self.reported = Some(self.reached);
            changes.push(Change::InSync(self.interest.kind, self.reached));
        }
    }
}
