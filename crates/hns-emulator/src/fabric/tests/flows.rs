//! What passes because of earlier packets, and what ends that.

use super::*;

#[test]
fn acls_apply_at_the_port_for_every_source_and_replies_pass() {
    let closed = json!([acl(
        "In",
        "Allow",
        json!({"Protocols": "6", "LocalPorts": "80",
        "RemoteAddresses": "10.244.9.9"})
    )]);
    let mut node = Node::new(closed);
    let (b, leg, router) = (node.b, Port::Node(node.network), node.plan().router_mac);
    assert_eq!(node.send_from_a(&tcp(A, 1000, B, 80, SYN, b"")), [], "another pod of the node");
    let probe = tcp(GATEWAY, 1000, B, 80, SYN, b"");
    assert_eq!(node.send(leg, &ip_frame(MAC_B, router, &probe)), [], "the node itself");
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &tcp("10.244.9.8", 1000, B, 80, SYN, b"")), []);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &tcp(FAR, 1000, B, 81, SYN, b"")), []);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &tcp(FAR, 1000, B, 80, SYN, b"")).len(), 1);

    // What b itself began may be answered while the flow lives.
    let out = ip_frame(router, MAC_B, &tcp(B, 2000, FAR, 443, SYN, b""));
    assert_eq!(node.send(Port::Pod(b), &out).len(), 1);
    let answer = tcp(FAR, 443, B, 2000, ACK, b"");
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &answer).len(), 1);
    let new = tcp(FAR, 443, B, 2000, SYN, b"");
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &new), [], "a new connection over the same ports");
    let out = ip_frame(router, MAC_B, &tcp(B, 2001, FAR, 443, SYN, b""));
    assert_eq!(node.send(Port::Pod(b), &out).len(), 1);
    node.now += Duration::from_secs(3601);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &tcp(FAR, 443, B, 2001, ACK, b"")), [], "long ago");
}

#[test]
fn only_icmp_errors_about_existing_flows_pass() {
    let mut node = Node::new(json!([acl("In", "Block", json!({}))]));
    let (b, router) = (node.b, node.plan().router_mac);
    let sent = tcp(B, 2000, FAR, 443, SYN, b"");
    assert_eq!(node.send(Port::Pod(b), &ip_frame(router, MAC_B, &sent)).len(), 1);
    let error = |about: &[u8]| {
        let payload = [&[3, 4, 0, 0, 0, 0, 5, 0][..], &about[..28]].concat();
        packet(1, FAR, B, &payload)
    };
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &error(&sent)).len(), 1);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &error(&tcp(B, 2001, FAR, 443, SYN, b""))), []);
    let ping = packet(1, FAR, B, &[8, 0, 0, 0, 0, 7, 0, 1]);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &ping), []);
    let ask = ip_frame(router, MAC_B, &packet(1, B, FAR, &[8, 0, 0, 0, 0, 7, 0, 1]));
    assert_eq!(node.send(Port::Pod(b), &ask).len(), 1);
    let answer = packet(1, FAR, B, &[0, 0, 0, 0, 0, 7, 0, 1]);
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &answer).len(), 1);
}

#[test]
fn icmp_errors_are_judged_if_hns_does_not_relate_them() {
    for (acls, passes) in [(json!([acl("In", "Block", json!({}))]), false), (json!([]), true)] {
        let mut node = Node::with(acls, |config| config.related_icmp_passes = false);
        let (b, router) = (node.b, node.plan().router_mac);
        let sent = tcp(B, 2000, FAR, 443, SYN, b"");
        assert_eq!(node.send(Port::Pod(b), &ip_frame(router, MAC_B, &sent)).len(), 1);
        let error = packet(1, FAR, B, &[&[3, 4, 0, 0, 0, 0, 5, 0][..], &sent[..28]].concat());
        let arrived = node.by_tunnel(OTHER_NODE, 4096, &error).len();
        assert_eq!(arrived, usize::from(passes), "as other ICMP");
    }
}

/// The sequence numbers that a kernel accepts: those that each end expects next.
#[test]
fn a_reset_is_sent_once_to_both_ends_and_ends_the_flow() {
    let mut node = Node::new(json!([]));
    let (a, b) = (node.a, node.b);
    let segment = |from, from_port, to, to_port, flags, sequence: u32, acknowledges: u32, data: &[u8]| {
        let mut segment = tcp(from, from_port, to, to_port, flags, data);
        segment[24..28].copy_from_slice(&sequence.to_be_bytes());
        segment[28..32].copy_from_slice(&acknowledges.to_be_bytes());
        finish(&mut segment);
        segment
    };
    let from_b = |node: &mut Node, packet: &[u8]| node.send(Port::Pod(b), &ip_frame(MAC_A, MAC_B, packet));
    node.send_from_a(&segment(A, 1000, B, 80, SYN, u32::MAX, 0, b""));
    from_b(&mut node, &segment(B, 80, A, 1000, SYN | ACK, 500, 0, b""));
    node.send_from_a(&segment(A, 1000, B, 80, ACK, 0, 501, b"hello"));
    // A second connection of which only the first segment was seen.
    node.send_from_a(&segment(A, 1001, B, 80, SYN, u32::MAX, 0, b""));
    from_b(&mut node, &segment(B, 80, A, 1001, SYN | ACK, 500, 0, b""));
    let udp = packet(17, A, B, &[0, 53, 0, 53, 0, 8, 0, 0]);
    node.send_from_a(&udp);

    let block = json!({"ResourceType": "Policy", "RequestType": "Add", "Settings": {"Policies": [
        acl("In", "Allow", json!({"Protocols": "6,17"})), acl("Out", "Allow", json!({}))]}});
    node.state.modify_endpoint(b, &block.to_string(), &node.config).unwrap();
    // b expects the number after a's data, a the number after b's SYN.
    let to_b = segment(A, 1000, B, 80, 0x04, 5, 0, b"");
    let to_a = segment(B, 80, A, 1000, 0x04, 501, 0, b"");
    let reported = node.replan();
    let [Output::Frame(first, to_b_sent), Output::Frame(second, to_a_sent), young @ ..] = &reported[..]
    else {
        panic!("{reported:?}")
    };
    assert_eq!((*first, *second), (Port::Pod(b), Port::Pod(a)));
    let same = |sent: &[u8], expected: &[u8]| {
        // Window and identification do not matter.
        assert_eq!(sent[26..48], expected[12..34], "addresses, ports, numbers, flags");
        assert!(is_right(&sent[14..]));
    };
    same(to_b_sent, &to_b);
    same(to_a_sent, &to_a);
    let [Output::Frame(_, to_b_sent), Output::Frame(_, to_a_sent)] = young else { panic!("{young:?}") };
    same(to_b_sent, &segment(A, 1001, B, 80, 0x04, 0, 0, b""));
    same(to_a_sent, &segment(B, 80, A, 1001, 0x04, 501, 0, b""));
    assert_eq!(node.replan(), [], "once");

    // Another packet gets another reset, a reset gets no answer, and a new connection is accepted.
    let late = node.send_from_a(&segment(A, 1000, B, 80, ACK, 5, 501, b"more"));
    let [Output::Frame(Port::Pod(to), frame)] = &late[..] else { panic!("{late:?}") };
    assert_eq!(*to, a);
    same(frame, &to_a);
    assert_eq!(node.send_from_a(&to_b), []);
    assert_eq!(node.send_from_a(&segment(A, 1000, B, 80, SYN, 77, 0, b"")).len(), 1);
    assert_eq!(node.send_from_a(&udp).len(), 1, "forgotten, judged again, and allowed");
}

#[test]
fn flows_outlive_a_new_plan_but_not_their_endpoint() {
    let mut node = Node::new(json!([acl("In", "Block", json!({}))]));
    let (b, router) = (node.b, node.plan().router_mac);
    let answer = tcp(FAR, 443, B, 2000, ACK, b"");
    node.send(Port::Pod(b), &ip_frame(router, MAC_B, &tcp(B, 2000, FAR, 443, SYN, b"")));
    node.replan();
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &answer).len(), 1);
    let document = serde_json::to_string(&*node.state.endpoints[&b]).unwrap();
    let namespace = node.state.endpoints[&b].host_compute_namespace;
    node.state.delete_endpoint(b).unwrap();
    node.replan();
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &answer), []);
    // The same endpoint again: it does not inherit the old flows.
    let mut again: Value = serde_json::from_str(&document).unwrap();
    again.as_object_mut().unwrap().remove("HostComputeNamespace");
    node.state.create_endpoint(node.network, b, &again.to_string(), &node.config).unwrap();
    let attach = json!({"ResourceType": "Endpoint", "RequestType": "Add", "Settings": {"EndpointId": b}});
    node.state.modify_namespace(namespace, &attach.to_string(), &node.config).unwrap();
    node.replan();
    assert_eq!(node.by_tunnel(OTHER_NODE, 4096, &answer), []);
}
