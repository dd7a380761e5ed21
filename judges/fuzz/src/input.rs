//! Divides the bytes of an input among what a parser needs.

use serde_json::Value;
use tortie_api::{Key, Kind};

/// Whether values are equal, except for fractions with many digits: reading and writing may change the last one (`serde_json` without
/// `float_roundtrip`).
pub(crate) fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) if one.is_f64() || other.is_f64() => {
            let (one, other) = (one.as_f64().unwrap_or_default(), other.as_f64().unwrap_or_default());
            (one - other).abs() <= one.abs().max(other.abs()) * 1e-14
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(name, value)| other.get(name).is_some_and(|other| same(value, other)))
        }
        (one, other) => one == other,
    }
}

/// The bytes of an input that are not used yet. When there are no more, numbers are 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    /// One byte, for choices.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// The bytes until the next NUL.
    pub(crate) fn until_nul(&mut self) -> &'a [u8] {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        let (part, rest) = self.0.split_at(end);
        self.0 = rest.get(1..).unwrap_or_default();
        part
    }

    /// The text until the next NUL; empty if it is no UTF-8.
    pub(crate) fn text(&mut self) -> &'a str {
        std::str::from_utf8(self.until_nul()).unwrap_or_default()
    }

    /// The rest as JSON.
    pub(crate) fn json(self) -> Option<Value> {
        serde_json::from_slice(self.0).ok()
    }

    /// A kind of object.
    pub(crate) fn kind(&mut self) -> Kind {
        let all: Vec<Kind> = Kind::all().collect();
        all[usize::from(self.byte()) % all.len()]
    }

    /// The key of an object of any kind, whose name is that of `value` if it has one.
    pub(crate) fn key(&mut self, value: &Value) -> Key {
        let kind = self.kind();
        let name = value["metadata"]["name"].as_str().unwrap_or("x");
        if kind.namespaced() { Key::namespaced(kind, "n", name) } else { Key::global(kind, name) }
    }
}
