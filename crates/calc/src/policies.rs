//! The policies and profiles, and the tiers of the policies that select an endpoint.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tortie_api::Key;
use tortie_api::net::Direction;
use tortie_dataplane::Reason;
use tortie_policy::program::{EndOfTier, PolicyId, PolicyKind, PolicyRules, SetId, TierProgram};
use tortie_policy::{Compiled, Hook, Order, SetSource, SubjectLabels, namespace_profile};
use tortie_selector::{Restrictions, Selector};

use crate::Finding;
use crate::budget::Load;
use crate::index::SelectorIndex;
use crate::keys::ByKey;
use crate::slab::{No, Numbers, Slab};
use crate::tiers::Tiers;

pub(crate) use crate::tiers::TierSettings;

/// Rules, and the sources of the sets that they name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Body {
    pub(crate) rules: Arc<PolicyRules>,
    pub(crate) sets: Arc<[(SetId, Arc<SetSource>)]>,
}

impl Body {
    pub(crate) fn new(mut rules: Arc<PolicyRules>, sets: BTreeMap<SetId, SetSource>) -> Self {
        // Spare capacity is most of the memory of a policy with one rule.
        if let Some(rules) = Arc::get_mut(&mut rules) {
            rules.ingress.shrink_to_fit();
            rules.egress.shrink_to_fit();
        }
        Self { rules, sets: sets.into_iter().map(|(id, source)| (id, Arc::new(source))).collect() }
    }
}

/// The position of a policy in programs, and the programs that it belongs to.
#[derive(Debug, PartialEq)]
pub(crate) struct Head {
    tier: Arc<str>,
    order: Order,
    hook: Hook,
    pub(crate) selector: Selector,
    ingress: bool,
    egress: bool,
}

pub(crate) struct Policy {
    pub(crate) id: PolicyId,
    pub(crate) head: Arc<Head>,
    body: Body,
    load: Load,
    /// The endpoints of this node that it selects.
    endpoints: Numbers,
}

/// A message for a policy's author.
struct Note {
    text: String,
    /// Whether the message says why the policy denies everything.
    not_understood: bool,
}

pub(crate) struct Policies {
    numbers: ByKey,
    table: Slab<Policy>,
    by_selector: SelectorIndex,
    by_tier: BTreeMap<Arc<str>, BTreeSet<No>>,
    tiers: Tiers,
    profiles: BTreeMap<String, Body>,
    /// The rules of every namespace's profile.
    allow_everything: Body,
    notes: BTreeMap<PolicyId, Note>,
}

impl Default for Policies {
    fn default() -> Self {
        Self {
            numbers: ByKey::default(),
            table: Slab::default(),
            by_selector: SelectorIndex::default(),
            by_tier: BTreeMap::new(),
            tiers: Tiers::default(),
            profiles: BTreeMap::new(),
            allow_everything: Body::new(Arc::new(namespace_profile("").1), BTreeMap::new()),
            notes: BTreeMap::new(),
        }
    }
}

impl Head {
    /// Whether the policy applies to the packets of this endpoint.
    pub(crate) fn is_about(&self, labels: &SubjectLabels) -> bool {
        (self.hook.is_for_pods() || !labels.is_pod) && self.selector.matches(labels)
    }

    /// Whether it comes before another policy.
    fn compare(&self, other: &Self, tiers: &Tiers) -> Ordering {
        if self.tier == other.tier {
            return self.order.cmp(&other.order);
        }
        tiers.position(&self.tier).cmp(&tiers.position(&other.tier))
    }
}

impl Policy {
    /// Whether it is an object of a namespace, so that it selects pods of that one only.
    fn is_namespaced(&self) -> bool {
        !self.id.namespace.is_empty()
    }

    /// Whether it applies to packets of this direction.
    fn speaks(&self, direction: Direction) -> bool {
        match direction {
            Direction::Ingress => self.head.ingress,
            Direction::Egress => self.head.egress,
        }
    }
}

impl Policies {
    /// Converts a policy to its stored form, and records the message for its author.
    pub(crate) fn take_note(&mut self, id: &PolicyId, policy: Option<Compiled>) -> Option<Policy> {
        self.notes.remove(id);
        let policy = policy?;
        let note = match policy.not_understood {
            Some(problem) => Some(Note {
                text: format!(
                    "{problem}; it denies everything, at its place, to the endpoints that it selects"
                ),
                not_understood: true,
            }),
            None if policy.left_out.is_empty() => None,
            None => Some(Note { text: policy.left_out.join("; "), not_understood: false }),
        };
        self.notes.extend(note.map(|note| (policy.id.clone(), note)));
        let Compiled { id, tier, order, hook, selector, ingress, egress, rules, sets, .. } = policy;
        let shared = self.by_tier.get_key_value(tier.as_str()).map(|(tier, _)| tier.clone());
        let tier = shared.unwrap_or_else(|| tier.into());
        let head = Arc::new(Head { tier, order, hook, selector, ingress, egress });
        let load = Load::of(&rules);
        Some(Policy { id, head, body: Body::new(rules, sets), load, endpoints: Numbers::default() })
    }

    /// Whether a policy of the same id has the same position and selector.
    pub(crate) fn keeps_head(&self, new: &Policy) -> bool {
        self.known(&new.id).is_some_and(|old| old.head == new.head)
    }

    /// Replaces a policy's body; returns whether it has changed, and the endpoints whose load changes with it.
    pub(crate) fn replace_body(&mut self, new: Policy) -> (bool, Vec<No>) {
        let no = self.number(&new.id);
        let Some(old) = no.and_then(|no| self.table.get_mut(no)) else { return (false, Vec::new()) };
        let changed = old.body != new.body;
        old.body = new.body;
        let heavier = old.load != new.load;
        old.load = new.load;
        (changed, old.endpoints.iter().filter(|_| heavier).collect())
    }

    /// Adds a policy with an unused id; `demands` are its selector's restrictions.
    pub(crate) fn insert(&mut self, policy: Policy, demands: &Restrictions<'_>) -> No {
        let (id, tier) = (policy.id.clone(), policy.head.tier.clone());
        let no = self.table.insert(policy);
        self.numbers.insert(&id, no);
        self.by_selector.insert(no, demands);
        self.by_tier.entry(tier).or_default().insert(no);
        no
    }

    /// Removes a policy; returns its number, and the endpoints of this node that it selected.
    pub(crate) fn remove(&mut self, id: &PolicyId) -> Option<(No, Numbers)> {
        let no = self.number(id)?;
        self.numbers.remove(id, no);
        let policy = self.table.remove(no)?;
        self.by_selector.remove(no, &policy.head.selector.restrictions());
        if let Some(others) = self.by_tier.get_mut(&policy.head.tier) {
            others.remove(&no);
            if others.is_empty() {
                self.by_tier.remove(&policy.head.tier);
            }
        }
        Some((no, policy.endpoints))
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        let kept = self.numbers.is_empty() && self.table.is_empty() && self.profiles.is_empty();
        kept && self.by_selector.is_empty() && self.by_tier.is_empty() && self.notes.is_empty()
    }

    /// The number of policies that are evaluated for a subject with these labels.
    #[cfg(test)]
    pub(crate) fn candidates(&self, labels: &SubjectLabels) -> usize {
        self.by_selector.candidates(labels).len()
    }

    fn known(&self, id: &PolicyId) -> Option<&Policy> {
        self.number(id).and_then(|no| self.table.get(no))
    }

    fn number(&self, id: &PolicyId) -> Option<No> {
        self.numbers.get(id, |no| self.table.get(no).is_some_and(|policy| policy.id == *id))
    }

    /// The policies that select a subject with these labels.
    pub(crate) fn selecting(&self, labels: &SubjectLabels) -> Numbers {
        let selects = |no: &No| self.table.get(*no).is_some_and(|policy| policy.head.is_about(labels));
        self.by_selector.candidates(labels).into_iter().filter(selects).collect()
    }

    /// Records that the policy selects the endpoint.
    pub(crate) fn link(&mut self, no: No, endpoint: No) {
        if let Some(policy) = self.table.get_mut(no) {
            policy.endpoints.insert(endpoint);
        }
    }

    /// Records that the policy no longer selects the endpoint.
    pub(crate) fn unlink(&mut self, no: No, endpoint: No) {
        if let Some(policy) = self.table.get_mut(no) {
            policy.endpoints.remove(endpoint);
        }
    }

    /// Ingests a tier; returns the endpoints with policies in it.
    pub(crate) fn update_tier(&mut self, name: &str, tier: Option<TierSettings>) -> Numbers {
        if !self.tiers.update(name, tier) {
            return Numbers::default();
        }
        let policies = self.by_tier.get(name).into_iter().flatten().filter_map(|no| self.table.get(*no));
        policies.flat_map(|policy| policy.endpoints.iter()).collect()
    }

    /// Ingests the rules of a profile; returns whether they have changed.
    pub(crate) fn update_profile(&mut self, name: &str, body: Option<Body>) -> bool {
        let before = match body.clone() {
            Some(body) => self.profiles.insert(name.to_owned(), body),
            None => self.profiles.remove(name),
        };
        before != body
    }

    pub(crate) fn has_profile(&self, name: &str) -> bool {
        self.profiles.contains_key(name)
    }

    /// The tiers of these policies for packets into an endpoint and out of it, as far as they apply.
    pub(crate) fn tiers_of(
        &self,
        policies: &Numbers,
        is_in_table: impl Fn(Hook) -> bool,
    ) -> (Vec<TierProgram>, Vec<TierProgram>) {
        let selected = policies.iter().filter_map(|no| self.table.get(no));
        let mut selected: Vec<&Policy> = selected.filter(|policy| is_in_table(policy.head.hook)).collect();
        let is_closed = self.problem_of_pod(policies).is_some();
        if is_closed {
            keep_the_first(&mut selected, &self.tiers);
        }
        selected.sort_by(|a, b| a.head.compare(&b.head, &self.tiers));
        let tiers = |direction| self.tiers(&selected, direction, is_closed);
        (tiers(Direction::Ingress), tiers(Direction::Egress))
    }

    /// Why the namespaced policies of a pod with these policies deny everything, if they ask for too much.
    pub(crate) fn problem_of_pod(&self, policies: &Numbers) -> Option<String> {
        // Policies of the whole cluster do not count: who writes them is trusted with all nodes.
        let namespaced = policies.iter().filter_map(|no| self.table.get(no)).filter(|it| it.is_namespaced());
        namespaced.fold(Load::default(), |sum, policy| sum.and(policy.load)).problem()
    }

    /// The tiers of policies in order. A tier counts only if one of its policies applies (policy decision 8). If the pod's policies ask
    /// for too much, a tier ends where its first namespaced policy is.
    fn tiers(&self, selected: &[&Policy], direction: Direction, is_closed: bool) -> Vec<TierProgram> {
        let speaking: Vec<&Policy> =
            selected.iter().filter(|policy| policy.speaks(direction)).copied().collect();
        let of_one_tier = speaking.chunk_by(|a, b| a.head.tier == b.head.tier);
        let tier = |policies: &[&Policy]| {
            let name = &policies.first()?.head.tier;
            let closes = policies.iter().position(|policy| is_closed && policy.is_namespaced());
            let kept = &policies[..closes.unwrap_or(policies.len())];
            Some(TierProgram {
                name: name.clone(),
                policies: kept.iter().map(|policy| policy.id.clone()).collect(),
                end: if closes.is_some() { EndOfTier::Deny } else { self.tiers.end_of(name) },
            })
        };
        let mut tiers: Vec<TierProgram> = of_one_tier.filter_map(tier).collect();
        tiers.shrink_to_fit();
        tiers
    }

    /// The body of a policy or profile. A profile that is not stored belongs to a namespace.
    pub(crate) fn body(&self, id: &PolicyId) -> Body {
        let stored = match id.kind {
            PolicyKind::Profile => self.profiles.get(&*id.name).or(Some(&self.allow_everything)),
            _ => self.known(id).map(|policy| &policy.body),
        };
        stored.cloned().unwrap_or_else(|| Body::new(Arc::default(), BTreeMap::new()))
    }

    pub(crate) fn findings(&self) -> impl Iterator<Item = Finding> {
        let lost = self.by_tier.iter().filter(|(tier, _)| !self.tiers.is_known(tier));
        let lost = lost.flat_map(|(_, policies)| policies).filter_map(|no| self.table.get(*no));
        let understood =
            lost.filter(|policy| !self.notes.get(&policy.id).is_some_and(|note| note.not_understood));
        let lost = understood.map(|policy| Finding {
            key: key(&policy.id),
            reason: Reason::NotUnderstood,
            problem: format!(
                "spec.tier: tier {} does not exist; the policy comes after all tiers that do, and its tier ends with Deny",
                policy.head.tier
            ),
        });
        let tier_is_known =
            |id: &PolicyId| self.known(id).is_some_and(|policy| self.tiers.is_known(&policy.head.tier));
        let notes = self.notes.iter().filter(move |(id, note)| note.not_understood || tier_is_known(id));
        let note = |(id, note): (&PolicyId, &Note)| {
            let (key, problem) = (key(id), note.text.clone());
            Finding { key, reason: Reason::NotUnderstood, problem }
        };
        lost.chain(notes.map(note))
    }
}

/// Removes the namespaced policies of a pod whose policies ask for too much, except for the first one of each tier and direction. That
/// one is where the tier then ends.
fn keep_the_first(selected: &mut Vec<&Policy>, tiers: &Tiers) {
    let mut first: BTreeMap<(&str, Direction), &Policy> = BTreeMap::new();
    for policy in selected.iter().copied().filter(|policy| policy.is_namespaced()) {
        for direction in [Direction::Ingress, Direction::Egress] {
            if policy.speaks(direction) {
                let known = first.entry((&*policy.head.tier, direction)).or_insert(policy);
                if policy.head.compare(&known.head, tiers).is_lt() {
                    *known = policy;
                }
            }
        }
    }
    selected.retain(|policy| {
        !policy.is_namespaced() || first.values().any(|first| std::ptr::eq(*first, *policy))
    });
}

fn key(id: &PolicyId) -> Key {
    Key { kind: id.kind.kind(), namespace: id.namespace.to_string(), name: id.name.to_string() }
}
