//! The endpoints of this node: their ids, and their properties besides those that selectors see.

use std::sync::Arc;

use tortie_api::calico::{HostEndpointSpec, WorkloadEndpointSpec};
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
            host_ports: spec.ports.iter().filter_map(HostPort::of).collect(),
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
