//! The resource types: Calico v3 kinds and the Kubernetes kinds that Tortie reads; their names, defaults and
//! validation.
//!
//! Objects are passed as JSON values, so that unread fields are kept. [`Resource::read`] creates the typed view of
//! one object. [`manifest::read`] reads files and reports problems with file and line.

pub mod calico;
pub mod convert;
mod defaults;
mod fields;
pub mod ipam;
mod key;
mod known_fields;
pub mod kubernetes;
pub mod manifest;
pub mod net;
mod placeholder;
mod position;
pub mod report;
mod resource;
pub mod spelling;
pub mod staged;
pub mod stand_in;
mod strict;
pub mod support;
mod to_yaml;
mod unknown_fields;
mod value;
mod yaml;

pub use fields::{Cidr, Network, Port, ProtocolName, is_reserved_label};
pub use key::{Key, Kind};
pub use position::{Position, Positions};
pub use resource::{FieldError, Metadata, Resource, in_words};
pub use to_yaml::to_yaml;

/// The documents of a YAML stream as values, without a check of their meaning.
///
/// # Errors
/// The line and the problem.
pub fn from_yaml(text: &str) -> Result<Vec<serde_json::Value>, String> {
    let documents = yaml::read(text).map_err(|error| format!("line {}: {}", error.line, error.problem))?;
    Ok(documents.into_iter().map(|document| document.value).collect())
}
