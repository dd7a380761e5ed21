//! Nodes whose tunnels end at one place: they have one MAC address, or the nodes have one address of their own. Packets to the pods of all of
//! them go to one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tortie_api::net::{IpVersion, MacAddress};
use tortie_dataplane::{LocalNode, NodeState, Vtep};

/// The most nodes that a message names.
const MOST_NAMED: usize = 10;

/// What two nodes must not share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Mac(IpVersion, MacAddress),
    Address(IpAddr),
}

/// The problems of ends that the tunnels of several nodes have, each by the first of these nodes.
pub(crate) fn shared_ends(state: &NodeState) -> BTreeMap<String, String> {
    let mut owners: BTreeMap<End, BTreeSet<&str>> = BTreeMap::new();
    let own = state.node.iter().flat_map(LocalNode::vteps);
    for vtep in own.chain(state.vteps.values()) {
        for end in ends(vtep) {
            owners.entry(end).or_default().insert(&vtep.node);
        }
    }
    let shared = owners.into_iter().filter(|(_, nodes)| nodes.len() > 1);
    let mut problems: BTreeMap<String, String> = BTreeMap::new();
    for (end, nodes) in shared {
        let Some(first) = nodes.first() else { continue };
        let text = problems.entry((*first).to_owned()).or_default();
        let before = if text.is_empty() { "" } else { ". " };
        text.push_str(&format!("{before}{}", problem(end, &nodes)));
    }
    problems
}

fn ends(vtep: &Vtep) -> [End; 2] {
    [End::Mac(vtep.version(), vtep.mac), End::Address(vtep.parent)]
}

fn problem(end: End, nodes: &BTreeSet<&str>) -> String {
    let mut named: Vec<&str> = nodes.iter().copied().take(MOST_NAMED).collect();
    let others = nodes.len() - named.len();
    let more = format!("{others} more");
    if others > 0 {
        named.push(&more);
    }
    let named = named.join(", ");
    match end {
        End::Mac(_, mac) => format!(
            "the tunnels of nodes {named} have the MAC address {mac}, so packets to pods of all of them go to one; give each machine its own \
             /etc/machine-id and each node its own name, and restart flanneld (or Tortie's agent) there"
        ),
        End::Address(address) => format!(
            "nodes {named} have the address {address}, so packets to pods of all of them go to one; delete the Nodes whose machines are gone, \
             or give each machine its own address"
        ),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_dataplane::Vtep;

    use super::*;

    #[test]
    fn nodes_with_one_mac_address_or_one_own_address_are_named_together() {
        let vtep = |node: &str, address: &str, mac: u8| Vtep {
            node: node.to_owned(),
            address: address.parse().unwrap(),
            mac: MacAddress([0x66, 0, 0, 0, 0, mac]),
            parent: address.parse().unwrap(),
            mtu: None,
        };
        let at = |vtep: Vtep, parent: &str| Vtep { parent: parent.parse().unwrap(), ..vtep };
        for (others, expected) in [
            (vec![vtep("a", "10.0.1.0", 1), vtep("b", "10.0.2.0", 2)], vec![]),
            (vec![vtep("a", "10.0.1.0", 1), vtep("b", "10.0.2.0", 1)], vec![("a", "nodes a, b have")]),
            // With that of the node itself.
            (vec![vtep("a", "10.0.1.0", 9)], vec![("a", "nodes a, own have")]),
            (
                (10..30).map(|number| vtep(&format!("n{number}"), &format!("10.0.{number}.0"), 1)).collect(),
                vec![("n10", "n18, n19, 10 more have")],
            ),
            (
                vec![at(vtep("a", "10.0.1.0", 1), "192.0.2.7"), at(vtep("b", "10.0.2.0", 2), "192.0.2.7")],
                vec![("a", "nodes a, b have the address 192.0.2.7")],
            ),
            (
                vec![at(vtep("a", "10.0.1.0", 1), "10.0.9.0")],
                vec![("a", "nodes a, own have the address 10.0.9.0")],
            ),
            // Each family has its own link.
            (vec![vtep("a", "10.0.1.0", 1), vtep("b", "fd00::2", 1)], vec![]),
            (vec![vtep("a", "10.0.1.0", 1), vtep("a", "fd00::1", 1)], vec![]),
        ] {
            let node = LocalNode::ipv4("own", "192.0.2.1".parse().unwrap(), Some(vtep("own", "10.0.9.0", 9)));
            let vteps = others.into_iter().map(|vtep| (vtep.key(), vtep)).collect();
            let state = NodeState { node: Some(node), vteps, ..NodeState::default() };
            let found = shared_ends(&state);
            let nodes: Vec<&str> = found.keys().map(String::as_str).collect();
            assert_eq!(nodes, expected.iter().map(|(node, _)| *node).collect::<Vec<_>>());
            for (node, text) in expected {
                assert!(found[node].contains(text), "{}", found[node]);
            }
        }
    }
}
