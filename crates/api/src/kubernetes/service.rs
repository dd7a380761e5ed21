//! `v1` Service and `discovery.k8s.io/v1` EndpointSlice, as far as policy asks for backends.

use std::net::IpAddr;

use serde::Deserialize;

use crate::Metadata;
use crate::fields::list;
use crate::net::Protocol;

/// A Service.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Service {
    /// Its name and namespace.
    pub metadata: Metadata,
    /// Its addresses and ports.
    #[serde(default)]
    pub spec: ServiceSpec,
}

/// The addresses and ports of a Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// Its own addresses; `None` stands for a headless Service.
    #[serde(rename = "clusterIPs", deserialize_with = "list")]
    pub cluster_ips: Vec<String>,
    /// Its ports.
    #[serde(deserialize_with = "list")]
    pub ports: Vec<ServicePort>,
}

/// A port of a Service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct ServicePort {
    /// Its name; absent where the Service has only one.
    #[serde(default)]
    pub name: Option<String>,
    /// TCP if absent.
    #[serde(default)]
    pub protocol: Option<String>,
    /// The port of the Service's own addresses.
    pub port: u16,
}

/// Some of the backends of a Service.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct EndpointSlice {
    /// Its name and namespace; a label names the Service.
    pub metadata: Metadata,
    /// The backends.
    #[serde(default, deserialize_with = "list")]
    pub endpoints: Vec<SliceEndpoint>,
    /// The ports that every one of them has.
    #[serde(default, deserialize_with = "list")]
    pub ports: Vec<SlicePort>,
}

/// One backend.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct SliceEndpoint {
    /// Its addresses; a slice of type FQDN holds names here.
    #[serde(default, deserialize_with = "list")]
    pub addresses: Vec<String>,
}

/// A port of the backends of a slice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct SlicePort {
    /// The name of the Service's port that leads here.
    #[serde(default)]
    pub name: Option<String>,
    /// TCP if absent.
    #[serde(default)]
    pub protocol: Option<String>,
    /// Its number; a slice may leave it open, and then no rule can mean it.
    #[serde(default)]
    pub port: Option<u16>,
}

impl EndpointSlice {
    /// The label with the name of the Service.
    pub const SERVICE: &str = "kubernetes.io/service-name";

    /// The Service that the slice belongs to.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        self.metadata.labels.get(Self::SERVICE).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// The addresses of the backends. Whether one is ready does not matter, as in Calico: a policy does not change when a
    /// probe fails.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.endpoints
            .iter()
            .flat_map(|endpoint| &endpoint.addresses)
            .filter_map(|address| address.parse().ok())
    }

    /// Address, protocol and port of each backend, as far as it has a port.
    pub fn backends(&self) -> impl Iterator<Item = (IpAddr, Protocol, u16)> {
        self.addresses().flat_map(|address| {
            self.ports.iter().filter_map(move |port| {
                let protocol = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP"))?;
                Some((address, protocol, port.port?))
            })
        })
    }
}
