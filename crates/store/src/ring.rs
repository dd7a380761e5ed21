//! The latest events, for watchers. The ring is bounded by bytes: when it is full, the oldest events go, and the watchers
//! that have not read them have fallen behind. Events that every watcher has read go at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use tortie_api::Key;

use crate::follow::Event;
use crate::{SharedEvent, StoreError, size_of_value};

/// The bytes of events that a watcher may lag behind.
const MAX_BYTES: usize = 64 << 20;

/// The number of events before one, since the ring was created.
type Index = u64;

/// The events from the position `first` on.
#[derive(Debug)]
struct Ring {
    max_bytes: usize,
    events: VecDeque<SharedEvent>,
    bytes: usize,
    first: Index,
    /// The number of readers at each position.
    readers: BTreeMap<Index, usize>,
}

impl Ring {
    fn new(max_bytes: usize) -> Self {
        Self { max_bytes, events: VecDeque::new(), bytes: 0, first: 0, readers: BTreeMap::new() }
    }

    fn end(&self) -> Index {
        self.first + self.events.len() as Index
    }

    fn push(&mut self, event: SharedEvent) {
        self.bytes += size(&event);
        self.events.push_back(event);
        while self.bytes > self.max_bytes {
            self.remove_first();
        }
        self.remove_read();
    }

    /// The event at a position; `None` if it has not happened yet.
    fn read(&self, position: Index) -> Result<Option<SharedEvent>, StoreError> {
        let index = position.checked_sub(self.first).ok_or(StoreError::FellBehind)?;
        Ok(usize::try_from(index).ok().and_then(|index| self.events.get(index)).cloned())
    }

    /// Every reader has fallen behind.
    fn lose(&mut self) {
        self.first = self.end() + 1;
        self.events.clear();
        self.bytes = 0;
    }

    /// A reader has moved: `None` before its first position, and after its last.
    fn moved(&mut self, from: Option<Index>, to: Option<Index>) {
        if let Some(to) = to {
            *self.readers.entry(to).or_default() += 1;
        }
        if let Some(from) = from
            && let Some(count) = self.readers.get_mut(&from)
        {
            *count -= 1;
            if *count == 0 {
                self.readers.remove(&from);
            }
        }
        self.remove_read();
    }

    /// Removes what every reader has read.
    fn remove_read(&mut self) {
        let needed = self.readers.keys().next().copied().unwrap_or_else(|| self.end());
        while self.first < needed && !self.events.is_empty() {
            self.remove_first();
        }
    }

    fn remove_first(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.bytes -= size(&event);
            self.first += 1;
        }
    }
}

/// With the encoded event, which is at most as large as the value.
fn size(event: &SharedEvent) -> usize {
    let of_key = |key: &Key| key.namespace.len() + key.name.len();
    let own = match event.event() {
        Event::Put(stored) => of_key(&stored.key) + 2 * size_of_value(&stored.value),
        Event::Deleted { key, .. } => of_key(key),
        Event::Progress(_) => 0,
    };
    size_of::<Event>() + own
}

/// Sends events to watchers. Clones share the ring.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    ring: Arc<Mutex<Ring>>,
    /// Tells readers that something has arrived.
    arrived: watch::Sender<()>,
}

impl Events {
    pub(crate) fn new() -> Self {
        Self { ring: Arc::new(Mutex::new(Ring::new(MAX_BYTES))), arrived: watch::Sender::new(()) }
    }

    /// Sends events to every reader.
    pub(crate) fn send(&self, events: Vec<Event>) {
        let mut ring = lock(&self.ring);
        events.into_iter().for_each(|event| ring.push(SharedEvent::new(event)));
        drop(ring);
        self.arrived.send_replace(());
    }

    /// Tells every reader that it has lost events.
    pub(crate) fn lose(&self) {
        lock(&self.ring).lose();
        self.arrived.send_replace(());
    }

    /// Returns a reader of the events from now on.
    pub(crate) fn subscribe(&self) -> Reader {
        let arrived = self.arrived.subscribe();
        let mut ring = lock(&self.ring);
        let position = ring.end();
        ring.moved(None, Some(position));
        Reader { ring: self.ring.clone(), arrived, position }
    }
}

/// Reads every event once.
#[derive(Debug)]
pub(crate) struct Reader {
    ring: Arc<Mutex<Ring>>,
    arrived: watch::Receiver<()>,
    position: Index,
}

impl Reader {
    /// Waits for the next event; `None` if no more events can arrive.
    ///
    /// # Errors
    /// The next event is not kept any more. This reader stays behind.
    pub(crate) async fn next(&mut self) -> Result<Option<SharedEvent>, StoreError> {
        loop {
            // What arrives after the ring has been read wakes the reader.
            self.arrived.mark_unchanged();
            if let Some(event) = self.read()? {
                return Ok(Some(event));
            }
            if self.arrived.changed().await.is_err() {
                return self.read();
            }
        }
    }

    fn read(&mut self) -> Result<Option<SharedEvent>, StoreError> {
        let mut ring = lock(&self.ring);
        let event = ring.read(self.position)?;
        if event.is_some() {
            ring.moved(Some(self.position), Some(self.position + 1));
            self.position += 1;
        }
        Ok(event)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        lock(&self.ring).moved(Some(self.position), None);
    }
}

fn lock(ring: &Mutex<Ring>) -> MutexGuard<'_, Ring> {
    ring.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;
    use tortie_api::Kind;

    use super::*;
    use crate::{Stored, Written};

    fn event(revision: u64, length: usize) -> SharedEvent {
        let key = Key::global(Kind::Namespace, "n");
        SharedEvent::new(Event::Put(Stored::new(key, json!("x".repeat(length)), Written::at(revision))))
    }

    #[test]
    fn the_ring_is_bounded_by_bytes() {
        let one = size(&event(1, 80_000));
        let table = [
            (usize::MAX, 10, 100_000, 100_000),
            (10 * one, 80_000, 9_000, 10),
            (10 * one, 80_000, 9, 9),
            (one - 1, 80_000, 3, 0),
        ];
        for (max_bytes, length, count, kept) in table {
            let mut ring = Ring::new(max_bytes);
            ring.moved(None, Some(0));
            (1..=count).for_each(|revision| ring.push(event(revision, length)));
            assert_eq!((ring.events.len(), ring.end()), (kept, count), "{max_bytes}, {length}, {count}");
            assert!(ring.bytes <= max_bytes);
            let lost = count - kept as u64;
            for position in (0..=count).step_by(1 + kept / 10_000) {
                let read = ring.read(position).map(|event| event.map(|event| event.event().position().0));
                let expected = match position {
                    position if position < lost => Err(StoreError::FellBehind),
                    position => Ok((position < count).then_some(position + 1)),
                };
                assert_eq!(read, expected, "{max_bytes}, {length}, {count}: {position}");
            }
        }
    }

    #[test]
    fn a_reader_of_lost_events_learns_it() {
        let mut ring = Ring::new(usize::MAX);
        ring.moved(None, Some(0));
        ring.push(event(1, 1));
        ring.lose();
        for position in [0, 1] {
            assert!(matches!(ring.read(position), Err(StoreError::FellBehind)), "{position}");
        }
        let new = ring.end();
        ring.moved(None, Some(new));
        ring.push(event(2, 1));
        assert!(matches!(ring.read(new), Ok(Some(_))));
    }

    #[test]
    fn only_what_a_reader_needs_is_kept() {
        let mut ring = Ring::new(usize::MAX);
        ring.push(event(1, 1));
        assert_eq!((ring.events.len(), ring.end()), (0, 1), "nobody reads");
        let (slow, fast) = (1, 1);
        ring.moved(None, Some(slow));
        ring.moved(None, Some(fast));
        (2..=4).for_each(|revision| ring.push(event(revision, 1)));
        (1..4).for_each(|position| ring.moved(Some(position), Some(position + 1)));
        assert_eq!(ring.events.len(), 3, "the slow one has read nothing");
        ring.moved(Some(slow), Some(2));
        assert_eq!(ring.events.len(), 2);
        ring.moved(Some(2), None);
        assert_eq!((ring.events.len(), ring.bytes, ring.end()), (0, 0, 4), "the slow one has gone");
        ring.moved(Some(4), None);
        assert!(ring.readers.is_empty());
    }
}
