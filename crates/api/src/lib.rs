//! The resource types: Calico v3 kinds and the Kubernetes kinds that Tortie reads; their names, defaults and
//! validation.
//!
//! Objects are passed as JSON values, so that unread fields are kept. [`Resource::read`] creates the typed view of
//! one object. [`manifest::read`] reads files and reports problems with file and line.

pub mod calico;
mod defaults;
mod fields;
pub mod ipam;
mod key;
mod known_fields;
pub mod kubernetes;
pub mod manifest;
pub mod net;
mod position;
pub mod report;
mod resource;
pub mod staged;
mod strict;
pub mod support;
mod unknown_fields;
mod value;
mod yaml;

pub use fields::{Cidr, Network, Port, ProtocolName, is_reserved_label};
pub use key::{Key, Kind};
pub use position::{Position, Positions};
pub use resource::{FieldError, Metadata, Resource, in_words};
