//! RFC 7606: what becomes of each malformed attribute; and errors in the other messages.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use tortie_bgp::codec::notification::{code, header, open, update};
use tortie_bgp::codec::{
    Context, Families, Family, Message, Notification, Treatment, Update, encode_open, length,
};

use crate::codec::strategies::context;

fn message(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut message = vec![0xff; 16];
    message.extend((content.len() as u16 + 19).to_be_bytes());
    message.push(kind);
    message.extend(content);
    message
}

fn attribute(flags: u8, kind: u8, value: &[u8]) -> Vec<u8> {
    let mut attribute = vec![flags, kind, value.len() as u8];
    attribute.extend(value);
    attribute
}

/// An UPDATE with these attributes, and with 10.1.0.0/16 if `with_prefix`.
fn update(attributes: &[Vec<u8>], with_prefix: bool) -> Vec<u8> {
    let list = attributes.concat();
    let mut content = vec![0, 0];
    content.extend((list.len() as u16).to_be_bytes());
    content.extend(list);
    content.extend(if with_prefix { &[16, 10, 1][..] } else { &[] });
    message(2, &content)
}

fn origin() -> Vec<u8> {
    attribute(0x40, 1, &[0])
}

fn as_path() -> Vec<u8> {
    attribute(0x40, 2, &[2, 1, 0, 0, 0xfd, 0xe8])
}

fn next_hop() -> Vec<u8> {
    attribute(0x40, 3, &[192, 0, 2, 1])
}

/// fd00::/16 by way of fd00::1.
fn reach() -> Vec<u8> {
    let mut value = vec![0, 2, 1, 16, 0xfd, 0];
    value.extend([0; 13]);
    value.extend([1, 0, 16, 0xfd, 0]);
    attribute(0x80, 14, &value)
}

fn prefix() -> IpNet {
    "10.1.0.0/16".parse().unwrap()
}

/// What a message did.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The routes came, whatever became of some attribute.
    Routes(Option<Treatment>),
    Withdrawn,
    Reset(u8),
}

fn outcome(message: &[u8], context: &Context) -> Outcome {
    match Message::decode(message, context) {
        Ok(Message::Update(Update { withdrawn, announced, problems, .. })) => {
            let worst = problems.iter().map(|problem| problem.treatment).max();
            match (withdrawn.is_empty(), announced.is_empty()) {
                (true, false) => Outcome::Routes(worst),
                (false, true) => Outcome::Withdrawn,
                _ => panic!("{withdrawn:?} {announced:?}"),
            }
        }
        Err(Notification { code: code::UPDATE, subcode, .. }) => Outcome::Reset(subcode),
        other => panic!("{other:?}"),
    }
}

/// A name, what was agreed on, flags, type and value of an attribute, and what it does.
type Case = (&'static str, Context, u8, u8, &'static [u8], Outcome);

/// Each attribute, wrong in each way that the standards name: flags, value, and what becomes of the message.
#[test]
fn each_malformed_attribute_is_treated_as_the_table_says() {
    let internal = context(true);
    let external = Context { internal: false, ..internal };
    let two_octet = Context { four_octet: false, ..internal };
    let ignored = || Outcome::Routes(None);
    let discarded = || Outcome::Routes(Some(Treatment::AttributeDiscard));
    let withdrawn = || Outcome::Withdrawn;
    let long_segments = &[2, 255, 0, 0, 0, 1];
    let confederation = &[3, 1, 0, 0, 0xfd, 0xe9, 2, 1, 0, 0, 0, 1];
    let cases: Vec<Case> = vec![
        ("ORIGIN of no byte", internal, 0x40, 1, &[], withdrawn()),
        ("ORIGIN of two bytes", internal, 0x40, 1, &[0, 0], withdrawn()),
        ("ORIGIN of an unknown value", internal, 0x40, 1, &[3], withdrawn()),
        ("ORIGIN with wrong flags", internal, 0xc0, 1, &[0], withdrawn()),
        ("AS_PATH with an unknown type of segment", internal, 0x40, 2, &[9, 1, 0, 0, 0, 1], withdrawn()),
        ("AS_PATH with an empty segment", internal, 0x40, 2, &[2, 0], withdrawn()),
        ("AS_PATH whose segment is too long", internal, 0x40, 2, long_segments, withdrawn()),
        ("AS_PATH with one byte too many", internal, 0x40, 2, &[2, 1, 0, 0, 0, 1, 2], withdrawn()),
        ("AS_PATH of an external peer with a confederation", external, 0x40, 2, confederation, withdrawn()),
        ("AS_PATH of an internal peer with a confederation", internal, 0x40, 2, confederation, ignored()),
        ("AS_PATH with wrong flags", internal, 0x80, 2, &[], withdrawn()),
        ("NEXT_HOP of three bytes", internal, 0x40, 3, &[1, 2, 3], withdrawn()),
        ("NEXT_HOP of five bytes", internal, 0x40, 3, &[1, 2, 3, 4, 5], withdrawn()),
        ("NEXT_HOP with wrong flags", internal, 0x80, 3, &[1, 2, 3, 4], withdrawn()),
        ("MULTI_EXIT_DISC of three bytes", internal, 0x80, 4, &[0, 0, 0], withdrawn()),
        ("MULTI_EXIT_DISC with wrong flags", internal, 0x40, 4, &[0, 0, 0, 1], withdrawn()),
        ("LOCAL_PREF of three bytes", internal, 0x40, 5, &[0, 0, 0], withdrawn()),
        ("LOCAL_PREF with wrong flags", internal, 0x80, 5, &[0, 0, 0, 1], withdrawn()),
        ("LOCAL_PREF of an external peer", external, 0x40, 5, &[0, 0, 0, 9], ignored()),
        ("malformed LOCAL_PREF of an external peer", external, 0x40, 5, &[0], ignored()),
        ("ATOMIC_AGGREGATE with a byte", internal, 0x40, 6, &[1], discarded()),
        ("AGGREGATOR of six bytes", internal, 0xc0, 7, &[0, 1, 1, 2, 3, 4], discarded()),
        ("AGGREGATOR of eight bytes with two-byte numbers", two_octet, 0xc0, 7, &[0; 8], discarded()),
        ("COMMUNITIES of no byte", internal, 0xc0, 8, &[], withdrawn()),
        ("COMMUNITIES of six bytes", internal, 0xc0, 8, &[0; 6], withdrawn()),
        ("COMMUNITIES with wrong flags", internal, 0x80, 8, &[0; 4], withdrawn()),
        ("COMMUNITIES with the partial bit", internal, 0xe0, 8, &[0; 4], ignored()),
        ("ORIGINATOR_ID of three bytes", internal, 0x80, 9, &[1, 2, 3], withdrawn()),
        ("ORIGINATOR_ID of an external peer", external, 0x80, 9, &[1, 2, 3], ignored()),
        ("CLUSTER_LIST of no byte", internal, 0x80, 10, &[], withdrawn()),
        ("CLUSTER_LIST of five bytes", internal, 0x80, 10, &[0; 5], withdrawn()),
        ("CLUSTER_LIST of an external peer", external, 0x80, 10, &[0; 5], ignored()),
        ("MP_REACH_NLRI of three bytes", internal, 0x80, 14, &[0, 2, 1], Outcome::Reset(9)),
        (
            "MP_REACH_NLRI with a next hop of 5 bytes",
            internal,
            0x80,
            14,
            &[0, 2, 1, 5, 0, 0, 0, 0, 0, 0],
            Outcome::Reset(9),
        ),
        (
            "MP_REACH_NLRI whose next hop is longer than itself",
            internal,
            0x80,
            14,
            &[0, 2, 1, 16, 1, 2],
            Outcome::Reset(9),
        ),
        ("MP_UNREACH_NLRI of two bytes", internal, 0x80, 15, &[0, 2], Outcome::Reset(9)),
        (
            "MP_UNREACH_NLRI with a prefix of 129 bits",
            internal,
            0x80,
            15,
            &[0, 2, 1, 129, 1],
            Outcome::Reset(9),
        ),
        ("MP_UNREACH_NLRI with half a prefix", internal, 0x80, 15, &[0, 2, 1, 64, 1], Outcome::Reset(9)),
        ("MP_UNREACH_NLRI of an unknown family", internal, 0x80, 15, &[0, 25, 70, 1, 1, 1], ignored()),
        ("EXTENDED COMMUNITIES of no byte", internal, 0xc0, 16, &[], withdrawn()),
        ("EXTENDED COMMUNITIES of nine bytes", internal, 0xc0, 16, &[0; 9], withdrawn()),
        ("AS4_PATH of an old peer, malformed", two_octet, 0xc0, 17, &[9], discarded()),
        ("AS4_PATH of a new peer", internal, 0xc0, 17, &[9], ignored()),
        ("AS4_AGGREGATOR of an old peer, malformed", two_octet, 0xc0, 18, &[9], discarded()),
        ("AS4_AGGREGATOR of a new peer", internal, 0xc0, 18, &[9], ignored()),
        ("LARGE_COMMUNITY of no byte", internal, 0xc0, 32, &[], withdrawn()),
        ("LARGE_COMMUNITY of 13 bytes", internal, 0xc0, 32, &[0; 13], withdrawn()),
        (
            "an unknown well-known attribute",
            internal,
            0x40,
            99,
            &[1],
            Outcome::Reset(update::UNRECOGNIZED_WELL_KNOWN),
        ),
        ("an unknown optional transitive attribute", internal, 0xc0, 99, &[1], ignored()),
        ("an unknown optional attribute", internal, 0x80, 99, &[1], ignored()),
    ];
    for (name, context, flags, kind, value, expected) in cases {
        let path = if context.four_octet { as_path() } else { attribute(0x40, 2, &[2, 1, 0xfd, 0xe8]) };
        let mut attributes = vec![origin(), path, next_hop()];
        attributes.retain(|attribute| attribute[1] != kind);
        attributes.push(attribute(flags, kind, value));
        assert_eq!(outcome(&update(&attributes, true), &context), expected, "{name}");
    }
}

#[test]
fn the_first_of_two_attributes_counts() {
    let attributes = [origin(), as_path(), next_hop(), attribute(0x40, 3, &[192, 0, 2, 2])];
    let Ok(Message::Update(read)) = Message::decode(&update(&attributes, true), &context(true)) else {
        panic!()
    };
    assert_eq!(read.announced[0].attributes.next_hop.address, IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
    assert_eq!(read.problems[0].treatment, Treatment::AttributeDiscard);
    // Prefixes twice cannot be told apart from an error in the lengths.
    let twice = update(&[origin(), as_path(), reach(), reach()], false);
    assert_eq!(outcome(&twice, &context(true)), Outcome::Reset(update::MALFORMED_ATTRIBUTES));
}

#[test]
fn routes_without_a_mandatory_attribute_count_as_withdrawn() {
    let all = [origin(), as_path(), next_hop()];
    assert_eq!(outcome(&update(&all, true), &context(true)), Outcome::Routes(None));
    for missing in [1, 2, 3] {
        let rest: Vec<_> = all.iter().filter(|attribute| attribute[1] != missing).cloned().collect();
        let message = update(&rest, true);
        assert_eq!(outcome(&message, &context(true)), Outcome::Withdrawn, "{missing}");
        let Ok(Message::Update(read)) = Message::decode(&message, &context(true)) else { panic!() };
        assert_eq!(read.problems.iter().map(|problem| problem.kind).collect::<Vec<_>>(), [missing]);
        assert_eq!(read.withdrawn, [prefix()]);
    }
    // IPv6 needs no NEXT_HOP, and no attribute is needed to withdraw.
    assert_eq!(
        outcome(&update(&[reach(), origin(), as_path()], false), &context(true)),
        Outcome::Routes(None)
    );
    assert_eq!(outcome(&message(2, &[0, 3, 16, 10, 1, 0, 0]), &context(true)), Outcome::Withdrawn);
}

#[test]
fn a_list_that_is_cut_short_withdraws_what_is_known() {
    let short = vec![0x40, 4, 200, 1];
    let known = update(&[origin(), as_path(), next_hop(), short.clone()], true);
    assert_eq!(outcome(&known, &context(true)), Outcome::Withdrawn);
    let known = update(&[reach(), origin(), as_path(), short.clone()], false);
    assert_eq!(outcome(&known, &context(true)), Outcome::Withdrawn);
    // Nothing says which routes are concerned.
    let unknown = update(&[origin(), as_path(), short], false);
    assert_eq!(outcome(&unknown, &context(true)), Outcome::Reset(update::MALFORMED_ATTRIBUTES));
    for half in [vec![0x40], vec![0x40, 1], vec![0x50, 1, 0]] {
        let message = update(&[origin(), as_path(), next_hop(), half], true);
        assert_eq!(outcome(&message, &context(true)), Outcome::Withdrawn);
    }
}

/// RFC 7606 5.2: withdrawn routes do not say which announced ones an error has hidden.
#[test]
fn withdrawn_routes_do_not_count_as_announced_ones() {
    let short = vec![0x40, 4, 200, 1];
    let bad_path = attribute(0x40, 2, &[9, 1, 0, 0, 0, 1]);
    let unreach = |flags: u8| attribute(flags, 15, &[0, 2, 1, 16, 0xfd, 1]);
    let with_withdrawn = |attributes: &[Vec<u8>], prefixes: &[u8]| {
        let list = attributes.concat();
        let mut content = vec![0, 3, 16, 10, 2];
        content.extend((list.len() as u16).to_be_bytes());
        content.extend(list);
        content.extend(prefixes);
        message(2, &content)
    };
    let reset = || Outcome::Reset(update::MALFORMED_ATTRIBUTES);
    for (message, expected) in [
        (with_withdrawn(&[origin(), short.clone()], &[]), reset()),
        (with_withdrawn(&[origin(), bad_path.clone()], &[]), reset()),
        (update(&[unreach(0x80), origin(), bad_path.clone()], false), reset()),
        (update(&[unreach(0x80), short.clone()], false), reset()),
        // The routes are there, and with them what is to be withdrawn.
        (with_withdrawn(&[origin(), short], &[16, 10, 1]), Outcome::Withdrawn),
        (update(&[reach(), unreach(0x80), origin(), bad_path], false), Outcome::Withdrawn),
        // Nothing but the withdrawn routes was in the message.
        (update(&[unreach(0xc0)], false), Outcome::Withdrawn),
    ] {
        assert_eq!(outcome(&message, &context(true)), expected, "{message:?}");
    }
}

#[test]
fn prefixes_that_cannot_be_read_end_the_session() {
    let cases: [&[u8]; 6] = [
        // Withdrawn routes: 33 bits, half a prefix, a length beyond the message.
        &[0, 2, 33, 1, 0, 0],
        &[0, 2, 16, 1, 0, 0],
        &[0, 9, 16, 1, 0, 0],
        // Attributes beyond the message.
        &[0, 0, 0, 9],
        // New routes: 33 bits, half a prefix.
        &[0, 0, 0, 0, 33, 1],
        &[0, 0, 0, 0, 16, 1],
    ];
    for content in cases {
        let Outcome::Reset(_) = outcome(&message(2, content), &context(true)) else { panic!("{content:?}") };
    }
}

#[test]
fn routes_of_families_that_were_not_agreed_on_are_ignored() {
    let only_ipv4 = Context { families: Families::from_iter([Family::Ipv4]), ..context(true) };
    let only_ipv6 = Context { families: Families::from_iter([Family::Ipv6]), ..context(true) };
    let both = update(&[reach(), origin(), as_path(), next_hop()], true);
    for (context, expected) in [(only_ipv4, "10.1.0.0/16"), (only_ipv6, "fd00::/16")] {
        let Ok(Message::Update(read)) = Message::decode(&both, &context) else { panic!() };
        let prefixes: Vec<_> =
            read.announced.iter().flat_map(|announcement| &announcement.prefixes).collect();
        assert_eq!(prefixes, [&expected.parse::<IpNet>().unwrap()]);
    }
    // An IPv6 next hop of IPv4 routes is an error unless it was agreed on.
    let mut value = vec![0, 1, 1, 16, 0xfd, 0];
    value.extend([0; 13]);
    value.extend([1, 0, 16, 10, 1]);
    let message = update(&[attribute(0x80, 14, &value), origin(), as_path()], false);
    assert_eq!(outcome(&message, &context(true)), Outcome::Routes(None));
    let without = Context { extended_next_hop: false, ..context(true) };
    assert_eq!(outcome(&message, &without), Outcome::Reset(update::OPTIONAL_ATTRIBUTE));
}

/// Attributes, and the path and the aggregator that they mean.
type OldCase = (Vec<Vec<u8>>, &'static [u32], Option<u32>);

/// RFC 6793 4.2.3.
#[test]
fn numbers_of_four_bytes_come_back_from_peers_that_know_two() {
    let two = Context { four_octet: false, ..context(true) };
    let old_path = |numbers: &[u16]| {
        let mut value = vec![2, numbers.len() as u8];
        numbers.iter().for_each(|number| value.extend(number.to_be_bytes()));
        attribute(0x40, 2, &value)
    };
    let new_path = |numbers: &[u32]| {
        let mut value = vec![2, numbers.len() as u8];
        numbers.iter().for_each(|number| value.extend(number.to_be_bytes()));
        attribute(0xc0, 17, &value)
    };
    let aggregator =
        |number: u16| attribute(0xc0, 7, &[number.to_be_bytes().as_slice(), &[9, 9, 9, 9]].concat());
    let new_aggregator = attribute(0xc0, 18, &[0, 3, 0, 0, 8, 8, 8, 8]);
    let cases: Vec<OldCase> = vec![
        (vec![old_path(&[1, 23456]), new_path(&[70000])], &[1, 70000], None),
        (vec![old_path(&[1, 2, 3]), new_path(&[70000, 3])], &[1, 70000, 3], None),
        // The old path is made of several sequences.
        (
            vec![
                attribute(0x40, 2, &[2, 1, 0, 1, 2, 1, 0, 2, 2, 2, 0, 3, 0x5b, 0xa0]),
                new_path(&[3, 70000]),
            ],
            &[1, 2, 3, 70000],
            None,
        ),
        // Longer than the path: it is ignored.
        (vec![old_path(&[23456]), new_path(&[70000, 3])], &[23456], None),
        (
            vec![old_path(&[23456]), new_path(&[70000]), aggregator(23456), new_aggregator.clone()],
            &[70000],
            Some(196_608),
        ),
        // Somebody aggregated who knew nothing of the new attributes: both are ignored.
        (vec![old_path(&[23456]), new_path(&[70000]), aggregator(5), new_aggregator], &[23456], Some(5)),
    ];
    for (attributes, path, aggregator) in cases {
        let message = update(&[vec![origin(), next_hop()], attributes].concat(), true);
        let Ok(Message::Update(read)) = Message::decode(&message, &two) else { panic!() };
        let attributes = &read.announced[0].attributes;
        assert_eq!(attributes.as_path.numbers().collect::<Vec<_>>(), path);
        assert_eq!(attributes.aggregator.map(|aggregator| aggregator.as_number), aggregator);
    }
}

#[test]
fn wrong_headers_end_the_session() {
    let mut unsynchronized = message(4, &[]);
    unsynchronized[3] = 0;
    for (bytes, expected) in [
        (unsynchronized, Notification::new(code::HEADER, header::NOT_SYNCHRONIZED)),
        (message(9, &[]), Notification::with(code::HEADER, header::BAD_TYPE, [9])),
        (message(4, &[0]), Notification::with(code::HEADER, header::BAD_LENGTH, [0, 20])),
        (message(1, &[0; 9]), Notification::with(code::HEADER, header::BAD_LENGTH, [0, 28])),
        (message(2, &[0; 3]), Notification::with(code::HEADER, header::BAD_LENGTH, [0, 22])),
        (message(3, &[0; 1]), Notification::with(code::HEADER, header::BAD_LENGTH, [0, 20])),
        (message(2, &[0; 4078]), Notification::with(code::HEADER, header::BAD_LENGTH, [0x10, 1])),
    ] {
        assert_eq!(length(&bytes), Err(expected));
    }
    assert_eq!(length(&message(4, &[])[..18]), Ok(None));
    let long = message(5, &[0, 1, 1, 1, 0]);
    let expected = Notification::with(code::ROUTE_REFRESH, 1, long.clone());
    assert_eq!(Message::decode(&long, &context(true)), Err(expected));
}

/// RFC 9072 2: with the extended type, the first length is ignored. RFC 4724 3: the last promise counts.
#[test]
fn extended_parameters_count_whatever_the_first_length_is() {
    let restart = |restart_time: u16| vec![64, 2, (restart_time >> 8) as u8, restart_time as u8];
    let capabilities = [restart(60), restart(90)].concat();
    for length in [255, 1, 12] {
        let mut content = vec![4, 0xfd, 0xe8, 0, 90, 1, 1, 1, 1, length, 255];
        content.extend([0, capabilities.len() as u8 + 3, 2, 0, capabilities.len() as u8]);
        content.extend(&capabilities);
        let Ok(Message::Open(open)) = Message::decode(&message(1, &content), &context(true)) else {
            panic!("{length}")
        };
        assert_eq!((open.capabilities.len(), open.graceful_restart().unwrap().restart_time), (2, 90));
    }
    let unspecific = Notification::new(code::OPEN, 0);
    let nothing = [4, 0xfd, 0xe8, 0, 90, 1, 1, 1, 1, 0, 255, 0, 0];
    assert_eq!(Message::decode(&message(1, &nothing), &context(true)), Err(unspecific));
}

#[test]
fn wrong_opens_end_the_session() {
    let good = tortie_bgp::codec::Open::new(65000, 90, Ipv4Addr::new(1, 1, 1, 1), vec![]);
    let good = encode_open(&good)[19..].to_vec();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut content = good.clone();
        change(&mut content);
        Message::decode(&message(1, &content), &context(true)).unwrap_err()
    };
    let unspecific = Notification::new(code::OPEN, 0);
    assert_eq!(with(&|open| open[0] = 3), Notification::with(code::OPEN, open::UNSUPPORTED_VERSION, [0, 4]));
    // A length beyond the end, a length before it, another parameter than capabilities, half a capability, and one
    // that is too short for its content.
    assert_eq!(with(&|open| open[9] += 1), unspecific);
    assert_eq!(with(&|open| open.push(0)), unspecific);
    assert_eq!(with(&|open| open[10] = 1), Notification::new(code::OPEN, open::UNSUPPORTED_PARAMETER));
    assert_eq!(with(&|open| open[13] = 9), unspecific);
    let short = with(&|open| {
        open.truncate(9);
        open.extend([4, 2, 2, 65, 0]);
    });
    assert_eq!(short, unspecific);
}

/// RFC 6793 4.2.3: a speaker of two-byte numbers adds its own to AS_PATH only. So AS4_PATH has the end of the path, and
/// if it is longer than AS_PATH, somebody has shortened that.
#[test]
fn numbers_that_old_speakers_added_stay_before_as4_path() {
    let numbers = |numbers: &[u32], width: usize| {
        let bytes = numbers.iter().flat_map(|number| number.to_be_bytes()[4 - width..].to_vec());
        [2, numbers.len() as u8].into_iter().chain(bytes).collect::<Vec<u8>>()
    };
    let (old, new) = ([65001, 65002, 23456, 64999], [4_200_000_000, 64999]);
    for (four, expected) in [
        (&new[..], &[65001, 65002, 4_200_000_000, 64999][..]),
        (&[65001, 65002, 4_200_000_000, 64999], &[65001, 65002, 4_200_000_000, 64999]),
        (&[1, 2, 3, 4, 5], &old),
    ] {
        let paths = [attribute(0x40, 2, &numbers(&old, 2)), attribute(0xc0, 17, &numbers(four, 4))];
        let [old_path, as4_path] = paths;
        let message = update(&[origin(), old_path, next_hop(), as4_path], true);
        let Ok(Message::Update(update)) = Message::decode(&message, &context(false)) else {
            panic!("{four:?}")
        };
        assert_eq!(update.problems, []);
        let path = &update.announced[0].attributes.as_path;
        assert_eq!(path.numbers().collect::<Vec<_>>(), expected, "{four:?}");
    }
}
