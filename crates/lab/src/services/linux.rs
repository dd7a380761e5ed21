//! Services on a Linux node: a table of nftables that translates their addresses to those of backends.
//!
//! The client's port chooses the backend. It differs between connections, and the choice needs no state.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Element, Expr, Field, Header, Hook, Key, MetaKey, Nft, Rule, Set,
    SetRef, SetSpec, Table, Verdict, diff,
};

use super::{Backend, Fronts};
use crate::LabError;

const TABLE: &str = "tortie-lab-services";
/// The map from address, protocol and port to the chain of a front.
const FRONTS: &str = "fronts";
/// The pairs of equal addresses of backends.
const ITSELF: &str = "itself";
/// `NF_IP_PRI_NAT_DST`
const DESTINATION_NAT: i32 = -100;
/// `NF_IP_PRI_NAT_SRC`
const SOURCE_NAT: i32 = 100;
/// The bit of the mark of packets whose source is translated. kube-proxy uses the same.
const MASQUERADED: u32 = 0x4000;
/// The address that stands for all addresses of the node.
const ANY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

/// Makes the node's table that of these Services.
pub(super) async fn set(netns: Arc<NetNs>, fronts: Arc<Fronts>) -> Result<(), LabError> {
    let change = move || {
        let desired = table(&fronts);
        netns.run(|| {
            let mut nft = Nft::open()?;
            let actual = nft.list(TABLE)?;
            let change = diff(TABLE, &desired, actual.as_ref());
            if !change.ops.is_empty() {
                nft.commit_in_order(&change)?;
            }
            Ok::<_, LabError>(())
        })?
    };
    let changed = tokio::task::spawn_blocking(change).await;
    changed.map_err(|error| LabError::problem("the table of Services", error.to_string()))?
}

fn table(fronts: &Fronts) -> Table {
    let mut table = Table::default();
    let mut map = Set {
        spec: SetSpec::verdict_map(&[Field::Ipv4, Field::Protocol, Field::Port]),
        elements: BTreeMap::new(),
    };
    let mut itself = Set { spec: SetSpec::hash(&[Field::Ipv4, Field::Ipv4]), elements: BTreeMap::new() };
    for (front, backends) in fronts.iter().filter(|(_, backends)| !backends.is_empty()) {
        let address = front.address.unwrap_or(ANY);
        let name = format!("{address}-{}-{}", front.protocol.0, front.port);
        // A NodePort's client waits for an answer of this node, wherever the backend is.
        let rules = rules(backends, front.address.is_none());
        table.chains.insert(name.clone(), Chain { base: None, rules });
        let key = Key::address_port(address.into(), front.protocol.0, front.port);
        let element = Element::verdict(key, Verdict::Goto(name));
        map.elements.insert(element.key, element.value);
        let pairs = backends.iter().filter_map(|(address, _)| {
            Some(Element::key(Key::new(&[address.octets(), address.octets()].concat())?))
        });
        itself.elements.extend(pairs.map(|element| (element.key, element.value)));
    }
    table.sets.insert(FRONTS.to_owned(), map);
    table.sets.insert(ITSELF.to_owned(), itself);
    let mut base = |name: &str, hook, priority, rules| {
        let base = Some(BaseChain { kind: ChainKind::Nat, hook, priority, drop: false });
        table.chains.insert(name.to_owned(), Chain { base, rules });
    };
    let both = |before: &[Expr]| vec![of_address(before), of_all_addresses(before)];
    base("incoming", Hook::Prerouting, DESTINATION_NAT, both(&[]));
    // The node chose the source of its own packet for another destination.
    let mut own = both(&mark());
    own.push(unmark());
    base("own", Hook::Output, DESTINATION_NAT, own);
    base("source", Hook::Postrouting, SOURCE_NAT, vec![masquerade_itself(), masquerade_marked()]);
    table
}

/// One rule for each backend, with its part of the client's ports.
fn rules(backends: &BTreeSet<Backend>, is_masqueraded: bool) -> Vec<Rule> {
    let count = backends.len().min(PARTS);
    let rule = |(number, (address, port)): (usize, &Backend)| {
        let mut exprs = Vec::new();
        if number + 1 < count {
            // The lowest bits, because clients use consecutive ports.
            let end = ((number + 1) * PARTS).div_ceil(count) - 1;
            exprs.push(Expr::Payload { register: 0, header: Header::Transport, offset: 1, length: 1 });
            let end = u8::try_from(end).unwrap_or(u8::MAX);
            exprs.push(Expr::Cmp { register: 0, op: CmpOp::LessOrEqual, value: vec![end] });
        }
        if is_masqueraded {
            exprs.extend(mark());
        }
        exprs.push(Expr::Immediate { register: 0, value: address.octets().to_vec() });
        exprs.push(Expr::Immediate { register: 1, value: port.to_be_bytes().to_vec() });
        exprs.push(Expr::DestinationNat { address: 0, port: 1 });
        Rule::new(exprs, "")
    };
    backends.iter().take(count).enumerate().map(rule).collect()
}

/// The values of the byte that chooses.
const PARTS: usize = 256;

fn is_ipv4() -> [Expr; 2] {
    [
        Expr::Meta { register: 0, key: MetaKey::NfProto },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![NFPROTO_IPV4] },
    ]
}

const NFPROTO_IPV4: u8 = 2;

/// Loads protocol and port of the destination behind its address.
fn load_port() -> [Expr; 2] {
    [
        Expr::Meta { register: 1, key: MetaKey::L4Proto },
        Expr::Payload { register: 2, header: Header::Transport, offset: 2, length: 2 },
    ]
}

fn look_up() -> Expr {
    Expr::VerdictMap { register: 0, set: SetRef::named(FRONTS) }
}

fn of_address(before: &[Expr]) -> Rule {
    let mut exprs = [&is_ipv4()[..], before].concat();
    exprs.push(Expr::Payload { register: 0, header: Header::Network, offset: 16, length: 4 });
    exprs.extend(load_port());
    exprs.push(look_up());
    Rule::new(exprs, "a Service's address")
}

fn of_all_addresses(before: &[Expr]) -> Rule {
    /// `NFT_FIB_RESULT_ADDRTYPE`, `NFTA_FIB_F_DADDR`
    const ADDRESS_TYPE: u32 = 3;
    const OF_DESTINATION: u32 = 2;
    /// `RTN_LOCAL`
    const LOCAL: u32 = 2;
    let mut exprs = [&is_ipv4()[..], before].concat();
    exprs.push(Expr::Fib { register: 0, result: ADDRESS_TYPE, flags: OF_DESTINATION });
    exprs.push(Expr::Cmp { register: 0, op: CmpOp::Equal, value: LOCAL.to_ne_bytes().into() });
    exprs.push(Expr::Immediate { register: 0, value: ANY.octets().to_vec() });
    exprs.extend(load_port());
    exprs.push(look_up());
    Rule::new(exprs, "a port of the node")
}

fn mark() -> [Expr; 3] {
    [
        Expr::Meta { register: 0, key: MetaKey::Mark },
        Expr::Bitwise {
            source: 0,
            destination: 0,
            mask: (!MASQUERADED).to_ne_bytes().into(),
            xor: MASQUERADED.to_ne_bytes().into(),
        },
        Expr::SetMeta { register: 0, key: MetaKey::Mark },
    ]
}

/// A look-up without a result does not take the mark back.
fn unmark() -> Rule {
    let exprs = vec![
        Expr::Meta { register: 0, key: MetaKey::Mark },
        Expr::Bitwise {
            source: 0,
            destination: 0,
            mask: (!MASQUERADED).to_ne_bytes().into(),
            xor: vec![0; 4],
        },
        Expr::SetMeta { register: 0, key: MetaKey::Mark },
    ];
    Rule::new(exprs, "other packets of the node")
}

fn masquerade_marked() -> Rule {
    let exprs = vec![
        Expr::Meta { register: 0, key: MetaKey::Mark },
        Expr::Bitwise { source: 0, destination: 0, mask: MASQUERADED.to_ne_bytes().into(), xor: vec![0; 4] },
        Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
        Expr::Masquerade,
    ];
    Rule::new(exprs, "the node's packets to Services")
}

fn masquerade_itself() -> Rule {
    let mut exprs = is_ipv4().to_vec();
    exprs.push(Expr::Payload { register: 0, header: Header::Network, offset: 12, length: 4 });
    exprs.push(Expr::Payload { register: 1, header: Header::Network, offset: 16, length: 4 });
    exprs.push(Expr::Lookup { register: 0, set: SetRef::named(ITSELF), invert: false });
    exprs.push(Expr::Masquerade);
    Rule::new(exprs, "a pod reaches itself by a Service")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_api::net::Protocol;

    use super::super::Front;
    use super::*;

    fn fronts(count: u8) -> Fronts {
        let backends = (1..=count).map(|number| (Ipv4Addr::new(10, 0, 0, number), 8080)).collect();
        [(Front { address: Some(Ipv4Addr::new(10, 96, 0, 1)), protocol: Protocol::TCP, port: 80 }, backends)]
            .into()
    }

    /// Each backend gets its share of the client's ports, and every port leads to one.
    #[test]
    fn backends_share_the_ports() {
        for count in [1, 2, 3, 7, 200, 255] {
            let rules = rules(&fronts(count).into_values().next().unwrap(), false);
            let mut shares = vec![0; rules.len()];
            for byte in 0..=u8::MAX {
                let takes = |rule: &Rule| match &rule.exprs[1] {
                    Expr::Cmp { value, .. } => byte <= value[0],
                    _ => true,
                };
                shares[rules.iter().position(takes).unwrap()] += 1;
            }
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            assert!(shares.len() == usize::from(count) && most - least <= 1, "{count}: {shares:?}");
        }
    }

    /// The kernel takes the table, and returns it unchanged.
    #[test]
    fn the_kernel_keeps_the_table() {
        let netns = Arc::new(NetNs::create().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for count in [0, 3, 1, 0] {
            let wanted = Arc::new(fronts(count));
            runtime.block_on(set(netns.clone(), wanted.clone())).unwrap();
            let found = netns.run(|| Nft::open().unwrap().list(TABLE).unwrap()).unwrap();
            assert_eq!(found, Some(table(&wanted)), "{count}");
        }
    }
}
