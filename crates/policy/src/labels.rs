//! The labels that selectors see on a pod: its own, and those of its namespace and service account under prefixes.

use std::collections::BTreeMap;

use tortie_api::is_reserved_label;
use tortie_selector::NAMESPACE_LABEL;

use crate::program::{PolicyId, PolicyKind, PolicyRules, Rule};

/// The prefix of a namespace's labels.
pub(crate) const NAMESPACE_PREFIX: &str = "pcns.";
/// The prefix of a service account's labels.
pub(crate) const SERVICE_ACCOUNT_PREFIX: &str = "pcsa.";
/// The label with the name of the pod's service account.
pub(crate) const SERVICE_ACCOUNT_LABEL: &str = "projectcalico.org/serviceaccount";
/// The label that tells a Kubernetes pod from other endpoints.
pub(crate) const ORCHESTRATOR_LABEL: &str = "projectcalico.org/orchestrator";

/// What selectors see on a pod. Its own labels win over inherited ones, but neither it nor a profile can claim another
/// namespace or service account: labels that only the cluster gives are left out (`calico.md` 1.5).
///
/// `profiles` are the labels that the endpoint's profiles give it, the first one's winning.
#[must_use]
pub fn endpoint_labels<'a>(
    own: &BTreeMap<String, String>,
    namespace: (&str, Option<&BTreeMap<String, String>>),
    service_account: (&str, Option<&BTreeMap<String, String>>),
    profiles: impl DoubleEndedIterator<Item = &'a BTreeMap<String, String>>,
) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    for profile in profiles.rev() {
        labels.extend(unreserved(profile));
    }
    inherit_namespace(&mut labels, namespace);
    inherit(&mut labels, SERVICE_ACCOUNT_PREFIX, service_account);
    labels.extend(unreserved(own));
    labels.insert(NAMESPACE_LABEL.to_owned(), namespace.0.to_owned());
    labels.insert(ORCHESTRATOR_LABEL.to_owned(), "k8s".to_owned());
    if !service_account.0.is_empty() {
        labels.insert(SERVICE_ACCOUNT_LABEL.to_owned(), service_account.0.to_owned());
    }
    labels
}

/// What selectors see on a network set: its own labels, less those that only the cluster gives, and those of its
/// namespace if it has one.
#[must_use]
pub fn network_set_labels(
    own: &BTreeMap<String, String>,
    namespace: Option<(&str, Option<&BTreeMap<String, String>>)>,
) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    if let Some(namespace) = namespace {
        inherit_namespace(&mut labels, namespace);
    }
    labels.extend(unreserved(own));
    if let Some((name, _)) = namespace {
        labels.insert(NAMESPACE_LABEL.to_owned(), name.to_owned());
    }
    labels
}

fn unreserved(own: &BTreeMap<String, String>) -> impl Iterator<Item = (String, String)> {
    let own = own.iter().filter(|(name, _)| !is_reserved_label(name));
    own.map(|(name, value)| (name.clone(), value.clone()))
}

fn inherit_namespace(
    labels: &mut BTreeMap<String, String>,
    (name, inherited): (&str, Option<&BTreeMap<String, String>>),
) {
    inherit(labels, NAMESPACE_PREFIX, (name, inherited));
    if inherited.is_some() {
        // What the API server gives every namespace.
        labels
            .entry(format!("{NAMESPACE_PREFIX}kubernetes.io/metadata.name"))
            .or_insert_with(|| name.to_owned());
    }
}

fn inherit(
    labels: &mut BTreeMap<String, String>,
    prefix: &str,
    (name, inherited): (&str, Option<&BTreeMap<String, String>>),
) {
    let Some(inherited) = inherited else { return };
    labels.extend(inherited.iter().map(|(label, value)| (format!("{prefix}{label}"), value.clone())));
    labels.insert(format!("{prefix}projectcalico.org/name"), name.to_owned());
}

/// The profile that a namespace brings along: it allows everything, for pods that no policy selects.
#[must_use]
pub fn namespace_profile(namespace: &str) -> (PolicyId, PolicyRules) {
    let id =
        PolicyId { kind: PolicyKind::Profile, namespace: String::new(), name: format!("kns.{namespace}") };
    let allow = vec![Rule::all(tortie_api::net::Action::Allow)];
    (id, PolicyRules { ingress: allow.clone(), egress: allow })
}
