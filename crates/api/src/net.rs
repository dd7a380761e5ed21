//! Small values that policies and packets share: actions, protocols, ports.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a rule does with matching packets (`projectcalico.org/v3` `Rule.action`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Action {
    /// Lets the packet pass; nothing later is evaluated.
    Allow,
    /// Drops the packet.
    Deny,
    /// Logs the packet and continues with the next rule.
    Log,
    /// Leaves this tier and continues with the next one.
    Pass,
}

/// The family of an address or a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The direction of a packet, seen from an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Direction {
    /// Into the endpoint.
    Ingress,
    /// Out of the endpoint.
    Egress,
}

/// An IP protocol number (IANA "Assigned Internet Protocol Numbers").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Protocol(pub u8);

impl Protocol {
    /// ICMP for IPv4.
    pub const ICMP: Self = Self(1);
    /// TCP.
    pub const TCP: Self = Self(6);
    /// UDP.
    pub const UDP: Self = Self(17);
    /// ICMP for IPv6.
    pub const ICMPV6: Self = Self(58);
    /// IPv4 in IP.
    pub const IPIP: Self = Self(4);
    /// SCTP.
    pub const SCTP: Self = Self(132);
    /// UDP-Lite.
    pub const UDP_LITE: Self = Self(136);

    const NAMES: [(&'static str, Self); 6] = [
        ("ICMP", Self::ICMP),
        ("TCP", Self::TCP),
        ("UDP", Self::UDP),
        ("ICMPv6", Self::ICMPV6),
        ("SCTP", Self::SCTP),
        ("UDPLite", Self::UDP_LITE),
    ];

    /// The protocol with this name in Calico and Kubernetes, in any case (Calico accepts both).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, protocol)| *protocol)
    }

    /// Whether packets of this protocol carry ports that policy can match.
    #[must_use]
    pub fn has_ports(self) -> bool {
        matches!(self, Self::TCP | Self::UDP | Self::SCTP)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(_, protocol)| protocol == self) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "{}", self.0),
        }
    }
}

/// An inclusive range of ports; one port is a range with equal ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortRange {
    /// The lowest port of the range.
    pub first: u16,
    /// The highest port of the range.
    pub last: u16,
}

impl PortRange {
    /// The range that holds one port.
    #[must_use]
    pub fn single(port: u16) -> Self {
        Self { first: port, last: port }
    }

    /// Whether `port` lies in the range.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            write!(f, "{}", self.first)
        } else {
            write!(f, "{}:{}", self.first, self.last)
        }
    }
}
