//! The documents in HNS's answers.

use serde::Serialize;
use serde_json::{Map, Value};
use tortie_hcn::schema::Query;
use tortie_hcn::{Failure, HResult};

use crate::check::document;
use crate::config::Config;

/// Members whose zero value HNS omits (docs/hns.md, Documents), with the name of that value.
const ZEROES: [(&str, &str); 6] = [
    ("Type", "NAT"),
    ("Type", "Host"),
    ("Action", "Allow"),
    ("Direction", "In"),
    ("RuleType", "Host"),
    ("PolicyType", "IPSET"),
];

/// An object in the form in which HNS shows it.
pub(crate) fn properties(object: &impl Serialize, config: &Config) -> Value {
    // Objects are plain data with text keys, so they always have a JSON form.
    let mut value = serde_json::to_value(object).unwrap_or_default();
    leave_out_zeroes(&mut value, config.returns_zeroes);
    value
}

fn leave_out_zeroes(value: &mut Value, but_in_settings: bool) {
    match value {
        Value::Object(members) => {
            members.retain(|key, member| !is_zero(key, member));
            let others = members.iter_mut().filter(|(key, _)| !(but_in_settings && *key == "Settings"));
            others.for_each(|(_, member)| leave_out_zeroes(member, but_in_settings));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| leave_out_zeroes(item, but_in_settings)),
        _ => {}
    }
}

/// Whether two documents have the same meaning: one may omit what the other writes, where HNS does so.
pub(crate) fn say_the_same(a: &Value, b: &Value) -> bool {
    let (Value::Object(ours), Value::Object(theirs)) = (a, b) else { return a == b };
    let in_both = |(key, member): (&String, &Value)| match theirs.get(key) {
        Some(other) => say_the_same(member, other),
        None => is_zero(key, member),
    };
    ours.iter().all(in_both)
        && theirs.iter().all(|(key, member)| ours.contains_key(key) || is_zero(key, member))
}

fn is_zero(key: &str, member: &Value) -> bool {
    ZEROES.iter().any(|(k, v)| *k == key && member == v)
}

/// The objects that a query asks for.
pub(crate) struct Filter(Map<String, Value>);

impl Filter {
    /// Parses the query, and the JSON document inside its JSON string. No filter, an empty string and `{}` select all
    /// objects.
    pub(crate) fn new(query: &str, strict: bool) -> Result<Filter, Failure> {
        if query.is_empty() {
            return Ok(Filter(Map::new()));
        }
        let query: Query = document(query, strict)?;
        if query.filter.is_empty() {
            return Ok(Filter(Map::new()));
        }
        serde_json::from_str(&query.filter).map(Filter).map_err(|error| {
            Failure::new(HResult::HCN_E_INVALID_JSON, format!("Filter is not a JSON object: {error}"))
        })
    }

    /// Whether the object has all requested members. Names and identifiers match in any case.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|(key, wanted)| {
            // The filter by network has its v1 name; some clients also use the v2 name.
            let key = if key == "VirtualNetwork" { "HostComputeNetwork" } else { key };
            match (object.get(key), wanted) {
                (Some(Value::String(have)), Value::String(wanted)) => have.eq_ignore_ascii_case(wanted),
                (Some(have), wanted) => have == wanted,
                (None, _) => false,
            }
        })
    }
}
