//! The tiers and policies, their order of evaluation, and the endpoints to which they apply.

use std::cmp::Ordering;

use serde_json::Value;
use tortie_api::calico::{PolicySpec, PolicyType, TierDefault, WELL_KNOWN_TIERS};
use tortie_api::kubernetes::{ClusterPeer, ClusterPolicy, LabelSelector, NetworkPolicySpec};
use tortie_api::net::Direction;
use tortie_api::{Key, Kind, Resource};
use tortie_selector::{NAMESPACE_LABEL, Selector};

use super::endpoint::JudgedEndpoint;
use super::snapshot::{Snapshot, Stored};
use super::trace::{PolicyName, Table};
use super::world::Identity;
use super::{calico, cluster, kubernetes};

/// A label that only endpoints with a service account have.
const SERVICE_ACCOUNT: &str = "projectcalico.org/serviceaccount";
/// The order of Kubernetes policies among Calico's (`libcalico-go/lib/backend/k8s/conversion/conversion.go`).
const KUBERNETES_ORDER: f64 = 1000.0;

/// A tier, with its policies in order.
pub(super) struct Tier<'a> {
    pub(super) name: String,
    pub(super) end: TierDefault,
    pub(super) policies: Vec<Policy<'a>>,
}

pub(super) struct Policy<'a> {
    pub(super) name: PolicyName,
    pub(super) stored: &'a Stored,
    pub(super) staged: bool,
    pub(super) rules: Rules<'a>,
    hook: Hook,
    order: Option<f64>,
    types: Vec<PolicyType>,
    subject: PolicySubject<'a>,
}

/// The hooks on a packet's way at which a policy is evaluated (policy decision 16).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hook {
    Normal,
    /// As `Normal`, and for packets that a host forwards.
    AlsoForwarded,
    Untracked,
    PreDnat,
    /// In every table: the policy was not understood, and its hook is unreadable.
    Everywhere,
}

pub(super) enum Rules<'a> {
    Calico(&'a PolicySpec),
    Kubernetes(&'a NetworkPolicySpec),
    Cluster(&'a ClusterPolicy),
    /// The problem.
    NotUnderstood(String),
}

/// The endpoints to which a policy applies.
enum PolicySubject<'a> {
    Calico {
        namespaces: Option<Selector>,
        accounts: Option<Selector>,
        selector: Option<Selector>,
    },
    Kubernetes(&'a LabelSelector),
    Cluster(ClusterPeer),
    /// The readable selector of a policy that was not understood.
    KubernetesRead(LabelSelector),
    /// All endpoints of the policy's namespace, or of the cluster if it has none.
    All,
    /// All pods, and no host endpoint.
    AllPods,
}

/// Every tier that has policies, in order (policy decision 7).
pub(super) fn tiers(snapshot: &Snapshot) -> Vec<Tier<'_>> {
    let mut tiers: Vec<(TierPosition, Tier<'_>)> = Vec::new();
    for (key, stored) in snapshot.iter() {
        let Some((tier, policy)) = policy(key, stored) else { continue };
        match tiers.iter_mut().find(|(_, known)| known.name == tier) {
            Some((_, known)) => known.policies.push(policy),
            None => {
                let (position, end) = described(snapshot, &tier);
                tiers.push((position, Tier { name: tier, end, policies: vec![policy] }));
            }
        }
    }
    tiers.sort_by(|(a, known), (b, other)| {
        a.unknown.cmp(&b.unknown).then(ascending(a.order, b.order)).then_with(|| known.name.cmp(&other.name))
    });
    tiers.into_iter().map(|(_, tier)| in_order(tier)).collect()
}

/// The position of a tier. Tiers without an object come last.
struct TierPosition {
    unknown: bool,
    order: Option<f64>,
}

/// The position and default of a tier. A tier that was not understood has its own `order`, or comes first if that is
/// unreadable, and denies at its end. The tier without a name, to which policies with an unreadable tier belong, also
/// comes first and denies.
fn described(snapshot: &Snapshot, name: &str) -> (TierPosition, TierDefault) {
    let position = |order| TierPosition { unknown: false, order };
    if name.is_empty() {
        return (position(Some(f64::NEG_INFINITY)), TierDefault::Deny);
    }
    // Nobody can change the positions of the tiers that every cluster has.
    let well_known = WELL_KNOWN_TIERS.iter().find(|(known, ..)| *known == name);
    if let Some((_, order, end)) = well_known {
        let end = match snapshot.get(&Key::global(Kind::Tier, name)).map(|stored| &stored.resource) {
            None | Some(Ok(_)) => *end,
            Some(Err(_)) => TierDefault::Deny,
        };
        return (position(Some(*order)), end);
    }
    if let Some(stored) = snapshot.get(&Key::global(Kind::Tier, name)) {
        return match &stored.resource {
            Ok(Resource::Tier(tier)) => {
                (position(tier.spec.order), tier.spec.default_action.unwrap_or_default())
            }
            _ => (position(readable_order(&stored.value["spec"])), TierDefault::Deny),
        };
    }
    (TierPosition { unknown: true, order: None }, TierDefault::Deny)
}

fn readable_order(spec: &Value) -> Option<f64> {
    match &spec["order"] {
        Value::Null => None,
        order => Some(order.as_f64().unwrap_or(f64::NEG_INFINITY)),
    }
}

/// Lower first, absent last.
fn ascending(a: Option<f64>, b: Option<f64>) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => Ordering::Equal,
    }
}

/// The tier's policies by `order` ascending, absent last, then by "name/namespace/kind" (policy decision 7).
fn in_order(mut tier: Tier<'_>) -> Tier<'_> {
    tier.policies.sort_by(|a, b| {
        let tie = |policy: &Policy<'_>| {
            let PolicyName { kind, namespace, name } = &policy.name;
            let kind = match kind.as_str() {
                "ClusterNetworkPolicy" | "AdminNetworkPolicy" | "BaselineAdminNetworkPolicy" => {
                    format!("Kubernetes{kind}")
                }
                other => other.to_owned(),
            };
            format!("{name}/{namespace}/{kind}")
        };
        ascending(a.order, b.order).then_with(|| tie(a).cmp(&tie(b)))
    });
    tier
}

/// The policy with this key, and its tier.
fn policy<'a>(key: &Key, stored: &'a Stored) -> Option<(String, Policy<'a>)> {
    let (api, staged) = match key.kind {
        Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => (Api::Calico, false),
        Kind::StagedNetworkPolicy | Kind::StagedGlobalNetworkPolicy => (Api::Calico, true),
        Kind::KubernetesNetworkPolicy => (Api::Kubernetes, false),
        Kind::StagedKubernetesNetworkPolicy => (Api::Kubernetes, true),
        Kind::ClusterNetworkPolicy => (Api::Cluster(None), false),
        Kind::AdminNetworkPolicy => (Api::Cluster(Some("kube-admin")), false),
        Kind::BaselineAdminNetworkPolicy => (Api::Cluster(Some("kube-baseline")), false),
        _ => return None,
    };
    let name =
        PolicyName { kind: key.kind.to_string(), namespace: key.namespace.clone(), name: key.name.clone() };
    let (order, types, subject, rules) = match &stored.resource {
        Ok(Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy)) => {
            of_calico(&policy.spec)
        }
        Ok(Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy)) => {
            of_calico(&policy.spec)
        }
        Ok(Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy)) => {
            let subject = PolicySubject::Kubernetes(&policy.spec.pod_selector);
            let types = policy.effective_types();
            (Some(KUBERNETES_ORDER), types, subject, Rules::Kubernetes(&policy.spec))
        }
        Ok(Resource::ClusterPolicy(policy)) => {
            let spoken = [(PolicyType::Ingress, &policy.ingress), (PolicyType::Egress, &policy.egress)];
            let types = spoken.into_iter().filter(|(_, rules)| !rules.is_empty()).map(|(of, _)| of).collect();
            (
                policy.priority.map(f64::from),
                types,
                PolicySubject::Cluster(policy.subject.clone()),
                Rules::Cluster(policy),
            )
        }
        Ok(_) => not_understood(api, &stored.value, "it is no policy"),
        Err(problem) => not_understood(api, &stored.value, problem),
    };
    let tier = match (api, &stored.value["spec"]["tier"]) {
        (Api::Kubernetes, _) | (Api::Calico, Value::Null) => "default",
        (Api::Calico, Value::String(tier)) if tier.is_empty() => "default",
        (Api::Calico, Value::String(tier)) => tier,
        (Api::Cluster(Some(tier)), _) => tier,
        (Api::Cluster(None), Value::String(tier)) if tier == "Admin" => "kube-admin",
        (Api::Cluster(None), Value::String(tier)) if tier == "Baseline" => "kube-baseline",
        // The tier without a name comes before all others.
        _ => "",
    };
    Some((
        tier.to_owned(),
        Policy { name, stored, staged, hook: hook(key, stored), rules, order, types, subject },
    ))
}

/// The hook of a policy that was not understood; every hook if it is not completely readable.
fn readable_hook(spec: &Value) -> Hook {
    let fields = ["doNotTrack", "preDNAT", "applyOnForward"].map(|field| match &spec[field] {
        Value::Null => Some(false),
        given => given.as_bool(),
    });
    match fields {
        [Some(true), Some(false), Some(_)] => Hook::Untracked,
        [Some(false), Some(true), Some(_)] => Hook::PreDnat,
        [Some(false), Some(false), Some(true)] => Hook::AlsoForwarded,
        [Some(false), Some(false), Some(false)] => Hook::Normal,
        _ => Hook::Everywhere,
    }
}

fn hook(key: &Key, stored: &Stored) -> Hook {
    if !matches!(key.kind, Kind::GlobalNetworkPolicy | Kind::StagedGlobalNetworkPolicy) {
        return Hook::Normal;
    }
    let Ok(Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy)) =
        &stored.resource
    else {
        return readable_hook(&stored.value["spec"]);
    };
    let spec = &policy.spec;
    match (spec.do_not_track, spec.pre_dnat) {
        (true, _) => Hook::Untracked,
        (_, true) => Hook::PreDnat,
        _ if spec.apply_on_forward => Hook::AlsoForwarded,
        _ => Hook::Normal,
    }
}

/// The API of a policy's object.
#[derive(Clone, Copy)]
enum Api {
    Calico,
    Kubernetes,
    /// With its tier, if its kind determines it.
    Cluster(Option<&'static str>),
}

type Parts<'a> = (Option<f64>, Vec<PolicyType>, PolicySubject<'a>, Rules<'a>);

fn of_calico(spec: &PolicySpec) -> Parts<'_> {
    let subject = PolicySubject::Calico {
        namespaces: spec.namespace_selector.clone(),
        accounts: spec.service_account_selector.clone(),
        selector: spec.selector.clone(),
    };
    (spec.order, spec.effective_types(), subject, Rules::Calico(spec))
}

/// A policy that was not understood completely. Its readable parts determine its position, and the directions and
/// endpoints that it denies (policy decision 18). Unreadable parts get the most restrictive value.
fn not_understood<'a>(api: Api, value: &'a Value, problem: &str) -> Parts<'a> {
    let spec = &value["spec"];
    let (types, order, subject) = match api {
        Api::Kubernetes => {
            let selector = LabelSelector::readable(&spec["podSelector"]);
            let subject = selector.map_or(PolicySubject::All, PolicySubject::KubernetesRead);
            (readable_types(&spec["policyTypes"]), Some(KUBERNETES_ORDER), subject)
        }
        Api::Calico => {
            let subject = readable_subject(spec).unwrap_or(PolicySubject::All);
            (readable_types(&spec["types"]), readable_order(spec), subject)
        }
        Api::Cluster(tier) => {
            let order = match &spec["priority"] {
                Value::Null if tier == Some("kube-baseline") => None,
                priority => Some(priority.as_f64().unwrap_or(f64::NEG_INFINITY)),
            };
            let has = |direction: &str| match &spec[direction] {
                Value::Null => false,
                Value::Array(rules) => !rules.is_empty(),
                _ => true,
            };
            let types = match (has("ingress"), has("egress")) {
                (true, false) => vec![PolicyType::Ingress],
                (false, true) => vec![PolicyType::Egress],
                _ => vec![PolicyType::Ingress, PolicyType::Egress],
            };
            (
                types,
                order,
                ClusterPeer::readable(&spec["subject"])
                    .map_or(PolicySubject::AllPods, PolicySubject::Cluster),
            )
        }
    };
    (order, types, subject, Rules::NotUnderstood(problem.to_owned()))
}

fn readable_types(types: &Value) -> Vec<PolicyType> {
    let both = || vec![PolicyType::Ingress, PolicyType::Egress];
    let mut read = Vec::new();
    for name in types.as_array().map_or(&[][..], Vec::as_slice) {
        match name.as_str() {
            Some(word) if word.eq_ignore_ascii_case("Ingress") => read.push(PolicyType::Ingress),
            Some(word) if word.eq_ignore_ascii_case("Egress") => read.push(PolicyType::Egress),
            _ => return both(),
        }
    }
    if read.is_empty() { both() } else { read }
}

fn readable_subject(spec: &Value) -> Option<PolicySubject<'static>> {
    let read = |field: &str| match &spec[field] {
        Value::Null => Some(None),
        Value::String(text) if text.is_empty() => Some(None),
        text => Selector::parse(text.as_str()?).ok().map(Some),
    };
    Some(PolicySubject::Calico {
        selector: read("selector")?,
        namespaces: read("namespaceSelector")?,
        accounts: read("serviceAccountSelector")?,
    })
}

impl Policy<'_> {
    /// Whether the policy applies to packets of this direction at this endpoint, in this table.
    pub(super) fn applies(&self, endpoint: &JudgedEndpoint<'_>, direction: Direction) -> bool {
        let speaks = self.types.contains(&match direction {
            Direction::Ingress => PolicyType::Ingress,
            Direction::Egress => PolicyType::Egress,
        });
        let in_table = self.hook == Hook::Everywhere
            || match endpoint.table {
                Table::Normal => matches!(self.hook, Hook::Normal | Hook::AlsoForwarded),
                Table::Forward => self.hook == Hook::AlsoForwarded,
                Table::Untracked => self.hook == Hook::Untracked,
                Table::PreDnat => self.hook == Hook::PreDnat,
            };
        let global = self.name.namespace.is_empty();
        let here = global || self.name.namespace == endpoint.identity.namespace;
        speaks && in_table && here && self.selects(endpoint.identity, global)
    }

    fn selects(&self, pod: &Identity, global: bool) -> bool {
        match &self.subject {
            PolicySubject::All => true,
            PolicySubject::AllPods => pod.is_pod(),
            PolicySubject::Cluster(subject) => pod.is_pod() && cluster::is_pod(subject, pod),
            PolicySubject::Kubernetes(selector) => kubernetes::selects(selector, &pod.own_labels),
            PolicySubject::KubernetesRead(selector) => kubernetes::selects(selector, &pod.own_labels),
            PolicySubject::Calico { namespaces, accounts, selector } => {
                // Only a cluster-wide policy can select namespaces.
                let namespaces = namespaces.as_ref().filter(|_| global);
                // With a selector of namespaces, "all" means everything that has a namespace; with a selector of
                // service accounts, everything that has one of those.
                let whole = |selector: &Selector| match (namespaces, accounts) {
                    (Some(_), _) => selector.all_means_has(NAMESPACE_LABEL).matches(&pod.labels),
                    (None, Some(_)) => selector.all_means_has(SERVICE_ACCOUNT).matches(&pod.labels),
                    (None, None) => selector.matches(&pod.labels),
                };
                selector.as_ref().is_none_or(whole)
                    && namespaces.is_none_or(|selector| calico::of_namespace(selector, pod))
                    && accounts.as_ref().is_none_or(|selector| calico::of_account(selector, pod))
            }
        }
    }
}
