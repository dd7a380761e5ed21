//! The messages of `tortie.store.v1.Store`. Kinds are encoded as plurals, values as JSON text.

use tortie_api::{Key, Kind};

use crate::{Event, StoreError, Stored, Write};

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ObjectKey {
    #[prost(string, tag = "1")]
    pub(crate) kind: String,
    #[prost(string, tag = "2")]
    pub(crate) namespace: String,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Object {
    #[prost(message, optional, tag = "1")]
    pub(crate) key: Option<ObjectKey>,
    #[prost(string, tag = "2")]
    pub(crate) json: String,
    #[prost(uint64, tag = "3")]
    pub(crate) revision: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) key: Option<ObjectKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetReply {
    #[prost(message, optional, tag = "1")]
    pub(crate) object: Option<Object>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListRequest {
    #[prost(string, tag = "1")]
    pub(crate) kind: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListReply {
    #[prost(message, repeated, tag = "1")]
    pub(crate) objects: Vec<Object>,
    #[prost(uint64, tag = "2")]
    pub(crate) revision: u64,
}

/// Create (json, no `expected`), update (json, `expected`) or delete (no json).
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct OneWrite {
    #[prost(message, optional, tag = "1")]
    pub(crate) key: Option<ObjectKey>,
    #[prost(string, optional, tag = "2")]
    pub(crate) json: Option<String>,
    #[prost(uint64, optional, tag = "3")]
    pub(crate) expected: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WriteRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) writes: Vec<OneWrite>,
}

/// The revisions of the completed writes. A rejection of the next one is part of the answer, so that it keeps its
/// type.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WriteReply {
    #[prost(uint64, repeated, tag = "1")]
    pub(crate) revisions: Vec<u64>,
    #[prost(enumeration = "Refusal", tag = "2")]
    pub(crate) refusal: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Refusal {
    None = 0,
    NotFound = 1,
    AlreadyExists = 2,
    Conflict = 3,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WatchRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) kinds: Vec<String>,
    #[prost(uint64, tag = "2")]
    pub(crate) after: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WatchEvent {
    /// The object, or the key and revision of a deleted one.
    #[prost(message, optional, tag = "1")]
    pub(crate) object: Option<Object>,
    #[prost(bool, tag = "2")]
    pub(crate) deleted: bool,
    /// The first message of a watch says only that it is established.
    #[prost(bool, tag = "3")]
    pub(crate) established: bool,
}

impl From<&Key> for ObjectKey {
    fn from(key: &Key) -> Self {
        Self { kind: key.kind.plural().to_owned(), namespace: key.namespace.clone(), name: key.name.clone() }
    }
}

impl From<Stored> for Object {
    fn from(stored: Stored) -> Self {
        Self { key: Some((&stored.key).into()), json: stored.value.to_string(), revision: stored.revision }
    }
}

impl From<Write> for OneWrite {
    fn from(write: Write) -> Self {
        let key = Some(write.key().into());
        match write {
            Write::Create(_, value) => Self { key, json: Some(value.to_string()), expected: None },
            Write::Update(_, value, expected) => {
                Self { key, json: Some(value.to_string()), expected: Some(expected) }
            }
            Write::Delete(_, expected) => Self { key, json: None, expected },
        }
    }
}

impl From<Event> for WatchEvent {
    fn from(event: Event) -> Self {
        match event {
            Event::Put(stored) => Self { object: Some(stored.into()), deleted: false, established: false },
            Event::Deleted { key, revision } => Self {
                object: Some(Object { key: Some((&key).into()), json: String::new(), revision }),
                deleted: true,
                established: false,
            },
        }
    }
}

pub(crate) fn kind(plural: &str) -> Result<Kind, StoreError> {
    let found = Kind::all().find(|kind| kind.plural() == plural);
    found.ok_or_else(|| StoreError::Damaged(format!("{plural:?} is no kind that this version knows")))
}

pub(crate) fn key(key: Option<ObjectKey>) -> Result<Key, StoreError> {
    let key = key.ok_or_else(|| StoreError::Damaged("a message has no key".to_owned()))?;
    Ok(Key { kind: kind(&key.kind)?, namespace: key.namespace, name: key.name })
}

pub(crate) fn write(message: OneWrite) -> Result<Write, StoreError> {
    let key = key(message.key)?;
    let Some(json) = message.json else { return Ok(Write::Delete(key, message.expected)) };
    let value =
        serde_json::from_str(&json).map_err(|error| StoreError::Damaged(format!("{key}: {error}")))?;
    Ok(match message.expected {
        None => Write::Create(key, value),
        Some(expected) => Write::Update(key, value, expected),
    })
}

pub(crate) fn stored(object: Object) -> Result<Stored, StoreError> {
    let key = key(object.key)?;
    let value =
        serde_json::from_str(&object.json).map_err(|error| StoreError::Damaged(format!("{key}: {error}")))?;
    Ok(Stored { key, value, revision: object.revision })
}

pub(crate) fn event(message: WatchEvent) -> Result<Event, StoreError> {
    let object = message.object.ok_or_else(|| StoreError::Damaged("an event has no object".to_owned()))?;
    if message.deleted {
        return Ok(Event::Deleted { revision: object.revision, key: key(object.key)? });
    }
    stored(object).map(Event::Put)
}
