//! Policies about nobody, rules that match nothing here, and rules that never decide.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tortie_api::net::{Action, Direction};
use tortie_api::{Key, Kind, Resource};

use super::{Code, Findings, Level, Said, policies};
use crate::oracle::{DecidedBy, Mismatch, Oracle, PolicyName, SeenPod, Snapshot, Stored, TierTrace, Trace};
use crate::reach::{Classes, Judge, Ports, is_policy};

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];

/// The cluster as seen by packets of one family: pods with addresses of both are asked about in two views.
struct View {
    classes: Classes,
    reduced: Snapshot,
}

pub(super) fn check(snapshot: &Snapshot, found: &mut Findings) {
    let views: Vec<View> = by_family(snapshot)
        .into_iter()
        .map(|snapshot| {
            let classes = Classes::of(&[&snapshot]);
            let reduced = classes.reduced(&snapshot);
            View { classes, reduced }
        })
        .collect();
    let oracle = Oracle::new(snapshot);
    // Without pods nothing can be said of this cluster.
    if oracle.pods().next().is_none() {
        return;
    }
    let decide = deciding(&views);
    let of_pod = |pod: SeenPod<'_>| DIRECTIONS.map(|direction| oracle.applying(&pod, direction)).concat();
    let applying: BTreeSet<usize> = oracle.pods().flat_map(of_pod).collect();
    let numbers: BTreeMap<String, usize> =
        oracle.policies().enumerate().map(|(number, policy)| (policy.name.to_string(), number)).collect();
    for (key, stored, resource) in policies(snapshot) {
        let Some(number) = numbers.get(&key.to_string()) else { continue };
        let about_hosts =
            stored.value["spec"]["doNotTrack"] == true || stored.value["spec"]["preDNAT"] == true;
        // Whom else a policy of the whole cluster is about cannot be said by pods.
        let about_hosts = about_hosts
            || (key.namespace.is_empty() && oracle.hosts().next().is_some() && !applying.contains(number));
        if !about_hosts && !applying.contains(number) {
            about_nobody(key, stored, resource, found);
        } else if !about_hosts && !is_staged(key.kind) {
            of_rules(key, stored, resource, (*number, &views, &decide), found);
        }
    }
}

fn is_staged(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::StagedNetworkPolicy | Kind::StagedGlobalNetworkPolicy | Kind::StagedKubernetesNetworkPolicy
    )
}

fn about_nobody(key: &Key, stored: &Stored, resource: &Resource, found: &mut Findings) {
    let field = match resource {
        Resource::KubernetesNetworkPolicy(_) | Resource::StagedKubernetesNetworkPolicy(_) => {
            "spec.podSelector"
        }
        Resource::ClusterPolicy(policy) if policy.ingress.is_empty() && policy.egress.is_empty() => "spec",
        Resource::ClusterPolicy(_) => "spec.subject",
        _ => "spec.selector",
    };
    let (problem, advice) = match field {
        "spec" => ("it has no rules, so it has no say", "give it rules, or take it out"),
        _ => ("it is about no pod", "check the selector, or take the policy out"),
    };
    if found.has(key, field, &[Code::NeverMatches]) {
        return;
    }
    let witness = match key.namespace.as_str() {
        "" => "none of the cluster's pods is selected".to_owned(),
        namespace => format!("none of the pods of namespace {namespace} is selected"),
    };
    found.add(
        (key, stored),
        field,
        (Level::Warning, Code::SelectsNothing),
        Said::new(problem, witness, advice),
    );
}

/// The cluster, or where pods have addresses of both families, the cluster as IPv4 and as IPv6 know it.
fn by_family(snapshot: &Snapshot) -> Vec<Snapshot> {
    let both = |stored: &Stored| match &stored.resource {
        Ok(Resource::WorkloadEndpoint(endpoint)) => {
            let v4 = |net: &ipnet::IpNet| net.addr().is_ipv4();
            endpoint.spec.ip_networks.iter().any(v4) && !endpoint.spec.ip_networks.iter().all(v4)
        }
        _ => false,
    };
    let dual: Vec<(Key, Stored)> = snapshot
        .iter()
        .filter(|(_, stored)| both(stored))
        .map(|(key, stored)| (key.clone(), stored.clone()))
        .collect();
    if dual.is_empty() {
        return vec![snapshot.clone()];
    }
    let mut v6 = snapshot.clone();
    for (key, mut stored) in dual {
        if let Some(nets) = stored.value["spec"]["ipNetworks"].as_array_mut() {
            nets.retain(|net| net.as_str().is_some_and(|net| net.contains(':')));
        }
        v6.insert(key, stored.value, stored.written);
    }
    vec![snapshot.clone(), v6]
}

type RuleName = (PolicyName, Direction, usize);

/// Every rule that decides about some flow, or passes it on.
fn deciding(views: &[View]) -> BTreeSet<RuleName> {
    let mut rules = BTreeSet::new();
    for view in views {
        let mut judge = Judge::new(&view.classes, &view.reduced, 0);
        for subject in 0..view.classes.all().len() {
            for direction in DIRECTIONS {
                for (_, _, trace) in judge.traces(subject, direction) {
                    let decided = trace.tiers.iter().filter_map(decided);
                    rules.extend(decided.map(|(policy, number)| (policy.clone(), direction, number)));
                }
            }
        }
    }
    rules
}

/// The rule that decided in a tier, if one did.
fn decided(tier: &TierTrace) -> Option<(&PolicyName, usize)> {
    let mut enforced =
        tier.policies.iter().filter(|policy| !policy.staged && policy.not_understood.is_none());
    let policy = enforced.find(|policy| policy.decision.is_some())?;
    Some((&policy.policy, policy.rules.last()?.number))
}

fn of_rules(
    key: &Key,
    stored: &Stored,
    resource: &Resource,
    (number, views, decide): (usize, &[View], &BTreeSet<RuleName>),
    found: &mut Findings,
) {
    for direction in DIRECTIONS {
        let side = if direction == Direction::Ingress { "ingress" } else { "egress" };
        for (index, action) in actions(resource, direction).into_iter().enumerate() {
            let field = format!("spec.{side}[{index}]");
            let name = PolicyName {
                kind: key.kind.to_string(),
                namespace: key.namespace.clone(),
                name: key.name.clone(),
            };
            let decides = decide.contains(&(name, direction, index + 1));
            let explained = [Code::NeverMatches, Code::MatchesNothing, Code::UnknownLabel, Code::ClusterIp];
            let known = found.has(key, &field, &explained)
                || found.is_known(key, &format!("spec.{side}"), Code::NeverMatches);
            if decides || action == Action::Log || known {
                continue;
            }
            match alone(Rule { key, stored, number, direction, index }, views) {
                Alone::Matches { deciders, witness } => {
                    let by = deciders.into_iter().collect::<Vec<_>>().join("; ");
                    let said = Said::new(
                        format!("it never decides: everything that it matches is decided before, by {by}"),
                        witness,
                        "move it before that, narrow that, or take it out",
                    );
                    found.add((key, stored), &field, (Level::Warning, Code::Shadowed), said);
                }
                Alone::Nothing(mismatch) => {
                    let witness = match mismatch {
                        Some(Mismatch { field, wanted, .. }) => {
                            format!("nobody here gets past {field}: {wanted}")
                        }
                        None => "no flow of this cluster reaches it".to_owned(),
                    };
                    let said = Said::new(
                        "it matches nothing in this cluster",
                        witness,
                        "check its criteria, or take it out if nothing like that will come",
                    );
                    found.add((key, stored), &field, (Level::Warning, Code::MatchesNothing), said);
                }
            }
        }
    }
}

fn actions(resource: &Resource, direction: Direction) -> Vec<Action> {
    let ingress = direction == Direction::Ingress;
    let calico = |rules: &[tortie_api::calico::Rule]| rules.iter().map(|rule| rule.action).collect();
    match resource {
        Resource::NetworkPolicy(policy) => {
            calico(if ingress { &policy.spec.ingress } else { &policy.spec.egress })
        }
        Resource::GlobalNetworkPolicy(policy) => {
            calico(if ingress { &policy.spec.ingress } else { &policy.spec.egress })
        }
        Resource::KubernetesNetworkPolicy(policy) => {
            let rules = if ingress { &policy.spec.ingress } else { &policy.spec.egress };
            vec![Action::Allow; rules.len()]
        }
        Resource::ClusterPolicy(policy) => {
            let rules = if ingress { &policy.ingress } else { &policy.egress };
            rules.iter().map(|rule| rule.action).collect()
        }
        _ => Vec::new(),
    }
}

/// What a rule would do if its policy were the only one, and it the policy's only rule.
enum Alone {
    /// It matches; who decides instead, and about which flow.
    Matches { deciders: BTreeSet<String>, witness: String },
    /// It matches nothing; the criterion that holds last, or never.
    Nothing(Option<Mismatch>),
}

/// How many of the rules that decide instead are named.
const MOST_DECIDERS: usize = 3;

/// A rule of a policy, the policy by its number in the order of all.
#[derive(Clone, Copy)]
struct Rule<'a> {
    key: &'a Key,
    stored: &'a Stored,
    number: usize,
    direction: Direction,
    index: usize,
}

fn alone(rule: Rule<'_>, views: &[View]) -> Alone {
    let (mut deciders, mut witness) = (BTreeSet::new(), None);
    for view in views {
        let single = single(&view.reduced, rule);
        let mut would = Judge::new(&view.classes, &single, 0);
        let judge = Judge::new(&view.classes, &view.reduced, 0);
        for (subject, peer, port, tier) in matching(&mut would, view, rule) {
            let Some(trace) = judge.trace(subject, peer, port, rule.direction) else { continue };
            let by = instead(&view.reduced, &trace, &tier);
            let (from, to) =
                if rule.direction == Direction::Egress { (subject, peer) } else { (peer, subject) };
            if witness.is_none()
                && let Some(question) = judge.question(from, to, port)
            {
                let port = Ports::shown(&view.classes.ports().sample(port));
                witness = Some(format!("{} → {} {port}: {by}", question.from, question.to));
            }
            if deciders.len() < MOST_DECIDERS {
                deciders.insert(by);
            }
        }
    }
    match witness {
        Some(witness) => Alone::Matches { deciders, witness },
        None => Alone::Nothing(farthest(rule, views)),
    }
}

/// What comes before the rule: another one of its tier, or what ends the packet's way in an earlier tier.
fn instead(snapshot: &Snapshot, trace: &Trace, tier: &str) -> String {
    let own = trace.tiers.iter().find(|known| known.name == tier);
    let by = match own.and_then(decided) {
        Some((policy, number)) => DecidedBy::Rule { policy: policy.clone(), number },
        None => trace.decided_by.clone(),
    };
    shown(snapshot, trace.direction, &by)
}

/// The classes that the rule's policy has a say about.
fn subjects(view: &View, rule: Rule<'_>) -> Vec<usize> {
    let number = [BTreeSet::from([rule.number])];
    let classes = view.classes.all().iter().enumerate();
    let about = classes.filter(|(_, class)| view.classes.has_say(class, 0, &number, rule.direction));
    about.map(|(index, _)| index).collect()
}

/// The flows that the rule matches where it stands alone: subject, peer, port, and the rule's tier.
fn matching(would: &mut Judge<'_>, view: &View, rule: Rule<'_>) -> Vec<(usize, usize, usize, String)> {
    let mut all = Vec::new();
    for subject in subjects(view, rule) {
        for (peer, port, trace) in would.traces(subject, rule.direction) {
            let tier = trace.tiers.iter().find(|tier| decided(tier).is_some());
            all.extend(tier.map(|tier| (subject, peer, port, tier.name.clone())));
        }
    }
    all
}

/// The criterion that keeps the rule from matching those who come nearest.
fn farthest(rule: Rule<'_>, views: &[View]) -> Option<Mismatch> {
    let mut found = Vec::new();
    for view in views {
        let single = single(&view.reduced, rule);
        let mut would = Judge::new(&view.classes, &single, 0);
        for subject in subjects(view, rule) {
            for (_, _, trace) in would.traces(subject, rule.direction) {
                let rules =
                    trace.tiers.into_iter().flat_map(|tier| tier.policies).flat_map(|policy| policy.rules);
                found.extend(rules.filter_map(|rule| rule.mismatch));
            }
        }
    }
    found.into_iter().max_by_key(|mismatch| rank(&mismatch.field))
}

/// The order in which criteria are looked at: what fails late has passed the others.
fn rank(field: &str) -> usize {
    let order = [
        "ipVersion",
        "protocol",
        "notProtocol",
        "icmp",
        "notICMP",
        "source",
        "destination",
        "http",
        "from",
        "to",
        "ports",
    ];
    order.iter().position(|known| field.starts_with(known)).unwrap_or(0)
}

/// The cluster with this rule alone.
fn single(snapshot: &Snapshot, rule: Rule<'_>) -> Snapshot {
    let Rule { key, stored, direction, index, .. } = rule;
    let mut single = snapshot.only(|key, _| !is_policy(key.kind));
    let mut value = stored.value.clone();
    let (side, other, word) = match direction {
        Direction::Ingress => ("ingress", "egress", "Ingress"),
        Direction::Egress => ("egress", "ingress", "Egress"),
    };
    let rule = value["spec"][side].get(index).cloned().unwrap_or(Value::Null);
    if let Some(spec) = value.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove(other);
        spec.insert(side.to_owned(), json!([rule]));
        match key.kind {
            Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => {
                drop(spec.insert("types".to_owned(), json!([word])))
            }
            Kind::KubernetesNetworkPolicy => drop(spec.insert("policyTypes".to_owned(), json!([word]))),
            _ => {}
        }
    }
    single.insert(key.clone(), value, stored.written.clone());
    single
}

fn shown(snapshot: &Snapshot, direction: Direction, by: &DecidedBy) -> String {
    let side = if direction == Direction::Ingress { "ingress" } else { "egress" };
    let place = |policy: &PolicyName, field: &str| {
        let kind = Kind::all().find(|kind| kind.to_string() == policy.kind)?;
        let key = Key { kind, namespace: policy.namespace.clone(), name: policy.name.clone() };
        snapshot.get(&key)?.place(field).map(|place| format!(" ({place})"))
    };
    match by {
        DecidedBy::Rule { policy, number } => {
            let place = place(policy, &format!("spec.{side}[{}]", number.saturating_sub(1)));
            format!("{policy}, rule {number}{}", place.unwrap_or_default())
        }
        DecidedBy::NotUnderstood { policy } => {
            format!("{policy}, which cannot be understood{}", place(policy, "").unwrap_or_default())
        }
        DecidedBy::EndOfTier { tier } => format!("the end of tier {tier}"),
        DecidedBy::NoProfile | DecidedBy::Nobody | DecidedBy::EndpointToHost { .. } => {
            "the end of all policy".to_owned()
        }
    }
}
