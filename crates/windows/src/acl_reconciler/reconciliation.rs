//! One reconciliation of the endpoints that are due, in the five steps described in [`super`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use tortie_dataplane::{Condition, Endpoint, EndpointId, NodeState, Reason};
use tortie_hcn::HcnExt;
use tortie_hcn::schema::Policy;
use tracing::warn;

use super::{AclReconciler, Node};
use crate::acl::{List, OUR_SETS, Rows, Services, Set, Sets, Surroundings, named_sets, render, transition};
use crate::endpoint::{endpoint_id, ensure_closed, ours, sync_acls};
use crate::host_ports::Mappings;
use crate::policy_sets::PolicySets;
use crate::unrecognised::Unrecognised;
use crate::{Error, outbound};

/// How long addresses are listed instead of a set that HNS refused: each switch between the two writes ACLs.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// How long nothing is reported about a pod of another plugin whose endpoint has vanished: when a pod ends, its endpoint goes before
/// its object.
const ENDING: Duration = Duration::from_secs(30);

/// The data of a reconciliation.
pub(super) struct Reconciliation<'a> {
    acl_reconciler: &'a mut AclReconciler,
    node: &'a Node<'a>,
    /// The sets that lists of this reconciliation name, or could name.
    sets: Sets<'a, NodeState>,
    /// The endpoints in progress: those that are due, without those that have failed.
    jobs: Vec<Job<'a>>,
    /// The sets whose members are about to change: no list that is sent meanwhile names them.
    changing: BTreeSet<String>,
}

/// An endpoint that is due.
struct Job<'a> {
    id: EndpointId,
    endpoint: &'a Endpoint,
    rows: Rows,
    /// Its final list.
    list: List,
    conditions: Vec<Condition>,
}

impl<'a> Reconciliation<'a> {
    /// Renders what is due.
    pub(super) fn new(
        acl_reconciler: &'a mut AclReconciler,
        node: &'a Node<'a>,
        services: &Services<'_, NodeState>,
    ) -> Self {
        let (sets, due) = (Sets::new(node.state), acl_reconciler.due.clone());
        let mut reconciliation =
            Reconciliation { acl_reconciler, node, sets, jobs: vec![], changing: BTreeSet::new() };
        reconciliation.jobs = due.into_iter().filter_map(|id| reconciliation.render(id, services)).collect();
        let named = reconciliation.jobs.iter().flat_map(|job| job.list.set_ids()).collect();
        let wanted = reconciliation.sets.named(&named).into_iter();
        reconciliation.acl_reconciler.wanted.extend(wanted.map(|set| (set.id.clone(), set)));
        reconciliation
    }

    /// Executes the steps. Returns the error if HNS does not answer.
    pub(super) fn run(mut self) -> Result<(), Error> {
        self.add_sets()?;
        self.changing = self.acl_reconciler.differing().map(|set| set.id.clone()).collect();
        self.sync_endpoints()?;
        self.hold_sets()?;
        self.change_sets()?;
        self.sync_endpoints()?;
        for Job { id, mut conditions, .. } in std::mem::take(&mut self.jobs) {
            let known = self.acl_reconciler.known(&id);
            conditions.extend_from_slice(&known.found);
            conditions.extend_from_slice(&known.host_ports);
            conditions.extend_from_slice(&known.outbound);
            known.conditions = conditions;
        }
        self.remove_sets()
    }

    fn render(&mut self, id: EndpointId, services: &Services<'_, NodeState>) -> Option<Job<'a>> {
        let Node { state, sets, addresses, has_ipv6, static_rules, .. } = self.node;
        let endpoint = state.endpoints.get(&id)?;
        let by_name = sets.is_some_and(|(_, by_name)| by_name);
        let surroundings =
            Surroundings { node: addresses, by_name, has_ipv6: *has_ipv6, settings: &state.settings };
        let (rows, conditions) = render(endpoint, surroundings, services, *state);
        self.acl_reconciler.known(&id).judged = rows.services().cloned();
        let rows = rows.with_static_rules(static_rules);
        let list = self.list(&rows, &BTreeSet::new());
        Some(Job { id, endpoint, rows, list, conditions })
    }

    /// The list that names sets, except for those to `avoid`, and those that cannot be named.
    fn list(&self, rows: &Rows, avoid: &BTreeSet<String>) -> List {
        let avoided = |id: &str| avoid.contains(id) || self.acl_reconciler.unusable.contains_key(id);
        rows.list(&self.sets, &|acls| acls.iter().flat_map(named_sets).any(avoided))
    }

    /// Creates new sets.
    fn add_sets(&mut self) -> Result<(), Error> {
        let Node { hcn, sets: Some((network, _)), now, .. } = *self.node else { return Ok(()) };
        let mut actual = match self.acl_reconciler.actual.take() {
            Some((of, actual)) if of == network => actual,
            _ => PolicySets::read(hcn, network)?,
        };
        let wanted = self.acl_reconciler.wanted.values();
        let missing: Vec<&Set> = wanted.filter(|set| !actual.has(&set.id)).collect();
        let refused = actual.add(hcn, network, &missing)?;
        self.acl_reconciler.actual = Some((network, actual));
        self.do_without(refused, now + TRY_AGAIN_AFTER);
        Ok(())
    }

    /// Sends endpoints their lists, as far as possible while sets are changing. Endpoints that fail are no longer in
    /// progress.
    fn sync_endpoints(&mut self) -> Result<(), Error> {
        for job in std::mem::take(&mut self.jobs) {
            match self.sync(&job) {
                Ok(()) => self.jobs.push(job),
                Err(error) if error.is_unavailable() => return Err(error),
                Err(error) => self.failed(job.id, &error),
            }
        }
        Ok(())
    }

    fn sync(&mut self, job: &Job<'_>) -> Result<(), Error> {
        let failing = self.acl_reconciler.backoff.contains(&job.id);
        let known = self.acl_reconciler.known(&job.id);
        if !failing && !known.look && known.in_force.as_ref() == Some(&job.list) {
            return Ok(());
        }
        // Until it has succeeded, the endpoint's state is unknown.
        known.look = true;
        let (hcn, found) = (self.node.hcn, self.node.find(&job.id, job.endpoint)?);
        self.acl_reconciler.lists_provider |= outbound::has_provider(&found);
        let lists_provider = self.acl_reconciler.lists_provider;
        let there = ours(&found);
        // An unchanged list may continue to name sets: it changes meaning together with them.
        let stays = transition(&there, &job.list.numbered(&there)).is_empty();
        let list = if stays { job.list.clone() } else { self.list(&job.rows, &self.changing) };
        let known = self.acl_reconciler.known(&job.id);
        let named = known.named.get_or_insert_default();
        named.extend(list.set_ids());
        named.extend(found.policies.iter().flat_map(sets_in).map(str::to_owned));
        let synced = sync_acls(hcn, &found, &list, &mut known.last_rejected, self.node.now);
        if let Err(error) = &synced
            && self.node.recognition.is_some()
            && !error.is_unavailable()
        {
            // The other plugin has made it open.
            ensure_closed(hcn, &hcn.endpoint(found.id)?)?;
        }
        known.found = synced?;
        *named = list.set_ids();
        let ports = Mappings::of(job.endpoint, self.node.underlay, &self.node.state.settings);
        known.host_ports = ports.sync(hcn, &found, &job.id, self.node.state)?;
        // Another CNI plugin has its own configuration for this.
        if found.id == endpoint_id(&job.endpoint.container_id) {
            let (networks, addresses) = ((&self.node.networks, lists_provider), &job.endpoint.addresses);
            let last_rejected = &mut known.rejected_ways;
            known.outbound = outbound::sync(hcn, &found, networks, addresses, last_rejected, self.node.now)?;
        }
        (known.look, known.in_force, known.vanished) = (false, Some(list), None);
        self.acl_reconciler.backoff.forget(&job.id);
        Ok(())
    }

    /// Records the failure of an endpoint, which is retried after its delay.
    fn failed(&mut self, id: EndpointId, error: &Error) {
        warn!(%error, "HNS differs from the desired state; Tortie retries");
        let (now, known) = (self.node.now, self.acl_reconciler.known(&id));
        if matches!(error, Error::Unrecognised(Unrecognised::NoEndpoint(_))) && known.in_force.is_some() {
            known.vanished = Some(now);
        }
        if matches!(error, Error::NoEndpoint { .. } | Error::Unrecognised(_)) {
            // An endpoint that does not exist, or is another pod's, names nothing for this one.
            (known.named, known.in_force) = (Some(BTreeSet::new()), None);
        }
        let is_ending = known.vanished.is_some_and(|since| now < since + ENDING);
        known.conditions = match is_ending {
            true => Vec::new(),
            false => vec![Condition::new(error.reason(), error.to_string())],
        };
        known.look = false;
        self.acl_reconciler.backoff.failed(id, self.node.now);
    }

    /// Keeps the sets that a failed endpoint may name unchanged. The other endpoints get lists without these sets
    /// before anything changes: a list that names a changed set and an unchanged one would belong to neither the old
    /// nor the new state.
    fn hold_sets(&mut self) -> Result<(), Error> {
        loop {
            let held = self.held_sets();
            if held.is_empty() {
                return Ok(());
            }
            self.changing.retain(|id| !held.contains_key(id));
            self.do_without(held, self.node.now);
            // Some may fail, and hold more sets.
            self.sync_endpoints()?;
        }
    }

    /// Changes the members of sets.
    fn change_sets(&mut self) -> Result<(), Error> {
        let changing = std::mem::take(&mut self.changing);
        let AclReconciler { actual: Some((network, actual)), wanted, .. } = &mut *self.acl_reconciler else {
            return Ok(());
        };
        let sets: Vec<&Set> = changing.iter().filter_map(|id| wanted.get(id)).collect();
        let refused = actual.change(self.node.hcn, *network, &sets)?;
        self.do_without(refused, self.node.now + TRY_AGAIN_AFTER);
        Ok(())
    }

    fn held_sets(&self) -> BTreeMap<String, Condition> {
        let mut held = BTreeMap::new();
        for id in self.acl_reconciler.backoff.keys() {
            let named = self.acl_reconciler.known.get(id).and_then(|known| known.named.as_ref());
            for set in self.changing.iter().filter(|set| named.is_none_or(|named| named.contains(*set))) {
                let message = format!(
                    "the set {set} keeps its members, as {id} may name it in ACLs that cannot be changed"
                );
                held.insert(set.clone(), Condition::new(Reason::PolicySetHeld, message));
            }
        }
        held
    }

    /// Removes sets that no endpoint of the network names any more, whether or not the endpoint is known here.
    fn remove_sets(&mut self) -> Result<(), Error> {
        let AclReconciler { known, wanted, actual, sweep, .. } = &mut *self.acl_reconciler;
        let used: BTreeSet<&String> =
            known.values().filter_map(|known| known.named.as_ref()).flatten().collect();
        wanted.retain(|id, _| used.contains(id));
        let Some((network, actual)) = actual else { return Ok(()) };
        if !std::mem::take(sweep) {
            return Ok(());
        }
        let mut surplus: BTreeSet<String> = actual.ids().filter(|id| !used.contains(id)).cloned().collect();
        if surplus.is_empty() {
            return Ok(());
        }
        for endpoint in self.node.hcn.endpoints_of_network(*network)? {
            for id in endpoint.policies.iter().flat_map(sets_in) {
                surplus.remove(id);
            }
        }
        actual.remove(self.node.hcn, *network, &surplus)
    }

    /// Records unusable sets: no list may name them.
    fn do_without(&mut self, sets: BTreeMap<String, Condition>, until: Instant) {
        if sets.is_empty() {
            return;
        }
        let AclReconciler { due, backoff, known, unusable, .. } = &mut *self.acl_reconciler;
        // Endpoints that name them and are not in progress become due; failed ones after their delay.
        for (id, known) in known {
            let names_one = known.named.iter().flatten().any(|id| sets.contains_key(id));
            if names_one && !backoff.contains(id) && due.insert(id.clone()) {
                let message = "a set that its ACLs name cannot be changed; its members are spelled out next";
                known.conditions = vec![Condition::new(Reason::PolicyNotInForce, message)];
            }
        }
        unusable.extend(sets.into_iter().map(|(id, condition)| (id, (condition, until))));
        for mut job in std::mem::take(&mut self.jobs) {
            job.list = self.list(&job.rows, &BTreeSet::new());
            self.jobs.push(job);
        }
    }
}

/// The identifiers of Tortie's sets in any policy of an endpoint: it may be one of Tortie's that lost its id.
fn sets_in(policy: &Policy) -> impl Iterator<Item = &str> {
    let members = ["LocalAddresses", "RemoteAddresses"].into_iter();
    let lists = members.filter_map(|member| policy.settings.get(member)?.as_str());
    lists.flat_map(|list| list.split(',')).filter(|part| part.starts_with(OUR_SETS))
}
