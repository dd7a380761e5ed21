//! The parsers of what etcd answers, for `judges/fuzz`.

use prost::Message as _;
use serde_json::Value;
use tortie_api::{Key, Kind, Position};

use super::message::{LeaseGrantResponse, RangeResponse, TxnResponse, WatchResponse};
use super::{entries, events, keys, stored, values};
use crate::calico_form::Origin;
use crate::{Event, Interest, StoreError};

/// The object of a key of etcd, and the key that is written for it.
#[must_use]
pub fn key(kind: Kind, key: &[u8]) -> Option<(Key, String)> {
    let key = keys::decode(kind, key)?;
    let written = keys::encode(&key);
    Some((key, written))
}

/// The object of a stored text.
#[must_use]
pub fn value(key: &Key, text: &[u8]) -> Value {
    values::decode(key, text)
}

/// The text that is stored for an object, with a fixed identity if it has none.
#[must_use]
pub fn text(key: &Key, value: Value) -> Vec<u8> {
    values::encode(key, value, Origin { uid: "uid", created: "created" })
}

/// Reads an answer of etcd as a message of each type, and returns the events of a watch.
#[must_use]
pub fn answer(interest: &Interest, bytes: &[u8]) -> Vec<Result<Event, StoreError>> {
    let ranges = TxnResponse::decode(bytes).map(|reply| reply.responses).unwrap_or_default();
    let ranges = ranges.into_iter().filter_map(|response| response.range);
    for range in ranges.chain(RangeResponse::decode(bytes).ok()) {
        for found in range.kvs {
            if let Some(key) = keys::decode(interest.kind, &found.key) {
                let _ = stored(key, &found).map(|stored| interest.covers(&stored.key, &stored.value));
            }
            let _ = entries::entry(found);
        }
    }
    if let Ok(reply) = LeaseGrantResponse::decode(bytes) {
        let _ = entries::lasting(60, reply.ttl);
    }
    WatchResponse::decode(bytes).map(|reply| events(interest, Position(7), reply)).unwrap_or_default()
}
