//! The labels of a pod or network set that selectors see: its own, and those of its namespace and service account
//! with prefixes. Nothing is copied: each lookup goes to the object that has the label.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use tortie_selector::{Labels, NAMESPACE_LABEL, Selector};

use crate::program::{PolicyId, PolicyRules, Rule};

/// The prefix of a namespace's labels.
pub(crate) const NAMESPACE_PREFIX: &str = "pcns.";
/// The prefix of a service account's labels.
pub(crate) const SERVICE_ACCOUNT_PREFIX: &str = "pcsa.";
/// The prefix of a pod's own labels, which are the only labels that Kubernetes' selectors see (policy decision 10).
/// No label name can begin with it.
pub(crate) const POD_PREFIX: &str = "pod:";
/// The label with the name of the pod's service account.
pub(crate) const SERVICE_ACCOUNT_LABEL: &str = "projectcalico.org/serviceaccount";
/// The label that distinguishes a Kubernetes pod from other endpoints.
pub(crate) const ORCHESTRATOR_LABEL: &str = "projectcalico.org/orchestrator";
/// The label with the name of every namespace and service account.
const NAME_LABEL: &str = "projectcalico.org/name";
/// The label that the API server gives every namespace.
const METADATA_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Everything in the namespace. Nearly every selector contains this criterion, and shares the label's name.
pub(crate) fn of_namespace(namespace: &Arc<str>) -> Selector {
    static LABEL: LazyLock<Arc<str>> = LazyLock::new(|| NAMESPACE_LABEL.into());
    Selector::equal(LABEL.clone(), namespace.clone())
}

/// All pods: Kubernetes' policies can only name ports that pods declare.
pub(crate) fn all_pods() -> Selector {
    static ALL: LazyLock<Selector> = LazyLock::new(|| Selector::equal(ORCHESTRATOR_LABEL, "k8s"));
    ALL.clone()
}

/// The labels of one object. Clones share them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct OwnLabels(Arc<[(Box<str>, Box<str>)]>);

impl From<BTreeMap<String, String>> for OwnLabels {
    fn from(labels: BTreeMap<String, String>) -> Self {
        Self(labels.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl OwnLabels {
    /// The value of a label, if the object has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let index = self.0.binary_search_by(|(known, _)| (**known).cmp(name)).ok()?;
        Some(&*self.0[index].1)
    }

    /// Whether there are other clones.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.pairs().map(|(name, _)| name)
    }
}

/// The labels of a pod or a network set that selectors see (`libcalico-go/lib/backend/syncersv1/updateprocessors`).
/// Its own labels have precedence over a profile's. Neither can claim another namespace or service account: labels
/// that only the cluster sets ([`tortie_api::is_reserved_label`]) are not looked up in them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SubjectLabels {
    /// Whether it is a pod.
    pub is_pod: bool,
    /// Its own labels.
    pub own: OwnLabels,
    /// Its namespace; empty if it has none.
    pub namespace: Arc<str>,
    /// The namespace's labels, if that namespace is known.
    pub namespace_labels: Option<OwnLabels>,
    /// The pod's service account; may be empty.
    pub service_account: Arc<str>,
    /// The service account's labels, if it is known.
    pub service_account_labels: Option<OwnLabels>,
    /// The labels that the pod's profiles give it. The first profile has precedence.
    pub profiles: Vec<OwnLabels>,
}

impl Labels for SubjectLabels {
    fn label(&self, name: &str) -> Option<&str> {
        if let Some(inherited) = name.strip_prefix(NAMESPACE_PREFIX) {
            let labels = self.namespace_labels.as_ref()?;
            return match inherited {
                NAME_LABEL => Some(&self.namespace),
                METADATA_NAME_LABEL => Some(labels.get(inherited).unwrap_or(&self.namespace)),
                _ => labels.get(inherited),
            };
        }
        if let Some(inherited) = name.strip_prefix(SERVICE_ACCOUNT_PREFIX) {
            let labels = self.service_account_labels.as_ref()?;
            return match inherited {
                NAME_LABEL => Some(&self.service_account),
                _ => labels.get(inherited),
            };
        }
        if let Some(own) = name.strip_prefix(POD_PREFIX) {
            return self.own.get(own).filter(|_| self.is_pod);
        }
        match name {
            NAMESPACE_LABEL => Some(&*self.namespace).filter(|namespace| !namespace.is_empty()),
            SERVICE_ACCOUNT_LABEL => Some(&*self.service_account).filter(|account| !account.is_empty()),
            ORCHESTRATOR_LABEL => self.is_pod.then_some("k8s"),
            _ => {
                let given = self.profiles.iter().find_map(|profile| profile.get(name));
                self.own.get(name).or(given)
            }
        }
    }
}

impl SubjectLabels {
    /// Calls `show` for every label that [`Labels::label`] finds. A label that two sources have may occur twice.
    pub fn each(&self, mut show: impl FnMut(&str, &str)) {
        let of_cluster = [NAMESPACE_LABEL, SERVICE_ACCOUNT_LABEL, ORCHESTRATOR_LABEL].into_iter();
        let borne = self.own.names().chain(self.profiles.iter().flat_map(OwnLabels::names));
        for name in of_cluster.chain(borne) {
            if let Some(value) = self.label(name) {
                show(name, value);
            }
        }
        let mut prefixed = String::new();
        let mut under = |prefix: &str, name: &str, value: &str| {
            prefixed.clear();
            prefixed.push_str(prefix);
            prefixed.push_str(name);
            show(&prefixed, value);
        };
        if let Some(labels) = &self.namespace_labels {
            under(NAMESPACE_PREFIX, NAME_LABEL, &self.namespace);
            under(
                NAMESPACE_PREFIX,
                METADATA_NAME_LABEL,
                labels.get(METADATA_NAME_LABEL).unwrap_or(&self.namespace),
            );
            let given = labels.pairs().filter(|(name, _)| ![NAME_LABEL, METADATA_NAME_LABEL].contains(name));
            given.for_each(|(name, value)| under(NAMESPACE_PREFIX, name, value));
        }
        if let Some(labels) = &self.service_account_labels {
            under(SERVICE_ACCOUNT_PREFIX, NAME_LABEL, &self.service_account);
            let given = labels.pairs().filter(|(name, _)| *name != NAME_LABEL);
            given.for_each(|(name, value)| under(SERVICE_ACCOUNT_PREFIX, name, value));
        }
        if self.is_pod {
            self.own.pairs().for_each(|(name, value)| under(POD_PREFIX, name, value));
        }
    }
}

/// The profile of a namespace: it allows everything, for pods that no policy selects.
#[must_use]
pub fn namespace_profile(namespace: &str) -> (PolicyId, PolicyRules) {
    let id = PolicyId::profile(format!("kns.{namespace}"));
    let allow = vec![Rule::all(tortie_api::net::Action::Allow)];
    (id, PolicyRules { ingress: allow.clone(), egress: allow })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> OwnLabels {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        pairs.collect::<BTreeMap<_, _>>().into()
    }

    /// An index relies on this: `each` shows exactly the labels that a selector can find.
    #[test]
    fn every_label_that_a_selector_uses_is_listed() {
        let names = ["a", "b", "c", METADATA_NAME_LABEL, NAME_LABEL, "pcns.a", "pod:a", NAMESPACE_LABEL];
        let own =
            labels(&[("a", "own"), ("pcns.a", "forged"), ("pod:a", "forged"), (NAMESPACE_LABEL, "forged")]);
        let full = SubjectLabels {
            is_pod: true,
            own,
            namespace: "ns".into(),
            namespace_labels: Some(labels(&[
                ("a", "ns"),
                (NAME_LABEL, "forged"),
                (METADATA_NAME_LABEL, "given"),
            ])),
            service_account: "sa".into(),
            service_account_labels: Some(labels(&[("b", "sa"), (NAME_LABEL, "forged")])),
            profiles: vec![
                labels(&[("a", "first"), ("b", "first")]),
                labels(&[("b", "second"), ("c", "second")]),
            ],
        };
        let none = SubjectLabels::default();
        let bare = SubjectLabels { namespace_labels: Some(OwnLabels::default()), ..full.clone() };
        let nowhere = SubjectLabels { namespace_labels: None, service_account_labels: None, ..full.clone() };
        let no_pod = SubjectLabels { is_pod: false, ..full.clone() };
        for subject in [full, none, bare, nowhere, no_pod] {
            let mut shown = BTreeMap::new();
            subject.each(|name, value| drop(shown.insert(name.to_owned(), value.to_owned())));
            let prefixes = ["", NAMESPACE_PREFIX, SERVICE_ACCOUNT_PREFIX, POD_PREFIX];
            let all = prefixes.iter().flat_map(|prefix| names.map(|name| format!("{prefix}{name}")));
            let all = all.chain([SERVICE_ACCOUNT_LABEL, ORCHESTRATOR_LABEL].map(str::to_owned));
            let found: BTreeMap<String, String> =
                all.filter_map(|name| Some((name.clone(), subject.label(&name)?.to_owned()))).collect();
            assert_eq!(shown, found, "{subject:?}");
        }
    }
}
