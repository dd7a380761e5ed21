//! The parsers of what the API server sends, and of the file that says where it is, for `judges/fuzz`.

use kube::config::Kubeconfig;
use serde_json::Value;
use tortie_api::{Key, Kind, Position};

use super::answer::{self, Lines, Operation};
use super::{CalicoGroup, secrets, trim, values};
use crate::{Event, StoreError, Stored};

/// The events of the lines of a watch.
pub fn line(group: CalicoGroup, kind: Kind, bytes: &[u8]) -> impl Iterator<Item = Result<Event, StoreError>> {
    let operation = Operation { verb: "watch", kind, key: None, after: Position(7), group };
    let mut lines = Lines::default();
    let mut whole = lines.push(bytes);
    whole.extend(lines.push(b"\n"));
    whole.into_iter().map(move |line| answer::event(&operation, &line, "server"))
}

/// The objects of a list.
///
/// # Errors
/// The text is no JSON, or has an object without a position.
pub fn list(group: CalicoGroup, kind: Kind, text: &[u8]) -> Result<Vec<Stored>, StoreError> {
    let damaged = |error: serde_json::Error| StoreError::Damaged(error.to_string());
    let mut page = trim::read(trim::of_list(kind), text).map_err(damaged)?;
    values::position(page.get("metadata"))?;
    let Some(Value::Array(found)) = page.get_mut("items").map(Value::take) else { return Ok(Vec::new()) };
    let decoded = found.into_iter().map(|object| Ok(values::decode(group, kind, object)?.object()));
    decoded.filter_map(Result::transpose).collect()
}

/// The object that the API server gets for a value.
///
/// # Errors
/// The value cannot be one of the key.
pub fn sent(group: CalicoGroup, key: &Key, value: Value) -> Result<Value, StoreError> {
    values::encode(group, key, value, None)
}

/// Reads a line of the watch of a Secret.
pub fn secret_line(line: &[u8]) {
    let _ = secrets::event(line);
}

/// Reads a kubeconfig, and follows none of its references: it may name programs and files.
///
/// # Errors
/// The text is none.
pub fn kubeconfig(text: &str) -> Result<(), String> {
    Kubeconfig::from_yaml(text).map(drop).map_err(|error| error.to_string())
}
