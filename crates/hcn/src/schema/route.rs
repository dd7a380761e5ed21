//! HostComputeRoute (page `HNS_Schema` of the HCN reference; hcsshim `hcn/hcnroute.go`).

use serde::{Deserialize, Serialize};

use super::{Base, Extra, SdnRoute, strict_members};
use crate::Guid;

/// Routes of several endpoints. hcsshim calls the list `Setting`, which is kept like any unknown member.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct HostComputeRoute {
    /// Its identifier.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// The endpoints.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_compute_endpoints: Vec<Guid>,
    /// The routes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<SdnRoute>,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

strict_members! { HostComputeRoute { routes = "Routes" } }
