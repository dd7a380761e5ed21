//! The choice among routes, rule by rule, and in any order.

use std::net::Ipv4Addr;

use proptest::collection::vec;
use proptest::prelude::*;
use testkit::random::Random;
use tortie_bgp::codec::{AsPath, Attributes, Origin};
use tortie_bgp::rib::{Contender, Neighbour, Step, decide, decide_noting};

use crate::core::network::address;

fn attributes() -> Attributes {
    Attributes { as_path: AsPath::sequence([1, 2]), ..Attributes::new(address(9)) }
}

fn neighbour(node: u8) -> Neighbour {
    Neighbour { internal: true, identifier: Ipv4Addr::new(1, 1, 1, node), address: address(node.into()) }
}

const STEPS: [Step; 10] = [
    Step::LocalPreference,
    Step::OwnRoute,
    Step::PathLength,
    Step::Origin,
    Step::ExitDiscriminator,
    Step::External,
    Step::Cost,
    Step::Identifier,
    Step::ClusterList,
    Step::Address,
];

/// Each rule decides if everything before it is equal, against all later rules together.
#[test]
fn each_rule_decides_before_the_later_ones() {
    struct Side {
        attributes: Attributes,
        peer: Option<Neighbour>,
        cost: u32,
    }
    // The better and the worse value of each rule, in the order of the rules.
    type Change = fn(&mut Side);
    let rules: [(&str, Change, Change); 10] = [
        ("LOCAL_PREF", |s| s.attributes.local_pref = Some(101), |s| s.attributes.local_pref = None),
        ("own route", |s| s.peer = None, |_| {}),
        ("AS_PATH", |s| s.attributes.as_path = AsPath::sequence([1]), |_| {}),
        ("ORIGIN", |s| s.attributes.origin = Origin::Igp, |s| s.attributes.origin = Origin::Incomplete),
        ("MULTI_EXIT_DISC", |s| s.attributes.med = None, |s| s.attributes.med = Some(1)),
        ("external", |s| s.peer = s.peer.map(|p| Neighbour { internal: false, ..p }), |_| {}),
        ("cost", |s| s.cost = 1, |s| s.cost = 2),
        (
            "identifier",
            |s| s.attributes.originator_id = Some(Ipv4Addr::new(1, 0, 0, 0)),
            |s| s.attributes.originator_id = Some(Ipv4Addr::new(2, 0, 0, 0)),
        ),
        ("CLUSTER_LIST", |_| {}, |s| s.attributes.cluster_list = vec![Ipv4Addr::LOCALHOST]),
        (
            "address",
            |s| s.peer = s.peer.map(|p| Neighbour { address: address(1), ..p }),
            |s| s.peer = s.peer.map(|p| Neighbour { address: address(2), ..p }),
        ),
    ];
    for (number, (name, better, worse)) in rules.iter().enumerate() {
        let side = || Side { attributes: attributes(), peer: Some(neighbour(5)), cost: 0 };
        let (mut winner, mut loser) = (side(), side());
        better(&mut winner);
        worse(&mut loser);
        for (_, better, worse) in &rules[number + 1..] {
            better(&mut loser);
            worse(&mut winner);
        }
        fn contender(side: &Side) -> Contender<'_> {
            Contender { attributes: &side.attributes, peer: side.peer, cost: side.cost }
        }
        for (routes, expected) in
            [([contender(&winner), contender(&loser)], 0), ([contender(&loser), contender(&winner)], 1)]
        {
            let mut lost = Vec::new();
            let chosen = decide_noting(&routes, |index, step| lost.push((index, step)));
            assert_eq!((chosen[0], &lost[..]), (expected, &[(1 - expected, STEPS[number])][..]), "{name}");
            assert_eq!(decide(&routes), chosen);
        }
    }
}

#[test]
fn exits_are_compared_within_one_neighbouring_system() {
    let route = |system: u32, med: u32| Attributes {
        as_path: AsPath::sequence([system, 9]),
        med: Some(med),
        ..Attributes::new(address(9))
    };
    // The third is the worse exit of system 1, and loses even though it has the lowest identifier. The second has the
    // lowest of all exits, but of another system, and loses by its identifier.
    let (a, b, c) = (route(1, 10), route(2, 5), route(1, 20));
    let contenders = [
        Contender { attributes: &a, peer: Some(neighbour(2)), cost: 0 },
        Contender { attributes: &b, peer: Some(neighbour(3)), cost: 0 },
        Contender { attributes: &c, peer: Some(neighbour(1)), cost: 0 },
    ];
    assert_eq!(decide(&contenders), [0, 1]);
}

#[test]
fn equally_good_routes_are_all_chosen() {
    let (a, b) = (attributes(), Attributes { originator_id: Some(Ipv4Addr::BROADCAST), ..attributes() });
    let worse = Attributes { med: Some(1), ..attributes() };
    let contenders = [
        Contender { attributes: &worse, peer: Some(neighbour(1)), cost: 0 },
        Contender { attributes: &b, peer: Some(neighbour(2)), cost: 0 },
        Contender { attributes: &a, peer: Some(neighbour(3)), cost: 0 },
    ];
    assert_eq!(decide(&contenders), [2, 1]);
    assert_eq!(decide(&[]), Vec::<usize>::new());
}

#[test]
fn the_choice_does_not_depend_on_the_order() {
    let route = (90..110_u32, 0..3_u32, 0..3_u32, 0..3_u32, any::<bool>(), 0..2_u32, 0..4_u8);
    let test = |routes: Vec<(u32, u32, u32, u32, bool, u32, u8)>| {
        let routes: Vec<(Attributes, Neighbour, u32)> = routes
            .iter()
            .enumerate()
            .map(|(number, (preference, system, length, med, internal, cost, originator))| {
                let mut as_path = AsPath::sequence([1 + system]);
                (0..*length).for_each(|_| as_path.prepend(1 + system));
                let attributes = Attributes {
                    as_path,
                    local_pref: Some(preference / 10),
                    med: Some(*med),
                    originator_id: (*originator > 0).then(|| Ipv4Addr::new(1, 0, 0, *originator)),
                    ..Attributes::new(address(9))
                };
                (attributes, Neighbour { internal: *internal, ..neighbour(number as u8) }, *cost)
            })
            .collect();
        let contenders: Vec<Contender<'_>> = routes
            .iter()
            .map(|(attributes, peer, cost)| Contender { attributes, peer: Some(*peer), cost: *cost })
            .collect();
        let forwards = decide(&contenders);
        let reversed: Vec<Contender<'_>> = contenders.iter().rev().copied().collect();
        let backwards: Vec<usize> =
            decide(&reversed).into_iter().map(|index| contenders.len() - 1 - index).collect();
        prop_assert_eq!(forwards, backwards);
        Ok(())
    };
    Random::cases(2000).shrinking(1000).run(&vec(route, 1..8), test).unwrap();
}
