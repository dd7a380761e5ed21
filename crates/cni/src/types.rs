//! The types of the protocol.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use thiserror::Error;

/// The supported versions of the protocol.
pub const SUPPORTED_VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// `CNI_COMMAND`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the specification's own words")]
pub enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
    /// Tortie's own, and no `CNI_COMMAND`: the plugin asks the agent for the networks of the node's pods
    /// (`Node.spec.podCIDRs`). They are the `ips` of the answer.
    PodCidrs,
}

impl Command {
    /// Its name as the value of `CNI_COMMAND`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
            Self::PodCidrs => "PODCIDRS",
        }
    }
}

/// One call of the plugin: the environment and the configuration that the runtime gave it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Invocation {
    /// `CNI_COMMAND`.
    pub command: Command,
    /// `CNI_CONTAINERID`; empty for GC, STATUS and VERSION.
    pub container_id: String,
    /// `CNI_NETNS`; may be empty for DEL.
    pub netns: String,
    /// `CNI_IFNAME`.
    pub interface: String,
    /// `CNI_ARGS`, split.
    pub args: BTreeMap<String, String>,
    /// The configuration, from standard input.
    pub config: NetworkConfig,
    /// ADD: the pod's addresses with the prefix lengths of their networks, if the plugin has obtained them from host-local or
    /// another IPAM plugin. At most one of each family, IPv4 first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub delegated: Vec<IpNet>,
}

/// The plugin's part of a network configuration. Unknown keys are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// The protocol version of the answer.
    #[serde(default)]
    pub cni_version: String,
    /// The network's name, the first part of IPAM handles.
    #[serde(default)]
    pub name: String,
    /// The agent's socket.
    #[serde(default = "crate::local::agent_address")]
    pub agent_socket: PathBuf,
    /// Where DELs are stored while the agent is down.
    #[serde(default = "crate::local::deletion_queue")]
    pub deletion_queue: PathBuf,
    /// The existing attachments, for GC. Runtimes in Go write an empty list as null.
    #[serde(
        rename = "cni.dev/valid-attachments",
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "list_or_null"
    )]
    pub valid_attachments: Option<Vec<Attachment>>,
    /// Everything else.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A container and the interface in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The container.
    #[serde(rename = "containerID")]
    pub container_id: String,
    /// The interface.
    pub ifname: String,
}

/// Reads a list, or null as an empty one. Without the key, this is not called.
fn list_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Attachment>>, D::Error> {
    Ok(Some(Option::deserialize(deserializer)?.unwrap_or_default()))
}

/// Why a call failed: the error document of the specification.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("{msg} (CNI error {code}){}", if details.is_empty() { String::new() } else { format!(": {details}") })]
pub struct Failure {
    /// The error code.
    pub code: Code,
    /// What failed.
    pub msg: String,
    /// The reason and the remedy.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

/// The specification's error codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Code(pub u32);

impl Code {
    /// The configuration has an unsupported version.
    pub const INCOMPATIBLE_VERSION: Self = Self(1);
    /// The container is unknown.
    pub const UNKNOWN_CONTAINER: Self = Self(3);
    /// The environment is invalid.
    pub const INVALID_ENVIRONMENT: Self = Self(4);
    /// Reading or writing failed.
    pub const IO: Self = Self(5);
    /// The content could not be decoded.
    pub const DECODING: Self = Self(6);
    /// The configuration is invalid.
    pub const INVALID_CONFIG: Self = Self(7);
    /// Something is not ready, and the runtime should retry.
    pub const TRY_AGAIN_LATER: Self = Self(11);
    /// STATUS: ADD is not available now.
    pub const NOT_AVAILABLE: Self = Self(50);
    /// Connecting or disconnecting the pod failed.
    pub const WIRING: Self = Self(100);
    /// No address is available.
    pub const IPAM: Self = Self(101);
    /// CHECK found a difference.
    pub const DIFFERS: Self = Self(102);
    /// The pod requests something that Tortie does not support.
    pub const NOT_SUPPORTED: Self = Self(103);
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Failure {
    /// A failure with its subject and its reason.
    pub fn new(code: Code, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: details.into() }
    }

    /// The document for the runtime.
    #[must_use]
    pub fn document(&self, version: &str) -> Value {
        json!({"cniVersion": version, "code": self.code, "msg": self.msg, "details": self.details})
    }
}

/// The result of an ADD.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Success {
    /// The host end and the pod end of the link.
    pub interfaces: Vec<Interface>,
    /// The pod's addresses.
    pub ips: Vec<Address>,
    /// The pod's routes.
    pub routes: Vec<Route>,
    /// How the pod resolves names. An agent of an earlier build says nothing.
    #[serde(default)]
    pub dns: Dns,
}

/// How a pod resolves names, as in a result and in a network configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    /// The servers, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<IpAddr>,
    /// The domain of the pod's own name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// The domains that are appended to short names, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options of the resolver, as in `resolv.conf`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its MAC address.
    pub mac: String,
    /// Its network namespace; empty for the host's.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address with its prefix length, as text.
    pub address: String,
    /// The index of its interface.
    pub interface: usize,
}

/// A route of the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination.
    pub dst: String,
    /// The gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

impl Success {
    /// The document for the runtime. Versions before 1.0.0 include the family of each address.
    #[must_use]
    pub fn document(&self, version: &str) -> Value {
        let mut document = json!({
            "cniVersion": version, "interfaces": self.interfaces, "ips": self.ips, "routes": self.routes,
            "dns": self.dns,
        });
        if version.starts_with("0.")
            && let Some(ips) = document.get_mut("ips").and_then(Value::as_array_mut)
        {
            for ip in ips {
                let family =
                    if ip["address"].as_str().is_some_and(|text| text.contains(':')) { "6" } else { "4" };
                ip["version"] = json!(family);
            }
        }
        document
    }
}
