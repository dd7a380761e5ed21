//! The node's own stack as the translator of its ports that lead to pods, and of packets of pods to the outside: a table of
//! nftables.

use ipnet::Ipv4Net;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Expr, Header, Hook, MetaKey, NatFamily, Nft, Rule, Table, Verdict,
    diff,
};
use tortie_kernel::sysctl;

use crate::error::Error;
use crate::fabric::{HostPort, HostPorts, OutboundNat, OutboundNats};

const TABLE: &str = "hns-nat";
/// `NF_IP_PRI_NAT_DST`
const DESTINATION_NAT: i32 = -100;
/// `NF_IP_PRI_NAT_SRC`
const SOURCE_NAT: i32 = 100;
const NFPROTO_IPV4: u8 = 2;
/// The offsets of the addresses in an IPv4 header.
const SOURCE: u32 = 12;
const DESTINATION: u32 = 16;

/// What the node's stack translates.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Translations {
    pub(super) ports: HostPorts,
    pub(super) outbound: OutboundNats,
}

/// Makes the node translate this, and nothing else.
pub(super) fn set(node: &NetNs, translations: &Translations) -> Result<(), Error> {
    node.run(|| {
        if *translations != Translations::default() {
            // Between the network of the nodes and the node's interface on the overlay.
            sysctl::ensure("net/ipv4/ip_forward", "1")?;
        }
        let mut nft = Nft::open()?;
        let actual = nft.list(TABLE)?;
        let change = diff(TABLE, &table(translations), actual.as_ref());
        if !change.ops.is_empty() {
            nft.commit_in_order(&change)?;
        }
        Ok(())
    })?
}

fn table(Translations { ports, outbound }: &Translations) -> Table {
    let mut table = Table::default();
    let mut chain = |name: &str, hook, priority, rules| {
        let base = Some(BaseChain { kind: ChainKind::Nat, hook, priority, drop: false });
        table.chains.insert(name.to_owned(), Chain { base, rules });
    };
    let rules = |takes: &dyn Fn(&HostPort) -> bool| {
        ports.iter().filter(|(_, to)| takes(to)).map(|(from, to)| translate(*from, *to)).collect()
    };
    chain("incoming", Hook::Prerouting, DESTINATION_NAT, rules(&|_| true));
    chain("own", Hook::Output, DESTINATION_NAT, rules(&|to| to.from_node));
    let rules = outbound.iter().flat_map(|(pod, nat)| leave(*pod, nat)).collect();
    chain("leaving", Hook::Postrouting, SOURCE_NAT, rules);
    table
}

/// The rules for packets of a pod.
fn leave(pod: std::net::Ipv4Addr, OutboundNat { always, all_but }: &OutboundNat) -> Vec<Rule> {
    let from_pod = || [is_ipv4(), is_in(SOURCE, pod.into())].concat();
    let rule = |to: Option<Ipv4Net>, last| {
        let to = to.map(|net| is_in(DESTINATION, net)).unwrap_or_default();
        Rule::new([from_pod(), to, vec![last]].concat(), "OutBoundNAT")
    };
    let mut rules: Vec<Rule> = always.iter().map(|to| rule(Some((*to).into()), Expr::Masquerade)).collect();
    if let Some(exceptions) = all_but {
        let accept = Expr::Verdict(Verdict::Accept);
        rules.extend(exceptions.iter().map(|net| rule(Some(*net), accept.clone())));
        rules.push(rule(None, Expr::Masquerade));
    }
    rules
}

fn equal(value: Vec<u8>) -> Expr {
    Expr::Cmp { register: 0, op: CmpOp::Equal, value }
}

fn is_ipv4() -> Vec<Expr> {
    vec![Expr::Meta { register: 0, key: MetaKey::NfProto }, equal(vec![NFPROTO_IPV4])]
}

/// Whether the address at this offset is of a network.
fn is_in(offset: u32, net: Ipv4Net) -> Vec<Expr> {
    let mask = net.netmask().octets().to_vec();
    vec![
        Expr::Payload { register: 0, header: Header::Network, offset, length: 4 },
        Expr::Bitwise { source: 0, destination: 0, mask, xor: vec![0; 4] },
        equal(net.network().octets().to_vec()),
    ]
}

fn translate((protocol, address, port): (u8, std::net::Ipv4Addr, u16), to: HostPort) -> Rule {
    let exprs = vec![
        Expr::Meta { register: 0, key: MetaKey::L4Proto },
        equal(vec![protocol]),
        Expr::Payload { register: 0, header: Header::Network, offset: DESTINATION, length: 4 },
        equal(address.octets().to_vec()),
        Expr::Payload { register: 0, header: Header::Transport, offset: 2, length: 2 },
        equal(port.to_be_bytes().to_vec()),
        Expr::Immediate { register: 0, value: to.pod.octets().to_vec() },
        Expr::Immediate { register: 1, value: to.port.to_be_bytes().to_vec() },
        Expr::DestinationNat { family: NatFamily::Ipv4, address: 0, port: 1 },
    ];
    Rule::new([is_ipv4(), exprs].concat(), "PortMapping")
}
