//! Parts of rules.

use tortie_api::net::Protocol;
use tortie_kernel::nftables::expr::{state, status};
use tortie_kernel::nftables::{
    CmpOp, CtKey, Expr, Field, Header, Key, MetaKey, NatFamily, Register, Reject, Rule, SetRef, Verdict,
};

use super::layout::{CLASSES, Kind, PROTOCOLS, Place, SetId, SlotClass};
use crate::dataplane::nat::is_local;
use crate::dataplane::packet_test::{PacketEnd, in_set, load_address, load_address_to};
use crate::dataplane::sets::Family;

/// The protocols of Services.
pub(super) const WITH_PORTS: [Protocol; 3] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];

/// The expressions of a rule so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Words(Vec<Expr>);

/// A rule that begins with nothing.
pub(super) fn any() -> Words {
    Words::default()
}

/// A rule for packets of a family.
pub(super) fn of(family: Family) -> Words {
    any().of(family)
}

#[expect(clippy::wrong_self_convention, reason = "together, the names make a sentence")]
impl Words {
    fn and(mut self, more: impl IntoIterator<Item = Expr>) -> Self {
        self.0.extend(more);
        self
    }

    /// The packet has this family.
    pub(super) fn of(self, family: Family) -> Self {
        let load = Expr::Meta { register: 0, key: MetaKey::NfProto };
        self.and([load, Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![family.number()] }])
    }

    /// The packet begins a connection.
    pub(super) fn is_new(self) -> Self {
        self.and(has_bit(Expr::CtState { register: 0 }, state::NEW, true))
    }

    /// The destination of the connection is translated, or not.
    pub(super) fn is_translated(self, translated: bool) -> Self {
        let load = Expr::Ct { register: 0, key: CtKey::Status };
        self.and(has_bit(load, status::DESTINATION_NAT, translated))
    }

    /// The packet has one of the protocols of Services.
    pub(super) fn has_port(self) -> Self {
        self.and([Expr::Meta { register: 0, key: MetaKey::L4Proto }, in_set(PROTOCOLS, false)])
    }

    pub(super) fn protocol(self, protocol: Protocol) -> Self {
        let load = Expr::Meta { register: 0, key: MetaKey::L4Proto };
        self.and([load, Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![protocol.0] }])
    }

    /// An address of the packet is in a set (is not, if `invert`).
    pub(super) fn address(self, side: PacketEnd, set: SetId, invert: bool) -> Self {
        self.and([load_address(side, set.family), in_set(&set.name(), invert)])
    }

    /// An address of the packet is the node's own.
    pub(super) fn is_local(self, side: PacketEnd) -> Self {
        self.and(is_local(side, CmpOp::Equal))
    }

    /// An address of the packet is not the node's own.
    pub(super) fn is_not_local(self, side: PacketEnd) -> Self {
        self.and(is_local(side, CmpOp::NotEqual))
    }

    /// The destination, or that of the connection's first packet, is this address.
    pub(super) fn is_to(self, address: &Key, family: Family, when: When) -> Self {
        let value = address.bytes().to_vec();
        self.and([destination(family, when), Expr::Cmp { register: 0, op: CmpOp::Equal, value }])
    }

    /// The destination, or that of the connection's first packet, is in a set.
    pub(super) fn is_in(self, set: SetId, when: When) -> Self {
        self.and([destination(set.family, when), in_set(&set.name(), false)])
    }

    /// The destination, or that of the connection's first packet, is no loopback address.
    pub(super) fn is_no_loopback(self, family: Family, when: When) -> Self {
        let words = self.and([destination(family, when)]);
        let not = |value| Expr::Cmp { register: 0, op: CmpOp::NotEqual, value };
        match family {
            Family::V4 => {
                let (mask, xor) = (vec![0xff, 0, 0, 0], vec![0; 4]);
                let network = Expr::Bitwise { source: 0, destination: 0, mask, xor };
                words.and([network, not(vec![127, 0, 0, 0])])
            }
            Family::V6 => words.and([not(std::net::Ipv6Addr::LOCALHOST.octets().to_vec())]),
        }
    }

    /// The source and the destination together are in a set.
    pub(super) fn is_itself(self, family: Family) -> Self {
        let behind = load_address_to(PacketEnd::Destination, family, family.registers());
        let set = SetId::new(Kind::Itself, family);
        self.and([load_address(PacketEnd::Source, family), behind, in_set(&set.name(), false)])
    }

    /// The frontend of the packet, or of the connection's first packet, is in a set.
    pub(super) fn frontend(self, set: SetId, place: Place, when: When) -> Self {
        self.and(frontend(set.family, place, when)).and([in_set(&set.name(), false)])
    }

    /// Sets the priority to the value that a map has for the frontend of the packet, or of the connection's first packet; ends the rule if it
    /// has none.
    pub(super) fn set_priority_by(self, map: SetId, place: Place, when: When) -> Self {
        self.and(frontend(map.family, place, when)).and(set_priority_from(map.name()))
    }

    /// Sets the priority to the value that a map has for the source; ends the rule if it has none.
    pub(super) fn set_priority_by_source(self, map: String, family: Family) -> Self {
        self.and([load_address(PacketEnd::Source, family)]).and(set_priority_from(map))
    }

    /// Sets the priority, a unit, to the token that a map has for the unit and the destination; ends the rule if it has none.
    pub(super) fn set_priority_to_token(self, map: SetId) -> Self {
        let family = map.family;
        let first = 1 + family.registers();
        let (header, length) = (Header::Transport, Field::Port.length() as u32);
        self.and([
            Expr::Meta { register: 0, key: MetaKey::Priority },
            load_address_to(PacketEnd::Destination, family, 1),
            Expr::Meta { register: first, key: MetaKey::L4Proto },
            Expr::Payload { register: first + 1, header, offset: 2, length },
        ])
        .and(set_priority_from(map.name()))
    }

    /// Translates the destination to the backend whose token is the priority; ends the rule if there is none.
    pub(super) fn to_backend_of_token(self, family: Family) -> Rule {
        let (nat, after) = nat(family);
        let backends = SetId::new(Kind::TokenBackends, family).name();
        self.ends([
            Expr::Meta { register: 0, key: MetaKey::Priority },
            Expr::Map { register: 0, set: SetRef::named(backends), destination: 0 },
            Expr::DestinationNat { family: nat, address: 0, port: after },
        ])
    }

    /// Puts the source with the priority into a map, or begins the time of the source anew.
    pub(super) fn learn(self, map: String, family: Family, seconds: u32) -> Rule {
        let value = family.registers();
        self.ends([
            load_address(PacketEnd::Source, family),
            Expr::Meta { register: value, key: MetaKey::Priority },
            Expr::Learn { register: 0, value, map, seconds },
        ])
    }

    /// Continues where a map of verdicts says for the priority, if it says something.
    pub(super) fn by_priority(self, map: &str) -> Rule {
        let load = Expr::Meta { register: 0, key: MetaKey::Priority };
        self.ends([load, Expr::VerdictMap { register: 0, set: SetRef::named(map) }])
    }

    /// Sets the priority to 0, which is no class.
    pub(super) fn reset_priority(self) -> Self {
        let zero = Expr::Immediate { register: 0, value: vec![0; 4] };
        self.and([zero, Expr::SetMeta { register: 0, key: MetaKey::Priority }])
    }

    /// The priority is 0.
    pub(super) fn has_no_priority(self) -> Self {
        let load = Expr::Meta { register: 0, key: MetaKey::Priority };
        self.and([load, Expr::Cmp { register: 0, op: CmpOp::Equal, value: vec![0; 4] }])
    }

    /// The priority is this number.
    pub(super) fn has_priority(self, number: u32) -> Self {
        let load = Expr::Meta { register: 0, key: MetaKey::Priority };
        self.and([load, Expr::Cmp { register: 0, op: CmpOp::Equal, value: number.to_ne_bytes().to_vec() }])
    }

    /// The priority and the source together are in the set of networks that pass.
    pub(super) fn source_is_allowed(self, family: Family) -> Self {
        let set = SetId::new(Kind::Allowed, family);
        self.and([
            Expr::Meta { register: 0, key: MetaKey::Priority },
            Expr::NetworkOrder { register: 0 },
            load_address_to(PacketEnd::Source, family, 1),
            in_set(&set.name(), false),
        ])
    }

    /// Continues in the chain of the class that is the priority, if it is one.
    pub(super) fn go_to_class(self) -> Rule {
        self.by_priority(CLASSES)
    }

    /// Translates the destination to the backend in a random slot.
    pub(super) fn to_backend(self, class: SlotClass) -> Rule {
        let SlotClass { family, place, list, slots } = class;
        let (nat, after) = nat(family);
        let set = SetId::new(Kind::Slots(place, list), family);
        let random = Expr::Random { register: registers(family, place), modulus: slots.into() };
        self.and(frontend(family, place, When::Now)).ends([
            random,
            Expr::Map { register: 0, set: SetRef::named(set.name()), destination: 0 },
            Expr::DestinationNat { family: nat, address: 0, port: after },
        ])
    }

    /// Translates the destination to itself, so that no later chain translates the connection. It does not count as translated.
    pub(super) fn to_itself(self, family: Family) -> Rule {
        let load = load_address(PacketEnd::Destination, family);
        self.ends([load, Expr::DestinationNatToAddress { family: nat(family).0, address: 0 }])
    }

    /// Gives the packet an address of the node as its source.
    pub(super) fn masquerade(self) -> Rule {
        self.ends([Expr::MasqueradeToRandomPort])
    }

    pub(super) fn reject(self, how: Reject) -> Rule {
        self.ends([Expr::Reject(how)])
    }

    pub(super) fn drop(self) -> Rule {
        self.ends([Expr::Verdict(Verdict::Drop)])
    }

    pub(super) fn accept(self) -> Rule {
        self.ends([Expr::Verdict(Verdict::Accept)])
    }

    pub(super) fn go_to(self, chain: &str) -> Rule {
        self.ends([Expr::Verdict(Verdict::Goto(chain.to_owned()))])
    }

    pub(super) fn jump(self, chain: &str) -> Rule {
        self.ends([Expr::Verdict(Verdict::Jump(chain.to_owned()))])
    }

    /// The rule as it is.
    pub(super) fn rule(self) -> Rule {
        self.ends([])
    }

    fn ends(self, with: impl IntoIterator<Item = Expr>) -> Rule {
        Rule::new(self.and(with).0, "")
    }
}

/// The packet of which a destination is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// The packet as it is now.
    Now,
    /// The first packet of its connection, before translation.
    First,
}

fn destination(family: Family, when: When) -> Expr {
    match (when, family) {
        (When::Now, _) => load_address(PacketEnd::Destination, family),
        (When::First, Family::V4) => Expr::Ct { register: 0, key: CtKey::OriginalIpv4Destination },
        (When::First, Family::V6) => Expr::Ct { register: 0, key: CtKey::OriginalIpv6Destination },
    }
}

/// Loads the key of the frontend.
fn frontend(family: Family, place: Place, when: When) -> Vec<Expr> {
    let (first, address) = match place {
        Place::Address => (family.registers(), Some(destination(family, when))),
        Place::Node => (0, None),
    };
    let (header, length) = (Header::Transport, Field::Port.length() as u32);
    let port = match when {
        When::Now => Expr::Payload { register: first + 1, header, offset: 2, length },
        When::First => Expr::Ct { register: first + 1, key: CtKey::OriginalDestinationPort },
    };
    let protocol = Expr::Meta { register: first, key: MetaKey::L4Proto };
    address.into_iter().chain([protocol, port]).collect()
}

/// The number of registers of a frontend's key.
fn registers(family: Family, place: Place) -> Register {
    match place {
        Place::Address => family.registers() + 2,
        Place::Node => 2,
    }
}

/// The family of a translation, and the register behind an address in register 0.
fn nat(family: Family) -> (NatFamily, Register) {
    let nat = match family {
        Family::V4 => NatFamily::Ipv4,
        Family::V6 => NatFamily::Ipv6,
    };
    (nat, family.registers())
}

/// Sets the priority to the value that a map has for the loaded key.
fn set_priority_from(map: String) -> [Expr; 2] {
    let loaded = Expr::Map { register: 0, set: SetRef::named(map), destination: 0 };
    [loaded, Expr::SetMeta { register: 0, key: MetaKey::Priority }]
}

/// The loaded bits contain this one, or do not.
fn has_bit(load: Expr, bit: u32, is_set: bool) -> [Expr; 3] {
    let (mask, xor) = (bit.to_ne_bytes().to_vec(), vec![0; 4]);
    let op = if is_set { CmpOp::NotEqual } else { CmpOp::Equal };
    [
        load,
        Expr::Bitwise { source: 0, destination: 0, mask, xor },
        Expr::Cmp { register: 0, op, value: vec![0; 4] },
    ]
}
