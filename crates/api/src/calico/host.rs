//! HostEndpoint: an interface of a node under policy (`api/pkg/apis/projectcalico/v3/hostendpoint.go` of Calico).

use std::net::IpAddr;

use serde::Deserialize;

use super::EndpointPort;
use crate::fields::{is_object_name, is_port_name, list};
use crate::net::Protocol;
use crate::{FieldError, Metadata};

/// An interface of a node.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct HostEndpoint {
    /// Its name and labels.
    pub metadata: Metadata,
    /// The interface.
    pub spec: HostEndpointSpec,
}

/// The node and interface of a host endpoint.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostEndpointSpec {
    /// The node.
    pub node: String,
    /// The interface's name; `*` means every interface that does not belong to a pod and has no host endpoint of its
    /// own.
    #[serde(default)]
    pub interface_name: Option<String>,
    /// Addresses of the node. Without a name, the interface that has one of them is meant; rules find the host
    /// endpoint by them.
    #[serde(default, rename = "expectedIPs", deserialize_with = "list")]
    pub expected_ips: Vec<IpAddr>,
    /// The profiles, in order.
    #[serde(default, deserialize_with = "list")]
    pub profiles: Vec<String>,
    /// The named ports that rules can refer to.
    #[serde(default, deserialize_with = "list")]
    pub ports: Vec<EndpointPort>,
}

impl HostEndpoint {
    /// The profile of automatic host endpoints. It allows everything, whether or not it is stored.
    pub const DEFAULT_ALLOW: &str = "projectcalico-default-allow";

    /// The interface name that means all interfaces.
    pub const ALL_INTERFACES: &str = "*";

    /// Whether it covers every interface that does not belong to a pod and has no host endpoint of its own.
    #[must_use]
    pub fn is_for_all_interfaces(&self) -> bool {
        self.spec.interface_name.as_deref() == Some(Self::ALL_INTERFACES)
    }

    pub(crate) fn validate(&self) -> Result<(), Vec<FieldError>> {
        let mut problems = Vec::new();
        let mut wrong = |path: &str, problem: String| problems.push(FieldError::new(path, problem));
        if self.spec.node.is_empty() {
            wrong("spec.node", "is missing".into());
        } else if !is_object_name(&self.spec.node) {
            wrong("spec.node", format!("{:?} is no name of a node", self.spec.node));
        }
        for (index, profile) in self.spec.profiles.iter().enumerate() {
            if !is_object_name(profile) {
                wrong(&format!("spec.profiles[{index}]"), format!("{profile:?} is no name of a profile"));
            }
        }
        let name = self.spec.interface_name.as_deref().unwrap_or_default();
        if name.is_empty() && self.spec.expected_ips.is_empty() {
            wrong("spec", "needs interfaceName or expectedIPs".into());
        }
        // The kernel's limit, IFNAMSIZ.
        if name.len() > 15 {
            wrong("spec.interfaceName", format!("{name:?} is longer than 15 characters"));
        }
        let of_interface = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if name != Self::ALL_INTERFACES && !name.bytes().all(of_interface) {
            wrong("spec.interfaceName", format!("{name:?} is neither an interface's name nor \"*\""));
        }
        for (index, port) in self.spec.ports.iter().enumerate() {
            if !is_port_name(&port.name) {
                wrong(&format!("spec.ports[{index}].name"), format!("{:?} is no name of a port", port.name));
            }
            if Protocol::from_name(&port.protocol).is_none() {
                wrong(
                    &format!("spec.ports[{index}].protocol"),
                    format!("{:?} is no protocol", port.protocol),
                );
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}
