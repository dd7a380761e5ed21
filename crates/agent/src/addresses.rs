//! Which addresses a pod needs.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use serde_json::Value;
use tortie_cni::{Code, Failure, NetworkConfig};
use tortie_dataplane::EndpointId;
use tortie_ipam::Assignment;

/// The IPv4 address of a pod, and its block. Pods have no IPv6 addresses yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PodAddress {
    pub(crate) address: Ipv4Addr,
    pub(crate) block: Ipv4Net,
}

impl PodAddress {
    /// `None` for IPv6.
    pub(crate) fn of(assignment: &Assignment) -> Option<Self> {
        match (assignment.address, assignment.block) {
            (IpAddr::V4(address), IpNet::V4(block)) => Some(Self { address, block }),
            _ => None,
        }
    }
}

/// The error for a pod that only has an IPv6 address.
pub(crate) fn not_wired(id: &EndpointId) -> Failure {
    let msg = format!("{id} got an IPv6 address, and pods have no IPv6 routes yet");
    Failure::new(Code::NOT_SUPPORTED, msg, "give the pod an IPv4 address")
}

/// Rejects settings of the `ipam` section of a network configuration that Tortie does not implement.
///
/// # Errors
/// The first such setting.
pub(crate) fn check_config(config: &NetworkConfig) -> Result<(), Failure> {
    let section = match config.extra.get("ipam") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(section)) => section,
        Some(_) => return Err(Failure::new(Code::INVALID_CONFIG, "ipam is no object", "")),
    };
    for (name, value) in section {
        // Calico writes these as texts.
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let why = match (name.as_str(), text.as_str()) {
            ("type", "calico-ipam") | ("assign_ipv4", "true") | ("assign_ipv6", "false") => continue,
            ("type", _) => "Tortie gives the addresses itself; set it to calico-ipam",
            ("assign_ipv4", _) => "pods need an IPv4 address; set it to \"true\"",
            ("assign_ipv6", _) => "pods have no IPv6 routes yet; set it to \"false\"",
            _ => "Tortie does not know it; take it out",
        };
        let msg = format!("ipam.{name} of network {} is {text:?}, which is not supported", config.name);
        return Err(Failure::new(Code::NOT_SUPPORTED, msg, why));
    }
    Ok(())
}
