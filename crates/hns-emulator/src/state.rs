//! The objects that the emulated HNS keeps.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tortie_hcn::schema::{Endpoint, GuestNetworkService, HostComputeRoute, LoadBalancer, Namespace, Network};
use tortie_hcn::{Failure, Guid, HResult};

use crate::acl::AccessControl;
use crate::check::fail;
use crate::config::Config;
use crate::policies;
use crate::sets::Sets;

/// The states of an endpoint (hcsshim `internal/hns/hnsendpoint.go`).
pub(crate) const CREATED: u16 = 1;
pub(crate) const ATTACHED_SHARING: u16 = 3;
pub(crate) const DETACHED: u16 = 4;
/// The compartment of the node itself (`HostAttach` of hcsshim's `internal/hns/hnsendpoint.go`).
pub(crate) const NODE_COMPARTMENT: u32 = 1;

/// All objects. They live as long as the process, as the objects of HNS outlive its clients. A clone shares what has
/// not changed.
#[derive(Default, Clone)]
pub(crate) struct State {
    pub(crate) networks: BTreeMap<Guid, Arc<Network>>,
    pub(crate) endpoints: BTreeMap<Guid, Arc<Endpoint>>,
    pub(crate) namespaces: BTreeMap<Guid, Arc<Namespace>>,
    pub(crate) load_balancers: BTreeMap<Guid, Arc<LoadBalancer>>,
    pub(crate) routes: BTreeMap<Guid, Arc<HostComputeRoute>>,
    pub(crate) guest_network_services: BTreeMap<Guid, Arc<GuestNetworkService>>,
    /// The Linux network namespaces that represent compartments, by HCN namespace.
    pub(crate) compartments: BTreeMap<Guid, PathBuf>,
    /// The sets of each network.
    pub(crate) sets: BTreeMap<Guid, Arc<Sets>>,
    /// The ACLs of each endpoint.
    pub(crate) guards: BTreeMap<Guid, Guard>,
    /// The plans for the switch, derived from the objects.
    #[cfg(target_os = "linux")]
    pub(crate) plans: BTreeMap<Guid, Arc<crate::fabric::Plan>>,
}

/// The parsed ACLs of an endpoint.
#[derive(Clone)]
pub(crate) struct Guard {
    pub(crate) control: Arc<AccessControl>,
    /// How often writing ACLs has reset the endpoint's flows.
    pub(crate) resets: u64,
}

impl State {
    /// The ACLs of an existing endpoint.
    pub(crate) fn guard(&self, id: Guid) -> Result<&Guard, Failure> {
        self.guards.get(&id).ok_or_else(|| absent(HResult::HCN_E_ENDPOINT_NOT_FOUND, "endpoint", id))
    }

    /// Checks the policies of an endpoint, and returns its parsed ACLs.
    pub(crate) fn control(&self, endpoint: &Endpoint, config: &Config) -> Result<AccessControl, Failure> {
        let none = Arc::default();
        let sets = self.sets.get(&endpoint.host_compute_network).unwrap_or(&none);
        policies::endpoint_policies(endpoint, sets, config)
    }

    pub(crate) fn network(&self, id: Guid) -> Result<&Network, Failure> {
        self.networks
            .get(&id)
            .map(Arc::as_ref)
            .ok_or_else(|| absent(HResult::HCN_E_NETWORK_NOT_FOUND, "network", id))
    }

    pub(crate) fn network_mut(&mut self, id: Guid) -> Result<&mut Network, Failure> {
        self.networks
            .get_mut(&id)
            .map(Arc::make_mut)
            .ok_or_else(|| absent(HResult::HCN_E_NETWORK_NOT_FOUND, "network", id))
    }

    pub(crate) fn endpoint(&self, id: Guid) -> Result<&Endpoint, Failure> {
        self.endpoints
            .get(&id)
            .map(Arc::as_ref)
            .ok_or_else(|| absent(HResult::HCN_E_ENDPOINT_NOT_FOUND, "endpoint", id))
    }

    pub(crate) fn endpoint_mut(&mut self, id: Guid) -> Result<&mut Endpoint, Failure> {
        self.endpoints
            .get_mut(&id)
            .map(Arc::make_mut)
            .ok_or_else(|| absent(HResult::HCN_E_ENDPOINT_NOT_FOUND, "endpoint", id))
    }

    /// A missing namespace gives the plain Windows code, not one of HCN's (docs/hns.md, Calls).
    pub(crate) fn namespace(&self, id: Guid) -> Result<&Namespace, Failure> {
        self.namespaces
            .get(&id)
            .map(Arc::as_ref)
            .ok_or_else(|| absent(HResult::ERROR_NOT_FOUND, "namespace", id))
    }

    pub(crate) fn namespace_mut(&mut self, id: Guid) -> Result<&mut Namespace, Failure> {
        self.namespaces
            .get_mut(&id)
            .map(Arc::make_mut)
            .ok_or_else(|| absent(HResult::ERROR_NOT_FOUND, "namespace", id))
    }

    /// The endpoints of a network.
    pub(crate) fn endpoints_of(&self, network: Guid) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.endpoints.values().filter(move |endpoint| endpoint.host_compute_network == network)
    }

    /// Whether the endpoint is in the node's own compartment.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_of_node(&self, endpoint: &Endpoint) -> bool {
        let namespace = self.namespaces.get(&endpoint.host_compute_namespace);
        namespace.is_some_and(|namespace| namespace.namespace_id == NODE_COMPARTMENT)
    }

    /// Chooses the identifier of a new object: the client's, unless it is zero or in use.
    pub(crate) fn new_id(&self, wanted: Guid, in_document: Guid) -> Result<Guid, Failure> {
        let wanted = if wanted.is_zero() { in_document } else { wanted };
        if wanted.is_zero() {
            return Ok(Guid::random());
        }
        let taken = self.networks.contains_key(&wanted)
            || self.endpoints.contains_key(&wanted)
            || self.namespaces.contains_key(&wanted)
            || self.load_balancers.contains_key(&wanted)
            || self.routes.contains_key(&wanted)
            || self.guest_network_services.contains_key(&wanted);
        if taken { fail(HResult::ERROR_ALREADY_EXISTS, format!("{wanted} exists")) } else { Ok(wanted) }
    }
}

pub(crate) fn absent(code: HResult, kind: &str, id: Guid) -> Failure {
    Failure::new(code, format!("{kind} {id} does not exist"))
}
