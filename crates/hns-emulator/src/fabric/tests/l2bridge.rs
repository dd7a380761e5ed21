//! L2Bridge networks: packets to other nodes leave by the node's own stack.

use super::*;

/// The node's own endpoint in the network, as flannel makes it.
const NODE_END: &str = "10.244.3.2";
pub(super) const NODE_MAC: Mac = [0x00, 0x15, 0x5d, 1, 2, 3];
const VIP: &str = "10.96.0.1";

/// A node with two pods, and with its own endpoint.
pub(super) fn node(acls: Value) -> Node {
    let mut node = without_end(acls);
    let end = endpoint(
        &mut node,
        json!({"IpConfigurations": [{"IpAddress": "fd00:1::2"}, {"IpAddress": NODE_END}], "MacAddress": "00-15-5D-01-02-03"}),
    );
    let own = json!({"NamespaceId": 1, "Type": "HostDefault"}).to_string();
    let own = node.state.create_namespace(Guid::ZERO, &own, &node.config).unwrap();
    let attach = json!({"ResourceType": "Endpoint", "RequestType": "Add", "Settings": {"EndpointId": end}})
        .to_string();
    node.state.modify_namespace(own, &attach, &node.config).unwrap();
    node.replan();
    node
}

/// The network has a policy of overlays, which has no effect here.
pub(super) fn without_end(acls: Value) -> Node {
    let remote = json!({"DestinationPrefix": "10.244.9.0/26", "IsolationId": 4096, "ProviderAddress": OTHER_NODE,
        "DistributedRouterMacAddress": "66-00-00-00-00-02"});
    let policies = json!([{"Type": "RemoteSubnetRoute", "Settings": remote}]);
    let network = json!({"Name": "cbr0", "Type": "L2Bridge", "Policies": policies, "Ipams": [{"Subnets": [
        {"IpAddressPrefix": "fd00:1::/64", "Routes": [{"NextHop": GATEWAY6, "DestinationPrefix": "::/0"}]},
        {"IpAddressPrefix": "10.244.3.0/26", "Routes": [{"NextHop": GATEWAY, "DestinationPrefix": "0.0.0.0/0"}]}]}]});
    Node::on(&network, acls, |_| {})
}

pub(super) fn endpoint(node: &mut Node, document: Value) -> Guid {
    node.state.create_endpoint(node.network, Guid::ZERO, &document.to_string(), &node.config).unwrap()
}

/// A load balancer to pod b and to a pod of another node.
fn balance(node: &mut Node, more: Value) {
    let far = endpoint(
        node,
        json!({"IpConfigurations": [{"IpAddress": FAR}], "Flags": 1, "MacAddress": "02-11-0a-f4-09-09"}),
    );
    let port = json!({"Protocol": 6, "InternalPort": 8080, "ExternalPort": 80});
    let mut document = json!({"HostComputeEndpoints": [node.b, far], "PortMappings": [port]});
    document.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    node.state.create_load_balancer(Guid::ZERO, &document.to_string(), &node.config).unwrap();
    node.replan();
}

/// What goes out of a port: source and destination with their ports.
fn sent(outputs: &[Output], port: Port) -> ((String, u16), (String, u16)) {
    let [Output::Frame(to, frame)] = outputs else { panic!("{outputs:?}") };
    let Frame::Ip { destination, packet, .. } = Frame::parse(frame) else { panic!("{frame:?}") };
    assert_eq!(*to, port);
    assert!(is_right(packet.bytes()));
    if let Port::Node(_) = port {
        assert_eq!(destination, NODE_MAC);
    }
    let number = |at: usize| u16::from_be_bytes(packet.payload()[at..at + 2].try_into().unwrap());
    ((packet.source().to_string(), number(0)), (packet.destination().to_string(), number(2)))
}

#[test]
fn packets_stay_in_the_switch_between_pods_and_leave_by_the_node_otherwise() {
    let mut node = node(json!([]));
    let (port, b) = (Port::Node(node.network), Port::Pod(node.b));
    let packet = tcp(A, 1000, B, 80, SYN, b"");
    assert_eq!(node.send_from_a(&packet), [Output::Frame(b, ip_frame(MAC_B, MAC_A, &packet))]);
    for to in [FAR, NODE_END, "172.16.0.3", "198.51.100.7"] {
        let packet = tcp(A, 1000, to, 80, SYN, b"");
        assert_eq!(
            node.send_from_a(&packet),
            [Output::Frame(port, ip_frame(NODE_MAC, MAC_A, &packet))],
            "{to}"
        );
    }
    for to in [GATEWAY, "10.244.3.7"] {
        assert_eq!(node.send_from_a(&tcp(A, 1000, to, 80, SYN, b"")), [], "{to} is nobody's");
    }
    for from in [FAR, NODE_END, "172.16.0.3"] {
        let packet = tcp(from, 1000, B, 80, SYN, b"");
        let arrived = [Output::Frame(b, ip_frame(MAC_B, NODE_MAC, &packet))];
        assert_eq!(node.send(port, &ip_frame([2; 6], NODE_MAC, &packet)), arrived, "{from}");
    }
    let onward = ip_frame([2; 6], NODE_MAC, &tcp(NODE_END, 1000, FAR, 80, SYN, b""));
    assert_eq!(node.send(port, &onward), [], "nothing is sent back to the node");
}

#[test]
fn the_node_is_connected_by_an_endpoint_in_its_own_compartment() {
    let mut alone = without_end(json!([]));
    assert_eq!(alone.plan().node_leg(), None);
    for to in [FAR, NODE_END, "172.16.0.3"] {
        assert_eq!(alone.send_from_a(&tcp(A, 1000, to, 80, SYN, b"")), [], "{to}");
    }
    let plan = node(json!([])).plan();
    let leg = plan.node_leg().unwrap();
    let addresses: Vec<String> = leg.addresses.iter().map(ToString::to_string).collect();
    assert_eq!((addresses, leg.mac), (vec!["fd00:1::2/64".to_owned(), format!("{NODE_END}/26")], NODE_MAC));
    assert_eq!((leg.routes.as_slice(), plan.pods.len()), (&[][..], 2));
}

#[test]
fn no_tunnel_reaches_its_pods() {
    let mut node = node(json!([]));
    for vni in [0, 4096] {
        assert_eq!(node.by_tunnel(OTHER_NODE, vni, &tcp(FAR, 80, A, 1000, SYN, b"")), []);
    }
}

#[test]
fn acls_are_evaluated() {
    let mut node = node(json!([
        acl("In", "Block", json!({"RemoteAddresses": FAR, "Priority": 100})),
        acl("In", "Allow", json!({}))
    ]));
    let port = Port::Node(node.network);
    let mut from = |address: &str| {
        node.send(port, &ip_frame(MAC_B, NODE_MAC, &tcp(address, 1000, B, 80, SYN, b""))).len()
    };
    assert_eq!((from(FAR), from("10.244.9.10"), from(NODE_END)), (0, 1, 1));
    assert_eq!(node.send_from_a(&tcp(A, 1000, B, 80, SYN, b"")).len(), 1);
}

/// With direct server return, backends see the pod.
#[test]
fn pods_reach_backends_of_both_nodes() {
    for (flags, direct) in [(1, true), (0, false)] {
        let mut node = node(json!([]));
        balance(&mut node, json!({"FrontendVIPs": [VIP], "Flags": flags}));
        let (a, b, port) = (Port::Pod(node.a), Port::Pod(node.b), Port::Node(node.network));
        let stand_in = node.plan().outbound().keys().next().copied().unwrap().to_string();
        let (mut near, mut far) = (0, 0);
        for own in 1000..1020 {
            let packet = tcp(A, own, VIP, 80, SYN, b"");
            let outputs = node.send_from_a(&packet);
            let at_b = matches!(outputs[..], [Output::Frame(to, _)] if to == b);
            let (from, to) = sent(&outputs, if at_b { b } else { port });
            let reply = tcp(&to.0, to.1, &from.0, from.1, SYN | ACK, b"");
            let answered = if at_b {
                near += 1;
                assert_eq!(from.0, if direct { A } else { "172.16.0.3" });
                node.send(b, &ip_frame([2; 6], MAC_B, &reply))
            } else {
                far += 1;
                // The node's stack replaces it by the node's address, and finds the connection of answers by it.
                assert_eq!(from.0, if direct { A } else { &stand_in });
                node.send(port, &ip_frame([2; 6], NODE_MAC, &reply))
            };
            assert_eq!(sent(&answered, a), ((VIP.to_owned(), 80), (A.to_owned(), own)));
        }
        assert!(near > 0 && far > 0, "{near} {far}");
    }
}

#[test]
fn the_node_reaches_backends_of_both_nodes() {
    for flags in [0, 1] {
        let mut node = node(json!([]));
        balance(&mut node, json!({"FrontendVIPs": [VIP], "Flags": flags}));
        let (b, port) = (Port::Pod(node.b), Port::Node(node.network));
        let leg = node.plan().node_leg().unwrap();
        let stand_in = node.plan().outbound().keys().next().copied().unwrap().to_string();
        assert_eq!(leg.source, PROVIDER);
        let mut routes: Vec<String> = leg.routes.iter().map(|net| net.addr().to_string()).collect();
        routes.sort();
        assert_eq!(routes, [VIP.to_owned(), stand_in.clone()], "what the node sends into the switch");
        let (mut near, mut far) = (0, 0);
        for own in 1000..1020 {
            let packet = tcp("172.16.0.3", own, VIP, 80, SYN, b"");
            let outputs = node.send(port, &ip_frame([2; 6], NODE_MAC, &packet));
            let at_b = matches!(outputs[..], [Output::Frame(to, _)] if to == b);
            let (from, to) = sent(&outputs, if at_b { b } else { port });
            let reply = tcp(&to.0, to.1, &from.0, from.1, SYN | ACK, b"");
            let answered = if at_b {
                near += 1;
                assert_eq!(from.0, "172.16.0.3");
                node.send(b, &ip_frame([2; 6], MAC_B, &reply))
            } else {
                far += 1;
                assert_eq!((from.0.as_str(), to.0.as_str()), (stand_in.as_str(), FAR));
                node.send(port, &ip_frame([2; 6], NODE_MAC, &reply))
            };
            assert_eq!(sent(&answered, port), ((VIP.to_owned(), 80), ("172.16.0.3".to_owned(), own)));
        }
        assert!(near > 0 && far > 0, "{near} {far}");
    }
}
