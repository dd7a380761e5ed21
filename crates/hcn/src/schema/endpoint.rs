//! HostComputeEndpoint (hcsshim `hcn/hcnendpoint.go`).

use serde::{Deserialize, Serialize};

use super::network::is_zero;
use super::{Base, Dns, Extra, Policy, Route, strict_members};
use crate::Guid;

/// The values of an endpoint's `Flags`.
#[derive(Debug, Clone, Copy)]
pub struct EndpointFlags;

impl EndpointFlags {
    /// A backend on another node; it has no port here.
    pub const REMOTE_ENDPOINT: u32 = 1;
}

/// An endpoint: a port of a network, with its addresses.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Endpoint {
    /// Its identifier; zero in a request lets HNS choose.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// Its name. Not unique.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Its network.
    #[serde(skip_serializing_if = "Guid::is_zero")]
    pub host_compute_network: Guid,
    /// The namespace that it is attached to, zero if none. HNS sets it.
    #[serde(skip_serializing_if = "Guid::is_zero")]
    pub host_compute_namespace: Guid,
    /// Its policies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<Policy>,
    /// Its addresses: at most one of each family.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ip_configurations: Vec<IpConfig>,
    /// Its DNS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns: Option<Dns>,
    /// Its routes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// Its MAC address, with dashes.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac_address: String,
    /// See [`EndpointFlags`].
    #[serde(skip_serializing_if = "is_zero")]
    pub flags: u32,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl Endpoint {
    /// Whether it represents a backend on another node.
    pub fn is_remote(&self) -> bool {
        self.flags & EndpointFlags::REMOTE_ENDPOINT != 0
    }
}

/// An address of an endpoint.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct IpConfig {
    /// The address, without prefix length.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ip_address: String,
    /// The prefix length; absent or 0: the subnet's.
    #[serde(skip_serializing_if = "is_zero_u8")]
    pub prefix_length: u8,
    /// The IP subnet that the address is from.
    #[serde(skip_serializing_if = "Guid::is_zero")]
    pub ip_subnet_id: Guid,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

fn is_zero_u8(number: &u8) -> bool {
    *number == 0
}

strict_members! {
    Endpoint { policies = "Policies", ip_configurations = "IpConfigurations", dns = "Dns", routes = "Routes" }
    IpConfig {}
}
