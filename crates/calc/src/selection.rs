//! The links between subjects, policies and sets, updated incrementally.

use tortie_api::calico::{HostEndpointSpec, WorkloadEndpointSpec};
use tortie_api::{Key, Kind};
use tortie_policy::program::PolicyId;
use tortie_policy::{Compiled, OwnLabels, policy_id};

use crate::Calc;
use crate::keys::KeyRef;
use crate::policies::{Body, Policy, TierSettings};
use crate::slab::No;
use crate::subjects::Subject;

impl Calc {
    pub(crate) fn update_policy(&mut self, key: &Key, policy: Option<Compiled>) {
        let Some(id) = policy.as_ref().map(|policy| policy.id.clone()).or_else(|| policy_id(key)) else {
            return;
        };
        let new = self.policies.take_note(&id, policy);
        if new.as_ref().is_some_and(|new| self.policies.keeps_head(new)) {
            let (changed, heavier) = new.map(|new| self.policies.replace_body(new)).unwrap_or_default();
            if changed {
                self.mark_policy(&id);
            }
            self.dirty_endpoints.extend(heavier);
            return;
        }
        self.forget_policy(&id);
        if let Some(new) = new {
            self.add_policy(new);
        }
        self.mark_policy(&id);
    }

    /// Removes a policy, and its links to the endpoints that it selects.
    fn forget_policy(&mut self, id: &PolicyId) {
        let Some((no, endpoints)) = self.policies.remove(id) else { return };
        for endpoint in endpoints.iter() {
            let subject = self.subjects.get_mut(endpoint);
            if let Some(local) = subject.and_then(|subject| subject.local.as_mut()) {
                local.policies.remove(no);
                self.dirty_endpoints.insert(endpoint);
            }
        }
    }

    /// Adds a policy, and links it to the endpoints that it selects.
    fn add_policy(&mut self, policy: Policy) {
        let head = policy.head.clone();
        let demands = head.selector.restrictions();
        let no = self.policies.insert(policy, &demands);
        for endpoint in self.subjects.local_candidates(&demands) {
            let Some(subject) = self.subjects.get_mut(endpoint) else { continue };
            let Some(local) = subject.local.as_mut().filter(|_| head.is_about(&subject.labels)) else {
                continue;
            };
            local.policies.insert(no);
            self.policies.link(no, endpoint);
            self.dirty_endpoints.insert(endpoint);
        }
    }

    pub(crate) fn update_tier(&mut self, name: &str, tier: Option<TierSettings>) {
        for endpoint in self.policies.update_tier(name, tier).iter() {
            self.mark(endpoint);
        }
    }

    pub(crate) fn update_profile(&mut self, key: &Key, profile: Option<(OwnLabels, Body)>) {
        let (labels, body) = profile.unzip();
        if self.policies.update_profile(&key.name, body) {
            self.mark_policy(&PolicyId::profile(key.name.as_str()));
        }
        self.update_labels(key, labels);
    }

    /// Ingests the labels of a namespace, service account or profile.
    pub(crate) fn update_labels(&mut self, key: &Key, labels: Option<OwnLabels>) {
        let known = self.subjects.exists(key.into());
        if known != labels.is_some() {
            // A namespace implies a profile, which a stored one replaces; so does a service account.
            let profile = match key.kind {
                Kind::Namespace => Some(format!("kns.{}", key.name)),
                Kind::ServiceAccount => Some(format!("ksa.{}.{}", key.namespace, key.name)),
                _ => None,
            };
            if let Some(profile) = profile {
                self.mark_members(KeyRef::global(Kind::Profile, &profile));
            }
        }
        if !self.subjects.set_labels(key, labels) {
            return;
        }
        for subject in self.subjects.members(key.into()) {
            self.leave(subject);
            self.subjects.inherit(subject);
            self.enter(subject);
        }
    }

    pub(crate) fn update_endpoint(&mut self, key: &Key, endpoint: Option<(OwnLabels, WorkloadEndpointSpec)>) {
        let subject = endpoint.map(|(own, mut spec)| {
            if self.network.policy_only {
                // The other plugin leads them to the pod.
                spec.ports.iter_mut().for_each(|port| port.host_port = None);
            }
            self.subjects.endpoint(key, own, spec, &self.node)
        });
        self.update_subject(key, subject);
    }

    pub(crate) fn update_host(&mut self, key: &Key, host: Option<(OwnLabels, HostEndpointSpec)>) {
        let given = host.iter().flat_map(|(_, spec)| spec.expected_ips.iter().copied());
        self.subjects
            .addresses_of(key)
            .into_iter()
            .chain(given)
            .for_each(|address| self.claims.mark(address));
        let subject = host.map(|(own, spec)| self.subjects.host(key, own, spec, &self.node));
        self.update_subject(key, subject);
    }

    pub(crate) fn update_network_set(&mut self, key: &Key, set: Option<(OwnLabels, Box<[ipnet::IpNet]>)>) {
        let subject = set.map(|(own, nets)| self.subjects.network_set(key, own, nets));
        self.update_subject(key, subject);
    }

    /// Ingests a subject. Nothing happens if it is as it was, so that listing a kind again costs little.
    fn update_subject(&mut self, key: &Key, subject: Option<Subject>) {
        let no = match (self.subjects.number(key), subject) {
            (None, None) => return,
            (None, Some(subject)) => self.subjects.insert(subject),
            (Some(no), None) => {
                self.leave(no);
                self.gone_endpoints.extend(self.subjects.remove(key));
                return;
            }
            (Some(no), Some(subject)) => {
                if self.subjects.get(no).is_some_and(|known| known.is_as(&subject)) {
                    return;
                }
                self.leave(no);
                self.gone_endpoints.extend(self.subjects.replace(no, subject));
                no
            }
        };
        self.enter(no);
    }

    /// Links a subject to the policies and sets that select it.
    fn enter(&mut self, no: No) {
        let Some(subject) = self.subjects.get_mut(no) else { return };
        self.sets.enter(subject, &self.state);
        let Some(local) = &mut subject.local else { return };
        local.policies = self.policies.selecting(&subject.labels);
        local.policies.iter().for_each(|policy| self.policies.link(policy, no));
        self.dirty_endpoints.insert(no);
    }

    /// Removes a subject's links to policies and sets.
    fn leave(&mut self, no: No) {
        let Some(subject) = self.subjects.get_mut(no) else { return };
        self.sets.leave(subject);
        let Some(local) = &mut subject.local else { return };
        std::mem::take(&mut local.policies).iter().for_each(|policy| self.policies.unlink(policy, no));
    }

    /// Marks the rules of a policy or profile as possibly changed, if it is in use.
    fn mark_policy(&mut self, id: &PolicyId) {
        if self.in_use.contains(id) {
            self.dirty_policies.push(id.clone());
        }
    }

    fn mark_members(&mut self, group: KeyRef<'_>) {
        self.subjects.members(group).into_iter().for_each(|no| self.mark(no));
    }

    /// Marks the program of an endpoint as possibly changed, if it is on this node.
    fn mark(&mut self, no: No) {
        if self.subjects.get(no).is_some_and(|subject| subject.local.is_some()) {
            self.dirty_endpoints.insert(no);
        }
    }
}
