//! HostComputeNetwork (hcsshim `hcn/hcnnetwork.go`).

use serde::{Deserialize, Serialize};

use super::wire_enum::wire_enum;
use super::{Base, Dns, Extra, Policy, strict_members};
use crate::Guid;

wire_enum! {
    /// The kind of a network.
    #[derive(Default)]
    NetworkMode {
        /// NAT behind the node's address.
        #[default]
        Nat = 0 "NAT",
        /// Internet connection sharing.
        Ics = 1 "ICS",
        /// Directly on the physical network.
        Transparent = 2 "Transparent",
        /// Bridged, with the node's MAC address: host-gw and BGP.
        L2Bridge = 3 "L2Bridge",
        /// Azure's variant of L2Bridge.
        L2Tunnel = 4 "L2Tunnel",
        /// VXLAN.
        Overlay = 5 "Overlay",
        /// Between its own ports only.
        Private = 6 "Private",
        /// Between its own ports and the node.
        Internal = 7 "Internal",
        /// In the same subnet as the node.
        Mirrored = 8 "Mirrored",
        /// InfiniBand.
        Infiniband = 9 "Infiniband",
        /// ICS with limits.
        ConstrainedIcs = 10 "ConstrainedICS",
    }
}

/// The values of a network's `Flags`.
#[derive(Debug, Clone, Copy)]
pub struct NetworkFlags;

impl NetworkFlags {
    /// The network disappears when the node restarts.
    pub const ENABLE_NON_PERSISTENT: u32 = 8;
    /// No port to the host.
    pub const DISABLE_HOST_PORT: u32 = 1024;
}

/// A network.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Network {
    /// Its identifier; zero in a request lets HNS choose.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// Its name, unique on the node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Its kind. HNS omits NAT, the zero value, in answers.
    pub r#type: NetworkMode,
    /// Its policies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<Policy>,
    /// MAC addresses for endpoints without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac_pool: Option<MacPool>,
    /// DNS for its endpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns: Option<Dns>,
    /// Its subnets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ipams: Vec<Ipam>,
    /// See [`NetworkFlags`].
    #[serde(skip_serializing_if = "is_zero")]
    pub flags: u32,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl Network {
    /// All subnets of all address plans.
    pub fn subnets(&self) -> impl Iterator<Item = &Subnet> {
        self.ipams.iter().flat_map(|ipam| &ipam.subnets)
    }
}

/// Ranges of MAC addresses.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct MacPool {
    /// The ranges.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranges: Vec<MacRange>,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A range of MAC addresses, both ends included, written with dashes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct MacRange {
    /// The first.
    pub start_mac_address: String,
    /// The last.
    pub end_mac_address: String,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// An address plan.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Ipam {
    /// `Static` or `Dhcp`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub r#type: String,
    /// Its subnets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub subnets: Vec<Subnet>,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A subnet of a network.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Subnet {
    /// Its identifier.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// Its CIDR.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ip_address_prefix: String,
    /// VSID or VLAN.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<Policy>,
    /// Its routes; one must be the default route.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<Route>,
    /// 1: the gateway's address is not reserved.
    #[serde(skip_serializing_if = "is_zero")]
    pub flags: u32,
    /// Smaller ranges inside it (Windows Server 2022 and later).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip_subnets: Option<serde_json::Value>,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A route of a subnet or endpoint.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Route {
    /// The next hop's address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub next_hop: String,
    /// The destination's CIDR.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub destination_prefix: String,
    /// Lower is better.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metric: Option<u16>,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

pub(super) fn is_zero(number: &u32) -> bool {
    *number == 0
}

strict_members! {
    Network { r#type = "Type", policies = "Policies", mac_pool = "MacPool", dns = "Dns", ipams = "Ipams" }
    MacPool { ranges = "Ranges" }
    MacRange {}
    Ipam { subnets = "Subnets" }
    Subnet { policies = "Policies", routes = "Routes" }
    Route {}
}
