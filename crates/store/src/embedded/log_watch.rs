//! A watch of the embedded store. It reads events from memory, and from the log on disk where it lags behind: a burst of
//! writes, however many, ends no watch whose events the log still has.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::{StreamExt, stream};
use tortie_api::Position;

use super::replay::{Replayed, narrowed, replay};
use super::{Revision, read};
use crate::file::File;
use crate::follow::Event;
use crate::ring::{Events, Reader};
use crate::{Interest, SharedEvent, SharedWatch, StoreError, Stored};

/// The maximum size of the values that a new watch reads from the log, in bytes of JSON. A list costs less than more.
const MAX_REPLAY_BYTES: usize = 32 << 20;
/// The size of the values that a watch that lags behind reads at once.
const CATCH_UP_BYTES: usize = 4 << 20;

/// A watch.
pub(crate) struct LogWatch {
    file: Arc<File>,
    events: Events,
    interests: Vec<Interest>,
    /// `None` while the log is read.
    reader: Option<Reader>,
    /// The events up to here have been read.
    reached: Revision,
    /// Those that have not been delivered yet.
    ready: VecDeque<SharedEvent>,
}

impl LogWatch {
    /// Opens a watch of the changes after a position.
    ///
    /// # Errors
    /// The log does not have them, or they are too many.
    pub(crate) async fn open(
        file: Arc<File>,
        events: Events,
        interests: &[Interest],
        after: Position,
    ) -> Result<SharedWatch, StoreError> {
        let (reached, ready) = (after.0, VecDeque::new());
        let mut watch = Self { file, events, interests: interests.to_vec(), reader: None, reached, ready };
        watch.read_log(MAX_REPLAY_BYTES).await?;
        if watch.reader.is_none() {
            return Err(StoreError::Compacted(after));
        }
        let events = stream::unfold(Some(watch), async |watch| {
            let mut watch = watch?;
            match watch.next().await.transpose()? {
                Ok(event) => Some((Ok(event), Some(watch))),
                // After an error, the watch ends.
                Err(error) => Some((Err(error), None)),
            }
        });
        Ok(events.boxed())
    }

    /// The next event; `None` if no more events can arrive.
    async fn next(&mut self) -> Result<Option<SharedEvent>, StoreError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let Some(reader) = &mut self.reader else {
                self.catch_up().await?;
                continue;
            };
            match reader.next().await {
                Ok(None) => return Ok(None),
                Ok(Some(event)) => {
                    let position = event.event().position().0;
                    if position > self.reached && self.concerns(event.event()) {
                        self.reached = position;
                        return Ok(Some(self.narrowed(event)));
                    }
                }
                Err(StoreError::FellBehind) => self.reader = None,
                Err(error) => return Err(error),
            }
        }
    }

    async fn catch_up(&mut self) -> Result<(), StoreError> {
        self.read_log(CATCH_UP_BYTES).await.map_err(|error| match error {
            StoreError::Compacted(_) => StoreError::FellBehind,
            error => error,
        })
    }

    /// Reads events from the log. If it has been read to its end, later events come from memory.
    async fn read_log(&mut self, max_bytes: usize) -> Result<(), StoreError> {
        // Subscribe first: events in between are in both, and are delivered once.
        let reader = self.events.subscribe();
        let (interests, after) = (self.interests.clone(), self.reached);
        let replayed = read(&self.file, move |file| replay(file, &interests, after, max_bytes)).await?;
        let Replayed { events, reached, complete } = replayed;
        let progress = Event::Progress(Position(reached));
        self.ready.extend(events.into_iter().chain([progress]).map(SharedEvent::new));
        self.reached = reached;
        self.reader = complete.then_some(reader);
        Ok(())
    }

    fn concerns(&self, event: &Event) -> bool {
        match event {
            Event::Put(Stored { key, .. }) | Event::Deleted { key, .. } => {
                self.interests.iter().any(|interest| interest.kind == key.kind)
            }
            Event::Progress(_) => true,
        }
    }

    /// Shared, unless the event means something else to this watcher.
    fn narrowed(&self, event: SharedEvent) -> SharedEvent {
        let covers = |stored: &Stored| self.interests.iter().any(|it| it.covers(&stored.key, &stored.value));
        match event.event() {
            Event::Put(stored) if !covers(stored) => {
                SharedEvent::new(narrowed(event.into_event(), &self.interests))
            }
            _ => event,
        }
    }
}
