//! Pods that no policy for pods selects, although its selector matches their labels: those that use their node's network, and those that have
//! ended.

use std::collections::BTreeMap;

use serde_json::Value;
use tortie_api::Resource;
use tortie_oracle::{Oracle, Snapshot, Subject};

/// The reason why policy does not see a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Exemption {
    HostNetwork,
    Ended,
}

/// The pods that policy does not see.
pub(super) struct Absent {
    /// The cluster in which they have networks of their own.
    snapshot: Snapshot,
    /// By namespace and name.
    reasons: BTreeMap<(String, String), Exemption>,
}

impl Absent {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        let (mut others, mut reasons) = (snapshot.clone(), BTreeMap::new());
        for (key, stored) in snapshot.iter() {
            let Ok(Resource::Pod(pod)) = &stored.resource else { continue };
            let reason = match (pod.has_ended(), pod.spec.host_network) {
                (true, _) => Exemption::Ended,
                (false, true) => Exemption::HostNetwork,
                (false, false) => continue,
            };
            let mut value = stored.value.clone();
            for (part, field) in [("spec", "hostNetwork"), ("status", "phase")] {
                value.get_mut(part).and_then(Value::as_object_mut).and_then(|part| part.remove(field));
            }
            others.insert(key.clone(), value, None);
            reasons.insert((key.namespace.clone(), key.name.clone()), reason);
        }
        // Nobody asks about a cluster without such pods.
        let snapshot = if reasons.is_empty() { Snapshot::new() } else { others };
        Self { snapshot, reasons }
    }

    /// The cluster with these pods, in which selectors can be tried.
    pub(super) fn oracle(&self) -> Oracle<'_> {
        Oracle::new(&self.snapshot)
    }

    pub(super) fn reason(&self, pod: &Subject<'_>) -> Option<Exemption> {
        self.reasons.get(&(pod.namespace().to_owned(), pod.name().to_owned())).copied()
    }
}

/// The pods and the reasons as a sentence.
pub(super) fn witness(pods: &[(Exemption, String)]) -> String {
    let of = |reason: Exemption| -> Vec<&str> {
        pods.iter().filter(|(of, _)| *of == reason).map(|(_, name)| name.as_str()).collect()
    };
    let on_hosts = match of(Exemption::HostNetwork).as_slice() {
        [] => None,
        [pod] => Some(format!("{pod} uses its node's network, and is under no policy of pods")),
        pods => {
            Some(format!("{} use their node's network, and are under no policy of pods", pods.join(", ")))
        }
    };
    let ended = match of(Exemption::Ended).as_slice() {
        [] => None,
        [pod] => Some(format!("{pod} has ended, and has no network any more")),
        pods => Some(format!("{} have ended, and have no network any more", pods.join(", "))),
    };
    on_hosts.into_iter().chain(ended).collect::<Vec<_>>().join("; ")
}
