//! Blocks of other nodes that should have a route of BGP and have none.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tortie_api::{Key, Kind};
use tortie_bgp::calico::goes_by_bgp;
use tortie_bgp::rib::{Chosen, Source, Why};
use tortie_dataplane::{Condition, Reason};

use super::cluster::Cluster;
use super::why::cause;
use crate::unreachable::some_of;

/// The time for which a block may be without a route: its node has just claimed it, or its session has just begun.
const GRACE: Duration = Duration::from_secs(30);
/// The maximum number of nodes with a condition of their own. If no session is there, all nodes are out of reach.
pub(super) const MOST_NODES: usize = 10;

/// A node out of reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CutOff {
    pub(super) node: String,
    /// Its blocks without a route; never empty.
    pub(super) blocks: Vec<IpNet>,
    /// Why the first of them has no route.
    pub(super) why: String,
}

/// The blocks without routes.
#[derive(Debug, Default)]
pub(super) struct OutOfReach {
    since: BTreeMap<IpNet, Instant>,
    /// The first nodes with blocks that have been without a route for too long.
    named: Vec<CutOff>,
    /// The number of nodes besides.
    more: usize,
}

/// The blocks of other nodes that should have a route of BGP, and to which none of the chosen ones leads. A node that is not ready has a
/// condition in its Node, and routes to it end.
pub(super) fn unrouted(cluster: &Cluster, chosen: &BTreeMap<IpNet, Vec<Chosen>>) -> BTreeMap<IpNet, String> {
    let (pools, settings) = (cluster.pools(), cluster.settings());
    let leads = |net: &IpNet| {
        let mut routes = chosen.get(net).into_iter().flatten();
        routes.any(|route| route.source != Source::Own)
    };
    // A peer may announce a network around the block instead.
    let is_led = |block: &IpNet| {
        (0..=block.prefix_len())
            .rev()
            .any(|length| IpNet::new(block.addr(), length).is_ok_and(|network| leads(&network.trunc())))
    };
    let others = cluster.blocks_of_others();
    let expected = others.filter(|(block, _)| goes_by_bgp(block, &pools, &settings));
    let unrouted = expected.filter(|(block, _)| !is_led(block));
    unrouted.map(|(block, node)| (*block, node.to_owned())).collect()
}

impl OutOfReach {
    /// Takes the blocks without routes now. Returns the nodes to report, each without the reason.
    pub(super) fn due(
        &mut self,
        unrouted: &BTreeMap<IpNet, String>,
        now: Instant,
    ) -> BTreeMap<String, Vec<IpNet>> {
        let former = std::mem::take(&mut self.since);
        let since = |block: &IpNet| former.get(block).copied().unwrap_or(now);
        self.since = unrouted.keys().map(|block| (*block, since(block))).collect();
        let mut nodes: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
        for (block, node) in unrouted {
            let is_due =
                self.since.get(block).is_some_and(|since| now.saturating_duration_since(*since) >= GRACE);
            if is_due {
                nodes.entry(node.clone()).or_default().push(*block);
            }
        }
        nodes
    }

    /// Sets the nodes to report.
    pub(super) fn set(&mut self, named: Vec<CutOff>, more: usize) {
        (self.named, self.more) = (named, more);
    }

    pub(super) fn conditions(&self) -> impl Iterator<Item = Condition> {
        let of_node = |CutOff { node, blocks, why }: &CutOff| {
            let message =
                format!("no route of BGP leads to the pods of node {node} ({}): {why}", some_of(blocks));
            Condition::new(Reason::BlockUnreachable, message).about(Key::global(Kind::Node, node))
        };
        let more = (self.more > 0).then(|| {
            let message = format!("no route of BGP leads to the pods of {} further nodes", self.more);
            Condition::new(Reason::BlockUnreachable, message)
        });
        self.named.iter().map(of_node).chain(more)
    }
}

/// Why a block has no route, with a remedy. `why` is what the speaker knows about it.
pub(super) fn reason(
    block: &IpNet,
    why: Option<&Why>,
    has_peers: bool,
    peer: impl Fn(Source) -> String,
) -> String {
    let received: BTreeSet<String> = why
        .into_iter()
        .flat_map(|why| &why.candidates)
        .map(|route| format!("the route of {} is not used: {}", peer(route.source), cause(route)))
        .collect();
    match (received.is_empty(), has_peers) {
        (false, _) => {
            let received: Vec<String> = received.into_iter().collect();
            format!("{}; change what keeps it out (tortie bgp why {block} says more)", received.join("; "))
        }
        (true, true) => "no peer has told the route; look at the sessions of both nodes (tortie bgp peers), and at the BGPFilters of the \
                         peers between them"
            .to_owned(),
        (true, false) => "this node has no peers, because the mesh is off or it is a route reflector, and no BGPPeer gives it a session; \
                          create one, or turn the mesh on"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests;
