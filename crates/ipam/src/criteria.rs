//! What decides which pools a request may use.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tortie_api::calico::IpPool;

use crate::request::{Request, Use};

/// The networks of pools, each with the prefix length of its blocks.
pub(crate) type Pools = Vec<(IpNet, u8)>;

/// What decides which pools a request may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Criteria {
    pub(crate) intended_use: Use,
    /// `None` if the pod's namespace is unknown.
    pub(crate) namespace_labels: Option<BTreeMap<String, String>>,
    /// The names or networks of the pools to use, whatever their selectors say.
    pub(crate) chosen: Vec<String>,
}

impl Criteria {
    pub(crate) fn of(request: &Request) -> Self {
        Self {
            intended_use: request.intended_use,
            namespace_labels: Some(request.namespace_labels.clone()),
            chosen: request.pools.clone(),
        }
    }

    /// Those of pods that do not exist yet.
    pub(crate) fn of_future_pods() -> Self {
        Self { intended_use: Use::Workload, namespace_labels: None, chosen: Vec::new() }
    }

    /// Whether the request has these criteria.
    pub(crate) fn are_of(&self, request: &Request) -> bool {
        self.intended_use == request.intended_use
            && self.namespace_labels.as_ref() == Some(&request.namespace_labels)
            && self.chosen == request.pools
    }

    pub(crate) fn allow_use_of(&self, pool: &IpPool) -> bool {
        let is_allowed = pool.spec.allowed_uses.iter().any(|each| each == self.intended_use.name());
        is_allowed && (self.intended_use != Use::IpipTunnel || pool.has_ipip())
    }
}

impl Use {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Use::Workload => "Workload",
            Use::Tunnel | Use::IpipTunnel => "Tunnel",
            Use::LoadBalancer => "LoadBalancer",
        }
    }
}
