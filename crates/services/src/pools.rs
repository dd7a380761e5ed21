//! The choice of the backends of a port of a Service (`CategorizeEndpoints` in `pkg/proxy/topology.go` of Kubernetes).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use crate::endpoints::Endpoint;
use crate::state::{Backend, ServicePort};
use crate::topology::Topology;

/// The pools that frontends of a port use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UsedPools {
    pub(crate) cluster: bool,
    pub(crate) local: bool,
}

/// The pools of a port. The fallback to endpoints that end is decided for each pool.
pub(crate) fn choose(
    endpoints: &BTreeMap<(IpAddr, u16), &Endpoint>,
    zone: Option<&str>,
    used: UsedPools,
    affinity: Option<u32>,
) -> ServicePort {
    let mut port = ServicePort { affinity, ..ServicePort::default() };
    port.has_endpoints =
        endpoints.values().any(|endpoint| endpoint.is_ready || endpoint.serves_while_it_ends());
    if used.cluster {
        let ready: Vec<&Endpoint> =
            endpoints.values().filter(|endpoint| endpoint.is_ready).copied().collect();
        let topology = Topology::of(&ready, zone);
        port.cluster = those(endpoints, |endpoint| endpoint.is_ready && topology.uses(endpoint, zone));
        if port.cluster.is_empty() {
            port.cluster = those(endpoints, Endpoint::serves_while_it_ends);
        }
    }
    if used.local {
        port.local = those(endpoints, |endpoint| endpoint.is_ready && endpoint.is_local);
        if port.local.is_empty() {
            port.local = those(endpoints, |endpoint| endpoint.serves_while_it_ends() && endpoint.is_local);
        }
    }
    port
}

/// The endpoints that still serve. Readiness, hints and traffic policies say nothing about existing flows.
pub(crate) fn serving<'a>(
    endpoints: &'a BTreeMap<(IpAddr, u16), &Endpoint>,
) -> impl Iterator<Item = SocketAddr> + use<'a> {
    let serving = endpoints.iter().filter(|(_, endpoint)| endpoint.is_serving);
    serving.map(|((address, port), _)| SocketAddr::new(*address, *port))
}

/// The addresses of ready endpoints on this node.
pub(crate) fn local_ready<'a>(
    endpoints: &'a BTreeMap<(IpAddr, u16), &Endpoint>,
) -> impl Iterator<Item = IpAddr> + use<'a> {
    let local = endpoints.iter().filter(|(_, endpoint)| endpoint.is_ready && endpoint.is_local);
    local.map(|((address, _), _)| *address)
}

fn those(
    endpoints: &BTreeMap<(IpAddr, u16), &Endpoint>,
    is_chosen: impl Fn(&Endpoint) -> bool,
) -> BTreeSet<Backend> {
    let chosen = endpoints.iter().filter(|(_, endpoint)| is_chosen(endpoint));
    chosen.map(|((_, port), endpoint)| endpoint.backend(*port)).collect()
}
