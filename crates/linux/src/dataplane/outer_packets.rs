//! The chains for the overlay's own packets between nodes, which connection tracking ignores.
//!
//! The kernel makes the outer source port of a hash of the inner flow, so each inner flow would have an entry of its own in the table
//! of connections of both nodes, in both directions, besides the inner flow's own entry. Felix has the same rules
//! (`felix/rules/static.go`). Only packets between this node's own address and addresses of other nodes are concerned, so nothing
//! changes for flows of pods.

use ipnet::IpNet;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{BaseChain, Chain, ChainKind, Expr, Hook, Rule};

use super::host_skeleton::RAW;
use super::packet_kinds::{vxlan, vxlan_peers_of};
use super::packet_test::{PacketEnd, Test, in_set, load_address};
use super::sets::{Family, ranges};

const OUTER_IN: &str = "outer-in";
const OUTER_OUT: &str = "outer-out";

/// The chains; none without an overlay.
pub(super) fn chains(node: &NodeState) -> Vec<(String, Chain)> {
    let chain = |name: &str, hook, own| {
        let base = BaseChain { kind: ChainKind::Filter, hook, priority: RAW, drop: false };
        (name.to_owned(), Chain { base: Some(base), rules: untracked(node, own) })
    };
    let all = [
        chain(OUTER_IN, Hook::Prerouting, PacketEnd::Destination),
        chain(OUTER_OUT, Hook::Output, PacketEnd::Source),
    ];
    all.into_iter().filter(|(_, chain)| !chain.rules.is_empty()).collect()
}

/// Whether a chain is one of these.
pub(super) fn is_chain(name: &str) -> bool {
    [OUTER_IN, OUTER_OUT].contains(&name)
}

/// One rule for each overlay. `own` is the side of this node.
fn untracked(node: &NodeState, own: PacketEnd) -> Vec<Rule> {
    let other = match own {
        PacketEnd::Source => PacketEnd::Destination,
        PacketEnd::Destination => PacketEnd::Source,
    };
    let vteps = node.node.iter().flat_map(|node| node.vteps());
    let rule = |vtep: &tortie_dataplane::Vtep| {
        let family = Family::of(vtep.parent);
        let is_own =
            Test::Address { side: own, family, ranges: ranges([IpNet::from(vtep.parent)]), invert: false };
        let mut exprs = vxlan(node);
        exprs.extend(Test::Family(family).exprs());
        exprs.extend(is_own.exprs());
        exprs.extend([load_address(other, family), in_set(vxlan_peers_of(family), false), Expr::Notrack]);
        Rule::new(exprs, "VXLAN between nodes")
    };
    vteps.map(rule).collect()
}
