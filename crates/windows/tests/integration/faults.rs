//! A policy changes while HNS fails: nothing opens in between, and the desired state is reached in the end.
#![allow(clippy::print_stdout)]

mod day;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::Value;
use testkit::clusters::{NODES, Objects, clusters_of_distinct_pods, manifest, packets};
use testkit::emulator::{EmulatedCluster, Ends, RENDERINGS, Rendering, on_windows};
use testkit::flows::beginnings;
use testkit::random::Random;
use tortie_api::{Key, Kind};
use tortie_hcn::schema::{Endpoint, Policy};
use tortie_hcn::{Call, Failure, HResult, Hcn};
use tortie_hns_emulator::{AclRemoval, Config, Survives, UpdateReplaces};
use tortie_policy::program::Flow;

/// The fault of HNS at one of the calls that change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It rejects the call this time.
    Refuses,
    /// It does not answer and does nothing, for this call and all later ones.
    Hangs,
    /// It carries out the call, and the answer is lost.
    LosesTheReply,
    /// It reports success and does nothing.
    Lies,
    /// It restarts before it carries out the call, with this remaining state.
    Restarts(Survives),
    /// It does not answer in time and carries out the call later, but before any other change.
    IsLate,
}

const FAULTS: [Fault; 8] = [
    Fault::Refuses,
    Fault::Hangs,
    Fault::LosesTheReply,
    Fault::Lies,
    Fault::Restarts(Survives::Everything),
    Fault::Restarts(Survives::AllButAcls),
    Fault::Restarts(Survives::AllButAclsAndSets),
    Fault::IsLate,
];
/// More than any delay between two attempts, and than the time for which a list that HNS changed is left alone.
const LONG: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone)]
struct Case {
    /// The same pods, and some of the other objects.
    before: Objects,
    after: Objects,
    flows: Vec<Flow>,
    config: Config,
    rendering: Rendering,
    fault: Fault,
    /// The index of the failing call among each node's changing calls.
    at: usize,
    /// How many calls come between a late call and its execution.
    later: usize,
    /// Whether a restart happens during the call, which then fails.
    in_call: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let cluster = clusters_of_distinct_pods().prop_map(|objects| on_windows(&objects, &NODES)).boxed();
    let packets = prop::collection::vec(packets(), 130).boxed();
    let hns = (
        select(vec![Config::SERVER_2019, Config::SERVER_2022, Config::NEWEST]),
        select(vec![AclRemoval::Works, AclRemoval::IgnoredSilently]),
        select(vec![UpdateReplaces::All, UpdateReplaces::SameType, UpdateReplaces::AclsAndSameType]),
        any::<Index>(),
    )
        .prop_map(|(version, acl_removal, update_replaces, index)| {
            let config =
                Config { acl_removal, update_replaces, ..Config::new(version, Ipv4Addr::UNSPECIFIED) };
            let suiting: Vec<_> = RENDERINGS.iter().filter(|rendering| (rendering.suits)(&config)).collect();
            let rendering = *suiting[index.index(suiting.len())];
            (config, rendering)
        });
    let place = (0_usize..6, 0_usize..8, any::<bool>());
    (cluster, any::<u64>(), any::<bool>(), packets, hns, place).prop_map(
        |(all, stays, comes, packets, (config, rendering), (at, later, in_call))| {
            let is_fixed = |key: &Key| matches!(key.kind, Kind::WorkloadEndpoint | Kind::Node);
            let stays =
                |(index, (key, _)): &(usize, &(Key, Value))| is_fixed(key) || stays >> (index % 64) & 1 == 1;
            let rest = all.iter().enumerate().filter(stays).map(|(_, object)| object.clone()).collect();
            let (before, after) = if comes { (rest, all) } else { (all, rest) };
            let flows = beginnings(&packets).into_iter().filter(|flow| flow.source.is_ipv4()).collect();
            let fault = Fault::Refuses;
            Case { before, after, flows, config, rendering, fault, at, later, in_call }
        },
    )
}

/// The verdicts of each flow's ends. Each endpoint is correct separately: one may have its new policy while another
/// still has its old one.
fn verdicts(cluster: &EmulatedCluster, flows: &[Flow]) -> Vec<Ends<bool>> {
    flows.iter().map(|flow| cluster.judge(flow).unwrap()).collect()
}

fn fresh(objects: &Objects, case: &Case) -> EmulatedCluster {
    let mut cluster = EmulatedCluster::new(&NODES, &case.config, case.rendering).unwrap();
    cluster.change(objects).unwrap();
    cluster
}

/// Makes a node's HNS fail at the call; `hits` counts it.
fn fail(cluster: &EmulatedCluster, node: usize, case: &Case, hits: &Arc<AtomicUsize>) {
    let (hns, at, hits) = (cluster.hns(node), case.at, Arc::clone(hits));
    let mut changes = 0;
    // Whether it is the call, and whether it is that or a later one.
    let mut comes = move |call: &Call| {
        changes += usize::from(!call.is_read());
        let now = !call.is_read() && changes == at + 1;
        hits.fetch_add(usize::from(now), Ordering::Relaxed);
        (now, changes > at)
    };
    let timeout = || Failure::new(HResult::ERROR_TIMEOUT, "no answer");
    let refusal = || Failure::new(HResult::HCN_E_INVALID_POLICY, "not now");
    match case.fault {
        Fault::Refuses => hns.set_fault(move |call| comes(call).0.then(|| Err(refusal()))),
        Fault::Hangs => hns.set_fault(move |call| comes(call).1.then(|| Err(timeout()))),
        Fault::LosesTheReply => hns.lose_replies(move |call| comes(call).0.then(timeout)),
        Fault::Lies => hns.set_fault(move |call| comes(call).0.then(|| Ok(String::new()))),
        Fault::Restarts(survives) => {
            let (inner, in_call) = (Arc::clone(hns), case.in_call);
            let stopped = || Err(Failure::new(HResult::RPC_S_SERVER_UNAVAILABLE, "it has stopped"));
            hns.set_fault(move |call| {
                let now = comes(call).0;
                if now {
                    inner.inner().restart(survives).unwrap();
                }
                (now && in_call).then(stopped)
            });
        }
        Fault::IsLate => {
            let (inner, mut calls_left) = (Arc::clone(hns), case.later);
            let mut late = None;
            hns.set_fault(move |call| {
                if comes(call).0 {
                    late = Some(call.clone());
                    return Some(Err(timeout()));
                }
                if let Some(waiting) = late.take_if(|_| calls_left == 0 || !call.is_read()) {
                    // The caller no longer listens.
                    drop(inner.inner().call(&waiting));
                } else if late.is_some() {
                    calls_left -= 1;
                }
                None
            });
        }
    }
}

/// An HNS that hangs from a call on shows the state between two calls.
#[test]
fn nothing_opens_while_hns_fails_and_the_desired_state_is_reached() {
    for fault in FAULTS {
        let hits = Arc::new(AtomicUsize::new(0));
        let test = |case: Case| {
            let case = Case { fault, ..case };
            through_a_fault(&case, &hits).map_err(|problem| {
                let (before, after) = (manifest(&case.before), manifest(&case.after));
                let Case { at, later, in_call, config, rendering, .. } = &case;
                TestCaseError::fail(format!(
                    "{problem}\n{fault:?} at call {at} (in it: {in_call}, later: {later}), {rendering:?}, {config:?}\nbefore.yml:\n{before}\nafter.yml:\n{after}"
                ))
            })
        };
        let few = || hits.load(Ordering::Relaxed) <= 20;
        let result = Random::cases(60)
            .shrinking(1_000)
            .prove(&cases(), test, || few().then(|| format!("{hits:?} faults")));
        println!("{fault:?}: {hits:?} times");
        if let Err(error) = result {
            panic!("{fault:?}: {error}");
        }
    }
}

fn through_a_fault(case: &Case, hits: &Arc<AtomicUsize>) -> Result<(), String> {
    let mut cluster = fresh(&case.before, case);
    let flows: Vec<Flow> = case.flows.iter().filter(|flow| cluster.is_of_pods(flow)).copied().collect();
    let (old, new) = (verdicts(&cluster, &flows), verdicts(&fresh(&case.after, case), &flows));
    let stays_closed = |cluster: &EmulatedCluster| {
        let now = verdicts(cluster, &flows);
        let opened = (0..flows.len()).find(|index| {
            has_opened(cluster, case.fault, &flows[*index], [&old, &new, &now].map(|all| all[*index]))
        });
        opened.map_or(Ok(now), |index| Err(format!("opened: {:?}", flows[index])))
    };
    (0..NODES.len()).for_each(|node| fail(&cluster, node, case, hits));
    let reports = cluster.change(&case.after).unwrap();
    let between = stays_closed(&cluster)?;
    // HNS does not report its restart.
    let is_reported = matches!(case.fault, Fault::Restarts(_)) || reports.iter().any(|report| report.retry);
    if between != new && !is_reported {
        return Err(format!("not in force, and nobody is told: {reports:?}"));
    }
    if case.fault == Fault::IsLate {
        lands(&mut cluster, case)?;
        stays_closed(&cluster)?;
    }
    (0..NODES.len()).for_each(|node| cluster.hns(node).clear_fault());
    cluster.wait(LONG);
    let reports = cluster.resync();
    if reports.iter().any(|report| report.retry) || verdicts(&cluster, &flows) != new {
        return Err(format!("HNS is well again, and it is not reached: {reports:?}"));
    }
    Ok(())
}

/// Whether a flow passes an end that denied it before and denies it afterwards. An HNS that returns without ACLs may
/// be open until the endpoint is checked.
fn has_opened(
    cluster: &EmulatedCluster,
    fault: Fault,
    flow: &Flow,
    [old, new, now]: [Ends<bool>; 3],
) -> bool {
    let loses = matches!(fault, Fault::Restarts(survives) if survives != Survives::Everything);
    let is_open = |old, new, now, endpoint: Option<&Endpoint>| {
        let is_as_it_came_back = loses && !endpoint.is_some_and(has_policy);
        now == Some(true) && old == Some(false) && new == Some(false) && !is_as_it_came_back
    };
    let endpoints = cluster.endpoints(flow).unwrap();
    is_open(old.egress, new.egress, now.egress, endpoints.egress.as_ref())
        || is_open(old.ingress, new.ingress, now.ingress, endpoints.ingress.as_ref())
}

/// Whether it has the closing ACLs in both directions, which are restored together with lost policy.
fn has_policy(endpoint: &Endpoint) -> bool {
    let is_closure = |policy: &&Policy| policy.settings["Id"] == "tortie/closed";
    endpoint.policies.iter().filter(is_closure).count() == 2
}

/// A late call is executed during a full check. Once it is seen to be done, it is not requested again.
fn lands(cluster: &mut EmulatedCluster, case: &Case) -> Result<(), String> {
    let last_change = |node| cluster.hns(node).take_changes().pop();
    let late: Vec<Option<Call>> = (0..NODES.len()).map(last_change).collect();
    cluster.wait(LONG);
    cluster.resync();
    for (node, late) in late.iter().enumerate() {
        let sent = cluster.hns(node).take_changes();
        let again = late.as_ref().is_some_and(|late| sent.contains(late));
        // If removals are ignored, they may as well not have been executed.
        if again && case.later == 0 && case.config.acl_removal == AclRemoval::Works {
            return Err(format!("sent twice: {late:?}"));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// HNS returns without ACLs. Until that is noticed, endpoints are open, because HNS does not report it.
    #[test]
    fn objects_lost_by_hns_are_restored_by_one_check(case in cases(), sets_too in any::<bool>()) {
        let mut cluster = fresh(&case.after, &case);
        let flows: Vec<Flow> = case.flows.iter().filter(|flow| cluster.is_of_pods(flow)).copied().collect();
        let before = verdicts(&cluster, &flows);
        let survives = if sets_too { Survives::AllButAclsAndSets } else { Survives::AllButAcls };
        for node in 0..NODES.len() {
            cluster.hns(node).inner().restart(survives).unwrap();
        }
        prop_assert!(flows.is_empty() || before.iter().all(|ends| ends.all()) || verdicts(&cluster, &flows) != before);
        let reports = cluster.resync();
        prop_assert!(reports.iter().all(|report| !report.retry), "{reports:?}");
        prop_assert_eq!(verdicts(&cluster, &flows), before);
    }
}
