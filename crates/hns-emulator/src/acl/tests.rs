//! The verdicts of an AccessControl for each option.

use std::net::Ipv4Addr;

use serde_json::json;
use tortie_hcn::Version;
use tortie_hcn::schema::{Acl, AclAction, AclRuleType, lenient};

use super::*;
use crate::config::SetReading;

fn config(switch_default: DefaultAction) -> Config {
    let config = Config::new(Version::new(13, 2), Ipv4Addr::LOCALHOST);
    Config { switch_default, host_default: None, ..config }
}

fn acl(priority: u16, action: &str, direction: &str, more: serde_json::Value) -> Acl {
    let mut acl =
        json!({"Action": action, "Direction": direction, "RuleType": "Switch", "Priority": priority});
    acl.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    lenient(&acl.to_string()).unwrap()
}

fn judge(acls: &[Acl], default: DefaultAction, packet: Packet) -> bool {
    let control = AccessControl::new(acls.to_vec(), &Sets::default(), &config(default)).unwrap();
    control.judge(&packet) == Verdict::Allow
}

fn tcp_in(remote: &str, local_port: u16) -> Packet {
    Packet {
        direction: PacketDirection::In,
        protocol: 6,
        local: Ipv4Addr::new(10, 0, 0, 5).into(),
        remote: remote.parse().unwrap(),
        local_port,
        remote_port: 40000,
    }
}

#[test]
fn lower_priority_numbers_win_in_any_order() {
    let allow = acl(1000, "Allow", "In", json!({"RemoteAddresses": "10.1.0.0/16"}));
    let block = acl(1001, "Block", "In", json!({}));
    for acls in [[allow.clone(), block.clone()], [block, allow]] {
        assert!(judge(&acls, DefaultAction::DenyBoth, tcp_in("10.1.2.3", 80)));
        assert!(!judge(&acls, DefaultAction::DenyBoth, tcp_in("10.2.2.3", 80)));
    }
}

#[test]
fn equal_priority_block_wins() {
    let acls = [acl(1000, "Allow", "In", json!({})), acl(1000, "Block", "In", json!({"Protocols": "6"}))];
    assert!(!judge(&acls, DefaultAction::Allow, tcp_in("10.1.2.3", 80)));
    assert!(judge(&acls, DefaultAction::Allow, Packet { protocol: 17, ..tcp_in("10.1.2.3", 80) }));
}

#[test]
fn local_is_the_endpoint_and_remote_the_peer_in_both_directions() {
    let criteria = json!({"LocalAddresses": "10.0.0.5", "RemoteAddresses": "10.1.2.3", "LocalPorts": "80",
        "RemotePorts": "40000-40001", "Protocols": "6"});
    for (name, direction) in [("In", PacketDirection::In), ("Out", PacketDirection::Out)] {
        let acls = [acl(1000, "Allow", name, criteria.clone())];
        let packet = Packet { direction, ..tcp_in("10.1.2.3", 80) };
        assert!(judge(&acls, DefaultAction::DenyBoth, packet));
        for wrong in [
            Packet { local: Ipv4Addr::new(10, 0, 0, 6).into(), ..packet },
            Packet { remote: Ipv4Addr::new(10, 1, 2, 4).into(), ..packet },
            Packet { local_port: 81, ..packet },
            Packet { remote_port: 40002, ..packet },
            Packet { protocol: 17, ..packet },
        ] {
            assert!(!judge(&acls, DefaultAction::DenyBoth, wrong), "{wrong:?}");
        }
    }
}

#[test]
fn defaults() {
    use DefaultAction::*;
    let (tcp, gre) = (tcp_in("10.1.2.3", 80), Packet { protocol: 47, ..tcp_in("10.1.2.3", 80) });
    let out = Packet { direction: PacketDirection::Out, ..gre };
    let none: [Acl; 0] = [];
    let lone = [acl(1000, "Block", "In", json!({"Protocols": "17"}))];
    for default in [DenyBoth, DenySameDirection, Allow] {
        assert!(judge(&none, default, tcp));
        assert!(!judge(&none, default, gre), "not TCP, UDP, ICMP, IGMP");
        assert!(judge(&none, default, out));
        assert_eq!(judge(&lone, default, tcp), default == Allow, "{default:?}");
        assert_eq!(judge(&lone, default, out), default != DenyBoth, "{default:?}");
    }
}

#[test]
fn ports_do_not_match_a_protocol_without_ports() {
    let acls = [acl(1000, "Allow", "In", json!({"LocalPorts": "0-65535"}))];
    let icmp = Packet { protocol: 1, local_port: 0, remote_port: 0, ..tcp_in("10.1.2.3", 0) };
    assert!(!judge(&acls, DefaultAction::DenyBoth, icmp));
    assert!(judge(&acls, DefaultAction::DenyBoth, tcp_in("10.1.2.3", 0)));
}

#[test]
fn the_firewall_also_decides() {
    let switch = acl(1000, "Allow", "In", json!({}));
    let mut host = acl(0, "Allow", "In", json!({"Protocols": "256"}));
    host.rule_type = AclRuleType::Host;
    let mut closed = host.clone();
    (closed.action, closed.remote_addresses) = (AclAction::Block, "10.1.2.3".into());
    let config = Config { host_default: Some(DefaultAction::DenyBoth), ..config(DefaultAction::DenyBoth) };
    let judge = |acls: Vec<Acl>, remote| {
        AccessControl::new(acls, &Sets::default(), &config).unwrap().judge(&tcp_in(remote, 80))
            == Verdict::Allow
    };
    assert!(judge(vec![switch.clone(), host.clone()], "10.1.2.3"));
    assert!(!judge(vec![switch.clone(), host.clone(), closed.clone()], "10.1.2.3"));
    assert!(judge(vec![switch.clone(), host, closed.clone()], "10.1.2.4"));
    assert!(!judge(vec![switch, closed], "10.1.2.4"), "a host rule closes the rest");
}

/// Which of these incoming packets an ACL with these members allows: from an address and by a protocol, to the endpoint.
#[test]
fn rules_match_packets_of_their_family() {
    let sets = [("six", "fd00:9::/64"), ("four", "10.9.0.0/24"), ("both", "fd00:9::1,10.9.0.1")].map(
        |(id, values)| {
            let settings = json!({"Id": id, "Name": id, "PolicyType": "IPSET", "Values": values});
            lenient(&json!({"Type": "SetPolicy", "Settings": settings}).to_string()).unwrap()
        },
    );
    let config = Config { set_reading: SetReading::Endpoint, ..config(DefaultAction::DenyBoth) };
    let sets = Sets::of(&sets, &Sets::default(), &config).unwrap();
    let packets = [("fd00:9::1", 6), ("fd00:9::2", 6), ("fd00:a::1", 6), ("10.9.0.1", 6), ("10.9.0.2", 6)];
    let pings = [("fd00:9::1", 58), ("10.9.0.1", 1)];
    let all = [true; 7];
    let none = [false; 7];
    let six = [true, true, true, false, false, true, false];
    let nine = [true, true, false, false, false, true, false];
    let one = [true, false, false, true, false, true, true];
    for (members, allowed) in [
        (json!({}), all),
        (json!({"Protocols": "256"}), all),
        (json!({"Protocols": "6"}), [true, true, true, true, true, false, false]),
        (json!({"Protocols": "58"}), [false, false, false, false, false, true, false]),
        (json!({"Protocols": "1"}), [false, false, false, false, false, false, true]),
        (json!({"LocalPorts": "80"}), [true, true, true, true, true, false, false]),
        (json!({"RemoteAddresses": "::/0"}), six),
        (json!({"RemoteAddresses": "0.0.0.0/0"}), six.map(|passes| !passes)),
        (json!({"RemoteAddresses": "fd00:9::/64"}), nine),
        (json!({"RemoteAddresses": "fd00:9::1,fd00:a::1"}), [true, false, true, false, false, true, false]),
        (json!({"RemoteAddresses": "FD00:9:0::0001"}), [true, false, false, false, false, true, false]),
        (json!({"RemoteAddresses": "six"}), nine),
        (json!({"RemoteAddresses": "four"}), [false, false, false, true, true, false, true]),
        (json!({"RemoteAddresses": "both"}), one),
        // As an address of IPv4 in one of IPv6 would be.
        (json!({"RemoteAddresses": "::10.9.0.1,::ffff:10.9.0.1"}), none),
        (json!({"LocalAddresses": "fd00:1::5"}), six),
        (json!({"LocalAddresses": "fd00:1::6"}), none),
        (json!({"LocalAddresses": "10.0.0.5", "RemoteAddresses": "fd00:9::1"}), none),
    ] {
        let control = AccessControl::new([acl(1, "Allow", "In", members.clone())], &sets, &config).unwrap();
        let verdicts: Vec<bool> = packets
            .into_iter()
            .chain(pings)
            .map(|(remote, protocol)| {
                let local = if remote.contains(':') { "fd00:1::5" } else { "10.0.0.5" };
                let local = local.parse().unwrap();
                control.judge(&Packet { protocol, local, ..tcp_in(remote, 80) }) == Verdict::Allow
            })
            .collect();
        assert_eq!(verdicts, allowed, "{members}");
    }
}

#[test]
fn without_acls_icmp_of_ipv6_passes() {
    for (protocol, passes) in [(58, true), (6, true), (132, false)] {
        assert_eq!(
            judge(&[], DefaultAction::DenyBoth, Packet { protocol, ..tcp_in("fd00:9::1", 80) }),
            passes
        );
    }
}

#[test]
fn strict_rules_have_one_family_in_a_field() {
    for (strict, list, accepted) in [
        (true, "fd00:9::1,10.9.0.1", false),
        (true, "fd00:9::1,fd00:9::2", true),
        (false, "fd00:9::1,10.9.0.1", true),
    ] {
        let config = Config { strict, ..config(DefaultAction::DenyBoth) };
        let rule = acl(1, "Allow", "In", json!({"RemoteAddresses": list}));
        let control = AccessControl::new([rule], &Sets::default(), &config);
        assert_eq!(control.is_ok(), accepted, "{list}");
        let Ok(control) = control else { continue };
        for remote in list.split(',') {
            assert_eq!(control.judge(&tcp_in(remote, 80)), Verdict::Allow, "{remote}");
        }
    }
}

#[test]
fn unreadable_acls_are_rejected() {
    for more in [
        json!({"Action": "Pass"}),
        json!({"Direction": "Up"}),
        json!({"Protocols": "tcp"}),
        json!({"Protocols": "257"}),
        json!({"RemoteAddresses": "Any"}),
        json!({"LocalPorts": "http"}),
    ] {
        let rule = acl(1000, "Allow", "In", more.clone());
        let control = AccessControl::new([rule], &Sets::default(), &config(DefaultAction::Allow));
        assert!(control.is_err(), "{more}");
    }
}
