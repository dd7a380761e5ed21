//! Host endpoints on the node's own interfaces: random policies, real packets.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::filtering::{AfterEachTransaction, UPLINK, configure};
use crate::dataplane::random_hosts::{By, PacketPath, judge};
use crate::dataplane::random_states::{POD, POD_LINK, SENTINEL, SENTINEL_LINK};
use proptest::prelude::*;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use testkit::Stateful;
use testkit::random::Random;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{NodeState, Reason, Report};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Nft, Table};
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::RouteSocket;
use tortie_kernel::sysctl;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_policy::program::*;

/// A node with two pods and an uplink, none of whose ends answers anything.
struct Node {
    namespace: NetNs,
    pod: PacketSocket,
    outside: PacketSocket,
    /// A path through a router without policy: when one of its packets arrives, all earlier packets have arrived.
    relay: (PacketSocket, [u8; 6]),
    /// What passes to the node itself, by protocol: raw sockets receive it after all hooks (raw(7)).
    own: Vec<OwnedFd>,
    /// The sockets by which the node sends packets with their own IPv4 and IPv6 headers.
    raw: [OwnedFd; 2],
    next_tag: AtomicU32,
    _namespaces: [NetNs; 5],
}

fn raw_socket(family: AddressFamily, protocol: u8) -> OwnedFd {
    let protocol = net::Protocol::from_raw(u32::from(protocol).try_into().unwrap());
    net::socket_with(family, SocketType::RAW, SocketFlags::NONBLOCK, Some(protocol)).unwrap()
}

/// `IPPROTO_RAW`
const HEADERS: u8 = 255;

impl Node {
    fn new() -> Self {
        // All packets of this thread go through one processor's queue, and so keep their order.
        let mut one = rustix::thread::CpuSet::new();
        one.set(rustix::thread::sched_getcpu());
        rustix::thread::sched_setaffinity(None, &one).unwrap();
        let namespace = NetNs::create().unwrap();
        let connect = |to: &NetNs, name: &str| {
            let other = NetNs::create().unwrap();
            let (_, index) = crate::common::cable(to, name, &other, "eth0");
            (other.run(|| PacketSocket::open(index).unwrap()).unwrap(), other)
        };
        let (pod, pod_namespace) = connect(&namespace, POD_LINK);
        let (_, sentinel_namespace) = connect(&namespace, SENTINEL_LINK);
        let (outside, outside_namespace) = connect(&namespace, UPLINK);
        let relay_namespace = NetNs::create().unwrap();
        let (relay, behind_relay) = connect(&relay_namespace, UPLINK);
        relay_namespace.run(|| configure(&[])).unwrap();
        let relay = (relay, relay_namespace.run(|| mac_of(UPLINK)).unwrap());
        let _namespaces =
            [pod_namespace, sentinel_namespace, outside_namespace, relay_namespace, behind_relay];
        let open = || {
            configure(&[(POD_LINK, POD), (SENTINEL_LINK, SENTINEL)]);
            sysctl::ensure("net/ipv4/icmp_echo_ignore_all", "1").unwrap();
            let families = [AddressFamily::INET, AddressFamily::INET6];
            let v4 = [1, 6, 17, 132, 89].map(|protocol| raw_socket(families[0], protocol));
            let v6 = [58, 6, 17, 132, 89].map(|protocol| raw_socket(families[1], protocol));
            (v4.into_iter().chain(v6).collect(), families.map(|family| raw_socket(family, HEADERS)))
        };
        let (own, raw) = namespace.run(open).unwrap();
        Self { namespace, pod, outside, relay, own, raw, next_tag: AtomicU32::new(0), _namespaces }
    }

    /// The flows that pass.
    fn passed(&self, flows: &[Flow], path: PacketPath) -> BTreeSet<usize> {
        // A flow of an earlier case, or its answer, must not count as established.
        self.namespace.run(|| Conntrack::open().unwrap().flush().unwrap()).unwrap();
        let first = self.next_tag.fetch_add(flows.len() as u32 + 1, Ordering::Relaxed);
        let last = first + flows.len() as u32;
        let [uplink, pod_link] = self.namespace.run(|| [UPLINK, POD_LINK].map(mac_of)).unwrap();
        for (tag, flow) in (first..).zip(flows) {
            match path {
                PacketPath::OutsideToNode | PacketPath::OutsideToPod => {
                    assert!(self.outside.send(&crate::common::frame(flow, uplink, tag)).unwrap());
                }
                PacketPath::PodToOutside => {
                    assert!(self.pod.send(&crate::common::frame(flow, pod_link, tag)).unwrap())
                }
                PacketPath::NodeToOutside => {
                    self.send(flow, &crate::common::frame(flow, uplink, tag)[ETHERNET..])
                }
            }
        }
        // The packets keep their order: when the last one has gone as far as they, they have arrived.
        let [source, destination] = ["10.1.0.1", "10.1.0.2"].map(|address| address.parse().unwrap());
        let protocol = Protocol::UDP;
        let end = Flow { source, destination, protocol, source_port: 7, destination_port: 7, icmp: None };
        let (relay, router) = &self.relay;
        assert!(relay.send(&crate::common::frame(&end, *router, last)).unwrap());
        let deadline = Instant::now() + Duration::from_secs(10);
        while !tags(|buffer| relay.receive(buffer).unwrap()).contains(&last) {
            assert!(Instant::now() < deadline, "the last packet did not arrive");
            std::thread::yield_now();
        }
        let tags = match path {
            PacketPath::OutsideToNode => {
                self.own.iter().flat_map(|socket| tags(|buffer| receive(socket, buffer))).collect()
            }
            PacketPath::OutsideToPod => tags(|buffer| self.pod.receive(buffer).unwrap()),
            PacketPath::NodeToOutside | PacketPath::PodToOutside => {
                tags(|buffer| self.outside.receive(buffer).unwrap())
            }
        };
        tags.into_iter().filter(|tag| (first..last).contains(tag)).map(|tag| (tag - first) as usize).collect()
    }

    /// Sends a packet of the node itself. The kernel returns an error if policy drops it.
    fn send(&self, flow: &Flow, packet: &[u8]) {
        let socket = &self.raw[usize::from(flow.destination.is_ipv6())];
        let sent = net::sendto(socket, packet, SendFlags::empty(), &SocketAddr::from((flow.destination, 0)));
        assert!(matches!(sent, Ok(_) | Err(rustix::io::Errno::PERM)), "{flow:?}: {sent:?}");
    }
}

/// The length of the header.
const ETHERNET: usize = 14;

fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Option<usize> {
    match net::recv(socket, buffer, RecvFlags::empty()) {
        Ok((length, _)) => Some(length),
        Err(rustix::io::Errno::AGAIN) => None,
        Err(error) => panic!("{error}"),
    }
}

/// The tags of all waiting packets.
fn tags(receive: impl Fn(&mut [u8]) -> Option<usize>) -> BTreeSet<u32> {
    let mut buffer = [0; 2048];
    let mut tags = BTreeSet::new();
    while let Some(length) = receive(&mut buffer) {
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

/// Whether a flow may pass, and what in the host endpoint decides. A pod's own policy must allow it, too.
fn allowed(state: &NodeState, path: PacketPath, flow: &Flow) -> (bool, By) {
    let (allowed, by) = judge(state, path, flow);
    let by_its_pod = |direction| {
        let pod = state.endpoints.get(&crate::dataplane::random_states::id("pod"));
        pod.is_some_and(|pod| evaluate(&pod.program, direction, flow, state))
    };
    let by_pod = match path {
        PacketPath::OutsideToPod => by_its_pod(Direction::Ingress),
        PacketPath::PodToOutside => by_its_pod(Direction::Egress),
        PacketPath::OutsideToNode | PacketPath::NodeToOutside => true,
    };
    (allowed && by_pod, by)
}

type Flows = Vec<(PacketPath, Vec<Flow>)>;

fn flows(each: usize) -> impl Strategy<Value = Flows> {
    let of = |path| {
        prop::collection::vec(crate::dataplane::random_hosts::flow(path), each)
            .prop_map(move |flows| (path, flows))
    };
    PacketPath::ALL.map(of).prop_map(Vec::from)
}

/// Random programs name some missing policies, and some host endpoints have no interface.
fn is_expected(report: &Report) -> bool {
    let expected = |condition: &tortie_dataplane::Condition| {
        condition.message.contains("is not known") || condition.reason == Reason::HostEndpointWithoutInterface
    };
    report.conditions().all(expected) && !report.retry
}

fn shown(state: &NodeState) -> String {
    let host = crate::dataplane::random_hosts::of_uplink(state);
    format!("{host:#?}\n{:#?}\n{}", state.settings, crate::dataplane::random_states::shown(state))
}

/// The number of random states; `PROPTEST_CASES` sets more.
#[test]
fn the_kernel_agrees_with_programs_of_host_endpoints() {
    decides_as_the_programs(Config::default());
}

/// With lookups wherever possible.
#[test]
fn the_kernel_agrees_with_programs_of_host_endpoints_with_lookups() {
    decides_as_the_programs(Config { rules_in_a_row: 0, ..Config::default() });
}

fn decides_as_the_programs(config: Config) {
    let node = Node::new();
    let dataplane = node.namespace.run(|| Stateful::new(Dataplane::open(config).unwrap())).unwrap();
    let current = RefCell::new((dataplane, NodeState::default()));
    let counts = RefCell::new(BTreeMap::<_, [usize; 2]>::new());
    let case = AtomicU32::new(0);
    let test = |(mut state, flows): (NodeState, Vec<(PacketPath, Vec<Flow>)>)| {
        let (dataplane, old) = &mut *current.borrow_mut();
        if !case.fetch_add(1, Ordering::Relaxed).is_multiple_of(4) {
            state.settings = old.settings.clone(); // others have the whole table compared
        }
        node.namespace
            .run(|| {
                // The state of the last case is changed into this one.
                let deltas = crate::common::deltas(old, &state);
                let report = tracing::subscriber::with_default(AfterEachTransaction(|| ()), || {
                    dataplane.apply(&deltas)
                });
                prop_assert!(is_expected(&report), "{:?}", report);
                *old = state.clone();
                // The next change removes what is left over.
                dataplane.apply(&[]);
                let changed = table();
                prop_assert_eq!(dataplane.resync(), report);
                prop_assert_eq!(&changed, &table(), "a change does not come to the same as making all anew");
                Ok(())
            })
            .unwrap()?;
        for (path, flows) in &flows {
            let passed = node.passed(flows, *path);
            for (index, flow) in flows.iter().enumerate() {
                let (expected, by) = allowed(&state, *path, flow);
                let through = passed.contains(&index);
                counts.borrow_mut().entry((*path, by)).or_default()[usize::from(through)] += 1;
                prop_assert_eq!(through, expected, "{:?} by {:?}: {:?}\n{}", path, by, flow, shown(&state));
            }
        }
        Ok(())
    };
    let inputs = (crate::dataplane::random_hosts::state(), flows(20));
    let lacking = || lacking(&counts.borrow());
    if let Err(error) = Random::cases(300).shrinking(2_000).prove(&inputs, test, lacking) {
        panic!("{error}");
    }
}

/// Every table on every path must have let some packets pass and others not.
fn lacking(counts: &BTreeMap<(PacketPath, By), [usize; 2]>) -> Option<String> {
    let enough = |path, by, verdict: usize| counts.get(&(path, by)).is_some_and(|count| count[verdict] >= 10);
    for path in PacketPath::ALL {
        let incoming = path.direction() == Direction::Ingress;
        let last = if path.forwarded() { By::Forward } else { By::Normal };
        let untracked = (incoming || !path.forwarded()).then_some(By::Untracked);
        let tables = untracked.into_iter().chain(incoming.then_some(By::PreDnat)).chain([last]);
        for by in tables {
            if !enough(path, by, 0) || !enough(path, by, 1) {
                return Some(format!("flows {path:?} that were settled by {by:?}: {counts:?}"));
            }
        }
        if !path.forwarded() && !enough(path, By::Failsafe, 1) {
            return Some(format!("flows {path:?} that failsafe ports let pass: {counts:?}"));
        }
    }
    None
}

/// What a state lets through.
fn all_allowed(state: &NodeState, path: PacketPath, flows: &[Flow]) -> BTreeSet<usize> {
    (0..).zip(flows).filter(|(_, flow)| allowed(state, path, flow).0).map(|(index, _)| index).collect()
}

/// Checks every transaction of a change that does not fit in one, with packets.
#[test]
fn between_transactions_only_flows_of_either_state_pass() {
    let node = Arc::new(Node::new());
    let small = |guard_table| Config { guard_table, transaction_bytes: 51_000, ..Config::default() };
    let open = |guard| node.namespace.run(|| Stateful::new(Dataplane::open(small(guard)).unwrap())).unwrap();
    let current = RefCell::new((open(true), NodeState::default(), 0u32));
    let counts = Arc::new(Mutex::new((0, 0)));
    let test = |(mut state, flows): (NodeState, Vec<(PacketPath, Vec<Flow>)>)| {
        // Members that no packet of this test has make each set too large for one transaction.
        for (number, (kind, members)) in (0u32..).zip(state.sets.values_mut()) {
            let strangers =
                (0..800).map(|n| IpAddr::from((0xf000_0000 + number * 1000 + n * 2).to_be_bytes()));
            let strangers = strangers.filter(|_| *kind == SetKind::Nets);
            members.make_mut().extend(strangers.map(|address| Member::Net(address.into())));
        }
        let (dataplane, old, case) = &mut *current.borrow_mut();
        *case += 1;
        // A change, with the same settings or others; a restart; and a restart that must recreate the whole table.
        let before = match *case % 6 {
            step @ (0 | 1) => {
                *dataplane = open(step == 0);
                NodeState::default()
            }
            2..=4 => {
                state.settings = old.settings.clone();
                old.clone()
            }
            _ => old.clone(),
        };
        let either = |(path, flows): (PacketPath, Vec<Flow>)| {
            let either = &all_allowed(old, path, &flows) | &all_allowed(&state, path, &flows);
            (path, flows, either)
        };
        let expected: Vec<_> = flows.into_iter().map(either).collect();
        let wrong = Arc::new(Mutex::new(Vec::new()));
        let (watched, recorded, counted) = (node.clone(), wrong.clone(), counts.clone());
        let look = move || {
            counted.lock().unwrap().0 += 1;
            for (path, flows, either) in &expected {
                let passed = watched.passed(flows, *path);
                counted.lock().unwrap().1 += passed.len();
                let more = passed.difference(either).map(|index| format!("{path:?} {:?}", flows[*index]));
                recorded.lock().unwrap().extend(more);
            }
        };
        let deltas = crate::common::deltas(&before, &state);
        let apply =
            || tracing::subscriber::with_default(AfterEachTransaction(look), || dataplane.apply(&deltas));
        let report = node.namespace.run(apply).unwrap();
        prop_assert!(is_expected(&report), "{:?}", report);
        let wrong = wrong.lock().unwrap().clone();
        prop_assert!(
            wrong.is_empty(),
            "case {}: {:#?}\nbefore: {}\nafter: {}",
            case,
            wrong,
            shown(old),
            shown(&state)
        );
        *old = state;
        Ok(())
    };
    let lacking = || {
        let (transactions, passed) = *counts.lock().unwrap();
        let enough = transactions > 100 && passed > 1000;
        (!enough).then(|| format!("{transactions} transactions, {passed} flows"))
    };
    if let Err(error) =
        Random::cases(100).prove(&(crate::dataplane::random_hosts::state(), flows(12)), test, lacking)
    {
        panic!("{error}");
    }
}

/// Splits a change into transactions at every possible position. Neither state lets the flow pass.
#[test]
fn at_any_interruption_only_flows_of_either_state_pass() {
    let node = Arc::new(Node::new());
    let config = Config { transaction_bytes: 43_000, ..Config::default() };
    let dataplane = node.namespace.run(|| Stateful::new(Dataplane::open(config).unwrap())).unwrap();
    let current = RefCell::new((dataplane, NodeState::default()));
    let flow = Flow {
        source: "10.1.0.1".parse().unwrap(),
        destination: "10.99.0.2".parse().unwrap(),
        protocol: Protocol::UDP,
        source_port: 5,
        destination_port: 5,
        icmp: None,
    };
    let opened = Arc::new(Mutex::new((0, 0)));
    let go = |state: NodeState| {
        assert!(!judge(&state, PacketPath::OutsideToNode, &flow).0, "{}", shown(&state));
        let (dataplane, old) = &mut *current.borrow_mut();
        let deltas = crate::common::deltas(old, &state);
        let first = old.host_endpoints.is_empty();
        let (watched, recorded) = (node.clone(), opened.clone());
        let look = move || {
            let passed = watched.passed(&[flow], PacketPath::OutsideToNode).len();
            let mut recorded = recorded.lock().unwrap();
            recorded.0 += 1;
            recorded.1 += if first { 0 } else { passed };
        };
        let apply =
            || tracing::subscriber::with_default(AfterEachTransaction(look), || dataplane.apply(&deltas));
        assert!(is_expected(&node.namespace.run(apply).unwrap()));
        *old = state;
    };
    let set = SetId::new("s:from");
    let from_set = |action| {
        let source = EntityMatch { sets: vec![set.clone()], ..EntityMatch::default() };
        Rule { source, ..Rule::all(action) }
    };
    let policies = [
        ("allow", vec![Rule::all(Action::Allow)]),
        ("deny", vec![Rule::all(Action::Deny)]),
        ("allow-set", vec![from_set(Action::Allow)]),
        ("deny-set", vec![from_set(Action::Deny)]),
    ];
    let table = |policy: &str| {
        let policies = vec![crate::common::cluster::policy_id(policy)];
        let tier = TierProgram { name: "default".into(), policies, end: EndOfTier::Pass };
        EndpointProgram { ingress: vec![tier], ..EndpointProgram::default() }
    };
    let empty = HostEndpointProgram::default;
    let before_dnat = || HostEndpointProgram { pre_dnat: table("deny"), normal: table("allow"), ..empty() };
    let normally = || HostEndpointProgram { normal: table("deny"), ..empty() };
    let untracked =
        |policy, normal| HostEndpointProgram { untracked: table(policy), normal: table(normal), ..empty() };
    type Hosts = Vec<(&'static str, HostEndpointProgram)>;
    // Host endpoints by interface, and whether the flow's source is in the set.
    let pairs: [[(Hosts, bool); 2]; 3] = [
        [(vec![("*", before_dnat())], false), (vec![("*", before_dnat()), (UPLINK, normally())], false)],
        [(vec![(UPLINK, normally())], false), (vec![(UPLINK, untracked("deny", "allow"))], false)],
        [
            (vec![(UPLINK, untracked("allow-set", "deny"))], false),
            (vec![(UPLINK, untracked("deny-set", "deny"))], true),
        ],
    ];
    let number = Cell::new(0);
    // Returns the number of transactions.
    let go_to = |(hosts, member): &(Hosts, bool), size: u32| {
        number.set(number.get() + 1);
        let mut state = NodeState::default();
        for (name, ingress) in &policies {
            let rules = PolicyRules { ingress: ingress.clone(), egress: vec![] };
            state.policies.insert(crate::common::cluster::policy_id(name), Arc::new(rules));
        }
        let members = member.then_some(Member::Net(flow.source.into()));
        state.sets.insert(set.clone(), (SetKind::Nets, members.into_iter().collect()));
        // The same number of others is added and removed each time.
        let stranger = |n: u32| IpAddr::from((0xf000_0000 + (number.get() % 2) * 100_000 + n).to_be_bytes());
        let strangers = (0..size).map(|n| Member::Net(stranger(n).into()));
        state.sets.insert(SetId::new("s:strangers"), (SetKind::Nets, strangers.collect()));
        for (interface, program) in hosts {
            let host = crate::dataplane::random_hosts::host(Some(interface), &[], program.clone());
            state.host_endpoints.insert(format!("host {interface}"), Arc::new(host));
        }
        let before = opened.lock().unwrap().0;
        go(state);
        let (transactions, opened) = *opened.lock().unwrap();
        assert!(opened == 0, "{size} strangers, {hosts:#?}");
        transactions - before
    };
    for pair in &pairs {
        let there_and_back = |size| pair.iter().map(|state| go_to(state, size)).max().unwrap();
        there_and_back(400);
        let staged: Vec<_> = (400..1240).step_by(40).filter(|size| there_and_back(*size) > 1).collect();
        // The first change that does not fit in one transaction is split in its last steps, so more positions are
        // tried there.
        let first = *staged.first().unwrap();
        for size in (first - 40..first + 40).step_by(2) {
            there_and_back(size);
        }
    }
}
