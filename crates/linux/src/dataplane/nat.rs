//! Source translation: packets from pods to destinations outside all pools get their node's address, if their pool
//! says so (`natOutgoing`), except for those to nodes if an operator excludes these (`natOutgoingExclusions`). Packets that the node itself
//! sends by a tunnel get the tunnel's address.

use ipnet::IpNet;
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Element, Expr, Hook, MetaKey, Rule, Set, SetSpec, Table, Verdict,
};

use super::Config;
use super::packet_kinds::{are_pods, has_ipip, overlays};
use super::packet_test::{PacketEnd, Test, in_set, load_address};
use super::sets::{Family, ranges, set};

const CHAIN: &str = "nat-outgoing";
/// For each family: the set of all pools and of the nodes that an operator excludes, and the set of pools whose packets are translated.
const POOLS: [(Family, &str, &str); 2] =
    [(Family::V4, "pools4", "nat-pools4"), (Family::V6, "pools6", "nat-pools6")];

/// `NF_IP_PRI_NAT_DST`
pub(crate) const DESTINATION_NAT: i32 = -100;
/// `NF_IP_PRI_NAT_SRC`
pub(crate) const SOURCE_NAT: i32 = 100;

/// Whether a chain or a set belongs to this module.
pub(super) fn is_part(name: &str) -> bool {
    name == CHAIN || POOLS.iter().any(|(_, all, nat)| [all, nat].contains(&&name))
}

/// Adds the chain and its sets to a table, if any pool or tunnel requires it.
pub(super) fn add(config: &Config, node: &NodeState, table: &mut Table) {
    let pools = &node.settings.pools;
    let mut rules = Vec::new();
    for (family, all, nat) in POOLS {
        let of_family = |(net, _): &(&IpNet, &bool)| Family::of(net.addr()) == family;
        let of_family = pools.iter().filter(of_family);
        if !of_family.clone().any(|(_, outgoing)| *outgoing) {
            continue;
        }
        let exceptions = node.settings.nat_exceptions.iter().map(|address| IpNet::from(*address));
        let exceptions = exceptions.filter(|net| Family::of(net.addr()) == family);
        table
            .sets
            .insert(all.to_owned(), nets(family, of_family.clone().map(|(net, _)| *net).chain(exceptions)));
        let outgoing = of_family.filter(|(_, outgoing)| **outgoing).map(|(net, _)| *net);
        table.sets.insert(nat.to_owned(), nets(family, outgoing));
        rules.push(masquerade(family, all, nat));
    }
    rules.extend(tunnels(config, node).map(|(family, device)| of_tunnel(family, device)));
    if rules.is_empty() {
        return;
    }
    let accept = |tests: Vec<Expr>| {
        Rule::new([tests, vec![Expr::Verdict(Verdict::Accept)]].concat(), "pods of this node")
    };
    rules.splice(0..0, are_pods(config, MetaKey::OutputInterface).into_iter().map(accept));
    let base = BaseChain { kind: ChainKind::Nat, hook: Hook::Postrouting, priority: SOURCE_NAT, drop: false };
    table.chains.insert(CHAIN.to_owned(), Chain { base: Some(base), rules });
}

fn nets(family: Family, nets: impl Iterator<Item = IpNet>) -> Set {
    let elements = ranges(nets).iter().map(|(first, last)| Element::range(*first, *last)).collect::<Vec<_>>();
    set(SetSpec::interval(&[family.field()]), elements)
}

/// Matches packets from such a pool to no pool, whose source is not an address of the node itself.
fn masquerade(family: Family, all: &str, nat: &str) -> Rule {
    let mut exprs = Test::Family(family).exprs();
    exprs.extend([load_address(PacketEnd::Source, family), in_set(nat, false)]);
    exprs.extend([load_address(PacketEnd::Destination, family), in_set(all, true)]);
    exprs.extend(is_local(PacketEnd::Source, CmpOp::NotEqual));
    exprs.push(Expr::Masquerade);
    Rule::new(exprs, "natOutgoing")
}

/// The links of the node's tunnels.
fn tunnels<'a>(config: &'a Config, node: &NodeState) -> impl Iterator<Item = (Family, &'a str)> {
    let vxlan = overlays(node).map(|family| match family {
        Family::V4 => (family, config.vxlan_device.as_str()),
        Family::V6 => (family, config.vxlan_v6_device.as_str()),
    });
    vxlan.chain(has_ipip(node).then_some((Family::V4, config.ipip_device.as_str())))
}

/// Matches packets of the node itself that leave by a tunnel with another address than the tunnel's: the source was chosen for the address of
/// a Service, or a program is bound to it (`StaticNATPostroutingChains` in `felix/rules/static.go` of Calico). Other nodes know no way back
/// to such an address through the tunnel.
fn of_tunnel(family: Family, device: &str) -> Rule {
    let name = [device.as_bytes(), &[0]].concat();
    let mut exprs = Test::Family(family).exprs();
    exprs.extend([
        Expr::Meta { register: 0, key: MetaKey::OutputInterface },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: name },
    ]);
    exprs.extend(is_of_type(OF_SOURCE | OF_OUTPUT_INTERFACE, CmpOp::NotEqual));
    exprs.extend(is_local(PacketEnd::Source, CmpOp::Equal));
    exprs.push(Expr::Masquerade);
    Rule::new(exprs, "the tunnel's address")
}

/// Tests whether an address of the packet is the node's own.
pub(crate) fn is_local(side: PacketEnd, op: CmpOp) -> [Expr; 2] {
    let flags = match side {
        PacketEnd::Source => OF_SOURCE,
        PacketEnd::Destination => OF_DESTINATION,
    };
    is_of_type(flags, op)
}

fn is_of_type(flags: u32, op: CmpOp) -> [Expr; 2] {
    let value = u32::from(libc::RTN_LOCAL).to_ne_bytes().into();
    [Expr::Fib { register: 0, result: ADDRESS_TYPE, flags }, Expr::Cmp { register: 0, op, value }]
}

/// `NFT_FIB_RESULT_ADDRTYPE`
const ADDRESS_TYPE: u32 = 3;
/// `NFTA_FIB_F_SADDR`
const OF_SOURCE: u32 = 1;
/// `NFTA_FIB_F_DADDR`
const OF_DESTINATION: u32 = 2;
/// `NFTA_FIB_F_OIF`
const OF_OUTPUT_INTERFACE: u32 = 16;
