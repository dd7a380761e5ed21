//! The cost of rendering policies as ACLs: 1,000 policies for 100 endpoints from nothing, and one change, beside a
//! naive expansion (the model of Calico in `tortie_windows::CostModel::Naive`) of the same state in the same process.
//!
//! Only the rendering is measured, without HNS. Each pod has 20 of the policies, in two tiers. Some rules of the
//! first tier are Pass, and so is its end. The members of the sets are scattered.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)] // a bench

use std::collections::BTreeSet;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tortie_api::net::{Action, PortRange, Protocol};
use tortie_dataplane::{Delta, Endpoint, EndpointId, NodeState};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, EntityMatch, Member, PolicyId, PolicyKind, PolicyRules, Rule, SetId, SetKind,
    TierProgram,
};
use tortie_windows::{CostModel, Costing, Tally};

const POLICIES: usize = 1_000;
const ENDPOINTS: usize = 100;
/// The number of policies of a pod.
const OF_A_POD: usize = 20;
const SETS: usize = 200;
/// The number of pods that a selector matches.
const MEMBERS: usize = 100;
const TURNS: usize = 5;
const WAYS: [(CostModel, &str); 3] = [
    (CostModel::Lists, "without sets"),
    (CostModel::Sets, "with sets"),
    (CostModel::Naive, "naive expansion"),
];

fn main() {
    let state = state();
    println!(
        "{POLICIES} policies of 4 rules, {ENDPOINTS} endpoints under {OF_A_POD} each, {SETS} sets of {MEMBERS} addresses; best of {TURNS}"
    );
    for (model, name) in WAYS {
        let cold = best(|| all(&state, model));
        let tally: Tally = {
            let costing = costing(&state);
            state.endpoints.values().map(|endpoint| costing.acls(endpoint, model).iter().collect()).sum()
        };
        println!(
            "  {name}: all from nothing {}; {} ACLs, {} addresses, {} pairs",
            ms(cold),
            tally.acls,
            tally.addresses,
            tally.pairs
        );
    }
    // One change, and then the lists of all endpoints that it concerns, rendered by a dataplane without cached
    // results.
    for (what, changed, concerned) in [
        ("a member comes", with_member(&state), naming_set(&state, 0)),
        ("a rule changes", with_rule(&state), under(&state, &policy_id(0))),
    ] {
        for (model, name) in WAYS {
            let took = best(|| {
                let costing = costing(&changed);
                concerned.iter().for_each(|id| drop(black_box(costing.acls(&changed.endpoints[id], model))));
            });
            println!("  {name}: {what}, {} endpoints concerned: {}", concerned.len(), ms(took));
        }
    }
}

fn costing(state: &NodeState) -> Costing<'_, NodeState> {
    Costing::new(state, [Ipv4Addr::new(172, 16, 0, 1).into()].into())
}

fn all(state: &NodeState, model: CostModel) {
    let costing = costing(state);
    state.endpoints.values().for_each(|endpoint| drop(black_box(costing.acls(endpoint, model))));
}

fn best(work: impl Fn()) -> Duration {
    let once = || {
        let begun = Instant::now();
        work();
        begun.elapsed()
    };
    (0..TURNS).map(|_| once()).min().unwrap()
}

fn ms(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1e3)
}

fn policy_id(number: usize) -> PolicyId {
    PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "bench".into(), name: format!("p{number}").into() }
}

fn set_id(number: usize) -> SetId {
    SetId::new(format!("s:{}", number % SETS))
}

/// An address of the overlay, different for each number.
fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from(0x0af4_0000 + u32::try_from(number * 7_919 % 65_536).unwrap())
}

fn members(set: usize) -> BTreeSet<Member> {
    (0..MEMBERS).map(|member| Member::Net(IpAddr::V4(address(set * MEMBERS + member)).into())).collect()
}

/// From two selectors and a network, each to separate ports; the last rule denies everything.
fn rules(number: usize) -> PolicyRules {
    let rule = |action, source, port: usize| {
        let port = u16::try_from(1_000 + port % 5_000).unwrap();
        Rule {
            protocol: Some(Protocol::TCP),
            source,
            destination: EntityMatch {
                ports: vec![PortRange { first: port, last: port }],
                ..EntityMatch::default()
            },
            ..Rule::all(action)
        }
    };
    let of_set = |set| EntityMatch { sets: vec![set_id(set)], ..EntityMatch::default() };
    let net = |net: String| EntityMatch { nets: vec![net.parse().unwrap()], ..EntityMatch::default() };
    let ingress = vec![
        rule(Action::Allow, of_set(number), number),
        rule(Action::Deny, net(format!("198.51.{}.0/24", number % 256)), number + 1),
        rule(
            if number.is_multiple_of(10) { Action::Pass } else { Action::Allow },
            of_set(number * 7 + 1),
            number + 2,
        ),
        rule(Action::Allow, net(format!("10.{}.0.0/16", number % 200)), number + 3),
    ];
    PolicyRules { ingress, egress: vec![] }
}

fn state() -> NodeState {
    let mut state = NodeState::default();
    for set in 0..SETS {
        state.apply(&Delta::SetCreated(set_id(set), SetKind::Nets, members(set).into()));
    }
    for number in 0..POLICIES {
        state.apply(&Delta::Policy(policy_id(number), Arc::new(rules(number))));
    }
    let open = PolicyId::profile("kns.bench");
    let allow = || vec![Rule::all(Action::Allow)];
    state.apply(&Delta::Policy(open.clone(), Arc::new(PolicyRules { ingress: allow(), egress: allow() })));
    for number in 0..ENDPOINTS {
        let first = number * OF_A_POD / 2;
        let policies =
            |range: std::ops::Range<usize>| range.map(|of| policy_id((first + of) % POLICIES)).collect();
        let tier = |name: &str, policies, end| TierProgram { name: name.into(), policies, end };
        let program = EndpointProgram {
            ingress: vec![
                tier("security", policies(0..OF_A_POD / 2), EndOfTier::Pass),
                tier("default", policies(OF_A_POD / 2..OF_A_POD), EndOfTier::Deny),
            ],
            egress: vec![],
            profiles: vec![open.clone()],
        };
        let endpoint = Endpoint {
            container_id: format!("c{number}").into(),
            host_interface: format!("c{number}").into(),
            addresses: vec![address(1_000_000 + number).into()],
            mac: None,
            host_ports: Default::default(),
            program: Arc::new(program),
        };
        let id = EndpointId {
            namespace: "bench".into(),
            pod: format!("w{number}").into(),
            interface: "eth0".into(),
        };
        state.apply(&Delta::Endpoint(id, Arc::new(endpoint)));
    }
    state
}

fn with_member(state: &NodeState) -> NodeState {
    let mut changed = state.clone();
    let mut members = members(0);
    members.insert(Member::Net("192.0.2.77/32".parse().unwrap()));
    changed.apply(&Delta::SetCreated(set_id(0), SetKind::Nets, members.into()));
    changed
}

fn with_rule(state: &NodeState) -> NodeState {
    let mut changed = state.clone();
    let mut rules = rules(0);
    rules.ingress[3].source.nets = vec!["192.0.2.0/24".parse().unwrap()];
    changed.apply(&Delta::Policy(policy_id(0), Arc::new(rules)));
    changed
}

fn under(state: &NodeState, policy: &PolicyId) -> Vec<EndpointId> {
    let named = |endpoint: &Endpoint| endpoint.program.policy_ids().any(|id| id == policy);
    state.endpoints.iter().filter(|(_, endpoint)| named(endpoint)).map(|(id, _)| id.clone()).collect()
}

fn naming_set(state: &NodeState, set: usize) -> Vec<EndpointId> {
    let naming = state.policies.iter().filter(|(_, rules)| rules.set_ids().any(|id| *id == set_id(set)));
    let naming: BTreeSet<&PolicyId> = naming.map(|(id, _)| id).collect();
    let named = |endpoint: &Endpoint| endpoint.program.policy_ids().any(|id| naming.contains(id));
    state.endpoints.iter().filter(|(_, endpoint)| named(endpoint)).map(|(id, _)| id.clone()).collect()
}
