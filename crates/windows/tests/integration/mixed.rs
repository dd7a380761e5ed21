//! Policy verdicts of mixed clusters with real frames: between Linux nodes on this kernel and Windows nodes with an
//! emulated HNS and its switch, what arrives is what the oracle lets through, whichever systems a flow's ends are on.
//!
//! `PROPTEST_CASES` sets the number of clusters. Each gets some dozens of flows between its pods, with a random HNS
//! configuration and rendering. A disagreement shrinks to a manifest and an `explain` command. The test prints what
//! was covered, and what is known to be narrower.
#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use testkit::clusters::{Objects, Sent, clusters_of_distinct_pods, manifest, packets, snapshot};
use testkit::emulator::{RENDERINGS, Rendering};
use testkit::exceptions::Exception;
use testkit::flows::{beginnings, explain, judged};
use testkit::mixed::{MixedCluster, NODES, System, addresses, between_pods, placed};
use testkit::random::{Random, Tally};
use tortie_api::{Key, Kind};
use tortie_dataplane::Report;
use tortie_hns_emulator::{Config, SetReading, SeveralSets};
use tortie_oracle::{Oracle, Trace, Verdict};
use tortie_policy::program::Flow;

const CLUSTERS: u32 = 110;
const PACKETS: usize = 120;

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

/// The kind of flows in clusters where ACLs name sets, by the emulator's interpretation.
fn by_sets_as(reading: SetReading) -> String {
    format!("by sets, read as {reading:?}")
}

/// Every tested configuration of HNS, by name.
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
    // If there is a choice, sets are more frequent, because they can be misinterpreted.
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

/// A policy with selectors for its peers, which become sets if ACLs name sets.
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

/// Allows what no other policy has decided; otherwise most flows would be denied because nothing allows them.
fn open_at_last() -> (Key, Value) {
    let allow = json!([{"action": "Allow"}]);
    let spec = json!({"order": 1e6, "types": ["Ingress", "Egress"], "ingress": allow, "egress": allow});
    global_policy("open-at-last", spec)
}

fn global_policy(name: &str, spec: Value) -> (Key, Value) {
    (Key::global(Kind::GlobalNetworkPolicy, name), json!({"metadata": {"name": name}, "spec": spec}))
}

#[test]
fn mixed_clusters_agree_with_the_oracle() {
    let random = Random::cases(CLUSTERS).shrinking(300);
    let nodes = RefCell::new(BTreeMap::new());
    let tally = RefCell::new(Tally::default());
    let test = |case: Case| {
        let mut nodes = nodes.borrow_mut();
        let cluster =
            nodes.entry(case.hns.clone()).or_insert_with(|| MixedCluster::new(&case.config).unwrap());
        compare(cluster, &case, &mut tally.borrow_mut()).map_err(|error| {
            // The failure may have happened in the middle of a change.
            nodes.remove(&case.hns);
            TestCaseError::fail(error)
        })
    };
    let result = random.prove(&cases(), test, || lacking(&tally.borrow(), random.count()));
    println!("{}", tally.borrow());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Changes to the cluster, and sends every packet.
fn compare(cluster: &mut MixedCluster, case: &Case, tally: &mut Tally) -> Result<(), String> {
    let all: Objects = cluster.node_objects().chain(&case.objects).cloned().collect();
    let shown = || format!("{}, {}\ncluster.yml:\n{}", case.hns, case.rendering.name, manifest(&all));
    let failed = |error: anyhow::Error| format!("{error:#}\n{}", shown());
    let reports = cluster.change(&case.objects, case.rendering).map_err(failed)?;
    in_force(&reports).map_err(|error| format!("{error}\n{}", shown()))?;
    let by_sets = cluster.acls_that_name_sets().map_err(failed)? > 0;
    let snapshot = snapshot(&all);
    let oracle = Oracle::new(&snapshot);
    let mut flows = beginnings(&case.packets);
    flows.extend(from_nodes(cluster));
    let passed = cluster.passed(&flows).map_err(failed)?;
    for (index, flow) in flows.iter().enumerate() {
        let (arrives, answer) = (passed.contains(&index), judged(&oracle, flow));
        let allowed = [&answer.egress, &answer.ingress].into_iter().all(is_allowed);
        let narrower = if allowed && !arrives { exception(cluster, &reports, flow) } else { None };
        if arrives != allowed && narrower.is_none() {
            let answer =
                [&answer.egress, &answer.ingress].map(|trace| trace.as_ref().map(|trace| trace.verdict));
            return Err(format!(
                "{flow:?}\n{}: arrives: {arrives}; the oracle: {answer:?}\n{}\n{}",
                class(cluster, flow),
                shown(),
                explain(flow),
            ));
        }
        let kinds = ["all".to_owned(), format!("{}, {}", class(cluster, flow), flow.protocol)];
        let others = [
            narrower.map(|exception| exception.name().to_owned()),
            by_sets.then(|| by_sets_as(case.config.set_reading)),
        ];
        kinds.into_iter().chain(others.into_iter().flatten()).for_each(|kind| tally.count(kind, arrives));
    }
    Ok(())
}

/// Nodes have no conditions, and pods on Windows only known ones.
fn in_force(reports: &[Report]) -> Result<(), String> {
    for (report, (node, system)) in reports.iter().zip(NODES) {
        let known = |reported: &_| {
            system == System::Windows
                && Exception::ALL.iter().any(|exception| exception.is_reported_by(reported))
        };
        let reported = report.conditions().any(|condition| !known(condition));
        if report.retry || !report.node.is_empty() || reported {
            return Err(format!("{node}: {report:?}"));
        }
    }
    Ok(())
}

/// From each node's own kernel to each pod.
fn from_nodes(cluster: &MixedCluster) -> Vec<Flow> {
    let pods: Vec<IpAddr> = cluster.pods().collect();
    let of_node = |node| pods.iter().map(move |pod| cluster.from_node(node, *pod, 53));
    (0..NODES.len()).flat_map(of_node).collect()
}

/// The exception for the flow, if one of its ends has the condition that its ACLs allow less.
fn exception(cluster: &MixedCluster, reports: &[Report], flow: &Flow) -> Option<Exception> {
    let reported =
        |address| cluster.location(address).and_then(|at| reports[at.node].endpoints.get(&at.endpoint));
    let mut reported = [flow.source, flow.destination].into_iter().filter_map(reported).flatten();
    Exception::of(flow.protocol)
        .filter(|exception| reported.any(|reported| exception.is_reported_by(reported)))
}

fn is_allowed(trace: &Option<Trace>) -> bool {
    trace.as_ref().is_none_or(|trace| trace.verdict == Verdict::Allow)
}

/// The entry of [`CLASSES`] for a flow, or its source if that is a node.
fn class(cluster: &MixedCluster, flow: &Flow) -> &'static str {
    let node = |address: IpAddr| cluster.location(address).map(|location| location.node);
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

/// Of every class and protocol, and by every interpretation of sets, some flows must have arrived and some not, in
/// proportion to the number of clusters; a pod is always reachable from its own node; exceptions must be rare.
fn lacking(tally: &Tally, clusters: usize) -> Option<String> {
    let kinds = CLASSES.iter().flat_map(|class| PROTOCOLS.map(|protocol| format!("{class}, {protocol}")));
    let others =
        READINGS.map(by_sets_as).into_iter().chain(FROM_OTHER_NODES.map(|from| format!("{from}, UDP")));
    let few = tally.lacking(kinds.chain(others), (clusters / 100).max(1));
    let own = FROM_OWN_NODE.map(|from| tally.of(&format!("{from}, UDP")));
    assert!(own.iter().all(|(sent, arrived)| sent == arrived), "a node reaches its own pods: {own:?}");
    let (all, _) = tally.of("all");
    assert_eq!(Exception::too_many(tally), None);
    few.or_else(|| {
        let enough = all >= clusters * 20 && own.iter().all(|(sent, _)| *sent >= clusters / 10);
        (!enough).then(|| format!("{all} flows of {clusters} clusters, probes {own:?}"))
    })
}
