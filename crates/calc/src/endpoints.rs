//! This node's endpoints, and their programs.

use std::sync::Arc;

use tortie_api::calico::WorkloadEndpointSpec;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Endpoint, EndpointId, MacAddress};
use tortie_policy::program::{EndpointProgram, PolicyId, PolicyKind};

use crate::policies::Policies;
use crate::slab::Numbers;
use crate::subjects::{Subjects, What};

/// What is known of an endpoint of this node, beside what selectors see.
pub(crate) struct Here {
    pub(crate) id: Arc<EndpointId>,
    /// The name of its object: of two with one id the last counts.
    pub(crate) name: String,
    container_id: String,
    host_interface: String,
    mac: Option<MacAddress>,
    /// The policies that select it.
    pub(crate) policies: Numbers,
}

impl Here {
    pub(crate) fn new(key: &Key, spec: WorkloadEndpointSpec) -> Self {
        Self {
            id: Arc::new(EndpointId {
                namespace: key.namespace.clone(),
                pod: spec.pod,
                interface: spec.endpoint,
            }),
            name: key.name.clone(),
            container_id: spec.container_id,
            host_interface: spec.interface_name,
            mac: spec.mac.parse().ok(),
            policies: Numbers::default(),
        }
    }
}

/// The endpoint with its program, if this node has it.
pub(crate) fn endpoint(id: &EndpointId, subjects: &Subjects, policies: &Policies) -> Option<Arc<Endpoint>> {
    let subject = subjects.get(subjects.endpoint_here(id)?)?;
    let (Some(here), What::Endpoint { addresses, .. }) = (&subject.here, &subject.what) else { return None };
    let (ingress, egress) = policies.tiers_of(&here.policies);
    let exists = |profile: &&str| {
        let namespace = profile.strip_prefix("kns.");
        policies.has_profile(profile)
            || namespace.is_some_and(|namespace| subjects.exists(&Key::global(Kind::Namespace, namespace)))
    };
    // A profile that does not exist allows nothing.
    let profiles = subjects.profiles(subject).filter(exists).map(|profile| PolicyId {
        kind: PolicyKind::Profile,
        namespace: String::new(),
        name: profile.to_owned(),
    });
    let mut profiles: Vec<PolicyId> = profiles.collect();
    profiles.shrink_to_fit();
    let program = EndpointProgram { ingress, egress, profiles };
    Some(Arc::new(Endpoint {
        container_id: here.container_id.clone(),
        host_interface: here.host_interface.clone(),
        addresses: addresses.to_vec(),
        mac: here.mac,
        program,
    }))
}
