//! The chains through which all packets come.
//!
//! ```text
//! forward-from ─ from a pod ─▶ from-workload ─ own address? established? ─ number ─▶ program ─▶ policies
//! forward-to ─── to a pod ───▶ to-workload ─── established? ─────────────── number ─▶ program ─▶ policies
//! input-from ─── from a pod ─▶ from-workload …
//! input ──────── from a pod ─▶ what becomes of packets to the node itself
//! ```
//! Each side judges in a base chain of its own: so "accept", wherever it stands, means that this side allows the packet,
//! and the next one is asked.
//!
//! A pod's interface leads to a number, and the number to the chain of its program. A pod that comes or goes is then no
//! more than elements of sets; and the kernel, which goes through all chains by all ways when a rule changes, has one way
//! to each program, however many pods it has.

use tortie_api::calico::EndpointToHostAction;
use tortie_dataplane::NodeState;

use super::Config;
use super::sets::{Family, set};
use super::test::{Side, Test, exprs, in_set, load_address, load_address_to, port_ranges};
use crate::nftables::expr::state;
use crate::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Element, Expr, Field, Header, Hook, Key, MetaKey, Register, Rule,
    Set, SetRef, SetSpec, Table, Verdict,
};

const FORWARD_FROM: &str = "forward-from";
const FORWARD_TO: &str = "forward-to";
const INPUT_FROM: &str = "input-from";
const INPUT: &str = "input";
const FROM_WORKLOAD: &str = "from-workload";
const TO_WORKLOAD: &str = "to-workload";
/// The maps from a pod's interface to the number of its program.
pub const FROM_PROGRAM: &str = "from-workload-program";
pub const TO_PROGRAM: &str = "to-workload-program";
/// The maps from the number of a program to its first chain.
pub const FROM_CHAIN: &str = "from-workload-chain";
pub const TO_CHAIN: &str = "to-workload-chain";
/// The addresses that may come from a pod's interface.
const OWN_ADDRESSES_4: &str = "own-addresses4";
const OWN_ADDRESSES_6: &str = "own-addresses6";
/// The interfaces of pods whose names do not begin as they should.
pub const ODD_INTERFACES: &str = "odd-interfaces";
/// The nodes that VXLAN packets are taken from.
pub const VXLAN_PEERS: &str = "vxlan-peers";

/// Where the side that packets come from is asked: before the other one.
const FROM_PRIORITY: i32 = -10;
const TO_PRIORITY: i32 = 0;

/// What is there whatever pods there are: the base chains and what they lead to at once, and sets, of which those of
/// pods are empty.
pub fn frame(config: &Config, node: &NodeState) -> Table {
    let base = |hook, priority| Some(BaseChain { kind: ChainKind::Filter, hook, priority, drop: false });
    let chains = [
        (
            FORWARD_FROM,
            base(Hook::Forward, FROM_PRIORITY),
            of_pods(config, MetaKey::InputInterface, FROM_WORKLOAD),
        ),
        (
            FORWARD_TO,
            base(Hook::Forward, TO_PRIORITY),
            of_pods(config, MetaKey::OutputInterface, TO_WORKLOAD),
        ),
        (INPUT_FROM, base(Hook::Input, FROM_PRIORITY), input_from(config, node)),
        (INPUT, base(Hook::Input, TO_PRIORITY), input(config, node)),
        (FROM_WORKLOAD, None, from_workload(node)),
        (TO_WORKLOAD, None, to_workload()),
    ];
    let named = |(name, base, rules): (&str, _, _)| (name.to_owned(), Chain { base, rules });
    let empty = [
        (FROM_PROGRAM, SetSpec::number_map(&[Field::Interface])),
        (TO_PROGRAM, SetSpec::number_map(&[Field::Interface])),
        (FROM_CHAIN, program_chains()),
        (TO_CHAIN, program_chains()),
        own_addresses(Family::V4),
        own_addresses(Family::V6),
        (ODD_INTERFACES, SetSpec::hash(&[Field::Interface])),
    ];
    let empty = empty.into_iter().map(|(name, spec)| (name.to_owned(), set(spec, [])));
    let peers = (VXLAN_PEERS.to_owned(), vxlan_peers(node));
    Table { flags: 0, chains: chains.map(named).into(), sets: empty.chain([peers]).collect() }
}

/// What the maps from numbers to chains are.
pub fn program_chains() -> SetSpec {
    SetSpec::verdict_map(&[Field::Mark, Field::Mark])
}

/// The key of a program's number there.
pub fn program_key(number: u32) -> Key {
    Key::numbers(0, number)
}

/// Whether a chain or a set is there whatever pods there are.
pub fn is_of_frame(name: &str) -> bool {
    let chains = [FORWARD_FROM, FORWARD_TO, INPUT_FROM, INPUT, FROM_WORKLOAD, TO_WORKLOAD];
    let sets = [
        FROM_PROGRAM,
        TO_PROGRAM,
        FROM_CHAIN,
        TO_CHAIN,
        OWN_ADDRESSES_4,
        OWN_ADDRESSES_6,
        ODD_INTERFACES,
        VXLAN_PEERS,
    ];
    chains.contains(&name) || sets.contains(&name)
}

/// The set of a family's addresses that may come from a pod's interface, and what its keys are.
pub fn own_addresses(family: Family) -> (&'static str, SetSpec) {
    let name = match family {
        Family::V4 => OWN_ADDRESSES_4,
        Family::V6 => OWN_ADDRESSES_6,
    };
    (name, SetSpec::hash(&[Field::Interface, family.field()]))
}

/// Packets of pods' interfaces go to a chain: of all with the prefix, and of those that are pods' without it.
fn of_pods(config: &Config, interface: MetaKey, chain: &str) -> Vec<Rule> {
    let go = [Expr::Verdict(Verdict::Goto(chain.to_owned()))];
    are_pods(config, interface).map(|exprs| Rule::new([&exprs, &go[..]].concat(), "")).into()
}

/// Tests of which one holds for interfaces of pods.
fn are_pods(config: &Config, interface: MetaKey) -> [Vec<Expr>; 2] {
    let load = Expr::Meta { register: 0, key: interface };
    let prefix = config.workload_prefix.as_bytes().to_vec();
    [
        vec![load.clone(), Expr::Cmp { register: 0, op: CmpOp::Equal, value: prefix }],
        vec![load, in_set(ODD_INTERFACES, false)],
    ]
}

/// Packets to the node itself: from pods they are under the pod's policy first.
fn input_from(config: &Config, node: &NodeState) -> Vec<Rule> {
    let has_overlay = node.node.as_ref().is_some_and(|node| node.vtep.is_some());
    let guard = has_overlay.then(|| vxlan_guard(vxlan_port(node)));
    let mut rules = Vec::from_iter(guard);
    for pod in are_pods(config, MetaKey::InputInterface) {
        let found = [&pod[..], &neighbour_discovery()].concat();
        rules.push(Rule::new(found, "a pod and its gateway find each other"));
    }
    rules.extend(of_pods(config, MetaKey::InputInterface, FROM_WORKLOAD));
    rules
}

/// What pods' policy allows to the node itself.
fn input(config: &Config, node: &NodeState) -> Vec<Rule> {
    if node.settings.endpoint_to_host != EndpointToHostAction::Drop {
        return Vec::new();
    }
    let mut rules = Vec::new();
    for pod in are_pods(config, MetaKey::InputInterface) {
        let with = |exprs: &[Expr], comment| Rule::new([&pod[..], exprs].concat(), comment);
        rules.push(with(&neighbour_discovery(), ""));
        rules.push(with(
            &[in_state(state::ESTABLISHED | state::RELATED), vec![Expr::Verdict(Verdict::Accept)]].concat(),
            "",
        ));
        rules.push(with(&[Expr::Verdict(Verdict::Drop)], "DefaultEndpointToHostAction"));
    }
    rules
}

/// Packets from pods: none of them are tunnels, as another node would take what is in them for packets of ours
/// (`calico.md` 6.3); all of them are from the pod's own addresses, also in an established flow, which is not the pod's
/// own if its packets carry another pod's address; and those that begin a flow are asked of the pod's program.
fn from_workload(node: &NodeState) -> Vec<Rule> {
    let drop = || vec![Expr::Verdict(Verdict::Drop)];
    let port = vxlan_port(node);
    let vxlan = [exprs(&udp_to(port)), drop()].concat();
    let ipip = [Test::Protocol { numbers: vec![4], invert: false }.exprs(), drop()].concat();
    let mut rules = vec![Rule::new(vxlan, "no VXLAN from pods"), Rule::new(ipip, "no IPIP from pods")];
    for family in [Family::V4, Family::V6] {
        let behind = Field::Interface.length() as Register / 4;
        let mut foreign = Test::Family(family).exprs();
        foreign.extend([
            Expr::Meta { register: 0, key: MetaKey::InputInterface },
            load_address_to(Side::Source, family, behind),
            in_set(own_addresses(family).0, true),
            Expr::Verdict(Verdict::Drop),
        ]);
        rules.push(Rule::new(foreign, "not from an address of its own"));
    }
    rules.extend(by_flow());
    rules.extend(by_interface(MetaKey::InputInterface, FROM_PROGRAM, FROM_CHAIN));
    rules
}

/// Packets to pods of established flows pass, those of none do not, and the rest is asked of the pod's program.
fn to_workload() -> Vec<Rule> {
    by_flow().into_iter().chain(by_interface(MetaKey::OutputInterface, TO_PROGRAM, TO_CHAIN)).collect()
}

/// Packets of established flows pass, and those of none do not.
fn by_flow() -> [Rule; 2] {
    let rule = |bits, verdict| Rule::new([in_state(bits), vec![Expr::Verdict(verdict)]].concat(), "");
    [rule(state::ESTABLISHED | state::RELATED, Verdict::Accept), rule(state::INVALID, Verdict::Drop)]
}

/// The connection is in one of these states.
fn in_state(bits: u32) -> Vec<Expr> {
    vec![
        Expr::CtState { register: 0 },
        Expr::Bitwise { source: 0, destination: 0, mask: bits.to_ne_bytes().to_vec(), xor: vec![0; 4] },
        Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
    ]
}

/// The program of the pod; an interface that is no pod's (yet, or any more) is closed.
fn by_interface(interface: MetaKey, programs: &str, chains: &str) -> [Rule; 2] {
    let to_program = vec![
        Expr::Meta { register: 0, key: interface },
        // The key is eight zeroes, of which the number takes the last four. `nft` has no word for a map behind a map, and
        // ends with a failed assertion where it finds one; it takes this for a constant.
        Expr::Immediate { register: 4, value: vec![0; 8] },
        Expr::Map { register: 0, set: SetRef::named(programs), destination: 5 },
        Expr::VerdictMap { register: 4, set: SetRef::named(chains) },
    ];
    let closed = Rule::new(vec![Expr::Verdict(Verdict::Drop)], "no pod's interface");
    [Rule::new(to_program, &format!("the interface's number in {programs}")), closed]
}

/// Neighbour solicitations and advertisements, and router solicitations (semantics 22).
fn neighbour_discovery() -> Vec<Expr> {
    let types = [133, 135, 136].map(|icmp_type| Element::key(Key::byte(icmp_type)));
    let types = SetRef::Inline(Box::new(set(SetSpec::hash(&[Field::Icmpv6Type]), types)));
    let mut found = exprs(&[Test::Family(Family::V6), Test::Protocol { numbers: vec![58], invert: false }]);
    found.extend([
        Expr::Payload { register: 0, header: Header::Transport, offset: 0, length: 1 },
        Expr::Lookup { register: 0, set: types, invert: false },
        Expr::Verdict(Verdict::Accept),
    ]);
    found
}

fn vxlan_port(node: &NodeState) -> u16 {
    node.node.as_ref().map(|node| node.network.clone()).unwrap_or_default().port
}

/// The addresses of the nodes that VXLAN packets may come from.
fn vxlan_peers(node: &NodeState) -> Set {
    let peers = node.vteps.values().map(|vtep| Element::key(Key::address(vtep.parent.into())));
    set(SetSpec::hash(&[Field::Ipv4]), peers)
}

/// VXLAN packets from elsewhere would put packets with any source behind the pods' policy.
fn vxlan_guard(port: u16) -> Rule {
    let mut guard = exprs(&udp_to(port));
    guard.extend(Test::Family(Family::V4).exprs());
    guard.extend([
        load_address(Side::Source, Family::V4),
        in_set(VXLAN_PEERS, true),
        Expr::Verdict(Verdict::Drop),
    ]);
    Rule::new(guard, "VXLAN only from nodes")
}

fn udp_to(port: u16) -> [Test; 2] {
    let ranges = port_ranges([(port, port)].into_iter());
    [
        Test::Protocol { numbers: vec![17], invert: false },
        Test::Port { side: Side::Destination, ranges, invert: false },
    ]
}
