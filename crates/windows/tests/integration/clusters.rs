//! Whole random clusters of Windows nodes: the verdict of HNS on a packet is the oracle's, for every value of the
//! emulator's options and every rendering of policy. A change that does not concern an endpoint resets no connection
//! of it.
//!
//! Each combination of what verdicts may depend on is tested in turn. `PROPTEST_CASES` sets the number of clusters
//! for each; each cluster follows from the previous one. A disagreement shrinks to a manifest and an `explain`
//! command. The tests print what was covered, and what is known to be narrower.
#![allow(clippy::print_stdout)]

mod to_services;

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr};

use anyhow::ensure;
use ipnet::Ipv4Net;
use proptest::prelude::*;
use serde_json::Value;
use testkit::clusters::services::{Call, calls, fronts, services};
use testkit::clusters::{NODES, Objects, Sent, clusters_of_distinct_pods, manifest, packets, snapshot};
use testkit::emulator::{EmulatedCluster, RENDERINGS, Rendering, on_windows};
use testkit::exceptions::Exception;
use testkit::flows::{beginnings, explain, judged};
use testkit::random::{Random, Tally, rounds};
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Condition, Reason, Report};
use tortie_hcn::Version;
use tortie_hns_emulator::{
    AclRemoval, Config, DefaultAction, EgressSees, EqualPriority, OnRewrite, Packet, PacketDirection,
    SetReading, SeveralSets, UpdateReplaces, Verdict as HnsVerdict,
};
use tortie_oracle::{Oracle, Trace, Verdict};
use tortie_policy::program::Flow;
use tortie_windows::endpoint_id;

use to_services::{Callers, PARTLY, SEES, TAKEN};

/// The number of packets for each cluster; half of them are IPv6, belong to no pod, or are answers to another one.
const PACKETS: usize = 170;
/// The number of connections to Services.
const CALLS: usize = 12;

/// The addresses of pods; Services mostly have others.
const PODS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 1);

/// The average number of those that can be tested in a cluster: more than 10⁵ for the three versions together.
const FLOWS: usize = 64;

/// The condition of an endpoint with an IPv6 address on Tortie's network, which has none.
const NOT_SERVED: Reason = Reason::AddressNotServed;

/// The conditions that endpoints may have.
const KNOWN: [Reason; 5] =
    [Reason::IcmpTypeNotExpressible, Reason::SctpPortNotExpressible, PARTLY, TAKEN, NOT_SERVED];

const OWN_NODE: &str = "from its own node";
const BOTH_FAMILIES: &str = "of pods with IPv6, too";
const OVER_IPV6: &str = "over IPv6";
const IPV6_ALONE: &str = "to and from pods with IPv6 alone";

const DEFAULTS: [DefaultAction; 3] =
    [DefaultAction::DenyBoth, DefaultAction::DenySameDirection, DefaultAction::Allow];
const READINGS: [SetReading; 2] = [SetReading::Endpoint, SetReading::Flow];
const SEVERAL: [SeveralSets; 2] = [SeveralSets::Union, SeveralSets::Intersection];
const REWRITES: [OnRewrite; 3] =
    [OnRewrite::ResetOnAnyChange, OnRewrite::Keep, OnRewrite::ResetOnRemoveOrUpdate];
const REPLACES: [UpdateReplaces; 3] =
    [UpdateReplaces::All, UpdateReplaces::SameType, UpdateReplaces::AclsAndSameType];
const REMOVALS: [AclRemoval; 3] = [AclRemoval::Works, AclRemoval::RefusedAlways, AclRemoval::IgnoredSilently];

/// All values of one option, for each of the existing configurations.
fn each<T: Copy>(all: Vec<Config>, positions: &[T], turn: fn(&mut Config, T)) -> Vec<Config> {
    let turned = |config: &Config, position: T| {
        let mut config = config.clone();
        turn(&mut config, position);
        config
    };
    all.iter().flat_map(|config| positions.iter().map(move |position| turned(config, *position))).collect()
}

/// Every configuration of HNS of that version that verdicts may depend on. Packets that begin flows do not depend on
/// the handling of ICMP errors. The effect of writes on flows changes no verdict, and the scope of an update matters
/// only if ACLs cannot be removed. The values of these two alternate, so that each meets each value of every other
/// option.
fn every_hns(version: Version) -> Vec<Config> {
    let all = vec![Config::new(version, Ipv4Addr::UNSPECIFIED)];
    let all = each(all, &DEFAULTS, |config, position| config.switch_default = position);
    let firewalls = [DEFAULTS.map(Some).to_vec(), vec![None]].concat();
    let all = each(all, &firewalls, |config, position| config.host_default = position);
    let ties = [EqualPriority::BlockWins, EqualPriority::AllowWins];
    let all = each(all, &ties, |config, position| config.equal_priority = position);
    let all = each(all, &READINGS, |config, position| config.set_reading = position);
    let all = each(all, &SEVERAL, |config, position| config.several_sets = position);
    let all = each(all, &SEES, |config, position| config.egress_sees = position);
    let mut all = each(all, &REMOVALS, |config, position| config.acl_removal = position);
    for (index, config) in all.iter_mut().enumerate() {
        // The last option has three values, and so has this one.
        config.on_rewrite = REWRITES[(index + index / REMOVALS.len()) % REWRITES.len()];
        config.update_replaces = REPLACES[index / 9 % REPLACES.len()];
    }
    all
}

/// The clusters of one combination.
fn random() -> Random {
    Random::cases(1).shrinking(2_000)
}

/// A cluster, the cluster that it changes to, and the questions about that.
type Change = (Objects, Objects, Questions);

/// The packets to send.
#[derive(Debug, Clone)]
struct Questions {
    packets: Vec<Sent>,
    calls: Vec<Call>,
}

/// Half of the time the pods stay, and some other objects are added or removed.
fn changes() -> impl Strategy<Value = Change> {
    let cluster = || {
        let parts = (clusters_of_distinct_pods().boxed(), services().boxed(), 0_u8..4);
        let all = |(mut objects, services, which): (Objects, Objects, u8)| {
            if which == 0 {
                leave_ipv6_alone(&mut objects);
            }
            on_windows(&[objects, services].concat(), &NODES)
        };
        parts.prop_map(all).boxed()
    };
    let packets = prop::collection::vec(packets(), PACKETS);
    let packets = (packets, prop::collection::vec(calls(), CALLS))
        .prop_map(|(packets, calls)| Questions { packets, calls })
        .boxed();
    let some = prop::option::of(any::<u64>());
    (cluster(), cluster(), some, any::<bool>(), packets).prop_map(|(all, others, some, comes, packets)| {
        let before = some.map_or(others, |stay| some_of(&all, stay));
        if comes { (before, all, packets) } else { (all, before, packets) }
    })
}

/// Removes all addresses but IPv6 from the first pod that has IPv6.
fn leave_ipv6_alone(objects: &mut Objects) {
    let is_ipv6 = |net: &Value| net.as_str().is_some_and(|net| net.contains(':'));
    let nets = objects.iter_mut().filter_map(|(_, value)| value["spec"]["ipNetworks"].as_array_mut());
    if let Some(nets) = nets.into_iter().find(|nets| nets.iter().any(is_ipv6)) {
        nets.retain(is_ipv6);
    }
}

/// All pods, and the other objects whose bits are set.
fn some_of(all: &Objects, bits: u64) -> Objects {
    let stays = |(index, (key, _)): &(usize, &(Key, Value))| is_fixed(key) || bits >> (index % 64) & 1 == 1;
    all.iter().enumerate().filter(stays).map(|(_, object)| object.clone()).collect()
}

fn is_fixed(key: &Key) -> bool {
    matches!(key.kind, Kind::WorkloadEndpoint | Kind::Node)
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

/// Another plugin connects the pods, with addresses of both families. Sets do not matter, because they would be those of
/// Tortie's network.
#[test]
fn policy_of_both_families_and_the_oracle_agree() {
    let all = combinations(Config::NEWEST).into_iter();
    let lists = all.filter(|(config, rendering)| !rendering.names_sets && config.set_reading == READINGS[0]);
    agree_on("both families", &lists.collect::<Vec<_>>(), &[OVER_IPV6], |config, _| {
        EmulatedCluster::of_another_plugin(&NODES, config)
    });
}

/// Tortie connects the pods, with addresses of both families. ACLs of such a network name no sets.
#[test]
fn policy_of_l2bridge_networks_and_the_oracle_agree() {
    let all = combinations(Config::NEWEST).into_iter();
    let some = all.filter(|(config, rendering)| !rendering.names_sets && config.set_reading == READINGS[0]);
    agree_on("L2Bridge", &some.collect::<Vec<_>>(), &[OVER_IPV6], |config, rendering| {
        EmulatedCluster::of_both_families(&NODES, config, rendering, PODS)
    });
}

fn agree(version: Version) {
    agree_on(&format!("HNS {version}"), &combinations(version), &[], |config, rendering| {
        EmulatedCluster::of_block(&NODES, config, rendering, PODS)
    });
}

fn agree_on(
    name: &str,
    all: &[(Config, Rendering)],
    further: &[&str],
    cluster_of: impl Fn(&Config, Rendering) -> anyhow::Result<EmulatedCluster>,
) {
    let tally = RefCell::new(Tally::default());
    let each = || {
        all.iter().try_for_each(|(config, rendering)| {
            let test = |(before, after, sent): Change| {
                let mut cluster = cluster_of(config, *rendering).unwrap();
                cluster.change(&before).map_err(|error| TestCaseError::fail(format!("{error:#}")))?;
                let kind = to_services::kind(config.egress_sees, rendering.name);
                let to_services = (config.egress_sees, kind.as_str());
                compare(&mut cluster, &after, &sent, to_services, &mut tally.borrow_mut())
                    .map_err(TestCaseError::fail)
            };
            let result = random().run(&changes(), test);
            result.map_err(|error| format!("{}: {error}\n{config:?}", rendering.name))
        })
    };
    let clusters = all.len() * random().count();
    let is_tested = |kind: &&Rendering| all.iter().any(|(_, tested)| tested.name == kind.name);
    let kinds = to_services::kinds(RENDERINGS.iter().filter(is_tested));
    let result = rounds(each, || {
        let tally = tally.borrow();
        lacking(&tally, clusters, further).or_else(|| to_services::lacking(&tally, &kinds, clusters / 50))
    });
    println!("{name}, {} combinations\n{}", all.len(), tally.borrow());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Every configuration of HNS with every rendering. The options for sets matter only if ACLs name sets.
fn combinations(version: Version) -> Vec<(Config, Rendering)> {
    let renderings = |config: Config| {
        let sets_as_ever = config.set_reading == READINGS[0] && config.several_sets == SEVERAL[0];
        let suits = move |rendering: &Rendering, config: &Config| {
            (rendering.suits)(config) && (rendering.names_sets || sets_as_ever)
        };
        let those = RENDERINGS.iter().filter(|rendering| suits(rendering, &config));
        those.map(|rendering| (config.clone(), *rendering)).collect::<Vec<_>>()
    };
    every_hns(version).into_iter().flat_map(renderings).collect()
}

/// A policy, tier, profile, set or service is added or removed: connections of endpoints with unchanged ACLs
/// continue, and those of the others behave as configured. Applying the same state again writes nothing.
#[test]
fn unrelated_changes_break_no_connection() {
    let (kept, broken) = (Cell::new(0), Cell::new(0));
    let each = |on_rewrite| {
        let config = Config { on_rewrite, ..Config::new(Config::NEWEST, Ipv4Addr::UNSPECIFIED) };
        RENDERINGS.iter().filter(|rendering| (rendering.suits)(&config)).try_for_each(|rendering| {
            let test = |(before, after, sent): Change| {
                let mut cluster = EmulatedCluster::of_block(&NODES, &config, *rendering, PODS).unwrap();
                let counts = connections(&mut cluster, &before, &after, &sent.packets, on_rewrite);
                let failed = |error| TestCaseError::fail(format!("{error:#}\n{}", manifest(&after)));
                let (on, off) = counts.map_err(failed)?;
                kept.set(kept.get() + on);
                broken.set(broken.get() + off);
                Ok(())
            };
            let result = random().times(60).run(&one_changes(), test);
            result.map_err(|error| format!("{} {on_rewrite:?}: {error}", rendering.name))
        })
    };
    let few = || kept.get() <= 300 || broken.get() <= 30;
    let counts = || format!("{} ends of connections went on, {} were reset", kept.get(), broken.get());
    let result = rounds(|| REWRITES.into_iter().try_for_each(each), || few().then(counts));
    println!("{}", counts());
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// A cluster with and without one of the objects that policy consists of.
fn one_changes() -> impl Strategy<Value = Change> {
    let chosen = (changes(), any::<prop::sample::Index>(), any::<bool>());
    chosen.prop_filter_map("nothing to choose from", |((_, all, packets), index, comes)| {
        let others: Vec<&Key> = all.iter().map(|(key, _)| key).filter(|key| !is_fixed(key)).collect();
        let gone = (!others.is_empty()).then(|| index.get(&others))?;
        let rest = all.iter().filter(|(key, _)| key != *gone).cloned().collect();
        Some(if comes { (rest, all, packets) } else { (all, rest, packets) })
    })
}

/// How many ends of connections continued, and how many were reset.
fn connections(
    cluster: &mut EmulatedCluster,
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

/// Makes the change, and compares the verdicts on every packet of pods.
fn compare(
    cluster: &mut EmulatedCluster,
    objects: &Objects,
    sent: &Questions,
    (sees, kind): (EgressSees, &str),
    tally: &mut Tally,
) -> Result<(), String> {
    let reports = cluster.change(objects).map_err(|error| format!("{error:#}"))?;
    let shown = || format!("cluster.yml:\n{}", manifest(objects));
    in_force(&reports)
        .and_then(|()| unserved_ipv6_is_reported_and_closed(cluster, &reports, &sent.packets, tally))
        .map_err(|error| format!("{error}\n{}", shown()))?;
    let snapshot = snapshot(objects);
    let oracle = Oracle::new(&snapshot);
    let fronts = fronts(objects);
    let callers =
        Callers { cluster, reports: &reports, oracle: &oracle, objects, fronts: &fronts, sees, kind };
    for flow in &flows_of_pods(cluster, &sent.packets) {
        let ours = cluster.judge(flow).map_err(|error| format!("{error:#}"))?;
        let answer = judged(&oracle, flow);
        let [egress, ingress] = [
            (flow.source, ours.egress, is_allowed(&answer.egress)),
            (flow.destination, ours.ingress, is_allowed(&answer.ingress)),
        ]
        .map(|(address, passes, allowed)| {
            let narrower = || exception(cluster, &reports, address, flow.protocol);
            match passes {
                None => Outcome::Same,
                Some(passes) if passes == allowed => Outcome::Same,
                Some(false) if address == flow.source && callers.is_taken_by_a_service(flow) => Outcome::Same,
                Some(false) => narrower().map_or(Outcome::Wrong, Outcome::Narrower),
                Some(true) => Outcome::Wrong,
            }
        });
        if [egress, ingress].contains(&Outcome::Wrong) {
            let answer =
                [&answer.egress, &answer.ingress].map(|trace| trace.as_ref().map(|trace| trace.verdict));
            return Err(format!(
                "{flow:?}\n{ours:?}; the oracle: {answer:?}\n{:#?}\n{}\n{}",
                cluster.endpoints(flow),
                shown(),
                explain(flow),
            ));
        }
        let narrower = [egress, ingress].into_iter().find_map(Outcome::narrower);
        let narrower = narrower.map(|exception| exception.name().to_owned());
        let too = [flow.source, flow.destination].iter().any(|address| has_ipv6(cluster, *address));
        let too = too.then(|| BOTH_FAMILIES.to_owned());
        let over_ipv6 = flow.source.is_ipv6().then(|| OVER_IPV6.to_owned());
        kinds(cluster, flow)
            .into_iter()
            .chain(narrower)
            .chain(too)
            .chain(over_ipv6)
            .for_each(|kind| tally.count(kind, ours.all()));
    }
    callers.compare(&sent.calls, tally).map_err(|error| format!("{error}\n{}", shown()))
}

/// The comparison of HNS and the oracle at one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Same,
    Narrower(Exception),
    Wrong,
}

impl Outcome {
    fn narrower(self) -> Option<Exception> {
        if let Self::Narrower(exception) = self { Some(exception) } else { None }
    }
}

fn is_allowed(trace: &Option<Trace>) -> bool {
    trace.as_ref().is_none_or(|trace| trace.verdict == Verdict::Allow)
}

fn flows_of_pods(cluster: &EmulatedCluster, packets: &[Sent]) -> Vec<Flow> {
    let flows = beginnings(packets).into_iter();
    let is_judged = |flow: &Flow| cluster.has_ipv6() || flow.source.is_ipv4();
    flows.filter(|flow| is_judged(flow) && cluster.is_of_pods(flow)).collect()
}

/// Nodes have no conditions, and endpoints only known ones.
fn in_force(reports: &[Report]) -> Result<(), String> {
    for report in reports {
        let mut reported = report.conditions();
        if report.retry
            || !report.node.is_empty()
            || reported.any(|condition| !KNOWN.contains(&condition.reason))
        {
            return Err(format!("{report:?}"));
        }
    }
    Ok(())
}

/// Where IPv6 addresses are not served, exactly the endpoints that have one report it, and an endpoint without another
/// address is closed.
fn unserved_ipv6_is_reported_and_closed(
    cluster: &EmulatedCluster,
    reports: &[Report],
    packets: &[Sent],
    tally: &mut Tally,
) -> Result<(), String> {
    for (index, (state, report)) in cluster.states().zip(reports).enumerate() {
        for (id, endpoint) in &state.endpoints {
            let reported = report.endpoints.get(id).into_iter().flatten();
            let reported = reported.filter(|reported| reported.reason == NOT_SERVED);
            let (v6, v4): (Vec<_>, Vec<_>) = endpoint.addresses.iter().partition(|ip| ip.is_ipv6());
            let named =
                |(reported, address): (&Condition, &&IpAddr)| reported.message.contains(&address.to_string());
            let reported: Vec<&Condition> = reported.collect();
            let unserved = if cluster.has_ipv6() { vec![] } else { v6 };
            if reported.len() != unserved.len() || !reported.iter().copied().zip(&unserved).all(named) {
                return Err(format!("{id} has {:?}, and reports {reported:?}", endpoint.addresses));
            }
            if !v4.is_empty() {
                continue;
            }
            let flows = beginnings(packets).into_iter().filter(|flow| flow.source.is_ipv4());
            for packet in flows.flat_map(|flow| both_ways(&flow)) {
                let id = endpoint_id(&endpoint.container_id);
                let verdict = cluster.hns(index).inner().judge(id, &packet);
                if verdict != Ok(HnsVerdict::Block) {
                    return Err(format!("{id} with IPv6 alone: {packet:?} {verdict:?}"));
                }
                tally.count(IPV6_ALONE, false);
            }
        }
    }
    Ok(())
}

/// The flow's first packet at each end.
fn both_ways(flow: &Flow) -> [Packet; 2] {
    let (local, remote) = (flow.source, flow.destination);
    let (local_port, remote_port) = (flow.source_port, flow.destination_port);
    let protocol = flow.protocol.0;
    let out = Packet { direction: PacketDirection::Out, protocol, local, remote, local_port, remote_port };
    let (local, remote) = (remote, local);
    let (local_port, remote_port) = (remote_port, local_port);
    [out, Packet { direction: PacketDirection::In, protocol, local, remote, local_port, remote_port }]
}

fn has_ipv6(cluster: &EmulatedCluster, address: IpAddr) -> bool {
    let location = cluster.location(address);
    cluster
        .addresses()
        .any(|other| other.is_ipv6() && location.is_some() && cluster.location(other) == location)
}

/// The exception for flows of the protocol at this end, if the endpoint has the condition that reports it.
fn exception(
    cluster: &EmulatedCluster,
    reports: &[Report],
    address: IpAddr,
    protocol: Protocol,
) -> Option<Exception> {
    let reported = cluster
        .location(address)
        .and_then(|location| reports[location.node].endpoints.get(&location.endpoint));
    let is_reported = |exception: &Exception| {
        reported.into_iter().flatten().any(|reported| exception.is_reported_by(reported))
    };
    Exception::of(protocol).filter(is_reported)
}

/// The kinds under which a flow is counted.
fn kinds(cluster: &EmulatedCluster, flow: &Flow) -> [String; 3] {
    let node = |address| cluster.location(address).map(|location| location.node);
    let own_node = |address, node| match address {
        IpAddr::V4(address) => testkit::emulator::node_address(node as u8) == address,
        IpAddr::V6(address) => testkit::emulator::node_address_v6(node as u8) == address,
    };
    let path = match (node(flow.source), node(flow.destination)) {
        (Some(from), Some(to)) if from == to => "within a node",
        (Some(_), Some(_)) => "across nodes",
        (Some(_), None) => "to the world",
        (None, Some(to)) if own_node(flow.source, to) => OWN_NODE,
        _ => "from the world",
    };
    ["all".to_owned(), flow.protocol.to_string(), path.to_owned()]
}

/// Of every kind, some flows must have passed and some not; a pod is always reachable from its own node; exceptions
/// must occur, and be rare.
fn lacking(tally: &Tally, clusters: usize, further: &[&str]) -> Option<String> {
    let paths = [
        "TCP",
        "UDP",
        "SCTP",
        "ICMP",
        "within a node",
        "across nodes",
        "to the world",
        "from the world",
        BOTH_FAMILIES,
    ];
    let all = paths.iter().chain(further).map(|kind| (*kind).to_owned());
    let few = tally.lacking(all, clusters / 10);
    let ((all, _), (probes, reached)) = (tally.of("all"), tally.of(OWN_NODE));
    assert_eq!(probes, reached, "a node reaches its own pods");
    assert_eq!(Exception::too_many(tally), None);
    let none = Exception::ALL.into_iter().find(|exception| tally.of(exception.name()).0 == 0);
    few.or_else(|| none.map(|exception| format!("nothing is {}", exception.name()))).or_else(|| {
        let (alone, _) = tally.of(IPV6_ALONE);
        let few = (clusters / 10).max(1);
        let enough = all >= clusters * FLOWS && probes >= few && alone >= few;
        (!enough)
            .then(|| format!("{all} flows of {clusters} clusters, {probes} probes, {alone} {IPV6_ALONE}"))
    })
}
