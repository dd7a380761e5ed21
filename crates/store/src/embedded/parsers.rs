//! The parsers of what is in the store's file, for `judges/fuzz`.

use tortie_api::Key;

use super::records;
use crate::Stored;

/// The object in a record of objects. The record is also read as one of the log.
pub(crate) fn record(key: Key, record: &[u8]) -> Stored {
    let namespace = key.namespace.clone();
    let name = key.name.clone();
    let path = (key.kind.plural(), namespace.as_str(), name.as_str());
    let _ = records::read_logged(path, records::revision(path, record), record);
    records::stored(key, path, record)
}

/// The record of an object.
pub(crate) fn text(stored: &Stored) -> Vec<u8> {
    let Stored { key, value, position, .. } = stored;
    let path = (key.kind.plural(), key.namespace.as_str(), key.name.as_str());
    records::object(path, position.0, value.to_string().as_bytes())
}
