//! What a rule asks of a packet, as expressions.
//!
//! A rule of nftables is a conjunction. A rule of a policy has alternatives inside: a selector's members lie in several
//! sets, ports may be numbers or sets, a negated port holds for packets that have none. So a rule becomes several, one
//! for each combination of a family, a class of protocols, and alternatives, that together match the same packets.

use tortie_api::net::{IpVersion, PortRange, Protocol};
use tortie_policy::program::{EntityMatch, IcmpMatch, Rule, SetId};

use super::sets::{Family, Part, merge, ranges, set};
use crate::nftables::{CmpOp, Element, Expr, Field, Header, Key, MetaKey, Register, SetRef, SetSpec};

/// More rules than this are not made of one; the endpoint is closed instead.
const MOST_ALTERNATIVES: usize = 256;

/// A rule with more alternatives than can be written down.
#[derive(Debug, PartialEq, Eq)]
pub struct TooManyAlternatives;

/// The conjunctions that together match what the rule matches. `exists` says which nftables sets there are.
pub fn conjunctions(
    rule: &Rule,
    exists: &dyn Fn(&str) -> bool,
) -> Result<Vec<Vec<Expr>>, TooManyAlternatives> {
    let mut all = Vec::new();
    for family in families(rule) {
        for class in classes(rule) {
            let Some(groups) = groups(rule, family, &class, exists) else { continue };
            all.extend(product(&groups)?);
        }
    }
    if all.len() > MOST_ALTERNATIVES { Err(TooManyAlternatives) } else { Ok(all) }
}

/// Alternatives; at least one of them must hold.
type Group = Vec<Vec<Expr>>;

/// Every way to take one alternative of each group.
fn product(groups: &[Group]) -> Result<Vec<Vec<Expr>>, TooManyAlternatives> {
    let mut all = vec![Vec::new()];
    for group in groups {
        if all.len() * group.len() > MOST_ALTERNATIVES {
            return Err(TooManyAlternatives);
        }
        let longer = |start: &Vec<Expr>| {
            let start = start.clone();
            group.iter().map(move |alternative| [start.as_slice(), alternative].concat())
        };
        all = all.iter().flat_map(longer).collect();
    }
    Ok(all)
}

/// The families that the rule must be written for one by one; `None` where it does not matter.
fn families(rule: &Rule) -> Vec<Option<Family>> {
    let asks_addresses = |entity: &EntityMatch| {
        !entity.nets.is_empty() || !entity.not_nets.is_empty() || entity.set_ids().next().is_some()
    };
    match rule.ip_version {
        Some(IpVersion::V4) => vec![Some(Family::V4)],
        Some(IpVersion::V6) => vec![Some(Family::V6)],
        None if asks_addresses(&rule.source) || asks_addresses(&rule.destination) => {
            vec![Some(Family::V4), Some(Family::V6)]
        }
        None => vec![None],
    }
}

/// Protocols that are alike in what can be asked of their packets.
#[derive(Debug, Clone)]
struct Class {
    /// It is one of these, if there are any.
    one_of: Vec<u8>,
    /// It is none of these.
    none_of: Vec<u8>,
    has_ports: bool,
    is_icmp: bool,
}

const WITH_PORTS: [u8; 3] = [Protocol::TCP.0, Protocol::UDP.0, Protocol::SCTP.0];
const ICMP: [u8; 2] = [Protocol::ICMP.0, Protocol::ICMPV6.0];

/// The classes that the rule must be written for one by one.
fn classes(rule: &Rule) -> Vec<Class> {
    let has_ports = |protocol: u8| WITH_PORTS.contains(&protocol);
    let asks_ports = [&rule.source, &rule.destination].into_iter().any(|entity| {
        !(entity.ports.is_empty()
            && entity.port_sets.is_empty()
            && entity.not_ports.is_empty()
            && entity.not_port_sets.is_empty())
    });
    let asks_icmp = rule.icmp.is_some() || rule.not_icmp.is_some();
    let class = |one_of: &[u8], none_of: &[u8]| Class {
        one_of: one_of.to_vec(),
        none_of: none_of.to_vec(),
        has_ports: one_of.first().is_some_and(|protocol| has_ports(*protocol)),
        is_icmp: one_of.first().is_some_and(|protocol| ICMP.contains(protocol)),
    };
    let mut classes = match rule.protocol {
        Some(Protocol(protocol)) => vec![class(&[protocol], &[])],
        None => {
            let asked = [(asks_ports, &WITH_PORTS[..]), (asks_icmp, &ICMP[..])];
            let asked = asked.into_iter().filter_map(|(asks, protocols)| asks.then_some(protocols));
            let mut classes: Vec<_> = asked.clone().map(|protocols| class(protocols, &[])).collect();
            classes.push(class(&[], &asked.flatten().copied().collect::<Vec<_>>()));
            classes
        }
    };
    if let Some(Protocol(unwanted)) = rule.not_protocol {
        classes.retain_mut(|class| {
            let any = class.one_of.is_empty();
            class.one_of.retain(|protocol| *protocol != unwanted);
            if any && !class.none_of.contains(&unwanted) {
                class.none_of.push(unwanted);
            }
            any || !class.one_of.is_empty()
        });
    }
    classes
}

/// What must hold for packets of this family and class; `None` if nothing can match.
fn groups(
    rule: &Rule,
    family: Option<Family>,
    class: &Class,
    exists: &dyn Fn(&str) -> bool,
) -> Option<Vec<Group>> {
    let mut tests = Tests { groups: Vec::new(), family, has_ports: class.has_ports, exists };
    if let Some(family) = family {
        tests.all(family_is(family));
    }
    tests.all(protocol_in(&class.one_of, false));
    tests.all(protocol_in(&class.none_of, true));
    tests.icmp(rule, class)?;
    tests.entity(&rule.source, Side::Source)?;
    tests.entity(&rule.destination, Side::Destination)?;
    Some(tests.groups)
}

/// Which end of the packet.
#[derive(Debug, Clone, Copy)]
pub enum Side {
    Source,
    Destination,
}

/// What has been asked so far.
struct Tests<'a> {
    groups: Vec<Group>,
    family: Option<Family>,
    has_ports: bool,
    exists: &'a dyn Fn(&str) -> bool,
}

impl Tests<'_> {
    /// One thing that must hold.
    fn all(&mut self, exprs: Vec<Expr>) {
        if !exprs.is_empty() {
            self.groups.push(vec![exprs]);
        }
    }

    /// Several of which one must hold; `None` if there are none.
    fn any(&mut self, alternatives: Group) -> Option<()> {
        if alternatives.is_empty() {
            return None;
        }
        self.groups.push(alternatives);
        Some(())
    }

    fn icmp(&mut self, rule: &Rule, class: &Class) -> Option<()> {
        if let Some(wanted) = &rule.icmp {
            class.is_icmp.then_some(())?;
            self.all(icmp_is(wanted, CmpOp::Equal));
        }
        if let Some(unwanted) = rule.not_icmp.as_ref().filter(|_| class.is_icmp) {
            let test = icmp_is(unwanted, CmpOp::NotEqual);
            // Neither type nor code: every ICMP packet is unwanted.
            (!test.is_empty()).then_some(())?;
            self.all(test);
        }
        Some(())
    }

    fn entity(&mut self, entity: &EntityMatch, side: Side) -> Option<()> {
        if let Some(family) = self.family {
            self.addresses(entity, side, family)?;
        }
        if !entity.ports.is_empty() || !entity.port_sets.is_empty() {
            self.has_ports.then_some(())?;
            let numbers = (!entity.ports.is_empty()).then(|| port_in(side, &entity.ports, false));
            let sets = self.existing(&entity.port_sets, Part::AddressPorts);
            let family = self.family;
            let sets = sets.into_iter().filter_map(|name| Some(address_port_in(side, family?, name, false)));
            self.any(numbers.into_iter().chain(sets).collect())?;
        }
        if self.has_ports {
            if !entity.not_ports.is_empty() {
                self.all(port_in(side, &entity.not_ports, true));
            }
            for name in self.existing(&entity.not_port_sets, Part::AddressPorts) {
                let test = self.family.map(|family| address_port_in(side, family, name, true));
                self.all(test.unwrap_or_default());
            }
        }
        Some(())
    }

    fn addresses(&mut self, entity: &EntityMatch, side: Side, family: Family) -> Option<()> {
        let of_family = |nets: &[ipnet::IpNet]| {
            ranges(nets.iter().copied().filter(|net| Family::of(net.addr()) == family))
        };
        if !entity.nets.is_empty() {
            let test =
                in_ranges(load_address(side, family), family.field(), &of_family(&entity.nets), false)?;
            self.all(test);
        }
        let test = in_ranges(load_address(side, family), family.field(), &of_family(&entity.not_nets), true)?;
        self.all(test);
        let lookup = |name: String, invert: bool| {
            vec![load_address(side, family), Expr::Lookup { register: 0, set: SetRef::Named(name), invert }]
        };
        for id in &entity.sets {
            let names = self.parts(id, family);
            self.any(names.into_iter().map(|name| lookup(name, false)).collect())?;
        }
        for id in &entity.not_sets {
            self.parts(id, family).into_iter().for_each(|name| self.all(lookup(name, true)));
        }
        Some(())
    }

    /// The nftables sets that together hold the addresses of a set.
    fn parts(&self, id: &SetId, family: Family) -> Vec<String> {
        let parts = [Part::Addresses(family), Part::Nets(family)].into_iter();
        parts.map(|part| part.name(id)).filter(|name| (self.exists)(name)).collect()
    }

    /// Those of the sets that there are for this family.
    fn existing(&self, ids: &[SetId], part: impl Fn(Family) -> Part) -> Vec<String> {
        let Some(family) = self.family else { return Vec::new() };
        ids.iter().map(|id| part(family).name(id)).filter(|name| (self.exists)(name)).collect()
    }
}

/// The packet is of this family.
pub fn family_is(family: Family) -> Vec<Expr> {
    let number = match family {
        Family::V4 => libc::NFPROTO_IPV4,
        Family::V6 => libc::NFPROTO_IPV6,
    };
    vec![
        Expr::Meta { register: 0, key: MetaKey::NfProto },
        Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![number as u8] },
    ]
}

/// The protocol is one of these (none of these, when `invert`); nothing is asked where there are none.
pub fn protocol_in(protocols: &[u8], invert: bool) -> Vec<Expr> {
    let load = Expr::Meta { register: 0, key: MetaKey::L4Proto };
    match protocols {
        [] => Vec::new(),
        [one] => {
            let op = if invert { CmpOp::NotEqual } else { CmpOp::Equal };
            vec![load, Expr::Cmp { register: 0, op, value: vec![*one] }]
        }
        many => {
            let elements = many.iter().map(|protocol| Element::key(Key::byte(*protocol)));
            let set = SetRef::Inline(Box::new(set(SetSpec::hash(&[Field::Protocol]), elements)));
            vec![load, Expr::Lookup { register: 0, set, invert }]
        }
    }
}

/// Type and code are the first two bytes of ICMP and ICMPv6 alike.
fn icmp_is(wanted: &IcmpMatch, op: CmpOp) -> Vec<Expr> {
    let (offset, value) = match (wanted.icmp_type, wanted.icmp_code) {
        (None, None) => return Vec::new(),
        (Some(icmp_type), None) => (0, vec![icmp_type]),
        (None, Some(icmp_code)) => (1, vec![icmp_code]),
        (Some(icmp_type), Some(icmp_code)) => (0, vec![icmp_type, icmp_code]),
    };
    let length = value.len() as u32;
    vec![
        Expr::Payload { register: 0, header: Header::Transport, offset, length },
        Expr::Cmp { register: 0, op, value },
    ]
}

/// Loads the address of one side into the first register.
pub fn load_address(side: Side, family: Family) -> Expr {
    let offset = match (family, side) {
        (Family::V4, Side::Source) => 12,
        (Family::V4, Side::Destination) => 16,
        (Family::V6, Side::Source) => 8,
        (Family::V6, Side::Destination) => 24,
    };
    Expr::Payload { register: 0, header: Header::Network, offset, length: family.field().length() as u32 }
}

fn load_port(side: Side, register: Register) -> Expr {
    let offset = match side {
        Side::Source => 0,
        Side::Destination => 2,
    };
    Expr::Payload { register, header: Header::Transport, offset, length: 2 }
}

fn port_in(side: Side, ports: &[PortRange], invert: bool) -> Vec<Expr> {
    let keys = ports.iter().filter(|range| range.first <= range.last);
    let keys = merge(keys.map(|range| (Key::port(range.first), Key::port(range.last))).collect());
    in_ranges(load_port(side, 0), Field::Port, &keys, invert).unwrap_or_else(never)
}

/// An expression that holds for no packet.
fn never() -> Vec<Expr> {
    let nothing = || vec![0; 4];
    vec![
        Expr::Meta { register: 0, key: MetaKey::Mark },
        Expr::Bitwise { source: 0, destination: 0, mask: nothing(), xor: nothing() },
        Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: nothing() },
    ]
}

fn address_port_in(side: Side, family: Family, set: String, invert: bool) -> Vec<Expr> {
    let address_registers = family.field().length() as Register / 4;
    vec![
        load_address(side, family),
        Expr::Meta { register: address_registers, key: MetaKey::L4Proto },
        load_port(side, address_registers + 1),
        Expr::Lookup { register: 0, set: SetRef::Named(set), invert },
    ]
}

/// What is loaded lies in one of the ranges (in none, when `invert`). `None` if that is never so, and no expression if
/// it always is.
pub fn in_ranges(load: Expr, field: Field, ranges: &[(Key, Key)], invert: bool) -> Option<Vec<Expr>> {
    let is_all = |(first, last): &(Key, Key)| first.previous().is_none() && last.next().is_none();
    let everything = match ranges {
        [] => Some(false),
        [one] if is_all(one) => Some(true),
        _ => None,
    };
    if let Some(everything) = everything {
        return (everything != invert).then(Vec::new);
    }
    let test = match ranges {
        [(first, last)] if first == last => {
            let op = if invert { CmpOp::NotEqual } else { CmpOp::Equal };
            Expr::Cmp { register: 0, op, value: first.bytes().to_vec() }
        }
        [(first, last)] => {
            Expr::Range { register: 0, invert, first: first.bytes().to_vec(), last: last.bytes().to_vec() }
        }
        many => {
            let elements = many.iter().map(|(first, last)| Element::range(*first, *last));
            let set = SetRef::Inline(Box::new(set(SetSpec::interval(&[field]), elements)));
            Expr::Lookup { register: 0, set, invert }
        }
    };
    Some(vec![load, test])
}
