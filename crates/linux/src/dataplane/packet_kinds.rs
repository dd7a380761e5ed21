//! The kinds of packets that the skeleton tells apart, as tests: packets of pods, of established flows, of neighbour
//! discovery, of VXLAN and IPIP.

use tortie_dataplane::NodeState;
use tortie_kernel::nftables::expr::state;
use tortie_kernel::nftables::{
    CmpOp, Element, Expr, Field, Header, Key, MetaKey, Rule, SetRef, SetSpec, Verdict,
};

use super::Config;
use super::packet_test::{PacketEnd, Test, exprs, in_set, port_ranges};
use super::sets::{Family, set};

/// The interfaces of pods whose names do not have the prefix.
pub(super) const ODD_INTERFACES: &str = "odd-interfaces";
/// The nodes from which VXLAN packets are accepted.
pub(super) const VXLAN_PEERS: &str = "vxlan-peers";
/// The set of the nodes' IPv6 addresses.
pub(super) const VXLAN_PEERS_6: &str = "vxlan-peers6";

/// The nodes from which IPIP packets are accepted.
pub(super) const IPIP_PEERS: &str = "ipip-peers";

/// The set of the nodes' addresses of a family.
pub(super) fn vxlan_peers_of(family: Family) -> &'static str {
    match family {
        Family::V4 => VXLAN_PEERS,
        Family::V6 => VXLAN_PEERS_6,
    }
}

/// Tests that together match interfaces of pods.
pub(super) fn are_pods(config: &Config, interface: MetaKey) -> Vec<Vec<Expr>> {
    let load = Expr::Meta { register: 0, key: interface };
    let has_prefix = |prefix: &String| {
        vec![load.clone(), Expr::Cmp { register: 0, op: CmpOp::Equal, value: prefix.as_bytes().to_vec() }]
    };
    let mut tests: Vec<_> = config.pod_prefixes().iter().map(has_prefix).collect();
    tests.push(vec![load.clone(), in_set(ODD_INTERFACES, false)]);
    tests
}

/// The connection is in one of these states.
pub(super) fn in_state(bits: u32) -> Vec<Expr> {
    vec![
        Expr::CtState { register: 0 },
        Expr::Bitwise { source: 0, destination: 0, mask: bits.to_ne_bytes().to_vec(), xor: vec![0; 4] },
        Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
    ]
}

/// Packets of established flows pass; invalid packets do not.
pub(super) fn by_flow() -> [Rule; 2] {
    let rule = |bits, verdict| Rule::new([in_state(bits), vec![Expr::Verdict(verdict)]].concat(), "");
    [rule(state::ESTABLISHED | state::RELATED, Verdict::Accept), rule(state::INVALID, Verdict::Drop)]
}

/// Matches ICMPv6 messages of these types, with which IPv6 finds neighbours and routers (RFC 4861, policy decision
/// 22).
pub(super) fn neighbour_discovery(types: &[u8]) -> Vec<Expr> {
    let types = types.iter().map(|icmp_type| Element::key(Key::byte(*icmp_type)));
    let types = SetRef::Inline(Box::new(set(SetSpec::hash(&[Field::Icmpv6Type]), types)));
    let mut found = exprs(&[Test::Family(Family::V6), Test::Protocol { numbers: vec![58], invert: false }]);
    found.extend([
        Expr::Payload { register: 0, header: Header::Transport, offset: 0, length: 1 },
        Expr::Lookup { register: 0, set: types, invert: false },
    ]);
    found
}

/// The families in which the node has an overlay.
pub(super) fn overlays(node: &NodeState) -> impl Iterator<Item = Family> {
    let vteps = node.node.iter().flat_map(|node| node.vteps());
    vteps.map(|vtep| Family::of(vtep.parent))
}

/// VXLAN packets of the overlay.
pub(super) fn vxlan(node: &NodeState) -> Vec<Expr> {
    udp_to([vxlan_port(node)])
}

/// IPIP packets (RFC 2003).
pub(super) fn ipip() -> Vec<Expr> {
    exprs(&[Test::Family(Family::V4), Test::Protocol { numbers: vec![4], invert: false }])
}

/// Whether the node has IPIP.
pub(super) fn has_ipip(node: &NodeState) -> bool {
    node.node.as_ref().is_some_and(|node| node.ipip.is_some())
}

/// UDP packets to these ports.
pub(super) fn udp_to(ports: impl IntoIterator<Item = u16>) -> Vec<Expr> {
    packets_to(17, ports)
}

/// TCP packets to these ports.
pub(super) fn tcp_to(ports: impl IntoIterator<Item = u16>) -> Vec<Expr> {
    packets_to(6, ports)
}

/// Packets of a protocol with ports to these ports.
pub(super) fn packets_to(protocol: u8, ports: impl IntoIterator<Item = u16>) -> Vec<Expr> {
    exprs(&[
        Test::Protocol { numbers: vec![protocol], invert: false },
        Test::Port {
            side: PacketEnd::Destination,
            ranges: port_ranges(ports.into_iter().map(|port| (port, port))),
            invert: false,
        },
    ])
}

/// The UDP port of VXLAN.
pub(super) fn vxlan_port(node: &NodeState) -> u16 {
    node.node.as_ref().map(|node| node.network.clone()).unwrap_or_default().port
}
