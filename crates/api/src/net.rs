//! Small values that policies and packets share: actions, protocols, ports.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Whether two networks have an address in common.
#[must_use]
pub fn overlap(one: &IpNet, other: &IpNet) -> bool {
    one.contains(other) || other.contains(one)
}

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

impl IpVersion {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub fn of(address: &IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for IpVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
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

/// One packet that begins a flow, as the hook that judges it sees it (policy decision 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Flow {
    /// The source address.
    pub source: IpAddr,
    /// The destination address.
    pub destination: IpAddr,
    /// The protocol.
    pub protocol: Protocol,
    /// The source port; 0 if the protocol has none.
    pub source_port: u16,
    /// The destination port; 0 if the protocol has none.
    pub destination_port: u16,
    /// The ICMP type and code, if the packet is ICMP or ICMPv6.
    pub icmp: Option<(u8, u8)>,
}

/// A 48-bit MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The address as HNS writes it: upper case, with dashes.
    #[must_use]
    pub fn dashed(self) -> String {
        let [a, b, c, d, e, f] = self.0;
        format!("{a:02X}-{b:02X}-{c:02X}-{d:02X}-{e:02X}-{f:02X}")
    }
}

impl MacAddress {
    /// Parses an address that a pod's interface can have.
    ///
    /// # Errors
    /// The text is no MAC address, a group of interfaces or none has it, or the host's end of the pod's link has it, as in Calico.
    pub fn of_pod(text: &str) -> Result<Self, String> {
        let mac: Self = text.parse()?;
        let is_group = mac.0[0] & 1 == 1;
        match mac {
            Self([0, 0, 0, 0, 0, 0]) => Err(format!("{text} is the address of no interface")),
            Self([0xee, 0xee, 0xee, 0xee, 0xee, 0xee]) => {
                Err(format!("{text} is the address of the other end of the pod's link"))
            }
            _ if is_group => {
                Err(format!("{text} is the address of a group (the lowest bit of its first byte is set)"))
            }
            _ => Ok(mac),
        }
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl From<MacAddress> for String {
    fn from(mac: MacAddress) -> Self {
        mac.to_string()
    }
}

impl TryFrom<String> for MacAddress {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for MacAddress {
    type Err = String;

    /// Reads six pairs of hexadecimal digits with `:` or `-` between them.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no MAC address (six pairs of hexadecimal digits)");
        let mut bytes = [0; 6];
        let mut parts = text.split([':', '-']);
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() { Err(wrong()) } else { Ok(Self(bytes)) }
    }
}
