//! Nodes whose tunnels have one MAC address: packets to the pods of all of them go to one.

use std::collections::BTreeMap;

use tortie_api::net::{IpVersion, MacAddress};
use tortie_dataplane::{LocalNode, NodeState};

/// The nodes that share the MAC address of their tunnel with another one, with the problem.
pub(crate) fn shared_macs(state: &NodeState) -> BTreeMap<String, String> {
    let mut owners: BTreeMap<(IpVersion, MacAddress), &str> = BTreeMap::new();
    let mut problems = BTreeMap::new();
    let own = state.node.iter().flat_map(LocalNode::vteps);
    for vtep in own.chain(state.vteps.values()) {
        let node = vtep.node.as_str();
        let owner = *owners.entry((vtep.version(), vtep.mac)).or_insert(node);
        if owner != node {
            let problem = |other: &str| {
                format!(
                    "its tunnel and that of node {other} have the MAC address {}, so packets to pods of both go to one of them; give each \
                     machine its own /etc/machine-id and each node its own name, and restart flanneld (or Tortie's agent) there",
                    vtep.mac
                )
            };
            problems.insert(owner.to_owned(), problem(node));
            problems.insert(node.to_owned(), problem(owner));
        }
    }
    problems
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_dataplane::Vtep;

    use super::*;

    #[test]
    fn nodes_with_one_mac_address_are_named_with_each_other() {
        let vtep = |node: &str, address: &str, mac: u8| Vtep {
            node: node.to_owned(),
            address: address.parse().unwrap(),
            mac: MacAddress([0x66, 0, 0, 0, 0, mac]),
            parent: address.parse().unwrap(),
            mtu: None,
        };
        for (others, expected) in [
            (vec![vtep("a", "10.0.1.0", 1), vtep("b", "10.0.2.0", 2)], vec![]),
            (vec![vtep("a", "10.0.1.0", 1), vtep("b", "10.0.2.0", 1)], vec![("a", "b"), ("b", "a")]),
            // With that of the node itself.
            (vec![vtep("a", "10.0.1.0", 9)], vec![("a", "own"), ("own", "a")]),
            // Each family has its own link.
            (vec![vtep("a", "10.0.1.0", 1), vtep("b", "fd00::2", 1)], vec![]),
            (vec![vtep("a", "10.0.1.0", 1), vtep("a", "fd00::1", 1)], vec![]),
        ] {
            let node = LocalNode::ipv4("own", "192.0.2.1".parse().unwrap(), Some(vtep("own", "10.0.9.0", 9)));
            let vteps = others.into_iter().map(|vtep| (vtep.key(), vtep)).collect();
            let state = NodeState { node: Some(node), vteps, ..NodeState::default() };
            let found = shared_macs(&state);
            let nodes: Vec<&str> = found.keys().map(String::as_str).collect();
            assert_eq!(nodes, expected.iter().map(|(node, _)| *node).collect::<Vec<_>>());
            for (node, other) in expected {
                let problem = &found[node];
                assert!(problem.contains(&format!("node {other} ")), "{problem}");
            }
        }
    }
}
