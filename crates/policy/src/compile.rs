//! Compiles policy objects to rules over sets.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::calico::{PolicyType, Profile};
use tortie_api::net::{Action, Protocol};
use tortie_api::{Key, Kind, Resource, in_words};
use tortie_selector::Selector;

use crate::labels::of_namespace;
use crate::program::{PolicyId, PolicyKind, PolicyRules, Rule, SetId, SetKind};
use crate::{calico, cluster, kubernetes};

/// A compiled policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// The id of the policy.
    pub id: PolicyId,
    /// The name of its tier.
    pub tier: String,
    /// Its position in its tier.
    pub order: Order,
    /// The hooks at which it is evaluated.
    pub hook: Hook,
    /// Selects its endpoints, by their [`SubjectLabels`](crate::SubjectLabels).
    pub selector: Selector,
    /// Whether it applies to packets into them.
    pub ingress: bool,
    /// Whether it applies to packets out of them.
    pub egress: bool,
    /// Its rules.
    pub rules: Arc<PolicyRules>,
    /// The sources of the sets that the rules name.
    pub sets: BTreeMap<SetId, SetSource>,
    /// Criteria that were understood but cannot be enforced, and are therefore left out (policy decision 15).
    pub left_out: Vec<String>,
    /// The problem, if the policy was not understood; it then denies.
    pub not_understood: Option<String>,
}

/// The hooks on a packet's way at which a policy is evaluated (policy decision 16).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// At pods, and at host endpoints for packets from and to the host itself.
    #[default]
    Normal,
    /// As `Normal`, and at host endpoints for packets that the host forwards.
    AlsoForwarded,
    /// At host endpoints only, before connection tracking.
    Untracked,
    /// At host endpoints only, before the translation of Services' addresses.
    PreDnat,
    /// At every hook: the policy was not understood, and its hook is unreadable.
    Everywhere,
}

impl Hook {
    /// Whether policies of this hook are evaluated for packets from and to pods.
    #[must_use]
    pub fn is_for_pods(self) -> bool {
        matches!(self, Self::Normal | Self::AlsoForwarded | Self::Everywhere)
    }
}

/// The source of the members of a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetSource {
    /// The addresses of everything that the selector matches.
    Selector(Selector),
    /// The ports of this name, with this protocol if one is given, on the endpoints that the selector matches.
    NamedPort {
        /// The endpoints.
        selector: Selector,
        /// The protocol of the declaration.
        protocol: Option<Protocol>,
        /// The name.
        name: String,
    },
    /// The backends of a Service.
    Service {
        /// The Service's namespace.
        namespace: String,
        /// The Service's name.
        name: String,
        /// Whether the backends' protocols and ports count, or only their addresses.
        with_ports: bool,
    },
}

impl SetSource {
    /// The kind of the members.
    #[must_use]
    pub fn kind(&self) -> SetKind {
        match self {
            Self::Selector(_) | Self::Service { with_ports: false, .. } => SetKind::Nets,
            Self::NamedPort { .. } | Self::Service { with_ports: true, .. } => SetKind::AddressPorts,
        }
    }
}

/// The position of a policy in its tier: `order` ascending, absent last, then by "name/namespace/kind" (policy
/// decision 7).
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    order: Option<f64>,
    id: PolicyId,
}

impl Order {
    pub(crate) fn new(order: Option<f64>, id: &PolicyId) -> Self {
        // -0 is 0.
        Self { order: order.map(|order| order + 0.0), id: id.clone() }
    }

    /// "name/namespace/kind", as bytes. The string is not built, because a cluster has many policies, of which few
    /// are compared.
    fn tie(&self) -> impl Iterator<Item = u8> {
        // As Calico spells them in its model (`libcalico-go/lib/backend/model/policy.go`).
        let kind = match self.id.kind {
            PolicyKind::AdminNetworkPolicy => "KubernetesAdminNetworkPolicy",
            PolicyKind::BaselineAdminNetworkPolicy => "KubernetesBaselineAdminNetworkPolicy",
            PolicyKind::ClusterNetworkPolicy => "KubernetesClusterNetworkPolicy",
            PolicyKind::GlobalNetworkPolicy => "GlobalNetworkPolicy",
            PolicyKind::KubernetesNetworkPolicy => "KubernetesNetworkPolicy",
            PolicyKind::NetworkPolicy => "NetworkPolicy",
            PolicyKind::Profile => "Profile",
        };
        let parts = [&*self.id.name, "/", &*self.id.namespace, "/", kind];
        parts.into_iter().flat_map(str::bytes)
    }
}

impl Eq for Order {}

impl PartialOrd for Order {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Order {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = |order: Option<f64>| order.unwrap_or(f64::INFINITY);
        order(self.order).total_cmp(&order(other.order)).then_with(|| self.tie().cmp(other.tie()))
    }
}

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
            Some("Ingress") => Some(PolicyType::Ingress),
            Some("Egress") => Some(PolicyType::Egress),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The comparison is of texts, in which a name that begins another may come after it, because `/` is after `-`
    /// and `.`.
    #[test]
    fn policies_of_one_order_come_by_name_namespace_and_kind() {
        let kinds = [PolicyKind::KubernetesNetworkPolicy, PolicyKind::NetworkPolicy];
        let ids = ["a", "a-b", "a.b", "a0", "b"].into_iter().flat_map(|name| {
            let named = move |namespace: &'static str, kind| PolicyId {
                kind,
                namespace: namespace.into(),
                name: name.into(),
            };
            ["", "n", "n-m"].into_iter().flat_map(move |space| kinds.map(|kind| named(space, kind)))
        });
        let mut orders: Vec<Order> = ids.map(|id| Order::new(Some(1000.0), &id)).collect();
        orders.sort();
        let texts: Vec<String> = orders
            .iter()
            .map(|Order { id, .. }| format!("{}/{}/{}", id.name, id.namespace, id.kind.kind()))
            .collect();
        assert!(texts.is_sorted(), "{texts:?}");
    }
}
