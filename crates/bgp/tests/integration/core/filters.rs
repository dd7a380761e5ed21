//! Filters, as a table.

use tortie_bgp::codec::{AsPath, Attributes, Community, LargeCommunity};
use tortie_bgp::filter::{
    Action, Candidate, Conditions, HIGHEST_PREFERENCE, MatchOperator, Operation, Policy, PrefixMatch, Rule,
    Verdict,
};

use crate::core::network::address;

fn attributes() -> Attributes {
    Attributes {
        as_path: AsPath::sequence([65001, 65002]),
        communities: vec![Community(65001 << 16 | 5)],
        large_communities: vec![LargeCommunity(1, 2, 3)],
        local_pref: Some(HIGHEST_PREFERENCE - 1024),
        ..Attributes::new(address(1))
    }
}

fn prefix(cidr: &str, operator: MatchOperator, lengths: Option<(u8, u8)>) -> Conditions {
    let prefix = PrefixMatch { cidr: cidr.parse().unwrap(), operator, lengths };
    Conditions { prefix: Some(prefix), ..Conditions::default() }
}

fn matches(
    conditions: Conditions,
    cidr: &str,
    from_peer: bool,
    interface: Option<&str>,
    internal_peer: bool,
) -> bool {
    let rule = Rule { about: "".into(), conditions, action: Action::Accept, operations: Vec::new() };
    let policy = Policy { rules: vec![rule], accepts_others: false };
    let (prefix, attributes) = (cidr.parse().unwrap(), attributes());
    let candidate =
        Candidate { prefix: &prefix, attributes: &attributes, from_peer, interface, internal_peer };
    policy.judge(&candidate) == Verdict::Unchanged
}

#[test]
fn prefixes_match_as_calico_says() {
    use MatchOperator::{Equal, In, NotEqual, NotIn};
    let cases = [
        (Equal, None, "10.0.0.0/8", true),
        (Equal, None, "10.1.0.0/16", false),
        (NotEqual, None, "10.0.0.0/8", false),
        (NotEqual, None, "10.1.0.0/16", true),
        (In, None, "10.0.0.0/8", true),
        (In, None, "10.1.0.0/16", true),
        (In, None, "11.0.0.0/16", false),
        (In, None, "0.0.0.0/0", false),
        (In, Some((16, 24)), "10.0.0.0/8", false),
        (In, Some((16, 24)), "10.1.0.0/16", true),
        (In, Some((16, 24)), "10.1.1.0/24", true),
        (In, Some((16, 24)), "10.1.1.0/25", false),
        (NotIn, None, "10.1.0.0/16", false),
        (NotIn, None, "11.0.0.0/16", true),
        (NotIn, Some((16, 24)), "10.1.1.0/25", true),
        (In, None, "fd00::/16", false),
        (NotIn, None, "fd00::/16", true),
    ];
    for (operator, lengths, cidr, expected) in cases {
        let conditions = prefix("10.0.0.0/8", operator, lengths);
        assert_eq!(matches(conditions, cidr, true, None, true), expected, "{operator:?} {lengths:?} {cidr}");
    }
}

#[test]
fn all_conditions_must_hold() {
    let any = Conditions::default;
    let community = |text: &str| Conditions { community: Some(text.parse().unwrap()), ..any() };
    let path = |numbers: &[u32]| Conditions { as_path_prefix: numbers.to_vec(), ..any() };
    let interface = |pattern: &str| Conditions { interface: Some(pattern.to_owned()), ..any() };
    let cases = [
        ("nothing", any(), true),
        ("from a peer", Conditions { only_from_peers: true, ..any() }, true),
        ("internal", Conditions { internal_peer: Some(true), ..any() }, true),
        ("external", Conditions { internal_peer: Some(false), ..any() }, false),
        ("a community", community("65001:5"), true),
        ("another community", community("65001:6"), false),
        ("a large community", community("1:2:3"), true),
        ("another large community", community("1:2:4"), false),
        ("the whole path", path(&[65001, 65002]), true),
        ("its front", path(&[65001]), true),
        ("another front", path(&[65002]), false),
        ("a longer path", path(&[65001, 65002, 65003]), false),
        ("the priority", Conditions { priority: Some(1024), ..any() }, true),
        ("another priority", Conditions { priority: Some(512), ..any() }, false),
        ("the interface", interface("cali12"), true),
        ("a pattern", interface("cali*"), true),
        ("a pattern with two stars", interface("c*i*2"), true),
        ("any interface", interface("*"), true),
        ("another interface", interface("eth*"), false),
        ("a longer interface", interface("cali12*3"), false),
        ("only one of two", Conditions { priority: Some(512), ..community("65001:5") }, false),
    ];
    for (name, conditions, expected) in cases {
        assert_eq!(matches(conditions, "10.0.0.0/8", true, Some("cali12"), true), expected, "{name}");
    }
    let from_peers = Conditions { only_from_peers: true, ..any() };
    assert!(!matches(from_peers, "10.0.0.0/8", false, None, true));
    assert!(!matches(interface("*"), "10.0.0.0/8", true, None, true), "a route of a peer has no interface");
}

#[test]
fn the_first_rule_that_decides_counts_and_changes_add_up() {
    let rule = |conditions, action, operations| Rule { about: "".into(), conditions, action, operations };
    let add = |text: &str| Operation::AddCommunity(text.parse().unwrap());
    let ten = || prefix("10.0.0.0/8", MatchOperator::In, None);
    let policy = Policy {
        rules: vec![
            rule(Conditions { priority: Some(7), ..Conditions::default() }, Action::Reject, vec![]),
            rule(ten(), Action::Continue, vec![Operation::SetPriority(9), add("1:1")]),
            // It sees what the rule before it did.
            rule(
                Conditions { priority: Some(9), ..ten() },
                Action::Accept,
                vec![Operation::PrependAsPath(vec![7, 8]), add("1:1"), add("1:2:3")],
            ),
            rule(ten(), Action::Reject, vec![]),
        ],
        accepts_others: true,
    };
    let (prefix, attributes) = ("10.1.0.0/16".parse().unwrap(), attributes());
    let candidate = Candidate {
        prefix: &prefix,
        attributes: &attributes,
        from_peer: true,
        interface: None,
        internal_peer: true,
    };
    let Verdict::Changed(changed) = policy.judge(&candidate) else { panic!() };
    assert_eq!(changed.local_pref, Some(HIGHEST_PREFERENCE - 9));
    assert_eq!(changed.as_path, AsPath::sequence([7, 8, 65001, 65002]));
    assert_eq!(changed.communities, [Community(65001 << 16 | 5), Community(1 << 16 | 1)]);
    assert_eq!(changed.large_communities, [LargeCommunity(1, 2, 3)]);
    let other = "11.0.0.0/8".parse().unwrap();
    assert_eq!(policy.judge(&Candidate { prefix: &other, ..candidate }), Verdict::Unchanged);
    let closed =
        Policy { rules: vec![rule(ten(), Action::Continue, vec![add("1:1")])], accepts_others: false };
    assert_eq!(closed.judge(&candidate), Verdict::Rejected);
    let rejecting =
        Policy { rules: vec![rule(ten(), Action::Reject, vec![add("1:1")])], accepts_others: true };
    assert_eq!(rejecting.judge(&candidate), Verdict::Rejected);
}
