//! Policy verdicts of mixed clusters by real frames: between Linux nodes on this kernel and Windows nodes with an emulated
//! HNS and its switch, what arrives is what the oracle lets through, whichever systems a flow's ends are on.
//!
//! `PROPTEST_CASES` says how many clusters; each is asked about some dozens of flows between its pods, with another HNS and
//! another way to render policy by turns of chance. A disagreement shrinks to a manifest and an `explain` command; the test
//! prints what has been asked, and what is known to be narrower.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // helpers of tests

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config as TestConfig, TestError, TestRunner};
use serde_json::{Value, json};
use testkit::clusters::{Objects, Sent, clusters_of_distinct_pods, manifest, packets};
use testkit::emulator::{RENDERINGS, Rendering};
use testkit::flows::beginnings;
use testkit::mixed::{Cluster, NODES, System, addresses, between_pods, placed};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_dataplane::Report;
use tortie_hns_emulator::{Config, SetReading, SeveralSets};
use tortie_policy::oracle::{Answer, Oracle, Peer, Question, Snapshot, Trace, Verdict};
use tortie_policy::program::Flow;

const CLUSTERS: u32 = 220;
const PACKETS: usize = 120;

/// The one exception: ICMP types in rules, which HNS cannot match. Less is allowed, and the endpoint bears this condition.
const ICMP_TYPES: &str = "RuleNotExpressible";

const CLASSES: [&str; 6] = [
    "Linux to Windows",
    "Windows to Linux",
    "Windows, same node",
    "Windows, other node",
    "Linux, same node",
    "Linux, other node",
];
const FROM_OWN_NODE: [&str; 2] = ["own node to Linux", "own node to Windows"];
const FROM_OTHER_NODES: [&str; 2] = ["other node to Linux", "other node to Windows"];
const PROTOCOLS: [&str; 4] = ["TCP", "UDP", "SCTP", "ICMP"];
const READINGS: [SetReading; 2] = [SetReading::Endpoint, SetReading::Flow];
const NARROWER: &str = "narrower: ICMP types";

/// Flows in clusters where ACLs name sets, which HNS reads in that way.
fn by_sets_as(reading: SetReading) -> String {
    format!("by sets, read as {reading:?}")
}

/// Every HNS that is asked, by a name.
fn every_hns() -> Vec<(String, Config)> {
    let mut all = Vec::new();
    for version in [Config::SERVER_2019, Config::SERVER_2022, Config::NEWEST] {
        for set_reading in READINGS {
            for several_sets in [SeveralSets::Union, SeveralSets::Intersection] {
                let preset = Config::new(version, Ipv4Addr::UNSPECIFIED);
                let name = format!("HNS {version}, sets as {set_reading:?} and {several_sets:?}");
                all.push((name, Config { set_reading, several_sets, ..preset }));
            }
        }
    }
    // It has no sets.
    all.drain(1..4);
    all
}

/// One cluster on one HNS.
#[derive(Debug, Clone)]
struct Case {
    hns: String,
    config: Config,
    rendering: Rendering,
    objects: Objects,
    packets: Vec<Sent>,
}

fn cases() -> impl Strategy<Value = Case> {
    let packets = prop::collection::vec(packets(), PACKETS).boxed();
    let policies = (prop::collection::vec(by_selectors(), 0..3).boxed(), any::<bool>());
    let cluster = (clusters_of_distinct_pods().boxed(), policies, addresses().boxed());
    // Where there is a choice, sets more often: there is more to be read wrong.
    let rendering = prop_oneof![1 => Just(RENDERINGS[0]), 2 => Just(RENDERINGS[1])];
    (select(every_hns()), rendering, cluster, packets).prop_map(
        |((hns, config), rendering, (mut objects, (policies, open), addresses), packets)| {
            let named = |(index, spec)| global_policy(&format!("by-selectors-{index}"), spec);
            objects.extend(policies.into_iter().enumerate().map(named));
            objects.extend(open.then(open_at_last));
            let rendering = if (rendering.suits)(&config) { rendering } else { RENDERINGS[0] };
            let objects = placed(&objects, &addresses);
            let packets = between_pods(&packets, &objects);
            Case { hns, config, rendering, objects, packets }
        },
    )
}

/// A policy whose peers are those whom selectors find: where ACLs name sets, they are sets.
fn by_selectors() -> impl Strategy<Value = Value> {
    let peers = || select(vec!["a == 'x'", "has(b)", "a != 'x'", "b in {'x', 'y'}", "!has(a)"]);
    let action = || select(vec!["Allow", "Deny", "Pass"]);
    let rules = |side: &'static str| {
        let rule = (action(), peers())
            .prop_map(move |(action, peers)| json!({"action": action, side: {"selector": peers}}));
        prop::collection::vec(rule, 1..3)
    };
    (0..3u8, select(vec!["all()", "has(a)", "!has(b)"]), rules("source"), rules("destination")).prop_map(
        |(order, pods, ingress, egress)| {
            json!({"order": order, "selector": pods, "types": ["Ingress", "Egress"], "ingress": ingress, "egress": egress})
        },
    )
}

/// Allows what no other policy has decided: else most would be denied for want of one.
fn open_at_last() -> (Key, Value) {
    let allow = json!([{"action": "Allow"}]);
    let spec = json!({"order": 1e6, "types": ["Ingress", "Egress"], "ingress": allow, "egress": allow});
    global_policy("open-at-last", spec)
}

fn global_policy(name: &str, spec: Value) -> (Key, Value) {
    (Key::global(Kind::GlobalNetworkPolicy, name), json!({"metadata": {"name": name}, "spec": spec}))
}

#[test]
fn what_arrives_in_a_mixed_cluster_is_what_the_oracle_lets_through() {
    let clusters =
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CLUSTERS);
    let nodes = RefCell::new(BTreeMap::new());
    let asked = RefCell::new(Asked::default());
    let config = TestConfig {
        cases: clusters,
        max_shrink_iters: 300,
        failure_persistence: None,
        ..TestConfig::default()
    };
    let result = TestRunner::new(config).run(&cases(), |case| {
        let mut nodes = nodes.borrow_mut();
        let cluster = nodes.entry(case.hns.clone()).or_insert_with(|| Cluster::new(&case.config).unwrap());
        compare(cluster, &case, &mut asked.borrow_mut()).map_err(|error| {
            // What went wrong may have been in the middle of a change.
            nodes.remove(&case.hns);
            TestCaseError::fail(error)
        })
    });
    println!("{}", asked.borrow().table());
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, _)) => panic!("{reason}"),
        Err(other) => panic!("{other}"),
    }
    asked.borrow().check(clusters);
}

/// Makes the cluster, and sends every packet.
fn compare(cluster: &mut Cluster, case: &Case, asked: &mut Asked) -> Result<(), String> {
    let all: Objects = cluster.node_objects().chain(&case.objects).cloned().collect();
    let shown = || format!("{}, {}\ncluster.yml:\n{}", case.hns, case.rendering.name, manifest(&all));
    let failed = |error: anyhow::Error| format!("{error:#}\n{}", shown());
    let reports = cluster.change(&case.objects, case.rendering).map_err(failed)?;
    in_force(&reports).map_err(|error| format!("{error}\n{}", shown()))?;
    let by_sets = cluster.acls_that_name_sets().map_err(failed)? > 0;
    let mut snapshot = Snapshot::new();
    for (key, value) in &all {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let oracle = Oracle::new(&snapshot);
    let mut flows = beginnings(&case.packets);
    flows.extend(from_nodes(cluster));
    let passed = cluster.passed(&flows).map_err(failed)?;
    for (index, flow) in flows.iter().enumerate() {
        let (arrives, answer) = (passed.contains(&index), oracle_says(&oracle, flow));
        let allowed = [&answer.egress, &answer.ingress].into_iter().all(is_allowed);
        let narrower = allowed && !arrives && may_be_narrower(cluster, &reports, flow);
        if arrives != allowed && !narrower {
            let said =
                [&answer.egress, &answer.ingress].map(|trace| trace.as_ref().map(|trace| trace.verdict));
            return Err(format!(
                "{flow:?}\n{}: arrives: {arrives}; the oracle: {said:?}\n{}\n\
                 tortie explain -f cluster.yml {} {} --port {}",
                class(cluster, flow),
                shown(),
                flow.source,
                flow.destination,
                shown_port(flow),
            ));
        }
        asked.note(class(cluster, flow), flow, arrives, narrower);
        if by_sets {
            asked.count(&by_sets_as(case.config.set_reading), arrives);
        }
    }
    Ok(())
}

/// Nodes say nothing, and pods on Windows at most the one thing that is known.
fn in_force(reports: &[Report]) -> Result<(), String> {
    for (report, (node, system)) in reports.iter().zip(NODES) {
        let known = |reason| system == System::Windows && reason == ICMP_TYPES;
        let told = report.conditions().any(|condition| !known(condition.reason));
        if report.retry || !report.node.is_empty() || told {
            return Err(format!("{node}: {report:?}"));
        }
    }
    Ok(())
}

/// From each node's own kernel to each pod.
fn from_nodes(cluster: &Cluster) -> Vec<Flow> {
    let pods: Vec<IpAddr> = cluster.pods().collect();
    let of_node = |node| pods.iter().map(move |pod| cluster.from_node(node, *pod, 53));
    (0..NODES.len()).flat_map(of_node).collect()
}

/// Whether an end of the flow bears the condition that its ACLs allow less.
fn may_be_narrower(cluster: &Cluster, reports: &[Report], flow: &Flow) -> bool {
    let is_told = |address| {
        let at = cluster.place(address);
        let told = at.and_then(|at| reports[at.node].endpoints.get(&at.endpoint));
        told.is_some_and(|told| told.iter().any(|condition| condition.reason == ICMP_TYPES))
    };
    flow.protocol == Protocol::ICMP && (is_told(flow.source) || is_told(flow.destination))
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

fn is_allowed(trace: &Option<Trace>) -> bool {
    trace.as_ref().is_none_or(|trace| trace.verdict == Verdict::Allow)
}

fn shown_port(flow: &Flow) -> String {
    match flow.icmp {
        Some((kind, _)) => format!("icmp/{kind}"),
        None => format!("{}/{}", flow.protocol.to_string().to_lowercase(), flow.destination_port),
    }
}

/// Which of [`CLASSES`] a flow is of, or where it comes from if that is a node.
fn class(cluster: &Cluster, flow: &Flow) -> &'static str {
    let node = |address: IpAddr| cluster.place(address).map(|place| place.node);
    let to = node(flow.destination).unwrap();
    let Some(from) = node(flow.source) else {
        let is_own = cluster.from_node(to, flow.destination, flow.destination_port) == *flow;
        return match (is_own, NODES[to].1) {
            (true, System::Linux) => FROM_OWN_NODE[0],
            (true, System::Windows) => FROM_OWN_NODE[1],
            (false, System::Linux) => FROM_OTHER_NODES[0],
            (false, System::Windows) => FROM_OTHER_NODES[1],
        };
    };
    let index = match (NODES[from].1, NODES[to].1) {
        (System::Linux, System::Windows) => 0,
        (System::Windows, System::Linux) => 1,
        (System::Windows, System::Windows) if from == to => 2,
        (System::Windows, System::Windows) => 3,
        (System::Linux, System::Linux) if from == to => 4,
        (System::Linux, System::Linux) => 5,
    };
    CLASSES[index]
}

/// How many flows of each kind were sent, and how many arrived.
#[derive(Default)]
struct Asked(BTreeMap<String, (usize, usize)>);

impl Asked {
    fn note(&mut self, class: &str, flow: &Flow, arrives: bool, narrower: bool) {
        self.count("all", arrives);
        self.count(&format!("{class}, {}", flow.protocol), arrives);
        if narrower {
            self.count(NARROWER, arrives);
        }
    }

    fn count(&mut self, kind: &str, arrives: bool) {
        let (sent, arrived) = self.0.entry(kind.to_owned()).or_default();
        *sent += 1;
        *arrived += usize::from(arrives);
    }

    fn table(&self) -> String {
        let rows = self.0.iter().map(|(kind, (sent, arrived))| format!("{kind:26} {sent:>8} {arrived:>8}\n"));
        format!("{:26} {:>8} {:>8}\n", "flows", "sent", "arrived") + &rows.collect::<String>()
    }

    /// Every class and protocol must have been asked about, and every reading of sets; and both have arrived and not, in
    /// proportion to the number of clusters.
    fn check(&self, clusters: u32) {
        let clusters = usize::try_from(clusters).unwrap();
        let kinds = CLASSES.iter().flat_map(|class| PROTOCOLS.map(|protocol| format!("{class}, {protocol}")));
        let others =
            READINGS.map(by_sets_as).into_iter().chain(FROM_OTHER_NODES.map(|from| format!("{from}, UDP")));
        for kind in kinds.chain(others) {
            let (sent, arrived) = self.0.get(&kind).copied().unwrap_or_default();
            let fewest = (clusters / 100).max(1);
            let both = arrived >= fewest && sent - arrived >= fewest;
            assert!(both, "{kind}: {sent} flows were sent, {arrived} arrived: that proves little");
        }
        for from in FROM_OWN_NODE {
            let (sent, arrived) = self.0[&format!("{from}, UDP")];
            assert!(sent >= clusters / 10 && arrived == sent, "{from}: {arrived} of {sent} arrived");
        }
        let ((all, _), narrower) = (self.0["all"], self.0.get(NARROWER).map_or(0, |(sent, _)| *sent));
        assert!(all >= clusters * 20, "only {all} flows of {clusters} clusters");
        assert!(narrower * 50 < all, "{narrower} of {all} flows are narrower");
    }
}
