//! Blocks of other nodes to which this node cannot route although it should, and why.

use std::collections::BTreeMap;

use ipnet::IpNet;
use tortie_api::net::IpVersion;

use super::{Network, put};

/// Why no route leads to a block or a borrowed address of another node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoRoute {
    /// The other Node has no own address of the family.
    NoAddress(IpVersion),
    /// This Node has none.
    NoOwnAddress(IpVersion),
    /// The other Node announces no tunnel address of the family.
    NoTunnelAddress(IpVersion),
    /// The tunnel address of the other Node does not count, for this reason.
    TunnelRefused(String),
    /// The pool has direct routes, and the two nodes are not in one network, or one of them takes packets of pods in an overlay only.
    NotInNetwork,
    /// The pool has IPIP, which Windows does not have.
    IpipToWindows,
    /// The pool has IPIP, and FelixConfiguration says that this node has none (`ipipEnabled`).
    IpipDisabled(String),
}

impl NoRoute {
    /// Returns whether it is so for a moment while a node joins: it has a block before its agent has announced everything.
    #[must_use]
    pub fn is_usual_at_first(&self) -> bool {
        match self {
            Self::NoAddress(_) | Self::NoOwnAddress(_) | Self::NoTunnelAddress(_) => true,
            Self::TunnelRefused(_) | Self::NotInNetwork | Self::IpipToWindows | Self::IpipDisabled(_) => {
                false
            }
        }
    }
}

/// The blocks and borrowed addresses of a node to which no route leads, by cause.
pub type Unrouted<'a> = BTreeMap<&'a NoRoute, Vec<IpNet>>;

impl Network {
    /// The nodes to whose pods no route leads, with their blocks and borrowed addresses.
    pub(crate) fn without_route(&self) -> BTreeMap<&str, Unrouted<'_>> {
        let mut nodes: BTreeMap<&str, Unrouted<'_>> = BTreeMap::new();
        for (net, (node, cause)) in &self.without_route {
            nodes.entry(node).or_default().entry(cause).or_default().push(*net);
        }
        nodes
    }

    /// Notes why a block or borrowed address has no route, if it should have one.
    pub(super) fn note(&mut self, net: IpNet, cause: Option<NoRoute>) {
        // A Node that does not exist runs no pods. Its blocks are released later.
        let node = self.node_of(&net).filter(|node| self.nodes.contains_key(*node));
        let noted = node.map(str::to_owned).zip(cause);
        put(&mut self.without_route, net, noted);
    }

    /// The node to which packets to a block or borrowed address go.
    fn node_of(&self, net: &IpNet) -> Option<&str> {
        self.borrowers.get(net).or_else(|| self.blocks.get(net)).map(String::as_str)
    }

    /// Why no tunnel leads to another node, if none does.
    pub(super) fn without_tunnel(&self, name: &str, version: IpVersion) -> Option<NoRoute> {
        let node = self.nodes.get(name)?;
        if node.own_address(version).is_none() {
            return Some(NoRoute::NoAddress(version));
        }
        if node.vxlan_address(version).is_none() {
            return Some(NoRoute::NoTunnelAddress(version));
        }
        let refused = self.refused_tunnels.get(&(name.to_owned(), version))?;
        Some(NoRoute::TunnelRefused(refused.clone()))
    }

    /// Why no direct route leads to another node, if none does.
    pub(super) fn without_neighbour(&self, name: &str, local: &str, version: IpVersion) -> NoRoute {
        let has_address =
            |name: &str| self.nodes.get(name).is_some_and(|it| it.own_address(version).is_some());
        match (has_address(name), has_address(local)) {
            (false, _) => NoRoute::NoAddress(version),
            (true, false) => NoRoute::NoOwnAddress(version),
            (true, true) => NoRoute::NotInNetwork,
        }
    }
}
