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
