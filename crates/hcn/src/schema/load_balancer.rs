//! HostComputeLoadBalancer (hcsshim `hcn/hcnloadbalancer.go`).

use serde::{Deserialize, Serialize};

use super::network::is_zero;
use super::{Base, Extra, strict_members};
use crate::Guid;

/// The values of a load balancer's `Flags`.
#[derive(Debug, Clone, Copy)]
pub struct LoadBalancerFlags;

impl LoadBalancerFlags {
    /// Backends see the client's address and answer it directly. Otherwise they see the
    /// [`source_vip`](LoadBalancer::source_vip), or the node's address.
    pub const ENABLE_DIRECT_SERVER_RETURN: u32 = 1;
    /// Its addresses are IPv6.
    pub const ENABLE_IPV6: u32 = 2;
}

/// A load balancer: it translates packets to some addresses and ports.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct LoadBalancer {
    /// Its identifier.
    #[serde(rename = "ID", skip_serializing_if = "Guid::is_zero")]
    pub id: Guid,
    /// The backends: endpoints of the node, or remote ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_compute_endpoints: Vec<Guid>,
    /// The source that backends see without direct server return; empty means the node's address.
    #[serde(rename = "SourceVIP", skip_serializing_if = "String::is_empty")]
    pub source_vip: String,
    /// Its addresses; empty means the node's own, as for a NodePort.
    #[serde(rename = "FrontendVIPs", skip_serializing_if = "Vec::is_empty")]
    pub frontend_vips: Vec<String>,
    /// Its ports. Clients read only the first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub port_mappings: Vec<LoadBalancerPortMapping>,
    /// See [`LoadBalancerFlags`].
    #[serde(skip_serializing_if = "is_zero")]
    pub flags: u32,
    /// The members of every object.
    #[serde(flatten)]
    pub base: Base,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

/// A port of a load balancer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct LoadBalancerPortMapping {
    /// Its protocol's number.
    pub protocol: u32,
    /// The port of the backends.
    pub internal_port: u16,
    /// The port of the load balancer's addresses.
    pub external_port: u16,
    /// How connections are distributed: 0 by both addresses and ports, 1 by addresses and protocol, 2 by addresses.
    #[serde(skip_serializing_if = "is_zero")]
    pub distribution_type: u32,
    /// 1 internal, 2 an address of the node itself, 4 by the multiplexer, 8 keeps the destination, 16 from outside.
    #[serde(skip_serializing_if = "is_zero")]
    pub flags: u32,
    /// Unknown members.
    #[serde(flatten)]
    pub extra: Extra,
}

impl LoadBalancer {
    /// Whether backends see the client's own address.
    pub fn is_direct(&self) -> bool {
        self.flags & LoadBalancerFlags::ENABLE_DIRECT_SERVER_RETURN != 0
    }
}

strict_members! {
    LoadBalancer { port_mappings = "PortMappings" }
    LoadBalancerPortMapping {}
}
