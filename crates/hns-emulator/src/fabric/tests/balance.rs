//! Packets to Services.

use super::*;
use crate::config::EgressSees;

const VIP: &str = "10.96.0.1";
const OTHER_VIP: &str = "10.96.0.2";
const SOURCE: &str = "10.244.3.60";
/// A second host of the other node.
const FURTHER: &str = "10.244.9.10";

/// A node whose load balancers send TCP and UDP port 80 of both addresses to port 8080 of two endpoints of another
/// node.
fn balanced(more: &Value) -> Node {
    let mut node = Node::new(json!([]));
    let remote = [FAR, FURTHER].map(|address| {
        let document = json!({"IpConfigurations": [{"IpAddress": address}], "Flags": 1, "MacAddress": "02-11-0a-f4-09-09"});
        let id = node.state.create_endpoint(node.network, Guid::ZERO, &document.to_string(), &node.config);
        id.unwrap()
    });
    for (vip, protocol) in [(VIP, 6), (OTHER_VIP, 6), (VIP, 17)] {
        let spread = more["DistributionType"].as_u64().unwrap_or_default();
        let port = json!({"Protocol": protocol, "InternalPort": 8080, "ExternalPort": 80, "DistributionType": spread});
        let mut document = json!({"HostComputeEndpoints": remote, "FrontendVIPs": [vip], "PortMappings": [port], "Flags": 1});
        if let Some(source) = more["SourceVIP"].as_str() {
            (document["SourceVIP"], document["Flags"]) = (json!(source), json!(0));
        }
        node.state.create_load_balancer(Guid::ZERO, &document.to_string(), &node.config).unwrap();
    }
    node.replan();
    node
}

/// The packet to the other node, if there is one: its ends. Asserts that its checksums are correct.
fn tunnelled(outputs: &[Output]) -> Option<(Ipv4Addr, u16, Ipv4Addr, u16)> {
    let [Output::Tunnel(OTHER_NODE, datagram)] = outputs else {
        assert_eq!(outputs, []);
        return None;
    };
    let (_, frame) = unvxlan(datagram).unwrap();
    let Frame::Ipv4 { packet, .. } = Frame::parse(frame) else { panic!("{frame:?}") };
    assert_eq!(checksum::state(&packet), Sum::Finished);
    assert_eq!(checksum::sum(&[&packet.bytes()[..packet.header_length()]]), 0xffff);
    let port = |at: usize| u16::from_be_bytes(packet.payload()[at..at + 2].try_into().unwrap());
    Some((packet.source(), port(0), packet.destination(), port(2)))
}

fn udp(from: &str, from_port: u16, to: &str, to_port: u16) -> Vec<u8> {
    let ports = [from_port.to_be_bytes(), to_port.to_be_bytes()].concat();
    packet(17, from, to, &[&ports[..], &[0, 12, 0, 0, 1, 2, 3, 4]].concat())
}

fn address(text: &str) -> Ipv4Addr {
    text.parse().unwrap()
}

#[test]
fn connections_reach_a_backend_and_answers_come_from_the_service() {
    for (source, sees) in
        [None, Some(SOURCE)].into_iter().flat_map(|it| [(it, EgressSees::Vip), (it, EgressSees::Backend)])
    {
        let mut node = balanced(&json!({"SourceVIP": source}));
        node.config.egress_sees = sees;
        node.replan();
        let router = node.plan().router_mac;
        let mut backends = std::collections::BTreeSet::new();
        for own in 1000..1010 {
            let sent = node.send_from_a(&tcp(A, own, VIP, 80, SYN, b""));
            let (from, from_port, to, port) = tunnelled(&sent).unwrap();
            assert_eq!((from, port), (address(source.unwrap_or(A)), 8080));
            assert!(source.is_some() || from_port == own);
            let reply = tcp(&to.to_string(), 8080, &from.to_string(), from_port, SYN | ACK, b"");
            let wanted = ipv4_frame(MAC_A, router, &tcp(VIP, 80, A, own, SYN | ACK, b""));
            assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &reply), [Output::Frame(Port::Pod(node.a), wanted)]);
            let on = node.send_from_a(&tcp(A, own, VIP, 80, ACK, b"on"));
            assert_eq!(tunnelled(&on), Some((from, from_port, to, port)));
            backends.insert(to);
        }
        assert_eq!(backends.len(), 2, "connections are spread");
    }
}

#[test]
fn packets_that_open_no_connection_are_dropped() {
    let mut node = balanced(&json!({}));
    assert_eq!(node.send_from_a(&tcp(A, 1000, VIP, 80, ACK, b"")), []);
    assert!(tunnelled(&node.send_from_a(&tcp(A, 1000, VIP, 80, SYN, b""))).is_some());
    assert!(tunnelled(&node.send_from_a(&udp(A, 1000, VIP, 80))).is_some());
    assert_eq!(node.send_from_a(&tcp(A, 1000, VIP, 81, SYN, b"")), [], "a port that is nobody's");
    assert_eq!(node.send_from_a(&udp(A, 1000, OTHER_VIP, 80)), [], "another protocol");
    let mut fragment = udp(A, 1001, VIP, 80);
    fragment[6] = 0x20;
    finish(&mut fragment);
    assert_eq!(node.send_from_a(&fragment), [], "a fragment");
    // After a long time, the connection has expired.
    node.now += Duration::from_secs(4000);
    assert_eq!(node.send_from_a(&tcp(A, 1000, VIP, 80, ACK, b"")), []);
}

#[test]
fn a_backend_can_distinguish_two_connections() {
    let mut node = balanced(&json!({}));
    let mut to = |vip: &str, own| tunnelled(&node.send_from_a(&tcp(A, own, vip, 80, SYN, b"")));
    for own in 1000..1010 {
        let (first, second) = (to(VIP, own).unwrap(), to(OTHER_VIP, own).unwrap());
        assert_ne!(first.2, second.2);
        assert_eq!((to(VIP, own), to(OTHER_VIP, own)), (Some(first), Some(second)), "sent again");
    }
}

#[test]
fn session_affinity_keeps_the_backend() {
    let mut node = balanced(&json!({"DistributionType": 2}));
    let mut backends: Vec<_> = (1000..1010)
        .map(|own| tunnelled(&node.send_from_a(&tcp(A, own, VIP, 80, SYN, b""))).unwrap().2)
        .collect();
    backends.dedup();
    assert_eq!(backends.len(), 1, "{backends:?}");
}

#[test]
fn packets_for_a_deleted_client_are_dropped() {
    let mut node = balanced(&json!({}));
    let (_, _, to, _) = tunnelled(&node.send_from_a(&tcp(A, 1000, VIP, 80, SYN, b""))).unwrap();
    let a = node.state.endpoint(node.a).unwrap().clone();
    node.state.delete_endpoint(node.a).unwrap();
    node.replan();
    // Another pod with the same address does not inherit it.
    let again = json!({"IpConfigurations": [{"IpAddress": A}], "MacAddress": a.mac_address});
    let id = node.state.create_endpoint(node.network, Guid::ZERO, &again.to_string(), &node.config).unwrap();
    let attach = json!({"ResourceType": "Endpoint", "RequestType": "Add", "Settings": {"EndpointId": id}});
    let namespace = node.state.create_namespace(Guid::ZERO, "{}", &node.config).unwrap();
    node.state.modify_namespace(namespace, &attach.to_string(), &node.config).unwrap();
    node.replan();
    let reply = tcp(&to.to_string(), 8080, A, 1000, ACK, b"");
    let router = node.plan().router_mac;
    let as_it_came = Output::Frame(Port::Pod(id), ipv4_frame(MAC_A, router, &reply));
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &reply), [as_it_came]);
}

#[test]
fn a_deleted_backend_receives_nothing() {
    let mut node = balanced(&json!({}));
    let far = node.state.endpoints.iter().find(|(_, it)| it.ip_configurations[0].ip_address == FAR).unwrap();
    let far = *far.0;
    node.state.delete_endpoint(far).unwrap();
    node.replan();
    for own in 1000..1010 {
        let sent = node.send_from_a(&tcp(A, own, VIP, 80, SYN, b""));
        assert_eq!(tunnelled(&sent).unwrap().2, address(FURTHER));
    }
}
