//! Stored JSON.

use serde_json::Value;
use tortie_api::Key;

/// The object of a stored text. A text that cannot be parsed becomes a string, which no reader understands: the object
/// gets a condition or an error, and the other objects of its kind are not affected.
pub(crate) fn decode(key: &Key, text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_else(|error| unreadable(key, &error, text))
}

/// A stored text that is no object for this reason.
pub(crate) fn unreadable(key: &Key, error: &dyn std::fmt::Display, text: &[u8]) -> Value {
    tracing::warn!(object = %key, %error, "the stored object cannot be read; it closes what it concerns");
    Value::String(String::from_utf8_lossy(text).into_owned())
}

/// Whether the value is nested deeper than this. The recursion ends there, too.
pub(crate) fn is_deeper(value: &Value, depth: usize) -> bool {
    match value {
        Value::Array(items) => depth == 0 || items.iter().any(|item| is_deeper(item, depth - 1)),
        Value::Object(fields) => depth == 0 || fields.values().any(|field| is_deeper(field, depth - 1)),
        _ => false,
    }
}
