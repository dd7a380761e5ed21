//! Verdicts on packets, and the answers of rejected packets.

/// A verdict on a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// Accepts the packet in this base chain.
    Accept,
    /// Drops the packet.
    Drop,
    /// Continues with the next rule.
    Continue,
    /// Returns to the rule after the last jump; in a base chain, the policy decides.
    Return,
    /// Calls a chain.
    Jump(String),
    /// Continues in a chain without returning here: at its end, the packet returns to the caller of this chain.
    Goto(String),
}

/// The answer to the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reject {
    /// A TCP reset.
    TcpReset,
    /// The ICMP or ICMPv6 message "administratively prohibited".
    Prohibited,
    /// The ICMP or ICMPv6 message "port unreachable".
    PortUnreachable,
}
