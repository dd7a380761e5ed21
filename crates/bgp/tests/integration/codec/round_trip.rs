//! What is written is read back.

use std::cell::RefCell;

use ipnet::IpNet;
use proptest::collection::vec;
use proptest::prelude::*;
use testkit::random::{Random, Tally};
use tortie_bgp::codec::{
    self, AsPath, Attributes, Context, Family, Message, Notification, RefreshKind, SegmentKind,
};

use crate::codec::strategies::{attributes, context, family, open, prefix};

/// Whether a peer with two-byte numbers can be told all: AS4_PATH has no confederations.
fn survives_two_octets(attributes: &Attributes) -> bool {
    !attributes.as_path.0.iter().any(|segment| {
        [SegmentKind::ConfederationSequence, SegmentKind::ConfederationSet].contains(&segment.kind)
    })
}

/// Adjacent sequences may come back as one, because AS4_PATH knows no border between what it replaces and the rest.
fn numbers(path: &AsPath) -> Vec<u32> {
    path.numbers().collect()
}

fn announced(
    family: Family,
    attributes: &Attributes,
    prefixes: &[IpNet],
    context: &Context,
) -> Option<usize> {
    let messages = codec::encode_announcement(attributes, family, prefixes, context)?;
    let mut read = Vec::new();
    for message in &messages {
        assert!(message.len() <= 4096);
        assert_eq!(codec::length(message), Ok(Some(message.len())));
        let Ok(Message::Update(update)) = Message::decode(message, context) else {
            panic!("{:?}", Message::decode(message, context));
        };
        assert_eq!((update.withdrawn, update.end_of_rib, update.problems), (vec![], None, vec![]));
        for mut announcement in update.announced {
            if !context.four_octet {
                assert_eq!(numbers(&announcement.attributes.as_path), numbers(&attributes.as_path));
                announcement.attributes.as_path = attributes.as_path.clone();
            }
            assert_eq!(&announcement.attributes, attributes);
            read.extend(announcement.prefixes);
        }
    }
    assert_eq!(read, prefixes);
    Some(messages.len())
}

#[test]
fn announcements_are_read_back() {
    let tally = RefCell::new(Tally::default());
    let case = (family(), any::<bool>()).prop_flat_map(|(family, four_octet)| {
        let many = prop_oneof![4 => vec(prefix(family), 1..20), 1 => vec(prefix(family), 500..1500)];
        (Just(family), Just(four_octet), attributes(family), many)
    });
    let test = |(family, four_octet, attributes, prefixes): (Family, bool, Attributes, Vec<IpNet>)| {
        if !four_octet && !survives_two_octets(&attributes) {
            return Ok(());
        }
        let sent = announced(family, &attributes, &prefixes, &context(four_octet));
        let mut tally = tally.borrow_mut();
        tally.count(format!("{family} {four_octet}"), sent == Some(1));
        Ok(())
    };
    let kinds = || ["IPv4 true", "IPv4 false", "IPv6 true", "IPv6 false"].map(str::to_owned);
    Random::cases(300).shrinking(500).prove(&case, test, || tally.borrow().lacking(kinds(), 10)).unwrap();
}

#[test]
fn withdrawals_are_read_back() {
    let case = family().prop_flat_map(|family| (Just(family), vec(prefix(family), 1..2000)));
    let test = |(family, prefixes): (Family, Vec<IpNet>)| {
        let mut read = Vec::new();
        for message in codec::encode_withdrawal(family, &prefixes) {
            prop_assert!(message.len() <= 4096);
            let Ok(Message::Update(update)) = Message::decode(&message, &context(true)) else { panic!() };
            prop_assert_eq!((update.announced, update.end_of_rib, update.problems), (vec![], None, vec![]));
            read.extend(update.withdrawn);
        }
        prop_assert_eq!(read, prefixes);
        Ok(())
    };
    Random::cases(50).shrinking(500).run(&case, test).unwrap();
}

#[test]
fn the_end_of_the_first_routes_is_read_back() {
    for family in Family::ALL {
        let message = codec::encode_end_of_rib(family);
        let Ok(Message::Update(update)) = Message::decode(&message, &context(true)) else { panic!() };
        assert_eq!(update.end_of_rib, Some(family));
        assert_eq!((update.withdrawn, update.announced), (vec![], vec![]));
    }
}

#[test]
fn opens_are_read_back() {
    let lengths = RefCell::new((0, 0));
    let test = |open: codec::Open| {
        let message = codec::encode_open(&open);
        // RFC 9072: the length of the parameters, and the type of the first one, are 255.
        let is_extended = message.get(28..30) == Some(&[255, 255]);
        let mut lengths = lengths.borrow_mut();
        *(if is_extended { &mut lengths.1 } else { &mut lengths.0 }) += 1;
        prop_assert_eq!(Message::decode(&message, &context(true)), Ok(Message::Open(open)));
        Ok(())
    };
    let lacking = || {
        let (short, extended) = *lengths.borrow();
        (short < 20 || extended < 20).then(|| format!("{short} short, {extended} extended"))
    };
    Random::cases(300).shrinking(500).prove(&open(), test, lacking).unwrap();
}

#[test]
fn the_other_messages_are_read_back() {
    let context = context(true);
    assert_eq!(Message::decode(&codec::encode_keepalive(), &context), Ok(Message::Keepalive));
    for family in Family::ALL {
        for kind in [RefreshKind::Request, RefreshKind::Begin, RefreshKind::End, RefreshKind::Other(9)] {
            let read = Message::decode(&codec::encode_refresh(family, kind), &context);
            let (afi, safi) = (family.afi(), family.safi());
            assert_eq!(read, Ok(Message::RouteRefresh { afi, safi, kind }));
        }
    }
    for notification in [
        Notification::new(4, 0),
        Notification::with(1, 2, [0, 5]),
        Notification::shutdown(2, "maintenance until noon"),
        Notification::shutdown(2, "maintenance").hard(),
        Notification::too_many_prefixes(Family::Ipv6, 1000),
    ] {
        let read = Message::decode(&codec::encode_notification(&notification), &context);
        assert_eq!(read, Ok(Message::Notification(notification)));
    }
    // Data that do not fit are cut.
    let long = codec::encode_notification(&Notification::with(6, 0, vec![1; 5000]));
    assert_eq!(long.len(), 4096);
}
