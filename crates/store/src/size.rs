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
            let field =
                |(name, value): (&String, &Value)| size_of::<String>() + name.len() + size_of_value(value);
            own + fields.iter().map(field).sum::<usize>()
        }
    }
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
    }
}
