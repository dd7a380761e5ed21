//! Whole random clusters on the real kernel: two nodes that calc feeds let through what the compiled programs let through,
//! and those what the oracle does. The cluster of one case is changed into that of the next by calc's own deltas.
//!
//! `PROPTEST_CASES` says how many clusters; each is asked about a hundred flows between pods, and with the world. A
//! disagreement shrinks to a manifest and an `explain` command; the test prints what has been asked.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)] // helpers of tests

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;
use proptest::test_runner::{Config as TestConfig, TestRunner};
use testkit::clusters::{NODES, Objects, Sent, clusters_of_distinct_pods, manifest, packets};
use testkit::flows::beginnings;
use testkit::kernel::Cluster;
use tortie_api::net::Direction;
use tortie_dataplane::{NodeState, Report};
use tortie_linux::dataplane::Config;
use tortie_policy::oracle::{Oracle, Peer, Question, Snapshot, Verdict};
use tortie_policy::program::{Flow, evaluate};

const CLUSTERS: u32 = 200;
const PACKETS: usize = 100;

#[test]
fn kernel_programs_and_oracle_agree() {
    agree(Config::default(), CLUSTERS);
}

/// The same where all that can be looked up is.
#[test]
fn kernel_programs_and_oracle_agree_where_rules_are_looked_up() {
    agree(Config { rules_in_a_row: 0, ..Config::default() }, CLUSTERS / 2);
}

fn agree(config: Config, clusters: u32) {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(clusters);
    let cluster = RefCell::new(Cluster::new(NODES, &config).unwrap());
    let asked = RefCell::new(Asked::default());
    let config =
        TestConfig { cases, max_shrink_iters: 5_000, failure_persistence: None, ..TestConfig::default() };
    let strategy = (clusters_of_distinct_pods(), prop::collection::vec(packets(), PACKETS));
    let result = TestRunner::new(config).run(&strategy, |(objects, packets)| {
        compare(&mut cluster.borrow_mut(), &objects, &packets, &mut asked.borrow_mut())
            .map_err(TestCaseError::fail)
    });
    println!("{}", asked.borrow().table());
    if let Err(error) = result {
        panic!("{error}");
    }
    asked.borrow().check(cases);
}

/// Makes the cluster of these objects, and asks all three about every packet that can be sent.
fn compare(
    cluster: &mut Cluster,
    objects: &Objects,
    packets: &[Sent],
    asked: &mut Asked,
) -> Result<(), String> {
    change(cluster, objects).map_err(|error| format!("{error}\ncluster.yml:\n{}", manifest(objects)))?;
    let mut snapshot = Snapshot::new();
    for (key, value) in objects {
        snapshot.insert(key.clone(), value.clone(), None);
    }
    let oracle = Oracle::new(&snapshot);
    let flows = beginnings(packets).into_iter().filter(|flow| cluster.is_of_pods(flow)).collect::<Vec<_>>();
    let passed = cluster.passed(&flows).map_err(|error| format!("{error:#}"))?;
    for (index, flow) in flows.iter().enumerate() {
        let kernel = passed.contains(&index);
        let (program, oracle) = (program_says(&cluster.states(), flow), oracle_says(&oracle, flow));
        if kernel != program || program != oracle {
            return Err(format!(
                "{flow:?}\npasses by the kernel: {kernel}; by the programs: {program}; by the oracle: {oracle}\n\
                 cluster.yml:\n{}\ntortie explain -f cluster.yml {} {} --port {}",
                manifest(objects),
                flow.source,
                flow.destination,
                shown_port(flow),
            ));
        }
        asked.note(cluster, flow, kernel);
    }
    Ok(())
}

/// Changes the cluster; what is in the kernel then must be what is there when all is made anew.
fn change(cluster: &mut Cluster, objects: &Objects) -> Result<(), String> {
    let clean = [Report::default(), Report::default()];
    let reports = cluster.change(objects).map_err(|error| format!("{error:#}"))?;
    if reports != clean {
        return Err(format!("after the change: {reports:?}"));
    }
    let changed = cluster.tables().unwrap();
    let reports = cluster.resync().map_err(|error| format!("{error:#}"))?;
    if reports != clean {
        return Err(format!("after all is compared: {reports:?}"));
    }
    if changed != cluster.tables().unwrap() {
        return Err("a change does not come to the same as making all anew".to_owned());
    }
    Ok(())
}

/// What both ends' programs say.
fn program_says(states: &[&NodeState; 2], flow: &Flow) -> bool {
    let ends = [(flow.source, Direction::Egress), (flow.destination, Direction::Ingress)];
    ends.into_iter().all(|(address, direction)| {
        states.iter().all(|state| {
            let endpoint = state.endpoints.values().find(|endpoint| endpoint.addresses.contains(&address));
            endpoint.is_none_or(|endpoint| evaluate(&endpoint.program, direction, flow, *state))
        })
    })
}

fn oracle_says(oracle: &Oracle<'_>, flow: &Flow) -> bool {
    let question = Question {
        from: Peer::Address(flow.source),
        to: Peer::Address(flow.destination),
        protocol: flow.protocol,
        source_port: flow.source_port,
        destination_port: flow.destination_port,
        icmp: flow.icmp,
        via: None,
    };
    let answer = oracle.evaluate(&question).unwrap();
    answer.egress.iter().chain(&answer.ingress).all(|trace| trace.verdict == Verdict::Allow)
}

fn shown_port(flow: &Flow) -> String {
    match flow.icmp {
        Some((kind, _)) => format!("icmp/{kind}"),
        None => format!("{}/{}", flow.protocol.to_string().to_lowercase(), flow.destination_port),
    }
}

/// How many flows of each kind were sent, and how many passed.
#[derive(Default)]
struct Asked(BTreeMap<String, (usize, usize)>);

impl Asked {
    fn note(&mut self, cluster: &Cluster, flow: &Flow, passed: bool) {
        let node = |address: IpAddr| cluster.place(address).map(|place| place.node);
        let way = match (node(flow.source), node(flow.destination)) {
            (Some(from), Some(to)) if from == to => "within a node",
            (Some(_), Some(_)) => "across nodes",
            (Some(_), None) => "to the world",
            _ => "from the world",
        };
        let family = if flow.source.is_ipv4() { "IPv4" } else { "IPv6" };
        for kind in ["all".to_owned(), format!("{family} {}", flow.protocol), format!("{family} {way}")] {
            let (sent, through) = self.0.entry(kind).or_default();
            *sent += 1;
            *through += usize::from(passed);
        }
    }

    fn table(&self) -> String {
        let rows = self.0.iter().map(|(kind, (sent, passed))| format!("{kind:22} {sent:>8} {passed:>8}\n"));
        format!("{:22} {:>8} {:>8}\n", "flows", "sent", "passed") + &rows.collect::<String>()
    }

    /// Every kind must have been asked about, and both have passed and not, in proportion to the number of clusters.
    fn check(&self, cases: u32) {
        let cases = usize::try_from(cases).unwrap();
        let protocols = ["TCP", "UDP", "SCTP"].map(|name| [format!("IPv4 {name}"), format!("IPv6 {name}")]);
        let ways = ["within a node", "across nodes", "to the world", "from the world"];
        let ways = ways.map(|way| [format!("IPv4 {way}"), format!("IPv6 {way}")]);
        let icmp = [["IPv4 ICMP", "IPv6 ICMPv6"].map(str::to_owned)];
        for kind in protocols.into_iter().chain(ways).chain(icmp).flatten() {
            let (sent, passed) = self.0.get(&kind).copied().unwrap_or_default();
            let fewest = (cases / 40).max(1);
            let both = passed >= fewest && sent - passed >= fewest;
            assert!(both, "{kind}: {sent} flows were sent, {passed} passed: that proves little");
        }
        let (sent, _) = self.0["all"];
        assert!(sent >= cases * 50, "only {sent} flows of {cases} clusters");
    }
}
