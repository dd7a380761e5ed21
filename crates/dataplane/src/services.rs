//! The cluster's Services, as far as a dataplane needs them.

use std::fmt;
use std::net::Ipv4Addr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tortie_api::net::Protocol;

/// The identity of a Service. Clones share the names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ServiceId {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A Service with addresses of its own, and its backends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// Its own addresses, sorted.
    pub cluster_ips: Vec<Ipv4Addr>,
    /// The external addresses that nodes also accept for it, sorted.
    pub external_ips: Vec<Ipv4Addr>,
    /// Its ports, in their order.
    pub ports: Vec<ServicePort>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServicePort {
    /// Its protocol.
    pub protocol: Protocol,
    /// The port at the Service's addresses.
    pub port: u16,
    /// Address and port of the backends for connections, sorted.
    pub backends: Vec<(Ipv4Addr, u16)>,
}

impl Service {
    /// All its addresses; may contain duplicates.
    pub fn addresses(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.cluster_ips.iter().chain(&self.external_ips).copied()
    }
}
