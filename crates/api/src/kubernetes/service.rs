//! `v1` Service, `discovery.k8s.io/v1` EndpointSlice and `networking.k8s.io/v1` ServiceCIDR, as far as policy, BGP and the
//! translation of Services need them.

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
    /// The state assigned by the cluster.
    #[serde(default)]
    pub status: ServiceStatus,
}

/// The addresses and ports of a Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// Its own address; the first of `cluster_ips`.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    /// Its own addresses; `None` means a headless Service.
    #[serde(rename = "clusterIPs", deserialize_with = "list")]
    pub cluster_ips: Vec<String>,
    /// External addresses that the nodes also accept for it.
    #[serde(rename = "externalIPs", deserialize_with = "list")]
    pub external_ips: Vec<String>,
    /// `Local`: packets to external addresses reach only backends of the node that takes them. `Cluster` if absent.
    pub external_traffic_policy: Option<String>,
    /// `Local`: packets to its own addresses reach only backends of the sender's node. `Cluster` if absent.
    pub internal_traffic_policy: Option<String>,
    /// `ClientIP`: connections of a client reach the backend of its last one. `None` if absent.
    pub session_affinity: Option<String>,
    /// The settings of `ClientIP`.
    pub session_affinity_config: Option<SessionAffinityConfig>,
    /// The networks whose packets to the load balancer's addresses pass; all networks if there are none.
    #[serde(deserialize_with = "list")]
    pub load_balancer_source_ranges: Vec<String>,
    /// `IPv4` and `IPv6`, as far as it has addresses of them; the API server fills it in.
    #[serde(deserialize_with = "list")]
    pub ip_families: Vec<String>,
    /// `ClusterIP` if absent; an `ExternalName` is only a DNS name.
    #[serde(rename = "type")]
    pub service_type: Option<String>,
    /// Its ports.
    #[serde(deserialize_with = "list")]
    pub ports: Vec<ServicePort>,
}

/// The settings of session affinity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SessionAffinityConfig {
    /// Those of `ClientIP`.
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIpConfig>,
}

/// The settings of session affinity by the client's address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientIpConfig {
    /// The time in seconds after a client's last new connection for which its backend is remembered, 1 to 86,400; 10,800 if
    /// absent.
    pub timeout_seconds: Option<u32>,
}

/// The state of a Service assigned by the cluster.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceStatus {
    /// Its load balancer.
    pub load_balancer: LoadBalancerStatus,
}

/// The load balancer of a Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct LoadBalancerStatus {
    /// Its entry points.
    #[serde(deserialize_with = "list")]
    pub ingress: Vec<LoadBalancerIngress>,
}

/// An entry point of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LoadBalancerIngress {
    /// Its address; absent if it has only a name.
    pub ip: Option<String>,
    /// `VIP` if absent: nodes handle packets to the address. `Proxy`: packets must pass the load balancer.
    pub ip_mode: Option<String>,
}

/// A port of a Service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePort {
    /// Its name; may be absent if the Service has only one port.
    #[serde(default)]
    pub name: Option<String>,
    /// TCP if absent.
    #[serde(default)]
    pub protocol: Option<String>,
    /// The port of the Service's own addresses.
    pub port: u16,
    /// The port of the nodes' addresses; absent or 0 if nodes have none for it.
    #[serde(default)]
    pub node_port: Option<u16>,
}

/// Some of the backends of a Service.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct EndpointSlice {
    /// Its name and namespace; a label names the Service.
    pub metadata: Metadata,
    /// `IPv4`, `IPv6` or `FQDN`.
    #[serde(default, rename = "addressType")]
    pub address_type: Option<String>,
    /// The backends.
    #[serde(default, deserialize_with = "list")]
    pub endpoints: Vec<SliceEndpoint>,
    /// The ports of every backend.
    #[serde(default, deserialize_with = "list")]
    pub ports: Vec<SlicePort>,
}

/// One backend.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct SliceEndpoint {
    /// Its addresses; in a slice of type FQDN, names.
    #[serde(default, deserialize_with = "list")]
    pub addresses: Vec<String>,
    /// Whether it can take connections.
    #[serde(default)]
    pub conditions: Option<SliceConditions>,
    /// The node that it runs on.
    #[serde(default, rename = "nodeName")]
    pub node_name: Option<String>,
    /// The clients that should use it, as the controller of slices proposes.
    #[serde(default)]
    pub hints: Option<EndpointHints>,
}

/// The clients that should use a backend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointHints {
    /// Those of these zones.
    #[serde(deserialize_with = "list")]
    pub for_zones: Vec<EndpointHint>,
    /// Those of these nodes.
    #[serde(deserialize_with = "list")]
    pub for_nodes: Vec<EndpointHint>,
}

/// A zone or a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct EndpointHint {
    /// Its name.
    pub name: String,
}

/// The readiness of a backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SliceConditions {
    /// Whether it accepts new connections; unknown counts as true.
    pub ready: Option<bool>,
    /// Whether it serves, also while it terminates; unknown means the same as `ready`.
    pub serving: Option<bool>,
    /// Whether it is terminating.
    pub terminating: Option<bool>,
}

/// A port of the backends of a slice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct SlicePort {
    /// The name of the corresponding port of the Service.
    #[serde(default)]
    pub name: Option<String>,
    /// TCP if absent.
    #[serde(default)]
    pub protocol: Option<String>,
    /// Its number. If it is absent, no rule can match it.
    #[serde(default)]
    pub port: Option<u16>,
}

/// Networks of the addresses that Services get (`networking.k8s.io/v1`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct ServiceCidr {
    /// The networks.
    #[serde(default)]
    pub spec: ServiceCidrSpec,
}

/// The networks of a ServiceCIDR.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ServiceCidrSpec {
    /// The networks as text, at most one of each family.
    #[serde(deserialize_with = "list")]
    pub cidrs: Vec<String>,
}

impl Service {
    /// The label that hides it from the node's proxy, whatever its value.
    pub const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

    /// Its own addresses; none if it is headless or an external name.
    #[must_use]
    pub fn cluster_ips(&self) -> Vec<IpAddr> {
        let spec = &self.spec;
        if spec.service_type.as_deref() == Some("ExternalName") {
            return Vec::new();
        }
        let one = spec.cluster_ip.iter().filter(|_| spec.cluster_ips.is_empty());
        spec.cluster_ips.iter().chain(one).filter_map(|address| address.parse().ok()).collect()
    }

    /// The external addresses that nodes accept for it. Without addresses of its own, they accept none.
    #[must_use]
    pub fn external_ips(&self) -> Vec<IpAddr> {
        if self.cluster_ips().is_empty() {
            return Vec::new();
        }
        let external = self.spec.external_ips.iter().filter_map(|address| address.parse().ok());
        external.chain(self.ingress_ips()).collect()
    }

    /// The addresses of its load balancer that nodes accept.
    pub fn ingress_ips(&self) -> impl Iterator<Item = IpAddr> {
        let by_nodes = |ingress: &&LoadBalancerIngress| ingress.ip_mode.as_deref() != Some("Proxy");
        let ingress = self.status.load_balancer.ingress.iter().filter(by_nodes);
        ingress.filter_map(|ingress| ingress.ip.as_ref()?.parse().ok())
    }
}

impl SliceEndpoint {
    /// Whether it gets new connections.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.conditions.unwrap_or_default().ready.unwrap_or(true)
    }

    /// Whether it is terminating and still serves: such backends get connections if no backend is ready.
    #[must_use]
    pub fn serves_while_it_ends(&self) -> bool {
        let conditions = self.conditions.unwrap_or_default();
        conditions.terminating == Some(true) && conditions.serving.unwrap_or(self.is_ready())
    }
}

impl EndpointSlice {
    /// The label with the name of the Service.
    pub const SERVICE: &str = "kubernetes.io/service-name";
    /// The label of slices of headless Services, whatever its value.
    pub const HEADLESS: &str = "service.kubernetes.io/headless";

    /// The Service that the slice belongs to.
    #[must_use]
    pub fn service(&self) -> Option<&str> {
        self.metadata.labels.get(Self::SERVICE).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// The addresses of the backends. Readiness does not matter, as in Calico: a failing probe does not change
    /// policy.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.endpoints
            .iter()
            .flat_map(|endpoint| &endpoint.addresses)
            .filter_map(|address| address.parse().ok())
    }

    /// Address, protocol and port of each backend that has a port.
    pub fn backends(&self) -> impl Iterator<Item = (IpAddr, Protocol, u16)> {
        self.addresses().flat_map(|address| {
            self.ports.iter().filter_map(move |port| {
                let protocol = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP"))?;
                Some((address, protocol, port.port?))
            })
        })
    }
}
