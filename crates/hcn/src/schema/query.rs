//! The query document (hcsshim `hcn/hcnnetwork.go`).

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Extra, SchemaVersion, strict_members};

/// Which objects an enumeration lists, or in which form it returns an object's properties.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Query {
    /// The schema of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_version: Option<SchemaVersion>,
    /// 1: with details.
    #[serde(skip_serializing_if = "super::network::is_zero")]
    pub flags: u32,
    /// A JSON document **as a string**: members that the objects must have. Empty: all objects.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub filter: String,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl Query {
    /// All objects, all properties.
    pub fn all() -> Query {
        Query { schema_version: Some(SchemaVersion::V2), ..Query::default() }
    }

    /// The objects whose member `key` is `value`. For endpoints of a network, the key is `VirtualNetwork`, the name
    /// of v1.
    pub fn filter(key: &str, value: &str) -> Query {
        let filter = Map::from_iter([(key.to_owned(), Value::from(value))]);
        Query { filter: Value::Object(filter).to_string(), ..Query::all() }
    }
}

strict_members! { Query {} }
