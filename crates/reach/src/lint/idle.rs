//! Rules that match nothing in this cluster, and rules that never decide. Staged policies are examined as if they
//! were enforced, and profiles on their own.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tortie_api::calico::FailsafePort;
use tortie_api::net::{Action, Direction, IpVersion};
use tortie_api::{Key, Kind, Port, ProtocolName, Resource};

use super::{Code, FindingText, Findings, Level, policies};
use crate::{Classes, Judge, Ports, Stop};
use tortie_api::staged::{Staged, enforced, staged};
use tortie_oracle::{DecidedBy, Mismatch, Oracle, PolicyName, PolicyTrace, Snapshot, Stored, Trace};

const DIRECTIONS: [Direction; 2] = [Direction::Ingress, Direction::Egress];
const FAMILIES: [IpVersion; 2] = IpVersion::ALL;

/// The cluster, reduced to the representatives of its classes.
struct Cluster {
    classes: Classes,
    reduced: Snapshot,
    /// The ports that no policy closes on the node of any host endpoint, in and out.
    failsafe: [Vec<FailsafePort>; 2],
}

/// A packet at a stop: its sender, receiver and port.
#[derive(Clone, Copy)]
struct PacketAtStop {
    /// The classes of the sender, the receiver and the ports.
    classes: (usize, usize, usize),
    stop: Stop,
    family: IpVersion,
}

/// A policy or profile whose rules are examined.
struct Owner<'a> {
    /// The key of the written object.
    key: &'a Key,
    stored: &'a Stored,
    resource: &'a Resource,
    /// The policy's index in evaluation order; profiles have none.
    number: Option<usize>,
    /// The key of the enforced object: for a staged policy, the policy that it stands for.
    in_force: Key,
    /// The cluster in which that object is enforced, if it is a different one.
    instead: Option<Snapshot>,
}

/// One of its rules.
#[derive(Clone, Copy)]
struct Rule<'a> {
    owner: &'a Owner<'a>,
    direction: Direction,
    index: usize,
}

type RuleName = (PolicyName, Direction, usize);

pub(super) fn check(snapshot: &Snapshot, found: &mut Findings) {
    let oracle = Oracle::new(snapshot);
    // Without pods and host endpoints, no statement about this cluster is possible.
    if oracle.pods().next().is_none() && oracle.hosts().next().is_none() {
        return;
    }
    let classes = Classes::with_staged(snapshot);
    let reduced = classes.reduced(snapshot);
    let of_hosts =
        |direction| oracle.hosts().flat_map(|host| oracle.failsafe_ports(host.node(), direction)).collect();
    let cluster = Cluster { classes, reduced, failsafe: DIRECTIONS.map(of_hosts) };
    let numbers: BTreeMap<String, usize> =
        oracle.policies().enumerate().map(|(number, policy)| (policy.name.to_string(), number)).collect();
    let decide = cluster.deciding_policies();
    for (key, stored, resource) in policies(snapshot).chain(profiles(snapshot)) {
        let number = numbers.get(&key.to_string()).copied();
        let Some((in_force, instead)) = cluster.in_force(key, stored) else { continue };
        let owner = Owner { key, stored, resource, number, in_force, instead };
        if !cluster.is_about_somebody(&owner) {
            continue;
        }
        match owner.is_enforced() {
            true => of_rules(&owner, &cluster, &decide, found),
            false => of_rules(&owner, &cluster, &cluster.deciding(&owner), found),
        }
    }
}

/// Every profile that was understood.
fn profiles(snapshot: &Snapshot) -> impl Iterator<Item = (&Key, &Stored, &Resource)> {
    let profiles = snapshot.iter().filter(|(key, _)| key.kind == Kind::Profile);
    profiles.filter_map(|(key, stored)| Some((key, stored, stored.resource.as_ref().ok()?)))
}

impl Cluster {
    /// The object that would be enforced for a policy or profile, and the cluster with it, if that is a different
    /// one; `None` if the policy is staged without effect.
    fn in_force(&self, key: &Key, stored: &Stored) -> Option<(Key, Option<Snapshot>)> {
        let Some(enforced) = enforced(key) else { return Some((key.clone(), None)) };
        let Staged::Set(value) = staged(&stored.value, enforced.kind) else { return None };
        let mut instead = self.reduced.clone();
        instead.remove(key);
        instead.insert(enforced.clone(), value, stored.written.clone());
        Some((enforced, Some(instead)))
    }

    /// The cluster in which a policy is enforced.
    fn with<'a>(&'a self, owner: &'a Owner<'_>) -> &'a Snapshot {
        owner.instead.as_ref().unwrap_or(&self.reduced)
    }

    /// Every rule of an enforced policy that decides about some flow, or passes it on.
    fn deciding_policies(&self) -> BTreeSet<RuleName> {
        let mut judge = Judge::new(&self.classes, &self.reduced, 0);
        let mut rules = BTreeSet::new();
        for packet in packets(&mut judge, |_, _| true) {
            for trace in traces(&judge, packet) {
                let policies = trace.tiers.iter().flat_map(|tier| &tier.policies);
                let decided = policies.filter_map(|policy| Some((policy.policy.clone(), deciding(policy)?)));
                rules.extend(decided.map(|(policy, number)| (policy, trace.direction, number)));
            }
        }
        rules
    }

    /// Every rule of an object that is not enforced as it is (a staged policy or a profile) that would decide about
    /// some flow.
    fn deciding(&self, owner: &Owner<'_>) -> BTreeSet<RuleName> {
        let mut judge = Judge::new(&self.classes, self.with(owner), 0);
        let mut rules = BTreeSet::new();
        for packet in packets(&mut judge, |class, stop| self.concerns(owner, class, stop)) {
            for direction in DIRECTIONS {
                let traces = owner.traces(&judge, packet, direction).into_iter();
                let numbers = traces.filter_map(|(policy, _)| deciding(&policy));
                rules.extend(numbers.map(|number| (owner.name(), direction, number)));
            }
        }
        rules
    }

    /// The destination ports of a rule, if all of them are failsafe ports.
    fn only_failsafe(&self, resource: &Resource, direction: Direction, index: usize) -> Option<Vec<String>> {
        let (Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy)) = resource
        else {
            return None;
        };
        let (rules, failsafe) = match direction {
            Direction::Ingress => (&policy.spec.ingress, &self.failsafe[0]),
            Direction::Egress => (&policy.spec.egress, &self.failsafe[1]),
        };
        let rule = rules.get(index)?;
        let ProtocolName(protocol) = rule.protocol?;
        let is_failsafe =
            |number| failsafe.iter().any(|port| port.protocol.0 == protocol && port.port == number);
        let shown = |port: &Port| match port {
            Port::Range(range) if (range.first..=range.last).all(is_failsafe) => {
                let protocol = protocol.to_string().to_lowercase();
                let last = if range.first == range.last { String::new() } else { format!("-{}", range.last) };
                Some(format!("{protocol}/{}{last}", range.first))
            }
            _ => None,
        };
        let ports: Option<Vec<String>> = rule.destination.ports.iter().map(shown).collect();
        ports.filter(|ports| !ports.is_empty())
    }

    fn concerns(&self, owner: &Owner<'_>, class: usize, stop: Stop) -> bool {
        match owner.number {
            _ if owner.is_profile() => self.classes.has_profile(class, stop, &owner.key.name),
            Some(number) => self.classes.has_say(class, stop, 0, &BTreeSet::from([number])),
            None => false,
        }
    }

    fn is_about_somebody(&self, owner: &Owner<'_>) -> bool {
        let mut classes = 0..self.classes.all().len();
        classes.any(|class| Stop::ALL.iter().any(|stop| self.concerns(owner, class, *stop)))
    }

    /// Pods have no failsafe ports.
    fn is_about_pods(&self, owner: &Owner<'_>) -> bool {
        let mut classes = 0..self.classes.all().len();
        let stops = [Stop::Sender, Stop::Receiver];
        classes.any(|class| stops.iter().any(|stop| self.concerns(owner, class, *stop)))
    }
}

/// One packet of each kind that the policies of these classes distinguish at these stops.
fn packets(judge: &mut Judge<'_>, concerned: impl Fn(usize, Stop) -> bool) -> Vec<PacketAtStop> {
    let mut all = Vec::new();
    for stop in Stop::ALL {
        for family in FAMILIES {
            let packets = judge.packets(|class| concerned(class, stop), stop, family);
            all.extend(packets.into_iter().map(|classes| PacketAtStop { classes, stop, family }));
        }
    }
    all
}

fn traces(
    judge: &Judge<'_>,
    PacketAtStop { classes: (from, to, port), stop, family }: PacketAtStop,
) -> Vec<Trace> {
    judge.traces_of(from, to, port, stop, family)
}

/// The number of the rule that decided, if the policy is not staged and one of its rules did.
fn deciding(policy: &PolicyTrace) -> Option<usize> {
    policy.decision.filter(|_| policy.not_understood.is_none() && !policy.staged)?;
    Some(policy.rules.last()?.number)
}

impl Owner<'_> {
    /// Its name in traces.
    fn name(&self) -> PolicyName {
        let Key { kind, namespace, name } = &self.in_force;
        PolicyName { kind: kind.to_string(), namespace: namespace.clone(), name: name.clone() }
    }

    fn is_profile(&self) -> bool {
        self.key.kind == Kind::Profile
    }

    /// Whether it is enforced as it is, so that any packet may reach it; profiles are examined on their own.
    fn is_enforced(&self) -> bool {
        self.instead.is_none() && !self.is_profile()
    }

    fn by_profile(
        &self,
        judge: &Judge<'_>,
        PacketAtStop { classes, stop, family }: PacketAtStop,
    ) -> Option<PolicyTrace> {
        judge.by_profile(&self.key.name, classes, stop, family)
    }

    /// Its results for a packet in one direction; for policies with the trace of the table that contains them.
    fn traces(
        &self,
        judge: &Judge<'_>,
        packet: PacketAtStop,
        direction: Direction,
    ) -> Vec<(PolicyTrace, Option<Trace>)> {
        if self.is_profile() {
            let profile = self.by_profile(judge, packet).filter(|_| packet.stop.direction() == direction);
            return profile.into_iter().map(|profile| (profile, None)).collect();
        }
        let name = self.name();
        let of_trace = |trace: Trace| {
            let policies = trace.tiers.iter().flat_map(|tier| &tier.policies);
            let policy = policies.into_iter().find(|policy| policy.policy == name)?.clone();
            Some((policy, Some(trace)))
        };
        let here = traces(judge, packet).into_iter().filter(|trace| trace.direction == direction);
        here.filter_map(of_trace).collect()
    }
}

fn of_rules(owner: &Owner<'_>, cluster: &Cluster, decide: &BTreeSet<RuleName>, found: &mut Findings) {
    for direction in DIRECTIONS {
        let side = side(direction);
        for (index, action) in actions(owner.resource, direction).into_iter().enumerate() {
            let field = format!("spec.{side}[{index}]");
            let decides = decide.contains(&(owner.name(), direction, index + 1));
            let explained = [Code::NeverMatches, Code::MatchesNothing, Code::UnknownLabel, Code::ClusterIp];
            let known = found.has(owner.key, &field, &explained)
                || found.is_known(owner.key, &format!("spec.{side}"), Code::NeverMatches);
            if decides || action == Action::Log || known {
                continue;
            }
            let is_for_pods = cluster.is_about_pods(owner);
            let failsafe_ports = cluster.only_failsafe(owner.resource, direction, index);
            if let Some(ports) = failsafe_ports.filter(|_| !is_for_pods) {
                let level = if action == Action::Deny { Level::Warning } else { Level::Note };
                found.add(
                    (owner.key, owner.stored),
                    &field,
                    (level, Code::Failsafe),
                    failsafe(&ports, action),
                );
                continue;
            }
            let (code, text) = match alone(Rule { owner, direction, index }, cluster) {
                Alone::Matches { deciders, witness } => (Code::Shadowed, shadowed(owner, deciders, witness)),
                Alone::Nothing(mismatch) => (Code::MatchesNothing, matches_nothing(mismatch)),
            };
            found.add((owner.key, owner.stored), &field, (Level::Warning, code), text);
        }
    }
}

fn failsafe(ports: &[String], action: Action) -> FindingText {
    let advice = match action {
        Action::Deny => {
            "take the ports out of the failsafe ports of FelixConfiguration, or take the rule out"
        }
        _ => "nothing: it counts once the ports are no failsafe ports any more",
    };
    FindingText::new(
        format!(
            "it never decides: {} are failsafe ports, which pass before policy is evaluated",
            ports.join(", ")
        ),
        "FelixConfiguration or its defaults list them (docs/policy.md)",
        advice,
    )
}

fn shadowed(owner: &Owner<'_>, deciders: BTreeSet<String>, witness: String) -> FindingText {
    let by = deciders.into_iter().collect::<Vec<_>>().join("; ");
    let never = if owner.instead.is_some() { "it would never decide" } else { "it never decides" };
    FindingText::new(
        format!("{never}: everything that it matches is decided before, by {by}"),
        witness,
        "move it before that, narrow that, or take it out",
    )
}

fn matches_nothing(mismatch: Option<Mismatch>) -> FindingText {
    let witness = match mismatch {
        Some(Mismatch { field, wanted, .. }) => format!("nobody here gets past {field}: {wanted}"),
        None => "no flow of this cluster reaches it".to_owned(),
    };
    FindingText::new(
        "it matches nothing in this cluster",
        witness,
        "check its criteria, or take it out if nothing like that will come",
    )
}

/// The actions of its rules.
fn actions(resource: &Resource, direction: Direction) -> Vec<Action> {
    let ingress = direction == Direction::Ingress;
    let calico = |into: &[tortie_api::calico::Rule], out_of: &[tortie_api::calico::Rule]| {
        let rules = if ingress { into } else { out_of };
        rules.iter().map(|rule| rule.action).collect()
    };
    match resource {
        Resource::NetworkPolicy(policy) | Resource::StagedNetworkPolicy(policy) => {
            calico(&policy.spec.ingress, &policy.spec.egress)
        }
        Resource::GlobalNetworkPolicy(policy) | Resource::StagedGlobalNetworkPolicy(policy) => {
            calico(&policy.spec.ingress, &policy.spec.egress)
        }
        Resource::Profile(profile) => calico(&profile.spec.ingress, &profile.spec.egress),
        Resource::KubernetesNetworkPolicy(policy) | Resource::StagedKubernetesNetworkPolicy(policy) => {
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

/// The effect of a rule if its policy were the only one, and the rule the only rule in it.
enum Alone {
    /// It matches; `deciders` are the deciders that precede it, and `witness` is one flow.
    Matches { deciders: BTreeSet<String>, witness: String },
    /// It matches nothing; the criterion that fails last.
    Nothing(Option<Mismatch>),
}

/// The maximum number of named deciders.
const MAX_DECIDERS: usize = 3;

fn alone(rule: Rule<'_>, cluster: &Cluster) -> Alone {
    let single = single(&cluster.reduced, rule);
    let mut would = Judge::new(&cluster.classes, &single, 0);
    let judge = Judge::new(&cluster.classes, cluster.with(rule.owner), 0);
    let (mut deciders, mut witness, mut mismatches) = (BTreeSet::new(), None, Vec::new());
    for packet in packets(&mut would, |class, stop| cluster.concerns(rule.owner, class, stop)) {
        for (policy, trace) in rule.owner.traces(&would, packet, rule.direction) {
            if policy.decision.is_none() {
                mismatches.extend(policy.rules.into_iter().filter_map(|rule| rule.mismatch));
                continue;
            }
            let Some(by) = instead(rule, &judge, packet, trace.as_ref()) else { continue };
            let by = shown(cluster.with(rule.owner), rule, &by);
            let (from, to, port) = packet.classes;
            if let (None, Some(question)) = (&witness, judge.question(from, to, port, packet.stop)) {
                let port = Ports::shown(&cluster.classes.ports().sample(port));
                witness = Some(format!("{} → {} {port}: {by}", question.from, question.to));
            }
            if deciders.len() < MAX_DECIDERS {
                deciders.insert(by);
            }
        }
    }
    match witness {
        Some(witness) => Alone::Matches { deciders, witness },
        None => Alone::Nothing(mismatches.into_iter().max_by_key(|mismatch| rank(&mismatch.field))),
    }
}

/// The decider before the rule: another rule of its policy or tier, or a decider that ends the evaluation earlier.
/// `alone` is the trace with only this rule.
fn instead(
    rule: Rule<'_>,
    judge: &Judge<'_>,
    packet: PacketAtStop,
    alone: Option<&Trace>,
) -> Option<DecidedBy> {
    let owner = rule.owner;
    let of_rule = |policy: &PolicyTrace| {
        Some(DecidedBy::Rule { policy: policy.policy.clone(), number: deciding(policy)? })
    };
    let Some(alone) = alone else { return of_rule(&owner.by_profile(judge, packet)?) };
    let traces = traces(judge, packet);
    let same_table = |trace: &&Trace| (trace.table, trace.reply) == (alone.table, alone.reply);
    let Some(trace) = traces.iter().find(same_table) else {
        // An earlier table decided.
        return Some(traces.last()?.decided_by.clone());
    };
    let name = owner.name();
    let of_owner = |policies: &[PolicyTrace]| policies.iter().any(|policy| policy.policy == name);
    let tier = alone.tiers.iter().find(|tier| of_owner(&tier.policies)).map(|tier| &tier.name);
    let own = trace.tiers.iter().find(|known| Some(&known.name) == tier);
    let before = own.and_then(|tier| tier.policies.iter().find_map(of_rule));
    Some(before.unwrap_or_else(|| trace.decided_by.clone()))
}

/// The evaluation order of criteria: a criterion that fails late means that the earlier ones matched.
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

/// The cluster with this rule as its only policy rule.
fn single(snapshot: &Snapshot, rule: Rule<'_>) -> Snapshot {
    let Rule { owner, direction, index } = rule;
    let mut single = snapshot.only(|key, _| !key.kind.is_policy());
    let key = &owner.in_force;
    let current = owner.instead.as_ref().and_then(|snapshot| snapshot.get(key)).unwrap_or(owner.stored);
    let mut value = current.value.clone();
    let (side, other, word) = match direction {
        Direction::Ingress => ("ingress", "egress", "Ingress"),
        Direction::Egress => ("egress", "ingress", "Egress"),
    };
    let rule = value["spec"][side].get(index).cloned().unwrap_or(Value::Null);
    if let Some(spec) = value.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove(other);
        spec.insert(side.to_owned(), json!([rule]));
        let types = match key.kind {
            Kind::KubernetesNetworkPolicy => Some("policyTypes"),
            Kind::NetworkPolicy | Kind::GlobalNetworkPolicy => Some("types"),
            _ => None,
        };
        if let Some(types) = types {
            spec.insert(types.to_owned(), json!([word]));
        }
    }
    single.insert(key.clone(), value, current.written.clone());
    single
}

fn side(direction: Direction) -> &'static str {
    if direction == Direction::Ingress { "ingress" } else { "egress" }
}

fn shown(snapshot: &Snapshot, Rule { owner, direction, .. }: Rule<'_>, by: &DecidedBy) -> String {
    let side = side(direction);
    let location = |policy: &PolicyName, field: &str| {
        let kind = Kind::all().find(|kind| kind.to_string() == policy.kind)?;
        let key = Key { kind, namespace: policy.namespace.clone(), name: policy.name.clone() };
        snapshot.get(&key)?.location(field).map(|location| format!(" ({location})"))
    };
    match by {
        DecidedBy::Rule { policy, number } => {
            let location = location(policy, &format!("spec.{side}[{}]", number.saturating_sub(1)));
            let policy = if *policy == owner.name() { owner.key.to_string() } else { policy.to_string() };
            format!("{policy}, rule {number}{}", location.unwrap_or_default())
        }
        DecidedBy::NotUnderstood { policy } => {
            format!("{policy}, which cannot be understood{}", location(policy, "").unwrap_or_default())
        }
        DecidedBy::EndOfTier { tier } => format!("the end of tier {tier}"),
        DecidedBy::Failsafe => "failsafe ports".to_owned(),
        DecidedBy::StaticRule { node, name } => format!("the static rule {name} of node {node}"),
        DecidedBy::BuiltIn { rule } => rule.clone(),
        DecidedBy::NoProfile | DecidedBy::Nobody | DecidedBy::EndpointToHost { .. } => {
            "the end of all policy".to_owned()
        }
    }
}
