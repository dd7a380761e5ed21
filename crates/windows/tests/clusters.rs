//! Whole random clusters of Windows nodes: what HNS does with a packet is what the oracle says, whatever HNS is, in every
//! position of the knobs and by every way to render policy; and what does not concern an endpoint breaks no connection
//! of it.
//!
//! Each combination of what verdicts depend on is asked in turn; `PROPTEST_CASES` says how many clusters it gets, each of
//! which follows from another one. A disagreement shrinks to a manifest and an `explain` command; the tests print what
//! has been asked, and what is known to be narrower.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // helpers of tests

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::ensure;
use proptest::prelude::*;
use proptest::test_runner::{Config as TestConfig, TestError, TestRunner};
use serde_json::Value;
use testkit::clusters::{NODES, Objects, Sent, clusters_of_distinct_pods, manifest, packets};
use testkit::emulator::{Cluster, Ends, RENDERINGS, Rendering, on_windows};
use testkit::flows::beginnings;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_dataplane::Report;
use tortie_hcn::Version;
use tortie_hns_emulator::{
    AclRemoval, Config, DefaultAction, EqualPriority, OnRewrite, SetReading, SeveralSets, UpdateReplaces,
};
use tortie_policy::oracle::{Answer, Oracle, Peer, Question, Snapshot, Trace, Verdict};
use tortie_policy::program::Flow;

/// What is asked about each cluster; half of it is of IPv6, of nobody's, or an answer to another one.
const PACKETS: usize = 150;

/// The one exception: ICMP types in rules, which HNS cannot match. Less is allowed, and the endpoint bears this condition.
const ICMP_TYPES: &str = "RuleNotExpressible";

const DEFAULTS: [DefaultAction; 3] =
    [DefaultAction::DenyBoth, DefaultAction::DenySameDirection, DefaultAction::Allow];
const READINGS: [SetReading; 2] = [SetReading::Endpoint, SetReading::Flow];
const SEVERAL: [SeveralSets; 2] = [SeveralSets::Union, SeveralSets::Intersection];
const REWRITES: [OnRewrite; 3] =
    [OnRewrite::ResetOnAnyChange, OnRewrite::Keep, OnRewrite::ResetOnRemoveOrUpdate];
const REMOVALS: [AclRemoval; 3] = [AclRemoval::Works, AclRemoval::RefusedAlways, AclRemoval::IgnoredSilently];

/// All positions of one knob, for each of what there is already.
fn each<T: Copy>(all: Vec<Config>, positions: &[T], turn: fn(&mut Config, T)) -> Vec<Config> {
    let turned = |config: &Config, position: T| {
        let mut config = config.clone();
        turn(&mut config, position);
        config
    };
    all.iter().flat_map(|config| positions.iter().map(move |position| turned(config, *position))).collect()
}

/// Every HNS of that version that verdicts may depend on. What is seen of a Service and what becomes of ICMP errors is not
/// asked of packets between pods; what a write does to flows changes no verdict, and takes turns.
fn every_hns(version: Version) -> Vec<Config> {
    let all = vec![Config::new(version, Ipv4Addr::UNSPECIFIED)];
    let all = each(all, &DEFAULTS, |config, position| config.switch_default = position);
    let firewalls = [DEFAULTS.map(Some).to_vec(), vec![None]].concat();
    let all = each(all, &firewalls, |config, position| config.host_default = position);
    let ties = [EqualPriority::BlockWins, EqualPriority::AllowWins];
    let all = each(all, &ties, |config, position| config.equal_priority = position);
    let all = each(all, &READINGS, |config, position| config.set_reading = position);
    let all = each(all, &SEVERAL, |config, position| config.several_sets = position);
    let all = each(all, &REMOVALS, |config, position| config.acl_removal = position);
    let replaces = [UpdateReplaces::All, UpdateReplaces::SameType];
    let mut all = each(all, &replaces, |config, position| config.update_replaces = position);
    for (config, on_rewrite) in all.iter_mut().zip(REWRITES.iter().cycle()) {
        config.on_rewrite = *on_rewrite;
    }
    all
}

fn cases(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(usual)
}

/// A cluster, what it changes into, and packets.
type Change = (Objects, Objects, Vec<Sent>);

/// Half of the time the pods stay, and some of the rest comes or goes.
fn changes() -> impl Strategy<Value = Change> {
    let cluster = || clusters_of_distinct_pods().prop_map(|objects| on_windows(&objects, &NODES)).boxed();
    let packets = prop::collection::vec(packets(), PACKETS).boxed();
    let some = prop::option::of(any::<u64>());
    (cluster(), cluster(), some, any::<bool>(), packets).prop_map(|(all, others, some, comes, packets)| {
        let before = some.map_or(others, |stay| some_of(&all, stay));
        if comes { (before, all, packets) } else { (all, before, packets) }
    })
}

/// All pods, and the other objects whose bits are set.
fn some_of(all: &Objects, bits: u64) -> Objects {
    let stays = |(index, (key, _)): &(usize, &(Key, Value))| is_fixed(key) || bits >> (index % 64) & 1 == 1;
    all.iter().enumerate().filter(stays).map(|(_, object)| object.clone()).collect()
}

fn is_fixed(key: &Key) -> bool {
    matches!(key.kind, Kind::WorkloadEndpoint | Kind::Node)
}

fn run(
    cases: u32,
    changes: &impl Strategy<Value = Change>,
    test: impl Fn(&Change) -> Result<(), String>,
) -> Result<(), String> {
    let config =
        TestConfig { cases, max_shrink_iters: 2_000, failure_persistence: None, ..TestConfig::default() };
    let result = TestRunner::new(config).run(changes, |case| test(&case).map_err(TestCaseError::fail));
    result.map_err(|error| match error {
        TestError::Fail(reason, _) => reason.to_string(),
        other => other.to_string(),
    })
}

#[test]
fn server_2019_and_the_oracle_agree() {
    agree(Config::SERVER_2019);
}

#[test]
fn server_2022_and_the_oracle_agree() {
    agree(Config::SERVER_2022);
}

#[test]
fn the_newest_hns_and_the_oracle_agree() {
    agree(Config::NEWEST);
}

fn agree(version: Version) {
    let asked = RefCell::new(Asked::default());
    let all = every_hns(version);
    let mut clusters = 0;
    for config in &all {
        let sets_as_ever = config.set_reading == READINGS[0] && config.several_sets == SEVERAL[0];
        let differs = |rendering: &&Rendering| rendering.names_sets || sets_as_ever;
        for rendering in RENDERINGS.iter().filter(differs).filter(|rendering| (rendering.suits)(config)) {
            let result = run(cases(1), &changes(), |(before, after, packets)| {
                let mut cluster = Cluster::new(&NODES, config, *rendering).unwrap();
                cluster.change(before).map_err(|error| format!("{error:#}"))?;
                compare(&mut cluster, after, packets, &mut asked.borrow_mut())
            });
            if let Err(error) = result {
                panic!("{}: {error}\n{config:?}\n{}", rendering.name, asked.borrow().table());
            }
            clusters += cases(1);
        }
    }
    println!("HNS {version}, {} combinations\n{}", all.len(), asked.borrow().table());
    asked.borrow().check(clusters as usize);
}

/// A policy, tier, profile, set or service comes or goes: connections of endpoints whose ACLs stay as they were go on,
/// and those of the others as the knob says. The same once more is no write at all.
#[test]
fn what_does_not_concern_an_endpoint_breaks_no_connection_of_it() {
    let (kept, broken) = (RefCell::new(0), RefCell::new(0));
    let version = Config::NEWEST;
    for on_rewrite in REWRITES {
        let config = Config { on_rewrite, ..Config::new(version, Ipv4Addr::UNSPECIFIED) };
        for rendering in RENDERINGS.iter().filter(|rendering| (rendering.suits)(&config)) {
            let result = run(cases(1) * 60, &one_changes(), |(before, after, packets)| {
                let mut cluster = Cluster::new(&NODES, &config, *rendering).unwrap();
                let counts = connections(&mut cluster, before, after, packets, on_rewrite);
                let (on, off) = counts.map_err(|error| format!("{error:#}\n{}", manifest(after)))?;
                *kept.borrow_mut() += on;
                *broken.borrow_mut() += off;
                Ok(())
            });
            if let Err(error) = result {
                panic!("{} {on_rewrite:?}: {error}", rendering.name);
            }
        }
    }
    let (kept, broken) = (kept.take(), broken.take());
    println!("{kept} ends of connections went on, {broken} were reset");
    assert!(kept > 300 && broken > 30, "{kept} and {broken} prove little");
}

/// A cluster with and without one of the objects that policy is made of.
fn one_changes() -> impl Strategy<Value = Change> {
    let chosen = (changes(), any::<prop::sample::Index>(), any::<bool>());
    chosen.prop_filter_map("nothing to choose from", |((_, all, packets), index, comes)| {
        let others: Vec<&Key> = all.iter().map(|(key, _)| key).filter(|key| !is_fixed(key)).collect();
        let gone = (!others.is_empty()).then(|| index.get(&others))?;
        let rest = all.iter().filter(|(key, _)| key != *gone).cloned().collect();
        Some(if comes { (rest, all, packets) } else { (all, rest, packets) })
    })
}

/// How many ends of connections went on, and how many were reset.
fn connections(
    cluster: &mut Cluster,
    before: &Objects,
    after: &Objects,
    packets: &[Sent],
    on_rewrite: OnRewrite,
) -> anyhow::Result<(usize, usize)> {
    cluster.change(before)?;
    let flows = flows_of_pods(cluster, packets);
    let mut open = Vec::new();
    for flow in flows {
        if cluster.open(&flow)?.all() {
            open.push((flow, cluster.endpoints(&flow)?));
        }
    }
    cluster.change(after)?;
    let (mut kept, mut broken) = (0, 0);
    for (flow, old) in open {
        let (new, is_open) = (cluster.endpoints(&flow)?, cluster.is_open(&flow)?);
        for (old, new, is_open) in
            [(old.egress, new.egress, is_open.egress), (old.ingress, new.ingress, is_open.ingress)]
        {
            let (Some(old), Some(new), Some(is_open)) = (old, new, is_open) else { continue };
            let lost = old.policies.iter().any(|policy| !new.policies.contains(policy));
            let expected = match on_rewrite {
                OnRewrite::Keep => true,
                OnRewrite::ResetOnAnyChange => old.policies == new.policies,
                OnRewrite::ResetOnRemoveOrUpdate => !lost,
            };
            ensure!(is_open == expected, "{flow:?}: {is_open}\n{old:#?}\n{new:#?}");
            if is_open { kept += 1 } else { broken += 1 }
        }
    }
    (0..NODES.len()).for_each(|node| drop(cluster.hns(node).take()));
    cluster.change(after)?;
    for node in 0..NODES.len() {
        let sent = cluster.hns(node).take_changes();
        ensure!(sent.is_empty(), "sent again: {sent:?}");
    }
    Ok((kept, broken))
}

/// Makes the change, and asks about every packet of pods.
fn compare(
    cluster: &mut Cluster,
    objects: &Objects,
    packets: &[Sent],
    asked: &mut Asked,
) -> Result<(), String> {
    let reports = cluster.change(objects).map_err(|error| format!("{error:#}"))?;
    let shown = || format!("cluster.yml:\n{}", manifest(objects));
    in_force(&reports).map_err(|error| format!("{error}\n{}", shown()))?;
    let snapshot = snapshot(objects);
    let oracle = Oracle::new(&snapshot);
    for flow in &flows_of_pods(cluster, packets) {
        let ours = cluster.judge(flow).map_err(|error| format!("{error:#}"))?;
        let answer = oracle_says(&oracle, flow);
        let [egress, ingress] = [
            (flow.source, ours.egress, verdict(&answer.egress)),
            (flow.destination, ours.ingress, verdict(&answer.ingress)),
        ]
        .map(|(address, passes, allowed)| {
            let is_told = |reason| is_told(cluster, &reports, address, reason);
            match passes {
                None => Outcome::Same,
                Some(passes) if passes == allowed => Outcome::Same,
                Some(false) if flow.protocol == Protocol::ICMP && is_told(ICMP_TYPES) => Outcome::Narrower,
                Some(_) => Outcome::Wrong,
            }
        });
        if [egress, ingress].contains(&Outcome::Wrong) {
            let said =
                [&answer.egress, &answer.ingress].map(|trace| trace.as_ref().map(|trace| trace.verdict));
            return Err(format!(
                "{flow:?}\n{ours:?}; the oracle: {said:?}\n{:#?}\n{}\ntortie explain -f cluster.yml {} {} --port {}",
                cluster.endpoints(flow),
                shown(),
                flow.source,
                flow.destination,
                shown_port(flow),
            ));
        }
        asked.note(cluster, flow, ours, egress.max(ingress));
    }
    Ok(())
}

/// How HNS and the oracle compare at one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Same,
    Narrower,
    Wrong,
}

fn verdict(trace: &Option<Trace>) -> bool {
    trace.as_ref().is_none_or(|trace| trace.verdict == Verdict::Allow)
}

fn snapshot(objects: &Objects) -> Snapshot {
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    snapshot
}

fn flows_of_pods(cluster: &Cluster, packets: &[Sent]) -> Vec<Flow> {
    let flows = beginnings(packets).into_iter();
    flows.filter(|flow| flow.source.is_ipv4() && cluster.is_of_pods(flow)).collect()
}

/// Nodes say nothing, and endpoints at most the one thing that is known.
fn in_force(reports: &[Report]) -> Result<(), String> {
    for report in reports {
        let mut told = report.conditions();
        if report.retry || !report.node.is_empty() || told.any(|condition| condition.reason != ICMP_TYPES) {
            return Err(format!("{report:?}"));
        }
    }
    Ok(())
}

fn is_told(cluster: &Cluster, reports: &[Report], address: IpAddr, reason: &str) -> bool {
    let told = cluster.place(address).and_then(|place| reports[place.node].endpoints.get(&place.endpoint));
    told.is_some_and(|told| told.iter().any(|condition| condition.reason == reason))
}

fn oracle_says(oracle: &Oracle<'_>, flow: &Flow) -> Answer {
    let question = Question {
        from: Peer::Address(flow.source),
        to: Peer::Address(flow.destination),
        protocol: flow.protocol,
        source_port: flow.source_port,
        destination_port: flow.destination_port,
        icmp: flow.icmp,
        via: None,
    };
    oracle.evaluate(&question).unwrap()
}

fn shown_port(flow: &Flow) -> String {
    match flow.icmp {
        Some((kind, _)) => format!("icmp/{kind}"),
        None => format!("{}/{}", flow.protocol.to_string().to_lowercase(), flow.destination_port),
    }
}

/// How many flows of each kind were asked about, and how many passed.
#[derive(Default)]
struct Asked(BTreeMap<String, (usize, usize)>);

const NARROWER: &str = "narrower: ICMP types";

impl Asked {
    fn note(&mut self, cluster: &Cluster, flow: &Flow, ours: Ends<bool>, outcome: Outcome) {
        let node = |address| cluster.place(address).map(|place| place.node);
        let own_node = |address, node| testkit::emulator::node_address(node as u8) == address;
        let way = match (node(flow.source), node(flow.destination)) {
            (Some(from), Some(to)) if from == to => "within a node",
            (Some(_), Some(_)) => "across nodes",
            (Some(_), None) => "to the world",
            (None, Some(to)) if own_node(flow.source, to) => "from its own node",
            _ => "from the world",
        };
        let known = match outcome {
            Outcome::Narrower => Some(NARROWER.to_owned()),
            Outcome::Same | Outcome::Wrong => None,
        };
        let kinds = ["all".to_owned(), flow.protocol.to_string(), way.to_owned()];
        for kind in kinds.into_iter().chain(known) {
            let (sent, through) = self.0.entry(kind).or_default();
            *sent += 1;
            *through += usize::from(ours.all());
        }
    }

    fn table(&self) -> String {
        let rows = self.0.iter().map(|(kind, (sent, passed))| format!("{kind:22} {sent:>8} {passed:>8}\n"));
        format!("{:22} {:>8} {:>8}\n", "flows", "asked", "passed") + &rows.collect::<String>()
    }

    /// Every kind must have been asked about, and both have passed and not; and the exception must be one.
    fn check(&self, clusters: usize) {
        let of = |kind: &str| self.0.get(kind).copied().unwrap_or_default();
        for kind in
            ["TCP", "UDP", "SCTP", "ICMP", "within a node", "across nodes", "to the world", "from the world"]
        {
            let (sent, passed) = of(kind);
            let fewest = clusters / 10;
            let both = passed >= fewest && sent - passed >= fewest;
            assert!(both, "{kind}: {sent} flows, {passed} passed: that proves little");
        }
        let (probes, passed) = of("from its own node");
        assert!(
            probes >= clusters / 10 && probes == passed,
            "a node reaches its own pods: {passed} of {probes}"
        );
        let (all, (narrower, _)) = (of("all").0, of(NARROWER));
        assert!(all >= clusters * 50, "only {all} flows of {clusters} clusters");
        assert!(narrower * 50 < all, "{narrower} of {all} flows are narrower");
    }
}
