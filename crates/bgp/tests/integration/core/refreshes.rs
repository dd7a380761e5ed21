//! Routes that are sent again, in either direction, and what one call sends.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;
use tortie_bgp::codec::{
    Announcement, Attributes, Community, Families, Family, Message, RefreshKind, Update,
};
use tortie_bgp::rib::{OwnRoute, Source};

use crate::core::tables::{CONTEXT, PEERS, announce, best, messages, prefix, rib, route, told, up};

#[test]
fn what_is_sent_again_replaces_stale_routes() {
    let [internal, _, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    announce(&mut rib, internal, "10.1.0.0/16", route(internal));
    announce(&mut rib, internal, "10.2.0.0/16", route(internal));
    rib.make_stale(internal, Family::Ipv4);
    announce(&mut rib, internal, "10.1.0.0/16", route(internal));
    assert!(best(&rib, "10.2.0.0/16").is_some(), "a stale route is used");
    rib.forget_stale(internal, Families::BOTH);
    rib.recalculate();
    assert_eq!((best(&rib, "10.1.0.0/16"), best(&rib, "10.2.0.0/16")), (Some(Source::Peer(internal)), None));
    // A peer that is lost twice before it confirms its routes loses them.
    rib.down(internal, Families::BOTH);
    rib.recalculate();
    assert!(best(&rib, "10.1.0.0/16").is_some());
    up(&mut rib, internal);
    rib.down(internal, Families::BOTH);
    rib.recalculate();
    assert_eq!(best(&rib, "10.1.0.0/16"), None);

    // The other way round: a peer asks, with marks. A route that goes in the meantime is withdrawn.
    rib.set_own(prefix("10.3.0.0/16"), Some(OwnRoute::here()));
    rib.set_own(prefix("10.4.0.0/16"), Some(OwnRoute::here()));
    assert_eq!(told(&mut rib, external).0.len(), 2);
    rib.set_own(prefix("10.4.0.0/16"), None);
    rib.recalculate();
    rib.refresh(external, Family::Ipv4, true);
    let messages = messages(&mut rib, external);
    assert_eq!(marks(&messages), [(0, RefreshKind::Begin), (messages.len() - 1, RefreshKind::End)]);
    let updates: Vec<&Update> =
        messages.iter().filter_map(|m| if let Message::Update(u) = m { Some(u) } else { None }).collect();
    assert_eq!(updates[0].withdrawn, [prefix("10.4.0.0/16")]);
    assert_eq!(updates[1].announced[0].prefixes, [prefix("10.3.0.0/16")]);
}

/// The marks of a refresh, and their positions.
fn marks(messages: &[Message]) -> Vec<(usize, RefreshKind)> {
    let mark = |(index, message): (usize, &Message)| match message {
        Message::RouteRefresh { kind, .. } => Some((index, *kind)),
        _ => None,
    };
    messages.iter().enumerate().filter_map(mark).collect()
}

/// A request costs 23 bytes, and the answer all routes.
#[test]
fn requests_of_a_refresh_that_has_not_begun_are_one_request() {
    let [_, _, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    for number in 0..5000_u32 {
        let prefix = format!("10.{}.{}.0/24", number >> 8, number & 255).parse().unwrap();
        rib.set_own(prefix, Some(OwnRoute::here()));
    }
    let count = |messages: &[Message]| -> usize {
        let of = |message: &Message| match message {
            Message::Update(update) => update.announced.iter().map(|routes| routes.prefixes.len()).sum(),
            _ => 0,
        };
        messages.iter().map(of).sum()
    };
    assert_eq!(count(&messages(&mut rib, external)), 5000);
    (0..1000).for_each(|_| rib.refresh(external, Family::Ipv4, true));
    let first: Vec<_> =
        rib.messages(external).iter().map(|m| Message::decode(m, &CONTEXT).unwrap()).collect();
    assert!((1..5000).contains(&count(&first)), "the answer has begun");
    assert_eq!(marks(&first), [(0, RefreshKind::Begin)]);
    // What was sent may be gone by a change of the peer's policy, so all routes come once more, but not a thousand times.
    (0..1000).for_each(|_| rib.refresh(external, Family::Ipv4, true));
    let rest = messages(&mut rib, external);
    assert_eq!(count(&first) + count(&rest), 2 * 5000);
    let kinds: Vec<RefreshKind> = marks(&rest).into_iter().map(|(_, kind)| kind).collect();
    assert_eq!(kinds, [RefreshKind::End, RefreshKind::Begin, RefreshKind::End]);
    assert!(rib.is_idle(external));
}

/// A message of 23 bytes must not cost a walk through the whole table.
#[test]
fn ends_of_routes_and_beginnings_of_a_refresh_cost_little() {
    let [internal, other, _] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    let prefixes = (0..20_000_u32)
        .map(|number| IpNet::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 | number)), 32).unwrap());
    let announced = vec![Announcement { attributes: route(internal), prefixes: prefixes.collect() }];
    rib.update(internal, Update { announced, ..Update::default() }).unwrap();
    rib.recalculate();
    let begin = std::time::Instant::now();
    let end = || Update { end_of_rib: Some(Family::Ipv4), ..Update::default() };
    for _ in 0..200_000 {
        rib.update(other, end()).unwrap();
        rib.update(internal, end()).unwrap();
        rib.make_stale(other, Family::Ipv4);
    }
    // Walks would take minutes.
    assert!(begin.elapsed().as_secs() < 5, "{:?}", begin.elapsed());
    assert_eq!(rib.routes().count(), 20_000);
    (0..200_000).for_each(|_| rib.make_stale(internal, Family::Ipv4));
    assert!(begin.elapsed().as_secs() < 5, "{:?}", begin.elapsed());
    // A route that comes again is no longer stale, and one that is withdrawn is not counted twice.
    announce(&mut rib, internal, "10.0.0.1/32", route(internal));
    let withdrawn = vec![prefix("10.0.0.2/32"), prefix("10.0.0.1/32")];
    rib.update(internal, Update { withdrawn, ..Update::default() }).unwrap();
    announce(&mut rib, internal, "10.0.0.1/32", route(internal));
    assert_eq!(rib.counts(internal).0, 19_999);
    rib.update(internal, end()).unwrap();
    rib.recalculate();
    assert_eq!((rib.counts(internal).0, rib.routes().count()), (1, 1));
}

/// Otherwise, a peer that does not read costs much memory.
#[test]
fn one_call_gives_few_messages_of_heavy_routes() {
    let [_, _, external] = PEERS.map(|(id, _)| id);
    let mut rib = rib();
    for number in 0..1000_u32 {
        let communities = (0..900).map(|other| Community(number << 16 | other)).collect();
        let attributes = Attributes { communities, ..Attributes::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) };
        let prefix = IpNet::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 | number << 8)), 24).unwrap();
        rib.set_own(prefix, Some(OwnRoute { attributes: Arc::new(attributes), interface: None }));
    }
    rib.recalculate();
    let mut seen = 0;
    while !rib.is_idle(external) {
        let messages = rib.messages(external);
        let bytes: usize = messages.iter().map(Vec::len).sum();
        assert!(bytes < 300_000, "{bytes}");
        seen += messages.len();
    }
    assert_eq!(seen, 1000);
}
