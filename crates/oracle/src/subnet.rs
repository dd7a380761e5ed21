//! Which nodes reach each other's pods without encapsulation.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ipnet::IpNet;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;

/// Where a node is in the network between nodes. Nodes with equal subnets are near the same nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subnet([OfFamily; 2]);

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct OfFamily {
    /// The network of the node's own address, if it has another node's address.
    network: Option<IpNet>,
    /// The networks of nodes that have its address and another node's.
    within: BTreeSet<IpNet>,
}

impl Subnet {
    /// Whether packets of pods in a CrossSubnet pool travel between nodes of the two subnets as they are: each node has the other
    /// one in its network.
    #[must_use]
    pub fn is_near(&self, other: &Self, family: IpVersion) -> bool {
        let has = |one: &Self, other: &Self| {
            let network = one.of(family).and_then(|one| one.network);
            network
                .is_some_and(|network| other.of(family).is_some_and(|other| other.within.contains(&network)))
        };
        has(self, other) && has(other, self)
    }

    fn of(&self, family: IpVersion) -> Option<&OfFamily> {
        self.0.get(usize::from(family == IpVersion::V6))
    }
}

/// The subnet of each node. A Windows node with an overlay network, which always encapsulates, is near no other.
pub(super) fn subnets<'a>(nodes: impl Iterator<Item = (&'a str, &'a Node)>) -> BTreeMap<String, Subnet> {
    let nodes: Vec<(&str, &Node)> = nodes.collect();
    let mut subnets: BTreeMap<String, Subnet> =
        nodes.iter().map(|(name, _)| ((*name).to_owned(), Subnet::default())).collect();
    let plain: Vec<(&str, &Node)> =
        nodes.into_iter().filter(|(_, node)| node.takes_plain_packets()).collect();
    for (index, family) in IpVersion::ALL.into_iter().enumerate() {
        let networks: BTreeSet<IpNet> =
            plain.iter().filter_map(|(_, node)| node.own_network(family)).collect();
        let lengths: BTreeSet<u8> = networks.iter().map(IpNet::prefix_len).collect();
        let within = |node: &Node| -> BTreeSet<IpNet> {
            let Some(address) = node.own_address(family) else { return BTreeSet::new() };
            let around = lengths.iter().filter_map(|length| Some(IpNet::new(address, *length).ok()?.trunc()));
            around.filter(|network| networks.contains(network)).collect()
        };
        let mut count: HashMap<IpNet, usize> = HashMap::new();
        for (_, node) in &plain {
            within(node).into_iter().for_each(|network| *count.entry(network).or_default() += 1);
        }
        let is_shared = |network: &IpNet| count.get(network).is_some_and(|count| *count > 1);
        for (name, node) in &plain {
            let of_family = OfFamily {
                network: node.own_network(family).filter(is_shared),
                within: within(node).into_iter().filter(is_shared).collect(),
            };
            if let Some(slot) = subnets.get_mut(*name).and_then(|subnet| subnet.0.get_mut(index)) {
                *slot = of_family;
            }
        }
    }
    subnets
}
