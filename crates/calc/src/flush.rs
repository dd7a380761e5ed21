//! Converts touched objects to deltas that are complete and minimal, in an order that never opens anything.

use std::sync::Arc;

use tortie_dataplane::{Delta, EndpointId, NodeState};
use tortie_policy::SetSource;
use tortie_policy::program::{EndpointProgram, PolicyId, SetId};

use crate::Calc;
use crate::endpoints::{Given, Programs};
use crate::keys::Map;
use crate::local::LocalId;
use crate::slab::No;

/// The policies and profiles in the published state.
#[derive(Default)]
pub(crate) struct InUse(Map<PolicyId, Use>);

#[derive(Default)]
struct Use {
    /// How often programs name it.
    named: usize,
    /// The sets that are kept for it.
    sets: Arc<[(SetId, Arc<SetSource>)]>,
}

impl InUse {
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, id: &PolicyId) -> bool {
        self.0.contains_key(id)
    }
}

impl Calc {
    /// The deltas since the last flush: sets, then policies that name them, then endpoints that name those; removals
    /// in the opposite order (policy decision 23). Each delta changes something.
    pub fn flush(&mut self) -> Vec<Delta> {
        self.judge_claims();
        let endpoints = self.changed_endpoints();
        self.count_names(&endpoints);
        let (policies, removed_policies) = self.changed_policies();
        let (sets, removed_sets) = self.sets.flush(&mut self.subjects, &self.state);

        let parts = [sets.len(), policies.len(), endpoints.len(), removed_policies.len(), removed_sets.len()];
        let mut deltas = Vec::new();
        self.network_deltas(&mut deltas);
        deltas.reserve_exact(parts.iter().sum());
        deltas.extend(sets);
        deltas.extend(policies);
        deltas.extend(endpoints.into_iter().map(Given::into_delta));
        deltas.extend(removed_policies);
        deltas.extend(removed_sets);
        deltas.extend(self.services.iter_mut().flat_map(|services| services.flush(&self.state)));
        if self.state == NodeState::default() {
            self.state = NodeState::from_nothing(&deltas);
        } else {
            deltas.iter().for_each(|delta| self.state.apply(delta));
        }
        deltas
    }

    /// This node's endpoints that differ from the published state: their new values, or their deletion.
    fn changed_endpoints(&mut self) -> Vec<Given> {
        // In the order of their numbers, which is the order in memory; later steps read them in about this order.
        let mut numbers: Vec<No> = self.dirty_endpoints.drain().collect();
        numbers.sort_unstable();
        let touched = numbers.into_iter().filter_map(|no| {
            let local = self.subjects.get(no)?.local.as_ref()?;
            Some((local.id.clone(), local.is_alone.then_some(no)))
        });
        let mut touched: Vec<(LocalId, Option<No>)> = touched.collect();
        touched.extend(self.gone_endpoints.drain(..).map(|id| (id, None)));
        touched.sort_unstable();
        touched.dedup_by(|(a, _), (b, _)| a == b);
        for (id, no) in &touched {
            let LocalId::Pod(id) = id else { continue };
            let no = no.or_else(|| self.subjects.local_endpoint(&LocalId::Pod(id.clone())));
            let local = no.and_then(|no| self.subjects.get(no)?.local.as_ref());
            match local.and_then(|local| self.policies.problem_of_pod(&local.policies)) {
                Some(problem) => drop(self.closed.insert(EndpointId::clone(id), problem)),
                None => drop(self.closed.remove(&**id)),
            }
        }
        let mut programs = Programs::new(&self.subjects, &self.policies);
        let now = touched.iter().map(|(id, no)| Given::new(id, *no, &mut programs));
        now.filter(|given| given.is_change(&self.state)).collect()
    }

    /// Counts how often programs will name each policy, and touches those that become used or unused.
    fn count_names(&mut self, endpoints: &[Given]) {
        for (id, times) in names(endpoints.iter().flat_map(Given::programs)) {
            let used = self.in_use.0.entry_ref(id).or_default();
            if used.named == 0 {
                self.dirty_policies.push(id.clone());
            }
            used.named += times;
        }
        for (id, times) in names(endpoints.iter().flat_map(|given| given.programs_before(&self.state))) {
            let Some(used) = self.in_use.0.get_mut(id) else { continue };
            used.named -= times;
            if used.named == 0 {
                self.dirty_policies.push(id.clone());
            }
        }
    }

    /// The used policies that differ from the published state, and those that are no longer used. Their new sets are
    /// acquired before old ones are released, so that common sets stay.
    fn changed_policies(&mut self) -> (Vec<Delta>, Vec<Delta>) {
        let (mut changed, mut removed, mut released) = (Vec::new(), Vec::new(), Vec::new());
        let mut touched = std::mem::take(&mut self.dirty_policies);
        touched.sort_unstable();
        touched.dedup();
        for id in touched {
            let Some(used) = self.in_use.0.get_mut(&id) else { continue };
            if used.named == 0 {
                released.extend(self.in_use.0.remove(&id));
                let given = self.state.policies.contains_key(&id);
                removed.extend(given.then_some(Delta::PolicyRemoved(id)));
                continue;
            }
            let body = self.policies.body(&id);
            self.sets.acquire(&body.sets, &mut self.subjects, self.network.nodes());
            let named = used.named;
            released.push(std::mem::replace(used, Use { named, sets: body.sets }));
            if self.state.policies.get(&id) != Some(&body.rules) {
                changed.push(Delta::Policy(id, body.rules));
            }
        }
        released.iter().for_each(|used| self.sets.release(&used.sets));
        (changed, removed)
    }
}

/// The policies and profiles that the programs name, each with its count. Programs that neighbours share are read
/// once.
fn names<'a>(
    programs: impl Iterator<Item = &'a EndpointProgram>,
) -> impl Iterator<Item = (&'a PolicyId, usize)> {
    let mut runs: Vec<(&EndpointProgram, usize)> = Vec::new();
    for program in programs {
        match runs.last_mut() {
            Some((last, times)) if std::ptr::eq(*last, program) => *times += 1,
            _ => runs.push((program, 1)),
        }
    }
    runs.into_iter().flat_map(|(program, times)| program.policy_ids().map(move |id| (id, times)))
}
