//! The policy of a node's pods: ACLs on their endpoints, and the sets that ACLs name. Ports of the node that lead to an endpoint
//! follow its ACLs.
//!
//! If both change, packets must never meet what neither the old state nor the new one has: an old ACL with new
//! members, or the other way round. So changes happen in this order:
//!
//! 1. New sets are created. Nothing names them yet.
//! 2. Each endpoint with a changed list gets its new list. If it names a set whose members change, the new list
//!    contains the new members instead of the set's name.
//! 3. The sets get their new members.
//! 4. The listed members are replaced by the set's name, which means the same now.
//! 5. Sets that nothing names any more are removed.
//!
//! If an endpoint's list could not be changed, the sets that it may name stay unchanged; all other lists contain
//! addresses instead of those sets, before step 3.

mod reconciliation;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use tortie_dataplane::{Condition, Endpoint, EndpointId, NodeState};
use tortie_hcn::schema::{self, Acl};
use tortie_hcn::{Guid, Hcn};

use crate::acl::{Frontends, Judged, List, Services, Set};
use crate::backoff::Backoff;
use crate::endpoint::{RejectedList, find};
use crate::outbound::{Networks, RejectedForwarding};
use crate::policy_sets::PolicySets;
use crate::recognition::Recognition;
use crate::{Error, NETWORK};
use reconciliation::Reconciliation;

/// The node, during a reconciliation.
pub(crate) struct Node<'a> {
    pub(crate) hcn: &'a dyn Hcn,
    pub(crate) state: &'a NodeState,
    /// The network of the pods, if HNS supports sets, and whether ACLs should name them.
    pub(crate) sets: Option<(Guid, bool)>,
    /// The node's own addresses towards its pods.
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// Whether pods may have IPv6.
    pub(crate) has_ipv6: bool,
    /// The node's own address on the underlay.
    pub(crate) underlay: Option<Ipv4Addr>,
    /// The cluster's networks.
    pub(crate) networks: Networks,
    /// The operator's ACLs before policy.
    pub(crate) static_rules: &'a [Acl],
    /// How endpoints are found, if another CNI plugin connects the pods.
    pub(crate) recognition: Option<&'a Recognition<'a>>,
    pub(crate) now: Instant,
}

impl Node<'_> {
    /// The HNS endpoint of a pod.
    fn find(&self, id: &EndpointId, endpoint: &Endpoint) -> Result<schema::Endpoint, Error> {
        match self.recognition {
            Some(recognition) => recognition.find(id, &endpoint.addresses),
            None => {
                let container_id = endpoint.container_id.to_string();
                find(self.hcn, &container_id, NETWORK)?.ok_or(Error::NoEndpoint { container_id })
            }
        }
    }
}

/// The state of endpoints and sets, and the endpoints to reconcile.
#[derive(Default)]
pub(crate) struct AclReconciler {
    /// The endpoints whose lists may have to change.
    due: BTreeSet<EndpointId>,
    /// Endpoints that failed.
    backoff: Backoff<EndpointId>,
    known: BTreeMap<EndpointId, Known>,
    /// Whether HNS has listed a ProviderAddress policy of an endpoint.
    lists_provider: bool,
    /// The sets that lists name.
    wanted: BTreeMap<String, Set>,
    /// The sets of a network in HNS, if known.
    actual: Option<(Guid, PolicySets)>,
    /// Whether to look for unused sets.
    sweep: bool,
    /// Sets that cannot be named for now, why, and until when.
    unusable: BTreeMap<String, (Condition, Instant)>,
    /// The cluster's Services; `None` if they may have changed.
    frontends: Option<Frontends>,
}

/// The state of an endpoint.
#[derive(Default)]
struct Known {
    /// Whether it must be read from HNS, even if its list does not change.
    look: bool,
    conditions: Vec<Condition>,
    /// The conditions about the endpoint when last read: ACLs of others.
    found: Vec<Condition>,
    /// The conditions about its ports of the node.
    host_ports: Vec<Condition>,
    /// The conditions about how its packets leave.
    outbound: Vec<Condition>,
    /// When the endpoint of another plugin's pod has vanished.
    vanished: Option<Instant>,
    /// The last rejected attempt.
    last_rejected: Option<RejectedList>,
    /// The same of how packets leave.
    rejected_ways: Option<RejectedForwarding>,
    /// Its list.
    in_force: Option<List>,
    /// The sets that its ACLs may name, even after a failure; `None` if that could be any set.
    named: Option<BTreeSet<String>>,
    /// The rows that Services added to its list.
    judged: Option<Arc<Judged>>,
}

impl AclReconciler {
    /// Reconciles everything that is due. Returns the error if HNS does not answer.
    pub(crate) fn reconcile(&mut self, node: &Node<'_>) -> Result<(), Error> {
        let known = self.frontends.take();
        let changed = known.is_none();
        let frontends = known.unwrap_or_else(|| Frontends::new(node.state));
        let services = Services::new(&frontends, node.state);
        if changed {
            self.judge_again(&services);
        }
        self.due.extend(self.backoff.due(node.now));
        let at_work = self.due.clone();
        let result = Reconciliation::new(self, node, &services).run();
        match result {
            Ok(()) => self.due.retain(|id| !at_work.contains(id)),
            // Everything stays due: repeating what was done does no harm.
            Err(_) => self.actual = None,
        }
        self.frontends = Some(frontends);
        result
    }

    /// Finds the endpoints for whose lists the Services give other rows than before.
    fn judge_again(&mut self, services: &Services<'_, NodeState>) {
        for (id, known) in &mut self.known {
            let Some(judged) = &mut known.judged else { continue };
            let again = judged.again(services);
            if again.judgement != judged.judgement {
                self.due.insert(id.clone());
            }
            *judged = again;
        }
    }

    /// Marks an endpoint as due.
    pub(crate) fn mark_due(&mut self, id: EndpointId) {
        self.due.insert(id);
    }

    /// Marks the cluster's Services as changed.
    pub(crate) fn services_changed(&mut self) {
        self.frontends = None;
    }

    /// Marks an endpoint for reading from HNS, because it may be another one than before.
    pub(crate) fn look_at_now(&mut self, id: EndpointId) {
        self.known(&id).look = true;
        self.due.insert(id);
    }

    /// Marks the endpoints without a port of the node that they want: whoever has it may have gone.
    pub(crate) fn look_at_host_ports(&mut self) {
        let without = self.known.iter_mut().filter(|(_, known)| !known.host_ports.is_empty());
        for (id, known) in without {
            known.look = true;
            self.due.insert(id.clone());
        }
    }

    /// Marks an endpoint for reading from HNS and for repair, unless it has to wait.
    pub(crate) fn look_at(&mut self, id: EndpointId, now: Instant) {
        if !self.backoff.has_to_wait(&id, now) {
            self.look_at_now(id);
        }
    }

    /// Marks what has failed for another attempt.
    pub(crate) fn retry_failed(&mut self) {
        let failed: Vec<EndpointId> = self.backoff.keys().cloned().collect();
        failed.into_iter().for_each(|id| self.look_at_now(id));
    }

    /// Marks the sets for reading from HNS, and for a retry.
    pub(crate) fn look_at_sets(&mut self, now: Instant) {
        (self.actual, self.sweep) = (None, true);
        self.unusable.retain(|_, (_, until)| now < *until);
    }

    /// Postpones everything that is due: HNS does not answer, and each further call could take as long as its
    /// deadline.
    pub(crate) fn put_off(&mut self, error: &Error) {
        for id in self.due.clone() {
            let condition = Condition::new(error.reason(), format!("not brought up to date yet: {error}"));
            self.known(&id).conditions = vec![condition];
        }
    }

    /// Removes a deleted endpoint: HNS deletes it with the CNI DEL.
    pub(crate) fn forget(&mut self, id: &EndpointId) {
        self.due.remove(id);
        self.backoff.forget(id);
        self.known.remove(id);
    }

    /// The conditions about endpoints.
    pub(crate) fn conditions(&self) -> BTreeMap<EndpointId, Vec<Condition>> {
        let with_conditions = self.known.iter().filter(|(_, known)| !known.conditions.is_empty());
        with_conditions.map(|(id, known)| (id.clone(), known.conditions.clone())).collect()
    }

    /// The conditions about sets.
    pub(crate) fn conditions_of_sets(&self) -> impl Iterator<Item = Condition> {
        self.unusable.values().map(|(condition, _)| condition.clone())
    }

    /// The last list of an endpoint, if there is one, and descriptions of the sets that it names.
    pub(crate) fn list_of(&self, id: &EndpointId) -> Option<(&List, BTreeMap<String, String>)> {
        let list = self.known.get(id)?.in_force.as_ref()?;
        let named = list.set_ids().into_iter().filter_map(|id| self.wanted.get(&id));
        Some((list, named.map(|set| (set.id.clone(), set.name.clone())).collect()))
    }

    /// Whether something failed.
    pub(crate) fn is_in_trouble(&self) -> bool {
        !self.backoff.is_empty() || !self.due.is_empty() || self.differing().next().is_some()
    }

    /// The existing sets whose members differ from the desired ones.
    fn differing(&self) -> impl Iterator<Item = &Set> {
        let actual = self.actual.iter();
        actual.flat_map(|(_, actual)| self.wanted.values().filter(|set| actual.differs(set)))
    }

    fn known(&mut self, id: &EndpointId) -> &mut Known {
        self.known.entry(id.clone()).or_default()
    }
}
