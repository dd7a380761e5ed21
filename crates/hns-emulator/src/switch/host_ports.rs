//! The node's own stack as the translator of its ports that lead to pods: a table of nftables.

use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Expr, Header, Hook, MetaKey, NatFamily, Nft, Rule, Table, diff,
};
use tortie_kernel::sysctl;

use crate::error::Error;
use crate::fabric::{HostPort, HostPorts};

const TABLE: &str = "hns-host-ports";
/// `NF_IP_PRI_NAT_DST`
const DESTINATION_NAT: i32 = -100;
const NFPROTO_IPV4: u8 = 2;

/// Makes these ports of the node lead to their pods, and no others.
pub(super) fn set(node: &NetNs, ports: &HostPorts) -> Result<(), Error> {
    node.run(|| {
        if !ports.is_empty() {
            // Between the network of the nodes and the node's interface on the overlay.
            sysctl::ensure("net/ipv4/ip_forward", "1")?;
        }
        let mut nft = Nft::open()?;
        let actual = nft.list(TABLE)?;
        let change = diff(TABLE, &table(ports), actual.as_ref());
        if !change.ops.is_empty() {
            nft.commit_in_order(&change)?;
        }
        Ok(())
    })?
}

fn table(ports: &HostPorts) -> Table {
    let mut table = Table::default();
    let mut chain = |name: &str, hook, rules| {
        let base = Some(BaseChain { kind: ChainKind::Nat, hook, priority: DESTINATION_NAT, drop: false });
        table.chains.insert(name.to_owned(), Chain { base, rules });
    };
    let rules = |takes: &dyn Fn(&HostPort) -> bool| {
        ports.iter().filter(|(_, to)| takes(to)).map(|(from, to)| translate(*from, *to)).collect()
    };
    chain("incoming", Hook::Prerouting, rules(&|_| true));
    chain("own", Hook::Output, rules(&|to| to.from_node));
    table
}

fn translate((protocol, address, port): (u8, std::net::Ipv4Addr, u16), to: HostPort) -> Rule {
    let equal = |value: Vec<u8>| Expr::Cmp { register: 0, op: CmpOp::Equal, value };
    let exprs = vec![
        Expr::Meta { register: 0, key: MetaKey::NfProto },
        equal(vec![NFPROTO_IPV4]),
        Expr::Meta { register: 0, key: MetaKey::L4Proto },
        equal(vec![protocol]),
        Expr::Payload { register: 0, header: Header::Network, offset: 16, length: 4 },
        equal(address.octets().to_vec()),
        Expr::Payload { register: 0, header: Header::Transport, offset: 2, length: 2 },
        equal(port.to_be_bytes().to_vec()),
        Expr::Immediate { register: 0, value: to.pod.octets().to_vec() },
        Expr::Immediate { register: 1, value: to.port.to_be_bytes().to_vec() },
        Expr::DestinationNat { family: NatFamily::Ipv4, address: 0, port: 1 },
    ];
    Rule::new(exprs, "PortMapping")
}
