//! The expressions in rules (`linux/netfilter/nf_tables.h`).

use super::set::Set;
use super::verdict::{Reject, Verdict};

/// One of the sixteen registers of four bytes, 0 to 15. Longer values occupy several consecutive registers.
pub type Register = u8;

/// The family of the addresses of a translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NatFamily {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

impl NatFamily {
    /// The kernel's number (`NFPROTO_…`).
    pub(super) fn number(self) -> u32 {
        let number = match self {
            Self::Ipv4 => libc::NFPROTO_IPV4,
            Self::Ipv6 => libc::NFPROTO_IPV6,
        };
        number.cast_unsigned()
    }
}

/// A step of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Expr {
    /// Loads bytes of the packet.
    Payload {
        /// The destination.
        register: Register,
        /// The header.
        header: Header,
        /// The offset in it, in bytes.
        offset: u32,
        /// The length in bytes.
        length: u32,
    },
    /// Loads metadata of the packet.
    Meta {
        /// The destination.
        register: Register,
        /// The metadata.
        key: MetaKey,
    },
    /// Stores the register as metadata of the packet (its mark or its priority).
    SetMeta {
        /// The source.
        register: Register,
        /// The metadata.
        key: MetaKey,
    },
    /// Loads the connection's state as a bit of [`state`], in host byte order.
    CtState {
        /// The destination.
        register: Register,
    },
    /// Loads something else of the connection.
    Ct {
        /// The destination.
        register: Register,
        /// The part of the connection.
        key: CtKey,
    },
    /// Loads a random number below the modulus, in host byte order.
    Random {
        /// The destination.
        register: Register,
        /// The number of possible values.
        modulus: u32,
    },
    /// Converts a number of 32 bits in the register from host to network byte order.
    NetworkOrder {
        /// The register.
        register: Register,
    },
    /// Continues only if the comparison of register and value holds.
    Cmp {
        /// The register to compare.
        register: Register,
        /// The comparison.
        op: CmpOp,
        /// The value; its length is the number of compared bytes.
        value: Vec<u8>,
    },
    /// Continues only if the register is in the range (not in it, if `invert`).
    Range {
        /// The register to compare.
        register: Register,
        /// Whether it must be outside.
        invert: bool,
        /// The first value of the range.
        first: Vec<u8>,
        /// The last value of the range.
        last: Vec<u8>,
    },
    /// `destination = (source & mask) ^ xor`.
    Bitwise {
        /// The source register.
        source: Register,
        /// The destination register.
        destination: Register,
        /// The bits to keep.
        mask: Vec<u8>,
        /// The bits to invert; same length as the mask.
        xor: Vec<u8>,
    },
    /// Continues only if the register is in the set (not in it, if `invert`).
    Lookup {
        /// The register of the key.
        register: Register,
        /// The set.
        set: SetRef,
        /// Whether the key must be absent.
        invert: bool,
    },
    /// Takes the map's verdict for the register; continues if there is none.
    VerdictMap {
        /// The register of the key.
        register: Register,
        /// The map.
        set: SetRef,
    },
    /// Loads a constant.
    Immediate {
        /// The destination.
        register: Register,
        /// The value.
        value: Vec<u8>,
    },
    /// Loads the map's value for the register; continues only if there is one.
    Map {
        /// The register of the key.
        register: Register,
        /// The map.
        set: SetRef,
        /// The destination.
        destination: Register,
    },
    /// Adds the register's value to a map, or begins the life of an element anew, which keeps its value. Continues only if the map had
    /// room.
    Learn {
        /// The register of the key.
        register: Register,
        /// The register of the value.
        value: Register,
        /// The name of the map.
        map: String,
        /// The time after which the element goes, in seconds.
        seconds: u32,
    },
    /// Takes a verdict.
    Verdict(Verdict),
    /// Counts packets and bytes. The counts are not part of the value.
    Counter,
    /// Rejects the packet with an answer to its sender.
    Reject(Reject),
    /// Sends the packet to a group of nflog listeners.
    Log {
        /// The group.
        group: u16,
        /// The prefix for the listener, at most 127 bytes.
        prefix: String,
    },
    /// Translates the source to the address of the outgoing interface.
    Masquerade,
    /// Translates the source to the address of the outgoing interface, and to a port that is chosen at random.
    MasqueradeToRandomPort,
    /// Translates the destination to an address and a port.
    DestinationNat {
        /// The family of the address.
        family: NatFamily,
        /// The register of the address.
        address: Register,
        /// The register of the port, in network byte order.
        port: Register,
    },
    /// Translates the destination to an address, and keeps the port.
    DestinationNatToAddress {
        /// The family of the address.
        family: NatFamily,
        /// The register of the address.
        address: Register,
    },
    /// Leaves the packet out of connection tracking.
    Notrack,
    /// Looks the packet up in the routing tables.
    Fib {
        /// The destination.
        register: Register,
        /// The requested result (`NFT_FIB_RESULT_…`).
        result: u32,
        /// The lookup key (`NFTA_FIB_F_…`).
        flags: u32,
    },
    /// A foreign expression, by its name and encoded attributes.
    Other(String, Vec<u8>),
}

/// A part of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CtKey {
    /// Bits of [`status`], in host byte order.
    Status = 2,
    /// The IPv4 address to which its first packet was sent.
    OriginalIpv4Destination = 20,
    /// The IPv6 address to which its first packet was sent.
    OriginalIpv6Destination = 22,
    /// The port to which its first packet was sent, in network byte order.
    OriginalDestinationPort = 12,
}

/// Bits of a connection's status (`enum ip_conntrack_status`).
pub mod status {
    /// Its destination is translated.
    pub const DESTINATION_NAT: u32 = 32;
}

/// Bits of a connection's state (`NF_CT_STATE_BIT`).
pub mod state {
    /// Belongs to no known connection and cannot begin one.
    pub const INVALID: u32 = 1;
    /// Belongs to a connection with packets in both directions.
    pub const ESTABLISHED: u32 = 2;
    /// Begins a connection, or is an ICMP error, related to another one.
    pub const RELATED: u32 = 4;
    /// Begins a connection.
    pub const NEW: u32 = 8;
    /// Not tracked.
    pub const UNTRACKED: u32 = 64;
}

/// The header of a payload expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Header {
    /// IPv4 or IPv6.
    Network = 1,
    /// TCP, UDP, ICMP, ….
    Transport = 2,
}

/// Metadata of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaKey {
    /// Its priority, a class of traffic control, in host byte order.
    Priority = 2,
    /// Its mark, in host byte order.
    Mark = 3,
    /// The name of the incoming interface: 16 bytes.
    InputInterface = 6,
    /// The name of the outgoing interface: 16 bytes.
    OutputInterface = 7,
    /// 2 for IPv4, 10 for IPv6: one byte.
    NfProto = 15,
    /// The protocol in the IP packet: one byte.
    L4Proto = 16,
}

/// A comparison of numbers in network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names say it
pub enum CmpOp {
    Equal = 0,
    NotEqual = 1,
    Less = 2,
    LessOrEqual = 3,
    Greater = 4,
    GreaterOrEqual = 5,
}

/// A reference to a set.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SetRef {
    /// The set of this name in the same table.
    Named(String),
    /// A set that belongs to the rule (an anonymous set).
    Inline(Box<Set>),
}

impl SetRef {
    /// The set of this name.
    pub fn named(name: impl Into<String>) -> Self {
        Self::Named(name.into())
    }
}
