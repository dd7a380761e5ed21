//! Whole random clusters on the real kernel: two nodes, fed by calc, let through what the compiled programs let
//! through, and the programs agree with the oracle. Calc's own deltas change the cluster of one case into that of the
//! next.
//!
//! `PROPTEST_CASES` sets the number of clusters. Each gets a hundred flows between pods, and with the world. A
//! disagreement shrinks to a manifest and an `explain` command. The test prints what was covered.
#![allow(clippy::print_stdout)]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use proptest::prelude::*;
use testkit::clusters::{NODES, Objects, Sent, clusters_of_distinct_pods, manifest, packets, snapshot};
use testkit::flows::{beginnings, explain, judged};
use testkit::kernel::KernelCluster;
use testkit::random::{Random, Tally};
use tortie_api::net::Direction;
use tortie_dataplane::{NodeState, Report};
use tortie_kernel::nftables::Table;
use tortie_linux::dataplane::Config;
use tortie_oracle::{Answer, Oracle, Verdict};
use tortie_policy::program::{Flow, evaluate};

const CLUSTERS: u32 = 200;
const PACKETS: usize = 100;

#[test]
fn kernel_programs_and_oracle_agree() {
    agree(Config::default(), CLUSTERS);
}

/// The same with lookups wherever possible.
#[test]
fn kernel_programs_and_oracle_agree_with_lookups() {
    agree(Config { rules_in_a_row: 0, ..Config::default() }, CLUSTERS / 2);
}

fn agree(config: Config, clusters: u32) {
    let random = Random::cases(clusters).shrinking(5_000);
    let cluster = RefCell::new(KernelCluster::new(NODES, &config).unwrap());
    let tally = RefCell::new(Tally::default());
    let strategy = (clusters_of_distinct_pods(), prop::collection::vec(packets(), PACKETS));
    let test = |(objects, packets): (Objects, Vec<Sent>)| {
        compare(&mut cluster.borrow_mut(), &objects, &packets, &mut tally.borrow_mut())
            .map_err(TestCaseError::fail)
    };
    let result = random.prove(&strategy, test, || lacking(&tally.borrow(), random.count()));
    println!("{}", tally.borrow());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Changes the cluster to these objects, and compares all three for every packet that can be sent.
fn compare(
    cluster: &mut KernelCluster,
    objects: &Objects,
    packets: &[Sent],
    tally: &mut Tally,
) -> Result<(), String> {
    change(cluster, objects).map_err(|error| format!("{error}\ncluster.yml:\n{}", manifest(objects)))?;
    let snapshot = snapshot(objects);
    let oracle = Oracle::new(&snapshot);
    let flows = beginnings(packets).into_iter().filter(|flow| cluster.is_of_pods(flow)).collect::<Vec<_>>();
    let passed = cluster.passed(&flows).map_err(|error| format!("{error:#}"))?;
    for (index, flow) in flows.iter().enumerate() {
        let kernel = passed.contains(&index);
        let (program, oracle) = (program_says(&cluster.states(), flow), allows(&judged(&oracle, flow)));
        if kernel != program || program != oracle {
            return Err(format!(
                "{flow:?}\npasses by the kernel: {kernel}; by the programs: {program}; by the oracle: {oracle}\n\
                 cluster.yml:\n{}\n{}",
                manifest(objects),
                explain(flow),
            ));
        }
        kinds(cluster, flow).into_iter().for_each(|kind| tally.count(kind, kernel));
    }
    Ok(())
}

/// Changes the cluster. The kernel's state must then equal the state after a fresh start.
fn change(cluster: &mut KernelCluster, objects: &Objects) -> Result<(), String> {
    let clean = [Report::default(), Report::default()];
    let reports = cluster.change(objects).map_err(|error| format!("{error:#}"))?;
    if reports != clean {
        return Err(format!("after the change: {reports:?}"));
    }
    // The next change removes what is left over.
    let reports = cluster.apply(&[vec![], vec![]]).map_err(|error| format!("{error:#}"))?;
    if reports != clean {
        return Err(format!("after the removal of what is left over: {reports:?}"));
    }
    let changed = cluster.tables().unwrap();
    let reports = cluster.resync().map_err(|error| format!("{error:#}"))?;
    if reports != clean {
        return Err(format!("after all is compared: {reports:?}"));
    }
    let anew = cluster.tables().unwrap();
    if changed != anew {
        let differences = changed.iter().zip(&anew).map(|(changed, anew)| differences(changed, anew));
        let differences = differences.collect::<Vec<_>>().concat();
        return Err(format!(
            "a change does not come to the same as making all anew:\n{}",
            differences.join("\n")
        ));
    }
    Ok(())
}

/// The chains and sets that differ, as they are in both tables.
fn differences(changed: &Table, anew: &Table) -> Vec<String> {
    let chains = changed.chains.keys().chain(anew.chains.keys()).filter_map(|name| {
        let (is, was) = (changed.chains.get(name), anew.chains.get(name));
        (is != was).then(|| format!("chain {name}: {is:?}; anew: {was:?}"))
    });
    let sets = changed.sets.keys().chain(anew.sets.keys()).filter_map(|name| {
        let (is, was) = (changed.sets.get(name), anew.sets.get(name));
        (is != was).then(|| format!("set {name}: {is:?}; anew: {was:?}"))
    });
    let flags =
        (changed.flags != anew.flags).then(|| format!("flags {}; anew {}", changed.flags, anew.flags));
    let all: BTreeSet<String> = chains.chain(sets).chain(flags).collect();
    all.into_iter().collect()
}

/// The verdict of both ends' programs.
fn program_says(states: &[&NodeState; 2], flow: &Flow) -> bool {
    let ends = [(flow.source, Direction::Egress), (flow.destination, Direction::Ingress)];
    ends.into_iter().all(|(address, direction)| {
        states.iter().all(|state| {
            let endpoint = state.endpoints.values().find(|endpoint| endpoint.addresses.contains(&address));
            endpoint.is_none_or(|endpoint| evaluate(&endpoint.program, direction, flow, *state))
        })
    })
}

fn allows(answer: &Answer) -> bool {
    answer.egress.iter().chain(&answer.ingress).all(|trace| trace.verdict == Verdict::Allow)
}

/// The kinds under which a flow is counted.
fn kinds(cluster: &KernelCluster, flow: &Flow) -> [String; 3] {
    let node = |address: IpAddr| cluster.location(address).map(|location| location.node);
    let path = match (node(flow.source), node(flow.destination)) {
        (Some(from), Some(to)) if from == to => "within a node",
        (Some(_), Some(_)) => "across nodes",
        (Some(_), None) => "to the world",
        _ => "from the world",
    };
    let family = if flow.source.is_ipv4() { "IPv4" } else { "IPv6" };
    ["all".to_owned(), format!("{family} {}", flow.protocol), format!("{family} {path}")]
}

/// Of every kind, some flows must have passed and some not, in proportion to the number of clusters.
fn lacking(tally: &Tally, clusters: usize) -> Option<String> {
    let paths = ["TCP", "UDP", "SCTP", "within a node", "across nodes", "to the world", "from the world"];
    let of_both = paths.iter().flat_map(|path| [format!("IPv4 {path}"), format!("IPv6 {path}")]);
    let few =
        tally.lacking(of_both.chain(["IPv4 ICMP", "IPv6 ICMPv6"].map(str::to_owned)), (clusters / 40).max(1));
    let (sent, _) = tally.of("all");
    few.or_else(|| (sent < clusters * 50).then(|| format!("only {sent} flows of {clusters} clusters")))
}
