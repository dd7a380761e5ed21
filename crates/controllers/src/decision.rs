//! What a reconciler decides about one object, and how an object is brought to its desired content.

use serde_json::{Map, Value};
use tortie_api::Key;
use tortie_store::{Stored, Version};

/// What to do about an object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    /// It is as it should be, or not enough is known yet.
    Nothing,
    /// Somebody else created it. The text says what the controllers would have done.
    Foreign(&'static str),
    Create(Value),
    Update(Value, Version),
    /// Deletes this version, if its source does not exist.
    Delete(Version, Option<Key>),
}

/// The text of an annotation.
pub(crate) fn annotation<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get("metadata")?.get("annotations")?.get(name)?.as_str()
}

/// The labels of an object; an empty mapping if they cannot be read.
pub(crate) fn labels(value: &Value) -> Map<String, Value> {
    value["metadata"]["labels"].as_object().cloned().unwrap_or_default()
}

/// Updates an object to its desired content, unless it has it. The fields of `metadata` that the desired content lacks,
/// such as the uid, stay.
pub(crate) fn update(actual: &Stored, desired: &Value) -> Decision {
    let mut metadata = actual.value["metadata"].as_object().cloned().unwrap_or_default();
    metadata.extend(desired["metadata"].as_object().cloned().unwrap_or_default());
    let mut value = desired.clone();
    if let Some(fields) = value.as_object_mut() {
        fields.insert("metadata".to_owned(), Value::Object(metadata));
    }
    if value == actual.value { Decision::Nothing } else { Decision::Update(value, actual.version.clone()) }
}
