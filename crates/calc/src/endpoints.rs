//! This node's endpoints, pods' and the host's own, and their programs.

use std::sync::Arc;

use tortie_api::calico::{HostEndpoint as HostEndpointObject, HostEndpointSpec, WorkloadEndpointSpec};
use tortie_api::{Key, Kind};
use tortie_dataplane::{Delta, Endpoint, EndpointId, HostEndpoint, MacAddress, NodeState};
use tortie_policy::Hook;
use tortie_policy::program::{EndOfTier, EndpointProgram, HostEndpointProgram, PolicyId};

use crate::policies::Policies;
use crate::slab::Numbers;
use crate::subjects::{Subject, Subjects, What};

/// Which endpoint of this node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum LocalId {
    Pod(Arc<EndpointId>),
    /// A host endpoint, by name.
    Host(Arc<str>),
}

/// What is known of an endpoint of this node, beside what selectors see.
pub(crate) struct Here {
    pub(crate) id: LocalId,
    /// The name of its object: of two with one id the last counts.
    pub(crate) name: String,
    kind: HereKind,
    /// The policies that select it.
    pub(crate) policies: Numbers,
}

enum HereKind {
    Pod { container_id: String, host_interface: String, mac: Option<MacAddress> },
    Host { interface: Option<String> },
}

impl Here {
    pub(crate) fn pod(key: &Key, spec: WorkloadEndpointSpec) -> Self {
        let id = EndpointId { namespace: key.namespace.clone(), pod: spec.pod, interface: spec.endpoint };
        let kind = HereKind::Pod {
            container_id: spec.container_id,
            host_interface: spec.interface_name,
            mac: spec.mac.parse().ok(),
        };
        Self { id: LocalId::Pod(Arc::new(id)), name: key.name.clone(), kind, policies: Numbers::default() }
    }

    pub(crate) fn host(key: &Key, spec: HostEndpointSpec) -> Self {
        let kind = HereKind::Host { interface: spec.interface_name };
        let id = LocalId::Host(key.name.as_str().into());
        Self { id, name: key.name.clone(), kind, policies: Numbers::default() }
    }
}

/// An endpoint as it will be given out; `None` where it is gone.
pub(crate) enum Given {
    Pod(EndpointId, Option<Arc<Endpoint>>),
    Host(String, Option<Arc<HostEndpoint>>),
}

impl Given {
    /// The endpoint of this id with its program, if this node has it.
    pub(crate) fn new(id: &LocalId, subjects: &Subjects, policies: &Policies) -> Self {
        let found = subjects.endpoint_here(id).and_then(|no| subjects.get(no));
        match id {
            LocalId::Pod(id) => Self::Pod(
                EndpointId::clone(id),
                found.and_then(|subject| endpoint(subject, subjects, policies)),
            ),
            LocalId::Host(name) => Self::Host(
                name.to_string(),
                found.and_then(|subject| host_endpoint(subject, subjects, policies)),
            ),
        }
    }

    /// Whether it is something else than what the state has.
    pub(crate) fn is_change(&self, state: &NodeState) -> bool {
        match self {
            Self::Pod(id, endpoint) => state.endpoints.get(id) != endpoint.as_ref(),
            Self::Host(name, endpoint) => state.host_endpoints.get(name) != endpoint.as_ref(),
        }
    }

    /// Every policy and profile that it names.
    pub(crate) fn policy_ids(&self) -> Vec<&PolicyId> {
        match self {
            Self::Pod(_, endpoint) => {
                endpoint.iter().flat_map(|endpoint| endpoint.program.policy_ids()).collect()
            }
            Self::Host(_, endpoint) => {
                endpoint.iter().flat_map(|endpoint| endpoint.program.policy_ids()).collect()
            }
        }
    }

    /// Every policy and profile that it names in the state.
    pub(crate) fn policy_ids_before<'a>(&self, state: &'a NodeState) -> Vec<&'a PolicyId> {
        match self {
            Self::Pod(id, _) => state
                .endpoints
                .get(id)
                .into_iter()
                .flat_map(|endpoint| endpoint.program.policy_ids())
                .collect(),
            Self::Host(name, _) => {
                let before = state.host_endpoints.get(name).into_iter();
                before.flat_map(|endpoint| endpoint.program.policy_ids()).collect()
            }
        }
    }

    pub(crate) fn into_delta(self) -> Delta {
        match self {
            Self::Pod(id, Some(endpoint)) => Delta::Endpoint(id, endpoint),
            Self::Pod(id, None) => Delta::EndpointRemoved(id),
            Self::Host(name, Some(endpoint)) => Delta::HostEndpoint(name, endpoint),
            Self::Host(name, None) => Delta::HostEndpointRemoved(name),
        }
    }
}

fn endpoint(subject: &Subject, subjects: &Subjects, policies: &Policies) -> Option<Arc<Endpoint>> {
    let (Some(here), What::Endpoint { addresses, .. }) = (&subject.here, &subject.what) else { return None };
    let HereKind::Pod { container_id, host_interface, mac } = &here.kind else { return None };
    let (ingress, egress) = policies.tiers_of(&here.policies, Hook::is_for_pods);
    Some(Arc::new(Endpoint {
        container_id: container_id.clone(),
        host_interface: host_interface.clone(),
        addresses: addresses.to_vec(),
        mac: *mac,
        program: EndpointProgram { ingress, egress, profiles: profiles(subject, subjects, policies) },
    }))
}

/// A host endpoint's tables (semantics 16).
fn host_endpoint(subject: &Subject, subjects: &Subjects, policies: &Policies) -> Option<Arc<HostEndpoint>> {
    let (Some(here), What::Endpoint { addresses, .. }) = (&subject.here, &subject.what) else { return None };
    let HereKind::Host { interface } = &here.kind else { return None };
    let table = |asked: fn(Hook) -> bool| {
        let (ingress, egress) = policies.tiers_of(&here.policies, asked);
        EndpointProgram { ingress, egress, profiles: Vec::new() }
    };
    // Before connections are tracked and addresses translated nothing is denied for want of a rule.
    let without_end = |mut table: EndpointProgram| {
        table.ingress.iter_mut().chain(&mut table.egress).for_each(|tier| tier.end = EndOfTier::Pass);
        table
    };
    let normal = table(|hook| matches!(hook, Hook::Normal | Hook::AlsoForwarded | Hook::Everywhere));
    let program = HostEndpointProgram {
        untracked: without_end(table(|hook| matches!(hook, Hook::Untracked | Hook::Everywhere))),
        pre_dnat: without_end(table(|hook| matches!(hook, Hook::PreDnat | Hook::Everywhere))),
        forward: table(|hook| matches!(hook, Hook::AlsoForwarded | Hook::Everywhere)),
        normal: EndpointProgram { profiles: profiles(subject, subjects, policies), ..normal },
    };
    Some(Arc::new(HostEndpoint { interface: interface.clone(), addresses: addresses.to_vec(), program }))
}

/// The profiles that exist; one that does not allows nothing.
fn profiles(subject: &Subject, subjects: &Subjects, policies: &Policies) -> Vec<PolicyId> {
    let exists = |profile: &&Arc<str>| {
        let namespace = profile.strip_prefix("kns.");
        policies.has_profile(profile)
            || ***profile == *HostEndpointObject::DEFAULT_ALLOW
            || namespace.is_some_and(|namespace| subjects.exists(&Key::global(Kind::Namespace, namespace)))
    };
    let existing =
        subjects.profiles(subject).filter(exists).map(|profile| PolicyId::profile(profile.clone()));
    let mut profiles: Vec<PolicyId> = existing.collect();
    profiles.shrink_to_fit();
    profiles
}
