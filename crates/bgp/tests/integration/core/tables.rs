//! The routing tables, by single inputs.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use tortie_bgp::codec::{
    Announcement, AsPath, Attributes, Community, Context, Families, Family, Message, Segment, SegmentKind,
    Update,
};
use tortie_bgp::filter::{Action, Conditions, MatchOperator, Policy, PrefixMatch, Rule};
use tortie_bgp::rib::{
    NextHopMode, NotAdvertised, NotUsable, OwnAddresses, OwnRoute, PeerId, PeerRules, Rib, RouteOutcome,
    Source, Step, TooManyPrefixes,
};

use crate::core::network::address;

pub(crate) const CONTEXT: Context =
    Context { four_octet: true, internal: true, extended_next_hop: false, families: Families::BOTH };
/// Internal, internal, external.
pub(crate) const PEERS: [(PeerId, u32); 3] = [(PeerId(1), 64512), (PeerId(2), 64512), (PeerId(3), 65000)];

pub(crate) fn rules(id: PeerId, peer_as: u32) -> PeerRules {
    PeerRules {
        cluster_id: Ipv4Addr::new(9, 9, 9, 9),
        ..PeerRules::new(address(id.0 as usize), 64512, peer_as)
    }
}

pub(crate) fn rib() -> Rib {
    let mut rib = Rib::new(Ipv4Addr::new(5, 5, 5, 5));
    for (id, peer_as) in PEERS {
        rib.set_peer(id, rules(id, peer_as));
        up(&mut rib, id);
    }
    rib
}

pub(crate) fn up(rib: &mut Rib, id: PeerId) {
    rib.up(id, CONTEXT, Ipv4Addr::new(1, 1, 1, id.0 as u8), address(0));
    drop(messages(rib, id));
}

pub(crate) fn prefix(text: &str) -> IpNet {
    text.parse().unwrap()
}

pub(crate) fn route(id: PeerId) -> Attributes {
    Attributes { as_path: AsPath::sequence([65000]), ..Attributes::new(address(id.0 as usize)) }
}

pub(crate) fn announce(rib: &mut Rib, id: PeerId, text: &str, attributes: Attributes) {
    let announced = vec![Announcement { attributes, prefixes: vec![prefix(text)] }];
    rib.update(id, Update { announced, ..Update::default() }).unwrap();
    rib.recalculate();
}

/// What a peer is told now.
pub(crate) fn messages(rib: &mut Rib, id: PeerId) -> Vec<Message> {
    rib.recalculate();
    let mut all = Vec::new();
    while !rib.is_idle(id) {
        let messages = rib.messages(id);
        all.extend(messages.iter().map(|message| Message::decode(message, &CONTEXT).unwrap()));
    }
    all
}

/// The prefixes that a peer is told, and those that are withdrawn.
pub(crate) fn told(rib: &mut Rib, id: PeerId) -> (Vec<(IpNet, Attributes)>, Vec<IpNet>) {
    let (mut announced, mut withdrawn) = (Vec::new(), Vec::new());
    for message in messages(rib, id) {
        let Message::Update(update) = message else { continue };
        withdrawn.extend(update.withdrawn);
        for announcement in update.announced {
            announced.extend(announcement.prefixes.into_iter().map(|p| (p, announcement.attributes.clone())));
        }
    }
    (announced, withdrawn)
}

pub(crate) fn best(rib: &Rib, text: &str) -> Option<Source> {
    let chosen = rib.routes().find(|(known, _)| **known == prefix(text))?.1;
    chosen.first().map(|chosen| chosen.source)
}

#[test]
fn routes_go_where_the_standards_let_them_go() {
    let [internal, other, external] = PEERS.map(|(id, _)| id);
    let with = |community| Attributes { communities: vec![community], ..route(internal) };
    // From, attributes, and whether each of the peers is told.
    let cases = [
        ("internal", internal, route(internal), [false, false, true]),
        (
            "external",
            external,
            Attributes { as_path: AsPath::sequence([65000]), ..route(external) },
            [true, true, false],
        ),
        (
            "no export",
            external,
            Attributes { next_hop: address(3).into(), ..with(Community::NO_EXPORT) },
            [true, true, false],
        ),
        ("internal, no export", internal, with(Community::NO_EXPORT), [false, false, false]),
        (
            "internal, no export of the confederation",
            internal,
            with(Community::NO_EXPORT_SUBCONFED),
            [false, false, false],
        ),
        (
            "no advertise",
            external,
            Attributes { next_hop: address(3).into(), ..with(Community::NO_ADVERTISE) },
            [false, false, false],
        ),
    ];
    for (name, from, attributes, expected) in cases {
        let mut rib = rib();
        announce(&mut rib, from, "10.1.0.0/16", attributes);
        let seen = PEERS.map(|(id, _)| !told(&mut rib, id).0.is_empty());
        assert_eq!(seen, expected, "{name}");
    }
    // A reflector tells clients everything, and others what clients told.
    for (client, from, to, expected) in [
        (internal, internal, other, true),
        (other, internal, other, true),
        (external, internal, other, false),
    ] {
        let mut rib = rib();
        let (_, peer_as) = PEERS[client.0 as usize - 1];
        rib.set_peer(client, PeerRules { client: true, ..rules(client, peer_as) });
        announce(&mut rib, from, "10.1.0.0/16", route(from));
        let (announced, _) = told(&mut rib, to);
        assert_eq!(!announced.is_empty(), expected, "{client:?}");
        for (_, attributes) in announced {
            assert_eq!(attributes.originator_id, Some(Ipv4Addr::new(1, 1, 1, 1)));
            assert_eq!(attributes.cluster_list, [Ipv4Addr::new(9, 9, 9, 9)]);
            assert_eq!(attributes.next_hop.address, address(1));
        }
    }
}

/// What others are told depends on whether the sender is a client, and on its identifier.
#[test]
fn a_change_of_the_sender_reaches_those_who_are_told() {
    let [internal, other, _] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    announce(&mut rib, internal, "10.1.0.0/16", route(internal));
    assert!(told(&mut rib, other).0.is_empty());
    rib.set_peer(internal, PeerRules { client: true, ..rules(internal, 64512) });
    let (announced, _) = told(&mut rib, other);
    assert_eq!(announced[0].1.originator_id, Some(Ipv4Addr::new(1, 1, 1, 1)));
    rib.down(internal, Families::BOTH);
    rib.up(internal, CONTEXT, Ipv4Addr::new(7, 7, 7, 7), address(0));
    let (announced, _) = told(&mut rib, other);
    assert_eq!(announced[0].1.originator_id, Some(Ipv4Addr::new(7, 7, 7, 7)));
    rib.set_peer(internal, rules(internal, 64512));
    assert_eq!(told(&mut rib, other).1, [prefix("10.1.0.0/16")]);
}

/// An internal peer is in the same confederation, if there is one. Nobody outside may see its segments (RFC 5065 5.3).
#[test]
fn segments_of_a_confederation_go_to_internal_peers_only() {
    let [internal, other, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    rib.set_peer(other, PeerRules { client: true, ..rules(other, 64512) });
    let inside = Segment { kind: SegmentKind::ConfederationSequence, numbers: vec![65001] };
    let as_path = AsPath([vec![inside], AsPath::sequence([65000]).0].concat());
    announce(&mut rib, internal, "10.1.0.0/16", Attributes { as_path: as_path.clone(), ..route(internal) });
    assert_eq!(told(&mut rib, other).0[0].1.as_path, as_path);
    assert_eq!(told(&mut rib, external).0[0].1.as_path, AsPath::sequence([64512, 65000]));
}

#[test]
fn attributes_change_at_the_border() {
    let [internal, other, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    let (transitive, link_bandwidth) = ([0, 2, 0, 1, 0, 0, 0, 1], [0x40, 4, 0, 1, 0, 0, 0, 1]);
    let attributes = Attributes {
        med: Some(5),
        local_pref: Some(300),
        extended_communities: vec![transitive, link_bandwidth],
        ..route(internal)
    };
    announce(&mut rib, internal, "10.1.0.0/16", attributes);
    let own = Attributes { med: Some(6), ..Attributes::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) };
    rib.set_own(prefix("10.2.0.0/16"), Some(OwnRoute { attributes: Arc::new(own), interface: None }));
    let (announced, _) = told(&mut rib, external);
    let [(_, passed), (_, own)] = announced.as_slice() else { panic!("{announced:?}") };
    assert_eq!(passed.as_path, AsPath::sequence([64512, 65000]));
    assert_eq!(passed.extended_communities, [transitive]);
    assert_eq!((passed.med, passed.local_pref, passed.next_hop.address), (None, None, address(0)));
    assert_eq!((own.as_path.clone(), own.med), (AsPath::sequence([64512]), Some(6)));
    let (announced, _) = told(&mut rib, other);
    let [(_, own)] = announced.as_slice() else { panic!("{announced:?}") };
    assert_eq!((own.as_path.length(), own.local_pref, own.next_hop.address), (0, Some(100), address(0)));
    // The other modes.
    for (mode, expected) in [(NextHopMode::Keep, address(1)), (NextHopMode::Own, address(0))] {
        rib.set_peer(external, PeerRules { next_hop: mode, ..rules(external, 65000) });
        let _ = told(&mut rib, external);
        assert_eq!(rib.advertised(external, &prefix("10.1.0.0/16")).unwrap().next_hop.address, expected);
        assert_eq!(rib.advertised(external, &prefix("10.2.0.0/16")).unwrap().next_hop.address, address(0));
    }
}

/// RFC 4271 5.1.3: a peer on a link may know no other address of the node than that on the link.
#[test]
fn the_own_next_hop_is_the_local_address_of_the_session() {
    let [internal, _, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let own_addresses = OwnAddresses { ipv4: "10.1.10.1".parse().ok(), ipv6: "fd00::1".parse().ok() };
    for id in [internal, external] {
        rib.set_peer(id, PeerRules { own_addresses, ..rules(id, PEERS[id.0 as usize - 1].1) });
        rib.up(id, CONTEXT, Ipv4Addr::new(1, 1, 1, id.0 as u8), ip("10.10.1.2"));
    }
    for text in ["10.2.0.0/16", "fd02::/64"] {
        rib.set_own(prefix(text), Some(OwnRoute::here()));
    }
    let (announced, _) = told(&mut rib, external);
    let next_hops: Vec<IpAddr> = announced.iter().map(|(_, told)| told.next_hop.address).collect();
    assert_eq!(next_hops, [ip("10.10.1.2"), ip("fd00::1")]);
    // Both are addresses of this node.
    for own in ["10.10.1.2", "10.1.10.1", "fd00::1"] {
        announce(
            &mut rib,
            internal,
            "10.3.0.0/16",
            Attributes { next_hop: ip(own).into(), ..route(internal) },
        );
        assert_eq!(best(&rib, "10.3.0.0/16"), None, "{own}");
    }
}

#[test]
fn loops_and_impossible_next_hops_are_not_used() {
    let [internal, _, _] = PEERS.map(|(id, _)| id);
    let path = |numbers: &[u32]| Attributes {
        as_path: AsPath::sequence(numbers.iter().copied()),
        ..route(internal)
    };
    let hop =
        |address: &str| Attributes { next_hop: address.parse::<IpAddr>().unwrap().into(), ..route(internal) };
    let cases = [
        ("a proper route", route(internal), true),
        ("the own number", path(&[65000, 64512]), false),
        (
            "the own identifier",
            Attributes { originator_id: Some([5, 5, 5, 5].into()), ..route(internal) },
            false,
        ),
        ("the own cluster", Attributes { cluster_list: vec![[9, 9, 9, 9].into()], ..route(internal) }, false),
        ("the own address", hop("10.0.0.1"), false),
        ("no address", hop("0.0.0.0"), false),
        ("multicast", hop("224.0.0.5"), false),
        ("loopback", hop("127.0.0.1"), false),
        ("broadcast", hop("255.255.255.255"), false),
        ("an address of some link", hop("fe80::1"), false),
        ("another IPv6 address", hop("fd00::1"), true),
    ];
    for (name, attributes, used) in cases {
        let mut rib = rib();
        announce(&mut rib, internal, "10.1.0.0/16", attributes);
        assert_eq!(best(&rib, "10.1.0.0/16").is_some(), used, "{name}");
    }
    let mut rib = rib();
    rib.set_peer(internal, PeerRules { allowed_own_as: 1, ..rules(internal, 64512) });
    announce(&mut rib, internal, "10.1.0.0/16", path(&[64512]));
    announce(&mut rib, internal, "10.2.0.0/16", path(&[64512, 64512]));
    announce(&mut rib, internal, "224.0.0.0/8", route(internal));
    assert!(best(&rib, "10.1.0.0/16").is_some());
    assert_eq!((best(&rib, "10.2.0.0/16"), best(&rib, "224.0.0.0/8")), (None, None));
}

#[test]
fn a_next_hop_without_a_way_is_not_used() {
    let [a, b, _] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    announce(&mut rib, a, "10.1.0.0/16", route(a));
    announce(&mut rib, b, "10.1.0.0/16", route(b));
    assert_eq!(best(&rib, "10.1.0.0/16"), Some(Source::Peer(a)));
    rib.set_costs([(address(1), Some(10))]);
    rib.recalculate();
    assert_eq!(best(&rib, "10.1.0.0/16"), Some(Source::Peer(b)));
    rib.set_costs([(address(2), None)]);
    rib.recalculate();
    assert_eq!(best(&rib, "10.1.0.0/16"), Some(Source::Peer(a)));
    rib.set_costs([(address(1), None)]);
    assert_eq!(rib.recalculate()[0].routes, []);
}

/// A peer may announce ever new next hops without a way.
#[test]
fn costs_of_next_hops_that_no_route_has_are_forgotten() {
    let [a, b, _] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    announce(&mut rib, a, "10.1.0.0/16", route(a));
    announce(&mut rib, b, "10.1.0.0/16", route(b));
    for next_hop in [address(1), address(2), address(7)] {
        rib.set_costs([(next_hop, None)]);
    }
    assert_eq!(rib.forget_unused_costs(), [address(7)]);
    assert_eq!(rib.forget_unused_costs(), [] as [IpAddr; 0]);
    rib.update(b, Update { withdrawn: vec![prefix("10.1.0.0/16")], ..Update::default() }).unwrap();
    assert_eq!(rib.forget_unused_costs(), [address(2)]);
    // Without a cost, the next announcement counts until the system was asked.
    announce(&mut rib, b, "10.1.0.0/16", route(b));
    assert_eq!(best(&rib, "10.1.0.0/16"), Some(Source::Peer(b)));
}

/// RFC 4271 9.1.2: a route is no candidate while nobody knows a way to its next hop.
#[test]
fn an_unknown_next_hop_is_asked_for_and_then_used() {
    let [a, b, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    rib.require_known_next_hops();
    let better = |id| Attributes { local_pref: Some(200), ..route(id) };
    announce(&mut rib, a, "10.1.0.0/16", route(a));
    assert_eq!((best(&rib, "10.1.0.0/16"), told(&mut rib, external).0.len()), (None, 0));
    assert_eq!(rib.take_unknown_next_hops(), [address(1)]);
    rib.set_costs([(address(1), Some(0))]);
    assert_eq!(told(&mut rib, external).0.len(), 1);
    // A better route must not take the place of one that works.
    for text in ["10.1.0.0/16", "10.2.0.0/16", "10.1.0.0/16"] {
        announce(&mut rib, b, text, better(b));
    }
    assert_eq!(rib.take_unknown_next_hops(), [address(2)], "each is asked for once");
    assert_eq!(
        (best(&rib, "10.1.0.0/16"), told(&mut rib, external)),
        (Some(Source::Peer(a)), (vec![], vec![]))
    );
    assert!(rib.awaits_costs());
    rib.set_costs([(address(2), None)]);
    assert!(!rib.awaits_costs());
    assert_eq!((rib.recalculate(), told(&mut rib, external)), (vec![], (vec![], vec![])));
    rib.set_costs([(address(2), Some(0))]);
    rib.recalculate();
    assert_eq!(best(&rib, "10.1.0.0/16"), Some(Source::Peer(b)));
    // Those of routes that are not used anyway are of no interest, until they may be.
    let hidden = Attributes { next_hop: address(8).into(), ..route(a) };
    let closed = Policy { rules: Vec::new(), accepts_others: false };
    rib.set_peer(a, PeerRules { import: closed, ..rules(a, 64512) });
    announce(&mut rib, a, "10.1.0.0/16", hidden);
    assert_eq!(rib.take_unknown_next_hops(), [] as [IpAddr; 0]);
    rib.set_peer(a, rules(a, 64512));
    assert_eq!(rib.take_unknown_next_hops(), [address(8)]);
    announce(&mut rib, a, "10.1.0.0/16", route(a));
    // When no route has it any more, it is unknown again.
    rib.down(b, Families::default());
    assert_eq!(rib.forget_unused_costs(), [address(2)]);
    announce(&mut rib, b, "10.1.0.0/16", better(b));
    assert_eq!(
        (rib.take_unknown_next_hops(), best(&rib, "10.1.0.0/16")),
        (vec![address(2)], Some(Source::Peer(a)))
    );
}

#[test]
fn new_rules_apply_to_what_peers_sent_and_were_told() {
    let [internal, _, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    announce(&mut rib, internal, "10.1.0.0/16", route(internal));
    announce(&mut rib, internal, "10.2.0.0/16", route(internal));
    assert_eq!(told(&mut rib, external).0.len(), 2);
    let one = PrefixMatch { cidr: prefix("10.1.0.0/16"), operator: MatchOperator::In, lengths: None };
    let conditions = Conditions { prefix: Some(one), ..Conditions::default() };
    let reject = Policy {
        rules: vec![Rule {
            about: "the filter".into(),
            conditions,
            action: Action::Reject,
            operations: Vec::new(),
        }],
        accepts_others: true,
    };
    rib.set_peer(external, PeerRules { export: reject.clone(), ..rules(external, 65000) });
    assert_eq!(told(&mut rib, external), (vec![], vec![prefix("10.1.0.0/16")]));
    rib.set_peer(external, rules(external, 65000));
    assert_eq!(told(&mut rib, external).0.len(), 1);
    rib.set_peer(internal, PeerRules { import: reject, ..rules(internal, 64512) });
    rib.recalculate();
    assert_eq!(best(&rib, "10.1.0.0/16"), None);
    assert_eq!(told(&mut rib, external).1, [prefix("10.1.0.0/16")]);
    // The route was kept: no refresh is necessary.
    rib.set_peer(internal, rules(internal, 64512));
    rib.recalculate();
    assert_eq!(best(&rib, "10.1.0.0/16"), Some(Source::Peer(internal)));
}

/// Every way in which a route can fail, beside the one that is chosen.
#[test]
fn an_explanation_names_what_became_of_each_route_and_what_peers_are_told() {
    let [internal, other, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    let text = "10.1.0.0/16";
    let why = |rib: &Rib| rib.why(&prefix(text)).unwrap();
    let outcome = |rib: &Rib, id| {
        let candidates = why(rib).candidates;
        candidates.into_iter().find(|route| route.source == Source::Peer(id)).unwrap().outcome
    };
    assert_eq!(rib.why(&prefix(text)), None);
    announce(&mut rib, internal, text, route(internal));
    assert_eq!(outcome(&rib, internal), RouteOutcome::Best(None), "there is no rival");
    announce(&mut rib, other, text, route(other));
    assert_eq!(outcome(&rib, internal), RouteOutcome::Best(Some(Step::Identifier)));
    assert_eq!(outcome(&rib, other), RouteOutcome::AsGood(Step::Identifier));
    type Change = fn(&mut Attributes);
    let changes: [(Change, RouteOutcome); 6] = [
        (|it| it.local_pref = Some(50), RouteOutcome::Worse(Step::LocalPreference)),
        (|it| it.as_path = AsPath::sequence([1, 2, 3]), RouteOutcome::Worse(Step::PathLength)),
        (
            |it| it.as_path = AsPath::sequence([64512]),
            RouteOutcome::NotUsable(NotUsable::OwnAutonomousSystem),
        ),
        (|it| it.next_hop = address(0).into(), RouteOutcome::NotUsable(NotUsable::OwnNextHop)),
        (
            |it| it.cluster_list = vec![Ipv4Addr::new(9, 9, 9, 9)],
            RouteOutcome::NotUsable(NotUsable::OwnCluster),
        ),
        (
            |it| it.originator_id = Some(Ipv4Addr::new(5, 5, 5, 5)),
            RouteOutcome::NotUsable(NotUsable::OwnOriginator),
        ),
    ];
    for (change, expected) in changes {
        let mut attributes = route(other);
        change(&mut attributes);
        announce(&mut rib, other, text, attributes.clone());
        assert_eq!(outcome(&rib, other), expected, "{attributes:?}");
    }
    announce(&mut rib, other, text, route(other));
    rib.set_costs([(address(other.0 as usize), None)]);
    rib.recalculate();
    assert_eq!(outcome(&rib, other), RouteOutcome::NextHopUnreachable);
    let reject = |about: &str| {
        let rule = Rule {
            about: about.into(),
            conditions: Conditions::default(),
            action: Action::Reject,
            operations: Vec::new(),
        };
        Policy { rules: vec![rule], accepts_others: true }
    };
    rib.set_peer(other, PeerRules { import: reject("a filter"), ..rules(other, 64512) });
    let closed = Policy { rules: Vec::new(), accepts_others: false };
    rib.set_peer(external, PeerRules { export: closed, ..rules(external, 65000) });
    rib.recalculate();
    assert_eq!(outcome(&rib, other), RouteOutcome::Rejected(Some("a filter".into())));
    let told = |rib: &Rib| why(rib).told.into_iter().map(|(_, told)| told.err()).collect::<Vec<_>>();
    let expected =
        [NotAdvertised::Sender, NotAdvertised::NotReflected, NotAdvertised::Rejected(None)].map(Some);
    assert_eq!(told(&rib), expected);
    let kept = Attributes { communities: vec![Community::NO_EXPORT], ..route(internal) };
    announce(&mut rib, internal, text, kept);
    rib.down(other, Families::default());
    let expected =
        [NotAdvertised::Sender, NotAdvertised::NoSession, NotAdvertised::Community(Community::NO_EXPORT)]
            .map(Some);
    assert_eq!(told(&rib), expected);
    // The own route wins, and everybody with a session is told.
    rib.set_own(prefix(text), Some(OwnRoute::here()));
    rib.set_peer(external, rules(external, 65000));
    rib.recalculate();
    assert_eq!(why(&rib).candidates[0].outcome, RouteOutcome::Best(Some(Step::OwnRoute)));
    assert_eq!(told(&rib), [None, Some(NotAdvertised::NoSession), None]);
}

#[test]
fn a_peer_may_send_only_so_many() {
    let [internal, _, _] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    rib.set_peer(internal, PeerRules { max_prefixes: Some(2), ..rules(internal, 64512) });
    announce(&mut rib, internal, "10.1.0.0/16", route(internal));
    announce(&mut rib, internal, "10.2.0.0/16", route(internal));
    // Those that are replaced, and those of the other family, do not count.
    announce(&mut rib, internal, "10.2.0.0/16", Attributes { med: Some(1), ..route(internal) });
    announce(&mut rib, internal, "fd00::/16", Attributes::new("fd00::9".parse::<IpAddr>().unwrap()));
    let announced = vec![Announcement { attributes: route(internal), prefixes: vec![prefix("10.3.0.0/16")] }];
    let result = rib.update(internal, Update { announced, ..Update::default() });
    assert_eq!(result, Err(TooManyPrefixes { family: Family::Ipv4, limit: 2 }));
    rib.recalculate();
    assert_eq!((best(&rib, "10.3.0.0/16"), rib.counts(internal).0), (None, 3));
    let update =
        Update { withdrawn: vec![prefix("10.1.0.0/16"), prefix("10.9.0.0/16")], ..Update::default() };
    rib.update(internal, update).unwrap();
    announce(&mut rib, internal, "10.3.0.0/16", route(internal));
    assert_eq!(rib.counts(internal).0, 3);
    rib.remove_peer(internal);
    rib.recalculate();
    assert_eq!(rib.routes().count(), 0);
}

#[test]
fn attributes_that_fit_into_no_message_withdraw_the_route() {
    let [_, _, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    let own = |communities: u32| {
        let communities = (0..communities).map(Community).collect();
        let attributes = Attributes { communities, ..Attributes::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) };
        Some(OwnRoute { attributes: Arc::new(attributes), interface: None })
    };
    rib.set_own(prefix("10.1.0.0/16"), own(10));
    assert_eq!(told(&mut rib, external).0.len(), 1);
    rib.set_own(prefix("10.1.0.0/16"), own(2000));
    assert_eq!(told(&mut rib, external), (vec![], vec![prefix("10.1.0.0/16")]));
    rib.set_own(prefix("10.1.0.0/16"), own(900));
    assert_eq!(told(&mut rib, external).0.len(), 1);
}
