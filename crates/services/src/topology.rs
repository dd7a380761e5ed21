//! The hints of endpoints: which clients should use them (`pkg/proxy/topology.go` of Kubernetes).

use crate::endpoints::Endpoint;

/// The level at which hints are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Topology {
    /// Nothing is preferred.
    None,
    /// Endpoints whose hints name the zone.
    SameZone,
    /// Endpoints whose hints name the node.
    SameNode,
}

impl Topology {
    /// The level for these endpoints, all of which are ready. One endpoint without a hint disables its level.
    pub(crate) fn of(ready: &[&Endpoint], zone: Option<&str>) -> Self {
        let all = |has: fn(&&Endpoint) -> bool| !ready.is_empty() && ready.iter().all(has);
        if all(|endpoint| endpoint.hints.has_nodes) && ready.iter().any(|endpoint| endpoint.hints.names_node)
        {
            return Self::SameNode;
        }
        let names_zone = |endpoint: &&Endpoint| zone.is_some_and(|zone| endpoint.hints.names_zone(zone));
        if all(|endpoint| !endpoint.hints.zones.is_empty()) && ready.iter().any(names_zone) {
            return Self::SameZone;
        }
        Self::None
    }

    /// True if clients of this node use the endpoint.
    pub(crate) fn uses(self, endpoint: &Endpoint, zone: Option<&str>) -> bool {
        match self {
            Self::None => true,
            Self::SameZone => zone.is_some_and(|zone| endpoint.hints.names_zone(zone)),
            Self::SameNode => endpoint.hints.names_node,
        }
    }
}
