//! An nftables table as plain data, with its chains and rules. The same values are written to the kernel and read back.

use std::collections::BTreeMap;

use super::expr::Expr;
use super::set::Set;

/// A table of the family `inet`, which handles IPv4 and IPv6.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// `NFT_TABLE_F_…` flags: see [`Table::OWNER`] and [`Table::PERSIST`].
    pub flags: u32,
    /// The chains, by name.
    pub chains: BTreeMap<String, Chain>,
    /// The named sets and maps, by name.
    pub sets: BTreeMap<String, Set>,
}

impl Table {
    /// `NFT_TABLE_F_OWNER` (Linux 5.12): only the socket that created the table may change it; it disappears with the
    /// socket.
    pub const OWNER: u32 = 2;
    /// `NFT_TABLE_F_PERSIST` (Linux 6.9): with [`OWNER`](Self::OWNER), the table stays and waits for a new owner.
    pub const PERSIST: u32 = 4;

    /// Nobody else can delete or change the table, not even by `nft flush ruleset`, and it stays for the next
    /// process.
    pub const GUARDED: u32 = Self::OWNER | Self::PERSIST;
}

/// A chain of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// Its hook, if it is a base chain; otherwise packets enter it by jump and goto only.
    pub base: Option<BaseChain>,
    /// The rules, in order.
    pub rules: Vec<Rule>,
}

/// The hook of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BaseChain {
    /// The type of the chain.
    pub kind: ChainKind,
    /// The hook.
    pub hook: Hook,
    /// A lower number comes first; 0 is filter, -200 conntrack, -300 raw, 100 source NAT.
    pub priority: i32,
    /// Whether packets that reach the end are dropped; otherwise they are accepted.
    pub drop: bool,
}

/// The type of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChainKind {
    /// Verdicts about every packet.
    Filter,
    /// Address translation, only for the first packet of a flow.
    Nat,
}

/// `NF_INET_…` (`linux/netfilter.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Hook {
    /// All arriving packets, before routing.
    Prerouting = 0,
    /// Packets to the host itself.
    Input = 1,
    /// Forwarded packets.
    Forward = 2,
    /// Packets from the host itself.
    Output = 3,
    /// All leaving packets, after routing.
    Postrouting = 4,
}

/// One rule: its expressions are evaluated in order until one does not hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The expressions.
    pub exprs: Vec<Expr>,
    /// The comment in `nft list`: at most [`Rule::MAX_COMMENT_LENGTH`] bytes, empty for none.
    pub comment: String,
}

impl Rule {
    /// The maximum length of a comment in `nft`, in bytes.
    pub const MAX_COMMENT_LENGTH: usize = 128;

    /// A rule with a comment, which is truncated if it is too long.
    #[must_use]
    pub fn new(exprs: Vec<Expr>, comment: &str) -> Self {
        Self { exprs, comment: comment[..comment.floor_char_boundary(Self::MAX_COMMENT_LENGTH)].to_owned() }
    }
}

/// A count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets.
    pub packets: u64,
    /// Their bytes, from the IP header on.
    pub bytes: u64,
}
