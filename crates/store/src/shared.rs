//! An event that many watchers share: it is stored once, and encoded once for all clients of a service.

use std::sync::{Arc, OnceLock};

use prost::Message;

use crate::follow::Event;
use crate::rpc::message::{EncodedEvent, WatchMessage};

/// An event. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedEvent(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    event: Event,
    encoded: OnceLock<EncodedEvent>,
}

impl SharedEvent {
    /// Shares an event.
    #[must_use]
    pub fn new(event: Event) -> Self {
        Self(Arc::new(Inner { event, encoded: OnceLock::new() }))
    }

    /// The event.
    #[must_use]
    pub fn event(&self) -> &Event {
        &self.0.event
    }

    /// The event without the others who share it.
    pub(crate) fn into_event(self) -> Event {
        Arc::try_unwrap(self.0).map_or_else(|shared| shared.event.clone(), |own| own.event)
    }

    /// The message of the gRPC service. The first call encodes it.
    pub(crate) fn encoded(&self) -> EncodedEvent {
        let encode = || EncodedEvent(WatchMessage::from(self.0.event.clone()).encode_to_vec().into());
        self.0.encoded.get_or_init(encode).clone()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tortie_api::{Key, Kind};

    use super::*;
    use crate::{Stored, Written};

    #[test]
    fn all_watchers_get_the_same_bytes() {
        let stored = Stored::new(Key::global(Kind::Node, "n"), json!({"a": 1}), Written::at(7));
        let first = SharedEvent::new(Event::Put(stored));
        let second = first.clone();
        assert_eq!(first.encoded().0.as_ptr(), second.encoded().0.as_ptr(), "encoded once");
    }
}
