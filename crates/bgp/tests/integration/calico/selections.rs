//! BGPPeers that select nothing, and nodes without a session.

use serde_json::{Value, json};

use super::{Cluster, derived, named, no_mesh, node, plain, reflector};

/// The problems that the node reports in a cluster with these nodes and BGPPeers.
fn problems(name: &str, nodes: &[Value], mesh: bool, peers: &[Value]) -> Vec<String> {
    let configurations = if mesh { Vec::new() } else { vec![no_mesh(json!({}))] };
    let cluster =
        Cluster { nodes: nodes.to_vec(), configurations, peers: peers.to_vec(), ..Cluster::default() };
    derived(&cluster, name).problems.iter().map(ToString::to_string).collect()
}

/// A Windows node with an overlay network, which runs no speaker.
fn windows(number: u8) -> Value {
    node(number, json!({"kubernetes.io/os": "windows", "rr": "yes"}), json!({}))
}

#[test]
fn a_peer_that_selects_nothing_is_named_with_the_remedy() {
    let address = json!({"metadata": {"name": "bare"}});
    let nodes = [plain(1), reflector(2, "1.1.1.1"), windows(3), address];
    let external = |more: Value| {
        let mut spec = json!({"peerIP": "192.0.2.1", "asNumber": 64500});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    for (spec, expected) in [
        (external(json!({})), ""),
        (external(json!({"node": "n1"})), ""),
        (external(json!({"nodeSelector": "all()"})), ""),
        (external(json!({"nodeSelector": "rr == 'yes'"})), ""),
        (json!({"peerSelector": "rr == 'yes'"}), ""),
        (json!({"nodeSelector": "!has(rr)", "peerSelector": "rr == 'yes'"}), ""),
        (json!({"nodeSelector": "rr == 'yes'", "peerSelector": "!has(rr)"}), ""),
        (external(json!({"node": "nosuchnode"})), "node nosuchnode does not exist"),
        (external(json!({"node": "bare"})), "node bare runs no BGP"),
        (external(json!({"node": "n3"})), "node n3 runs no BGP"),
        (external(json!({"nodeSelector": "rack == 'typo'"})), "its nodeSelector selects no node"),
        (
            external(json!({"nodeSelector": "kubernetes.io/os == 'windows'"})),
            "its nodeSelector selects no node",
        ),
        (
            json!({"nodeSelector": "all()", "peerSelector": "role == 'typo'"}),
            "its peerSelector selects no other node",
        ),
        (json!({"node": "nosuchnode", "peerSelector": "rr == 'yes'"}), "node nosuchnode does not exist"),
        // The only reflector has none but itself.
        (json!({"node": "n2", "peerSelector": "rr == 'yes'"}), "its peerSelector selects no other node"),
    ] {
        let peers = [named("p", spec.clone()), named("good", json!({"peerSelector": "all()"}))];
        let told: Vec<String> = problems("n1", &nodes, true, &peers)
            .into_iter()
            .filter(|it| it.starts_with("BGPPeer p: "))
            .collect();
        assert_eq!(told.len(), usize::from(!expected.is_empty()), "{spec}: {told:?}");
        for problem in &told {
            assert!(
                problem.contains(expected) && problem.contains("or delete the BGPPeer"),
                "{spec}: {problem}"
            );
        }
        let others = problems("n2", &nodes, true, &peers);
        assert!(
            !others.iter().any(|it| it.contains("so there is no session")),
            "one node tells it: {others:?}"
        );
    }
}

#[test]
fn a_node_that_nothing_gives_a_session_says_so() {
    let all = named("p", json!({"nodeSelector": "all()", "peerSelector": "rr == 'yes'"}));
    let typo = named("p", json!({"nodeSelector": "all()", "peerSelector": "rr == 'typo'"}));
    let first = named("p", json!({"node": "n1", "peerIP": "192.0.2.1", "asNumber": 64500}));
    let mesh =
        "BGPConfiguration default: nodeToNodeMeshEnabled is false, and no BGPPeer gives this node a session";
    let cluster =
        "Node n9: it is a route reflector (cluster 1.1.1.1), which is not in the mesh, and no BGPPeer";
    for (name, nodes, has_mesh, peers, expected) in [
        ("n1", vec![plain(1), plain(2)], true, vec![], ""),
        ("n1", vec![plain(1), plain(2)], false, vec![], mesh),
        ("n1", vec![plain(1)], false, vec![], ""),
        ("n1", vec![plain(1), windows(2)], false, vec![], ""),
        ("n1", vec![plain(1), reflector(9, "1.1.1.1")], false, vec![all.clone()], ""),
        ("n9", vec![plain(1), reflector(9, "1.1.1.1")], false, vec![all.clone()], ""),
        ("n1", vec![plain(1), reflector(9, "1.1.1.1")], false, vec![typo], mesh),
        ("n1", vec![plain(1), plain(2)], false, vec![first.clone()], ""),
        ("n2", vec![plain(1), plain(2)], false, vec![first], mesh),
        ("n9", vec![plain(1), reflector(9, "1.1.1.1")], true, vec![], cluster),
        ("n9", vec![plain(1), reflector(9, "1.1.1.1")], true, vec![all], ""),
    ] {
        let told = problems(name, &nodes, has_mesh, &peers);
        let told: Vec<&String> = told.iter().filter(|it| it.contains("gives this node a session")).collect();
        assert_eq!(told.len(), usize::from(!expected.is_empty()), "{name} {nodes:?} {peers:?}: {told:?}");
        assert!(
            told.iter().all(|it| it.starts_with(expected) && it.contains("create a BGPPeer")),
            "{told:?}"
        );
    }
}
