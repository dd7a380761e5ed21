//! Tests of a packet and their nftables expressions.

use tortie_kernel::nftables::{CmpOp, Element, Expr, Field, Header, Key, MetaKey, Register, SetRef, SetSpec};
use tortie_policy::program::IcmpMatch;

use super::sets::{Family, Ranges, set};

/// Tests that must all hold.
pub(super) type Conjunction = Vec<Test>;

/// One test of a packet. A test of a header must come after the test of its family or protocol.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Test {
    /// The packet has this family.
    Family(Family),
    /// The protocol is one of these sorted numbers (none of them, if `invert`).
    Protocol { numbers: Vec<u8>, invert: bool },
    /// The packet is an ICMP message of this type, code, or both (it is not, if `invert`).
    Icmp { icmp: IcmpMatch, invert: bool },
    /// The address is in one of the ranges (in none, if `invert`).
    Address { side: PacketEnd, family: Family, ranges: Ranges, invert: bool },
    /// The nftables set of this name contains the key (does not, if `invert`).
    Member { key: Keyed, set: String, invert: bool },
    /// The port is in one of the ranges (in none, if `invert`).
    Port { side: PacketEnd, ranges: Ranges, invert: bool },
}

/// The packet fields in the keys of a set: the address of one side, and what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Keyed {
    pub side: PacketEnd,
    pub family: Family,
    pub then: Then,
}

/// The part of a key after the address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Then {
    Nothing,
    Protocol,
    /// The protocol, and the port of this side.
    Port(PacketEnd),
}

/// The end of the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum PacketEnd {
    Source,
    Destination,
}

/// Ranges of port numbers.
pub(super) fn port_ranges(ports: impl Iterator<Item = (u16, u16)>) -> Ranges {
    Ranges::new(ports.map(|(first, last)| (Key::port(first), Key::port(last))).collect())
}

/// The expressions that continue only if all tests hold.
pub(super) fn exprs(tests: &[Test]) -> Vec<Expr> {
    tests.iter().flat_map(Test::exprs).collect()
}

impl Test {
    /// The number of networks that it names.
    pub(super) fn networks(&self) -> usize {
        match self {
            Self::Address { ranges, .. } => ranges.as_slice().len(),
            _ => 0,
        }
    }

    /// The expressions that continue only if the test holds.
    pub(super) fn exprs(&self) -> Vec<Expr> {
        match self {
            Self::Family(family) => {
                let load = Expr::Meta { register: 0, key: MetaKey::NfProto };
                vec![load, is(vec![family.number()], false)]
            }
            Self::Protocol { numbers, invert } => {
                let keys: Vec<_> = numbers.iter().map(|number| Key::byte(*number)).collect();
                vec![
                    Expr::Meta { register: 0, key: MetaKey::L4Proto },
                    one_of(Field::Protocol, &keys, *invert),
                ]
            }
            Self::Icmp { icmp, invert } => icmp_is(icmp, *invert),
            Self::Address { side, family, ranges, invert } => {
                vec![load_address(*side, *family), in_ranges(family.field(), ranges, *invert)]
            }
            Self::Member { key, set, invert } => {
                let mut exprs = key.load();
                exprs.push(in_set(set, *invert));
                exprs
            }
            Self::Port { side, ranges, invert } => {
                vec![load_port(*side, 0), in_ranges(Field::Port, ranges, *invert)]
            }
        }
    }
}

impl Keyed {
    /// The address of one side.
    pub(super) fn address(side: PacketEnd, family: Family) -> Self {
        Self { side, family, then: Then::Nothing }
    }

    /// Address, protocol and port of one side.
    pub(super) fn address_port(side: PacketEnd, family: Family) -> Self {
        Self { side, family, then: Then::Port(side) }
    }

    /// The type of sets with such keys.
    pub(super) fn spec(self) -> SetSpec {
        let further: &[Field] = match self.then {
            Then::Nothing => &[],
            Then::Protocol => &[Field::Protocol],
            Then::Port(_) => &[Field::Protocol, Field::Port],
        };
        SetSpec::hash(&[&[self.family.field()], further].concat())
    }

    /// Loads the key.
    pub(super) fn load(self) -> Vec<Expr> {
        let behind = self.family.registers();
        let mut exprs = vec![load_address(self.side, self.family)];
        if self.then != Then::Nothing {
            exprs.push(Expr::Meta { register: behind, key: MetaKey::L4Proto });
        }
        if let Then::Port(side) = self.then {
            exprs.push(load_port(side, behind + 1));
        }
        exprs
    }
}

/// Type and code are the first two bytes in both ICMP and ICMPv6.
fn icmp_is(icmp: &IcmpMatch, invert: bool) -> Vec<Expr> {
    let (offset, value) = match (icmp.icmp_type, icmp.icmp_code) {
        (None, None) => return Vec::new(),
        (Some(icmp_type), None) => (0, vec![icmp_type]),
        (None, Some(icmp_code)) => (1, vec![icmp_code]),
        (Some(icmp_type), Some(icmp_code)) => (0, vec![icmp_type, icmp_code]),
    };
    let length = value.len() as u32;
    vec![Expr::Payload { register: 0, header: Header::Transport, offset, length }, is(value, invert)]
}

/// Loads the address of one side into the first registers.
pub(crate) fn load_address(side: PacketEnd, family: Family) -> Expr {
    load_address_to(side, family, 0)
}

/// Loads the address of one side into this register and the following ones.
pub(crate) fn load_address_to(side: PacketEnd, family: Family, register: Register) -> Expr {
    let offset = match (family, side) {
        (Family::V4, PacketEnd::Source) => 12,
        (Family::V4, PacketEnd::Destination) => 16,
        (Family::V6, PacketEnd::Source) => 8,
        (Family::V6, PacketEnd::Destination) => 24,
    };
    Expr::Payload { register, header: Header::Network, offset, length: family.field().length() as u32 }
}

fn load_port(side: PacketEnd, register: Register) -> Expr {
    let offset = match side {
        PacketEnd::Source => 0,
        PacketEnd::Destination => 2,
    };
    Expr::Payload { register, header: Header::Transport, offset, length: 2 }
}

/// The first registers contain a key of the set (none, if `invert`).
pub(crate) fn in_set(name: &str, invert: bool) -> Expr {
    Expr::Lookup { register: 0, set: SetRef::named(name), invert }
}

fn is(value: Vec<u8>, invert: bool) -> Expr {
    Expr::Cmp { register: 0, op: if invert { CmpOp::NotEqual } else { CmpOp::Equal }, value }
}

/// The first registers contain one of the keys.
fn one_of(field: Field, keys: &[Key], invert: bool) -> Expr {
    match keys {
        [one] => is(one.bytes().to_vec(), invert),
        many => {
            let elements = many.iter().copied().map(Element::key);
            let set = SetRef::Inline(Box::new(set(SetSpec::hash(&[field]), elements)));
            Expr::Lookup { register: 0, set, invert }
        }
    }
}

fn in_ranges(field: Field, ranges: &Ranges, invert: bool) -> Expr {
    match ranges.as_slice() {
        [(first, last)] if first == last => is(first.bytes().to_vec(), invert),
        [(first, last)] => {
            Expr::Range { register: 0, invert, first: first.bytes().to_vec(), last: last.bytes().to_vec() }
        }
        many => {
            let elements = many.iter().map(|(first, last)| Element::range(*first, *last));
            let set = SetRef::Inline(Box::new(set(SetSpec::interval(&[field]), elements)));
            Expr::Lookup { register: 0, set, invert }
        }
    }
}
