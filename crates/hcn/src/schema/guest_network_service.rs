//! GuestNetworkService (page `HNS_Schema` of the HCN reference): the network of a virtual machine that mirrors the host's.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::network::is_zero;
use super::wire_enum::wire_enum;
use super::{Base, Extra, RequestType, strict_members};
use crate::Guid;

wire_enum! {
    /// The state of a guest network service. The numbers are the positions in the schema.
    #[derive(Default)]
    GuestNetworkServiceState {
        /// None.
        #[default]
        None = 0 "None",
        /// It exists.
        Created = 1 "Created",
        /// The guest starts.
        Bootstrapping = 2 "Bootstrapping",
        /// The guest has what the host has.
        Synchronized = 3 "Synchronized",
        /// It waits.
        Paused = 4 "Paused",
        /// The guest lacks changes.
        Desynchronized = 5 "Desynchronized",
        /// The guest catches up.
        Rehydrating = 6 "Rehydrating",
        /// It does not work.
        Degraded = 7 "Degraded",
        /// It is gone.
        Destroyed = 8 "Destroyed",
    }
}

wire_enum! {
    /// What a change of a guest network service concerns.
    GuestNetworkServiceResource {
        /// Its state.
        State = 0 "State",
    }
}

/// A guest network service. Tortie makes none.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct GuestNetworkService {
    /// Its identifier.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// Its name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The virtual machine.
    #[serde(skip_serializing_if = "Guid::is_zero")]
    pub virtual_machine_id: Guid,
    /// The interfaces that the guest shows.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mirrored_interfaces: Vec<Value>,
    /// Whether the guest has the host's addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirror_host_networking: Option<bool>,
    /// How the guest is reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gns_rpc_server_information: Option<Value>,
    /// 1 and 2: packets are distributed by flow.
    #[serde(skip_serializing_if = "is_zero")]
    pub flags: u32,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A change of a guest network service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ModifyGuestNetworkService {
    /// What it concerns.
    pub resource_type: GuestNetworkServiceResource,
    /// The operation.
    pub request_type: RequestType,
    /// The details.
    pub settings: GuestNetworkServiceStateRequest,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// `Settings` of a change of the state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct GuestNetworkServiceStateRequest {
    /// The new state.
    pub state: GuestNetworkServiceState,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

strict_members! {
    GuestNetworkService {}
    ModifyGuestNetworkService { resource_type = "ResourceType", request_type = "RequestType", settings = "Settings" }
    GuestNetworkServiceStateRequest { state = "State" }
}
