//! The policies, and which of them select an endpoint.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::Key;
use tortie_api::net::Direction;
use tortie_policy::program::{EndOfTier, PolicyId, PolicyKind, PolicyRules, SetId, TierProgram};
use tortie_policy::{Compiled, SetSource, compile, namespace_profile, policy_id};
use tortie_selector::{Labels, Selector};

use crate::Finding;
use crate::cluster::Cluster;

#[derive(Default)]
pub(crate) struct Policies {
    compiled: BTreeMap<PolicyId, (Key, Compiled)>,
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

    /// The tiers that apply to an endpoint with these labels: for packets into it, and out of it.
    pub(crate) fn tiers_of(&self, labels: &impl Labels) -> (Vec<TierProgram>, Vec<TierProgram>) {
        let mut selected: Vec<&Compiled> = self
            .compiled
            .values()
            .map(|(_, policy)| policy)
            .filter(|policy| policy.selector.matches(labels))
            .collect();
        selected.sort_by(|a, b| a.order.cmp(&b.order));
        let tier = |direction: Direction| {
            let speaks = |policy: &&&Compiled| match direction {
                Direction::Ingress => policy.ingress,
                Direction::Egress => policy.egress,
            };
            let policies: Vec<PolicyId> =
                selected.iter().filter(speaks).map(|policy| policy.id.clone()).collect();
            // A tier counts only where a policy of it applies (semantics 8).
            if policies.is_empty() {
                return Vec::new();
            }
            vec![TierProgram { name: "default".to_owned(), policies, end: EndOfTier::Deny }]
        };
        (tier(Direction::Ingress), tier(Direction::Egress))
    }

    /// The rules of a policy or profile, and what the sets are that they name.
    pub(crate) fn rules(&self, id: &PolicyId) -> (Arc<PolicyRules>, BTreeMap<SetId, SetSource>) {
        if id.kind == PolicyKind::Profile {
            let namespace = id.name.strip_prefix("kns.").unwrap_or(&id.name);
            return (Arc::new(namespace_profile(namespace).1), BTreeMap::new());
        }
        match self.compiled.get(id) {
            Some((_, policy)) => (policy.rules.clone(), policy.sets.clone()),
            None => (Arc::new(PolicyRules::default()), BTreeMap::new()),
        }
    }

    pub(crate) fn findings(&self) -> impl Iterator<Item = Finding> {
        self.compiled.values().filter_map(|(key, policy)| {
            let problem = policy.not_understood.as_ref()?;
            let problem =
                format!("{problem}; it denies everything, at its place, to the endpoints that it selects");
            Some(Finding { key: key.clone(), problem })
        })
    }
}
