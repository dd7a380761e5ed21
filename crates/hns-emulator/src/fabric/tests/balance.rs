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
    let Frame::Ip { packet, .. } = Frame::parse(frame) else { panic!("{frame:?}") };
    assert_eq!(checksum::state(&packet), Sum::Finished);
    assert_eq!(checksum::sum(&[&packet.bytes()[..packet.header_length()]]), 0xffff);
    let port = |at: usize| u16::from_be_bytes(packet.payload()[at..at + 2].try_into().unwrap());
    let (IpAddr::V4(from), IpAddr::V4(to)) = (packet.source(), packet.destination()) else { panic!() };
    Some((from, port(0), to, port(2)))
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
            let wanted = ip_frame(MAC_A, router, &tcp(VIP, 80, A, own, SYN | ACK, b""));
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
    let as_it_came = Output::Frame(Port::Pod(id), ip_frame(MAC_A, router, &reply));
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

/// A load balancer of the node's port 30080, with the remote endpoints of [`balanced`] or with pod b alone.
fn node_port(node: &mut Node, local: bool, more: &Value) {
    let remote = node.state.endpoints.values().filter(|it| it.is_remote()).map(|it| it.id);
    let backends: Vec<Guid> = if local { vec![node.b] } else { remote.collect() };
    let port = json!({"Protocol": 6, "InternalPort": 8080, "ExternalPort": 30_080, "Flags": 18});
    let mut document = json!({"HostComputeEndpoints": backends, "PortMappings": [port]});
    document.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    node.state.create_load_balancer(Guid::ZERO, &document.to_string(), &node.config).unwrap();
    node.replan();
}

/// The only place where the node's stack sends packets to its port.
fn handed_over(node: &Node) -> String {
    let ports = node.plan().node_ports();
    let [(from, to)] = ports.iter().collect::<Vec<_>>()[..] else { panic!("{ports:?}") };
    assert_eq!((*from, to.port, to.from_node), ((6, PROVIDER, 30_080), 30_080, true));
    assert!(node.plan().node_leg().unwrap().routes.contains(&IpAddr::V4(to.pod).into()));
    to.pod.to_string()
}

fn from_node(node: &mut Node, packet: &[u8]) -> Vec<Output> {
    let (port, router) = (Port::Node(node.network), node.plan().router_mac);
    node.send(port, &ip_frame(router, router, packet))
}

/// A client outside of the cluster.
const OUTSIDE: &str = "172.16.0.99";

#[test]
fn node_ports_lead_to_backends_of_other_nodes_with_the_source_vip() {
    let mut node = balanced(&json!({}));
    node_port(&mut node, false, &json!({"SourceVIP": SOURCE}));
    let (at, router) = (handed_over(&node), node.plan().router_mac);
    let sent = from_node(&mut node, &tcp(OUTSIDE, 1000, &at, 30_080, SYN, b""));
    let (from, from_port, to, port) = tunnelled(&sent).unwrap();
    assert_eq!((from, port), (address(SOURCE), 8080));
    let reply = tcp(&to.to_string(), 8080, SOURCE, from_port, SYN | ACK, b"");
    let wanted = ip_frame(router, router, &tcp(&at, 30_080, OUTSIDE, 1000, SYN | ACK, b""));
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &reply), [Output::Frame(Port::Node(node.network), wanted)]);
    // A pod uses the node's address, and shares nothing with the client outside.
    let sent = node.send_from_a(&tcp(A, 1000, &PROVIDER.to_string(), 30_080, SYN, b""));
    let (from, other_port, backend, _) = tunnelled(&sent).unwrap();
    assert_eq!(from, address(SOURCE));
    assert_ne!((other_port, backend), (from_port, to));
    // Nobody else has the address of the hand-over.
    assert_eq!(node.send_from_a(&tcp(A, 1000, &at, 30_080, SYN, b"")).len(), 1);
    assert!(!node.plan().fronts.contains_key(&(6, address(&at), 30_080)));
    // The connection goes on without the pods, and ends with the load balancer.
    let on = from_node(&mut node, &tcp(OUTSIDE, 1000, &at, 30_080, ACK, b""));
    assert_eq!(tunnelled(&on), Some((address(SOURCE), from_port, to, 8080)));
    let gone = node.state.load_balancers.values().find(|it| it.frontend_vips.is_empty()).unwrap().id;
    node.state.delete_load_balancer(gone).unwrap();
    node.replan();
    assert!(node.plan().node_ports().is_empty());
    assert_eq!(from_node(&mut node, &tcp(OUTSIDE, 1000, &at, 30_080, ACK, b"")), []);
}

#[test]
fn with_direct_server_return_a_pod_sees_the_client_of_a_node_port() {
    let mut node = balanced(&json!({}));
    node_port(&mut node, true, &json!({"Flags": 1}));
    let (at, router) = (handed_over(&node), node.plan().router_mac);
    let sent = from_node(&mut node, &tcp(OUTSIDE, 1000, &at, 30_080, SYN, b""));
    let wanted = ip_frame(MAC_B, router, &tcp(OUTSIDE, 1000, B, 8080, SYN, b""));
    assert_eq!(sent, [Output::Frame(Port::Pod(node.b), wanted)]);
    let reply = ip_frame(router, MAC_B, &tcp(B, 8080, OUTSIDE, 1000, SYN | ACK, b""));
    let answered = node.send(Port::Pod(node.b), &reply);
    let wanted = ip_frame(router, MAC_B, &tcp(&at, 30_080, OUTSIDE, 1000, SYN | ACK, b""));
    assert_eq!(answered, [Output::Frame(Port::Node(node.network), wanted)]);
    // What the pod itself begins is no answer.
    let own = ip_frame(router, MAC_B, &tcp(B, 8080, OUTSIDE, 1001, SYN, b""));
    let [Output::Frame(_, frame)] = &node.send(Port::Pod(node.b), &own)[..] else { panic!("dropped") };
    let Frame::Ip { packet, .. } = Frame::parse(frame) else { panic!("{frame:?}") };
    assert_eq!(packet.source(), address(B));
}

/// kube-proxy makes a remote endpoint with the address of each Service, on its own node.
#[test]
fn the_node_reaches_a_service_that_has_a_remote_endpoint_on_it() {
    let mut node = balanced(&json!({}));
    let is_routed = |node: &Node, to: &str| {
        node.plan().node_leg().unwrap().routes.contains(&IpAddr::V4(address(to)).into())
    };
    assert!(!is_routed(&node, VIP));
    for to in [VIP, "192.0.2.77"] {
        let policy = json!({"Type": "ProviderAddress", "Settings": {"ProviderAddress": PROVIDER}});
        let document = json!({"IpConfigurations": [{"IpAddress": to}], "Flags": 1, "Policies": [policy]});
        node.state.create_endpoint(node.network, Guid::ZERO, &document.to_string(), &node.config).unwrap();
    }
    node.replan();
    assert!(is_routed(&node, VIP));
    assert!(!is_routed(&node, "192.0.2.77"), "a backend outside of the cluster is no Service");
    let sent = from_node(&mut node, &tcp(GATEWAY, 1000, VIP, 80, SYN, b""));
    let (from, _, to, port) = tunnelled(&sent).unwrap();
    assert_eq!((from, port), (address(GATEWAY), 8080));
    let router = node.plan().router_mac;
    let reply = tcp(&to.to_string(), 8080, GATEWAY, 1000, SYN | ACK, b"");
    let wanted = ip_frame(router, router, &tcp(VIP, 80, GATEWAY, 1000, SYN | ACK, b""));
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &reply), [Output::Frame(Port::Node(node.network), wanted)]);
}

/// The switch translates IPv4 only. A NodePort of IPv6 has no address, and is none of the node's IPv4 address.
#[test]
fn load_balancers_of_ipv6_take_no_port_of_the_node() {
    let mut node = balanced(&json!({}));
    let before = node.plan().fronts.len();
    let pod = node.a;
    let mut add = |flags: u32| {
        let port = json!({"Protocol": 6, "InternalPort": 8080, "ExternalPort": 30080});
        let document = json!({"HostComputeEndpoints": [pod], "PortMappings": [port], "Flags": flags});
        node.state.create_load_balancer(Guid::ZERO, &document.to_string(), &node.config).unwrap();
        node.replan();
        node.plan().fronts.len()
    };
    assert_eq!(add(2), before);
    assert_eq!(add(0), before + 1);
}
