//! The verdicts of an AccessControl for each option.

use std::net::Ipv4Addr;

use serde_json::json;
use tortie_hcn::Version;
use tortie_hcn::schema::{Acl, AclAction, AclRuleType, lenient};

use super::*;

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
        local: Ipv4Addr::new(10, 0, 0, 5),
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
            Packet { local: Ipv4Addr::new(10, 0, 0, 6), ..packet },
            Packet { remote: Ipv4Addr::new(10, 1, 2, 4), ..packet },
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
