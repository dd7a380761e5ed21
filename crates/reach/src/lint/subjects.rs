//! Policies that select nothing, and host endpoints to which no policy applies.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::net::Direction;
use tortie_api::{Key, Kind, Resource};

use super::absent::{Absent, Exemption, witness};
use super::{Code, FindingText, Findings, Level, policies};
use tortie_oracle::enforced::not_enforced;
use tortie_oracle::{Oracle, SeenHost, SeenProfile, Snapshot, Stored, Table};

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];
const TABLES: [Table; 4] = [Table::Untracked, Table::PreDnat, Table::Normal, Table::Forward];

pub(super) fn check(snapshot: &Snapshot, absent: &Absent, found: &mut Findings) {
    let oracle = Oracle::new(snapshot);
    let (pods, hosts) = (oracle.pods().next().is_some(), oracle.hosts().next().is_some());
    let applying = applying(&oracle);
    let absent = absent_of(absent);
    for (key, stored, resource) in policies(snapshot) {
        let only_hosts = concerns_only_hosts(resource);
        // Without pods, no statement about this cluster is possible.
        if (pods || (only_hosts && hosts)) && !applying.contains(&key.to_string()) {
            match only_hosts {
                true => about_no_host(key, stored, hosts, found),
                false => about_nobody(key, stored, resource, &absent, found),
            }
        }
    }
    let not_enforced = not_enforced(snapshot);
    for host in oracle.hosts() {
        match not_enforced.get(host.subject().name()) {
            Some(node) => on_windows(host.subject().name(), node, snapshot, found),
            None => of_nobody(&oracle, &host, snapshot, found),
        }
    }
}

fn on_windows(name: &str, node: &str, snapshot: &Snapshot, found: &mut Findings) {
    let key = Key::global(Kind::HostEndpoint, name);
    let Some(stored) = snapshot.get(&key) else { return };
    let text = FindingText::new(
        format!("it is not enforced: node {node} is a Windows node, and host endpoints are for Linux nodes"),
        "policies that select it close nothing there",
        "close the node's ports by the Windows firewall, and take the host endpoint out",
    );
    found.add((&key, stored), "spec.node", (Level::Warning, Code::NotEnforced), text);
}

/// The policies that apply to an endpoint.
fn applying(oracle: &Oracle<'_>) -> BTreeSet<String> {
    let pods =
        oracle.pods().flat_map(|pod| DIRECTIONS.map(|direction| oracle.applying(&pod, direction)).concat());
    let hosts = oracle.hosts().flat_map(|host| TABLES.map(|table| at(oracle, &host, table)).concat());
    let numbers: BTreeSet<usize> = pods.chain(hosts).collect();
    let numbered = oracle.policies().enumerate();
    numbered
        .filter(|(number, _)| numbers.contains(number))
        .map(|(_, policy)| policy.name.to_string())
        .collect()
}

fn at(oracle: &Oracle<'_>, host: &SeenHost<'_>, table: Table) -> Vec<usize> {
    DIRECTIONS.map(|direction| oracle.applying_at(host, table, direction)).concat()
}

/// Policies with doNotTrack and preDNAT do not apply to pods (policy decision 16).
fn concerns_only_hosts(resource: &Resource) -> bool {
    match resource {
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
            policy.spec.do_not_track || policy.spec.pre_dnat
        }
        _ => false,
    }
}

fn about_no_host(key: &Key, stored: &Stored, hosts: bool, found: &mut Findings) {
    if found.has(key, "spec.selector", &[Code::NeverMatches]) {
        return;
    }
    let witness = match hosts {
        true => "policies with doNotTrack or preDNAT are nothing to pods, and it selects no host endpoint",
        false => "policies with doNotTrack or preDNAT are nothing to pods, and there is no host endpoint",
    };
    let advice = "check the selector, remove the field, or remove the policy";
    found.add(
        (key, stored),
        "spec.selector",
        (Level::Warning, Code::SelectsNothing),
        FindingText::new("it is about no host endpoint", witness, advice),
    );
}

/// The pods that policy does not see, by the policies that would select them otherwise.
fn absent_of(absent: &Absent) -> BTreeMap<String, Vec<(Exemption, String)>> {
    let mut by_policy: BTreeMap<String, Vec<(Exemption, String)>> = BTreeMap::new();
    let oracle = absent.oracle();
    let names: Vec<String> = oracle.policies().map(|policy| policy.name.to_string()).collect();
    for pod in oracle.pods() {
        let subject = pod.subject();
        let Some(reason) = absent.reason(&subject) else { continue };
        let numbers: BTreeSet<usize> =
            DIRECTIONS.iter().flat_map(|direction| oracle.applying(&pod, *direction)).collect();
        for policy in numbers.into_iter().filter_map(|number| names.get(number)) {
            let name = format!("{}/{}", subject.namespace(), subject.name());
            by_policy.entry(policy.clone()).or_default().push((reason, name));
        }
    }
    by_policy
}

fn about_nobody(
    key: &Key,
    stored: &Stored,
    resource: &Resource,
    absent: &BTreeMap<String, Vec<(Exemption, String)>>,
    found: &mut Findings,
) {
    let field = match resource {
        Resource::KubernetesNetworkPolicy(_) | Resource::StagedKubernetesNetworkPolicy(_) => {
            "spec.podSelector"
        }
        Resource::ClusterPolicy(policy) if policy.ingress.is_empty() && policy.egress.is_empty() => "spec",
        Resource::ClusterPolicy(_) => "spec.subject",
        _ => "spec.selector",
    };
    let absent = absent.get(&key.to_string()).map_or(&[][..], Vec::as_slice);
    let (problem, advice) = match field {
        "spec" => ("it has no rules, so it has no effect", "give it rules, or take it out"),
        // Others like them may come, such as those of a Job.
        _ if absent.iter().any(|(reason, _)| *reason == Exemption::Ended) => (
            "it is about no pod that runs",
            "nothing, if such pods come again; otherwise take the policy out",
        ),
        _ => ("it is about no pod", "check the selector, or take the policy out"),
    };
    if found.has(key, field, &[Code::NeverMatches]) {
        return;
    }
    let witness = match (absent, key.namespace.as_str()) {
        ([], "") => "none of the cluster's pods is selected".to_owned(),
        ([], namespace) => format!("none of the pods of namespace {namespace} is selected"),
        (absent, _) => witness(absent),
    };
    found.add(
        (key, stored),
        field,
        (Level::Warning, Code::SelectsNothing),
        FindingText::new(problem, witness, advice),
    );
}

/// A packet without an applicable policy or profile is dropped (policy decision 16).
fn of_nobody(oracle: &Oracle<'_>, host: &SeenHost<'_>, snapshot: &Snapshot, found: &mut Findings) {
    let says_something =
        |name: &String| !matches!(oracle.profile_of(name), SeenProfile::WithoutRules | SeenProfile::Missing);
    if host.profiles().iter().any(says_something) {
        return;
    }
    let staged: Vec<bool> = oracle.policies().map(|policy| policy.staged).collect();
    let is_silent = |direction: &&Direction| {
        let applying = TABLES.iter().flat_map(|table| oracle.applying_at(host, *table, **direction));
        !applying.into_iter().any(|number| staged.get(number) == Some(&false))
    };
    let silent: Vec<&Direction> = DIRECTIONS.iter().filter(is_silent).collect();
    let what = match silent.as_slice() {
        [] => return,
        [Direction::Ingress] => "what comes to its node",
        [Direction::Egress] => "what its node sends",
        _ => "packets to and from its node",
    };
    let key = Key::global(Kind::HostEndpoint, host.subject().name());
    let Some(stored) = snapshot.get(&key) else { return };
    let text = FindingText::new(
        format!("no policy and no profile speaks of {what}: it is dropped, but for failsafe ports"),
        format!(
            "no GlobalNetworkPolicy that is in force selects it for that, and it has {}",
            shown(host.profiles())
        ),
        "select it, give it the profile projectcalico-default-allow, or take it out",
    );
    found.add((&key, stored), "", (Level::Warning, Code::NoPolicy), text);
}

fn shown(profiles: &[String]) -> String {
    match profiles {
        [] => "no profile".to_owned(),
        _ => format!("only profiles that do not exist: {}", profiles.join(", ")),
    }
}
