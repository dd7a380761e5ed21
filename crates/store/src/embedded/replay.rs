//! Reads events from the log.

use tortie_api::{Key, Position};

use super::layout::{EPOCHS, LATEST, LOG};
use super::{Revision, epochs, latest, layout, records};
use crate::file::{File, failed};
use crate::follow::Event;
use crate::{Interest, StoreError, Stored, Written, stored_json};

/// Events of the log.
pub(super) struct Replayed {
    pub(super) events: Vec<Event>,
    /// They reach up to here.
    pub(super) reached: Revision,
    /// Whether these are all.
    pub(super) complete: bool,
}

/// The logged events after a revision, up to a number of bytes (but at least one event).
pub(super) fn replay(
    file: &File,
    interests: &[Interest],
    after: Revision,
    max_bytes: usize,
) -> Result<Replayed, StoreError> {
    file.read(|transaction| {
        let latest = latest(&transaction.open_table(LATEST).map_err(failed)?)?;
        let log = transaction.open_table(LOG).map_err(failed)?;
        let next = after.saturating_add(1);
        let is_lost = after < layout::removed(transaction)?;
        // Other positions come from another store, or from a copy of this one that was served meanwhile.
        let epochs = epochs::read(&transaction.open_table(EPOCHS).map_err(failed)?)?;
        if is_lost || !epochs::contain(&epochs, latest, after) {
            return Err(StoreError::Compacted(Position(after)));
        }
        let (mut events, mut bytes) = (Vec::new(), 0);
        for entry in log.range(next..).map_err(failed)? {
            let (revision, entry) = entry.map_err(failed)?;
            let (plural, namespace, name, record) = entry.value();
            let revision = revision.value();
            // Nobody knows which object it is about, so all are listed again.
            let Some(json) = records::read_logged((plural, namespace, name), revision, record) else {
                tracing::warn!(
                    revision,
                    "a record of the store's log is damaged; watches begin again after it"
                );
                return Err(StoreError::Compacted(Position(after)));
            };
            let Some(interest) = interests.iter().find(|it| it.kind.plural() == plural) else { continue };
            bytes += json.len();
            if bytes > max_bytes && !events.is_empty() {
                return Ok(Replayed { events, reached: revision - 1, complete: false });
            }
            let key = Key::namespaced(interest.kind, namespace, name);
            let event = match json {
                [] => Event::Deleted { key, position: Position(revision) },
                json => {
                    let value = stored_json::decode(&key, json);
                    Event::Put(Stored::new(key, value, Written::at(revision)))
                }
            };
            events.push(narrowed(event, interests));
        }
        Ok(Replayed { events, reached: latest, complete: true })
    })
}

/// The event as it concerns a follower with these interests: an object outside of them is gone for it.
pub(super) fn narrowed(event: Event, interests: &[Interest]) -> Event {
    match event {
        Event::Put(stored) if !interests.iter().any(|it| it.covers(&stored.key, &stored.value)) => {
            Event::Deleted { position: stored.position, key: stored.key }
        }
        event => event,
    }
}
