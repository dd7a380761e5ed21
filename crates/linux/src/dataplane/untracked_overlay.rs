//! The overlay's own packets bypass connection tracking, as in Calico (`felix/rules/static.go`).
//!
//! The kernel chooses the source port of a VXLAN packet by the inner flow. So each inner flow would have a connection on both
//! nodes and in both directions. No answer ever belongs to it, because the other node's packets have other ports.
//!
//! Only packets between own and other nodes' tunnel ends are concerned. Packets of pods are not: pods have other addresses, and
//! a packet with a forged one is dropped later, with a connection or without (`skeleton`).

use tortie_dataplane::{NodeState, Vtep};
use tortie_kernel::nftables::{BaseChain, Chain, ChainKind, CmpOp, Expr, Header, Hook, Rule, Verdict};

use super::packet_kinds::{overlays, vxlan, vxlan_peers_of, vxlan_port};
use super::packet_test::{PacketEnd, Test, exprs, in_set, load_address};
use super::sets::{Family, ranges};

const FROM_NODES: &str = "vxlan-from-nodes";
const TO_NODES: &str = "vxlan-to-nodes";

/// Before connection tracking (`NF_IP_PRI_RAW`), and after fragments were put together.
pub(super) const RAW: i32 = -300;

/// The chains; none without an overlay.
pub(super) fn chains(node: &NodeState) -> Vec<(String, Chain)> {
    let vteps: Vec<&Vtep> = node.node.iter().flat_map(|node| node.vteps()).collect();
    if vteps.is_empty() {
        return Vec::new();
    }
    let sides = [
        (FROM_NODES, Hook::Prerouting, PacketEnd::Destination, PacketEnd::Source),
        (TO_NODES, Hook::Output, PacketEnd::Source, PacketEnd::Destination),
    ];
    let chain = |(name, hook, own, other): (&str, _, _, _)| {
        let base = BaseChain { kind: ChainKind::Filter, hook, priority: RAW, drop: false };
        let rules = vteps.iter().map(|vtep| no_connection(node, vtep, own, other)).collect();
        (name.to_owned(), Chain { base: Some(base), rules })
    };
    sides.map(chain).into()
}

/// Whether a chain is one of these.
pub(super) fn is_chain(name: &str) -> bool {
    [FROM_NODES, TO_NODES].contains(&name)
}

fn no_connection(node: &NodeState, vtep: &Vtep, own: PacketEnd, other: PacketEnd) -> Rule {
    let family = Family::of(vtep.parent);
    let of_node = Test::Address { side: own, family, ranges: ranges([vtep.parent.into()]), invert: false };
    let peer = vec![load_address(other, family), in_set(vxlan_peers_of(family), false), Expr::Notrack];
    Rule::new([vxlan(node), exprs(&[Test::Family(family), of_node]), peer].concat(), "VXLAN between nodes")
}

/// ICMPv6 messages that a packet of the overlay was too big for its path (RFC 4443, section 3.2). Connection tracking cannot say
/// that they are related to it. Over IPv4, routers fragment the overlay's packets instead.
pub(super) fn too_big(node: &NodeState) -> Vec<Rule> {
    const TYPE: u8 = 2;
    /// The header of the message, and behind it that of the packet, of 40 bytes.
    const PACKET: u32 = 8;
    const UDP: u32 = PACKET + 40;
    let is = |offset, value: Vec<u8>| {
        let length = value.len() as u32;
        let load = Expr::Payload { register: 0, header: Header::Transport, offset, length };
        [load, Expr::Cmp { register: 0, op: CmpOp::Equal, value }]
    };
    let rule = |family| {
        let icmp = Test::Protocol { numbers: vec![58], invert: false };
        let mut tests = exprs(&[Test::Family(family), icmp]);
        tests.extend(is(0, vec![TYPE]));
        tests.extend(is(PACKET + 6, vec![17]));
        tests.extend(is(UDP + 2, vxlan_port(node).to_be_bytes().into()));
        tests.push(Expr::Payload { register: 0, header: Header::Transport, offset: PACKET + 24, length: 16 });
        tests.extend([in_set(vxlan_peers_of(family), false), Expr::Verdict(Verdict::Accept)]);
        Rule::new(tests, "VXLAN between nodes is too big for its path")
    };
    overlays(node).filter(|family| *family == Family::V6).map(rule).collect()
}
