//! The words of the protocol.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use thiserror::Error;

/// The versions of the protocol that are spoken.
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
}

/// The plugin's part of a network configuration. Keys that are not known are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkConfig {
    /// The version of the protocol that the answer must have.
    #[serde(default)]
    pub cni_version: String,
    /// The network's name, the first part of IPAM handles.
    #[serde(default)]
    pub name: String,
    /// The agent's socket.
    #[serde(default = "default_socket")]
    pub agent_socket: PathBuf,
    /// Where DELs wait while the agent is away.
    #[serde(default = "default_queue")]
    pub deletion_queue: PathBuf,
    /// What is still attached, for GC.
    #[serde(rename = "cni.dev/valid-attachments", default, skip_serializing_if = "Option::is_none")]
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

fn default_socket() -> PathBuf {
    PathBuf::from("/run/tortie/agent.sock")
}

fn default_queue() -> PathBuf {
    PathBuf::from("/var/lib/tortie/cni-deletions")
}

/// Why a call failed: the error document of the specification.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("{msg} (CNI error {code}){}", if details.is_empty() { String::new() } else { format!(": {details}") })]
pub struct Failure {
    /// Which error.
    pub code: Code,
    /// What failed.
    pub msg: String,
    /// Why, and what to do.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub details: String,
}

/// The specification's error codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Code(pub u32);

impl Code {
    /// The configuration is of a version that is not spoken.
    pub const INCOMPATIBLE_VERSION: Self = Self(1);
    /// The container is not known.
    pub const UNKNOWN_CONTAINER: Self = Self(3);
    /// The environment is not as it must be.
    pub const INVALID_ENVIRONMENT: Self = Self(4);
    /// Reading or writing failed.
    pub const IO: Self = Self(5);
    /// What was read makes no sense.
    pub const DECODING: Self = Self(6);
    /// The configuration is not usable.
    pub const INVALID_CONFIG: Self = Self(7);
    /// Something is not ready: the runtime shall try again.
    pub const TRY_AGAIN_LATER: Self = Self(11);
    /// STATUS: no ADD can be served now.
    pub const NOT_AVAILABLE: Self = Self(50);
    /// Connecting or disconnecting the pod failed.
    pub const WIRING: Self = Self(100);
    /// There is no address.
    pub const IPAM: Self = Self(101);
    /// CHECK found a difference.
    pub const DIFFERS: Self = Self(102);
    /// The pod asks for something that Tortie does not do.
    pub const NOT_SUPPORTED: Self = Self(103);
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Failure {
    /// A failure with what failed and why.
    pub fn new(code: Code, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: details.into() }
    }

    /// The document that a runtime reads.
    #[must_use]
    pub fn document(&self, version: &str) -> Value {
        json!({"cniVersion": version, "code": self.code, "msg": self.msg, "details": self.details})
    }
}

/// What an ADD came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Success {
    /// The host's end and the pod's end of the link.
    pub interfaces: Vec<Interface>,
    /// The pod's addresses.
    pub ips: Vec<Address>,
    /// The pod's routes.
    pub routes: Vec<Route>,
}

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its MAC address.
    pub mac: String,
    /// The network namespace that it is in; empty for the host's.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address with its prefix length, as text.
    pub address: String,
    /// Which of the interfaces.
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
    /// The document that a runtime reads. Versions before 1.0.0 say the family of each address.
    #[must_use]
    pub fn document(&self, version: &str) -> Value {
        let mut document = json!({
            "cniVersion": version, "interfaces": self.interfaces, "ips": self.ips, "routes": self.routes, "dns": {},
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
