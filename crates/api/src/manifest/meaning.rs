//! What an `apiVersion` and a `kind` mean: a kind that Tortie stores, a kind that no verdict depends on, or a
//! mistake.
//!
//! A policy that is skipped as unrelated would make every answer wrong. So the groups whose kinds matter are closed
//! lists: an unknown kind in them is a mistake. In all other groups, a kind with the name of a policy is a mistake,
//! too.

use serde_json::Value;

use super::foreign;
use crate::{FieldError, Kind, unknown_fields};

/// The meaning of a document.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// A kind that Tortie stores.
    Kept(Kind),
    /// A kind that no verdict depends on.
    Unrelated,
    /// Probably meant as a kind that verdicts depend on.
    Mistake(FieldError),
}

const CALICO_GROUP: &str = "projectcalico.org";
const CALICO_CRD_GROUP: &str = "crd.projectcalico.org";

/// The kinds of each group that no verdict depends on, and the present and past versions of the group. Past versions of
/// workloads are among them, because their pods are recognised by their shape.
const UNRELATED: &[(&str, &[&str], &[&str])] = &[
    (
        "",
        &["v1"],
        &[
            "Binding",
            "ComponentStatus",
            "ConfigMap",
            "Endpoints",
            "Event",
            "LimitRange",
            "PersistentVolume",
            "PersistentVolumeClaim",
            "PodTemplate",
            "ResourceQuota",
            "Secret",
        ],
    ),
    (
        "apps",
        &["v1", "v1beta1", "v1beta2"],
        &["ControllerRevision", "DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"],
    ),
    ("batch", &["v1", "v1beta1"], &["CronJob", "Job"]),
    ("extensions", &["v1beta1"], &["DaemonSet", "Deployment", "Ingress", "PodSecurityPolicy", "ReplicaSet"]),
    ("discovery.k8s.io", &["v1"], &[]),
    (
        "networking.k8s.io",
        &["v1", "v1beta1", "v1alpha1"],
        &["ClusterCIDR", "IPAddress", "Ingress", "IngressClass", "ServiceCIDR"],
    ),
    ("policy.networking.k8s.io", &["v1alpha1", "v1alpha2"], &[]),
    (CALICO_GROUP, &["v3"], CALICO),
    (CALICO_CRD_GROUP, &["v1"], CALICO),
];

const CALICO: &[&str] = &[
    "BlockAffinity",
    "IPAMBlock",
    "IPAMConfig",
    "IPAMConfiguration",
    "IPAMHandle",
    "IPReservation",
    "LiveMigration",
    "RemoteClusterConfiguration",
];

/// Groups whose policies do not concern packets between pods.
const OTHER_POLICIES: &[&str] = &[
    "admissionregistration.k8s.io",
    "config.gatekeeper.sh",
    "external-secrets.io",
    "gateway.networking.k8s.io",
    "kyverno.io",
    "policies.kyverno.io",
    "policy",
    "security.istio.io",
];

/// Groups whose kinds with a pod template are workloads, and are checked as such.
pub(super) const WORKLOAD_GROUPS: [&str; 3] = ["apps", "batch", "extensions"];

/// Policy kinds, and kinds that policy refers to, in whatever group.
const POLICY_KINDS: [Kind; 12] = [
    Kind::KubernetesNetworkPolicy,
    Kind::ClusterNetworkPolicy,
    Kind::AdminNetworkPolicy,
    Kind::BaselineAdminNetworkPolicy,
    Kind::GlobalNetworkPolicy,
    Kind::StagedNetworkPolicy,
    Kind::StagedGlobalNetworkPolicy,
    Kind::StagedKubernetesNetworkPolicy,
    Kind::NetworkSet,
    Kind::GlobalNetworkSet,
    Kind::HostEndpoint,
    Kind::FelixConfiguration,
];

/// The meaning of a document with this `apiVersion` and `kind`.
pub(crate) fn meaning(api_version: &str, name: &str) -> Meaning {
    if let Some(kind) = Kind::of(api_version, name) {
        return Meaning::Kept(kind);
    }
    let (group, version) = match api_version.split_once('/') {
        Some(parts) => parts,
        None if api_version == "v1" => ("", "v1"),
        None => return Meaning::Mistake(without_version(api_version, name)),
    };
    match UNRELATED.iter().find(|(known, ..)| *known == group) {
        Some((_, versions, kinds)) if kinds.contains(&name) => match versions.first() {
            Some(first) if !versions.contains(&version) => {
                let problem = format!("{api_version:?} is not a version of {name}; write {group}/{first}");
                Meaning::Mistake(FieldError::new("apiVersion", problem))
            }
            _ => Meaning::Unrelated,
        },
        _ if foreign::is_harmless(group, name) => Meaning::Unrelated,
        Some(_) => Meaning::Mistake(mistake(api_version, group, name)),
        None if looks_like_policy(group, name) => Meaning::Mistake(mistake(api_version, group, name)),
        None => Meaning::Unrelated,
    }
}

/// Whether this kind is in the closed lists: of Kubernetes or Calico, and known.
pub(super) fn is_of_kubernetes(api_version: &str, name: &str) -> bool {
    let group = super::foreign::group_of(api_version);
    UNRELATED.iter().any(|(known, _, kinds)| *known == group && kinds.contains(&name))
}

/// Whether `apply` leaves this document out: no verdict depends on it. A past version of a workload is a mistake, because its
/// pods would be missing.
pub(crate) fn is_left_out(value: &Value) -> bool {
    let text = |name: &str| value[name].as_str().unwrap_or_default();
    let (api_version, name) = (text("apiVersion"), text("kind"));
    let is_workload = || {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        WORKLOAD_GROUPS.contains(&group) && named(name).any(Kind::is_workload)
    };
    !api_version.is_empty()
        && !name.is_empty()
        && meaning(api_version, name) == Meaning::Unrelated
        && !is_workload()
}

/// The kind of group `group` with this name, in any case.
fn named(name: &str) -> impl Iterator<Item = Kind> {
    Kind::all().filter(move |kind| kind.name().eq_ignore_ascii_case(name))
}

fn group_of(kind: Kind) -> &'static str {
    kind.api_version().split_once('/').map_or("", |(group, _)| group)
}

fn looks_like_policy(group: &str, name: &str) -> bool {
    let close =
        |kind: &Kind| unknown_fields::distance(&name.to_lowercase(), &kind.name().to_lowercase()) <= 2;
    let of_calico = group.contains("calico") && named(name).next().is_some();
    of_calico
        || POLICY_KINDS.iter().any(close)
        || (ends_like_policy(name) && !OTHER_POLICIES.contains(&group))
}

/// Whether the name ends with `Policy`, with at most one letter wrong.
fn ends_like_policy(name: &str) -> bool {
    let letters: Vec<char> = name.to_lowercase().chars().collect();
    (5..=7).any(|length| {
        let end = letters.len().checked_sub(length).and_then(|from| letters.get(from..));
        end.is_some_and(|end| unknown_fields::distance(&end.iter().collect::<String>(), "policy") <= 1)
    })
}

/// An `apiVersion` without a slash that is not Kubernetes' own.
fn without_version(api_version: &str, name: &str) -> FieldError {
    let of_group = named(name).find(|kind| group_of(*kind) == api_version);
    match of_group.or_else(|| named(name).find(|kind| group_of(*kind).is_empty())) {
        Some(kind) => {
            let problem = format!("{api_version:?} is not a version of {name}; write {}", kind.api_version());
            FieldError::new("apiVersion", problem)
        }
        None => mistake(api_version, api_version, name),
    }
}

/// The error for a document of an unknown kind, with the kind that was probably meant.
pub(crate) fn mistake(api_version: &str, group: &str, name: &str) -> FieldError {
    let mut meant: Vec<Kind> = named(name).collect();
    if meant.is_empty() {
        return misspelt(api_version, group, name);
    }
    let is_near = |kind: &Kind| match group {
        "extensions" => *kind == Kind::KubernetesNetworkPolicy,
        group if group.contains("calico") => group_of(*kind) == CALICO_GROUP,
        group => group_of(*kind) == group,
    };
    if meant.iter().any(is_near) {
        meant.retain(is_near);
    }
    let shown: Vec<String> =
        meant.iter().map(|kind| format!("{} {}", kind.api_version(), kind.name())).collect();
    let field = if meant.iter().any(|kind| kind.name() == name) { "apiVersion" } else { "kind" };
    FieldError::new(field, format!("{api_version} {name} is not known; write {}", shown.join(" or ")))
}

fn misspelt(api_version: &str, group: &str, name: &str) -> FieldError {
    let distance = |kind: &Kind| unknown_fields::distance(&name.to_lowercase(), &kind.name().to_lowercase());
    let near = |kind: &Kind| group_of(*kind) == group || group == CALICO_CRD_GROUP;
    let mut kinds: Vec<Kind> = Kind::all().filter(|kind| distance(kind) <= 2).collect();
    kinds.sort_by_key(|kind| (distance(kind), !near(kind)));
    let problem = match kinds.first() {
        Some(kind) => {
            format!("{api_version} {name} is not known; did you mean {} {}?", kind.api_version(), kind.name())
        }
        None if looks_like_policy(group, name) => format!(
            "{api_version} {name} looks like policy, and Tortie cannot read it; write it as one of its own kinds, or leave it out"
        ),
        None => format!("{api_version} {name} is not known"),
    };
    FieldError::new("kind", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apply_leaves_out_what_is_neither_kept_nor_a_mistake() {
        for (api_version, kind, expected) in [
            ("v1", "ConfigMap", true),
            ("rbac.authorization.k8s.io/v1", "Role", true),
            ("apps/v1", "Deployment", false),
            ("apps/v1beta1", "Deployment", false),
            ("extensions/v1beta1", "Ingress", true),
            ("networking.k8s.io/v1", "NetworkPolicy", false),
            ("networking.k8s.io/v1beta1", "NetworkPolicy", false),
            ("v1", "Namspace", false),
            ("", "ConfigMap", false),
        ] {
            let value = serde_json::json!({"apiVersion": api_version, "kind": kind});
            assert_eq!(is_left_out(&value), expected, "{api_version} {kind}");
        }
    }

    #[test]
    fn documents_that_resemble_policy_are_never_unrelated() {
        for (api_version, kind, expected) in [
            (
                "networking.k8s.io",
                "NetworkPolicy",
                Some(
                    "apiVersion: \"networking.k8s.io\" is not a version of NetworkPolicy; write networking.k8s.io/v1",
                ),
            ),
            (
                "networking.k8s.io/v1",
                "NetworkPolcy",
                Some(
                    "kind: networking.k8s.io/v1 NetworkPolcy is not known; did you mean networking.k8s.io/v1 NetworkPolicy?",
                ),
            ),
            (
                "networking.k8s.io/v1",
                "networkpolicy",
                Some(
                    "kind: networking.k8s.io/v1 networkpolicy is not known; write networking.k8s.io/v1 NetworkPolicy",
                ),
            ),
            (
                "networking.k8s.io/v1beta1",
                "NetworkPolicy",
                Some(
                    "apiVersion: networking.k8s.io/v1beta1 NetworkPolicy is not known; write networking.k8s.io/v1 NetworkPolicy",
                ),
            ),
            (
                "projectcalico.org/v1",
                "NetworkPolicy",
                Some(
                    "apiVersion: projectcalico.org/v1 NetworkPolicy is not known; write projectcalico.org/v3 NetworkPolicy",
                ),
            ),
            (
                "projectcalico.org/v3",
                "GlobalNetworkPolice",
                Some(
                    "kind: projectcalico.org/v3 GlobalNetworkPolice is not known; did you mean projectcalico.org/v3 GlobalNetworkPolicy?",
                ),
            ),
            (
                "projectcalico.org/v3",
                "Teir",
                Some("kind: projectcalico.org/v3 Teir is not known; did you mean projectcalico.org/v3 Tier?"),
            ),
            ("crd.projectcalico.org/v1", "Tiers", Some("did you mean projectcalico.org/v3 Tier?")),
            ("calico.org/v3", "Tier", Some("write projectcalico.org/v3 Tier")),
            (
                "v1",
                "NetworkPolicy",
                Some("write networking.k8s.io/v1 NetworkPolicy or projectcalico.org/v3 NetworkPolicy"),
            ),
            ("v1", "Namspace", Some("did you mean v1 Namespace?")),
            ("v3", "Pod", Some("apiVersion: \"v3\" is not a version of Pod; write v1")),
            (
                "policy.networking.k8s.io/v1alpha1",
                "ClusterNetworkPolicy",
                Some("write policy.networking.k8s.io/v1alpha2 ClusterNetworkPolicy"),
            ),
            ("policy.networking.k8s.io/v1alpha1", "AdminNetPolicy", Some("looks like policy")),
            ("cilium.io/v2", "CiliumNetworkPolicy", Some("looks like policy, and Tortie cannot read it")),
            ("example.org/v1", "TrafficPolcy", Some("looks like policy")),
            ("discovery.k8s.io/v1beta1", "EndpointSlice", Some("write discovery.k8s.io/v1 EndpointSlice")),
            (
                "apps/v2",
                "Deployment",
                Some("apiVersion: \"apps/v2\" is not a version of Deployment; write apps/v1"),
            ),
            ("apps/v1", "Deploymnt", Some("kind: apps/v1 Deploymnt is not known")),
            ("v1", "ConfigMap", None),
            ("apps/v1beta1", "Deployment", None),
            ("networking.k8s.io/v1", "Ingress", None),
            ("projectcalico.org/v3", "RemoteClusterConfiguration", None),
            ("policy/v1beta1", "PodSecurityPolicy", None),
            ("policy/v1", "PodDisruptionBudget", None),
            ("security.istio.io/v1", "AuthorizationPolicy", None),
            ("monitoring.coreos.com/v1", "ServiceMonitor", None),
            ("serving.knative.dev/v1", "Service", None),
            ("rbac.authorization.k8s.io/v1", "Role", None),
            ("kubeflow.org/v1", "Profile", None),
        ] {
            match (meaning(api_version, kind), expected) {
                (Meaning::Unrelated, None) => {}
                (Meaning::Mistake(error), Some(expected)) => {
                    assert!(error.to_string().contains(expected), "{api_version} {kind}: {error}");
                }
                (found, _) => panic!("{api_version} {kind}: {found:?}"),
            }
        }
    }
}
