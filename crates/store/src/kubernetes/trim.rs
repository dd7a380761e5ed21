//! Reads JSON without the parts that nobody needs, so that they never take memory. A pod of a Deployment has 5 to 10 kB, of
//! which its endpoint needs a tenth.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use tortie_api::Kind;

use super::endpoints::{AWS_POD_IPS, CONTAINER_ID, POD_IP, POD_IPS};

/// The parts of a JSON value to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    All,
    /// These fields of an object.
    Only(&'static [(&'static str, Keep)]),
    /// All fields of an object; of these ones, only parts.
    Parts(&'static [(&'static str, Keep)]),
    /// These parts of each item of a list.
    Items(&'static Keep),
    Nothing,
}

/// An object without the record of who manages its fields.
const OBJECT: Keep = Keep::Parts(&[("metadata", Keep::Parts(&[("managedFields", Keep::Nothing)]))]);
const LIST: Keep = Keep::Parts(&[("items", Keep::Items(&OBJECT))]);
const LINE: Keep = Keep::Parts(&[("object", OBJECT)]);

const CONTAINERS: Keep = Keep::Items(&Keep::Only(&[("ports", Keep::All)]));
const POD_FIELDS: [(&str, Keep); 3] = [
    (
        "metadata",
        Keep::Only(&[
            ("name", Keep::All),
            ("namespace", Keep::All),
            ("uid", Keep::All),
            ("resourceVersion", Keep::All),
            ("generateName", Keep::All),
            ("creationTimestamp", Keep::All),
            ("deletionTimestamp", Keep::All),
            ("ownerReferences", Keep::All),
            ("labels", Keep::All),
            (
                "annotations",
                Keep::Only(&[
                    (POD_IP, Keep::All),
                    (POD_IPS, Keep::All),
                    (AWS_POD_IPS, Keep::All),
                    (CONTAINER_ID, Keep::All),
                ]),
            ),
        ]),
    ),
    (
        "spec",
        Keep::Only(&[
            ("nodeName", Keep::All),
            ("hostNetwork", Keep::All),
            ("serviceAccountName", Keep::All),
            ("containers", CONTAINERS),
            ("initContainers", CONTAINERS),
        ]),
    ),
    ("status", Keep::Only(&[("phase", Keep::All), ("podIP", Keep::All), ("podIPs", Keep::All)])),
];
/// What the endpoint of a pod is derived from. In a watch, an error can be in its place, of which everything stays.
const POD: Keep = Keep::Parts(&POD_FIELDS);
const PODS: Keep = Keep::Parts(&[("items", Keep::Items(&POD))]);
const POD_LINE: Keep = Keep::Parts(&[("object", POD)]);

/// The positions of the objects of a list, and where it goes on.
pub(crate) const POSITIONS: Keep = Keep::Parts(&[(
    "items",
    Keep::Items(&Keep::Only(&[("metadata", Keep::Only(&[("resourceVersion", Keep::All)]))])),
)]);

/// The names of the objects of a list, and where it goes on.
pub(crate) const NAMES: Keep =
    Keep::Parts(&[("items", Keep::Items(&Keep::Only(&[("metadata", Keep::Only(&[("name", Keep::All)]))])))]);

/// What is needed of a list of objects that give this kind.
pub(crate) fn of_list(kind: Kind) -> Keep {
    if kind == Kind::WorkloadEndpoint { PODS } else { LIST }
}

/// What is needed of a line of a watch.
pub(crate) fn of_line(kind: Kind) -> Keep {
    if kind == Kind::WorkloadEndpoint { POD_LINE } else { LINE }
}

/// Reads these parts of a JSON document.
pub(crate) fn read(keep: Keep, text: &[u8]) -> Result<Value, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = keep.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

impl<'de> DeserializeSeed<'de> for Keep {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self {
            Keep::All => serde::Deserialize::deserialize(deserializer),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for Keep {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let keep = if let Keep::Items(keep) = self { *keep } else { Keep::All };
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(keep)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let (listed, others): (&[_], _) = match self {
            Keep::Only(listed) => (listed, Keep::Nothing),
            Keep::Parts(listed) => (listed, Keep::All),
            Keep::All | Keep::Items(_) | Keep::Nothing => (&[], Keep::All),
        };
        let mut object = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            let listed = listed.iter().find(|(field, _)| *field == name);
            match listed.map_or(others, |(_, keep)| *keep) {
                Keep::Nothing => drop(fields.next_value::<IgnoredAny>()?),
                keep => drop(object.insert(name, fields.next_value_seed(keep)?)),
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn trimmed(keep: Keep, value: &Value) -> Value {
        read(keep, value.to_string().as_bytes()).unwrap_or_default()
    }

    #[test]
    fn fields_are_kept_as_the_table_says() {
        const NAMES: Keep =
            Keep::Only(&[("a", Keep::All), ("b", Keep::Items(&Keep::Only(&[("c", Keep::All)])))]);
        const PARTS: Keep = Keep::Parts(&[("a", Keep::Nothing), ("b", Keep::Only(&[("c", Keep::All)]))]);
        let value =
            json!({"a": {"x": [1.5, -1, true, null, u64::MAX]}, "b": [{"c": "t", "d": 1}, 7], "e": 2});
        let table = [
            (Keep::All, value.clone(), value.clone()),
            (NAMES, value.clone(), json!({"a": value["a"], "b": [{"c": "t"}, 7]})),
            (PARTS, value.clone(), json!({"b": value["b"], "e": 2})),
            (PARTS, json!({"b": {"c": 1, "d": 2}}), json!({"b": {"c": 1}})),
            // A value of another type stays as it is.
            (NAMES, json!("text"), json!("text")),
            (NAMES, json!([{"z": 1}]), json!([{"z": 1}])),
            (Keep::Items(&NAMES), json!({"z": 1}), json!({"z": 1})),
        ];
        for (keep, value, expected) in table {
            assert_eq!(trimmed(keep, &value), expected, "{keep:?} {value}");
        }
        for text in ["", "{", "{} x", "{\"a\":}"] {
            assert!(read(NAMES, text.as_bytes()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn only_the_record_of_managers_is_dropped_of_other_objects() {
        let object = json!({"metadata": {"name": "n", "labels": {"a": "b"}, "managedFields": [1]}, "spec": {"x": 1}, "status": 1});
        let mut expected = object.clone();
        expected["metadata"].as_object_mut().map(|metadata| metadata.remove("managedFields"));
        let list = json!({"metadata": {"resourceVersion": "7"}, "items": [object]});
        assert_eq!(trimmed(of_list(Kind::Pod), &list)["items"], json!([expected]));
        assert_eq!(trimmed(of_list(Kind::Pod), &list)["metadata"], list["metadata"]);
        let line = json!({"type": "ADDED", "object": object});
        assert_eq!(trimmed(of_line(Kind::Pod), &line), json!({"type": "ADDED", "object": expected}));
    }

    #[test]
    fn only_positions_are_kept_of_objects_that_are_only_counted() {
        let item =
            json!({"kind": "K", "metadata": {"name": "n", "resourceVersion": "7", "managedFields": [1]}});
        let list = json!({"metadata": {"continue": "c", "resourceVersion": "9"}, "items": [item]});
        let expected =
            json!({"metadata": list["metadata"], "items": [{"metadata": {"resourceVersion": "7"}}]});
        assert_eq!(trimmed(POSITIONS, &list), expected);
    }

    #[test]
    fn an_error_in_a_watch_is_kept() {
        let line = json!({"type": "ERROR", "object": {"kind": "Status", "metadata": {}, "status": "Failure",
            "message": "too old", "reason": "Expired", "code": 410, "details": {"x": 1}}});
        for kind in [Kind::Pod, Kind::WorkloadEndpoint] {
            assert_eq!(trimmed(of_line(kind), &line), line);
        }
    }
}
