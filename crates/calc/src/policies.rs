//! The policies, and which of them select an endpoint.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::calico::{TierDefault, WELL_KNOWN_TIERS};
use tortie_api::net::{Action, Direction};
use tortie_api::{Key, Resource};
use tortie_policy::program::{EndOfTier, PolicyId, PolicyKind, PolicyRules, Rule, SetId, TierProgram};
use tortie_policy::{
    Compiled, SetSource, compile, compile_profile, in_words, namespace_profile, policy_id, readable_order,
};
use tortie_selector::{Labels, Selector};

use crate::Finding;
use crate::cluster::Cluster;

#[derive(Default)]
pub(crate) struct Policies {
    compiled: BTreeMap<PolicyId, (Key, Compiled)>,
    /// Order and end of the tiers that are stored.
    tiers: BTreeMap<String, (Option<f64>, EndOfTier)>,
    profiles: BTreeMap<String, CompiledProfile>,
    problems: BTreeMap<Key, String>,
}

struct CompiledProfile {
    rules: Arc<PolicyRules>,
    sets: BTreeMap<SetId, SetSource>,
}

impl Policies {
    /// Takes in a policy; says which of the node's endpoints it selects or did select.
    pub(crate) fn update(
        &mut self,
        key: &Key,
        value: Option<&Value>,
        cluster: &Cluster,
        node: &str,
    ) -> Vec<Key> {
        let Some(id) = policy_id(key) else { return Vec::new() };
        let new = value.and_then(|value| compile(key, value));
        let old = match new.clone() {
            Some(new) => self.compiled.insert(id, (key.clone(), new)),
            None => self.compiled.remove(&id),
        };
        let old = old.map(|(_, old)| old);
        if old == new {
            return Vec::new();
        }
        let selectors: Vec<Selector> = old.into_iter().chain(new).map(|policy| policy.selector).collect();
        let local = cluster.endpoints().filter(|(_, endpoint)| endpoint.spec.node == node);
        local
            .filter(|(_, endpoint)| selectors.iter().any(|selector| selector.matches(&endpoint.labels)))
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// Takes in a tier. Every endpoint may have it in its program.
    pub(crate) fn update_tier(&mut self, key: &Key, value: Option<&Value>) {
        self.problems.remove(key);
        let tier = value.map(|value| Resource::read(key, value));
        let known = match tier {
            Some(Ok(Resource::Tier(tier))) => {
                let end = match tier.spec.default_action.unwrap_or_default() {
                    TierDefault::Deny => EndOfTier::Deny,
                    TierDefault::Pass => EndOfTier::Pass,
                };
                Some((tier.spec.order, end))
            }
            Some(Err(problems)) => {
                let problem = in_words(&problems);
                let place =
                    "the tier comes where it stands, or first if that cannot be read, and ends with Deny";
                self.problems.insert(key.clone(), format!("{problem}; {place}"));
                let order = value.and_then(|value| readable_order(&value["spec"]));
                Some((order, EndOfTier::Deny))
            }
            Some(Ok(_)) => None,
            None => None,
        };
        match known {
            Some(known) => drop(self.tiers.insert(key.name.clone(), known)),
            None => drop(self.tiers.remove(&key.name)),
        }
    }

    /// Takes in a profile. One that cannot be understood denies everything.
    pub(crate) fn update_profile(&mut self, key: &Key, value: Option<&Value>) {
        self.problems.remove(key);
        self.profiles.remove(&key.name);
        let profile = match value.map(|value| Resource::read(key, value)) {
            None => return,
            Some(Ok(Resource::Profile(profile))) => {
                let (rules, sets) = compile_profile(&profile);
                CompiledProfile { rules: Arc::new(rules), sets }
            }
            Some(Ok(_)) => return,
            Some(Err(problems)) => {
                self.problems.insert(key.clone(), format!("{}; it denies everything", in_words(&problems)));
                let deny = vec![Rule::all(Action::Deny)];
                let rules = PolicyRules { ingress: deny.clone(), egress: deny };
                CompiledProfile { rules: Arc::new(rules), sets: BTreeMap::new() }
            }
        };
        self.profiles.insert(key.name.clone(), profile);
    }

    pub(crate) fn has_profile(&self, name: &str) -> bool {
        self.profiles.contains_key(name)
    }

    /// The tiers that apply to an endpoint with these labels: for packets into it, and out of it.
    pub(crate) fn tiers_of(&self, labels: &impl Labels) -> (Vec<TierProgram>, Vec<TierProgram>) {
        let mut selected: Vec<&Compiled> = self
            .compiled
            .values()
            .map(|(_, policy)| policy)
            .filter(|policy| policy.hook.is_for_pods() && policy.selector.matches(labels))
            .collect();
        selected.sort_by(|a, b| {
            self.tier_order(&a.tier).cmp(&self.tier_order(&b.tier)).then_with(|| a.order.cmp(&b.order))
        });
        let tiers = |direction: Direction| {
            let speaks = |policy: &&&Compiled| match direction {
                Direction::Ingress => policy.ingress,
                Direction::Egress => policy.egress,
            };
            // A tier counts only where a policy of it applies (semantics 8).
            let mut tiers: Vec<TierProgram> = Vec::new();
            for policy in selected.iter().filter(speaks) {
                match tiers.last_mut().filter(|tier| tier.name == policy.tier) {
                    Some(tier) => tier.policies.push(policy.id.clone()),
                    None => tiers.push(TierProgram {
                        name: policy.tier.clone(),
                        policies: vec![policy.id.clone()],
                        end: self.end_of(&policy.tier),
                    }),
                }
            }
            tiers
        };
        (tiers(Direction::Ingress), tiers(Direction::Egress))
    }

    /// Known tiers before unknown ones, by order (absent is last), then by name (semantics 7). First of all comes the
    /// tier without a name, of policies whose tier cannot be read.
    fn tier_order<'a>(&self, name: &'a str) -> (bool, TierPlace, &'a str) {
        if name.is_empty() {
            return (false, TierPlace(f64::NEG_INFINITY), name);
        }
        let known = self.tiers.get(name).map(|(order, _)| *order);
        let well_known =
            || WELL_KNOWN_TIERS.iter().find(|(tier, ..)| *tier == name).map(|(_, order, _)| Some(*order));
        // Where the tiers that every cluster has stand is not for anybody to say.
        let order = well_known().or(known);
        (order.is_none(), TierPlace(order.flatten().unwrap_or(f64::INFINITY)), name)
    }

    fn is_known_tier(&self, name: &str) -> bool {
        self.tiers.contains_key(name) || WELL_KNOWN_TIERS.iter().any(|(known, ..)| *known == name)
    }

    fn end_of(&self, name: &str) -> EndOfTier {
        let well_known = || WELL_KNOWN_TIERS.iter().find(|(tier, ..)| *tier == name).map(|(_, _, end)| *end);
        match (self.tiers.get(name), well_known()) {
            (Some((_, end)), _) => *end,
            (None, Some(TierDefault::Pass)) => EndOfTier::Pass,
            (None, _) => EndOfTier::Deny,
        }
    }

    /// The rules of a policy or profile, and what the sets are that they name.
    pub(crate) fn rules(&self, id: &PolicyId) -> (Arc<PolicyRules>, BTreeMap<SetId, SetSource>) {
        if id.kind == PolicyKind::Profile {
            if let Some(profile) = self.profiles.get(&id.name) {
                return (profile.rules.clone(), profile.sets.clone());
            }
            let namespace = id.name.strip_prefix("kns.").unwrap_or(&id.name);
            return (Arc::new(namespace_profile(namespace).1), BTreeMap::new());
        }
        match self.compiled.get(id) {
            Some((_, policy)) => (policy.rules.clone(), policy.sets.clone()),
            None => (Arc::new(PolicyRules::default()), BTreeMap::new()),
        }
    }

    pub(crate) fn findings(&self) -> impl Iterator<Item = Finding> {
        let others =
            self.problems.iter().map(|(key, problem)| Finding { key: key.clone(), problem: problem.clone() });
        let policies = self.compiled.values().filter_map(|(key, policy)| {
            let problem = match &policy.not_understood {
                Some(problem) => {
                    format!("{problem}; it denies everything, at its place, to the endpoints that it selects")
                }
                None if !self.is_known_tier(&policy.tier) => format!(
                    "spec.tier: tier {} does not exist; the policy comes after all tiers that do, and its tier ends with Deny",
                    policy.tier
                ),
                None if !policy.left_out.is_empty() => policy.left_out.join("; "),
                None => return None,
            };
            Some(Finding { key: key.clone(), problem })
        });
        policies.chain(others)
    }
}

/// The order of a tier, totally ordered.
#[derive(PartialEq)]
struct TierPlace(f64);

impl Eq for TierPlace {}

impl PartialOrd for TierPlace {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TierPlace {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}
