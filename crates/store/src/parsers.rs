//! The parsers of what datastores, their clients and files send, for `judges/fuzz`: in the product, they are behind connections and files.

use prost::Message as _;
use tortie_api::{Key, Position};

use crate::rpc::message as service;
use crate::{Event, Interest, StoreError, Stored};

pub use crate::etcd::parsers::{
    answer as etcd_answer, key as etcd_key, text as etcd_text, value as etcd_value,
};
pub use crate::kubernetes::parsers::{
    kubeconfig, line as kubernetes_line, list as kubernetes_list, secret_line, sent as kubernetes_sent,
};
pub use crate::rpc::parsers::certificate;

/// The object in a record of the embedded store's file, and in one of its log. Each has a checksum.
#[must_use]
pub fn embedded_record(key: Key, record: &[u8]) -> Stored {
    crate::embedded::parsers::record(key, record)
}

/// The record of an object in the embedded store's file.
#[must_use]
pub fn embedded_text(stored: &Stored) -> Vec<u8> {
    crate::embedded::parsers::text(stored)
}

/// An event that the embedded store's service sends.
///
/// # Errors
/// The bytes are no event.
pub fn service_event(bytes: &[u8]) -> Result<Event, StoreError> {
    service::event(service::EncodedEvent(bytes.to_vec().into()))
}

/// The bytes of an event.
#[must_use]
pub fn service_bytes(event: Event) -> Vec<u8> {
    service::WatchMessage::from(event).encode_to_vec()
}

/// Reads a request or an answer of the embedded store's service as a message of each type. Returns how many types it could be.
#[must_use]
pub fn service_message(bytes: &[u8]) -> usize {
    let interests = |messages: Vec<service::InterestMessage>| {
        messages.into_iter().filter_map(service::interest).collect::<Vec<Interest>>()
    };
    let mut read = 0;
    if let Ok(request) = service::WriteRequest::decode(bytes) {
        read += 1;
        for write in request.writes {
            let _ = (write.json_bytes(), service::write(write));
        }
    }
    if let Ok(reply) = service::ListReply::decode(bytes) {
        read += 1;
        let _ = reply.objects.into_iter().map(service::stored).collect::<Result<Vec<_>, _>>();
    }
    if let Ok(request) = service::WatchRequest::decode(bytes) {
        read += 1;
        let _ = (interests(request.interests), Position(request.after));
    }
    if let Ok(request) = service::ListRequest::decode(bytes) {
        read += 1;
        let _ = interests(request.interest.into_iter().collect());
    }
    if let Ok(request) = service::GetRequest::decode(bytes) {
        read += 1;
        let _ = service::key(request.key);
    }
    if let Ok(reply) = service::GetReply::decode(bytes) {
        read += 1;
        let _ = reply.object.map(service::stored);
    }
    if let Ok(reply) = service::BackupReply::decode(bytes) {
        read += 1;
        let _ = service::backup_part(reply);
    }
    if let Ok(request) = service::BarrierRequest::decode(bytes) {
        read += 1;
        let _ = request.kinds.iter().filter_map(|plural| service::known_kind(plural)).count();
    }
    read + usize::from(service::BarrierReply::decode(bytes).is_ok())
        + usize::from(service::WriteReply::decode(bytes).is_ok())
}
