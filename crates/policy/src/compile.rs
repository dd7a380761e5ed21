//! Compiles policy objects to rules over sets.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::calico::{PolicyType, Profile};
use tortie_api::net::Action;
use tortie_api::{Key, Kind, Resource, in_words};
use tortie_selector::Selector;

use crate::compiled::{Compiled, Hook, Order, SetSource};
use crate::labels::of_namespace;
use crate::program::{PolicyId, PolicyKind, PolicyRules, Rule, SetId};
use crate::{calico, cluster, kubernetes};

/// The id of the policy with this key, if its kind is a policy kind.
#[must_use]
pub fn policy_id(key: &Key) -> Option<PolicyId> {
    let kind = match key.kind {
        Kind::NetworkPolicy => PolicyKind::NetworkPolicy,
        Kind::GlobalNetworkPolicy => PolicyKind::GlobalNetworkPolicy,
        Kind::KubernetesNetworkPolicy => PolicyKind::KubernetesNetworkPolicy,
        Kind::ClusterNetworkPolicy => PolicyKind::ClusterNetworkPolicy,
        Kind::AdminNetworkPolicy => PolicyKind::AdminNetworkPolicy,
        Kind::BaselineAdminNetworkPolicy => PolicyKind::BaselineAdminNetworkPolicy,
        _ => return None,
    };
    Some(PolicyId { kind, namespace: key.namespace.as_str().into(), name: key.name.as_str().into() })
}

/// Compiles the stored policy with this key; `None` if the kind is not a policy kind.
#[must_use]
pub fn compile(key: &Key, value: &Value) -> Option<Compiled> {
    let id = policy_id(key)?;
    let read = Resource::read(key, value);
    let compiled = read.map(|policy| compile_read(key, &policy));
    Some(match compiled {
        Ok(Some(compiled)) => compiled,
        Ok(None) => closed(id, value, "its kind is not a policy's".to_owned()),
        Err(problems) => closed(id, value, in_words(&problems)),
    })
}

/// Compiles the policy that was read for this key; `None` if it is not a policy.
#[must_use]
pub fn compile_read(key: &Key, policy: &Resource) -> Option<Compiled> {
    let id = policy_id(key)?;
    match policy {
        Resource::NetworkPolicy(policy) => Some(calico::compile(id, &policy.spec)),
        Resource::GlobalNetworkPolicy(policy) => Some(calico::compile(id, &policy.spec)),
        Resource::KubernetesNetworkPolicy(policy) => Some(kubernetes::compile(id, policy)),
        Resource::ClusterPolicy(policy) => Some(cluster::compile(id, policy)),
        _ => None,
    }
}

/// Compiles a profile: its rules, and the sources of the sets that they name.
#[must_use]
pub fn compile_profile(profile: &Profile) -> (PolicyRules, BTreeMap<SetId, SetSource>) {
    let mut sets = BTreeMap::new();
    let mut rules = |rules| calico::compile_rules(&Arc::default(), rules, &mut sets);
    let (ingress, egress) = (rules(&profile.spec.ingress), rules(&profile.spec.egress));
    (PolicyRules { ingress, egress }, sets)
}

/// Compiles a policy that was not understood (policy decision 18): Deny in the directions that it names (both if
/// unreadable), at its position in the order, for the endpoints that it selects (all of its namespace if unreadable).
fn closed(id: PolicyId, value: &Value, problem: String) -> Compiled {
    let spec = value.get("spec").unwrap_or(&Value::Null);
    let (tier, order, selector, (ingress, egress)) = match id.kind {
        PolicyKind::KubernetesNetworkPolicy => {
            let pods =
                kubernetes::readable_selector(&id.namespace, spec.get("podSelector").unwrap_or(&Value::Null));
            ("default".to_owned(), Some(kubernetes::ORDER), pods, named_directions(spec.get("policyTypes")))
        }
        PolicyKind::ClusterNetworkPolicy => cluster::readable(spec, None),
        PolicyKind::AdminNetworkPolicy => cluster::readable(spec, Some("kube-admin")),
        PolicyKind::BaselineAdminNetworkPolicy => cluster::readable(spec, Some("kube-baseline")),
        _ => (
            readable_tier(spec),
            readable_order(spec),
            readable_selector(&id, spec),
            named_directions(spec.get("types")),
        ),
    };
    let deny = |named: bool| if named { vec![Rule::all(Action::Deny)] } else { Vec::new() };
    Compiled {
        tier,
        order: Order::new(order, &id),
        hook: readable_hook(id.kind, spec),
        selector,
        ingress,
        egress,
        rules: Arc::new(PolicyRules { ingress: deny(ingress), egress: deny(egress) }),
        sets: BTreeMap::new(),
        left_out: Vec::new(),
        not_understood: Some(problem),
        id,
    }
}

/// The hook of a policy that was not understood: every hook if it is unreadable.
fn readable_hook(kind: PolicyKind, spec: &Value) -> Hook {
    if kind != PolicyKind::GlobalNetworkPolicy {
        return Hook::Normal;
    }
    let read = |field: &str| match spec.get(field) {
        None | Some(Value::Null) => Some(false),
        Some(given) => given.as_bool(),
    };
    match (read("doNotTrack"), read("preDNAT"), read("applyOnForward")) {
        (Some(true), Some(false), Some(_)) => Hook::Untracked,
        (Some(false), Some(true), Some(_)) => Hook::PreDnat,
        (Some(false), Some(false), Some(true)) => Hook::AlsoForwarded,
        (Some(false), Some(false), Some(false)) => Hook::Normal,
        _ => Hook::Everywhere,
    }
}

/// The tier of a policy that was not understood. An unreadable tier becomes the tier without a name, which comes
/// before all others.
fn readable_tier(spec: &Value) -> String {
    let tier = match spec.get("tier") {
        None | Some(Value::Null) => "default",
        Some(tier) => match tier.as_str() {
            Some("") => "default",
            Some(tier) => tier,
            None => "",
        },
    };
    tier.to_owned()
}

/// The `order` of a policy or tier that was not understood. An unreadable order comes first, so that nothing opens
/// that the object was meant to precede.
#[must_use]
pub fn readable_order(spec: &Value) -> Option<f64> {
    match spec.get("order") {
        None | Some(Value::Null) => None,
        Some(order) => Some(order.as_f64().unwrap_or(f64::NEG_INFINITY)),
    }
}

fn named_directions(types: Option<&Value>) -> (bool, bool) {
    let Some(types) = types.and_then(Value::as_array) else {
        return (true, true);
    };
    let types: Option<Vec<PolicyType>> = types
        .iter()
        .map(|name| match name.as_str() {
            Some(word) if word.eq_ignore_ascii_case("Ingress") => Some(PolicyType::Ingress),
            Some(word) if word.eq_ignore_ascii_case("Egress") => Some(PolicyType::Egress),
            _ => None,
        })
        .collect();
    match types {
        Some(types) if !types.is_empty() => {
            (types.contains(&PolicyType::Ingress), types.contains(&PolicyType::Egress))
        }
        _ => (true, true),
    }
}

/// The endpoints that the policy selects, if every criterion of its subject is readable; otherwise all that it could
/// select.
fn readable_selector(id: &PolicyId, spec: &Value) -> Selector {
    let everything = || match &*id.namespace {
        "" => Selector::all(),
        _ => of_namespace(&id.namespace),
    };
    let narrowing = ["selector", "namespaceSelector", "serviceAccountSelector"];
    let mut selectors = Vec::new();
    for field in narrowing {
        match spec.get(field) {
            None | Some(Value::Null) => selectors.push(None),
            Some(Value::String(text)) if text.is_empty() => selectors.push(None),
            Some(text) => match text.as_str().map(Selector::parse) {
                Some(Ok(selector)) => selectors.push(Some(selector)),
                _ => return everything(),
            },
        }
    }
    match selectors.as_slice() {
        [selector, namespaces, accounts] => {
            calico::selected(id, selector.as_ref(), namespaces.as_ref(), accounts.as_ref())
        }
        _ => everything(),
    }
}
