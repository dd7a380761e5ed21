//! The decisions of the fabric: frames in, frames out.

mod balance;
mod flows;
mod ipv6;
mod l2bridge;
mod outbound;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};
use tortie_hcn::Guid;

use super::checksum::{self, ChecksumState as Sum, finish};
use super::frame::{Frame, Mac, ip_frame, unvxlan, vxlan};
use super::packet::{IpPacket, Ipv4Packet, ipv6_header};
use super::segment::{Unfit, complete};
use super::*;
use crate::config::{Config, DefaultAction};
use crate::state::State;

const PROVIDER: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
const OTHER_NODE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 2);
const OTHER_MAC: Mac = [0x66, 0, 0, 0, 0, 2];
const MAC_A: Mac = [0x0e, 0x2a, 10, 244, 3, 5];
const MAC_B: Mac = [0x0e, 0x2a, 10, 244, 3, 6];
const A: &str = "10.244.3.5";
const B: &str = "10.244.3.6";
const FAR: &str = "10.244.9.9";
const GATEWAY: &str = "10.244.3.1";
/// The IPv6 addresses of the pods in an L2Bridge network.
const A6: &str = "fd00:1::5";
const B6: &str = "fd00:1::6";
const GATEWAY6: &str = "fd00:1::1";

/// A node with two pods, and a route to one other node.
struct Node {
    state: State,
    config: Config,
    fabric: Fabric,
    network: Guid,
    a: Guid,
    b: Guid,
    now: Instant,
}

impl Node {
    /// `acls` are the ACLs of pod b.
    fn new(acls: Value) -> Node {
        Node::with(acls, |_| {})
    }

    fn with(acls: Value, change: impl FnOnce(&mut Config)) -> Node {
        let network = json!({"Name": "Calico", "Type": "Overlay", "Policies": [
                {"Type": "HostRoute", "Settings": {}},
                {"Type": "RemoteSubnetRoute", "Settings": {"DestinationPrefix": "10.244.9.0/26",
                    "IsolationId": 4096, "ProviderAddress": OTHER_NODE,
                    "DistributedRouterMacAddress": "66-00-00-00-00-02"}}],
            "Ipams": [{"Subnets": [{"IpAddressPrefix": "10.244.3.0/26",
                "Policies": [{"Type": "VSID", "Settings": {"IsolationId": 4096}}],
                "Routes": [{"NextHop": GATEWAY, "DestinationPrefix": "0.0.0.0/0"}]}]}]});
        Node::on(&network, acls, change)
    }

    fn on(network: &Value, acls: Value, change: impl FnOnce(&mut Config)) -> Node {
        let mut config = Config {
            host_default: None,
            switch_default: DefaultAction::DenySameDirection,
            ..Config::new(Config::SERVER_2022, PROVIDER)
        };
        change(&mut config);
        let mut state = State::default();
        let is_bridge = network["Type"] == "L2Bridge";
        let network = state.create_network(Guid::ZERO, &network.to_string(), &config).unwrap();
        let mut pod = |[v4, v6]: [&str; 2], mac: &str, acls: Value| {
            let route = |hop: &str, to: &str| json!({"NextHop": hop, "DestinationPrefix": to});
            let (mut addresses, mut routes) = (vec![v4], vec![route(GATEWAY, "0.0.0.0/0")]);
            if is_bridge {
                addresses.push(v6);
                routes.push(route(GATEWAY6, "::/0"));
            }
            let addresses: Vec<Value> = addresses.iter().map(|it| json!({"IpAddress": it})).collect();
            let document =
                json!({"IpConfigurations": addresses, "MacAddress": mac, "Routes": routes, "Policies": acls});
            let id = state.create_endpoint(network, Guid::ZERO, &document.to_string(), &config).unwrap();
            let namespace = state.create_namespace(Guid::ZERO, "{}", &config).unwrap();
            let attach =
                json!({"ResourceType": "Endpoint", "RequestType": "Add", "Settings": {"EndpointId": id}});
            state.modify_namespace(namespace, &attach.to_string(), &config).unwrap();
            id
        };
        let a = pod([A, A6], "0E-2A-0a-f4-03-05", json!([]));
        let b = pod([B, B6], "0E-2A-0A-F4-03-06", acls);
        let mut node = Node { state, config, fabric: Fabric::default(), network, a, b, now: Instant::now() };
        node.replan();
        node
    }

    fn replan(&mut self) -> Vec<Output> {
        self.fabric.set_plans(Plan::of(&self.state, &self.config, &BTreeMap::new()), self.now)
    }

    fn plan(&self) -> std::sync::Arc<Plan> {
        Plan::of(&self.state, &self.config, &BTreeMap::new()).remove(&self.network).unwrap()
    }

    fn send(&mut self, port: Port, frame: &[u8]) -> Vec<Output> {
        self.fabric.arrive(port, frame, self.now)
    }

    fn send_from_a(&mut self, packet: &[u8]) -> Vec<Output> {
        let router = self.plan().router_mac;
        self.send(Port::Pod(self.a), &ip_frame(router, MAC_A, packet))
    }

    fn by_tunnel(&mut self, sender: Ipv4Addr, vni: u32, packet: &[u8]) -> Vec<Output> {
        let frame = ip_frame(self.plan().router_mac, OTHER_MAC, packet);
        self.fabric.arrive_by_tunnel(sender, &vxlan(vni, &frame), self.now)
    }
}

fn acl(direction: &str, action: &str, more: Value) -> Value {
    let mut settings =
        json!({"Action": action, "Direction": direction, "RuleType": "Switch", "Priority": 1000});
    settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"Type": "ACL", "Settings": settings})
}

fn packet(protocol: u8, from: &str, to: &str, payload: &[u8]) -> Vec<u8> {
    let length = (20 + payload.len() as u16).to_be_bytes();
    let mut packet = match (from.parse().unwrap(), to.parse().unwrap()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = [0x45, 0, length[0], length[1], 0x12, 0x34, 0x40, 0, 64, protocol, 0, 0];
            [&header[..], &from.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => ipv6_header(protocol, 64, from, to),
        mixed => panic!("{mixed:?}"),
    };
    packet.extend_from_slice(payload);
    finish(&mut packet);
    packet
}

fn tcp(from: &str, from_port: u16, to: &str, to_port: u16, flags: u8, data: &[u8]) -> Vec<u8> {
    let mut segment = [from_port.to_be_bytes(), to_port.to_be_bytes()].concat();
    segment.extend(0xffff_fff0_u32.to_be_bytes());
    segment.extend([0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend_from_slice(data);
    packet(6, from, to, &segment)
}

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

#[test]
fn packets_between_pods_of_one_node() {
    let mut node = Node::new(json!([]));
    let packet = tcp(A, 1000, B, 80, SYN, b"");
    let b = node.b;
    assert_eq!(node.send_from_a(&packet), [Output::Frame(Port::Pod(b), ip_frame(MAC_B, MAC_A, &packet))]);
    let nobody = tcp(A, 1000, "10.244.3.7", 80, SYN, b"");
    assert_eq!(node.send_from_a(&nobody), []);
}

#[test]
fn a_pod_cannot_spoof_another() {
    let mut node = Node::new(json!([]));
    let a = Port::Pod(node.a);
    assert_eq!(node.send_from_a(&tcp(B, 1000, FAR, 80, SYN, b"")), [], "another's address");
    let frame = ip_frame(MAC_B, MAC_B, &tcp(A, 1000, B, 80, SYN, b""));
    assert_eq!(node.send(a, &frame), [], "another's MAC address");
}

#[test]
fn another_node_cannot_spoof_this_one() {
    let mut node = Node::new(json!([]));
    let provider = PROVIDER.to_string();
    let own = [B, "10.244.3.7", GATEWAY, provider.as_str()];
    for source in own {
        let packet = tcp(source, 1000, A, 80, SYN, b"");
        assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &packet), [], "{source}");
    }
    // An address in the subnet that the other node has by a longer route belongs to that node.
    let borrowed = json!({"ResourceType": "Policy", "RequestType": "Add", "Settings": {"Policies": [
        {"Type": "RemoteSubnetRoute", "Settings": {"DestinationPrefix": "10.244.3.7/32", "IsolationId": 4096,
            "ProviderAddress": OTHER_NODE, "DistributedRouterMacAddress": "66-00-00-00-00-02"}}]}});
    node.state.modify_network(node.network, &borrowed.to_string(), &node.config).unwrap();
    node.replan();
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &tcp("10.244.3.7", 1000, A, 80, SYN, b"")).len(), 1);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &tcp(B, 1000, A, 80, SYN, b"")), []);

    node.config.check_tunnel_sources = false;
    node.replan();
    for source in own {
        assert_eq!(
            node.by_tunnel(OTHER_NODE, 4096, &tcp(source, 1000, A, 80, SYN, b"")).len(),
            1,
            "{source}"
        );
    }
}

#[test]
fn packets_to_another_node_and_back() {
    let mut node = Node::new(json!([]));
    let out = tcp(A, 1000, FAR, 80, SYN, b"");
    let sent = node.send_from_a(&out);
    let [Output::Tunnel(to, datagram)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(*to, OTHER_NODE);
    let (vni, frame) = unvxlan(datagram).unwrap();
    assert_eq!(vni, 4096);
    assert_eq!(frame, ip_frame(OTHER_MAC, node.plan().router_mac, &out));

    let back = tcp(FAR, 80, A, 1000, SYN | ACK, b"");
    let (a, router) = (node.a, node.plan().router_mac);
    let arrived = [Output::Frame(Port::Pod(a), ip_frame(MAC_A, router, &back))];
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &back), arrived);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4097, &back), [], "another VNI");
    assert_eq!(node.by_tunnel(Ipv4Addr::new(172, 16, 0, 9), 4096, &back), [], "a stranger");
    let misled = vxlan(4096, &ip_frame([2; 6], OTHER_MAC, &back));
    assert_eq!(node.fabric.arrive_by_tunnel(OTHER_NODE, &misled, node.now), [], "not our MAC address");
    let onward = tcp(FAR, 80, "10.244.9.10", 1000, SYN, b"");
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &onward), [], "nothing is sent back into a tunnel");
    for cut in 0..60 {
        let whole = vxlan(4096, &ip_frame(router, OTHER_MAC, &back));
        assert_eq!(
            node.fabric.arrive_by_tunnel(OTHER_NODE, &whole[..cut.min(whole.len() - 1)], node.now),
            []
        );
    }
}

#[test]
fn the_node_reaches_pods_and_pods_the_node() {
    let mut node = Node::new(json!([]));
    let (port, a, router) = (Port::Node(node.network), node.a, node.plan().router_mac);
    let leg = node.plan().node_leg().unwrap();
    assert_eq!((leg.addresses, leg.mac), (vec![format!("{GATEWAY}/26").parse().unwrap()], router));
    assert_eq!(leg.routes, ["10.244.9.0/26".parse().unwrap()]);
    let packet = tcp(GATEWAY, 1000, A, 80, SYN, b"");
    let arrived = [Output::Frame(Port::Pod(a), ip_frame(MAC_A, router, &packet))];
    assert_eq!(node.send(port, &ip_frame(MAC_A, router, &packet)), arrived);
    for address in [GATEWAY, "172.16.0.3"] {
        let packet = tcp(A, 1000, address, 10250, SYN, b"");
        assert_eq!(node.send_from_a(&packet), [Output::Frame(port, ip_frame(router, MAC_A, &packet))]);
    }
    let far = tcp(GATEWAY, 1000, FAR, 80, SYN, b"");
    let sent = node.send(port, &ip_frame(OTHER_MAC, router, &far));
    assert!(matches!(sent[..], [Output::Tunnel(OTHER_NODE, _)]), "{sent:?}");
    let probed = tcp(FAR, 1000, GATEWAY, 80, SYN, b"");
    assert!(matches!(node.by_tunnel(OTHER_NODE, 4096, &probed)[..], [Output::Frame(Port::Node(_), _)]));
}

#[test]
fn the_switch_answers_arp() {
    let mut node = Node::new(json!([]));
    let router = node.plan().router_mac;
    let ask = |sender_mac: Mac, sender: &str, target: &str| {
        let mut frame = vec![0xff; 6];
        frame.extend(sender_mac);
        frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(sender_mac);
        frame.extend(sender.parse::<Ipv4Addr>().unwrap().octets());
        frame.extend([0; 6]);
        frame.extend(target.parse::<Ipv4Addr>().unwrap().octets());
        frame
    };
    let (a, leg) = (Port::Pod(node.a), Port::Node(node.network));
    let cases = [
        (a, MAC_A, A, B, Some(MAC_B)),
        (a, MAC_A, A, GATEWAY, Some(router)),
        (a, MAC_A, A, "8.8.8.8", Some(router)),
        (a, MAC_A, A, A, None),
        (a, MAC_A, A, "10.244.3.7", None),
        (leg, router, GATEWAY, A, Some(MAC_A)),
        (leg, router, GATEWAY, FAR, Some(OTHER_MAC)),
        (leg, router, GATEWAY, GATEWAY, None),
    ];
    for (port, mac, sender, target, answer) in cases {
        let sent = node.send(port, &ask(mac, sender, target));
        let Some(answer) = answer else {
            assert_eq!(sent, [], "{target}");
            continue;
        };
        let [Output::Frame(to, reply)] = &sent[..] else { panic!("{target}: {sent:?}") };
        assert_eq!(*to, port);
        assert_eq!(&reply[..6], mac);
        assert_eq!(&reply[20..28], [&[0, 2][..], &answer].concat());
        assert_eq!(reply[28..32], target.parse::<Ipv4Addr>().unwrap().octets());
    }
}

/// The packet as a kernel that relies on hardware sends it.
fn unfinished(mut packet: Vec<u8>) -> Vec<u8> {
    let at = 20 + checksum::field(&IpPacket::parse(&packet).unwrap()).unwrap();
    let length = (packet.len() as u16 - 20).to_be_bytes();
    let pseudo = [&packet[12..20], &[0, packet[9]], &length].concat();
    let sum = checksum::sum(&[&pseudo]).to_be_bytes();
    packet[at..at + 2].copy_from_slice(&sum);
    packet
}

fn is_right(packet: &[u8]) -> bool {
    let view = IpPacket::parse(packet).unwrap();
    let header =
        matches!(view, IpPacket::V6(_)) || checksum::sum(&[&packet[..view.header_length()]]) == 0xffff;
    header && checksum::state(&view) == Sum::Finished
}

#[test]
fn the_checksum_of_a_known_packet() {
    // The header used in many explanations of RFC 1071.
    let mut header =
        vec![0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];
    header.resize(0x73, 0);
    finish(&mut header);
    assert_eq!(header[10..12], [0xb8, 0x61]);
}

#[test]
fn broken_packets_are_dropped_and_not_repaired() {
    let mut broken = tcp(FAR, 1, A, 2, ACK, b"hello");
    broken[42] ^= 1;
    assert_eq!(complete(&Ipv4Packet::parse(&broken).unwrap(), 1450), Err(Unfit::Checksum));
    let mut node = Node::new(json!([]));
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &broken), []);
}

proptest! {
    /// Split and completed packets have correct checksums, fit the MTU, and contain the original data and numbers.
    #[test]
    fn tcp_is_segmented_and_checksummed(data in prop::collection::vec(any::<u8>(), 0..9000), mtu in 100_usize..1500,
                               flags in any::<u8>(), whole in any::<bool>()) {
        let big = tcp(FAR, 1000, A, 80, flags, &data);
        prop_assert!(is_right(&big));
        let big = if whole { big } else { unfinished(big) };
        let parts = complete(&Ipv4Packet::parse(&big).unwrap(), mtu).unwrap();
        let mut back = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            prop_assert!(part.len() <= mtu && is_right(part));
            let sequence = u32::from_be_bytes(part[24..28].try_into().unwrap());
            prop_assert_eq!(sequence, 0xffff_fff0_u32.wrapping_add(back.len() as u32));
            prop_assert_eq!(&part[12..24], &big[12..24], "addresses and ports");
            let (first, last) = (index == 0, index + 1 == parts.len());
            let kept = flags & if first { 0xff } else { 0x7f } & if last { 0xff } else { 0xf6 };
            prop_assert_eq!(part[33], kept);
            back.extend_from_slice(&part[40..]);
        }
        prop_assert_eq!(back, data);
    }

    /// UDP keeps its single checksum; IPv4 fragments can be reassembled.
    #[test]
    fn udp_is_checksummed_and_fragmented(data in prop::collection::vec(any::<u8>(), 0..5000), mtu in 100_usize..1500,
                                      whole in any::<bool>()) {
        let length = (data.len() as u16 + 8).to_be_bytes();
        let datagram = [&[0x10, 0, 0, 53, length[0], length[1], 0, 0][..], &data].concat();
        let right = { let mut p = packet(17, FAR, A, &datagram); p[6] = 0; finish(&mut p); p };
        let sent = if whole { right.clone() } else { unfinished(right.clone()) };
        let parts = complete(&Ipv4Packet::parse(&sent).unwrap(), mtu).unwrap();
        let mut back = Vec::new();
        for part in &parts {
            prop_assert!(part.len() <= mtu);
            let view = Ipv4Packet::parse(part).unwrap();
            prop_assert_eq!(usize::from(view.fragment_offset()) * 8, back.len());
            back.extend_from_slice(view.payload());
        }
        prop_assert_eq!(&back, &right[20..]);
    }

    /// No input makes the switch panic.
    #[test]
    fn any_bytes_are_accepted_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), ethertype in prop::sample::select(vec![[8, 0], [8, 6], [0x86, 0xdd]])) {
        let mut node = Node::new(json!([]));
        let mut frame = vec![0; 12];
        frame.extend(ethertype);
        frame.extend_from_slice(&bytes);
        let (port, pod) = (Port::Node(node.network), Port::Pod(node.a));
        for bytes in [&bytes, &frame] {
            node.send(port, bytes);
            node.send(pod, bytes);
            node.fabric.arrive_by_tunnel(OTHER_NODE, bytes, Instant::now());
            let _ = Frame::parse(bytes);
        }
        let headed = vxlan(4096, &ip_frame(node.plan().router_mac, OTHER_MAC, &bytes));
        node.fabric.arrive_by_tunnel(OTHER_NODE, &headed, Instant::now());
    }
}
