//! The policy of a node's pods: ACLs on their endpoints, and the sets that ACLs name.
//!
//! Where both change, packets must at no moment meet what neither the old state nor the new one has: an ACL of before with
//! the members of after, or the other way round. So what changes goes in this order:
//!
//! 1. Sets that are new are made. Nothing names them yet.
//! 2. Each endpoint whose list changes gets the new one; but where it names a set whose members change, the new members
//!    are spelled out. It names no such set then.
//! 3. The sets get their new members.
//! 4. What was spelled out becomes the set's name again, which means the same now.
//! 5. Sets that nothing names any more are removed.
//!
//! The sets that an endpoint may name which could not be changed stay as they are; for all others they are spelled out,
//! before step 3.

mod pass;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use tortie_dataplane::{Condition, EndpointId, NodeState};
use tortie_hcn::schema::Acl;
use tortie_hcn::{Guid, Hcn};

use crate::Error;
use crate::acl::{Frontends, Judged, List, Services, Set};
use crate::endpoint::Vain;
use crate::policy_sets::PolicySets;
use crate::waits::Waits;
use pass::Pass;

/// The node, at the time of a pass.
pub(crate) struct Node<'a> {
    pub(crate) hcn: &'a dyn Hcn,
    pub(crate) state: &'a NodeState,
    /// The network of the pods, where HNS has sets, and whether ACLs shall name them.
    pub(crate) sets: Option<(Guid, bool)>,
    /// The addresses that the node itself has towards its pods.
    pub(crate) addresses: BTreeSet<Ipv4Addr>,
    /// What the operator has before policy.
    pub(crate) static_rules: &'a [Acl],
    pub(crate) now: Instant,
}

/// What is in force on endpoints, and which of them are to be brought up to date.
#[derive(Default)]
pub(crate) struct Policing {
    /// The endpoints whose lists may have to change.
    due: BTreeSet<EndpointId>,
    /// Endpoints that failed.
    waits: Waits<EndpointId>,
    known: BTreeMap<EndpointId, Known>,
    /// The sets that lists name.
    wanted: BTreeMap<String, Set>,
    /// The sets of a network as HNS has them, if that is known.
    actual: Option<(Guid, PolicySets)>,
    /// Whether sets that nothing names are looked for.
    sweep: bool,
    /// Sets that cannot be named for now, why, and until when.
    unusable: BTreeMap<String, (Condition, Instant)>,
    /// The cluster's Services; `None` where they may have changed.
    frontends: Option<Frontends>,
}

/// What is known of an endpoint.
#[derive(Default)]
struct Known {
    /// Whether it is to be read from HNS, also where its list stays as it is.
    look: bool,
    conditions: Vec<Condition>,
    /// What is to be told of the endpoint as it was when it was looked at last: ACLs of others.
    found: Vec<Condition>,
    /// What HNS did not take.
    vain: Option<Vain>,
    /// The list that it has.
    in_force: Option<List>,
    /// The sets that its ACLs may name, whatever has failed; `None` where that could be any.
    named: Option<BTreeSet<String>>,
    /// What Services have added to its list.
    judged: Option<Arc<Judged>>,
}

impl Policing {
    /// Brings everything that is due up to date. Gives the error that says that HNS does not answer.
    pub(crate) fn reconcile(&mut self, node: &Node<'_>) -> Result<(), Error> {
        let known = self.frontends.take();
        let changed = known.is_none();
        let frontends = known.unwrap_or_else(|| Frontends::new(node.state));
        let services = Services::new(&frontends, node.state);
        if changed {
            self.judge_again(&services);
        }
        self.due.extend(self.waits.due(node.now));
        let at_work = self.due.clone();
        let result = Pass::new(self, node, &services).run();
        match result {
            Ok(()) => self.due.retain(|id| !at_work.contains(id)),
            // All stays due: of what has been done, nothing is lost by doing it again.
            Err(_) => self.actual = None,
        }
        self.frontends = Some(frontends);
        result
    }

    /// Finds the endpoints to whose lists the Services now add something else than before.
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

    /// Has an endpoint be brought up to date.
    pub(crate) fn touch(&mut self, id: EndpointId) {
        self.due.insert(id);
    }

    /// Has the cluster's Services be taken in anew.
    pub(crate) fn services_changed(&mut self) {
        self.frontends = None;
    }

    /// Has an endpoint be read from HNS, as it may be another one than before.
    pub(crate) fn look_at_now(&mut self, id: EndpointId) {
        self.known(&id).look = true;
        self.due.insert(id);
    }

    /// Has an endpoint be read from HNS, and mended, unless it has to wait.
    pub(crate) fn look_at(&mut self, id: EndpointId, now: Instant) {
        if !self.waits.has_to_wait(&id, now) {
            self.look_at_now(id);
        }
    }

    /// Has the sets be read from HNS, and tried again.
    pub(crate) fn look_at_sets(&mut self, now: Instant) {
        (self.actual, self.sweep) = (None, true);
        self.unusable.retain(|_, (_, until)| now < *until);
    }

    /// HNS does not answer, and each further call could take as long as its deadline: what is due stays so.
    pub(crate) fn put_off(&mut self, error: &Error) {
        for id in self.due.clone() {
            let condition = Condition::new(error.reason(), format!("not brought up to date yet: {error}"));
            self.known(&id).conditions = vec![condition];
        }
    }

    /// The endpoint is gone: HNS deletes it with the CNI DEL.
    pub(crate) fn forget(&mut self, id: &EndpointId) {
        self.due.remove(id);
        self.waits.forget(id);
        self.known.remove(id);
    }

    /// What is to be said of endpoints.
    pub(crate) fn conditions(&self) -> BTreeMap<EndpointId, Vec<Condition>> {
        let told = self.known.iter().filter(|(_, known)| !known.conditions.is_empty());
        told.map(|(id, known)| (id.clone(), known.conditions.clone())).collect()
    }

    /// What is to be said of sets.
    pub(crate) fn conditions_of_sets(&self) -> impl Iterator<Item = Condition> {
        self.unusable.values().map(|(condition, _)| condition.clone())
    }

    /// The list that an endpoint was given last, if there is one, and what the sets are that it names, for people.
    pub(crate) fn list_of(&self, id: &EndpointId) -> Option<(&List, BTreeMap<String, String>)> {
        let list = self.known.get(id)?.in_force.as_ref()?;
        let named = list.set_ids().into_iter().filter_map(|id| self.wanted.get(&id));
        Some((list, named.map(|set| (set.id.clone(), set.name.clone())).collect()))
    }

    /// Whether something failed.
    pub(crate) fn is_in_trouble(&self) -> bool {
        !self.waits.is_empty() || !self.due.is_empty() || self.differing().next().is_some()
    }

    /// The sets that are there with other members than they shall have.
    fn differing(&self) -> impl Iterator<Item = &Set> {
        let actual = self.actual.iter();
        actual.flat_map(|(_, actual)| self.wanted.values().filter(|set| actual.differs(set)))
    }

    fn known(&mut self, id: &EndpointId) -> &mut Known {
        self.known.entry(id.clone()).or_default()
    }
}
