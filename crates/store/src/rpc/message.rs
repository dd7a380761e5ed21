//! The messages of `tortie.store.v1.Store`. Kinds are encoded as plurals, values as JSON text.

use std::collections::HashMap;

use bytes::{Buf, BufMut, Bytes};
use prost::DecodeError;
use prost::Message as _;
use prost::encoding::{DecodeContext, WireType, skip_field};
use tortie_api::{Key, Kind, Position};

use crate::embedded::{BackupPart, BackupRecord};
use crate::{Event, Interest, Scope, StoreError, Stored, Version, Write, Written};

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
    pub(crate) position: u64,
    #[prost(string, tag = "4")]
    pub(crate) version: String,
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

/// At most one field besides the kind is present.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct InterestMessage {
    #[prost(string, tag = "1")]
    pub(crate) kind: String,
    #[prost(string, optional, tag = "2")]
    pub(crate) node: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub(crate) namespace: Option<String>,
    #[prost(message, optional, tag = "4")]
    pub(crate) object: Option<ObjectKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) interest: Option<InterestMessage>,
    #[prost(string, optional, tag = "2")]
    pub(crate) after: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListReply {
    #[prost(message, repeated, tag = "1")]
    pub(crate) objects: Vec<Object>,
    #[prost(uint64, tag = "2")]
    pub(crate) position: u64,
    #[prost(string, optional, tag = "3")]
    pub(crate) next: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BarrierRequest {
    #[prost(string, repeated, tag = "1")]
    pub(crate) kinds: Vec<String>,
}

/// One position for each requested kind that the service knows and the client may read.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BarrierReply {
    #[prost(map = "string, uint64", tag = "1")]
    pub(crate) positions: HashMap<String, u64>,
    /// The epoch of the store, if it has epochs.
    #[prost(uint64, optional, tag = "2")]
    pub(crate) begin: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    pub(crate) latest: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BackupRequest {}

/// A part of a backup.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BackupReply {
    /// The identity of the store.
    #[prost(string, tag = "1")]
    pub(crate) store: String,
    #[prost(uint64, tag = "2")]
    pub(crate) latest: u64,
    #[prost(message, repeated, tag = "3")]
    pub(crate) entries: Vec<BackupEntry>,
    #[prost(bool, tag = "4")]
    pub(crate) is_last: bool,
}

/// The key of an object, and its record as the file has it.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BackupEntry {
    #[prost(string, tag = "1")]
    pub(crate) plural: String,
    #[prost(string, tag = "2")]
    pub(crate) namespace: String,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) record: Vec<u8>,
}

impl From<BackupPart> for BackupReply {
    fn from(part: BackupPart) -> Self {
        let BackupPart { id, latest, records, is_last } = part;
        let entry = |BackupRecord { path: [plural, namespace, name], record }| BackupEntry {
            plural,
            namespace,
            name,
            record,
        };
        Self { store: id.to_string(), latest, entries: records.into_iter().map(entry).collect(), is_last }
    }
}

/// # Errors
/// The identity is invalid.
pub(crate) fn backup_part(reply: BackupReply) -> Result<BackupPart, StoreError> {
    let BackupReply { store, latest, entries, is_last } = reply;
    let record = |entry: BackupEntry| BackupRecord {
        path: [entry.plural, entry.namespace, entry.name],
        record: entry.record,
    };
    Ok(BackupPart { id: store.parse()?, latest, records: entries.into_iter().map(record).collect(), is_last })
}

/// Create (json, no `expected`), update (json, `expected`) or delete (no json).
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct OneWrite {
    #[prost(message, optional, tag = "1")]
    pub(crate) key: Option<ObjectKey>,
    #[prost(string, optional, tag = "2")]
    pub(crate) json: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub(crate) expected: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WriteRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) writes: Vec<OneWrite>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WrittenMessage {
    #[prost(string, tag = "1")]
    pub(crate) version: String,
    #[prost(uint64, tag = "2")]
    pub(crate) position: u64,
}

/// The results of the completed writes. A rejection of the next one is part of the answer, so that it keeps its type.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WriteReply {
    #[prost(message, repeated, tag = "1")]
    pub(crate) written: Vec<WrittenMessage>,
    #[prost(enumeration = "Refusal", tag = "2")]
    pub(crate) refusal: i32,
    /// The problem of an invalid object.
    #[prost(string, tag = "3")]
    pub(crate) problem: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Refusal {
    None = 0,
    NotFound = 1,
    AlreadyExists = 2,
    Conflict = 3,
    Invalid = 4,
    Forbidden = 5,
    /// Clients of earlier versions take it for no answer, and try again.
    Full = 6,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WatchRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) interests: Vec<InterestMessage>,
    #[prost(uint64, tag = "2")]
    pub(crate) after: u64,
}

/// Exactly one field is present; none in the first message of a watch, which tells that it is established.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct WatchMessage {
    #[prost(message, optional, tag = "1")]
    pub(crate) put: Option<Object>,
    /// The key and the position of the deletion.
    #[prost(message, optional, tag = "2")]
    pub(crate) deleted: Option<Object>,
    #[prost(uint64, optional, tag = "3")]
    pub(crate) progress: Option<u64>,
}

/// A [`WatchMessage`], encoded. The service encodes each event once for all watchers.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct EncodedEvent(pub(crate) Bytes);

impl prost::Message for EncodedEvent {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        buffer.put_slice(&self.0);
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn decode(mut buffer: impl Buf) -> Result<Self, DecodeError> {
        Ok(Self(buffer.copy_to_bytes(buffer.remaining())))
    }

    /// Not used by [`decode`](Self::decode), which keeps all fields as they are.
    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        skip_field(wire_type, tag, buffer, context)
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

impl From<&Key> for ObjectKey {
    fn from(key: &Key) -> Self {
        Self { kind: key.kind.plural().to_owned(), namespace: key.namespace.clone(), name: key.name.clone() }
    }
}

impl From<&Interest> for InterestMessage {
    fn from(interest: &Interest) -> Self {
        let kind = interest.kind;
        let all = Self { kind: kind.plural().to_owned(), ..Self::default() };
        match interest.scope.clone() {
            Scope::All => all,
            Scope::Node(node) => Self { node: Some(node), ..all },
            Scope::Namespace(namespace) => Self { namespace: Some(namespace), ..all },
            Scope::Name(namespace, name) => {
                Self { object: Some((&Key::namespaced(kind, namespace, name)).into()), ..all }
            }
        }
    }
}

impl From<Stored> for Object {
    fn from(stored: Stored) -> Self {
        let Stored { key, value, version, position } = stored;
        Self {
            key: Some((&key).into()),
            json: value.to_string(),
            position: position.0,
            version: version.as_str().to_owned(),
        }
    }
}

impl From<Write> for OneWrite {
    fn from(write: Write) -> Self {
        let key = Some(write.key().into());
        let text = |version: Version| version.as_str().to_owned();
        match write {
            Write::Create(_, value) => Self { key, json: Some(value.to_string()), expected: None },
            Write::Update(_, value, expected) => {
                Self { key, json: Some(value.to_string()), expected: Some(text(expected)) }
            }
            Write::Delete(_, expected) => Self { key, json: None, expected: expected.map(text) },
        }
    }
}

impl From<Written> for WrittenMessage {
    fn from(written: Written) -> Self {
        Self { version: written.version.as_str().to_owned(), position: written.position.0 }
    }
}

impl From<WrittenMessage> for Written {
    fn from(message: WrittenMessage) -> Self {
        Self { version: Version::new(&message.version), position: Position(message.position) }
    }
}

impl From<Event> for WatchMessage {
    fn from(event: Event) -> Self {
        match event {
            Event::Put(stored) => Self { put: Some(stored.into()), ..Self::default() },
            Event::Deleted { key, position } => {
                let deleted = Object { key: Some((&key).into()), position: position.0, ..Object::default() };
                Self { deleted: Some(deleted), ..Self::default() }
            }
            Event::Progress(position) => Self { progress: Some(position.0), ..Self::default() },
        }
    }
}

/// The kind of a plural, if this version knows it.
pub(crate) fn known_kind(plural: &str) -> Option<Kind> {
    Kind::all().find(|kind| kind.plural() == plural)
}

fn kind(plural: &str) -> Result<Kind, StoreError> {
    known_kind(plural)
        .ok_or_else(|| StoreError::Damaged(format!("{plural:?} is no kind that this version knows")))
}

pub(crate) fn key(key: Option<ObjectKey>) -> Result<Key, StoreError> {
    let key = key.ok_or_else(|| StoreError::Damaged("a message has no key".to_owned()))?;
    Ok(Key { kind: kind(&key.kind)?, namespace: key.namespace, name: key.name })
}

/// The interest; `None` if this version does not know its kind.
pub(crate) fn interest(message: InterestMessage) -> Option<Interest> {
    let InterestMessage { kind, node, namespace, object } = message;
    let scope = match (node, namespace, object) {
        (Some(node), ..) => Scope::Node(node),
        (_, Some(namespace), _) => Scope::Namespace(namespace),
        (.., Some(object)) => Scope::Name(object.namespace, object.name),
        (None, None, None) => Scope::All,
    };
    Some(Interest { kind: known_kind(&kind)?, scope })
}

impl OneWrite {
    /// The size of the object.
    pub(crate) fn json_bytes(&self) -> usize {
        self.json.as_ref().map_or(0, String::len)
    }
}

pub(crate) fn write(message: OneWrite) -> Result<Write, StoreError> {
    let key = key(message.key)?;
    let expected = message.expected.as_deref().map(Version::new);
    let Some(json) = message.json else { return Ok(Write::Delete(key, expected)) };
    let value =
        serde_json::from_str(&json).map_err(|error| StoreError::Damaged(format!("{key}: {error}")))?;
    Ok(match expected {
        None => Write::Create(key, value),
        Some(expected) => Write::Update(key, value, expected),
    })
}

pub(crate) fn stored(object: Object) -> Result<Stored, StoreError> {
    let key = key(object.key)?;
    let value =
        serde_json::from_str(&object.json).map_err(|error| StoreError::Damaged(format!("{key}: {error}")))?;
    let written = Written { version: Version::new(&object.version), position: Position(object.position) };
    Ok(Stored::new(key, value, written))
}

pub(crate) fn event(EncodedEvent(bytes): EncodedEvent) -> Result<Event, StoreError> {
    let message = WatchMessage::decode(bytes)
        .map_err(|error| StoreError::Damaged(format!("an event cannot be decoded: {error}")))?;
    match (message.put, message.deleted, message.progress) {
        (Some(object), ..) => stored(object).map(Event::Put),
        (_, Some(object), _) => {
            Ok(Event::Deleted { position: Position(object.position), key: key(object.key)? })
        }
        (.., Some(position)) => Ok(Event::Progress(Position(position))),
        (None, None, None) => Err(StoreError::Damaged("an event is empty".to_owned())),
    }
}
