//! The chains for packets of the node's own interfaces, if there are host endpoints (policy decisions 16, 17, 43).
//!
//! ```text
//! arrives ─ raw-in ─ (connection) ─ prednat ─┬─ input ─▶ host-in           the node's own
//!                                            └─ forward-from ─▶ host-forward-in ─ forward-to ─▶ host-forward-out
//! the node sends ─ raw-out ─ (connection) ─ output ─▶ host-out
//! ```
//! Failsafe ports come first everywhere. Loopback, neighbour discovery and the overlay's own packets between nodes, which
//! belong to no connection, are exempt. A named interface takes precedence over `*`. Packets of pods are judged before DNAT
//! and where the node forwards them, if there is a host endpoint for `*`; otherwise no host endpoint applies to them:
//!
//! ```text
//! from a pod ─ prednat ─▶ forward-from-pods ─▶ host-forward-in        to a pod ─ forward-to-pods ─▶ host-forward-out
//! ```

use tortie_api::net::Protocol;
use tortie_dataplane::{Failsafe, NodeState};
use tortie_kernel::nftables::expr::state;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Expr, Hook, Key, MetaKey, Register, Rule, SetRef, Verdict,
};

use super::Config;
use super::fold::fold;
use super::packet_kinds::{
    IPIP_PEERS, are_pods, by_flow, has_ipip, in_state, ipip, neighbour_discovery, overlays, vxlan,
    vxlan_peers_of,
};
use super::packet_test::{PacketEnd, Test, exprs, in_set, load_address, port_ranges};
use super::sets::{Family, ranges};
use super::slots::{Slot, is_settled, unsettle};
use super::untracked_overlay::{RAW, too_big};

const RAW_IN: &str = "raw-in";
const RAW_OUT: &str = "raw-out";
const PRE_DNAT: &str = "prednat";
const OUTPUT: &str = "output";
pub(super) const HOST_IN: &str = "host-in";
pub(super) const HOST_FORWARD_IN: &str = "host-forward-in";
pub(super) const HOST_FORWARD_OUT: &str = "host-forward-out";

/// The name that stands for all interfaces without a host endpoint of their own.
pub(super) const EVERY_INTERFACE: &str = "*";

/// The chain of a host endpoint for `*` for forwarded packets of pods.
const FORWARD_FROM_PODS: &str = "forward-from-pods";
const FORWARD_TO_PODS: &str = "forward-to-pods";
/// The priorities before and after the pods' own policies.
const BEFORE_PODS: i32 = -11;
const AFTER_PODS: i32 = 1;

/// After connection tracking, and before address translation (`NF_IP_PRI_MANGLE`).
const MANGLE: i32 = -150;

/// The chains; none if there is no host endpoint.
pub(super) fn chains(config: &Config, node: &NodeState) -> Vec<(String, Chain)> {
    if node.host_endpoints.is_empty() {
        return Vec::new();
    }
    let base = |hook, priority| Some(BaseChain { kind: ChainKind::Filter, hook, priority, drop: false });
    let (input, output) = (MetaKey::InputInterface, MetaKey::OutputInterface);
    let pods_too = is_for_every_interface(node);
    let exempt =
        |key, pods| [not_of_hosts(config, key, pods), overlay(node, key), stays_open(node, key)].concat();
    let open = |key| exempt(key, true);
    let untracked = |key, slot| [open(key), replies_stay_open(node, key), ask(slot)].concat();
    let flow = || Vec::from(by_flow());
    let settled = || vec![accept(is_settled(), "allowed where it came in")];
    let established = || vec![accept(in_state(state::ESTABLISHED | state::RELATED), "")];
    let unsettle = || vec![Rule::new(unsettle(), "")];
    let all = [
        (RAW_IN, base(Hook::Prerouting, RAW), [unsettle(), untracked(input, Slot::HostUntrackedIn)].concat()),
        (RAW_OUT, base(Hook::Output, RAW), [unsettle(), untracked(output, Slot::HostUntrackedOut)].concat()),
        (
            PRE_DNAT,
            base(Hook::Prerouting, MANGLE),
            [settled(), established(), too_big(node), exempt(input, !pods_too), ask(Slot::HostPreDnat)]
                .concat(),
        ),
        (HOST_IN, None, [settled(), open(input), too_big(node), flow(), ask(Slot::HostIn)].concat()),
        (OUTPUT, base(Hook::Output, 0), [settled(), open(output), flow(), ask(Slot::HostOut)].concat()),
        (HOST_FORWARD_IN, None, [settled(), flow(), ask(Slot::HostForwardIn)].concat()),
        (HOST_FORWARD_OUT, None, [flow(), ask(Slot::HostForwardOut)].concat()),
    ];
    let forwarded = |name, priority, key, chain: &str| {
        let goto = Expr::Verdict(Verdict::Goto(chain.to_owned()));
        let rules = are_pods(config, key).into_iter();
        let rules = rules.map(|pods| Rule::new([pods, vec![goto.clone()]].concat(), ""));
        (name, base(Hook::Forward, priority), rules.collect())
    };
    let of_pods = [
        forwarded(FORWARD_FROM_PODS, BEFORE_PODS, input, HOST_FORWARD_IN),
        forwarded(FORWARD_TO_PODS, AFTER_PODS, output, HOST_FORWARD_OUT),
    ];
    let chains = all.into_iter().chain(of_pods.into_iter().filter(|_| pods_too));
    chains.map(|(name, base, rules)| (name.to_owned(), Chain { base, rules })).collect()
}

/// Whether there is a host endpoint for all interfaces.
fn is_for_every_interface(node: &NodeState) -> bool {
    node.host_endpoints.values().any(|host| host.interface.as_deref() == Some(EVERY_INTERFACE))
}

/// Whether a chain is one of these.
pub(super) fn is_chain(name: &str) -> bool {
    let base = [RAW_IN, RAW_OUT, PRE_DNAT, OUTPUT, FORWARD_FROM_PODS, FORWARD_TO_PODS];
    base.contains(&name) || [HOST_IN, HOST_FORWARD_IN, HOST_FORWARD_OUT].contains(&name)
}

/// Packets that no host endpoint applies to: loopback, pods unless they are included, and neighbour discovery.
fn not_of_hosts(config: &Config, interface: MetaKey, pods: bool) -> Vec<Rule> {
    let value = Key::interface("lo").bytes().to_vec();
    let loopback =
        vec![Expr::Meta { register: 0, key: interface }, Expr::Cmp { register: 0, op: CmpOp::Equal, value }];
    let mut rules = vec![accept(loopback, "loopback")];
    if pods {
        rules.extend(are_pods(config, interface).into_iter().map(|pods| accept(pods, "")));
    }
    rules.push(accept(neighbour_discovery(&[133, 134, 135, 136]), "neighbours find each other"));
    rules
}

/// The overlay's own packets between nodes.
fn overlay(node: &NodeState, interface: MetaKey) -> Vec<Rule> {
    let between_nodes = |family: Family| {
        let peer = [load_address(other_side(interface), family), in_set(vxlan_peers_of(family), false)];
        let exprs = [vxlan(node), Test::Family(family).exprs(), peer.to_vec()].concat();
        accept(exprs, "VXLAN between nodes")
    };
    let ipip_between_nodes = || {
        let peer = [load_address(other_side(interface), Family::V4), in_set(IPIP_PEERS, false)];
        accept([ipip(), peer.to_vec()].concat(), "IPIP between nodes")
    };
    overlays(node).map(between_nodes).chain(has_ipip(node).then(ipip_between_nodes)).collect()
}

/// Failsafe ports.
fn stays_open(node: &NodeState, interface: MetaKey) -> Vec<Rule> {
    let (ports, other) = (failsafe(node, interface), other_side(interface));
    failsafes(ports, PacketEnd::Destination, other, "failsafe port")
}

/// Replies of failsafe ports, where there is no connection tracking.
fn replies_stay_open(node: &NodeState, interface: MetaKey) -> Vec<Rule> {
    let opposite = match interface {
        MetaKey::InputInterface => MetaKey::OutputInterface,
        _ => MetaKey::InputInterface,
    };
    let (ports, other) = (failsafe(node, opposite), other_side(interface));
    failsafes(ports, PacketEnd::Source, other, "answer of a failsafe port")
}

fn failsafe(node: &NodeState, interface: MetaKey) -> &[Failsafe] {
    match interface {
        MetaKey::InputInterface => &node.settings.failsafe_inbound,
        _ => &node.settings.failsafe_outbound,
    }
}

/// The side of the packet's other end.
fn other_side(interface: MetaKey) -> PacketEnd {
    match interface {
        MetaKey::InputInterface => PacketEnd::Source,
        _ => PacketEnd::Destination,
    }
}

/// `port` is the side of the open port, and `other` the side of the permitted addresses.
fn failsafes(open: &[Failsafe], port: PacketEnd, other: PacketEnd, comment: &str) -> Vec<Rule> {
    let with_ports = open.iter().filter(|open| open.protocol.has_ports());
    let tests = |open: &Failsafe| {
        let Protocol(number) = open.protocol;
        let family = open.net.map(|net| Family::of(net.addr()));
        let mut tests = Vec::from_iter(family.map(Test::Family));
        tests.push(Test::Protocol { numbers: vec![number], invert: false });
        if let (Some(net), Some(family)) = (open.net, family) {
            let ranges = ranges([net]);
            // All addresses of a family are matched by the family.
            let address = Test::Address { side: other, family, ranges, invert: false };
            tests.extend((net.prefix_len() > 0).then_some(address));
        }
        let ranges = port_ranges([(open.port, open.port)].into_iter());
        tests.push(Test::Port { side: port, ranges, invert: false });
        (tests, vec![()])
    };
    let folded = fold(with_ports.map(tests).collect());
    folded.into_iter().map(|(tests, _)| accept(exprs(&tests), comment)).collect()
}

/// The program of the interface, or the program of `*`.
fn ask(slot: Slot) -> Vec<Rule> {
    let every = Key::interface(EVERY_INTERFACE).bytes().to_vec();
    let load = [
        (Expr::Meta { register: 0, key: slot.interface() }, "the interface's number"),
        (Expr::Immediate { register: 0, value: every }, "of any other interface the number of *"),
    ];
    load.map(|(load, comment)| to_program(load, slot, comment)).into()
}

/// Jumps to the chain of the number that a slot has for the key in the first registers.
///
/// The key of the second map is eight zero bytes, of which the number replaces the last four. `nft` has no syntax for
/// a map behind a map, and aborts with a failed assertion if it finds one; it takes this form for a constant.
pub(super) fn to_program(load: Expr, slot: Slot, comment: &str) -> Rule {
    const KEY: Register = 4;
    let (programs, chains) = slot.maps();
    let exprs = vec![
        load,
        Expr::Immediate { register: KEY, value: vec![0; 8] },
        Expr::Map { register: 0, set: SetRef::named(programs), destination: KEY + 1 },
        Expr::VerdictMap { register: KEY, set: SetRef::named(chains) },
    ];
    Rule::new(exprs, &format!("{comment} in {programs}"))
}

fn accept(tests: Vec<Expr>, comment: &str) -> Rule {
    Rule::new([tests, vec![Expr::Verdict(Verdict::Accept)]].concat(), comment)
}
