//! The labels that selectors see on a pod or a network set: its own, and those of its namespace and service account under
//! prefixes. Nothing is copied: each lookup asks the one that has the label.

use std::collections::BTreeMap;
use std::sync::Arc;

use tortie_selector::{Labels, NAMESPACE_LABEL};

use crate::program::{PolicyId, PolicyKind, PolicyRules, Rule};

/// The prefix of a namespace's labels.
pub(crate) const NAMESPACE_PREFIX: &str = "pcns.";
/// The prefix of a service account's labels.
pub(crate) const SERVICE_ACCOUNT_PREFIX: &str = "pcsa.";
/// The prefix of the labels that a pod itself bears, which is all that Kubernetes' selectors see (semantics 10). No label
/// name can begin like this.
pub(crate) const POD_PREFIX: &str = "pod:";
/// The label with the name of the pod's service account.
pub(crate) const SERVICE_ACCOUNT_LABEL: &str = "projectcalico.org/serviceaccount";
/// The label that tells a Kubernetes pod from other endpoints.
pub(crate) const ORCHESTRATOR_LABEL: &str = "projectcalico.org/orchestrator";
/// The label of every namespace and service account with its name.
const NAME_LABEL: &str = "projectcalico.org/name";
/// The label that the API server gives every namespace.
const METADATA_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Labels as an object bears them.
pub type OwnLabels = BTreeMap<String, String>;

/// What selectors see on a pod or a network set (`calico.md` 1.5). Its own labels win over a profile's, but neither can
/// claim another namespace or service account: labels that only the cluster gives ([`tortie_api::is_reserved_label`]) are
/// not looked for there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SubjectLabels {
    /// Whether it is a pod.
    pub is_pod: bool,
    /// Its own labels.
    pub own: Arc<OwnLabels>,
    /// Its namespace; empty where it has none.
    pub namespace: String,
    /// The namespace's labels, if that namespace is known.
    pub namespace_labels: Option<Arc<OwnLabels>>,
    /// The pod's service account; may be empty.
    pub service_account: String,
    /// The service account's labels, if it is known.
    pub service_account_labels: Option<Arc<OwnLabels>>,
    /// The labels that the pod's profiles give it; the first profile's win.
    pub profiles: Vec<Arc<OwnLabels>>,
}

impl Labels for SubjectLabels {
    fn label(&self, name: &str) -> Option<&str> {
        if let Some(inherited) = name.strip_prefix(NAMESPACE_PREFIX) {
            let labels = self.namespace_labels.as_ref()?;
            return match inherited {
                NAME_LABEL => Some(&self.namespace),
                METADATA_NAME_LABEL => Some(labels.get(inherited).unwrap_or(&self.namespace)),
                _ => labels.get(inherited).map(String::as_str),
            };
        }
        if let Some(inherited) = name.strip_prefix(SERVICE_ACCOUNT_PREFIX) {
            let labels = self.service_account_labels.as_ref()?;
            return match inherited {
                NAME_LABEL => Some(&self.service_account),
                _ => labels.get(inherited).map(String::as_str),
            };
        }
        if let Some(own) = name.strip_prefix(POD_PREFIX) {
            return self.own.get(own).filter(|_| self.is_pod).map(String::as_str);
        }
        match name {
            NAMESPACE_LABEL => Some(&*self.namespace).filter(|namespace| !namespace.is_empty()),
            SERVICE_ACCOUNT_LABEL => Some(&*self.service_account).filter(|account| !account.is_empty()),
            ORCHESTRATOR_LABEL => self.is_pod.then_some("k8s"),
            _ => {
                let given = self.profiles.iter().find_map(|profile| profile.get(name));
                self.own.get(name).or(given).map(String::as_str)
            }
        }
    }
}

/// The profile that a namespace brings along: it allows everything, for pods that no policy selects.
#[must_use]
pub fn namespace_profile(namespace: &str) -> (PolicyId, PolicyRules) {
    let id =
        PolicyId { kind: PolicyKind::Profile, namespace: String::new(), name: format!("kns.{namespace}") };
    let allow = vec![Rule::all(tortie_api::net::Action::Allow)];
    (id, PolicyRules { ingress: allow.clone(), egress: allow })
}
