//! Services on a Linux node: a table of nftables that translates their addresses to those of backends.
//!
//! The client's port chooses the backend. It differs between connections, and the choice needs no state. A front without
//! backends refuses new connections. As with kube-proxy, UDP flows to a backend that has gone are forgotten, because their
//! packets would follow the former translation for ever.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use tortie_api::net::{Flow, Protocol};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::expr::state;
use tortie_kernel::nftables::{
    BaseChain, Chain, ChainKind, CmpOp, Element, Expr, Field, Header, Hook, Key, MetaKey, NatFamily, Nft,
    Reject, Rule, Set, SetRef, SetSpec, Table, Verdict, diff,
};

use super::{Backend, Front, Fronts};
use crate::LabError;

const TABLE: &str = "tortie-lab-services";
/// The map from address, protocol and port to the chain of a front.
const FRONTS: &str = "fronts";
/// The map from the addresses, protocols and ports of fronts without backends to the chain that refuses.
const EMPTY: &str = "empty";
/// Agents know by its name, as that of kube-proxy, that it drops nothing that policy allows.
const REJECT: &str = "reject-chain";
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

/// Makes the node's table that of these Services, which were those of `former` before.
pub(super) async fn set(netns: Arc<NetNs>, fronts: Arc<Fronts>, former: Arc<Fronts>) -> Result<(), LabError> {
    let change = move || {
        let desired = table(&fronts);
        netns.run(|| {
            let mut nft = Nft::open()?;
            let actual = nft.list(TABLE)?;
            let change = diff(TABLE, &desired, actual.as_ref());
            if !change.ops.is_empty() {
                nft.commit_in_order(&change)?;
            }
            let stale = Stale::between(&former, &fronts);
            if !stale.is_empty() {
                Conntrack::open()?.forget_flows(|flow| stale.has(flow))?;
            }
            Ok::<_, LabError>(())
        })?
    };
    let changed = tokio::task::spawn_blocking(change).await;
    changed.map_err(|error| LabError::problem("the table of Services", error.to_string()))?
}

/// The flows whose translation is no longer right.
#[derive(Debug, Default, PartialEq, Eq)]
struct Stale {
    /// Backends that have gone from a front.
    gone: BTreeSet<Backend>,
    /// Fronts that had no backend before: their flows were not translated.
    new: BTreeSet<(Option<Ipv4Addr>, u16)>,
}

impl Stale {
    fn between(former: &Fronts, fronts: &Fronts) -> Self {
        let none = BTreeSet::new();
        let backends = |of: &Fronts, front: &Front| of.get(front).cloned().unwrap_or_else(|| none.clone());
        let mut stale = Self::default();
        for front in former.keys().chain(fronts.keys()).filter(|front| front.protocol == Protocol::UDP) {
            let (before, after) = (backends(former, front), backends(fronts, front));
            stale.gone.extend(before.difference(&after));
            if before.is_empty() && !after.is_empty() {
                stale.new.insert((front.address, front.port));
            }
        }
        stale
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn has(&self, flow: &Flow) -> bool {
        let IpAddr::V4(address) = flow.destination else { return false };
        let port = flow.destination_port;
        flow.protocol == Protocol::UDP
            && (self.gone.contains(&(address, port))
                || [Some(address), None].iter().any(|address| self.new.contains(&(*address, port))))
    }
}

fn table(fronts: &Fronts) -> Table {
    let mut table = Table::default();
    let mut empty = Set {
        spec: SetSpec::verdict_map(&[Field::Ipv4, Field::Protocol, Field::Port]),
        elements: BTreeMap::new(),
    };
    for front in fronts.iter().filter(|(_, backends)| backends.is_empty()).map(|(front, _)| front) {
        let address = front.address.unwrap_or(ANY);
        let key = Key::address_port(address.into(), front.protocol.0, front.port);
        let element = Element::verdict(key, Verdict::Goto(REJECT.to_owned()));
        empty.elements.insert(element.key, element.value);
    }
    table.sets.insert(EMPTY.to_owned(), empty);
    let reject = Rule::new(vec![Expr::Reject(Reject::PortUnreachable)], "");
    table.chains.insert(REJECT.to_owned(), Chain { base: None, rules: vec![reject] });
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
    let mut base = |name: &str, kind, hook, priority, rules| {
        let base = Some(BaseChain { kind, hook, priority, drop: false });
        table.chains.insert(name.to_owned(), Chain { base, rules });
    };
    let both =
        |before: &[Expr], then: &[Expr]| vec![of_address(before, then), of_all_addresses(before, then)];
    base("incoming", ChainKind::Nat, Hook::Prerouting, DESTINATION_NAT, both(&[], &[look_up(FRONTS)]));
    // The node chose the source of its own packet for another destination.
    let mut own = both(&mark(), &[look_up(FRONTS)]);
    own.push(unmark());
    base("own", ChainKind::Nat, Hook::Output, DESTINATION_NAT, own);
    let source = vec![masquerade_itself(), masquerade_marked()];
    base("source", ChainKind::Nat, Hook::Postrouting, SOURCE_NAT, source);
    for (name, hook) in [("refuse-incoming", Hook::Prerouting), ("refuse-own", Hook::Output)] {
        base(name, ChainKind::Filter, hook, DESTINATION_NAT - 1, both(&is_new(), &[look_up(EMPTY)]));
    }
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
        exprs.push(Expr::DestinationNat { family: NatFamily::Ipv4, address: 0, port: 1 });
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

fn look_up(map: &str) -> Expr {
    Expr::VerdictMap { register: 0, set: SetRef::named(map) }
}

/// The packet begins a connection.
fn is_new() -> [Expr; 3] {
    [
        Expr::CtState { register: 0 },
        Expr::Bitwise { source: 0, destination: 0, mask: state::NEW.to_ne_bytes().into(), xor: vec![0; 4] },
        Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
    ]
}

fn of_address(before: &[Expr], then: &[Expr]) -> Rule {
    let mut exprs = [&is_ipv4()[..], before].concat();
    exprs.push(Expr::Payload { register: 0, header: Header::Network, offset: 16, length: 4 });
    exprs.extend(load_port());
    exprs.extend_from_slice(then);
    Rule::new(exprs, "a Service's address")
}

fn of_all_addresses(before: &[Expr], then: &[Expr]) -> Rule {
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
    exprs.extend_from_slice(then);
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
            runtime.block_on(set(netns.clone(), wanted.clone(), Arc::default())).unwrap();
            let found = netns.run(|| Nft::open().unwrap().list(TABLE).unwrap()).unwrap();
            assert_eq!(found, Some(table(&wanted)), "{count}");
        }
    }

    /// Only flows of UDP are forgotten, and only those whose translation is no longer right.
    #[test]
    fn flows_to_former_backends_are_stale() {
        let of = |protocol, backends: &[u8]| -> Fronts {
            let backends = backends.iter().map(|number| (Ipv4Addr::new(10, 0, 0, *number), 8080)).collect();
            [(Front { address: Some(Ipv4Addr::new(10, 96, 0, 1)), protocol, port: 53 }, backends)].into()
        };
        let flow = |protocol, destination: [u8; 4], destination_port| Flow {
            source: Ipv4Addr::new(10, 0, 0, 9).into(),
            destination: Ipv4Addr::from(destination).into(),
            protocol,
            source_port: 40_000,
            destination_port,
            icmp: None,
        };
        let (udp, tcp) = (Protocol::UDP, Protocol::TCP);
        let stale = Stale::between(&of(udp, &[1, 2]), &of(udp, &[2, 3]));
        assert!(stale.has(&flow(udp, [10, 0, 0, 1], 8080)));
        for other in
            [flow(udp, [10, 0, 0, 2], 8080), flow(tcp, [10, 0, 0, 1], 8080), flow(udp, [10, 96, 0, 1], 53)]
        {
            assert!(!stale.has(&other), "{other:?}");
        }
        let first = Stale::between(&of(udp, &[]), &of(udp, &[1]));
        assert!(first.has(&flow(udp, [10, 96, 0, 1], 53)) && !first.has(&flow(udp, [10, 0, 0, 1], 8080)));
        assert!(Stale::between(&of(udp, &[1]), &Fronts::new()).has(&flow(udp, [10, 0, 0, 1], 8080)));
        assert!(Stale::between(&of(tcp, &[1]), &of(tcp, &[])).is_empty());
    }
}
