//! Which blocks count, when, and what is said about them.

use std::sync::Arc;

use serde_json::{Value, json};
use tortie_api::Position;
use tortie_api::report::ObjectRef;
use tortie_bgp::rib::{CandidateRoute, OwnRoute, PeerId, RouteOutcome};
use tortie_store::{Change, Stored, Version};

use super::*;

const PEER: Source = Source::Peer(PeerId(1));

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn put(cluster: &mut Cluster, kind: Kind, name: &str, value: Value) {
    let (key, version) = (Key::global(kind, name), Version::new("1"));
    cluster.apply(Change::Put(Stored { key, value, version, position: Position::default() }));
}

/// Nodes, pools and blocks: of each way to other nodes, of this node, of a node that is not ready, and of one that does not exist.
fn cluster(third: &str) -> Cluster {
    let mut cluster = Cluster::new("one");
    for (name, ready) in [("one", "True"), ("two", "True"), ("three", third)] {
        let status = json!({"conditions": [{"type": "Ready", "status": ready}]});
        put(&mut cluster, Kind::Node, name, json!({"metadata": {"name": name}, "status": status}));
    }
    for (name, spec) in [
        ("plain", json!({"cidr": "10.1.0.0/16"})),
        ("overlay", json!({"cidr": "10.2.0.0/16", "vxlanMode": "Always"})),
        ("ipip", json!({"cidr": "10.3.0.0/16", "ipipMode": "Always"})),
        ("silent", json!({"cidr": "10.4.0.0/16", "disableBGPExport": true})),
    ] {
        put(&mut cluster, Kind::IpPool, name, json!({"metadata": {"name": name}, "spec": spec}));
    }
    for (cidr, owner) in [
        ("10.1.0.0/26", "two"),
        ("10.1.0.64/26", "one"),
        ("10.1.0.128/26", "three"),
        ("10.1.0.192/26", "gone"),
        ("10.2.0.0/26", "two"),
        ("10.3.0.0/26", "two"),
        ("10.4.0.0/26", "two"),
        ("10.9.0.0/26", "two"),
    ] {
        put(&mut cluster, Kind::IpamBlock, cidr, json!({"cidr": cidr, "affinity": format!("host:{owner}")}));
    }
    cluster
}

#[test]
fn blocks_count_that_travel_by_bgp_and_to_which_no_chosen_route_leads() {
    let of_two = ("10.1.0.0/26", "two");
    for (third, chosen, expected) in [
        ("Unknown", None, vec![of_two]),
        ("False", None, vec![of_two]),
        ("True", None, vec![of_two, ("10.1.0.128/26", "three")]),
        ("Unknown", Some(("10.1.0.0/26", PEER)), vec![]),
        ("Unknown", Some(("10.1.0.0/26", Source::Own)), vec![of_two]),
        ("Unknown", Some(("10.1.0.0/16", PEER)), vec![]),
        ("Unknown", Some(("10.1.0.0/16", Source::Own)), vec![of_two]),
        ("Unknown", Some(("0.0.0.0/0", PEER)), vec![]),
        ("Unknown", Some(("10.1.0.0/27", PEER)), vec![of_two]),
        ("Unknown", Some(("10.1.0.128/26", PEER)), vec![of_two]),
    ] {
        let route = |source| Chosen { source, attributes: Arc::clone(&OwnRoute::here().attributes) };
        let routes: BTreeMap<_, _> =
            chosen.iter().map(|(prefix, source)| (net(prefix), vec![route(*source)])).collect();
        let found = unrouted(&cluster(third), &routes);
        let expected: BTreeMap<IpNet, String> =
            expected.iter().map(|(block, node)| (net(block), (*node).to_owned())).collect();
        assert_eq!(found, expected, "{third} {chosen:?}");
    }
}

/// Somebody else has the routes.
#[test]
fn routes_that_are_left_to_others_are_not_missed() {
    let mut cluster = cluster("True");
    let spec = json!({"programClusterRoutes": "Disabled"});
    put(
        &mut cluster,
        Kind::BgpConfiguration,
        "default",
        json!({"metadata": {"name": "default"}, "spec": spec}),
    );
    assert_eq!(unrouted(&cluster, &BTreeMap::new()), BTreeMap::new());
}

#[test]
fn a_block_is_due_after_a_while() {
    let (mut known, start) = (OutOfReach::default(), Instant::now());
    let [a, b] = [net("10.1.0.0/26"), net("10.1.1.0/26")];
    for (second, blocks, expected) in [
        (0, vec![a], vec![]),
        (29, vec![a, b], vec![]),
        (30, vec![a, b], vec![a]),
        (59, vec![a, b], vec![a, b]),
        (60, vec![b], vec![b]),
        (61, vec![a, b], vec![b]),
        (91, vec![a], vec![a]),
        (92, vec![], vec![]),
    ] {
        let unrouted = blocks.iter().map(|block| (*block, "two".to_owned())).collect();
        let due = known.due(&unrouted, start + Duration::from_secs(second));
        assert_eq!(due.into_values().flatten().collect::<Vec<_>>(), expected, "{second}");
    }
}

#[test]
fn nodes_are_named_with_the_reason_and_further_ones_counted() {
    let mut known = OutOfReach::default();
    let cut_off = |number: u8| CutOff {
        node: format!("n{number}"),
        blocks: (0..number).map(|third| net(&format!("10.1.{third}.0/26"))).collect(),
        why: "no session".to_owned(),
    };
    known.set(vec![cut_off(1), cut_off(7)], 3);
    let told: Vec<Condition> = known.conditions().collect();
    let messages: Vec<&str> = told.iter().map(|it| it.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "no route of BGP leads to the pods of node n1 (10.1.0.0/26): no session",
            "no route of BGP leads to the pods of node n7 (10.1.0.0/26, 10.1.1.0/26, 10.1.2.0/26, 10.1.3.0/26, 10.1.4.0/26, 2 more): no \
             session",
            "no route of BGP leads to the pods of 3 further nodes",
        ]
    );
    assert!(told.iter().all(|it| it.reason == Reason::BlockUnreachable));
    assert_eq!(told[0].about, [ObjectRef::from(&Key::global(Kind::Node, "n1"))]);
}

#[test]
fn the_reason_names_the_filter_the_next_hop_or_the_missing_session() {
    let block = net("10.1.0.0/26");
    let why = |outcome| {
        let attributes = Arc::clone(&OwnRoute::here().attributes);
        let candidates = vec![CandidateRoute { source: PEER, attributes, stale: false, outcome }];
        Why { candidates, told: Vec::new() }
    };
    for (why, has_peers, expected) in [
        (
            Some(why(RouteOutcome::Rejected(Some("BGPFilter rej".into())))),
            true,
            "peer X is not used: rejected on import: BGPFilter rej",
        ),
        (Some(why(RouteOutcome::Rejected(None))), true, "no import rule accepts it"),
        (Some(why(RouteOutcome::NextHopUnreachable)), true, "the node has no route to the next hop"),
        (None, true, "no peer has told the route"),
        (None, false, "this node has no peers"),
    ] {
        let said = reason(&block, why.as_ref(), has_peers, |_| "peer X".to_owned());
        assert!(said.contains(expected), "{said}");
        assert!(why.is_none() || said.contains("tortie bgp why 10.1.0.0/26"), "{said}");
    }
}
