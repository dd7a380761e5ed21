//! Random networks of speakers come to the tables that are computed from scratch, whatever happened before.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::IpNet;
use proptest::prelude::*;
use testkit::random::Random;
use tortie_bgp::fsm::State;
use tortie_bgp::rib::{CandidateRoute, PeerId, RouteOutcome, Source, Why};

use crate::core::network::{Network, Numbers, Plan};
use crate::core::oracle;

fn prefix(number: usize) -> IpNet {
    let text =
        if number.is_multiple_of(3) { format!("fd00:{number}::/32") } else { format!("10.{number}.0.0/16") };
    text.parse().unwrap()
}

const PREFIXES: usize = 12;

/// Some autonomous systems, each with a full mesh or with one or two reflectors, and connections between them.
fn plans(numbers: &mut Numbers) -> Vec<Plan> {
    let count = 2 + numbers.below(7);
    let systems = 1 + numbers.below(3);
    let mut plans: Vec<Plan> = (0..count)
        .map(|node| Plan {
            as_number: 65000 + (node % systems) as u32,
            // In another order than the addresses.
            identifier: Ipv4Addr::new(1, 1, (node * 37 % 11) as u8, node as u8),
            cluster: None,
            peers: BTreeMap::new(),
            own: BTreeSet::new(),
            hold_time: 9 + 3 * numbers.below(4) as u16,
            graceful: numbers.chance(60),
            passive: BTreeSet::new(),
        })
        .collect();
    for system in 0..systems {
        let members: Vec<usize> = (0..count).filter(|node| node % systems == system).collect();
        let reflectors = if members.len() > 2 { numbers.below(3) } else { 0 };
        let (reflecting, clients) = members.split_at(reflectors.min(members.len()));
        for (index, node) in reflecting.iter().enumerate() {
            // The same cluster, or one each.
            let cluster = if numbers.chance(50) { 0 } else { index };
            plans[*node].cluster = Some(Ipv4Addr::new(9, 9, system as u8, cluster as u8));
            clients.iter().for_each(|client| connect(&mut plans, *node, *client, true));
        }
        let meshed = if reflecting.is_empty() { clients } else { reflecting };
        for (index, a) in meshed.iter().enumerate() {
            meshed[index + 1..].iter().for_each(|b| connect(&mut plans, *a, *b, false));
        }
    }
    for a in 0..count {
        for b in a + 1..count {
            if plans[a].as_number != plans[b].as_number && numbers.chance(40) {
                connect(&mut plans, a, b, false);
            }
        }
    }
    for a in 0..count {
        for b in plans[a].peers.keys().copied().filter(|b| *b > a).collect::<Vec<_>>() {
            // Half of the pairs connect in both directions at once.
            match numbers.below(4) {
                0 => drop(plans[a].passive.insert(b)),
                1 => drop(plans[b].passive.insert(a)),
                _ => {}
            }
        }
        for number in 0..PREFIXES {
            if numbers.chance(15) {
                plans[a].own.insert(prefix(number));
            }
        }
    }
    plans
}

fn connect(plans: &mut [Plan], a: usize, b: usize, is_client: bool) {
    plans[a].peers.insert(b, is_client);
    plans[b].peers.insert(a, false);
}

/// Something happens.
fn disturb(network: &mut Network, numbers: &mut Numbers) {
    let count = network.plans.len();
    let a = numbers.below(count);
    let peers: Vec<usize> = network.plans[a].peers.keys().copied().collect();
    match (numbers.below(10), peers.is_empty()) {
        (0 | 1, false) => network.cut(a, peers[numbers.below(peers.len())]),
        (2, false) => network.block(a, peers[numbers.below(peers.len())], true),
        (3, false) => network.block(a, peers[numbers.below(peers.len())], false),
        // A partition: one side cannot reach the other.
        (4, false) => {
            let side: BTreeSet<usize> = (0..count).filter(|_| numbers.chance(50)).collect();
            for x in &side {
                (0..count).filter(|y| !side.contains(y)).for_each(|y| network.block(*x, y, true));
            }
        }
        (5, _) => network.kill(a),
        _ => {
            let prefix = prefix(numbers.below(PREFIXES));
            let present = !network.plans[a].own.contains(&prefix);
            network.set_own(a, prefix, present);
        }
    }
}

/// Whether the tables are those of the oracle, and nothing is left over.
fn compare(network: &Network) -> Result<usize, TestCaseError> {
    let expected = oracle::tables(&network.plans);
    let mut routes = 0;
    for (node, expected) in expected.iter().enumerate() {
        for peer in network.plans[node].peers.keys() {
            prop_assert_eq!(network.state(node, *peer), State::Established, "{} to {}", node, peer);
            let session = network.routers[node].session(PeerId(*peer as u32)).unwrap();
            prop_assert!(session.stale().is_empty(), "{} keeps stale routes of {}", node, peer);
        }
        prop_assert!(!network.routers[node].is_deferring());
        let best = network.best(node);
        let actual: BTreeMap<_, _> = best
            .iter()
            .map(|(prefix, (from, attributes))| {
                (*prefix, (*from, attributes.as_path.numbers().collect::<Vec<_>>()))
            })
            .collect();
        let wanted: BTreeMap<_, _> =
            expected.iter().map(|(prefix, route)| (*prefix, (route.from, route.path.clone()))).collect();
        prop_assert_eq!(&actual, &wanted, "node {} of {:?}", node, network.plans);
        // What the kernel was told adds up to the same.
        let told: BTreeMap<_, _> =
            network.forwarding[node].iter().map(|(prefix, (_, path))| (*prefix, path.clone())).collect();
        prop_assert_eq!(told, wanted.into_iter().map(|(prefix, (_, path))| (prefix, path)).collect());
        for prefix in best.keys() {
            let why = network.routers[node].rib().why(prefix).unwrap();
            prop_assert!(why.candidates.iter().all(|route| !route.stale), "{} at {} is stale", prefix, node);
            explained(network, node, prefix, &why)?;
        }
        routes += actual.len();
    }
    Ok(routes)
}

/// Whether the explanation of a prefix is what the tables have.
fn explained(network: &Network, node: usize, prefix: &IpNet, why: &Why) -> Result<(), TestCaseError> {
    let rib = network.routers[node].rib();
    let chosen = rib.routes().find(|(known, _)| *known == prefix).unwrap().1;
    let is_chosen =
        |route: &&CandidateRoute| matches!(route.outcome, RouteOutcome::Best(_) | RouteOutcome::AsGood(_));
    let named: Vec<Source> = why.candidates.iter().filter(is_chosen).map(|route| route.source).collect();
    prop_assert_eq!(named, chosen.iter().map(|route| route.source).collect::<Vec<_>>());
    for (peer, told) in &why.told {
        let told = told.as_ref().ok();
        prop_assert_eq!(told, rib.advertised(*peer, prefix), "{} of {} to {:?}", prefix, node, peer);
    }
    Ok(())
}

#[test]
fn random_networks_converge_to_the_tables_computed_from_scratch() {
    let seen = RefCell::new((0, 0, 0));
    let test = |(seed, disturbances): (u64, usize)| {
        let mut numbers = Numbers::new(seed);
        let plans = plans(&mut numbers);
        let mut network = Network::new(plans, numbers.clone());
        for _ in 0..disturbances {
            network.run(Duration::from_millis(numbers.next() % 20_000));
            disturb(&mut network, &mut numbers);
        }
        network.heal();
        // Longer than hold time, restart time and the longest pause between attempts.
        network.run(Duration::from_secs(900));
        let routes = compare(&network)?;
        let mut seen = seen.borrow_mut();
        seen.0 += routes;
        seen.1 += network.restarts;
        seen.2 += network.updates;
        Ok(())
    };
    let lacking = || {
        let (routes, restarts, updates) = *seen.borrow();
        (routes < 500 || restarts < 20 || updates < 1000)
            .then(|| format!("{routes} routes, {restarts} restarts, {updates} UPDATE messages"))
    };
    Random::cases(60).shrinking(200).prove(&(any::<u64>(), 0..25_usize), test, lacking).unwrap();
}

/// Nothing is sent twice, and nothing is sent about what did not change.
#[test]
fn only_what_changed_is_told() {
    let mut plans: Vec<Plan> = plans(&mut Numbers::new(7)).into_iter().take(1).collect();
    plans[0].peers.clear();
    plans[0].cluster = None;
    plans[0].as_number = 65000;
    let template = plans[0].clone();
    plans = (0..5)
        .map(|node| Plan {
            identifier: Ipv4Addr::new(1, 1, 1, node + 1),
            own: BTreeSet::new(),
            passive: BTreeSet::new(),
            ..template.clone()
        })
        .collect();
    for a in 0..5 {
        (a + 1..5).for_each(|b| connect(&mut plans, a, b, false));
        plans[a].own = (0..1000)
            .map(|number| format!("10.{a}.{}.{}/32", number / 256, number % 256).parse().unwrap())
            .collect();
    }
    let mut network = Network::new(plans, Numbers::new(11));
    network.run(Duration::from_secs(60));
    compare(&network).unwrap();
    // 20 directions: the routes of a speaker share attributes, so a thousand fit into two messages; and the ends.
    assert!(network.updates <= 20 * (2 + 2), "{} messages", network.updates);
    let before = network.updates;
    network.set_own(0, "192.0.2.0/24".parse().unwrap(), true);
    network.run(Duration::from_secs(60));
    assert_eq!(network.updates - before, 4);
    network.set_own(0, "192.0.2.0/24".parse().unwrap(), true);
    network.run(Duration::from_secs(600));
    assert_eq!(network.updates - before, 4);
}
