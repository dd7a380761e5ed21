//! Texts for operators and of operators.

use tortie_bgp::codec::notification::{cease, code};
use tortie_bgp::codec::{
    AnyCommunity, AsPath, Community, LargeCommunity, Notification, Segment, SegmentKind,
};

#[test]
fn the_text_of_a_shutdown_arrives_also_in_a_hard_reset() {
    let plain = Notification::shutdown(cease::ADMINISTRATIVE_SHUTDOWN, "until noon");
    assert_eq!(plain.communication().as_deref(), Some("until noon"));
    assert_eq!(plain.clone().hard().communication().as_deref(), Some("until noon"));
    assert_eq!(plain.to_string(), "administrative shutdown (6/2): \"until noon\"");
    assert_eq!(plain.hard().to_string(), "hard reset (6/9): administrative shutdown (6/2): \"until noon\"");
    // RFC 9003: at most 255 bytes, and no character is cut in two.
    let long = Notification::shutdown(cease::ADMINISTRATIVE_RESET, &"ä".repeat(200));
    assert_eq!(long.communication(), Some("ä".repeat(127)));
    for (subcode, data) in [
        (cease::ADMINISTRATIVE_SHUTDOWN, vec![]),
        (cease::ADMINISTRATIVE_SHUTDOWN, vec![0]),
        // Longer than the message, not UTF-8, and of another subcode.
        (cease::ADMINISTRATIVE_SHUTDOWN, vec![5, b'a']),
        (cease::ADMINISTRATIVE_SHUTDOWN, vec![1, 0xff]),
        (cease::COLLISION, vec![1, b'a']),
    ] {
        assert_eq!(Notification::with(code::CEASE, subcode, data.clone()).communication(), None, "{data:?}");
    }
    // Whoever reads a terminal must not be at the peer's mercy.
    let shown = Notification::with(code::CEASE, cease::ADMINISTRATIVE_SHUTDOWN, b"\x04a\x1b[b".to_vec());
    assert_eq!(shown.communication().as_deref(), Some("a[b"));
}

#[test]
fn communities_are_written_as_operators_write_them() {
    for (text, expected) in [
        ("65000:120", Some(AnyCommunity::Standard(Community(65000 << 16 | 120)))),
        ("4200000000:1:4294967295", Some(AnyCommunity::Large(LargeCommunity(4_200_000_000, 1, u32::MAX)))),
        ("65536:1", None),
        ("1:65536", None),
        ("1", None),
        ("1:2:3:4", None),
        ("1:-2", None),
        ("", None),
    ] {
        let read = text.parse::<AnyCommunity>().ok();
        assert_eq!(read, expected, "{text}");
        match read {
            Some(AnyCommunity::Standard(community)) => assert_eq!(community.to_string(), text),
            Some(AnyCommunity::Large(community)) => assert_eq!(community.to_string(), text),
            None => {}
        }
    }
}

#[test]
fn the_length_of_a_path_counts_as_the_standard_says() {
    let path = |parts: &[(SegmentKind, &[u32])]| {
        let segment =
            |(kind, numbers): &(SegmentKind, &[u32])| Segment { kind: *kind, numbers: numbers.to_vec() };
        AsPath(parts.iter().map(segment).collect())
    };
    use SegmentKind::{ConfederationSequence, ConfederationSet, Sequence, Set};
    for (path, length, neighbour, shown) in [
        (path(&[]), 0, None, ""),
        (path(&[(Sequence, &[1, 2])]), 2, Some(1), "1 2"),
        (path(&[(Sequence, &[1, 2]), (Set, &[3, 4, 5])]), 3, Some(1), "1 2 {3,4,5}"),
        (path(&[(Set, &[3, 4])]), 1, None, "{3,4}"),
        (
            path(&[(ConfederationSequence, &[7]), (ConfederationSet, &[8]), (Sequence, &[1])]),
            1,
            Some(1),
            "(7) [8] 1",
        ),
    ] {
        assert_eq!((path.length(), path.neighbour()), (length, neighbour), "{path}");
        assert_eq!(path.to_string(), shown);
    }
    let mut long = AsPath::sequence(vec![9; 255]);
    long.prepend(1);
    assert_eq!((long.0.len(), long.length()), (2, 256));
}
