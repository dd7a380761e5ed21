//! The Services of a node: what a dataplane makes real, and the changes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::net::{IpVersion, Protocol};

/// The name of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

/// One port of a Service, for one family.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortId {
    /// The Service.
    pub service: ServiceName,
    /// The name of the port; may be empty.
    pub port: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// The family of its addresses and backends.
    pub family: IpVersion,
}

/// An address and a port of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// True if it runs on this node. Only then can it reach itself through a Service.
    pub is_local: bool,
}

impl Backend {
    /// Its address and port.
    #[must_use]
    pub fn socket(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// The backends of a port of a Service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServicePort {
    /// True if a backend is usable on any node. Without any, new connections are rejected.
    pub has_endpoints: bool,
    /// The backends for [`TrafficPolicy::Cluster`]; empty if no frontend uses them.
    pub cluster: BTreeSet<Backend>,
    /// The backends of this node for [`TrafficPolicy::Local`]; empty if no frontend uses them.
    pub local: BTreeSet<Backend>,
    /// The time in seconds for which the backend of a client is remembered after its last new connection.
    pub affinity: Option<u32>,
    /// The addresses and ports of the endpoints of any node that still serve, whether they are ready or not; for UDP only. The kernel keeps a flow
    /// of UDP at its backend for as long as packets come, so flows to others must be forgotten (`pkg/proxy/conntrack` of Kubernetes).
    pub serving: BTreeSet<SocketAddr>,
}

/// The health check of a load balancer: `spec.healthCheckNodePort` of a Service with `externalTrafficPolicy: Local`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port of the node.
    pub port: u16,
    /// The number of addresses of ready endpoints on this node, for all ports of the Service together. The node is healthy for the load balancer if
    /// there are any; endpoints that end do not count, although they may still get connections.
    pub local_endpoints: usize,
}

/// Where a frontend is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrontendAddress {
    /// At an address of the Service.
    Address(IpAddr),
    /// At the addresses of the node that accept node ports of this family ([`NodeServices::node_ports`]).
    NodePort(IpVersion),
}

/// An address, a protocol and a port to which clients connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendKey {
    /// The address.
    pub address: FrontendAddress,
    /// The protocol: TCP, UDP or SCTP.
    pub protocol: Protocol,
    /// The port.
    pub port: u16,
}

/// The field that a frontend comes from, in the order in which they take precedence at one address and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrontendKind {
    /// `spec.clusterIPs`.
    ClusterIp,
    /// `status.loadBalancer.ingress`.
    LoadBalancer,
    /// `spec.externalIPs`.
    ExternalIp,
    /// `spec.ports[].nodePort`.
    NodePort,
}

/// The backends that a frontend leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TrafficPolicy {
    /// Those of the cluster.
    Cluster,
    /// Those of this node. Pods and the node itself still reach all of them by an external frontend.
    Local,
}

/// A frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frontend {
    /// The port of a Service that it leads to.
    pub service_port: Arc<ServicePortId>,
    /// Where it comes from.
    pub kind: FrontendKind,
    /// The backends that it leads to.
    pub policy: TrafficPolicy,
    /// The networks whose packets pass; all if absent. New connections from others are dropped.
    pub source_ranges: Option<Vec<IpNet>>,
}

/// The addresses of the node at which node ports of one family are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum NodePortPlace {
    /// The first address of this family that the Node has, if any.
    Primary(Option<IpAddr>),
    /// Every address of the node, except for those of the loopback network.
    #[default]
    AllLocal,
    /// The addresses of the node in these networks, except for those of the loopback network.
    LocalIn(Vec<IpNet>),
}

/// The Services of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeServices {
    /// The ports of Services with their backends.
    pub ports: BTreeMap<Arc<ServicePortId>, ServicePort>,
    /// The frontends. Each leads to one of `ports`.
    pub frontends: BTreeMap<FrontendKey, Frontend>,
    /// The clusterIPs in use. What no frontend takes there is rejected.
    pub cluster_ips: BTreeSet<IpAddr>,
    /// The networks of clusterIPs. What goes to an address in them that is not in use is dropped.
    pub service_cidrs: BTreeSet<IpNet>,
    /// Where node ports are, by family.
    pub node_ports: BTreeMap<IpVersion, NodePortPlace>,
    /// The health checks of load balancers, by Service and family.
    pub health_checks: BTreeMap<(ServiceName, IpVersion), HealthCheck>,
}

/// Backends that come and go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolChange {
    /// Those that come.
    pub added: Vec<Backend>,
    /// Those that go.
    pub removed: Vec<Backend>,
}

/// A change of [`NodeServices`]. Ports come before the frontends that lead to them, and go after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServicesDelta {
    /// A port of a Service comes or changes.
    Port {
        /// The port.
        id: Arc<ServicePortId>,
        /// The new value of [`ServicePort::has_endpoints`].
        has_endpoints: bool,
        /// The new value of [`ServicePort::affinity`].
        affinity: Option<u32>,
        /// The new value of [`ServicePort::serving`].
        serving: BTreeSet<SocketAddr>,
        /// The changes of [`ServicePort::cluster`].
        cluster: PoolChange,
        /// The changes of [`ServicePort::local`].
        local: PoolChange,
    },
    /// A port of a Service goes.
    PortRemoved(Arc<ServicePortId>),
    /// A frontend comes or changes.
    Frontend(FrontendKey, Frontend),
    /// A frontend goes.
    FrontendRemoved(FrontendKey),
    /// A clusterIP is in use.
    ClusterIp(IpAddr),
    /// A clusterIP is no longer in use.
    ClusterIpRemoved(IpAddr),
    /// The networks of clusterIPs are these.
    ServiceCidrs(BTreeSet<IpNet>),
    /// Node ports of a family are here.
    NodePorts(IpVersion, NodePortPlace),
    /// A health check of a family comes or changes.
    HealthCheck(ServiceName, IpVersion, HealthCheck),
    /// A health check of a family goes.
    HealthCheckRemoved(ServiceName, IpVersion),
}

impl NodeServices {
    /// Adds a change.
    pub fn apply(&mut self, delta: &ServicesDelta) {
        match delta {
            ServicesDelta::Port { id, has_endpoints, affinity, serving, cluster, local } => {
                let port = self.ports.entry(id.clone()).or_default();
                port.serving.clone_from(serving);
                port.has_endpoints = *has_endpoints;
                port.affinity = *affinity;
                cluster.apply(&mut port.cluster);
                local.apply(&mut port.local);
            }
            ServicesDelta::PortRemoved(id) => drop(self.ports.remove(id)),
            ServicesDelta::Frontend(key, frontend) => drop(self.frontends.insert(*key, frontend.clone())),
            ServicesDelta::FrontendRemoved(key) => drop(self.frontends.remove(key)),
            ServicesDelta::ClusterIp(address) => drop(self.cluster_ips.insert(*address)),
            ServicesDelta::ClusterIpRemoved(address) => drop(self.cluster_ips.remove(address)),
            ServicesDelta::ServiceCidrs(networks) => self.service_cidrs.clone_from(networks),
            ServicesDelta::NodePorts(family, place) => {
                self.node_ports.insert(*family, place.clone());
            }
            ServicesDelta::HealthCheck(service, family, check) => {
                self.health_checks.insert((service.clone(), *family), *check);
            }
            ServicesDelta::HealthCheckRemoved(service, family) => {
                self.health_checks.remove(&(service.clone(), *family));
            }
        }
    }
}

impl PoolChange {
    /// The change from one pool to another.
    pub(crate) fn between(before: &BTreeSet<Backend>, after: &BTreeSet<Backend>) -> Self {
        Self {
            added: after.difference(before).copied().collect(),
            removed: before.difference(after).copied().collect(),
        }
    }

    /// Backends go before others come: one that moves to this node is removed and added.
    fn apply(&self, pool: &mut BTreeSet<Backend>) {
        for backend in &self.removed {
            pool.remove(backend);
        }
        pool.extend(&self.added);
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
