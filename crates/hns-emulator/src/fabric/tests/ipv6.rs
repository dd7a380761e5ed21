//! IPv6 of L2Bridge networks with both families.

use std::net::Ipv6Addr;

use super::l2bridge::{NODE_MAC, endpoint, node, without_end};
use super::*;
use crate::config::OnRewrite;

/// The node's own endpoint, a pod of another node, and the other node.
const END6: &str = "fd00:1::2";
const FAR6: &str = "fd00:9::9";
const OTHER6: &str = "fd00:ffff::2";
const ICMPV6: u8 = 58;

fn echo(kind: u8, from: &str, to: &str) -> Vec<u8> {
    packet(ICMPV6, from, to, &[kind, 0, 0, 0, 0, 7, 0, 1])
}

fn udp(from: &str, to: &str, port: u16) -> Vec<u8> {
    let [a, b] = port.to_be_bytes();
    packet(17, from, to, &[0x10, 0, a, b, 0, 8, 0, 0])
}

fn from_b(node: &mut Node, packet: &[u8]) -> Vec<Output> {
    let router = node.plan().router_mac;
    node.send(Port::Pod(node.b), &ip_frame(router, MAC_B, packet))
}

fn from_node(node: &mut Node, packet: &[u8]) -> Vec<Output> {
    node.send(Port::Node(node.network), &ip_frame([2; 6], NODE_MAC, packet))
}

#[test]
fn packets_stay_in_the_switch_between_pods_and_leave_by_the_node_otherwise() {
    let mut node = node(json!([]));
    let (port, b) = (Port::Node(node.network), Port::Pod(node.b));
    for packet in
        [tcp(A6, 1000, B6, 80, SYN, b""), udp(A6, B6, 53), echo(128, A6, B6), tcp(A, 1000, B, 80, SYN, b"")]
    {
        assert_eq!(node.send_from_a(&packet), [Output::Frame(b, ip_frame(MAC_B, MAC_A, &packet))]);
    }
    for to in [FAR6, END6, OTHER6, "2001:db8::7"] {
        let packet = tcp(A6, 1000, to, 80, SYN, b"");
        assert_eq!(
            node.send_from_a(&packet),
            [Output::Frame(port, ip_frame(NODE_MAC, MAC_A, &packet))],
            "{to}"
        );
    }
    for to in [GATEWAY6, "fd00:1::7", "ff02::1", "fe80::1", "::"] {
        assert_eq!(node.send_from_a(&tcp(A6, 1000, to, 80, SYN, b"")), [], "{to} is nobody's");
    }
    for from in [FAR6, END6, OTHER6] {
        let packet = tcp(from, 1000, B6, 80, SYN, b"");
        let arrived = [Output::Frame(b, ip_frame(MAC_B, NODE_MAC, &packet))];
        assert_eq!(from_node(&mut node, &packet), arrived, "{from}");
    }
    let onward = tcp(END6, 1000, FAR6, 80, SYN, b"");
    assert_eq!(from_node(&mut node, &onward), [], "nothing is sent back to the node");
}

#[test]
fn a_pod_sends_from_its_own_addresses_only() {
    let mut node = node(json!([]));
    for from in [B6, FAR6, "fe80::5", "::"] {
        assert_eq!(node.send_from_a(&tcp(from, 1000, END6, 80, SYN, b"")), [], "{from}");
    }
    let frame = ip_frame(MAC_B, MAC_B, &tcp(A6, 1000, B6, 80, SYN, b""));
    assert_eq!(node.send(Port::Pod(node.a), &frame), [], "another's MAC address");
}

/// Without an address of IPv6 at the node's end, pods reach each other by it, and nothing else does.
#[test]
fn the_node_is_connected_by_its_addresses() {
    let mut alone = without_end(json!([]));
    let end = endpoint(
        &mut alone,
        json!({"IpConfigurations": [{"IpAddress": "10.244.3.2"}], "MacAddress": "00-15-5D-01-02-03"}),
    );
    let own = json!({"NamespaceId": 1, "Type": "HostDefault"}).to_string();
    let own = alone.state.create_namespace(Guid::ZERO, &own, &alone.config).unwrap();
    let attach = json!({"ResourceType": "Endpoint", "RequestType": "Add", "Settings": {"EndpointId": end}});
    alone.state.modify_namespace(own, &attach.to_string(), &alone.config).unwrap();
    alone.replan();
    let leg = alone.plan().node_leg().unwrap();
    assert_eq!((leg.addresses, leg.routes), (vec!["10.244.3.2/26".parse().unwrap()], vec![]));
    for (from, to, passes) in [(A6, FAR6, 0), (A6, END6, 0), (A6, B6, 1), (A, FAR, 1), (A, B, 1)] {
        assert_eq!(alone.send_from_a(&tcp(from, 1000, to, 80, SYN, b"")).len(), passes, "{to}");
    }
}

#[test]
fn acls_are_evaluated() {
    let block = |members: Value| {
        let open = |direction| acl(direction, "Allow", json!({"Priority": 2000}));
        json!([acl("In", "Block", members), open("In"), open("Out")])
    };
    let from_far = [
        tcp(FAR6, 1000, B6, 80, SYN, b""),
        udp(FAR6, B6, 53),
        echo(128, FAR6, B6),
        tcp("fd00:9::8", 1000, B6, 80, SYN, b""),
        tcp(FAR, 1000, B, 80, SYN, b""),
    ];
    for (members, passed) in [
        (json!({"RemoteAddresses": FAR6}), [0, 0, 0, 1, 1]),
        (json!({"RemoteAddresses": "fd00:9::/64"}), [0, 0, 0, 0, 1]),
        (json!({"RemoteAddresses": FAR6, "Protocols": "6", "LocalPorts": "80"}), [0, 1, 1, 1, 1]),
        (json!({"Protocols": "17"}), [1, 0, 1, 1, 1]),
        (json!({"Protocols": "58"}), [1, 1, 0, 1, 1]),
        (json!({"Protocols": "1"}), [1, 1, 1, 1, 1]),
        (json!({"RemoteAddresses": FAR}), [1, 1, 1, 1, 0]),
        (json!({"LocalAddresses": B6}), [0, 0, 0, 0, 1]),
    ] {
        let mut node = node(block(members.clone()));
        let outputs = from_far.clone().map(|packet| from_node(&mut node, &packet).len());
        assert_eq!(outputs, passed, "{members}");
    }
    let mut closed = node(json!([
        acl("Out", "Block", json!({"RemoteAddresses": A6})),
        acl("Out", "Allow", json!({"Priority": 2000}))
    ]));
    for (from, to, passes) in [(B6, A6, 0), (B6, END6, 1), (B, A, 1)] {
        assert_eq!(from_b(&mut closed, &tcp(from, 1000, to, 80, SYN, b"")).len(), passes, "{to}");
    }
}

#[test]
fn answers_errors_and_fragments_of_flows_pass() {
    let mut node = node(json!([acl("In", "Block", json!({}))]));
    let sent = tcp(B6, 2000, FAR6, 443, SYN, b"");
    assert_eq!(from_b(&mut node, &sent).len(), 1);
    let error = |kind: u8, about: &[u8]| {
        packet(ICMPV6, "fd00:ffff::9", B6, &[&[kind, 0, 0, 0, 0, 0, 5, 0], about].concat())
    };
    let fragment = |from: &str, offset: u16| {
        let [a, b] = (offset << 3).to_be_bytes();
        packet(44, from, B6, &[6, 0, a, b, 0, 0, 0, 9, 1, 2, 3, 4])
    };
    let optional = |port: u16| {
        let segment = &tcp(FAR6, 443, B6, port, ACK, b"")[40..];
        packet(60, FAR6, B6, &[&[6, 0, 1, 4, 0, 0, 0, 0], segment].concat())
    };
    for (passes, packet) in [
        (1, tcp(FAR6, 443, B6, 2000, SYN | ACK, b"")),
        (0, tcp(FAR6, 443, B6, 2001, SYN | ACK, b"")),
        (0, tcp(FAR6, 443, B6, 2000, SYN, b"")),
        (1, optional(2000)),
        (0, optional(2001)),
        // Packet too big, and an error about another connection.
        (1, error(2, &sent[..48])),
        (0, error(2, &tcp(B6, 2001, FAR6, 443, SYN, b"")[..48])),
        (0, error(2, &sent[..41])),
        (0, echo(128, FAR6, B6)),
        (1, fragment(FAR6, 3)),
        (0, fragment("fd00:9::8", 3)),
    ] {
        // The new connection over the same ports has ended the flow.
        from_b(&mut node, &sent);
        assert_eq!(from_node(&mut node, &packet).len(), passes, "{packet:?}");
    }
    assert_eq!(from_b(&mut node, &echo(128, B6, FAR6)).len(), 1);
    assert_eq!(from_node(&mut node, &echo(129, FAR6, B6)).len(), 1);
    let other = packet(ICMPV6, FAR6, B6, &[129, 0, 0, 0, 0, 8, 0, 1]);
    assert_eq!(from_node(&mut node, &other), [], "the answer to another's ping");
}

/// A connection is reset at both ends by packets of its own family.
#[test]
fn a_write_of_acls_resets_connections() {
    let mut node = node(json!([]));
    node.config.on_rewrite = OnRewrite::ResetOnAnyChange;
    for (from, to) in [(A6, B6), (A, B)] {
        node.send_from_a(&tcp(from, 1000, to, 80, SYN, b""));
        from_b(&mut node, &tcp(to, 80, from, 1000, SYN | ACK, b""));
    }
    let add = json!({"ResourceType": "Policy", "RequestType": "Add", "Settings": {"Policies": [acl("In", "Allow", json!({}))]}});
    node.state.modify_endpoint(node.b, &add.to_string(), &node.config).unwrap();
    let resets = node.replan();
    let mut seen: Vec<(Port, String, String)> = resets
        .iter()
        .map(|output| {
            let Output::Frame(port, frame) = output else { panic!("{output:?}") };
            let Frame::Ip { packet, .. } = Frame::parse(frame) else { panic!("{frame:?}") };
            assert!(is_right(packet.bytes()));
            assert_eq!((packet.protocol(), packet.payload()[13]), (6, 0x04), "TCP with RST");
            (*port, packet.source().to_string(), packet.destination().to_string())
        })
        .collect();
    seen.sort();
    let (a, b) = (Port::Pod(node.a), Port::Pod(node.b));
    let mut expected = [(a, B6, A6), (b, A6, B6), (a, B, A), (b, A, B)]
        .map(|(port, from, to)| (port, from.to_owned(), to.to_owned()));
    expected.sort();
    assert_eq!(seen, expected);
    let late = from_b(&mut node, &tcp(B6, 80, A6, 1000, ACK, b""));
    let [Output::Frame(port, frame)] = &late[..] else { panic!("{late:?}") };
    let Frame::Ip { packet, .. } = Frame::parse(frame) else { panic!("{frame:?}") };
    assert_eq!((*port, packet.payload()[13]), (b, 0x04));
}

fn solicitation(sender: &str, target: &str) -> Vec<u8> {
    let [sender, target] = [sender, target].map(|text| text.parse::<Ipv6Addr>().unwrap());
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, target.segments()[7]);
    let mut packet = ipv6_header(ICMPV6, 255, sender, group);
    packet.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    packet.extend(target.octets());
    finish(&mut packet);
    packet
}

#[test]
fn the_switch_answers_neighbour_solicitations_whatever_acls_say() {
    let mut node = node(json!([acl("In", "Block", json!({})), acl("Out", "Block", json!({}))]));
    let router = node.plan().router_mac;
    let (b, end) = (Port::Pod(node.b), Port::Node(node.network));
    for (port, mac, sender, target, answer) in [
        (b, MAC_B, B6, A6, Some(MAC_A)),
        (b, MAC_B, "fe80::6", A6, Some(MAC_A)),
        (b, MAC_B, "::", A6, Some(MAC_A)),
        (b, MAC_B, B6, GATEWAY6, Some(router)),
        (b, MAC_B, B6, END6, Some(NODE_MAC)),
        (b, MAC_B, B6, FAR6, Some(router)),
        (b, MAC_B, "::", B6, None),
        (b, MAC_B, "::", "fe80::6", None),
        (b, MAC_B, B6, "fd00:1::7", None),
        (end, NODE_MAC, END6, B6, Some(MAC_B)),
        (end, NODE_MAC, "::", END6, None),
    ] {
        let sent =
            node.send(port, &ip_frame([0x33, 0x33, 0xff, 0, 0, 5], mac, &solicitation(sender, target)));
        let Some(answer) = answer else {
            assert_eq!(sent, [], "{sender} {target}");
            continue;
        };
        let [Output::Frame(to, reply)] = &sent[..] else { panic!("{target}: {sent:?}") };
        assert_eq!((*to, &reply[..6], &reply[12..14]), (port, &mac[..], &[0x86, 0xdd][..]));
        let Some(IpPacket::V6(packet)) = IpPacket::parse(&reply[14..]) else { panic!("{reply:?}") };
        assert!(is_right(packet.bytes()));
        let (heard_by, flags) = if sender == "::" { ("ff02::1", 0x20) } else { (sender, 0x60) };
        assert_eq!(
            (packet.source().to_string(), packet.destination().to_string()),
            (target.to_owned(), heard_by.to_owned())
        );
        let target: Ipv6Addr = target.parse().unwrap();
        let expected = [&[flags, 0, 0, 0][..], &target.octets(), &[2, 1], &answer].concat();
        assert_eq!(
            (packet.bytes()[7], packet.payload()[0], &packet.payload()[4..]),
            (255, 136, &expected[..])
        );
    }
    let mut forwarded = solicitation(B6, A6);
    forwarded[7] = 254;
    assert_eq!(from_b(&mut node, &forwarded), [], "a router has passed it");
}

/// Messages of a router, of a redirect and of neighbours end at the switch.
#[test]
fn neighbour_discovery_does_not_cross_the_switch() {
    let mut node = node(json!([]));
    for kind in 133..=137 {
        for to in [B6, "ff02::1"] {
            let message = packet(ICMPV6, A6, to, &[&[kind, 0, 0, 0][..], &[0; 20]].concat());
            assert_eq!(node.send_from_a(&message), [], "{kind} to {to}");
            let message = packet(ICMPV6, END6, to, &[&[kind, 0, 0, 0][..], &[0; 20]].concat());
            assert_eq!(from_node(&mut node, &message), [], "{kind} to {to}");
        }
    }
}

#[test]
fn packets_of_both_families_are_counted_and_solicitations_are_not() {
    let mut node = node(json!([]));
    let (b, frame) = (Port::Pod(node.b), |packet: &[u8]| ip_frame(MAC_A, MAC_B, packet));
    for (packet, counted) in
        [(tcp(B6, 1, A6, 2, SYN, b""), 1), (tcp(B, 1, A, 2, SYN, b""), 2), (solicitation(B6, A6), 2)]
    {
        node.fabric.counters.sent(b, &frame(&packet));
        assert_eq!(node.fabric.counters.of(node.b).packets_sent, counted);
    }
}

/// Computed by another program.
#[test]
fn the_checksums_of_known_packets() {
    let syn = [0x10, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0];
    for (protocol, payload, at, expected) in [
        (ICMPV6, &b"\x80\0\0\0\0\x07\0\x01tortie"[..], 2, 0x3556_u16),
        (17, &[0x10, 0, 0, 53, 0, 11, 0, 0, 1, 2, 3], 6, 0xf191),
        (6, &syn, 16, 0xa582),
    ] {
        let packet = packet(protocol, "fd00:1::5", "fd00:2::6", payload);
        assert_eq!(packet[40 + at..42 + at], expected.to_be_bytes(), "{protocol}");
        assert_eq!(packet[4..6], (payload.len() as u16).to_be_bytes());
    }
}
