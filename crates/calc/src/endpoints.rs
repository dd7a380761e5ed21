//! From WorkloadEndpoints of this node to endpoints with programs.

use std::sync::Arc;

use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Endpoint, EndpointId};
use tortie_policy::program::{EndpointProgram, PolicyId, PolicyKind};

use crate::cluster::{Cluster, KnownEndpoint};
use crate::policies::Policies;

impl Cluster {
    /// Which endpoint the key means, and whether it is this node's now. `None` where nothing of that name is or was
    /// there, or where it is another node's while this node has the endpoint too (a pod that was made again here).
    pub(crate) fn identify(&self, key: &Key, node: &str) -> Option<(EndpointId, bool)> {
        let id = |endpoint: &KnownEndpoint| EndpointId {
            namespace: key.namespace.clone(),
            pod: endpoint.spec.pod.clone(),
            interface: endpoint.spec.endpoint.clone(),
        };
        let known = self.endpoint(key);
        if let Some(endpoint) = known.filter(|endpoint| endpoint.spec.node == node) {
            return Some((id(endpoint), true));
        }
        let id = id(known.or_else(|| self.departed(key))?);
        let name = WorkloadEndpoint::name_for(node, &id.pod, &id.interface);
        let here = self.endpoint(&Key::namespaced(Kind::WorkloadEndpoint, &id.namespace, name));
        if here.is_some_and(|endpoint| endpoint.spec.node == node) { None } else { Some((id, false)) }
    }

    /// The endpoint with its program.
    pub(crate) fn local_endpoint(&self, key: &Key, policies: &Policies) -> Option<Arc<Endpoint>> {
        let endpoint = self.endpoint(key)?;
        let (ingress, egress) = policies.tiers_of(&endpoint.labels);
        let exists = |profile: &&String| {
            let namespace = profile.strip_prefix("kns.");
            policies.has_profile(profile)
                || namespace.is_some_and(|namespace| self.namespace_exists(namespace))
        };
        // A profile that does not exist allows nothing.
        let profiles = endpoint.spec.profiles.iter().filter(exists).map(|profile| PolicyId {
            kind: PolicyKind::Profile,
            namespace: String::new(),
            name: profile.clone(),
        });
        let program = EndpointProgram { ingress, egress, profiles: profiles.collect() };
        Some(Arc::new(Endpoint {
            container_id: endpoint.spec.container_id.clone(),
            host_interface: endpoint.spec.interface_name.clone(),
            addresses: endpoint.addresses.clone(),
            mac: endpoint.spec.mac.parse().ok(),
            program,
        }))
    }
}
