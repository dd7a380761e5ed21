//! The resource types: Calico v3 kinds and the Kubernetes kinds that we read; their names, defaults and validation.
//!
//! Objects travel as JSON values, as YAML gave them, so that fields which we do not read are kept. [`Resource::read`]
//! makes the typed view of one; [`manifest::read`] reads files of them and says what is wrong with file and line.

pub mod calico;
mod defaults;
mod fields;
pub mod ipam;
mod key;
mod known_fields;
pub mod kubernetes;
pub mod manifest;
pub mod net;
pub mod report;
mod resource;
pub mod staged;
mod strict;
pub mod support;
mod value;
mod yaml;

pub use fields::{Cidr, Network, Port, ProtocolName, is_reserved_label};
pub use key::{Key, Kind};
pub use resource::{FieldError, Metadata, Resource, in_words};
