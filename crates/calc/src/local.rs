//! The endpoints of this node: their ids, and their properties besides those that selectors see.

use std::net::IpAddr;
use std::sync::Arc;

use tortie_api::calico::{HostEndpointSpec, WorkloadEndpointPort, WorkloadEndpointSpec};
use tortie_api::net::Protocol;
use tortie_dataplane::{EndpointId, HostPort, MacAddress};

use crate::keys::SharedKey;
use crate::slab::Numbers;

/// The id of an endpoint of this node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum LocalId {
    Pod(Arc<EndpointId>),
    /// A host endpoint, by name.
    Host(Arc<str>),
}

/// The properties of an endpoint of this node, besides those that selectors see.
pub(crate) struct LocalEndpoint {
    pub(crate) id: LocalId,
    /// Whether no other endpoint has ever had the same id.
    pub(crate) is_alone: bool,
    pub(crate) kind: LocalEndpointKind,
    /// The policies that select it.
    pub(crate) policies: Numbers,
}

#[derive(PartialEq)]
pub(crate) enum LocalEndpointKind {
    Pod {
        container_id: Arc<str>,
        host_interface: Arc<str>,
        mac: Option<MacAddress>,
        host_ports: Arc<[HostPort]>,
    },
    Host {
        interface: Option<String>,
    },
}

impl LocalEndpoint {
    pub(crate) fn pod(key: &SharedKey, spec: WorkloadEndpointSpec) -> Self {
        let id = EndpointId {
            namespace: key.namespace.clone(),
            pod: spec.pod.into(),
            interface: spec.endpoint.into(),
        };
        let kind = LocalEndpointKind::Pod {
            container_id: spec.container_id.into(),
            host_interface: spec.interface_name.into(),
            mac: spec.mac.parse().ok(),
            host_ports: spec.ports.iter().filter_map(host_port).collect(),
        };
        Self::new(LocalId::Pod(Arc::new(id)), kind)
    }

    pub(crate) fn host(key: &SharedKey, spec: HostEndpointSpec) -> Self {
        let kind = LocalEndpointKind::Host { interface: spec.interface_name };
        Self::new(LocalId::Host(key.name.clone()), kind)
    }

    fn new(id: LocalId, kind: LocalEndpointKind) -> Self {
        Self { id, is_alone: true, kind, policies: Numbers::default() }
    }
}

/// The port of the node that leads to this port of a pod. An address that is none can never be the node's, so such a
/// port has no effect; the API server rejects it.
fn host_port(port: &WorkloadEndpointPort) -> Option<HostPort> {
    let address = match port.host_ip.as_deref().map(str::parse::<IpAddr>) {
        Some(Ok(address)) => Some(address).filter(|address| !address.is_unspecified()),
        Some(Err(_)) => return None,
        None => None,
    };
    let protocol = Protocol::from_name(&port.port.protocol)?;
    Some(HostPort { protocol, address, port: port.host_port?, pod_port: port.port.port })
}

#[cfg(test)]
mod tests {
    use tortie_api::calico::EndpointPort;

    use super::*;

    #[test]
    fn ports_of_the_node_have_an_address_or_stand_for_all() {
        let port = |host_port, host_ip: Option<&str>| WorkloadEndpointPort {
            port: EndpointPort { name: String::new(), protocol: "UDP".to_owned(), port: 53 },
            host_port,
            host_ip: host_ip.map(str::to_owned),
        };
        let found = |address| Some(HostPort { protocol: Protocol::UDP, address, port: 5353, pod_port: 53 });
        for (written, expected) in [
            (port(None, None), None),
            (port(Some(5353), None), found(None)),
            (port(Some(5353), Some("0.0.0.0")), found(None)),
            (port(Some(5353), Some("::")), found(None)),
            (port(Some(5353), Some("192.0.2.1")), found(Some([192, 0, 2, 1].into()))),
            (port(Some(5353), Some("localhost")), None),
        ] {
            assert_eq!(host_port(&written), expected, "{written:?}");
        }
    }
}
