//! The memory of values, for limits in bytes.

use serde_json::Value;

/// The approximate memory that a value occupies, in bytes, with everything in it.
#[must_use]
pub fn size_of_value(value: &Value) -> usize {
    let own = size_of::<Value>();
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => own,
        Value::String(text) => own + text.len(),
        Value::Array(items) => own + items.iter().map(size_of_value).sum::<usize>(),
        Value::Object(fields) => {
            // What is in the nodes is counted with them.
            let field = |(name, value): (&String, &Value)| name.len() + size_of_value(value) - own;
            own + nodes(fields.len()) * NODE + fields.iter().map(field).sum::<usize>()
        }
    }
}

/// The number of fields for which a node of a map has room, whether or not there are so many.
const ROOM: usize = 11;
/// The memory of a node.
const NODE: usize = ROOM * (size_of::<String>() + size_of::<Value>()) + 16;

/// The number of nodes of a map with this number of fields: a full one is split into halves.
fn nodes(fields: usize) -> usize {
    if fields <= ROOM { fields.min(1) } else { fields.div_ceil(ROOM / 2 + 1) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_size_grows_with_everything_in_the_value() {
        let (empty, text) = (size_of_value(&json!({})), "x".repeat(1_000));
        let larger = [
            json!({"a": null}),
            json!({"a": 1}),
            json!({text.as_str(): 1}),
            json!({"a": text}),
            json!([[1, 2], [3]]),
            json!({"a": {"b": [text]}}),
        ];
        for value in larger {
            let size = size_of_value(&value);
            assert!(size > empty && size >= value.to_string().len(), "{value}: {size}");
        }
        // A map with one field takes as much as one with eleven.
        let map =
            |count: usize| size_of_value(&(0..count).map(|number| (number.to_string(), json!(1))).collect());
        assert!(map(1) > 500 && map(11) < map(1) + 50 && map(12) > map(11) + 500);
    }
}
