//! The chains that all packets pass.
//!
//! ```text
//! forward-from ─ from a pod ─▶ from-workload ─ own address? established? ─ number ─▶ program ─▶ policies
//! forward-to ─── to a pod ───▶ to-workload ─── established? ─────────────── number ─▶ program ─▶ policies
//! input-from ─── from a pod ─▶ from-workload …
//! input ──────── from a pod ─▶ the action for packets to the node itself
//! ```
//! Before all of them, `anybody` drops packets from elsewhere that have the address of a pod of this node.
//! [`untracked_overlay`] has the chains before connection tracking for the overlay's own packets.
//! [`host_skeleton`](super::host_skeleton) has the chains for the node's other interfaces, if there are host endpoints.
//!
//! Each side judges in a separate base chain. So "accept", wherever it occurs, means that this side allows the
//! packet, and the next side is evaluated.
//!
//! A pod's interface maps to a number, and the number to the chain of its program. So adding or removing a pod
//! changes only elements of sets. When a rule changes, the kernel walks all chains by all paths; there is one path to
//! each program, however many pods it has.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use tortie_api::calico::{BgpFromPods, EndpointToHostAction, PodSourcesFromOutside};
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::expr::state;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Element, Expr, Field, Header, Hook, Key, MetaKey, Register, Rule,
    Set, SetSpec, Table, Verdict,
};
use tortie_policy::ALL_NODES;
use tortie_policy::program::Member;

use super::Config;
use super::cut;
use super::host_ports;
use super::host_skeleton::{self, HOST_FORWARD_IN, HOST_FORWARD_OUT, HOST_IN, to_program};
use super::nat;
use super::packet_kinds::{
    IPIP_PEERS, ODD_INTERFACES, VXLAN_PEERS, VXLAN_PEERS_6, are_pods, by_flow, has_ipip, in_state, ipip,
    neighbour_discovery, overlays, tcp_to, udp_to, vxlan, vxlan_peers_of,
};
use super::packet_test::{PacketEnd, Test, in_set, load_address, load_address_to};
use super::sets::{Family, set};
use super::slots::{Slot, Stage};
use super::untracked_overlay::{self, RAW};

const FORWARD_FROM: &str = "forward-from";
const FORWARD_TO: &str = "forward-to";
const INPUT_FROM: &str = "input-from";
const INPUT: &str = "input";
pub(super) const FROM_WORKLOAD: &str = "from-workload";
pub(super) const TO_WORKLOAD: &str = "to-workload";
const NEVER_FROM_WORKLOAD: &str = "from-workload-never";
const BGP_FROM_WORKLOAD: &str = "from-workload-bgp";
/// All packets, before connection tracking.
const ANYBODY: &str = "anybody";
/// Packets with the address of a local pod that did not come from a pod. Its only rule counts and drops them.
pub(super) const FROM_OUTSIDE: &str = "pod-address-from-outside";
/// The addresses that may come from a pod's interface.
const OWN_ADDRESSES_4: &str = "own-addresses4";
const OWN_ADDRESSES_6: &str = "own-addresses6";
/// The addresses of this node's pods, which come from no other interface than the pod's.
const LOCAL_PODS_4: &str = "local-pods4";
const LOCAL_PODS_6: &str = "local-pods6";

/// The addresses of all nodes.
pub(super) const NODES_4: &str = "nodes4";
pub(super) const NODES_6: &str = "nodes6";

/// The chains without which a table judges no packets of pods, or not all.
pub(super) const JUDGING_CHAINS: [&str; 5] =
    [FORWARD_FROM, FORWARD_TO, INPUT_FROM, FROM_WORKLOAD, TO_WORKLOAD];

/// The number of the closed program.
pub(super) const CLOSED: u32 = 0;
const CLOSED_CHAIN: &str = "closed";

/// The verdict on packets if a slot is closed: they are dropped. Closed untracked policies would also cut established
/// flows, so they let everything continue to the later slots, which are closed.
fn closed(slot: Slot) -> Verdict {
    match slot.stage() {
        Stage::Untracked => Verdict::Accept,
        Stage::Normal | Stage::Forward | Stage::PreDnat => Verdict::Goto(CLOSED_CHAIN.to_owned()),
    }
}

/// The priority of the sender's side: before the receiver's side.
const FROM_PRIORITY: i32 = -10;
const TO_PRIORITY: i32 = 0;

/// The parts that do not depend on endpoints: the base chains, the chains that they jump to directly, and sets
/// without endpoints in them.
pub(super) fn skeleton(config: &Config, node: &NodeState) -> Table {
    let base = |hook, priority| Some(BaseChain { kind: ChainKind::Filter, hook, priority, drop: false });
    let (input, output) = (MetaKey::InputInterface, MetaKey::OutputInterface);
    let hosts = |chain| (!node.host_endpoints.is_empty()).then(|| Rule::new(vec![goto(chain)], ""));
    let forward_from = of_pods(config, input, FROM_WORKLOAD).into_iter().chain(hosts(HOST_FORWARD_IN));
    let forward_to = of_pods(config, output, TO_WORKLOAD).into_iter().chain(hosts(HOST_FORWARD_OUT));
    let chains = [
        (FORWARD_FROM, base(Hook::Forward, FROM_PRIORITY), forward_from.collect()),
        (FORWARD_TO, base(Hook::Forward, TO_PRIORITY), forward_to.collect()),
        (INPUT_FROM, base(Hook::Input, FROM_PRIORITY), input_from(config, node)),
        (
            INPUT,
            base(Hook::Input, TO_PRIORITY),
            from_pods_to_node(config, node).into_iter().chain(hosts(HOST_IN)).collect(),
        ),
        (FROM_WORKLOAD, None, from_workload(node)),
        (NEVER_FROM_WORKLOAD, None, never_from_workload(node)),
        (BGP_FROM_WORKLOAD, None, bgp_from_workload()),
        (FROM_OUTSIDE, None, vec![Rule::new(vec![Expr::Counter, Expr::Verdict(Verdict::Drop)], "")]),
        (TO_WORKLOAD, None, to_workload(config, node)),
        (CLOSED_CHAIN, None, vec![Rule::new(vec![Expr::Verdict(Verdict::Drop)], "")]),
    ];
    let named = |(name, base, rules): (&str, _, _)| (name.to_owned(), Chain { base, rules });
    let chains = chains.map(named).into_iter().chain(host_skeleton::chains(config, node));
    let chains = chains.chain(untracked_overlay::chains(node));
    let chains = chains.chain(from_elsewhere(config, node).map(|chain| (ANYBODY.to_owned(), chain)));
    let slots_of_hosts = if node.host_endpoints.is_empty() { &[][..] } else { &Slot::OF_HOSTS };
    let slots = || Slot::OF_PODS.iter().chain(slots_of_hosts);
    let programs = slots().map(|slot| (slot.maps().0, SetSpec::number_map(&[Field::Interface])));
    let odd = (ODD_INTERFACES, SetSpec::hash(&[Field::Interface]));
    let [own_addresses, local_pods] =
        [own_addresses, local_pods].map(|set| [Family::V4, Family::V6].map(set));
    let empty = programs.chain(own_addresses).chain(local_pods).chain([odd]);
    let empty = empty.map(|(name, spec)| (name.to_owned(), set(spec, [])));
    let leads = slots().map(|slot| {
        let closed = Element::verdict(program_key(CLOSED), closed(*slot));
        (slot.maps().1.to_owned(), set(program_chains(), [closed]))
    });
    let peers = |family| (vxlan_peers_of(family).to_owned(), vxlan_peers(node, family));
    let sets = empty.chain(leads).chain([Family::V4, Family::V6].map(peers));
    let nodes = |family| (nodes_of(family).to_owned(), nodes(node, family));
    let sets = sets.chain([Family::V4, Family::V6].map(nodes));
    let sets = sets.chain(has_ipip(node).then(|| (IPIP_PEERS.to_owned(), ipip_peers(node)))).collect();
    let mut table = Table { flags: 0, chains: chains.collect(), sets };
    nat::add(config, node, &mut table);
    host_ports::add(node, &mut table);
    table
}

/// Whether a chain or a set can exist without endpoints.
pub(super) fn is_of_skeleton(name: &str) -> bool {
    let base = [ANYBODY, FORWARD_FROM, FORWARD_TO, INPUT_FROM, INPUT];
    let chains =
        [FROM_WORKLOAD, NEVER_FROM_WORKLOAD, BGP_FROM_WORKLOAD, FROM_OUTSIDE, TO_WORKLOAD, CLOSED_CHAIN];
    let sets = [
        OWN_ADDRESSES_4,
        OWN_ADDRESSES_6,
        LOCAL_PODS_4,
        LOCAL_PODS_6,
        ODD_INTERFACES,
        VXLAN_PEERS,
        VXLAN_PEERS_6,
        IPIP_PEERS,
        NODES_4,
        NODES_6,
    ];
    let is_map = |slot: &Slot| slot.maps().0 == name || slot.maps().1 == name;
    base.contains(&name)
        || chains.contains(&name)
        || sets.contains(&name)
        || host_skeleton::is_chain(name)
        || untracked_overlay::is_chain(name)
        || nat::is_part(name)
        || host_ports::is_part(name)
        || Slot::OF_PODS.iter().chain(&Slot::OF_HOSTS).any(is_map)
}

/// The type of the maps from numbers to chains.
pub(super) fn program_chains() -> SetSpec {
    SetSpec::verdict_map(&[Field::Mark, Field::Mark])
}

/// The key of a program's number in those maps.
pub(super) fn program_key(number: u32) -> Key {
    Key::numbers(0, number)
}

/// The set of a family's addresses that may come from a pod's interface, and its type.
pub(super) fn own_addresses(family: Family) -> (&'static str, SetSpec) {
    let name = match family {
        Family::V4 => OWN_ADDRESSES_4,
        Family::V6 => OWN_ADDRESSES_6,
    };
    (name, SetSpec::hash(&[Field::Interface, family.field()]))
}

/// The set of a family's addresses of this node's pods, and its type.
pub(super) fn local_pods(family: Family) -> (&'static str, SetSpec) {
    let name = match family {
        Family::V4 => LOCAL_PODS_4,
        Family::V6 => LOCAL_PODS_6,
    };
    (name, SetSpec::hash(&[family.field()]))
}

/// The set of all nodes' addresses of a family.
pub(super) fn nodes_of(family: Family) -> &'static str {
    match family {
        Family::V4 => NODES_4,
        Family::V6 => NODES_6,
    }
}

/// Sends packets of pods' interfaces to a chain: those of all interfaces with the prefix, and of the pods' interfaces
/// without it.
fn of_pods(config: &Config, interface: MetaKey, chain: &str) -> Vec<Rule> {
    let lead = |exprs| Rule::new([exprs, vec![goto(chain)]].concat(), "");
    are_pods(config, interface).into_iter().map(lead).collect()
}

/// Packets to the node itself: packets from pods are judged by the pod's policy first.
fn input_from(config: &Config, node: &NodeState) -> Vec<Rule> {
    let mut rules: Vec<Rule> = overlays(node).map(|family| vxlan_guard(vxlan(node), family)).collect();
    if node.node.is_none() && config.policy_only.is_none() && !node.settings.vxlan_ports.is_empty() {
        // A Node without an address. An earlier process may have left links, which may have any of these ports.
        let any = || udp_to(node.settings.vxlan_ports.iter().copied());
        rules.extend([Family::V4, Family::V6].map(|family| vxlan_guard(any(), family)));
    }
    rules.extend(has_ipip(node).then(ipip_guard));
    rules.extend(are_pods(config, MetaKey::InputInterface).into_iter().flat_map(ask_for_gateway));
    rules.extend(of_pods(config, MetaKey::InputInterface, FROM_WORKLOAD));
    rules
}

/// Before anything else: drops packets with the address of a pod of this node that did not come from a pod's interface, although the route to
/// the pod leads there. If another plugin connects the pods, or has connected some, their packets may come by interfaces that
/// they share. Older kernels can look for a route only here (`nft_fib_validate` of Linux before 6.10).
fn from_elsewhere(config: &Config, node: &NodeState) -> Option<Chain> {
    let is_dropped = node.settings.pod_sources_from_outside == PodSourcesFromOutside::Drop;
    if config.policy_only.is_some() || !is_dropped {
        return None;
    }
    let pods = are_pods(config, MetaKey::InputInterface).into_iter();
    let of_pods = pods.map(|pod| Rule::new([pod, vec![Expr::Verdict(Verdict::Accept)]].concat(), ""));
    let rule = |family, prefix: &String| {
        let mut exprs = Test::Family(family).exprs();
        exprs.extend([load_address(PacketEnd::Source, family), in_set(local_pods(family).0, false)]);
        // `fib saddr oifname`.
        exprs.push(Expr::Fib { register: 0, result: 2, flags: 1 });
        let prefix = prefix.as_bytes().to_vec();
        exprs.extend([Expr::Cmp { register: 0, op: CmpOp::Equal, value: prefix }, goto(FROM_OUTSIDE)]);
        Rule::new(exprs, "a pod's address from outside")
    };
    let prefixes = config.pod_prefixes();
    let others = prefixes.iter().flat_map(|prefix| [rule(Family::V4, prefix), rule(Family::V6, prefix)]);
    let base = BaseChain { kind: ChainKind::Filter, hook: Hook::Prerouting, priority: RAW, drop: false };
    Some(Chain { base: Some(base), rules: of_pods.chain(others).collect() })
}

/// The action for what pods' policy allows to the node itself.
fn from_pods_to_node(config: &Config, node: &NodeState) -> Vec<Rule> {
    let mut rules = Vec::new();
    for pod in are_pods(config, MetaKey::InputInterface) {
        let with = |exprs: Vec<Expr>, verdict: Verdict, comment| {
            Rule::new([pod.clone(), exprs, vec![Expr::Verdict(verdict)]].concat(), comment)
        };
        let comment = "DefaultEndpointToHostAction";
        if node.settings.endpoint_to_host == EndpointToHostAction::Drop {
            rules.push(find_gateway(pod.clone()));
            rules.push(with(in_state(state::ESTABLISHED | state::RELATED), Verdict::Accept, ""));
            rules.push(with(Vec::new(), Verdict::Drop, comment));
        } else if !node.host_endpoints.is_empty() {
            rules.push(with(Vec::new(), Verdict::Accept, comment));
        }
    }
    rules
}

/// Neighbour discovery from a pod, as far as the node needs it. The kernel makes an entry in the machine's table of neighbours for the source
/// of each solicitation. So a pod may ask from its own addresses, and from none to see whether an address is in use (RFC 4862). Sources of
/// the link only would let it fill the table; the kernel takes another one as soon as there is a packet to send.
fn ask_for_gateway(pod: Vec<Expr>) -> [Rule; 3] {
    const SOLICITATIONS: [u8; 2] = [133, 135];
    const ADVERTISEMENT: u8 = 136;
    let accept = |types: &[u8], source: Vec<Expr>, comment| {
        let found = neighbour_discovery(types);
        Rule::new([pod.clone(), found, source, vec![Expr::Verdict(Verdict::Accept)]].concat(), comment)
    };
    let none = vec![
        load_address(PacketEnd::Source, Family::V6),
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![0; 16] },
    ];
    let own = from_own_address(Family::V6, false).to_vec();
    [
        accept(&[ADVERTISEMENT], Vec::new(), "a pod answers its gateway"),
        accept(&SOLICITATIONS, none, "a pod looks whether an address is in use"),
        accept(&SOLICITATIONS, own, "a pod looks for its gateway"),
    ]
}

/// Whether the packet has a source of the interface by which it came; or, inverted, has not.
fn from_own_address(family: Family, invert: bool) -> [Expr; 3] {
    let behind = Field::Interface.length() as Register / 4;
    [
        Expr::Meta { register: 0, key: MetaKey::InputInterface },
        load_address_to(PacketEnd::Source, family, behind),
        in_set(own_addresses(family).0, invert),
    ]
}

/// Neighbour discovery between a pod and its gateway, after [`ask_for_gateway`].
fn find_gateway(pod: Vec<Expr>) -> Rule {
    let found = neighbour_discovery(&[133, 135, 136]);
    Rule::new(
        [pod, found, vec![Expr::Verdict(Verdict::Accept)]].concat(),
        "a pod and its gateway find each other",
    )
}

fn goto(chain: &str) -> Expr {
    Expr::Verdict(Verdict::Goto(chain.to_owned()))
}

/// What no pod may send, whatever its policy: tunnels, unless they are allowed, because another node would treat
/// their content as packets of this node (`felix/rules/static.go`); router advertisements; and BGP to nodes, unless it is allowed.
fn never_from_workload(node: &NodeState) -> Vec<Rule> {
    // Of both families: IPv4 in IPv6 is a tunnel, too.
    let ipip_of_pods = Test::Protocol { numbers: vec![4], invert: false }.exprs();
    let all = [
        (
            !node.settings.vxlan_from_workloads && !node.settings.vxlan_ports.is_empty(),
            udp_to(node.settings.vxlan_ports.iter().copied()),
            "no VXLAN from pods",
        ),
        (!node.settings.ipip_from_workloads, ipip_of_pods, "no IPIP from pods"),
        (true, neighbour_discovery(&[134]), "no router advertisements from pods"),
    ];
    let dropped =
        |(_, exprs, comment)| Rule::new([exprs, vec![Expr::Verdict(Verdict::Drop)]].concat(), comment);
    // A pod's answers to a node whose connection comes from such a port are no new flows.
    let mut bgp = tcp_to(node.settings.bgp_ports.iter().copied());
    bgp.extend(in_state(state::NEW));
    bgp.push(Expr::Verdict(Verdict::Jump(BGP_FROM_WORKLOAD.to_owned())));
    let bgp = (node.settings.bgp_from_pods == BgpFromPods::Drop).then(|| Rule::new(bgp, "BGP from pods"));
    all.into_iter().filter(|(holds, ..)| *holds).map(dropped).chain(bgp).collect()
}

/// Packets to the ports of BGP that begin a flow. Those to nodes are dropped. Services have been translated by now (except for kube-proxy's in
/// IPVS mode), and sources not yet: behind natOutgoing, a pod's packets would come from the address of its node, which is a peer of the others.
fn bgp_from_workload() -> Vec<Rule> {
    let to_node = |family| {
        let mut exprs = Test::Family(family).exprs();
        let address = load_address(PacketEnd::Destination, family);
        exprs.extend([address, in_set(nodes_of(family), false), Expr::Verdict(Verdict::Drop)]);
        Rule::new(exprs, "no BGP from pods to nodes")
    };
    vec![to_node(Family::V4), to_node(Family::V6)]
}

/// Packets from pods. Forbidden packets are dropped. All packets must come from the pod's own addresses, also in an
/// established flow: a flow with another pod's address is not this pod's. Packets that begin a flow are judged by the
/// pod's program.
fn from_workload(node: &NodeState) -> Vec<Rule> {
    let never = Expr::Verdict(Verdict::Jump(NEVER_FROM_WORKLOAD.to_owned()));
    let mut rules = vec![Rule::new(vec![never], "")];
    for family in [Family::V4, Family::V6] {
        let mut foreign = Test::Family(family).exprs();
        foreign.extend(from_own_address(family, true));
        foreign.push(Expr::Verdict(Verdict::Drop));
        rules.push(Rule::new(foreign, "not from an address of its own"));
    }
    rules.extend(by_flow_of_pod());
    rules.extend(no_flow_from_its_middle(node));
    rules.extend(by_interface(Slot::FromWorkload));
    rules
}

/// As [`by_flow`], except that an ICMP error passes only if it is about a packet to the pod itself. Connection tracking relates an error to a
/// flow by the packet that it quotes, whoever sends it: a pod could cut the flows of others, and pass data beside both policies.
fn by_flow_of_pod() -> Vec<Rule> {
    const ICMP: [u8; 2] = [1, 58];
    let accept = |exprs: Vec<Expr>, comment| {
        Rule::new([exprs, vec![Expr::Verdict(Verdict::Accept)]].concat(), comment)
    };
    let about_itself = |family: Family| {
        // Behind 8 bytes of ICMP, the quoted packet's destination.
        let (protocol, offset) = match family {
            Family::V4 => (ICMP[0], 8 + 16),
            Family::V6 => (ICMP[1], 8 + 24),
        };
        let mut exprs = in_state(state::RELATED);
        exprs.extend(Test::Family(family).exprs());
        exprs.extend(Test::Protocol { numbers: vec![protocol], invert: false }.exprs());
        let (behind, length) = (Field::Interface.length() as Register / 4, family.field().length() as u32);
        exprs.extend([
            Expr::Meta { register: 0, key: MetaKey::InputInterface },
            Expr::Payload { register: behind, header: Header::Transport, offset, length },
            in_set(own_addresses(family).0, false),
        ]);
        accept(exprs, "an error about a packet to the pod")
    };
    let [_, invalid] = by_flow();
    let other = Test::Protocol { numbers: ICMP.to_vec(), invert: true }.exprs();
    vec![
        accept(in_state(state::ESTABLISHED), ""),
        about_itself(Family::V4),
        about_itself(Family::V6),
        accept([in_state(state::RELATED), other].concat(), ""),
        invalid,
    ]
}

/// Packets to pods: those of established flows pass, invalid ones do not, and the rest is judged by the pod's
/// program.
fn to_workload(config: &Config, node: &NodeState) -> Vec<Rule> {
    let flow = by_flow().into_iter().chain(no_flow_from_its_middle(node));
    let flow = flow.chain(unused_ipip(config, node));
    flow.chain(by_interface(Slot::ToWorkload)).collect()
}

/// Without pools with IPIP, nobody checks who sends IPIP to the node. Calico may have left its link, which then gives pods packets of
/// anybody with any source.
fn unused_ipip(config: &Config, node: &NodeState) -> Option<Rule> {
    let value = Key::interface(&config.ipip_device).bytes().to_vec();
    let from_link = vec![
        Expr::Meta { register: 0, key: MetaKey::InputInterface },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value },
        Expr::Verdict(Verdict::Drop),
    ];
    let is_unused = config.policy_only.is_none() && !has_ipip(node);
    is_unused.then(|| Rule::new(from_link, "no pool has IPIP"))
}

/// A flow that was cut must not restart from its middle, because the other end might be allowed to begin a flow.
fn no_flow_from_its_middle(node: &NodeState) -> Option<Rule> {
    const FLAGS: u32 = 13; // the byte of the TCP header
    const SYN: u8 = 2;
    let mut exprs = in_state(state::NEW);
    exprs.extend(Test::Protocol { numbers: vec![6], invert: false }.exprs());
    exprs.extend([
        Expr::Payload { register: 0, header: Header::Transport, offset: FLAGS, length: 1 },
        Expr::Bitwise { source: 0, destination: 0, mask: vec![SYN], xor: vec![0] },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![0] },
        Expr::Verdict(Verdict::Drop),
    ]);
    cut::is_enabled(node).then(|| Rule::new(exprs, "establishedFlows: Cut"))
}

/// The program of the pod. An interface that does not belong to a pod (yet, or any more) is closed.
fn by_interface(slot: Slot) -> [Rule; 2] {
    let interface = Expr::Meta { register: 0, key: slot.interface() };
    let closed = Rule::new(vec![Expr::Verdict(Verdict::Drop)], "no pod's interface");
    [to_program(interface, slot, "the interface's number"), closed]
}

/// The addresses of the nodes from which VXLAN packets of a family are accepted.
fn vxlan_peers(node: &NodeState, family: Family) -> Set {
    let peers = node.vteps.values().filter(|vtep| Family::of(vtep.parent) == family);
    let peers = peers.map(|vtep| Element::key(Key::address(vtep.parent)));
    set(SetSpec::hash(&[family.field()]), peers)
}

/// The addresses of all nodes of a family.
fn nodes(node: &NodeState, family: Family) -> Set {
    let members = node.sets.get(&*ALL_NODES).into_iter().flat_map(|(_, members)| members.iter());
    let addresses = members.filter_map(address).filter(|address| Family::of(*address) == family);
    set(SetSpec::hash(&[family.field()]), addresses.map(|address| Element::key(Key::address(address))))
}

/// The address of a node as the member of a set.
pub(super) fn address(member: &Member) -> Option<IpAddr> {
    match member {
        Member::Net(net) => Some(net.addr()),
        Member::AddressPort { .. } => None,
    }
}

/// VXLAN packets from elsewhere could bypass the pods' policy with any inner source.
fn vxlan_guard(mut guard: Vec<Expr>, family: Family) -> Rule {
    guard.extend(Test::Family(family).exprs());
    guard.extend([
        load_address(PacketEnd::Source, family),
        in_set(vxlan_peers_of(family), true),
        Expr::Verdict(Verdict::Drop),
    ]);
    Rule::new(guard, "VXLAN only from nodes")
}

/// The own addresses of the nodes from which IPIP packets are accepted.
fn ipip_peers(node: &NodeState) -> Set {
    let peers: BTreeSet<Ipv4Addr> = node.ipip_peers().collect();
    let peers = peers.into_iter().map(|peer| Element::key(Key::address(peer.into())));
    set(SetSpec::hash(&[Family::V4.field()]), peers)
}

/// As for VXLAN.
fn ipip_guard() -> Rule {
    let mut guard = ipip();
    guard.extend([
        load_address(PacketEnd::Source, Family::V4),
        in_set(IPIP_PEERS, true),
        Expr::Verdict(Verdict::Drop),
    ]);
    Rule::new(guard, "IPIP only from nodes")
}
