//! Requests that change an object (hcsshim `hcn/hcnnetwork.go`, `hcnendpoint.go`, `hcnnamespace.go`).

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::wire_enum::wire_enum;
use super::{Extra, Policy, Subnet, strict_members};
use crate::Guid;

wire_enum! {
    /// The operation on the content of `Settings`.
    RequestType {
        /// Adds it.
        Add = 0 "Add",
        /// Removes it. Policies must be given completely.
        Remove = 1 "Remove",
        /// Replaces **everything** of that resource type.
        Update = 2 "Update",
        /// Applies it again.
        Refresh = 3 "Refresh",
    }
}

wire_enum! {
    /// The kind of resource in `Settings`.
    ResourceType {
        /// Policies of a network or endpoint.
        Policy = 0 "Policy",
        /// The port of an endpoint.
        Port = 1 "Port",
        /// An endpoint in a namespace.
        Endpoint = 2 "Endpoint",
        /// A container in a namespace.
        Container = 3 "Container",
        /// DNS of a network.
        Dns = 4 "DNS",
        /// A switch extension of a network.
        Extension = 5 "Extension",
        /// A subnet of a network.
        Subnet = 6 "Subnet",
        /// A range within a subnet.
        IpSubnet = 7 "IPSubnet",
    }
}

/// A change of one object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Modify {
    /// The kind of resource.
    pub resource_type: ResourceType,
    /// The operation.
    pub request_type: RequestType,
    /// The details, by resource type.
    #[serde(default)]
    pub settings: Value,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl Modify {
    /// A change of a network's or endpoint's policies.
    pub fn policies(request_type: RequestType, policies: Vec<Policy>) -> Modify {
        Modify {
            resource_type: ResourceType::Policy,
            request_type,
            settings: json!({ "Policies": policies }),
            extra: Extra::new(),
        }
    }

    /// A change of a network's subnets.
    pub fn subnets(request_type: RequestType, subnets: Vec<Subnet>) -> Modify {
        Modify {
            resource_type: ResourceType::Subnet,
            request_type,
            settings: json!({ "Subnets": subnets }),
            extra: Extra::new(),
        }
    }

    /// Attaches an endpoint to a namespace (Add), or detaches it (Remove).
    pub fn namespace_endpoint(request_type: RequestType, endpoint: Guid) -> Modify {
        Modify {
            resource_type: ResourceType::Endpoint,
            request_type,
            settings: json!({ "EndpointId": endpoint }),
            extra: Extra::new(),
        }
    }
}

/// `Settings` of a change of policies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PolicyList {
    /// The policies.
    pub policies: Vec<Policy>,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// `Settings` of a change of subnets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SubnetList {
    /// The subnets.
    pub subnets: Vec<Subnet>,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// `Settings` of a change of a namespace's endpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct NamespaceEndpoint {
    /// The endpoint.
    pub endpoint_id: Guid,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

strict_members! {
    Modify { resource_type = "ResourceType", request_type = "RequestType" }
    PolicyList { policies = "Policies" }
    SubnetList { subnets = "Subnets" }
    NamespaceEndpoint {}
}
