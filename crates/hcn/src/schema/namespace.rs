//! HostComputeNamespace (hcsshim `hcn/hcnnamespace.go`).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::network::is_zero;
use super::wire_enum::wire_enum;
use super::{Base, Extra, strict_members};
use crate::Guid;

wire_enum! {
    /// The kind of a namespace.
    #[derive(Default)]
    NamespaceType {
        /// A compartment of the node: process-isolated containers.
        #[default]
        Host = 0 "Host",
        /// The node's own compartment.
        HostDefault = 1 "HostDefault",
        /// In a utility VM.
        Guest = 2 "Guest",
        /// The utility VM's default.
        GuestDefault = 3 "GuestDefault",
    }
}

/// A namespace: the network stack that a pod's containers share.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Namespace {
    /// Its identifier: the network namespace that a Windows container runtime passes to CNI.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// The number of its compartment.
    #[serde(skip_serializing_if = "is_zero")]
    pub namespace_id: u32,
    /// An identifier beside `ID`.
    #[serde(skip_serializing_if = "Guid::is_zero")]
    pub namespace_guid: Guid,
    /// Its kind. HNS omits Host, the zero value, in answers.
    pub r#type: NamespaceType,
    /// The endpoints and containers in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<NamespaceResource>,
    /// Whether HNS creates a compartment at once; some clients send it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub create_with_compartment: Option<bool>,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl Namespace {
    /// The endpoints in it.
    pub fn endpoints(&self) -> impl Iterator<Item = Guid> {
        self.resources.iter().filter(|resource| resource.r#type == "Endpoint").filter_map(|resource| {
            // hcsshim writes "ID", the schema "Id".
            resource.data.get("Id").or_else(|| resource.data.get("ID"))?.as_str()?.parse().ok()
        })
    }
}

/// A resource in a namespace.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct NamespaceResource {
    /// `Endpoint` or `Container`.
    pub r#type: String,
    /// `{"Id": …}`.
    pub data: Value,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

strict_members! {
    Namespace { r#type = "Type", resources = "Resources" }
    NamespaceResource {}
}
