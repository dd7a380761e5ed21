//! The expressions that rules are made of (`linux/netfilter/nf_tables.h`).

use super::model::Set;

/// One of the sixteen registers of four bytes, 0 to 15. Longer values take several in a row.
pub type Register = u8;

/// A step of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Expr {
    /// Loads bytes of the packet.
    Payload {
        /// Where they go.
        register: Register,
        /// Which header they are in.
        header: Header,
        /// The offset in it, in bytes.
        offset: u32,
        /// How many bytes.
        length: u32,
    },
    /// Loads something about the packet.
    Meta {
        /// Where it goes.
        register: Register,
        /// What.
        key: MetaKey,
    },
    /// Stores the register as something of the packet: its mark only.
    SetMeta {
        /// Where it is.
        register: Register,
        /// What is set.
        key: MetaKey,
    },
    /// Loads the connection's state as a bit of [`state`], in host byte order.
    CtState {
        /// Where it goes.
        register: Register,
    },
    /// Goes on only if the register compares to the value like this.
    Cmp {
        /// What is compared.
        register: Register,
        /// How.
        op: CmpOp,
        /// With what; its length says how many bytes.
        value: Vec<u8>,
    },
    /// Goes on only if the register is in the range (or not in it, when `invert`).
    Range {
        /// What is compared.
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
        /// Where it comes from.
        source: Register,
        /// Where it goes.
        destination: Register,
        /// What is kept.
        mask: Vec<u8>,
        /// What is turned over; as long as the mask.
        xor: Vec<u8>,
    },
    /// Goes on only if the register is in the set (or not in it, when `invert`).
    Lookup {
        /// Where the key is.
        register: Register,
        /// The set.
        set: SetRef,
        /// Whether it must not be in it.
        invert: bool,
    },
    /// Takes the verdict that the map has for the register; goes on if it has none.
    VerdictMap {
        /// Where the key is.
        register: Register,
        /// The map.
        set: SetRef,
    },
    /// Loads a value that is always the same.
    Immediate {
        /// Where it goes.
        register: Register,
        /// The value.
        value: Vec<u8>,
    },
    /// Loads the number that the map has for the register; goes on only if it has one.
    Map {
        /// Where the key is.
        register: Register,
        /// The map.
        set: SetRef,
        /// Where the number goes.
        destination: Register,
    },
    /// Takes a verdict.
    Verdict(Verdict),
    /// Counts packets and bytes. The counts are no part of the value.
    Counter,
    /// Refuses the packet and says so to its sender.
    Reject(Reject),
    /// Sends the packet to a group of nflog listeners.
    Log {
        /// The group.
        group: u16,
        /// What the listener is told with it, at most 127 bytes.
        prefix: String,
    },
    /// Gives the flow the address of the interface that it leaves by.
    Masquerade,
    /// Leaves the packet out of connection tracking.
    Notrack,
    /// Loads what the routing tables say of the packet.
    Fib {
        /// Where it goes.
        register: Register,
        /// What is asked for (`NFT_FIB_RESULT_…`).
        result: u32,
        /// What is looked up (`NFTA_FIB_F_…`).
        flags: u32,
    },
    /// An expression of somebody else, by its name and encoded attributes.
    Other(String, Vec<u8>),
}

/// Bits of a connection's state (`NF_CT_STATE_BIT`).
pub mod state {
    /// Belongs to no connection that is known or could begin.
    pub const INVALID: u32 = 1;
    /// Belongs to a connection that has seen packets both ways.
    pub const ESTABLISHED: u32 = 2;
    /// Begins a connection, or is an error message, that another one brought about.
    pub const RELATED: u32 = 4;
    /// Begins a connection.
    pub const NEW: u32 = 8;
    /// Left out of connection tracking.
    pub const UNTRACKED: u32 = 64;
}

/// Which header a payload is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Header {
    /// IPv4 or IPv6.
    Network = 1,
    /// TCP, UDP, ICMP, ….
    Transport = 2,
}

/// What is known about a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaKey {
    /// Its mark, in host byte order.
    Mark = 3,
    /// The name of the interface that it came in by: 16 bytes.
    InputInterface = 6,
    /// The name of the interface that it goes out by: 16 bytes.
    OutputInterface = 7,
    /// 2 for IPv4, 10 for IPv6: one byte.
    NfProto = 15,
    /// The protocol in the IP packet: one byte.
    L4Proto = 16,
}

/// How values are compared, as numbers in network byte order.
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

/// Which set.
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

/// What becomes of a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// Ends this base chain well.
    Accept,
    /// Ends the packet.
    Drop,
    /// Goes on with the next rule.
    Continue,
    /// Goes back behind the last jump; in a base chain, its policy decides.
    Return,
    /// Goes to a chain, and comes back from it.
    Jump(String),
    /// Goes to a chain, and from its end to where this one would have gone.
    Goto(String),
}

/// How the sender is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reject {
    /// A TCP reset.
    TcpReset,
    /// The ICMP or ICMPv6 message "administratively prohibited".
    Prohibited,
}
