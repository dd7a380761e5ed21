//! Packets of pods to the outside.

use super::*;

/// A node whose pod a has these policies.
fn with(policies: &Value) -> Node {
    let mut node = Node::new(json!([]));
    let add = json!({"ResourceType": "Policy", "RequestType": "Add", "Settings": {"Policies": policies}});
    node.state.modify_endpoint(node.a, &add.to_string(), &node.config).unwrap();
    node.replan();
    node
}

/// Whether a packet of pod a to this address is given to the node's stack, and whether that translates it.
fn leaves(node: &mut Node, to: &str) -> (bool, bool) {
    let packet = tcp(A, 1000, to, 80, SYN, b"");
    let (sent, plan) = (node.send_from_a(&packet), node.plan());
    let to_node = Output::Frame(Port::Node(node.network), ip_frame(plan.router_mac, MAC_A, &packet));
    let translates = |nat: &OutboundNat| nat.translates(to.parse().unwrap());
    (sent == [to_node], plan.outbound().get(&A.parse().unwrap()).is_some_and(translates))
}

#[test]
fn packets_to_the_outside_leave_by_the_node_and_exceptions_keep_their_address() {
    let nat = |settings: Value| json!({"Type": "OutBoundNAT", "Settings": settings});
    let all = nat(json!({"Exceptions": ["10.244.0.0/16", "10.96.0.0/12"]}));
    let outside = "198.51.100.7";
    for (policies, to, expected) in [
        (json!([]), outside, (true, false)),
        (json!([all]), outside, (true, true)),
        (json!([all]), "10.96.0.10", (true, false)),
        (json!([all]), FAR, (false, false)),
        (json!([all]), B, (false, false)),
        (json!([all]), "224.0.0.251", (false, true)),
        (json!([all]), "255.255.255.255", (false, true)),
        // A pool that is missing in the exceptions.
        (json!([nat(json!({"Exceptions": ["10.96.0.0/12"]}))]), FAR, (true, true)),
        (json!([nat(json!({}))]), B, (true, true)),
        // Two policies, as win-overlay writes them for ipMasq.
        (
            json!([
                nat(json!({"Exceptions": ["10.244.0.0/16"]})),
                nat(json!({"Exceptions": ["198.51.100.0/24"]}))
            ]),
            outside,
            (true, false),
        ),
        // loopbackDSR
        (json!([nat(json!({"Destinations": [A]}))]), outside, (true, false)),
        (json!([nat(json!({"Destinations": [B]}))]), B, (true, true)),
        (
            json!([all, {"Type": "SDNRoute", "Settings": {"DestinationPrefix": "10.96.0.0/12", "NeedEncap": true}}]),
            "10.96.0.10",
            (false, false),
        ),
        (
            json!([{"Type": "SDNRoute", "Settings": {"DestinationPrefix": "10.96.0.0/12", "NextHop": GATEWAY}}]),
            "10.96.0.10",
            (true, false),
        ),
        // IPv6 only.
        (json!([nat(json!({"Exceptions": [], "Flags": 2}))]), outside, (true, false)),
    ] {
        assert_eq!(leaves(&mut with(&policies), to), expected, "{policies} {to}");
    }
}

#[test]
fn what_a_pod_may_not_send_does_not_leave() {
    let block = acl("Out", "Block", json!({"RemoteAddresses": "198.51.100.0/24"}));
    let allow = acl("Out", "Allow", json!({"Priority": 2000}));
    let mut node = with(&json!([block, allow]));
    assert!(!leaves(&mut node, "198.51.100.7").0);
    assert!(leaves(&mut node, "203.0.113.7").0);
}

/// The node's stack has translated the answer back.
#[test]
fn an_answer_from_the_outside_comes_by_the_node_and_belongs_to_the_flow() {
    let nat = json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": ["10.244.0.0/16"]}});
    let mut node = with(&json!([nat, acl("In", "Block", json!({})), acl("Out", "Allow", json!({}))]));
    let back = tcp("198.51.100.7", 80, A, 1000, SYN | ACK, b"");
    let frame = ip_frame(MAC_A, node.plan().router_mac, &back);
    let port = Port::Node(node.network);
    assert!(
        !node.send(port, &frame).contains(&Output::Frame(Port::Pod(node.a), frame.clone())),
        "nobody asked"
    );
    assert!(leaves(&mut node, "198.51.100.7").0);
    assert_eq!(node.send(port, &frame), [Output::Frame(Port::Pod(node.a), frame.clone())]);
}
