//! The kernel lets through what the oracle lets through: random policies, real packets.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::filtering::{AfterEachTransaction, UPLINK, configure};
use crate::dataplane::random_states::{POD, POD_LINK, SENTINEL, SENTINEL_LINK};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use testkit::Stateful;
use testkit::random::Random;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{Condition, NodeState, Report, Settings};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Nft, Table};
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::*;
use tortie_kernel::sysctl;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_policy::program::{
    EntityMatch, Flow, Member, PolicyRules, Rule, SetId, SetKind, TierProgram, evaluate,
};

/// A node with two pods and a link to the outside. The pods and the outside have no addresses, so their kernels
/// answer nothing, and every packet begins a new flow.
struct Node {
    namespace: NetNs,
    pod: PacketSocket,
    sentinel: PacketSocket,
    outside: PacketSocket,
    _namespaces: [NetNs; 3],
}

impl Node {
    fn new() -> Self {
        // All packets of this thread go through one processor's queue, and so keep their order.
        let mut one = rustix::thread::CpuSet::new();
        one.set(rustix::thread::sched_getcpu());
        rustix::thread::sched_setaffinity(None, &one).unwrap();
        let namespace = NetNs::create().unwrap();
        let connect = |name: &str| {
            let other = NetNs::create().unwrap();
            let (_, index) = crate::common::cable(&namespace, name, &other, "eth0");
            (other.run(|| PacketSocket::open(index).unwrap()).unwrap(), other)
        };
        let (pod, pod_namespace) = connect(POD_LINK);
        let (sentinel, sentinel_namespace) = connect(SENTINEL_LINK);
        let (outside, outside_namespace) = connect(UPLINK);
        namespace.run(|| configure(&[(POD_LINK, POD), (SENTINEL_LINK, SENTINEL)])).unwrap();
        let _namespaces = [pod_namespace, sentinel_namespace, outside_namespace];
        Self { namespace, pod, sentinel, outside, _namespaces }
    }

    /// The flows that pass into the pod or out of it.
    fn passed(&self, flows: &[Flow], direction: Direction) -> BTreeSet<u32> {
        let (from, to, last_from, last_to) = match direction {
            Direction::Ingress => (&self.outside, &self.pod, &self.outside, &self.sentinel),
            Direction::Egress => (&self.pod, &self.outside, &self.sentinel, &self.outside),
        };
        let router = |link: &str| self.namespace.run(|| mac_of(link)).unwrap();
        let (uplink, pod_link, sentinel_link) = (router(UPLINK), router(POD_LINK), router(SENTINEL_LINK));
        let (mac, last_mac) = match direction {
            Direction::Ingress => (uplink, uplink),
            Direction::Egress => (pod_link, sentinel_link),
        };
        let sentinel: IpAddr = SENTINEL[0].parse().unwrap();
        let outside: IpAddr = "10.1.0.1".parse().unwrap();
        let (source, destination) = match direction {
            Direction::Ingress => (outside, sentinel),
            Direction::Egress => (sentinel, outside),
        };
        let last = (last_from, last_mac, last_to, source, destination);
        self.passed_before(flows, (from, mac, to), last)
    }

    /// The same if the sentinel may be closed, too: the last packet goes past all pods.
    fn passed_by_any(&self, flows: &[Flow], direction: Direction) -> BTreeSet<u32> {
        let (from, link, to) = match direction {
            Direction::Ingress => (&self.outside, UPLINK, &self.pod),
            Direction::Egress => (&self.pod, POD_LINK, &self.outside),
        };
        let [mac, last_mac] = self.namespace.run(|| [mac_of(link), mac_of(UPLINK)]).unwrap();
        let [source, destination] = ["10.1.0.1", "10.1.0.2"].map(|address| address.parse().unwrap());
        let last = (&self.outside, last_mac, &self.outside, source, destination);
        self.passed_before(flows, (from, mac, to), last)
    }

    fn passed_before(
        &self,
        flows: &[Flow],
        (from, mac, to): (&PacketSocket, [u8; 6], &PacketSocket),
        (last_from, last_mac, last_to, source, destination): LastPacket<'_>,
    ) -> BTreeSet<u32> {
        // A flow of an earlier case, or its answer, must not count as established.
        self.namespace.run(|| Conntrack::open().unwrap().flush().unwrap()).unwrap();
        for (tag, flow) in flows.iter().enumerate() {
            assert!(from.send(&crate::common::frame(flow, mac, tag as u32)).unwrap());
        }
        // The packets keep their order: when the last one has arrived, so have those before it.
        let last = Flow {
            source,
            destination,
            protocol: Protocol::UDP,
            source_port: 7,
            destination_port: 7,
            icmp: None,
        };
        assert!(last_from.send(&crate::common::frame(&last, last_mac, LAST)).unwrap());
        let with_last = tags_until(last_to, LAST);
        let tags = if std::ptr::eq(to, last_to) { with_last } else { tags_now(to) };
        tags.into_iter().filter(|tag| (*tag as usize) < flows.len()).collect()
    }
}

/// The socket and router of the last packet, the socket where it arrives, and its addresses.
type LastPacket<'a> = (&'a PacketSocket, [u8; 6], &'a PacketSocket, IpAddr, IpAddr);

const LAST: u32 = 0xcafe_f00d;

fn tags_until(socket: &PacketSocket, last: u32) -> BTreeSet<u32> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut tags = BTreeSet::new();
    while Instant::now() < deadline {
        tags.extend(tags_now(socket));
        if tags.contains(&last) {
            return tags;
        }
        std::thread::yield_now();
    }
    panic!("the packet {last:#x}, which is always let through, did not arrive");
}

fn tags_now(socket: &PacketSocket) -> BTreeSet<u32> {
    let mut buffer = [0; 2048];
    let mut tags = BTreeSet::new();
    while let Some(length) = socket.receive(&mut buffer).unwrap() {
        tags.insert(crate::common::tag(&buffer[..length]));
    }
    tags
}

fn mac_of(link: &str) -> [u8; 6] {
    RouteSocket::open().unwrap().link(link).unwrap().unwrap().mac.unwrap().0
}

fn table() -> Table {
    Nft::open().unwrap().list("tortie").unwrap().unwrap()
}

/// The number of random states; `PROPTEST_CASES` sets more.
#[test]
fn the_kernel_agrees_with_programs() {
    decides_as_the_oracle(Config::default());
}

/// With lookups wherever possible.
#[test]
fn the_kernel_agrees_with_programs_with_lookups() {
    decides_as_the_oracle(Config { rules_in_a_row: 0, ..Config::default() });
}

fn decides_as_the_oracle(config: Config) {
    let node = Node::new();
    let dataplane = node.namespace.run(|| Stateful::new(Dataplane::open(config).unwrap())).unwrap();
    let current = RefCell::new((dataplane, NodeState::default()));
    let counts = RefCell::new((0, 0));
    let flows = |into| prop::collection::vec(crate::dataplane::random_states::flow(into), 30);
    let inputs = (crate::dataplane::random_states::state(), flows(true), flows(false));
    let test = |(state, incoming, outgoing): (NodeState, Vec<Flow>, Vec<Flow>)| {
        let (dataplane, old) = &mut *current.borrow_mut();
        node.namespace
            .run(|| {
                // The state of the last case is changed into this one.
                let report = dataplane.apply(&crate::common::deltas(old, &state));
                prop_assert!(tells_of_unknown_policies_only(&report), "{:?}", report);
                *old = state.clone();
                // The next change removes what is left over.
                dataplane.apply(&[]);
                let changed = table();
                prop_assert_eq!(dataplane.resync(), report);
                prop_assert_eq!(&changed, &table(), "a change does not come to the same as making all anew");
                Ok(())
            })
            .unwrap()?;
        let endpoint = &state.endpoints[&crate::dataplane::random_states::id("pod")];
        for (flows, direction) in [(&incoming, Direction::Ingress), (&outgoing, Direction::Egress)] {
            let passed = node.passed(flows, direction);
            counts.borrow_mut().0 += passed.len();
            counts.borrow_mut().1 += flows.len();
            for (tag, flow) in flows.iter().enumerate() {
                let allowed = evaluate(&endpoint.program, direction, flow, &state)
                    && !(direction == Direction::Egress && is_tunnel(flow));
                let through = passed.contains(&(tag as u32));
                prop_assert_eq!(
                    through,
                    allowed,
                    "{:?} of {:?}\n{}",
                    direction,
                    flow,
                    crate::dataplane::random_states::shown(&state)
                );
            }
        }
        Ok(())
    };
    if let Err(error) = Random::cases(150).shrinking(2_000).run(&inputs, test) {
        panic!("{error}");
    }
    let (passed, all) = *counts.borrow();
    assert!(passed * 10 > all && passed * 10 < all * 9, "{passed} of {all} flows passed: that proves little");
}

/// Random programs name some missing policies.
fn tells_of_unknown_policies_only(report: &Report) -> bool {
    let of_unknown = |condition: &Condition| condition.message.contains("is not known");
    report.conditions().all(of_unknown) && !report.retry
}

/// What no pod may send, whatever its policy: VXLAN and IPIP. The oracle judges policy only.
fn is_tunnel(flow: &Flow) -> bool {
    let vxlan = flow.protocol == Protocol::UDP && flow.destination_port == 4789;
    vxlan || flow.protocol == Protocol(4)
}

/// What a state lets through of some flows.
fn allowed(state: &NodeState, flows: &[Flow], direction: Direction) -> BTreeSet<u32> {
    let Some(endpoint) = state.endpoints.get(&crate::dataplane::random_states::id("pod")) else {
        return BTreeSet::new();
    };
    let allows = |flow: &Flow| evaluate(&endpoint.program, direction, flow, state);
    (0u32..).zip(flows).filter(|(_, flow)| allows(flow)).map(|(tag, _)| tag).collect()
}

/// Checks every transaction of a change that does not fit in one, with packets.
#[test]
fn between_transactions_only_flows_of_either_state_pass() {
    let node = Arc::new(Node::new());
    let small = |guard_table| Config { guard_table, transaction_bytes: 28_000, ..Config::default() };
    let open = |guard| node.namespace.run(|| Stateful::new(Dataplane::open(small(guard)).unwrap())).unwrap();
    let current = RefCell::new((open(true), NodeState::default(), 0u32));
    let counts = Arc::new(Mutex::new((0, 0)));
    let flows = |into| prop::collection::vec(crate::dataplane::random_states::flow(into), 12);
    let inputs = (crate::dataplane::random_states::state(), flows(true), flows(false));
    let test = |(mut state, incoming, outgoing): (NodeState, Vec<Flow>, Vec<Flow>)| {
        // Members that no packet of this test has make each set too large for one transaction.
        for (number, (kind, members)) in (0u32..).zip(state.sets.values_mut()) {
            let strangers =
                (0..100).map(|n| IpAddr::from((0xf000_0000 + number * 1000 + n * 2).to_be_bytes()));
            members.make_mut().extend(
                strangers.filter(|_| *kind == SetKind::Nets).map(|address| Member::Net(address.into())),
            );
        }
        let (dataplane, old, case) = &mut *current.borrow_mut();
        *case += 1;
        // A change; a restart; and a restart that must recreate the whole table.
        let before = match *case % 4 {
            1 | 2 => old.clone(),
            step => {
                *dataplane = open(step == 3);
                NodeState::default()
            }
        };
        let mut expected = Vec::new();
        for (flows, direction) in [(incoming, Direction::Ingress), (outgoing, Direction::Egress)] {
            let either = &allowed(old, &flows, direction) | &allowed(&state, &flows, direction);
            expected.push((flows, direction, either));
        }
        let wrong = Arc::new(Mutex::new(Vec::new()));
        let (watched, recorded, counted) = (node.clone(), wrong.clone(), counts.clone());
        let look = move || {
            counted.lock().unwrap().0 += 1;
            for (flows, direction, either) in &expected {
                let passed = watched.passed_by_any(flows, *direction);
                counted.lock().unwrap().1 += passed.len();
                let more =
                    passed.difference(either).map(|tag| format!("{direction:?} {:?}", flows[*tag as usize]));
                recorded.lock().unwrap().extend(more);
            }
        };
        let deltas = crate::common::deltas(&before, &state);
        let report = node
            .namespace
            .run(|| {
                tracing::subscriber::with_default(AfterEachTransaction(look), || dataplane.apply(&deltas))
            })
            .unwrap();
        prop_assert!(report.node.is_empty(), "{:?}", report);
        let wrong = wrong.lock().unwrap().clone();
        prop_assert!(
            wrong.is_empty(),
            "case {}: {:#?}\n{}",
            case,
            wrong,
            crate::dataplane::random_states::shown(&state)
        );
        *old = state;
        Ok(())
    };
    let lacking = || {
        let (transactions, passed) = *counts.lock().unwrap();
        let enough = transactions > 80 && passed > 100;
        (!enough).then(|| format!("{transactions} transactions, {passed} flows"))
    };
    if let Err(error) = Random::cases(40).prove(&inputs, test, lacking) {
        panic!("{error}");
    }
}

/// A set gets the members that its rule admitted until the same change: neither state admits them.
#[test]
fn new_members_are_not_added_before_their_rules() {
    let node = Arc::new(Node::new());
    let config = Config { transaction_bytes: 20_000, ..Config::default() };
    let mut dataplane = node.namespace.run(|| Stateful::new(Dataplane::open(config).unwrap())).unwrap();
    let id = crate::dataplane::random_states::id("pod");
    let (set, policy) = (SetId::new("s:some"), crate::common::cluster::policy_id("some"));
    let state = |members: Vec<IpAddr>, action: Action| {
        let mut state = TestRunnerState::open().0;
        let source = EntityMatch { sets: vec![set.clone()], ..EntityMatch::default() };
        let rule = Rule { source, ..Rule::all(action) };
        let rules = PolicyRules { ingress: vec![rule], egress: vec![] };
        state.policies.insert(policy.clone(), Arc::new(rules));
        let members = members.into_iter().map(|address| Member::Net(address.into()));
        state.sets.insert(set.clone(), (SetKind::Nets, members.collect()));
        let tier = TierProgram {
            name: "default".into(),
            policies: vec![policy.clone()],
            end: tortie_policy::program::EndOfTier::Deny,
        };
        let endpoint = Arc::make_mut(state.endpoints.get_mut(&id).unwrap());
        Arc::make_mut(&mut endpoint.program).ingress = vec![tier];
        state
    };
    let stranger = |n: u32| IpAddr::from((0xf000_0000 + n * 2).to_be_bytes());
    let client: IpAddr = "10.1.0.1".parse().unwrap();
    let members = (0..2_500).map(stranger).chain([client]).collect();
    let (old, new) = (state(vec![], Action::Allow), state(members, Action::Deny));
    let flow = Flow {
        source: client,
        destination: POD[0].parse().unwrap(),
        protocol: Protocol::UDP,
        source_port: 5,
        destination_port: 5,
        icmp: None,
    };
    let report =
        node.namespace.run(|| dataplane.apply(&crate::common::deltas(&NodeState::default(), &old))).unwrap();
    assert_eq!(report, Default::default());
    let seen = Arc::new(Mutex::new((0, BTreeSet::new())));
    let (watched, recorded) = (node.clone(), seen.clone());
    let look = move || {
        let passed = watched.passed_by_any(std::slice::from_ref(&flow), Direction::Ingress);
        let mut recorded = recorded.lock().unwrap();
        recorded.0 += 1;
        recorded.1.extend(passed);
    };
    let deltas = crate::common::deltas(&old, &new);
    let report = node
        .namespace
        .run(|| tracing::subscriber::with_default(AfterEachTransaction(look), || dataplane.apply(&deltas)))
        .unwrap();
    assert_eq!(report, Default::default());
    let (transactions, passed) = seen.lock().unwrap().clone();
    assert_eq!(passed, BTreeSet::new());
    assert!(transactions > 3, "{transactions}");
}

#[test]
fn a_pod_can_neither_send_tunnels_nor_advertise_a_router() {
    let node = Node::new();
    let mut dataplane =
        node.namespace.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
    let mut state = TestRunnerState::open().0;
    let flow = |(source, destination): (&str, &str), protocol: u8, destination_port: u16| Flow {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        protocol: Protocol(protocol),
        source_port: 5,
        destination_port,
        icmp: None,
    };
    let kinds = [(17, 4789), (17, 4790), (6, 4789), (4, 0), (89, 0)];
    let flows = |addresses: [(&'static str, &'static str); 2]| {
        let of = |(protocol, port)| addresses.map(|addresses| flow(addresses, protocol, port));
        kinds.into_iter().flat_map(of).collect::<Vec<_>>()
    };
    let out = flows([(POD[0], "10.1.0.1"), (POD[1], "fd01::1")]);
    let into = flows([("10.1.0.1", POD[0]), ("fd01::1", POD[1])]);
    let apply = |dataplane: &mut Stateful<Dataplane>, old: &NodeState, new: &NodeState| {
        let report = node.namespace.run(|| dataplane.apply(&crate::common::deltas(old, new))).unwrap();
        assert_eq!(report, Default::default());
    };
    apply(&mut dataplane, &NodeState::default(), &state);
    assert_eq!(node.passed(&out, Direction::Egress), BTreeSet::from([2, 3, 4, 5, 8, 9]));
    assert_eq!(node.passed(&into, Direction::Ingress), (0..10).collect());

    // Nor may it present itself as a router.
    let icmp = |icmp_type| Flow { icmp: Some((icmp_type, 0)), ..flow((POD[1], "fd01::1"), 58, 0) };
    let icmp = [134, 128].map(|icmp_type| Flow { source_port: 0, ..icmp(icmp_type) });
    assert_eq!(node.passed(&icmp, Direction::Egress), BTreeSet::from([1]));

    // The port of the configuration, and that of Windows nodes.
    let old = state.clone();
    state.settings = Arc::new(Settings { vxlan_ports: [4789, 4790].into(), ..Settings::default() });
    apply(&mut dataplane, &old, &state);
    assert_eq!(node.passed(&out, Direction::Egress), BTreeSet::from([4, 5, 8, 9]));
}

#[test]
fn a_pod_cannot_use_the_address_of_another() {
    let node = Node::new();
    let mut dataplane =
        node.namespace.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
    let mut state = TestRunnerState::open();
    node.namespace
        .run(|| {
            // Only policy is tested, not the kernel's own check.
            let report = dataplane.apply(&crate::common::deltas(&NodeState::default(), &state.0));
            assert_eq!(report, Default::default());
            sysctl::ensure("net/ipv4/conf/cali-pod/rp_filter", "0").unwrap();
        })
        .unwrap();
    let flow = |source: &str, destination: &str| Flow {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        protocol: Protocol::UDP,
        source_port: 5,
        destination_port: 6,
        icmp: None,
    };
    let flows = [
        flow(POD[0], "10.1.0.1"),
        flow("10.65.0.9", "10.1.0.1"),
        flow(SENTINEL[0], "10.1.0.1"),
        flow(POD[1], "fd01::1"),
        flow("fd65::9", "fd01::1"),
    ];
    assert_eq!(node.passed(&flows, Direction::Egress), BTreeSet::from([0, 3]));

    // The interface of an unknown pod is closed.
    state.0.endpoints.remove(&crate::dataplane::random_states::id("pod"));
    let gone = tortie_dataplane::Delta::EndpointRemoved(crate::dataplane::random_states::id("pod"));
    node.namespace.run(|| dataplane.apply(&[gone])).unwrap();
    assert_eq!(node.passed(&flows, Direction::Egress), BTreeSet::new());
}

#[test]
fn a_pod_cannot_send_into_the_flow_of_another() {
    let node = Node::new();
    let mut dataplane =
        node.namespace.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
    let state = TestRunnerState::open().0;
    let routers = node
        .namespace
        .run(|| {
            assert_eq!(
                dataplane.apply(&crate::common::deltas(&NodeState::default(), &state)),
                Default::default()
            );
            for link in [POD_LINK, SENTINEL_LINK] {
                sysctl::ensure(&format!("net/ipv4/conf/{link}/rp_filter"), "0").unwrap();
            }
            [POD_LINK, SENTINEL_LINK, UPLINK].map(mac_of)
        })
        .unwrap();
    let flow = |source: &str, destination: &str| Flow {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        protocol: Protocol::UDP,
        source_port: 5,
        destination_port: 5,
        icmp: None,
    };
    for (pod, sentinel, outside) in [(POD[0], SENTINEL[0], "10.1.0.1"), (POD[1], SENTINEL[1], "fd01::1")] {
        let (there, back) = (flow(pod, outside), flow(outside, pod));
        let send = |from: &PacketSocket, flow: &Flow, router: [u8; 6], tag: u32| {
            assert!(from.send(&crate::common::frame(flow, router, tag)).unwrap());
        };
        send(&node.pod, &there, routers[0], 1);
        tags_until(&node.outside, 1);
        send(&node.outside, &back, routers[2], 2);
        tags_until(&node.pod, 2);
        // The flow is established. Its packets keep their order: after the last one, no earlier packet arrives.
        send(&node.sentinel, &there, routers[1], 3);
        send(&node.sentinel, &flow(sentinel, outside), routers[1], 4);
        send(&node.pod, &there, routers[0], LAST);
        let tags = tags_until(&node.outside, LAST);
        assert!(tags.contains(&4) && !tags.contains(&3), "{tags:?}");
    }
}

/// A state in which both pods let everything through.
struct TestRunnerState(NodeState);

impl TestRunnerState {
    fn open() -> Self {
        use proptest::strategy::ValueTree;
        let mut runner = TestRunner::deterministic();
        let mut state = crate::dataplane::random_states::state().new_tree(&mut runner).unwrap().current();
        let open = state.endpoints[&crate::dataplane::random_states::id("sentinel")].program.clone();
        let pod = state.endpoints.get_mut(&crate::dataplane::random_states::id("pod")).unwrap();
        std::sync::Arc::make_mut(pod).program = open;
        Self(state)
    }
}
