//! Whoever may annotate a Node gets no packets to other addresses (policy decision 51).

use serde_json::{Value, json};
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_calc::Calc;

/// A stored object.
type Object = (Key, Value);

fn node(name: &str, number: u8, tunnel: &str) -> Object {
    let annotations = json!({
        "projectcalico.org/IPv4Address": format!("192.0.2.{number}/24"),
        "projectcalico.org/IPv4VXLANTunnelAddr": tunnel,
    });
    let spec = json!({"podCIDR": format!("10.99.{number}.0/24")});
    (
        Key::global(Kind::Node, name),
        json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec}),
    )
}

fn pool(cidr: &str) -> Object {
    let spec = json!({"cidr": cidr, "vxlanMode": "Always"});
    (Key::global(Kind::IpPool, "pool"), json!({"metadata": {"name": "pool"}, "spec": spec}))
}

/// A block of four addresses of a node, of which the second one is a node's.
fn block(owner: Option<&str>, second: Option<&str>) -> Object {
    let attribute = second.map(|node| json!({"handle_id": "h", "secondary": {"node": node}}));
    let value = json!({
        "cidr": "10.0.0.0/30", "affinity": owner.map(|owner| format!("host:{owner}")),
        "allocations": [null, attribute.as_ref().map(|_| 0), null, null],
        "unallocated": [0, 2, 3], "attributes": attribute.into_iter().collect::<Vec<_>>(),
    });
    (Key::global(Kind::IpamBlock, "10.0.0.0/30"), value)
}

#[test]
fn a_tunnel_address_counts_if_only_the_node_can_have_it() {
    const POOL: &str = "10.0.0.0/16";
    let table: [(&str, &str, Option<Object>, &str); 11] = [
        ("in a pool, and in no block", "10.0.0.1", None, ""),
        ("in its own block", "10.0.0.1", Some(block(Some("other"), Some("other"))), ""),
        ("in its own block, and not recorded yet", "10.0.0.1", Some(block(Some("other"), None)), ""),
        ("borrowed of a third node", "10.0.0.1", Some(block(Some("third"), Some("other"))), ""),
        ("of a block of nobody", "10.0.0.1", Some(block(None, Some("other"))), ""),
        ("in a block of a third node", "10.0.0.1", Some(block(Some("third"), None)), "of node third"),
        ("a pod of this node", "10.0.0.1", Some(block(Some("NODE"), Some("NODE"))), "of node NODE"),
        ("lent to a third node", "10.0.0.1", Some(block(Some("other"), Some("third"))), "of node third"),
        ("in its own podCIDR", "10.99.2.1", None, ""),
        ("in the podCIDR of a third node", "10.99.3.1", None, "in no IPPool"),
        ("a Service, an API server, or a machine", "10.96.0.1", None, "in no IPPool"),
    ];
    for (case, tunnel, block, expected) in table {
        let objects = [pool(POOL), node("NODE", 1, "10.0.1.1"), node("third", 3, "10.0.3.1")];
        let mut all: Vec<_> = objects.into_iter().chain(block).chain([node("other", 2, tunnel)]).collect();
        for _ in 0..all.len() {
            // In any order, and each object may come last.
            all.rotate_left(1);
            let mut calc = Calc::new("NODE");
            for (key, value) in &all {
                calc.update(key, Some(value));
                calc.flush();
            }
            let has_route = calc.state().vteps.contains_key(&("other".to_owned(), IpVersion::V4));
            let problems: Vec<_> =
                calc.refused_tunnels().map(|(node, problem)| format!("{node}: {problem}")).collect();
            assert_eq!(
                (has_route, problems.len()),
                (expected.is_empty(), usize::from(!has_route)),
                "{case}: {problems:?}"
            );
            assert!(
                problems.iter().all(|problem| problem.starts_with("other: ") && problem.contains(expected)),
                "{case}: {problems:?}"
            );
            // Without the pool, only IPAM's blocks and podCIDRs count.
            calc.update(&pool(POOL).0, None);
            calc.flush();
            let has_other = expected.is_empty() && case != "in a pool, and in no block";
            assert_eq!(
                calc.state().vteps.contains_key(&("other".to_owned(), IpVersion::V4)),
                has_other,
                "{case}"
            );
            calc.update(&node("other", 2, tunnel).0, None);
            calc.flush();
            assert!(calc.refused_tunnels().all(|(node, _)| node == "third"), "{case}");
        }
    }
}

/// The kernel has one destination for each MAC address, whatever the address of the tunnel.
#[test]
fn a_mac_address_is_that_of_one_node() {
    let victims = tortie_calc::vtep_mac("victim", IpVersion::V4).to_string();
    let with_mac = |(key, mut value): Object, mac: &str| {
        value["metadata"]["annotations"]["projectcalico.org/VXLANTunnelMACAddr"] = json!(mac);
        (key, value)
    };
    let other = |mac: &str| with_mac(node("other", 2, "10.0.2.1"), mac);
    let victim = || node("victim", 3, "10.0.3.1");
    const HNS: &str = "00:15:5d:00:00:01";
    let table: [(&str, [Object; 2], [bool; 2]); 8] = [
        ("each has its own", [node("other", 2, "10.0.2.1"), victim()], [true, true]),
        ("one has a MAC address of HNS", [other(HNS), victim()], [true, true]),
        ("one has that of a Linux node", [other(&victims), victim()], [false, true]),
        (
            "that of a Linux node that announces it",
            [other(&victims), with_mac(victim(), &victims)],
            [false, true],
        ),
        (
            "a renamed machine has left a Node behind",
            [with_mac(node("other", 3, "10.0.2.1"), HNS), with_mac(victim(), HNS)],
            [true, true],
        ),
        ("no device has zeros", [other("00:00:00:00:00:00"), victim()], [true, true]),
        ("both have one of HNS", [other(HNS), with_mac(victim(), HNS)], [false, false]),
        (
            "that of this node",
            [other(&tortie_calc::vtep_mac("NODE", IpVersion::V4).to_string()), victim()],
            [false, true],
        ),
    ];
    for (case, nodes, expected) in table {
        let mut all: Vec<_> =
            [pool("10.0.0.0/16"), node("NODE", 1, "10.0.1.1")].into_iter().chain(nodes).collect();
        for _ in 0..all.len() {
            all.rotate_left(1);
            let mut calc = Calc::new("NODE");
            for (key, value) in &all {
                calc.update(key, Some(value));
                calc.flush();
            }
            let has_route =
                |calc: &Calc, name: &str| calc.state().vteps.contains_key(&(name.to_owned(), IpVersion::V4));
            let found = ["other", "victim"].map(|name| has_route(&calc, name));
            assert_eq!(found, expected, "{case}");
            let refused: Vec<_> = calc.refused_tunnels().collect();
            assert_eq!(
                refused.len(),
                expected.iter().filter(|counts| !**counts).count(),
                "{case}: {refused:?}"
            );
            // When the other node goes, or takes its own MAC address, nothing of it is left.
            for last in [Some(node("other", 2, "10.0.2.1").1), None] {
                calc.update(&Key::global(Kind::Node, "other"), last.as_ref());
                calc.flush();
                assert!(has_route(&calc, "victim"), "{case}");
                assert_eq!(has_route(&calc, "other"), last.is_some(), "{case}");
                assert_eq!(calc.refused_tunnels().count(), 0, "{case}");
            }
        }
    }
}

#[test]
fn a_block_with_bits_of_a_host_has_no_route() {
    let mut calc = Calc::new("NODE");
    for (key, value) in [pool("10.0.0.0/16"), node("NODE", 1, "10.0.1.1"), node("other", 2, "10.0.2.1")] {
        calc.update(&key, Some(&value));
    }
    let (_, mut value) = block(Some("other"), None);
    value["cidr"] = json!("10.0.0.1/30");
    calc.update(&Key::global(Kind::IpamBlock, "10.0.0.1/30"), Some(&value));
    calc.flush();
    assert!(
        calc.state().routes.keys().all(|route| !route.to_string().starts_with("10.0.0.")),
        "{:?}",
        calc.state().routes
    );
    assert_eq!(calc.findings().len(), 1);
}
