//! HNS restarts at any call of a change, or is slow for each call.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::dataplane::node::*;
use crate::dataplane::programs::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{Delta, Report};
use tortie_hcn::schema::SetPolicy;
use tortie_hcn::{Call, Failure, HResult, HcnExt, Kind};
use tortie_hns_emulator::{Config, Emulator, Survives, Verdict};
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, Flow, Member, Rule, SetId, SetKind};
use tortie_windows::{NETWORK, endpoint_id};

const SETS: [WindowsPolicySets; 2] = [WindowsPolicySets::Disabled, WindowsPolicySets::Enabled];
const SURVIVES: [Survives; 3] = [Survives::Everything, Survives::AllButAcls, Survives::AllButAclsAndSets];

/// A policy about the members of two sets, in both directions.
fn state(first: &[u8], second: &[u8], rules: &[(Action, &str, Protocol)]) -> Vec<Delta> {
    let set = |name: &str, members: &[u8]| {
        let nets = members.iter().map(|last| Member::Net(format!("10.0.0.{last}/32").parse().unwrap()));
        Delta::SetCreated(SetId::new(name), SetKind::Nets, nets.collect())
    };
    let of = |inwards: bool| -> Vec<Rule> {
        let rule = |(action, set, protocol): &(Action, &str, Protocol)| {
            let peer = EntityMatch { sets: vec![SetId::new(*set)], ..EntityMatch::default() };
            let rule = Rule { protocol: Some(*protocol), ..Rule::all(*action) };
            match inwards {
                true => Rule { source: peer, ..rule },
                false => Rule { destination: peer, ..rule },
            }
        };
        rules.iter().map(rule).collect()
    };
    let tiers = || vec![tier("default", &["web"], EndOfTier::Deny)];
    let program = EndpointProgram { ingress: tiers(), egress: tiers(), profiles: vec![] };
    vec![
        local_node(),
        own_block(),
        set("s:a", first),
        set("s:b", second),
        policy("web", of(true), of(false)),
        endpoint(program),
    ]
}

fn before() -> Vec<Delta> {
    state(&[1, 2, 3], &[3, 4], &[(Action::Deny, "s:b", Protocol::TCP), (Action::Allow, "s:a", Protocol::TCP)])
}

/// The list has changed, and so have the sets that it names.
fn after() -> Vec<Delta> {
    let rules = [
        (Action::Allow, "s:b", Protocol::UDP),
        (Action::Deny, "s:b", Protocol::TCP),
        (Action::Allow, "s:a", Protocol::TCP),
    ];
    state(&[2, 3, 5], &[2, 6], &rules)
}

/// With TCP and UDP, in both directions, between the pod and each address that sets may have.
fn flows() -> Vec<(Direction, Flow)> {
    let mut flows = Vec::new();
    for peer in (0..8).map(|last| [10, 0, 0, last].into()) {
        for protocol in [Protocol::TCP, Protocol::UDP] {
            let out = Flow {
                source: POD.into(),
                destination: peer,
                protocol,
                source_port: 1,
                destination_port: 1,
                icmp: None,
            };
            flows.extend([(Direction::Egress, out), (Direction::Ingress, back(out))]);
        }
    }
    flows
}

/// The state at one moment.
struct Moment {
    /// The verdict of HNS on each flow.
    passes: Vec<bool>,
    /// Whether the endpoint has the closing ACLs in both directions. They are restored together with lost policy;
    /// until then the endpoint is as open as HNS left it.
    is_policed: bool,
}

fn moment(hns: &Emulator, flows: &[(Direction, Flow)]) -> Moment {
    let id = endpoint_id(CONTAINER);
    let passes = |(direction, flow): &(Direction, Flow)| {
        hns.judge(id, &packet(*direction, flow)).unwrap() == Verdict::Allow
    };
    let policies = hns.endpoint(id).unwrap().policies;
    let closures = policies.iter().filter(|policy| policy.settings["Id"] == "tortie/closed").count();
    Moment { passes: flows.iter().map(passes).collect(), is_policed: closures == 2 }
}

/// A node with this state.
fn node_with(sets: WindowsPolicySets, deltas: &[Delta]) -> Node {
    let mut node = Node::with(Config::new(Config::SERVER_2022, NODE), sets);
    node.connect();
    node.apply(deltas);
    node.hns.take();
    node
}

/// Records the state before each call from now on. Calls `meets` before that, with the number of the call.
fn watch(
    node: &Node,
    flows: &[(Direction, Flow)],
    mut meets: impl FnMut(&Emulator, usize) -> Option<Failure> + Send + 'static,
) -> Arc<Mutex<Vec<Moment>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (hns, moments, flows) = (Arc::clone(&node.hns), Arc::clone(&seen), flows.to_vec());
    let mut number = 0;
    node.hns.set_fault(move |_| {
        let failure = meets(hns.inner(), number);
        number += 1;
        moments.lock().unwrap().push(moment(hns.inner(), &flows));
        failure.map(Err)
    });
    seen
}

/// Tortie's sets in HNS.
fn sets_of(node: &Node) -> BTreeSet<(String, String)> {
    let network = node.hns.inner().network_by_name(NETWORK).unwrap().unwrap();
    let sets = network.policies.iter().filter_map(|policy| policy.settings::<SetPolicy>().unwrap());
    sets.map(|set| (set.id, set.values)).collect()
}

/// The changes that were sent, to the network or to the endpoint.
fn changes(calls: Vec<Call>) -> Vec<(Kind, String)> {
    let change = |call| match call {
        Call::Modify { kind, settings, .. } => Some((kind, settings)),
        call if call.is_read() => None,
        other => panic!("{other:?}"),
    };
    calls.into_iter().filter_map(change).collect()
}

#[test]
fn at_any_restart_of_hns_nothing_opens_and_the_desired_state_is_reached() {
    let flows = flows();
    for sets in SETS {
        let mut quiet = node_with(sets, &before());
        let old = moment(quiet.hns.inner(), &flows).passes;
        assert_eq!(quiet.apply(&after()), Report::default());
        let new = moment(quiet.hns.inner(), &flows).passes;
        let calls = quiet.hns.take();
        let count = calls.len();
        if sets == WindowsPolicySets::Enabled {
            // Addresses listed, sets changed, and sets named again: HNS restarts between these steps, too.
            let kinds: Vec<Kind> = changes(calls).into_iter().map(|(kind, _)| kind).collect();
            let spelled_out = kinds.iter().position(|kind| *kind == Kind::Endpoint).unwrap();
            let changed = kinds[spelled_out..].iter().position(|kind| *kind == Kind::Network).unwrap();
            assert!(kinds[spelled_out + changed..].contains(&Kind::Endpoint), "{kinds:?}");
        }
        for (survives, in_call, at) in restarts(count) {
            let mut node = node_with(sets, &before());
            let seen = watch(&node, &flows, move |hns, number| {
                (number == at).then(|| hns.restart(survives).unwrap())?;
                in_call.then(|| Failure::new(HResult::RPC_S_SERVER_UNAVAILABLE, "it has stopped"))
            });
            let case = format!("{sets:?}, {survives:?} at call {at} of {count}, in it: {in_call}");
            let report = node.apply(&after());
            assert!(report.retry || !in_call, "{case}: nobody is told");
            node.hns.clear_fault();
            let mut seen = std::mem::take(&mut *seen.lock().unwrap());
            seen.push(moment(node.hns.inner(), &flows));
            for Moment { passes, is_policed } in &seen {
                assert!(*is_policed || survives != Survives::Everything, "{case}");
                let is_right = |index: usize| passes[index] == old[index] || passes[index] == new[index];
                let wrong = (0..flows.len()).find(|index| *is_policed && !is_right(*index));
                assert!(wrong.is_none(), "{case}: {:?}", wrong.map(|index| flows[index]));
            }
            // A full check, with a retry of sets.
            node.wait(3600);
            assert_eq!(node.dataplane.resync(), Report::default(), "{case}");
            assert_eq!(moment(node.hns.inner(), &flows).passes, new, "{case}");
            node.wait(3600);
            node.dataplane.resync();
            node.hns.take();
            node.wait(60);
            assert_eq!(node.dataplane.resync(), Report::default(), "{case}");
            assert_eq!(node.hns.take_changes(), [], "{case}");
            assert_eq!(sets_of(&node), sets_of(&quiet), "{case}");
        }
    }
}

/// A change is reverted that HNS has carried out up to a call whose reply is lost, so its progress is unknown.
#[test]
fn a_change_reverted_half_way_restores_the_old_state() {
    let flows = flows();
    // Nothing marks the endpoint itself as changed: it would be read from HNS.
    let [before_it, after_it] = [before(), after()].map(|deltas| deltas[2..5].to_vec());
    for sets in SETS {
        let mut quiet = node_with(sets, &before());
        let old = moment(quiet.hns.inner(), &flows).passes;
        quiet.apply(&after_it);
        let new = moment(quiet.hns.inner(), &flows).passes;
        for at in 0..quiet.hns.take().len() {
            let mut node = node_with(sets, &before());
            let mut number = 0;
            node.hns.lose_replies(move |_| {
                number += 1;
                (number == at + 1).then(|| Failure::new(HResult::ERROR_TIMEOUT, "no answer"))
            });
            let case = format!("{sets:?}, after call {at}");
            assert!(node.apply(&after_it).retry, "{case}: nobody is told");
            node.hns.clear_fault();
            let seen = watch(&node, &flows, |_, _| None);
            assert_eq!(node.apply(&before_it), Report::default(), "{case}");
            assert_eq!(moment(node.hns.inner(), &flows).passes, old, "{case}");
            for Moment { passes, .. } in &*seen.lock().unwrap() {
                let is_right = |index: usize| passes[index] == old[index] || passes[index] == new[index];
                assert!((0..flows.len()).all(is_right), "{case}");
            }
        }
    }
}

/// All restarts during a sequence of that many calls: the remaining state of HNS, whether a call fails because of it,
/// and at which call.
fn restarts(calls: usize) -> impl Iterator<Item = (Survives, bool, usize)> {
    let each = [false, true].into_iter().flat_map(|in_call| SURVIVES.map(|survives| (survives, in_call)));
    each.flat_map(move |(survives, in_call)| (0..calls).map(move |at| (survives, in_call, at)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// A slow HNS gets the same calls as a fast one, each once, and nothing opens meanwhile; a completed call is not
    /// repeated, however long it took.
    #[test]
    fn a_slow_hns_gets_no_more_calls_than_a_fast_one(
        sets in select(SETS.to_vec()), before in scenarios(false), after in scenarios(false), seconds in vec(1_u64..120, 1..5),
    ) {
        let flows = flows();
        let [mut quick, mut slow] = [(); 2].map(|()| node_with(sets, &before.deltas()));
        let old = moment(quick.hns.inner(), &flows).passes;
        quick.apply(&after.deltas());
        let new = moment(quick.hns.inner(), &flows).passes;
        let ahead = Arc::clone(&slow.ahead);
        let seen = watch(&slow, &flows, move |_, number| {
            *ahead.lock().unwrap() += Duration::from_secs(seconds[number % seconds.len()]);
            None
        });
        let report = slow.apply(&after.deltas());
        prop_assert!(!report.retry, "{:?}", report);
        prop_assert_eq!(changes(slow.hns.take()), changes(quick.hns.take()));
        for Moment { passes, is_policed } in &*seen.lock().unwrap() {
            prop_assert!(is_policed);
            for (index, passes) in passes.iter().enumerate() {
                prop_assert!(*passes == old[index] || *passes == new[index], "{:?}", flows[index]);
            }
        }
        // Unused sets are removed by a full check; then there is nothing to do.
        slow.dataplane.resync();
        slow.hns.take();
        slow.dataplane.resync();
        prop_assert_eq!(slow.hns.take_changes(), vec![]);
        slow.hns.clear_fault();
        prop_assert_eq!(moment(slow.hns.inner(), &flows).passes, new);
    }
}
