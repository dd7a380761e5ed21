//! Whatever the order and the batching of updates, the result equals a from-scratch computation. Each delta changes
//! something, and names nothing that does not exist yet.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;
use serde_json::{Value, json};
use testkit::random::Random;
use tortie_api::{Key, Kind};
use tortie_calc::{Calc, NoRoute};
use tortie_dataplane::{NodeState, RouteTarget};
use tortie_policy::program::Member;

use crate::random_objects::{
    block, block_of_pods, claim, endpoint, felix, namespace, node, object, policy_of_nodes, pool,
};
use crate::scratch::{
    NODE, Objects, WithoutRoute, apply_strictly, assert_order, difference, from_scratch_with, shown,
};

#[derive(Debug, Clone)]
enum Step {
    Put(Key, Value),
    /// Deletes the nth existing object.
    Delete(prop::sample::Index),
    Flush,
}

fn steps(object: impl Strategy<Value = (Key, Value)>) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => object.prop_map(|(key, value)| Step::Put(key, value)),
        2 => any::<prop::sample::Index>().prop_map(Step::Delete),
        2 => Just(Step::Flush),
    ];
    prop::collection::vec(step, 0..60)
}

/// Flushes, and compares the deltas with the changes: all of them, nothing else, and in an order that opens nothing.
fn flush(calc: &mut Calc, received: &mut NodeState, objects: &Objects, direct: bool) {
    let (mut expected, without_route) = from_scratch_with(objects, direct);
    if !calc.kinds().contains(&Kind::Service) {
        // Services are included only if they are requested.
        expected.services.clear();
    }
    // A deleted node keeps its own description: nothing is torn down because of a lost object.
    if expected.node.is_none() {
        expected.node.clone_from(&received.node);
    }
    let complete = difference(received, &expected);
    let deltas = calc.flush();
    assert_eq!(shown(&deltas), complete);
    assert_order(&deltas);
    apply_strictly(received, &deltas);
    assert_eq!(&*received, calc.state());
    assert_eq!(*received, expected);
    assert_eq!(unrouted(calc), without_route);
    assert_eq!(calc.flush(), vec![], "a flush without updates says nothing");
}

/// The blocks and borrowed addresses to which no route leads.
fn unrouted(calc: &Calc) -> WithoutRoute {
    let cause = |cause: &NoRoute| match cause {
        NoRoute::NoAddress(_) => "no address",
        NoRoute::NoOwnAddress(_) => "no own address",
        NoRoute::NoTunnelAddress(_) => "no tunnel address",
        NoRoute::TunnelRefused(_) => "a refused tunnel address",
        NoRoute::NotInNetwork => "another network",
        NoRoute::IpipToWindows => "IPIP to Windows",
        NoRoute::IpipDisabled(_) => "no IPIP",
    };
    let mut all = WithoutRoute::new();
    for (node, causes) in calc.without_route() {
        for (no_route, nets) in causes {
            // Both families may have the same one.
            all.entry((node.to_owned(), cause(no_route))).or_default().extend(nets);
        }
    }
    all
}

/// Makes the steps, and compares each flush, and in the end the same objects in another order. `look` gets each state.
fn make(
    steps: Vec<Step>,
    seed: u64,
    (services, direct): (bool, bool),
    mut look: impl FnMut(&NodeState, &WithoutRoute),
) {
    let new = || {
        let calc = if services { Calc::new(NODE).with_services() } else { Calc::new(NODE) };
        if direct { calc.with_direct_routes() } else { calc }
    };
    let mut calc = new();
    let mut objects = Objects::new();
    let mut received = NodeState::default();
    for step in steps {
        match step {
            Step::Put(key, value) => {
                calc.update(&key, Some(&value));
                objects.insert(key, value);
            }
            Step::Delete(index) if !objects.is_empty() => {
                let key = index.get(&objects.keys().cloned().collect::<Vec<_>>()).clone();
                calc.update(&key, None);
                objects.remove(&key);
            }
            Step::Delete(_) => {}
            Step::Flush => {
                flush(&mut calc, &mut received, &objects, direct);
                look(&received, &unrouted(&calc));
            }
        }
    }
    flush(&mut calc, &mut received, &objects, direct);
    look(&received, &unrouted(&calc));

    // The same objects in another order, at once.
    let mut shuffled: Vec<_> = objects.iter().collect();
    shuffled.sort_by_key(|(key, _)| {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (seed, key).hash(&mut hasher);
        hasher.finish()
    });
    let mut calc = new();
    for (key, value) in shuffled {
        calc.update(key, Some(value));
    }
    flush(&mut calc, &mut NodeState::default(), &objects, direct);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_history_gives_the_state_computed_from_scratch(
        steps in steps(object()), seed in any::<u64>(), modes in any::<(bool, bool)>(),
    ) {
        make(steps, seed, modes, |_: &NodeState, _: &WithoutRoute| {});
    }
}

/// The same with endpoints whose kubelet may not have reported their addresses, and everything that can testify for these.
#[test]
fn any_history_of_claims_gives_the_addresses_computed_from_scratch() {
    let random = Random::cases(500);
    let seen: RefCell<BTreeMap<&str, usize>> = RefCell::default();
    let look = |state: &NodeState, _: &WithoutRoute| {
        let mut seen = seen.borrow_mut();
        for endpoint in state.endpoints.values() {
            *seen.entry("local addresses").or_default() += endpoint.addresses.len();
        }
        *seen.entry("members").or_default() +=
            state.sets.values().map(|(_, members)| members.len()).sum::<usize>();
    };
    let test = |(steps, seed): (Vec<Step>, u64)| {
        make(steps, seed, (false, false), look);
        Ok(())
    };
    let lacking = || {
        let seen = seen.borrow();
        let few = seen.values().any(|count| *count < random.count());
        (few || seen.len() < 2).then(|| format!("{seen:?}"))
    };
    // A node that may have an address of a pod.
    let node = (0..3_u8, 1..12_u8).prop_map(|(number, address)| {
        let status = json!({"addresses": [{"type": "InternalIP", "address": format!("10.0.0.{address}")}]});
        let name = format!("n{number}");
        (Key::global(Kind::Node, &name), json!({"metadata": {"name": name}, "status": status}))
    });
    // All pods are peers of a pod of this node.
    let rule = json!({"action": "Allow", "source": {"selector": "all()", "namespaceSelector": "all()"}});
    let policy = json!({"metadata": {"name": "p", "namespace": "ns0"}, "spec": {"ingress": [rule]}});
    let policy = Just((Key::namespaced(Kind::NetworkPolicy, "ns0", "p"), policy));
    let host = (1..6_u8).prop_map(|address| {
        let spec =
            json!({"node": "n1", "interfaceName": "eth0", "expectedIPs": [format!("10.0.0.{address}")]});
        (Key::global(Kind::HostEndpoint, "h"), json!({"metadata": {"name": "h"}, "spec": spec}))
    });
    let object =
        prop_oneof![8 => claim(), 4 => block_of_pods(), 4 => node, 1 => host, 1 => namespace(), 1 => policy];
    random.prove(&(steps(object), any::<u64>()), test, lacking).unwrap_or_else(|error| panic!("{error}"));
}

/// The same with nodes, blocks, pools and settings only, so that each way between nodes occurs often.
#[test]
fn any_history_of_the_network_gives_the_routes_computed_from_scratch() {
    let random = Random::cases(500);
    let seen: RefCell<BTreeMap<(&str, bool), usize>> = RefCell::default();
    let look = |state: &NodeState, without_route: &WithoutRoute| {
        for (_, cause) in without_route.keys() {
            *seen.borrow_mut().entry((cause, false)).or_default() += 1;
        }
        for (net, target) in &state.routes {
            let way = match target {
                RouteTarget::Local => "local",
                RouteTarget::Vxlan { .. } => "VXLAN",
                RouteTarget::Ipip { .. } => "IPIP",
                RouteTarget::Direct { .. } => "direct",
            };
            *seen.borrow_mut().entry((way, net.addr().is_ipv6())).or_default() += 1;
        }
    };
    let test = |(steps, seed, direct): (Vec<Step>, u64, bool)| {
        make(steps, seed, (false, direct), look);
        Ok(())
    };
    let lacking = || {
        let seen = seen.borrow();
        let ways = ["local", "VXLAN", "direct"].into_iter().flat_map(|way| [(way, false), (way, true)]);
        let causes = [
            "no address",
            "another network",
            "no tunnel address",
            "a refused tunnel address",
            "IPIP to Windows",
        ];
        let ways = ways.chain(causes.map(|cause| (cause, false))).chain([("IPIP", false)]);
        let rare: Vec<_> =
            ways.filter(|way| seen.get(way).copied().unwrap_or_default() < random.count() / 4).collect();
        (!rare.is_empty()).then(|| format!("{rare:?} are rare: {seen:?}"))
    };
    let object = prop_oneof![4 => node(), 4 => block(), 3 => pool(), 1 => felix()];
    random.prove(&(steps(object), any::<u64>(), any::<bool>()), test, lacking).unwrap();
}

/// The same with nodes that policies select, so that their labels and addresses change often.
#[test]
fn any_history_of_nodes_gives_the_sets_computed_from_scratch() {
    let random = Random::cases(500);
    let seen: RefCell<BTreeMap<&str, usize>> = RefCell::default();
    let last: RefCell<NodeState> = RefCell::default();
    let look = |state: &NodeState, _: &WithoutRoute| {
        let mut seen = seen.borrow_mut();
        for (id, (_, members)) in &state.sets {
            for member in members.iter() {
                let Member::Net(net) = member else { continue };
                *seen.entry(if net.addr().is_ipv4() { "IPv4" } else { "IPv6" }).or_default() += 1;
            }
            let former = last.borrow().sets.get(id).map(|(_, members)| members.clone());
            if let Some(former) = former {
                *seen.entry("came").or_default() += members.difference(&former).count();
                *seen.entry("went").or_default() += former.difference(members).count();
            }
        }
        last.replace(state.clone());
    };
    let test = |(steps, seed): (Vec<Step>, u64)| {
        last.replace(NodeState::default());
        make(steps, seed, (false, false), look);
        Ok(())
    };
    let lacking = || {
        let seen = seen.borrow();
        let kinds = ["IPv4", "IPv6", "came", "went"].into_iter();
        let rare: Vec<_> =
            kinds.filter(|kind| seen.get(kind).copied().unwrap_or_default() < random.count() / 4).collect();
        (!rare.is_empty()).then(|| format!("{rare:?} are rare: {seen:?}"))
    };
    let object = prop_oneof![6 => node(), 2 => policy_of_nodes(), 2 => endpoint(), 1 => namespace()];
    random.prove(&(steps(object), any::<u64>()), test, lacking).unwrap();
}

/// The oracle says that packets to another node's pods are encapsulated exactly where calc's route leads to a tunnel.
#[test]
fn routes_and_the_oracle_encapsulate_the_same_packets() {
    let random = Random::cases(500);
    let seen: RefCell<BTreeMap<(bool, bool), usize>> = RefCell::default();
    let object = prop_oneof![4 => node(), 4 => block(), 3 => pool()];
    let test = |objects: Vec<(Key, Value)>| {
        let objects: Objects = objects.into_iter().collect();
        let (mut calc, mut snapshot) = (Calc::new(NODE), tortie_oracle::Snapshot::new());
        for (key, value) in &objects {
            calc.update(key, Some(value));
            if key.kind != Kind::IpamBlock {
                snapshot.insert(key.clone(), value.clone(), None);
            }
        }
        calc.flush();
        let oracle = tortie_oracle::Oracle::new(&snapshot);
        let at = |router: IpAddr| {
            let mut nodes = oracle.nodes().filter(|node| node.name != NODE && node.own.contains(&router));
            nodes.next().expect("a node has the address").name.to_owned()
        };
        for (net, target) in &calc.state().routes {
            let (node, encapsulated) = match target {
                RouteTarget::Local => continue,
                RouteTarget::Vxlan { node } => (node.clone(), true),
                RouteTarget::Ipip { router } => (at((*router).into()), true),
                RouteTarget::Direct { router } => (at(*router), false),
            };
            let said = oracle.encapsulates(NODE, &node, net.addr());
            prop_assert_eq!(said, encapsulated, "{} at {}: {:?}", net, node, objects);
            *seen.borrow_mut().entry((encapsulated, net.addr().is_ipv6())).or_default() += 1;
        }
        Ok(())
    };
    let lacking = || {
        let seen = seen.borrow();
        let kinds = [(false, false), (false, true), (true, false), (true, true)];
        let rare =
            kinds.into_iter().find(|kind| seen.get(kind).copied().unwrap_or_default() < random.count() / 20);
        rare.map(|kind| format!("{kind:?} is rare: {seen:?}"))
    };
    random.prove(&prop::collection::vec(object, 5..20), test, lacking).unwrap();
}
