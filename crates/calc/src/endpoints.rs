//! This node's endpoints, of pods and of the host, and their programs.

use std::sync::Arc;

use tortie_api::Kind;
use tortie_api::calico::HostEndpoint as HostEndpointObject;
use tortie_dataplane::{Delta, Endpoint, EndpointId, HostEndpoint, NodeState};
use tortie_policy::Hook;
use tortie_policy::program::{EndOfTier, EndpointProgram, HostEndpointProgram, PolicyId};

use crate::keys::{KeyRef, Map};
use crate::local::{LocalEndpointKind, LocalId};
use crate::policies::Policies;
use crate::slab::{No, Numbers};
use crate::subjects::{Subject, Subjects};

/// The new value of an endpoint for the state; `None` if it is deleted.
pub(crate) enum Given {
    Pod(EndpointId, Option<Arc<Endpoint>>),
    Host(String, Option<Arc<HostEndpoint>>),
}

impl Given {
    /// The endpoint of this id with its program, if this node has it; `known` is its number, if known.
    pub(crate) fn new(id: &LocalId, known: Option<No>, programs: &mut Programs<'_>) -> Self {
        let subjects = programs.subjects;
        let found = known.or_else(|| subjects.local_endpoint(id)).and_then(|no| subjects.get(no));
        match id {
            LocalId::Pod(id) => {
                Self::Pod(EndpointId::clone(id), found.and_then(|subject| programs.endpoint(subject)))
            }
            LocalId::Host(name) => {
                Self::Host(name.to_string(), found.and_then(|subject| programs.host_endpoint(subject)))
            }
        }
    }

    /// Whether it differs from the state.
    pub(crate) fn is_change(&self, state: &NodeState) -> bool {
        match self {
            Self::Pod(id, endpoint) => state.endpoints.get(id) != endpoint.as_ref(),
            Self::Host(name, endpoint) => state.host_endpoints.get(name) != endpoint.as_ref(),
        }
    }

    /// Its programs.
    pub(crate) fn programs(&self) -> impl Iterator<Item = &EndpointProgram> {
        match self {
            Self::Pod(_, endpoint) => programs(endpoint.as_deref(), None),
            Self::Host(_, endpoint) => programs(None, endpoint.as_deref()),
        }
    }

    /// Its programs in the state.
    pub(crate) fn programs_before<'a>(
        &self,
        state: &'a NodeState,
    ) -> impl Iterator<Item = &'a EndpointProgram> {
        match self {
            Self::Pod(id, _) => programs(state.endpoints.get(id).map(Arc::as_ref), None),
            Self::Host(name, _) => programs(None, state.host_endpoints.get(name).map(Arc::as_ref)),
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

fn programs<'a>(
    pod: Option<&'a Endpoint>,
    host: Option<&'a HostEndpoint>,
) -> impl Iterator<Item = &'a EndpointProgram> {
    let host = host.map(|endpoint| endpoint.program.tables()).into_iter().flatten();
    pod.map(|endpoint| &*endpoint.program).into_iter().chain(host)
}

/// Creates programs. Pods with the same policies and profiles share one program.
pub(crate) struct Programs<'a> {
    subjects: &'a Subjects,
    policies: &'a Policies,
    /// The programs of pods, by the policies that select them and their groups.
    made: Map<(&'a Numbers, &'a [No]), Arc<EndpointProgram>>,
}

impl<'a> Programs<'a> {
    pub(crate) fn new(subjects: &'a Subjects, policies: &'a Policies) -> Self {
        Self { subjects, policies, made: Map::default() }
    }

    fn endpoint(&mut self, subject: &'a Subject) -> Option<Arc<Endpoint>> {
        let (local, addresses) = subject.local_endpoint()?;
        let LocalEndpointKind::Pod { container_id, host_interface, mac, host_ports } = &local.kind else {
            return None;
        };
        let Self { subjects, policies, made } = self;
        let kind = (&local.policies, subject.groups());
        let program = made.entry(kind).or_insert_with(|| {
            let (ingress, egress) = policies.tiers_of(&local.policies, Hook::is_for_pods);
            Arc::new(EndpointProgram { ingress, egress, profiles: profiles(subject, subjects, policies) })
        });
        Some(Arc::new(Endpoint {
            container_id: container_id.clone(),
            host_interface: host_interface.clone(),
            addresses: addresses.to_vec(),
            mac: *mac,
            host_ports: host_ports.clone(),
            program: program.clone(),
        }))
    }

    /// A host endpoint's tables (policy decision 16).
    fn host_endpoint(&self, subject: &Subject) -> Option<Arc<HostEndpoint>> {
        let (local, addresses) = subject.local_endpoint()?;
        let LocalEndpointKind::Host { interface } = &local.kind else { return None };
        let table = |is_in_table: fn(Hook) -> bool| {
            let (ingress, egress) = self.policies.tiers_of(&local.policies, is_in_table);
            EndpointProgram { ingress, egress, profiles: Vec::new() }
        };
        // Before connection tracking and address translation, nothing is denied because no rule matches.
        let without_end = |mut table: EndpointProgram| {
            table.ingress.iter_mut().chain(&mut table.egress).for_each(|tier| tier.end = EndOfTier::Pass);
            table
        };
        let normal = table(|hook| matches!(hook, Hook::Normal | Hook::AlsoForwarded | Hook::Everywhere));
        let program = HostEndpointProgram {
            untracked: match interface.as_deref() {
                // As in Calico, doNotTrack policies do not apply to a host endpoint of all interfaces.
                Some(HostEndpointObject::ALL_INTERFACES) => EndpointProgram::default(),
                _ => without_end(table(|hook| matches!(hook, Hook::Untracked | Hook::Everywhere))),
            },
            pre_dnat: without_end(table(|hook| matches!(hook, Hook::PreDnat | Hook::Everywhere))),
            forward: table(|hook| matches!(hook, Hook::AlsoForwarded | Hook::Everywhere)),
            normal: EndpointProgram { profiles: profiles(subject, self.subjects, self.policies), ..normal },
        };
        Some(Arc::new(HostEndpoint { interface: interface.clone(), addresses: addresses.to_vec(), program }))
    }
}

/// The profiles that have rules, up to the first that does not exist: that one denies.
fn profiles(subject: &Subject, subjects: &Subjects, policies: &Policies) -> Vec<PolicyId> {
    let has_rules = |profile: &str| {
        let namespace = profile.strip_prefix("kns.");
        policies.has_profile(profile)
            || profile == HostEndpointObject::DEFAULT_ALLOW
            || namespace.is_some_and(|namespace| subjects.exists(KeyRef::global(Kind::Namespace, namespace)))
    };
    // A service account has a profile without rules.
    let is_empty = |profile: &str| {
        let account = profile.strip_prefix("ksa.").and_then(|account| account.split_once('.'));
        account.is_some_and(|(namespace, name)| {
            subjects.exists(KeyRef { kind: Kind::ServiceAccount, namespace, name })
        })
    };
    let mut profiles = Vec::new();
    for profile in subjects.profiles(subject) {
        if has_rules(profile) {
            profiles.push(PolicyId::profile(profile.clone()));
        } else if !is_empty(profile) {
            break;
        }
    }
    profiles.shrink_to_fit();
    profiles
}
