//! While a cluster changes, packets continue: no packet is lost of flows that are allowed before and after, and none
//! passes of flows that are denied before and after. Each packet of a flow begins it anew, because nobody answers.
//!
//! The kernel does not guarantee one thing: a packet that is inside the chains while a transaction takes effect
//! continues with the old rules, but finds the new content of sets and maps. The dataplane adds new objects one
//! transaction earlier, and removes old ones one transaction later. This leaves policies whose rules change at the
//! same instant as the programs that name them, and sets that change together with rules. So a single packet of a
//! flow may go astray once in some thousand changes. The test fails on more than that, and on any packet after the
//! change is done.
//!
//! `PROPTEST_CASES` sets the number of changes.
#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Value, json};
use testkit::clusters::{NODES, Objects, Sent, clusters_of_distinct_pods, manifest, packets};
use testkit::flows::beginnings;
use testkit::kernel::{KernelCluster, Location};
use testkit::random::Random;
use tortie_api::net::{Direction, Protocol};
use tortie_api::{Key, Kind};
use tortie_dataplane::{Delta, NodeState, Report};
use tortie_linux::dataplane::Config;
use tortie_policy::program::{Flow, evaluate};

const CHANGES: u32 = 250;
const NETWORK_CHANGES: u32 = 200;
const PACKETS: usize = 150;
/// In this many changes, one packet may go astray. It was one in a hundred before the dataplane considered packets
/// inside the chains.
const CHANGES_TO_ONE_ASTRAY: usize = 1_000;
/// More flows would only make a round longer than a change.
const FLOWS: usize = 40;

#[test]
fn changes_lose_no_allowed_packet_and_pass_no_denied_one() {
    watch(Config::default(), true);
}

/// A change that does not fit in one transaction closes pods meanwhile, and opens none.
#[test]
fn changes_in_many_transactions_pass_no_denied_packet() {
    watch(Config { transaction_bytes: 24_000, ..Config::default() }, false);
}

/// The kernel shows packets new ranges later than the rules of the same transaction. A packet that meets a new rule and no ranges is lost
/// where the rule allows the ranges, and passes where it allows all others.
#[test]
fn no_packet_meets_a_new_rule_without_its_new_networks() {
    let config = Config::default();
    let processors = sched_getaffinity(None).unwrap();
    let mut cluster = KernelCluster::new(NODES, &config).unwrap();
    let mut seen = Seen::default();
    let flow = |source: &str| Flow {
        source: source.parse().unwrap(),
        destination: "10.0.0.5".parse().unwrap(),
        protocol: Protocol::UDP,
        source_port: 443,
        destination_port: 53,
        icmp: None,
    };
    let allowed = ["10.0.1.0", "203.0.113.9", "192.0.2.1"].map(flow);
    let denied = (1..20).map(|host| flow(&format!("198.51.100.{host}")));
    let flows: Vec<Flow> = allowed.into_iter().chain(denied).collect();
    for number in 0..NETWORK_CHANGES {
        // A network that no rule had before makes the set of networks a new one.
        let of_change = format!("100.64.{number}.0/24");
        let allowed = json!({"nets": ["10.0.0.0/8", "203.0.113.0/24", "192.0.2.0/24", of_change]});
        let denied = json!({"notNets": ["198.51.100.0/24", of_change]});
        let objects = guarded_pod(if number % 2 == 0 { &allowed } else { &denied });
        let step = if number == 0 { Step::Whole } else { Step::Some };
        let watched = Watched { config: &config, processors: &processors, step, lossless: number > 0 };
        watched.change(&mut cluster, &objects, &flows, &mut seen).unwrap();
    }
    println!("{seen:#?}");
    assert!(seen.astray.is_empty() && seen.enough(), "{seen:#?}");
}

/// A pod that admits these sources only.
fn guarded_pod(source: &Value) -> Objects {
    let pod = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": "n2-k8s-p0-eth0", "namespace": "red", "labels": {"app": "p0"}},
        "spec": {
            "node": "n2", "pod": "p0", "endpoint": "eth0", "interfaceName": "cali-red-p0",
            "ipNetworks": ["10.0.0.5/32"], "profiles": [],
        },
    });
    let rule = json!({"action": "Allow", "source": source});
    let policy = json!({
        "metadata": {"name": "guard"},
        "spec": {"tier": "default", "selector": "app == 'p0'", "types": ["Ingress"], "ingress": [rule]},
    });
    vec![
        (Key::namespaced(Kind::WorkloadEndpoint, "red", "n2-k8s-p0-eth0"), pod),
        (Key::global(Kind::GlobalNetworkPolicy, "guard"), policy),
    ]
}

/// How a cluster changes to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Some of its objects change to those of the other one, or are deleted; its pods stay, with other labels.
    Some,
    /// It changes to the other one.
    Whole,
    /// As [`Self::Some`], applied by newly started agents.
    Restarted,
    /// Nothing changes, and everything is compared with the kernel.
    Compared,
}

/// The next cluster, and which of the old objects are kept from it.
type Change = (Objects, Vec<bool>, Step, Vec<Sent>);

fn changes() -> impl Strategy<Value = Change> {
    let step = prop_oneof![
        6 => Just(Step::Some),
        2 => Just(Step::Whole),
        1 => Just(Step::Restarted),
        1 => Just(Step::Compared),
    ];
    let chosen = prop::collection::vec(prop::bool::weighted(0.3), 40);
    (clusters_of_distinct_pods(), chosen, step, prop::collection::vec(packets(), PACKETS))
}

fn watch(config: Config, lossless: bool) {
    let processors = sched_getaffinity(None).unwrap();
    let state = RefCell::new((KernelCluster::new(NODES, &config).unwrap(), Objects::new(), Seen::default()));
    let test = |(new, chosen, step, packets): Change| {
        let (cluster, old, seen) = &mut *state.borrow_mut();
        let new = match step {
            Step::Whole => new,
            Step::Some | Step::Restarted => mixed(old, &new, &chosen),
            Step::Compared => old.clone(),
        };
        let watched = Watched { config: &config, processors: &processors, step, lossless };
        watched.change(cluster, &new, &beginnings(&packets), seen).map_err(|error| {
            let (old, new) = (manifest(old), manifest(&new));
            TestCaseError::fail(format!("{step:?}: {error}\nold.yml:\n{old}\nnew.yml:\n{new}"))
        })?;
        *old = new;
        Ok(())
    };
    let lacking = || {
        let (_, _, seen) = &*state.borrow();
        (!seen.enough()).then(|| format!("{seen:#?}"))
    };
    let result = Random::cases(CHANGES).prove(&changes(), test, lacking);
    let (_, _, seen) = state.into_inner();
    println!("{seen:#?}");
    if let Err(error) = result {
        panic!("{error}");
    }
    let astray = (seen.changes / CHANGES_TO_ONE_ASTRAY).max(1);
    assert!(seen.astray.len() <= astray, "{:#?}", seen.astray);
}

/// The old cluster with some objects of the new one. Its pods stay where they are.
fn mixed(old: &Objects, new: &Objects, chosen: &[bool]) -> Objects {
    let map = |objects: &Objects| objects.iter().cloned().collect::<BTreeMap<Key, Value>>();
    let (old, new) = (map(old), map(new));
    let keys: BTreeSet<&Key> = old.keys().chain(new.keys()).collect();
    let mut mixed = Objects::new();
    for (key, chosen) in keys.into_iter().zip(chosen.iter().chain(std::iter::repeat(&false))) {
        let is_pod = key.kind == Kind::WorkloadEndpoint;
        let value = match (old.get(key), new.get(key)) {
            (Some(pod), Some(other)) if is_pod && *chosen => {
                let mut pod = pod.clone();
                pod["metadata"]["labels"] = other["metadata"]["labels"].clone();
                pod["spec"]["ports"] = other["spec"]["ports"].clone();
                Some(pod)
            }
            (there, _) if is_pod => there.cloned(),
            (_, other) if *chosen => other.cloned(),
            (there, _) => there.cloned(),
        };
        mixed.extend(value.map(|value| (key.clone(), value)));
    }
    mixed
}

/// Ensures that the test does not pass for lack of cases.
#[derive(Debug, Default)]
struct Seen {
    changes: usize,
    /// Rounds of packets that were sent during a change.
    during: usize,
    /// Packets of flows that are allowed before and after.
    allowed: usize,
    /// Packets of flows that are denied before and after.
    denied: usize,
    /// Single packets that were lost or let through at the instant of a change.
    astray: Vec<String>,
}

impl Seen {
    /// Whether there was traffic all the time.
    fn enough(&self) -> bool {
        [self.during, self.allowed, self.denied].iter().all(|count| *count >= self.changes)
    }
}

/// One change.
struct Watched<'a> {
    config: &'a Config,
    /// The processors that the test may use.
    processors: &'a CpuSet,
    step: Step,
    lossless: bool,
}

impl Watched<'_> {
    /// Changes the cluster while packets are sent.
    fn change(
        &self,
        cluster: &mut KernelCluster,
        new: &Objects,
        flows: &[Flow],
        seen: &mut Seen,
    ) -> Result<(), String> {
        let flows: Vec<Flow> = flows.iter().filter(|flow| cluster.is_of_pods(flow)).copied().collect();
        let before: Vec<_> = flows.iter().map(|flow| Seat::new(cluster, flow)).collect();
        let deltas = match self.step {
            Step::Restarted => cluster.restart(self.config, new).unwrap(),
            _ => cluster.update_calc(new),
        };
        cluster.connect().unwrap();
        let mut chosen = Vec::new();
        for (flow, before) in flows.into_iter().zip(before) {
            chosen.extend(before.then(&Seat::new(cluster, &flow)).map(|passes| (flow, passes)));
        }
        chosen.truncate(FLOWS);
        let flows: Vec<Flow> = chosen.iter().map(|(flow, _)| *flow).collect();
        let traffic = cluster.traffic(&flows).unwrap();
        cluster.forget_connections().unwrap();
        let mut look = || -> Result<Vec<String>, String> {
            let passed = traffic.send().map_err(|error| format!("{error:#}"))?;
            let mut astray = Vec::new();
            for (index, (flow, passes)) in chosen.iter().enumerate() {
                *if *passes { &mut seen.allowed } else { &mut seen.denied } += 1;
                match (passes, passed.contains(&index)) {
                    (true, false) if self.lossless => astray.push(format!("lost: {flow:?}")),
                    (false, true) => astray.push(format!("let through: {flow:?}")),
                    _ => {}
                }
            }
            Ok(astray)
        };
        let (reports, rounds) = std::thread::scope(|scope| {
            let change = scope.spawn(|| self.apply(cluster, &deltas));
            let mut rounds = Vec::new();
            while !change.is_finished() && rounds.iter().all(Result::is_ok) {
                rounds.push(look());
            }
            (change.join().unwrap(), rounds)
        });
        let afterwards = look()?;
        seen.changes += 1;
        seen.during += rounds.len();
        let astray = rounds.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
        if astray.len() > 1 || !afterwards.is_empty() {
            return Err(format!("during the change: {astray:#?}; afterwards: {afterwards:#?}"));
        }
        seen.astray.extend(astray);
        // What does not fit in one of several transactions is closed and reported.
        let has_condition =
            |report: &Report| report.retry || report.conditions().next().is_some() && self.lossless;
        match reports.iter().any(has_condition) {
            true => Err(format!("{reports:?}")),
            false => Ok(()),
        }
    }

    /// On another processor than that of the packets.
    fn apply(&self, cluster: &mut KernelCluster, deltas: &[Vec<Delta>; 2]) -> [Report; 2] {
        let sending = sched_getaffinity(None).unwrap();
        let mut others = *self.processors;
        (0..CpuSet::MAX_CPU).filter(|cpu| sending.is_set(*cpu)).for_each(|cpu| others.unset(cpu));
        let others = if others.count() == 0 { sending } else { others };
        sched_setaffinity(None, &others).unwrap();
        match self.step {
            Step::Compared => cluster.resync().unwrap(),
            _ => cluster.apply(deltas).unwrap(),
        }
    }
}

/// The ends of a flow, and the verdicts of their policies.
struct Seat {
    places: [Option<Location>; 2],
    allowed: [bool; 2],
}

impl Seat {
    fn new(cluster: &KernelCluster, flow: &Flow) -> Self {
        let states = cluster.states();
        let says = |address, direction| {
            let endpoint = |state: &&NodeState| {
                let mut endpoints = state.endpoints.values();
                endpoints.find(|endpoint| endpoint.addresses.contains(&address)).cloned()
            };
            let found = states.iter().find_map(|state| Some((endpoint(state)?, *state)));
            found.is_none_or(|(endpoint, state)| evaluate(&endpoint.program, direction, flow, state))
        };
        Self {
            places: [flow.source, flow.destination].map(|address| cluster.location(address).cloned()),
            allowed: [says(flow.source, Direction::Egress), says(flow.destination, Direction::Ingress)],
        }
    }

    /// Whether the flow's packets always pass during the change to this second state, or never; `None` if neither is
    /// guaranteed. The nodes change one after another: only what one end denies all the time never passes.
    fn then(&self, next: &Self) -> Option<bool> {
        let still = |end: usize| self.places[end] == next.places[end];
        let always = (0..2).all(|end| self.allowed[end] && next.allowed[end]);
        let never = (0..2).any(|end| !self.allowed[end] && !next.allowed[end]);
        (still(0) && still(1) && (always || never)).then_some(always)
    }
}
