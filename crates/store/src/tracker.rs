//! What a follower knows of some kinds: pages and events in, changes out. Objects that have not changed since they were
//! last delivered are not delivered again, and deletions that nobody saw are derived from listings.

use std::collections::HashMap;

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
    /// The delivered objects.
    known: HashMap<Key, Known>,
    /// The number of the last listing, for the objects that it found.
    round: u32,
    /// Everything up to here was in the last listing. Events up to here are old.
    listed: Position,
    /// Everything up to here has been delivered.
    reached: Position,
    /// The last progress that was delivered.
    reported: Option<Position>,
}

/// A delivered object.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// The position of its last write.
    position: Position,
    /// The last listing in which it was, or during which it was delivered.
    round: u32,
}

#[derive(Debug)]
enum State {
    /// It has to be listed.
    Unlisted,
    /// Some pages are missing.
    Listing {
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
            round: 0,
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

    /// The watch has ended, and what it has delivered may belong to another history: nothing is in sync until [`resume`](Self::resume).
    pub(crate) fn interrupt(&mut self, changes: &mut Vec<Change>) {
        for tracked in &mut self.kinds {
            if matches!(tracked.state, State::InSync) {
                tracked.state = State::Settling(tracked.reached);
                changes.push(Change::Restarted(tracked.interest.kind));
            }
        }
    }

    /// A watch has begun after what was delivered, in the same history.
    pub(crate) fn resume(&mut self, changes: &mut Vec<Change>) {
        self.kinds.iter_mut().for_each(|tracked| tracked.report_sync(changes));
    }

    /// The history may be another one, where an object of the same position may have another value: everything that is listed next is
    /// delivered.
    pub(crate) fn forget_positions(&mut self) {
        self.kinds.iter_mut().for_each(Tracked::forget_positions);
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
        let mut newest = match std::mem::replace(&mut tracked.state, State::Unlisted) {
            State::Listing { newest } => newest,
            _ => {
                if position < tracked.reached {
                    tracked.forget_positions();
                }
                tracked.listed = position;
                tracked.round = tracked.round.wrapping_add(1);
                position
            }
        };
        newest = newest.max(position);
        for stored in items {
            if !tracked.interest.covers(&stored.key, &stored.value) {
                continue;
            }
            let is_new = tracked.position_of(&stored.key) != Some(stored.position);
            tracked.know(&stored.key, stored.position);
            if is_new {
                changes.push(Change::Put(stored));
            }
        }
        if next.is_some() {
            tracked.state = State::Listing { newest };
            return;
        }
        let listed = tracked.listed;
        let round = tracked.round;
        tracked.known.retain(|key, known| {
            let exists = known.round == round;
            if !exists {
                changes.push(Change::Gone { key: key.clone(), position: listed });
            }
            exists
        });
        tracked.reached = listed;
        tracked.reported = None;
        tracked.state = State::Settling(newest);
        tracked.report_sync(changes);
    }

    /// Ingests an event of the watch.
    pub(crate) fn event(&mut self, event: Event, changes: &mut Vec<Change>) {
        let position = event.position();
        match event {
            Event::Put(stored) => {
                let Some(tracked) = self.of(stored.key.kind) else { return };
                let known = tracked.position_of(&stored.key);
                if position > tracked.listed && known.is_none_or(|known| position > known) {
                    if tracked.interest.covers(&stored.key, &stored.value) {
                        tracked.know(&stored.key, position);
                        changes.push(Change::Put(stored));
                    } else if tracked.known.remove(&stored.key).is_some() {
                        changes.push(Change::Gone { key: stored.key, position });
                    }
                }
            }
            Event::Deleted { key, .. } => {
                let Some(tracked) = self.of(key.kind) else { return };
                let known = tracked.position_of(&key);
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
            tracked.report_sync(changes);
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
    fn forget_positions(&mut self) {
        self.known.values_mut().for_each(|known| known.position = Position::default());
    }

    /// The position of a delivered object.
    fn position_of(&self, key: &Key) -> Option<Position> {
        self.known.get(key).map(|known| known.position)
    }

    /// The object is delivered, or has been, with this position.
    fn know(&mut self, key: &Key, position: Position) {
        let known = Known { position, round: self.round };
        match self.known.get_mut(key) {
            Some(before) => *before = known,
            None => drop(self.known.insert(key.clone(), known)),
        }
    }

    /// Reports that the kind is in sync, once the watch has reached the newest listed object.
    fn report_sync(&mut self, changes: &mut Vec<Change>) {
        if let State::Settling(newest) = self.state
            && self.reached >= newest
        {
            self.state = State::InSync;
            self.reported = Some(self.reached);
            changes.push(Change::InSync(self.interest.kind, self.reached));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{PageToken, Stored, Written};

    const KIND: Kind = Kind::Tier;

    fn put(name: &str, revision: u64) -> Stored {
        Stored::new(Key::global(KIND, name), json!(revision), Written::at(revision))
    }

    fn page(items: &[(&str, u64)], position: u64, next: Option<&str>) -> Page {
        let items = items.iter().map(|(name, revision)| put(name, *revision)).collect();
        let next = next.map(|token| PageToken(token.to_owned()));
        Page { items, position: Position(position), next }
    }

    fn changes(tracker: &mut Tracker, input: Result<Event, Page>) -> Vec<Change> {
        let mut changes = Vec::new();
        match input {
            Ok(event) => tracker.event(event, &mut changes),
            Err(page) => tracker.page(KIND, page, &mut changes),
        }
        changes
    }

    /// A listing may be newer than the position from which the watch begins. What the watch then repeats is old.
    #[test]
    fn events_from_before_the_listing_change_nothing() {
        let mut tracker = Tracker::new(vec![Interest::all(KIND)]);
        let listed = changes(&mut tracker, Err(page(&[("a", 5)], 6, None)));
        assert_eq!(listed, [Change::Put(put("a", 5)), Change::InSync(KIND, Position(6))]);
        let deleted = Event::Deleted { key: Key::global(KIND, "a"), position: Position(4) };
        for old in [Event::Put(put("a", 3)), deleted, Event::Put(put("gone", 4)), Event::Put(put("a", 5))] {
            assert_eq!(changes(&mut tracker, Ok(old)), []);
        }
        let new = put("a", 7);
        assert_eq!(changes(&mut tracker, Ok(Event::Put(new.clone()))), [Change::Put(new)]);
    }

    /// Pages from different moments are a state that never was, until the events between them have arrived.
    #[test]
    fn pages_of_different_moments_are_in_sync_with_the_last_one() {
        let mut tracker = Tracker::new(vec![Interest::all(KIND)]);
        assert_eq!(changes(&mut tracker, Err(page(&[("a", 1)], 2, Some("a")))), [Change::Put(put("a", 1))]);
        assert_eq!(changes(&mut tracker, Err(page(&[("b", 4)], 5, None))), [Change::Put(put("b", 4))]);
        assert_eq!(tracker.to_watch(), Some((vec![Interest::all(KIND)], Position(2))));
        assert_eq!(changes(&mut tracker, Ok(Event::Put(put("a", 3)))), [Change::Put(put("a", 3))]);
        assert_eq!(changes(&mut tracker, Ok(Event::Put(put("b", 4)))), []);
        let progress = changes(&mut tracker, Ok(Event::Progress(Position(5))));
        assert_eq!(progress, [Change::InSync(KIND, Position(5))]);
    }

    /// In a restored datastore, the same position may belong to another value.
    #[test]
    fn a_listing_of_an_older_history_delivers_everything_again() {
        for (restored, expected) in
            [(7, vec![]), (6, vec![Change::Put(put("a", 5)), Change::Put(put("b", 6))])]
        {
            let mut tracker = Tracker::new(vec![Interest::all(KIND)]);
            let objects: [(&str, u64); 2] = [("a", 5), ("b", 6)];
            changes(&mut tracker, Err(page(&objects, 7, None)));
            tracker.restart(&mut Vec::new());
            let mut again = changes(&mut tracker, Err(page(&objects, restored, None)));
            assert_eq!(again.pop(), Some(Change::InSync(KIND, Position(restored))));
            assert_eq!(again, expected);
        }
    }

    /// Some watches deliver more than the interest.
    #[test]
    fn an_object_that_leaves_the_interest_is_gone_once() {
        let pod = |node: &str, revision: u64| {
            let key = Key::namespaced(Kind::Pod, "n", "p");
            Stored::new(key, json!({"spec": {"nodeName": node}}), Written::at(revision))
        };
        let mut tracker = Tracker::new(vec![Interest::of_node(Kind::Pod, "one")]);
        let mut listed = Vec::new();
        let empty = Page { items: vec![pod("two", 1)], position: Position(1), next: None };
        tracker.page(Kind::Pod, empty, &mut listed);
        assert_eq!(listed, [Change::InSync(Kind::Pod, Position(1))]);
        let gone = Change::Gone { key: pod("", 0).key, position: Position(3) };
        for (event, expected) in [
            (pod("one", 2), vec![Change::Put(pod("one", 2))]),
            (pod("two", 3), vec![gone]),
            (pod("two", 4), vec![]),
            (pod("one", 5), vec![Change::Put(pod("one", 5))]),
        ] {
            assert_eq!(changes(&mut tracker, Ok(Event::Put(event))), expected);
        }
    }
}
