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
//! The sets that an endpoint may name which could not be changed stay as they are; for all others they are spelled out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_dataplane::{Condition, Endpoint, EndpointId, NodeState};
use tortie_hcn::schema::{Acl, Policy};
use tortie_hcn::{Guid, Hcn, HcnExt};
use tracing::warn;

use crate::acl::{
    Frontends, Judged, List, OUR_SETS, Rows, Services, Set, Sets, named_sets, render, transition,
};
use crate::endpoint::{Vain, find, ours, sync_acls};
use crate::policy_sets::PolicySets;
use crate::waits::Waits;
use crate::{Error, NETWORK};

/// How long a set that HNS refused is spelled out: each change from one to the other writes ACLs.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// The node, at the time of a pass.
pub(crate) struct Pass<'a> {
    pub(crate) hcn: &'a dyn Hcn,
    pub(crate) state: &'a NodeState,
    /// The network of the pods, where HNS has sets, and whether ACLs shall name them.
    pub(crate) sets: Option<(Guid, bool)>,
    /// The addresses that the node itself has towards its pods.
    pub(crate) node: BTreeSet<Ipv4Addr>,
    /// What the operator has before policy.
    pub(crate) static_rules: &'a [Acl],
    pub(crate) now: Instant,
}

/// What is in force on endpoints, and what is to be done about them.
#[derive(Default)]
pub(crate) struct Policing {
    /// The endpoints whose lists may have to change.
    due: BTreeSet<EndpointId>,
    /// Those of them that are looked at in any case.
    look: BTreeSet<EndpointId>,
    /// Endpoints that failed.
    waits: Waits<EndpointId>,
    conditions: BTreeMap<EndpointId, Vec<Condition>>,
    /// What HNS did not take.
    vain: BTreeMap<EndpointId, Vain>,
    /// The lists that endpoints have.
    in_force: BTreeMap<EndpointId, List>,
    /// The sets that the ACLs of an endpoint may name, whatever has failed.
    named: BTreeMap<EndpointId, BTreeSet<String>>,
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
    /// What they have added to endpoints' lists.
    judged: BTreeMap<EndpointId, Arc<Judged>>,
}

/// An endpoint that is due.
struct Job {
    endpoint: Arc<Endpoint>,
    rows: Rows,
    /// What it is to have in the end.
    list: List,
    conditions: Vec<Condition>,
    done: bool,
}

impl Policing {
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
        self.look.insert(id.clone());
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

    /// The endpoint is gone: HNS deletes it with the CNI DEL.
    pub(crate) fn forget(&mut self, id: &EndpointId) {
        self.due.remove(id);
        self.look.remove(id);
        self.waits.forget(id);
        self.conditions.remove(id);
        self.vain.remove(id);
        self.in_force.remove(id);
        self.named.remove(id);
        self.judged.remove(id);
    }

    /// What is to be said of endpoints.
    pub(crate) fn conditions(&self) -> BTreeMap<EndpointId, Vec<Condition>> {
        let told = self.conditions.iter().filter(|(_, conditions)| !conditions.is_empty());
        told.map(|(id, conditions)| (id.clone(), conditions.clone())).collect()
    }

    /// The list that an endpoint was given last, if there is one, and what the sets are that it names, for people.
    pub(crate) fn list_of(&self, id: &EndpointId) -> Option<(&List, BTreeMap<String, String>)> {
        let list = self.in_force.get(id)?;
        let named = list.set_ids().into_iter();
        let named = named.filter_map(|id| Some((self.wanted.get(&id)?.name.clone(), id)));
        Some((list, named.map(|(name, id)| (id, name)).collect()))
    }

    /// What is to be said of sets.
    pub(crate) fn conditions_of_sets(&self) -> impl Iterator<Item = Condition> {
        self.unusable.values().map(|(condition, _)| condition.clone())
    }

    /// Whether something failed.
    pub(crate) fn is_in_trouble(&self) -> bool {
        let differs = |(_, actual): &(Guid, PolicySets)| self.wanted.values().any(|set| actual.differs(set));
        !self.waits.is_empty() || !self.due.is_empty() || self.actual.as_ref().is_some_and(differs)
    }

    /// HNS does not answer, and each further call could take as long as its deadline: what is due stays so.
    pub(crate) fn put_off(&mut self, error: &Error) {
        for id in &self.due {
            let message = format!("{id}: not brought up to date yet: {error}");
            self.conditions.insert(id.clone(), vec![Condition { reason: error.reason(), message }]);
        }
    }

    /// Brings everything that is due up to date. Gives the error that says that HNS does not answer.
    pub(crate) fn reconcile(&mut self, pass: &Pass<'_>) -> Result<(), Error> {
        self.due.extend(self.waits.due(pass.now));
        let sets = Sets::new(pass.state);
        let mut jobs = self.jobs(pass, &sets);
        let result = self.work(pass, &sets, &mut jobs);
        if result.is_err() {
            // Of what has been done, nothing is lost by doing it again.
            self.actual = None;
            self.due.extend(jobs.into_keys());
        }
        result
    }

    fn work(
        &mut self,
        pass: &Pass<'_>,
        sets: &Sets<'_, NodeState>,
        jobs: &mut BTreeMap<EndpointId, Job>,
    ) -> Result<(), Error> {
        self.add_sets(pass, sets, jobs)?;
        let changing: BTreeSet<String> = match &self.actual {
            Some((_, actual)) => {
                self.wanted.values().filter(|set| actual.differs(set)).map(|set| set.id.clone()).collect()
            }
            None => BTreeSet::new(),
        };
        for (id, job) in jobs.iter_mut() {
            self.look_after(pass, sets, id, job, &changing)?;
        }
        self.change_sets(pass, sets, jobs, &changing)?;
        let nothing = BTreeSet::new();
        for (id, job) in jobs.iter_mut().filter(|(_, job)| !job.done) {
            self.look_after(pass, sets, id, job, &nothing)?;
        }
        for (id, job) in jobs {
            if !self.waits.contains(id) {
                self.conditions.insert(id.clone(), std::mem::take(&mut job.conditions));
            }
        }
        self.remove_sets(pass)
    }

    /// What is due, rendered.
    fn jobs(&mut self, pass: &Pass<'_>, sets: &Sets<'_, NodeState>) -> BTreeMap<EndpointId, Job> {
        let mut jobs = BTreeMap::new();
        let by_name = pass.sets.is_some_and(|(_, by_name)| by_name);
        let known = self.frontends.take();
        let changed = known.is_none();
        let frontends = known.unwrap_or_else(|| Frontends::new(pass.state));
        let services = Services::new(&frontends, pass.state);
        if changed {
            self.judge_again(&services);
        }
        for id in std::mem::take(&mut self.due) {
            let Some(endpoint) = pass.state.endpoints.get(&id).cloned() else { continue };
            let (rows, conditions) = render(&endpoint, &pass.node, by_name, &services, pass.state);
            self.judged.extend(rows.services().map(|judged| (id.clone(), Arc::clone(judged))));
            let rows = rows.with_static_rules(pass.static_rules);
            let list = self.list(&rows, sets);
            jobs.insert(id, Job { endpoint, rows, list, conditions, done: false });
        }
        self.frontends = Some(frontends);
        self.want(jobs.values(), sets);
        jobs
    }

    /// Finds the endpoints to whose lists the Services now add something else than before.
    fn judge_again(&mut self, services: &Services<'_, NodeState>) {
        for (id, judged) in &mut self.judged {
            let again = judged.again(services);
            if again.judgement != judged.judgement {
                self.due.insert(id.clone());
            }
            *judged = again;
        }
    }

    /// The list that names sets, but for those that cannot be named.
    fn list(&self, rows: &Rows, sets: &Sets<'_, NodeState>) -> List {
        rows.list(sets, &|acls| acls.iter().flat_map(named_sets).any(|id| self.unusable.contains_key(id)))
    }

    /// Notes the sets that lists name, with their members.
    fn want<'a>(&mut self, jobs: impl Iterator<Item = &'a Job>, sets: &Sets<'_, NodeState>) {
        let ids = jobs.flat_map(|job| job.list.set_ids()).collect();
        self.wanted.extend(sets.named(&ids).into_iter().map(|set| (set.id.clone(), set)));
    }

    /// Some sets have turned out not to be usable.
    fn do_without(
        &mut self,
        refused: BTreeMap<String, (Condition, Instant)>,
        sets: &Sets<'_, NodeState>,
        jobs: &mut BTreeMap<EndpointId, Job>,
    ) {
        if refused.is_empty() {
            return;
        }
        // Those that have them and are not at work now have their turn soon.
        let names_one = |named: &BTreeSet<String>| named.iter().any(|id| refused.contains_key(id));
        for (id, _) in self.named.iter().filter(|(id, named)| !jobs.contains_key(*id) && names_one(named)) {
            let message =
                format!("{id}: a set that its ACLs name cannot be changed; its members are spelled out next");
            self.conditions.insert(id.clone(), vec![Condition { reason: "PolicySetHeld", message }]);
            self.due.insert(id.clone());
        }
        self.unusable.extend(refused);
        for (id, job) in jobs {
            job.list = self.list(&job.rows, sets);
            // What has just failed has its turn when it has waited.
            job.done = self.waits.contains(id) && !self.look.contains(id);
        }
    }

    /// Makes sets that are new.
    fn add_sets(
        &mut self,
        pass: &Pass<'_>,
        sets: &Sets<'_, NodeState>,
        jobs: &mut BTreeMap<EndpointId, Job>,
    ) -> Result<(), Error> {
        let Some((network, _)) = pass.sets else { return Ok(()) };
        let mut actual = match self.actual.take() {
            Some((of, actual)) if of == network => actual,
            _ => PolicySets::read(pass.hcn, network)?,
        };
        let missing: Vec<&Set> = self.wanted.values().filter(|set| !actual.has(&set.id)).collect();
        let refused = actual.add(pass.hcn, network, &missing)?;
        self.actual = Some((network, actual));
        let until = pass.now + TRY_AGAIN_AFTER;
        self.do_without(refused.into_iter().map(|(id, told)| (id, (told, until))).collect(), sets, jobs);
        Ok(())
    }

    /// Brings one endpoint up to date, as far as that can be while sets are changing.
    fn look_after(
        &mut self,
        pass: &Pass<'_>,
        sets: &Sets<'_, NodeState>,
        id: &EndpointId,
        job: &mut Job,
        changing: &BTreeSet<String>,
    ) -> Result<(), Error> {
        let failing = self.waits.contains(id);
        if !failing && !self.look.contains(id) && self.in_force.get(id) == Some(&job.list) {
            job.done = true;
            return Ok(());
        }
        match self.sync(pass, sets, id, job, changing) {
            Ok(()) => self.waits.forget(id),
            Err(error) if error.is_unavailable() => return Err(error),
            Err(error) => {
                warn!(%error, "not as it should be yet");
                if matches!(error, Error::NoEndpoint { .. }) {
                    // What is not there names nothing.
                    self.named.insert(id.clone(), BTreeSet::new());
                    self.in_force.remove(id);
                }
                let told = Condition { reason: error.reason(), message: error.to_string() };
                self.conditions.insert(id.clone(), vec![told]);
                self.waits.failed(id.clone(), pass.now);
                self.look.remove(id);
                // It has its turn when it has waited.
                job.done = true;
            }
        }
        Ok(())
    }

    fn sync(
        &mut self,
        pass: &Pass<'_>,
        sets: &Sets<'_, NodeState>,
        id: &EndpointId,
        job: &mut Job,
        changing: &BTreeSet<String>,
    ) -> Result<(), Error> {
        // Until it has succeeded, nobody knows what the endpoint has.
        self.look.insert(id.clone());
        let container_id = job.endpoint.container_id.to_string();
        let found = find(pass.hcn, &container_id, NETWORK)?.ok_or(Error::NoEndpoint { container_id })?;
        let there = ours(&found);
        let names_one = |acls: &[Acl]| {
            let mut sets = acls.iter().flat_map(named_sets);
            sets.any(|id| self.unusable.contains_key(id) || changing.contains(id))
        };
        // A list that stays as it is may go on naming sets: it is of before, and then of after, as they are.
        let stays = transition(&there, &job.list.numbered(&there)).is_empty();
        let now = if stays { job.list.clone() } else { job.rows.list(sets, &names_one) };
        let named = self.named.entry(id.clone()).or_default();
        named.extend(now.set_ids());
        named.extend(found.policies.iter().flat_map(sets_in));
        let mut vain = self.vain.remove(id);
        let told = sync_acls(pass.hcn, &found, &now, &mut vain, pass.now);
        self.vain.extend(vain.map(|vain| (id.clone(), vain)));
        for condition in told? {
            if !job.conditions.contains(&condition) {
                job.conditions.push(condition);
            }
        }
        self.named.insert(id.clone(), now.set_ids());
        self.look.remove(id);
        job.done = now == job.list;
        self.in_force.insert(id.clone(), now);
        Ok(())
    }

    /// Gives sets their new members; but those that an endpoint may name which failed stay.
    fn change_sets(
        &mut self,
        pass: &Pass<'_>,
        sets: &Sets<'_, NodeState>,
        jobs: &mut BTreeMap<EndpointId, Job>,
        changing: &BTreeSet<String>,
    ) -> Result<(), Error> {
        let Some((network, mut actual)) = self.actual.take() else { return Ok(()) };
        let mut held = BTreeMap::new();
        for id in self.waits.keys() {
            let named = self.named.get(id);
            for set in changing.iter().filter(|set| named.is_none_or(|named| named.contains(*set))) {
                let message = format!(
                    "the set {set} keeps its members, as {id} may name it in ACLs that cannot be changed"
                );
                held.insert(set.clone(), (Condition { reason: "PolicySetHeld", message }, pass.now));
            }
        }
        let free = changing.iter().filter(|id| !held.contains_key(*id));
        let free: Vec<&Set> = free.filter_map(|id| self.wanted.get(id)).collect();
        let refused = actual.change(pass.hcn, network, &free)?;
        self.actual = Some((network, actual));
        let until = pass.now + TRY_AGAIN_AFTER;
        held.extend(refused.into_iter().map(|(id, told)| (id, (told, until))));
        self.do_without(held, sets, jobs);
        Ok(())
    }

    /// Removes sets that nothing names any more: no endpoint of the network, whether it is known here or not.
    fn remove_sets(&mut self, pass: &Pass<'_>) -> Result<(), Error> {
        let used: BTreeSet<&String> = self.named.values().flatten().collect();
        self.wanted.retain(|id, _| used.contains(id));
        let Some((network, mut actual)) = self.actual.take() else { return Ok(()) };
        let mut surplus: BTreeSet<String> = match std::mem::take(&mut self.sweep) {
            true => actual.ids().filter(|id| !used.contains(id)).cloned().collect(),
            false => BTreeSet::new(),
        };
        if !surplus.is_empty() {
            for endpoint in pass.hcn.endpoints_of_network(network)? {
                let named: BTreeSet<String> = endpoint.policies.iter().flat_map(sets_in).collect();
                surplus.retain(|id| !named.contains(id));
            }
            actual.remove(pass.hcn, network, &surplus)?;
        }
        self.actual = Some((network, actual));
        Ok(())
    }
}

/// The identifiers of our sets that a policy of an endpoint names, whosever it is: it may be one of ours that lost its id.
fn sets_in(policy: &Policy) -> Vec<String> {
    let lists = ["LocalAddresses", "RemoteAddresses"].into_iter();
    let lists = lists.filter_map(|member| policy.settings.get(member)?.as_str());
    lists
        .flat_map(|list| list.split(','))
        .filter(|part| part.starts_with(OUR_SETS))
        .map(str::to_owned)
        .collect()
}
