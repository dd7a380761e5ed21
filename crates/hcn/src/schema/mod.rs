//! The JSON documents of HCN v2 (hcsshim `hcn`; page `HNS_Schema` of the HCN reference).
//!
//! Parsing keeps unknown members in `extra`, so that a document can be sent back unchanged. HNS itself ignores
//! unknown members silently; [`strict`] finds them, for tests and for the emulator.

mod endpoint;
mod guest_network_service;
mod load_balancer;
mod modify;
mod namespace;
mod network;
mod policy;
mod query;
mod route;
mod wire_enum;

pub use endpoint::{Endpoint, EndpointFlags, IpConfig};
pub use guest_network_service::{
    GuestNetworkService, GuestNetworkServiceResource, GuestNetworkServiceState,
    GuestNetworkServiceStateRequest, ModifyGuestNetworkService,
};
pub use load_balancer::{LoadBalancer, LoadBalancerFlags, LoadBalancerPortMapping};
pub use modify::{Modify, NamespaceEndpoint, PolicyList, RequestType, ResourceType, SubnetList};
pub use namespace::{Namespace, NamespaceResource, NamespaceType};
pub use network::{Ipam, MacPool, MacRange, Network, NetworkFlags, NetworkMode, Route, Subnet};
pub use policy::{
    Acl, AclAction, AclDirection, AclRuleType, AutomaticDns, DrMacAddress, EncapOverhead, HostRoute,
    InterfaceParameters, NetAdapterName, OutBoundNat, Policy, PolicySettings, PortMapping, ProviderAddress,
    Qos, RemoteSubnetRoute, SdnRoute, SetPolicy, SetPolicyType, SourceMacAddress, Vlan, Vsid, VxlanPort,
};
pub use query::Query;
pub use route::HostComputeRoute;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Members that this crate does not know.
pub type Extra = Map<String, Value>;

/// The schema version of a document. Almost every client sends 2.0, containerd 0.0; nothing depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct SchemaVersion {
    /// 2 for these documents.
    #[serde(default)]
    pub major: u32,
    /// The minor version.
    #[serde(default)]
    pub minor: u32,
}

impl SchemaVersion {
    /// The version that Tortie sends.
    pub const V2: SchemaVersion = SchemaVersion { major: 2, minor: 0 };
}

/// Members of every object that Tortie keeps without interpreting them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Base {
    /// The creator of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// The object's own revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<Value>,
    /// For extensions of HNS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub additional_params: Option<Value>,
    /// The object's health.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Value>,
    /// For Microsoft's telemetry.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub telemetry: Option<Value>,
    /// The state of the object; for endpoints: 1 created, 2 attached, 3 attached and shared, 4 detached (hcsshim
    /// `internal/hns/hnsendpoint.go`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<u16>,
    /// The schema of this document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_version: Option<SchemaVersion>,
}

/// The DNS configuration of a network or endpoint.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Dns {
    /// The connection-specific suffix.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// The suffix search list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Addresses of servers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub server_list: Vec<String>,
    /// Resolver options.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// Why a document was rejected: the member and the problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {what}")]
pub struct DocumentError {
    /// The member, as a path.
    pub at: String,
    /// What is wrong.
    pub what: String,
}

/// Parses a document and keeps unknown members.
pub fn lenient<T: DeserializeOwned>(text: &str) -> Result<T, DocumentError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let document = serde_path_to_error::deserialize(&mut deserializer).map_err(document_error)?;
    deserializer
        .end()
        .map_err(|error| DocumentError { at: "end of the document".into(), what: error.to_string() })?;
    Ok(document)
}

/// Parses a document and rejects unknown members and values.
pub fn strict<T: DeserializeOwned + Strict>(text: &str) -> Result<T, DocumentError> {
    let document: T = lenient(text)?;
    document.check("")?;
    Ok(document)
}

pub(crate) fn document_error(error: serde_path_to_error::Error<serde_json::Error>) -> DocumentError {
    DocumentError { at: error.path().to_string(), what: error.inner().to_string() }
}

/// A document whose unknown members and values can be found.
pub trait Strict {
    /// The first unknown member or value; `at` is the path of this part of the document.
    fn check(&self, at: &str) -> Result<(), DocumentError>;
}

impl<T: Strict> Strict for Option<T> {
    fn check(&self, at: &str) -> Result<(), DocumentError> {
        self.as_ref().map_or(Ok(()), |part| part.check(at))
    }
}

impl<T: Strict> Strict for Vec<T> {
    fn check(&self, at: &str) -> Result<(), DocumentError> {
        self.iter().enumerate().try_for_each(|(index, part)| part.check(&format!("{at}[{index}]")))
    }
}

impl Strict for Extra {
    fn check(&self, at: &str) -> Result<(), DocumentError> {
        match self.keys().next() {
            None => Ok(()),
            Some(key) => Err(DocumentError { at: join(at, key), what: "unknown member".into() }),
        }
    }
}

fn join(at: &str, member: &str) -> String {
    if at.is_empty() { member.to_owned() } else { format!("{at}.{member}") }
}

/// Implements [`Strict`] for structures: checks their `extra` and the named parts.
macro_rules! strict_members {
    ($($document:ty { $($member:ident = $name:literal),* $(,)? })*) => {$(
        impl $crate::schema::Strict for $document {
            fn check(&self, at: &str) -> Result<(), $crate::schema::DocumentError> {
                self.extra.check(at)?;
                $(self.$member.check(&$crate::schema::join(at, $name))?;)*
                Ok(())
            }
        }
    )*};
}
use strict_members;

strict_members! { Dns {} }

#[cfg(test)]
mod tests;
