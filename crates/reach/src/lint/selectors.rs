//! Selectors on labels that no object has, and selectors that match nothing in the current cluster.

use std::collections::BTreeSet;

use tortie_api::calico::{EntityRule, PolicySpec};
use tortie_api::kubernetes::{
    ClusterPeer, ClusterPolicy, LabelSelector, NetworkPolicyPeer, NetworkPolicySpec,
};
use tortie_api::{Key, Kind, Resource};
use tortie_selector::Selector;

use super::absent::{self, Absent, Exemption};
use super::{Code, FindingText, Findings, Level, policies};
use tortie_oracle::{Oracle, Snapshot, Stored, Subject, shown_labels};

/// A selector, and the kind of its candidates.
enum Choice<'a> {
    Endpoints(&'a Selector),
    Namespaces(&'a Selector),
    Accounts(&'a Selector),
    Pods(&'a LabelSelector),
    PodsNamespaces(&'a LabelSelector),
    Nodes(&'a LabelSelector),
}

/// The existing labels.
struct Known {
    endpoints: BTreeSet<String>,
    pods: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    accounts: BTreeSet<String>,
    nodes: BTreeSet<String>,
}

pub(super) fn check(snapshot: &Snapshot, absent: &Absent, found: &mut Findings) {
    let oracle = Oracle::new(snapshot);
    let with_absent = absent.oracle();
    let pods: Vec<Subject<'_>> = oracle.pods().map(|pod| pod.subject()).collect();
    if pods.is_empty() {
        return;
    }
    let hosts = oracle.hosts().map(|host| host.subject());
    let sets: Vec<Subject<'_>> = oracle.network_sets().map(|(set, _)| set).chain(hosts).collect();
    let known = Known::of(snapshot, &pods, &sets);
    for (key, stored, resource) in policies(snapshot) {
        for (field, choice) in choices(resource) {
            let unknown = known.unknown(&choice);
            if !unknown.is_empty() {
                of_unknown(key, stored, &field, &choice, &unknown, found);
                continue;
            }
            let of_subject = !field.starts_with("spec.ingress") && !field.starts_with("spec.egress");
            // A policy that selects nothing has its own finding.
            if of_subject || found.has(key, &field, &[Code::NeverMatches]) {
                continue;
            }
            let (is_met, witness) = match choice {
                Choice::Nodes(selector) => {
                    let count = oracle.labels_of_nodes().count();
                    let has_address = oracle.addresses_of_nodes(selector).next().is_some();
                    (has_address, format!("none of {count} nodes has these labels and an address"))
                }
                _ => (
                    pods.iter().chain(&sets).any(|subject| choice.means(*subject)),
                    format!("none of {} pods and {} network sets and host endpoints", pods.len(), sets.len()),
                ),
            };
            if !is_met {
                let problem = format!("{} matches nothing in this cluster", choice.shown());
                let unseen = with_absent.pods().map(|pod| pod.subject()).filter(|pod| choice.means(*pod));
                let unseen: Vec<(Exemption, String)> = unseen
                    .filter_map(|pod| {
                        Some((absent.reason(&pod)?, format!("{}/{}", pod.namespace(), pod.name())))
                    })
                    .collect();
                let on_host = unseen.iter().any(|(reason, _)| *reason == Exemption::HostNetwork);
                let (witness, advice) = match unseen.as_slice() {
                    [] => (
                        witness,
                        "check the spelling of its values, or take the rule out if nothing like that will come",
                    ),
                    _ if on_host => (
                        absent::witness(&unseen),
                        "name the addresses of their nodes: no selector matches such pods",
                    ),
                    _ => (absent::witness(&unseen), "nothing, if such pods come again"),
                };
                found.add(
                    (key, stored),
                    &field,
                    (Level::Warning, Code::MatchesNothing),
                    FindingText::new(problem, witness, advice),
                );
            }
        }
    }
}

fn of_unknown(
    key: &Key,
    stored: &Stored,
    field: &str,
    choice: &Choice<'_>,
    unknown: &[(String, Option<String>)],
    found: &mut Findings,
) {
    for (label, similar) in unknown {
        let problem = format!("{} asks for label {label}, which no {} has", choice.shown(), choice.whom());
        let advice = match similar {
            Some(similar) => format!("is {similar} meant?"),
            None => "check its spelling, or add the label to the intended objects".to_owned(),
        };
        let witness = format!("no {} of this cluster bears it", choice.whom());
        found.add(
            (key, stored),
            field,
            (Level::Warning, Code::UnknownLabel),
            FindingText::new(problem, witness, advice),
        );
    }
}

impl Known {
    fn of(snapshot: &Snapshot, pods: &[Subject<'_>], sets: &[Subject<'_>]) -> Self {
        let labels_of = |kind: Kind, given: &[&str]| {
            let mut names: BTreeSet<String> = given.iter().map(|name| (*name).to_owned()).collect();
            for (_, stored) in snapshot.iter().filter(|(key, _)| key.kind == kind) {
                let labels = stored.value.pointer("/metadata/labels").and_then(|labels| labels.as_object());
                names.extend(labels.into_iter().flat_map(|labels| labels.keys().cloned()));
            }
            names
        };
        let names_of = |subjects: &[Subject<'_>], own: bool| {
            let mut names = BTreeSet::new();
            for subject in subjects {
                let labels = if own { subject.own_labels() } else { subject.labels() };
                names.extend(labels.keys().cloned());
            }
            names
        };
        let mut endpoints = names_of(pods, false);
        endpoints.extend(names_of(sets, false));
        let name = "projectcalico.org/name";
        Self {
            endpoints,
            pods: names_of(pods, true),
            namespaces: labels_of(Kind::Namespace, &["kubernetes.io/metadata.name", name]),
            accounts: labels_of(Kind::ServiceAccount, &[name]),
            nodes: labels_of(Kind::Node, &[]),
        }
    }

    /// The labels in the choice that no candidate has, each with a similar existing label.
    fn unknown(&self, choice: &Choice<'_>) -> Vec<(String, Option<String>)> {
        let known = match choice {
            Choice::Endpoints(_) => &self.endpoints,
            Choice::Pods(_) => &self.pods,
            Choice::Namespaces(_) | Choice::PodsNamespaces(_) => &self.namespaces,
            Choice::Accounts(_) => &self.accounts,
            Choice::Nodes(_) => &self.nodes,
        };
        let unknown = choice.labels().into_iter().filter(|label| !known.contains(label));
        unknown.map(|label| (label.clone(), similar(&label, known))).collect()
    }
}

/// The most similar label, if it differs by at most two letters.
fn similar(label: &str, known: &BTreeSet<String>) -> Option<String> {
    let distance = |known: &String| (edits(label, known), known.clone());
    let (distance, found) = known.iter().map(distance).min()?;
    (distance <= 2 && distance < label.chars().count()).then_some(found)
}

/// The number of letters to change, add or remove (Levenshtein distance).
fn edits(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (index, letter) in one.chars().enumerate() {
        let mut next = vec![index + 1];
        for (column, wanted) in other.iter().enumerate() {
            let replaced = row.get(column).copied().unwrap_or(0) + usize::from(*wanted != letter);
            let removed = row.get(column + 1).copied().unwrap_or(0) + 1;
            let added = next.get(column).copied().unwrap_or(0) + 1;
            next.push(replaced.min(removed).min(added));
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

impl Choice<'_> {
    fn labels(&self) -> Vec<String> {
        match self {
            Self::Endpoints(selector) | Self::Namespaces(selector) | Self::Accounts(selector) => {
                selector.labels().into_iter().map(str::to_owned).collect()
            }
            Self::Pods(selector) | Self::PodsNamespaces(selector) | Self::Nodes(selector) => {
                let expressions = selector.match_expressions.iter().map(|one| one.key.clone());
                let labels: BTreeSet<String> =
                    selector.match_labels.keys().cloned().chain(expressions).collect();
                labels.into_iter().collect()
            }
        }
    }

    fn means(&self, subject: Subject<'_>) -> bool {
        match self {
            Self::Endpoints(selector) => selector.matches(subject.labels()),
            Self::Namespaces(selector) => subject.is_in_namespaces(selector),
            Self::Accounts(selector) => subject.is_pod() && subject.has_account(selector),
            Self::Pods(selector) => subject.is_pod() && subject.bears(selector),
            Self::PodsNamespaces(selector) => subject.is_pod() && subject.namespace_bears(selector),
            Self::Nodes(_) => false,
        }
    }

    fn whom(&self) -> &'static str {
        match self {
            Self::Endpoints(_) => "pod or network set",
            Self::Pods(_) => "pod",
            Self::Namespaces(_) | Self::PodsNamespaces(_) => "namespace",
            Self::Accounts(_) => "service account",
            Self::Nodes(_) => "node",
        }
    }

    fn shown(&self) -> String {
        match self {
            Self::Endpoints(selector) | Self::Namespaces(selector) | Self::Accounts(selector) => {
                selector.to_string()
            }
            Self::Pods(selector) => format!("{:?}", shown_labels("pods", selector)),
            Self::PodsNamespaces(selector) => format!("{:?}", shown_labels("namespaces", selector)),
            Self::Nodes(selector) => format!("{:?}", shown_labels("nodes", selector)),
        }
    }
}

/// Every selector of a policy, with its field.
fn choices(resource: &Resource) -> Vec<(String, Choice<'_>)> {
    let mut all = Vec::new();
    match resource {
        Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
            calico(&policy.spec, &mut all)
        }
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
            calico(&policy.spec, &mut all);
        }
        Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy) => {
            kubernetes(&policy.spec, &mut all);
        }
        Resource::ClusterPolicy(policy) => cluster(policy, &mut all),
        _ => {}
    }
    all
}

fn calico<'a>(spec: &'a PolicySpec, all: &mut Vec<(String, Choice<'a>)>) {
    all.extend(spec.selector.as_ref().map(|it| ("spec.selector".to_owned(), Choice::Endpoints(it))));
    let namespaces = spec.namespace_selector.as_ref();
    all.extend(namespaces.map(|it| ("spec.namespaceSelector".to_owned(), Choice::Namespaces(it))));
    let accounts = spec.service_account_selector.as_ref();
    all.extend(accounts.map(|it| ("spec.serviceAccountSelector".to_owned(), Choice::Accounts(it))));
    for (rules, direction) in [(&spec.ingress, "ingress"), (&spec.egress, "egress")] {
        for (index, rule) in rules.iter().enumerate() {
            for (side, name) in [(&rule.source, "source"), (&rule.destination, "destination")] {
                of_side(side, &format!("spec.{direction}[{index}].{name}"), all);
            }
        }
    }
}

fn of_side<'a>(side: &'a EntityRule, path: &str, all: &mut Vec<(String, Choice<'a>)>) {
    all.extend(side.selector.as_ref().map(|it| (format!("{path}.selector"), Choice::Endpoints(it))));
    all.extend(side.not_selector.as_ref().map(|it| (format!("{path}.notSelector"), Choice::Endpoints(it))));
    let namespaces = side.namespace_selector.as_ref();
    all.extend(namespaces.map(|it| (format!("{path}.namespaceSelector"), Choice::Namespaces(it))));
    let accounts = side.service_accounts.as_ref().and_then(|accounts| accounts.selector.as_ref());
    all.extend(accounts.map(|it| (format!("{path}.serviceAccounts.selector"), Choice::Accounts(it))));
}

fn kubernetes<'a>(spec: &'a NetworkPolicySpec, all: &mut Vec<(String, Choice<'a>)>) {
    all.push(("spec.podSelector".to_owned(), Choice::Pods(&spec.pod_selector)));
    for (rules, direction, side) in [(&spec.ingress, "ingress", "from"), (&spec.egress, "egress", "to")] {
        for (index, rule) in rules.iter().enumerate() {
            for (number, NetworkPolicyPeer { namespace_selector, pod_selector, .. }) in
                rule.peers.iter().enumerate()
            {
                let path = format!("spec.{direction}[{index}].{side}[{number}]");
                let namespaces = namespace_selector.as_ref();
                all.extend(
                    namespaces.map(|it| (format!("{path}.namespaceSelector"), Choice::PodsNamespaces(it))),
                );
                all.extend(pod_selector.as_ref().map(|it| (format!("{path}.podSelector"), Choice::Pods(it))));
            }
        }
    }
}

fn cluster<'a>(policy: &'a ClusterPolicy, all: &mut Vec<(String, Choice<'a>)>) {
    let mut of = |peer: &'a ClusterPeer, path: String| match peer {
        ClusterPeer::Namespaces(namespaces) => {
            all.push((format!("{path}.namespaces"), Choice::PodsNamespaces(namespaces)));
        }
        ClusterPeer::Pods { namespaces, pods } => {
            all.push((format!("{path}.pods.namespaceSelector"), Choice::PodsNamespaces(namespaces)));
            all.push((format!("{path}.pods.podSelector"), Choice::Pods(pods)));
        }
        ClusterPeer::Nodes(nodes) => all.push((format!("{path}.nodes"), Choice::Nodes(nodes))),
        ClusterPeer::Networks(_) | ClusterPeer::Unknown(_) => {}
    };
    of(&policy.subject, "spec.subject".to_owned());
    for (rules, direction, side) in [(&policy.ingress, "ingress", "from"), (&policy.egress, "egress", "to")] {
        for (index, rule) in rules.iter().enumerate() {
            for (number, peer) in rule.peers.iter().enumerate() {
                of(peer, format!("spec.{direction}[{index}].{side}[{number}]"));
            }
        }
    }
}
