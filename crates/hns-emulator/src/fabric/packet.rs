//! IP packets of both families, as far as a switch needs them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::flows::ICMPV6;

/// Bytes of an IPv6 header without extensions.
pub(crate) const IPV6_HEADER: usize = 40;
/// An IPv6 packet with more extension headers than this is dropped.
const MOST_EXTENSIONS: usize = 8;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// A packet of either family.
#[derive(Debug, Clone, Copy)]
pub(crate) enum IpPacket<'a> {
    V4(Ipv4Packet<'a>),
    V6(Ipv6Packet<'a>),
}

impl<'a> IpPacket<'a> {
    /// Parses a packet; trailing padding is removed.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<IpPacket<'a>> {
        let v6 = || Ipv6Packet::parse(bytes).map(IpPacket::V6);
        Ipv4Packet::parse(bytes).map(IpPacket::V4).or_else(v6)
    }

    pub(crate) fn bytes(&self) -> &'a [u8] {
        match self {
            IpPacket::V4(packet) => packet.bytes(),
            IpPacket::V6(packet) => packet.bytes(),
        }
    }

    /// Where the payload begins.
    pub(crate) fn header_length(&self) -> usize {
        match self {
            IpPacket::V4(packet) => packet.header_length(),
            IpPacket::V6(packet) => packet.header_length(),
        }
    }

    pub(crate) fn payload(&self) -> &'a [u8] {
        match self {
            IpPacket::V4(packet) => packet.payload(),
            IpPacket::V6(packet) => packet.payload(),
        }
    }

    pub(crate) fn protocol(&self) -> u8 {
        match self {
            IpPacket::V4(packet) => packet.protocol(),
            IpPacket::V6(packet) => packet.protocol(),
        }
    }

    pub(crate) fn source(&self) -> IpAddr {
        match self {
            IpPacket::V4(packet) => packet.source().into(),
            IpPacket::V6(packet) => packet.source().into(),
        }
    }

    pub(crate) fn destination(&self) -> IpAddr {
        match self {
            IpPacket::V4(packet) => packet.destination().into(),
            IpPacket::V6(packet) => packet.destination().into(),
        }
    }

    /// Offset of this fragment in units of eight bytes.
    pub(crate) fn fragment_offset(&self) -> u16 {
        match self {
            IpPacket::V4(packet) => packet.fragment_offset(),
            IpPacket::V6(packet) => packet.fragment_offset(),
        }
    }

    /// Whether the packet is a fragment.
    pub(crate) fn is_fragment(&self) -> bool {
        match self {
            IpPacket::V4(packet) => packet.is_fragment(),
            IpPacket::V6(packet) => packet.is_fragment(),
        }
    }
}

/// An IPv4 packet with a complete header and a correct length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ipv4Packet<'a> {
    bytes: &'a [u8],
}

impl<'a> Ipv4Packet<'a> {
    /// Parses a packet; trailing padding is removed.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Ipv4Packet<'a>> {
        let length = usize::from(u16_at(bytes, 2)?);
        Ipv4Packet::parse_truncated(bytes.get(..length)?)
    }

    /// Parses a packet whose payload may be truncated, as an ICMP error quotes it.
    pub(crate) fn parse_truncated(bytes: &'a [u8]) -> Option<Ipv4Packet<'a>> {
        let header = usize::from(bytes.first()? & 0x0f) * 4;
        let is_ipv4 = bytes[0] >> 4 == 4 && header >= 20 && header <= bytes.len();
        is_ipv4.then_some(Ipv4Packet { bytes })
    }

    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn header_length(&self) -> usize {
        usize::from(self.bytes[0] & 0x0f) * 4
    }

    pub(crate) fn payload(&self) -> &'a [u8] {
        &self.bytes[self.header_length()..]
    }

    pub(crate) fn protocol(&self) -> u8 {
        self.bytes[9]
    }

    pub(crate) fn source(&self) -> Ipv4Addr {
        Ipv4Addr::new(self.bytes[12], self.bytes[13], self.bytes[14], self.bytes[15])
    }

    pub(crate) fn destination(&self) -> Ipv4Addr {
        Ipv4Addr::new(self.bytes[16], self.bytes[17], self.bytes[18], self.bytes[19])
    }

    /// Offset of this fragment in units of eight bytes.
    pub(crate) fn fragment_offset(&self) -> u16 {
        u16::from_be_bytes([self.bytes[6], self.bytes[7]]) & 0x1fff
    }

    /// Whether the packet is a fragment.
    pub(crate) fn is_fragment(&self) -> bool {
        self.fragment_offset() != 0 || self.bytes[6] & 0x20 != 0
    }

    /// Whether the packet must not be fragmented.
    pub(crate) fn dont_fragment(&self) -> bool {
        self.bytes[6] & 0x40 != 0
    }
}

/// An IPv6 packet with complete headers and a correct length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ipv6Packet<'a> {
    bytes: &'a [u8],
    extensions: Extensions,
}

/// What follows the header.
#[derive(Debug, Clone, Copy)]
struct Extensions {
    /// The protocol of the payload.
    protocol: u8,
    /// Where the payload begins.
    payload: usize,
    /// The offset of this fragment in units of eight bytes, if the packet is a fragment.
    fragment: Option<u16>,
}

impl<'a> Ipv6Packet<'a> {
    /// Parses a packet; trailing padding is removed.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Ipv6Packet<'a>> {
        let length = IPV6_HEADER + usize::from(u16_at(bytes, 4)?);
        Ipv6Packet::parse_truncated(bytes.get(..length)?)
    }

    /// Parses a packet whose payload may be truncated, as an ICMPv6 error quotes it.
    pub(crate) fn parse_truncated(bytes: &'a [u8]) -> Option<Ipv6Packet<'a>> {
        if bytes.len() < IPV6_HEADER || bytes[0] >> 4 != 6 {
            return None;
        }
        Some(Ipv6Packet { bytes, extensions: Extensions::of(bytes)? })
    }

    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Where the payload begins.
    pub(crate) fn header_length(&self) -> usize {
        self.extensions.payload
    }

    pub(crate) fn payload(&self) -> &'a [u8] {
        &self.bytes[self.extensions.payload..]
    }

    pub(crate) fn protocol(&self) -> u8 {
        self.extensions.protocol
    }

    pub(crate) fn source(&self) -> Ipv6Addr {
        self.address(8)
    }

    pub(crate) fn destination(&self) -> Ipv6Addr {
        self.address(24)
    }

    fn address(&self, at: usize) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets.copy_from_slice(&self.bytes[at..at + 16]);
        octets.into()
    }

    /// Offset of this fragment in units of eight bytes.
    pub(crate) fn fragment_offset(&self) -> u16 {
        self.extensions.fragment.unwrap_or(0)
    }

    /// Whether the packet is a fragment.
    pub(crate) fn is_fragment(&self) -> bool {
        self.extensions.fragment.is_some()
    }

    /// Whether this is a message of neighbour discovery, which concerns one link only.
    pub(crate) fn is_of_link(&self) -> bool {
        self.protocol() == ICMPV6 && matches!(self.payload().first(), Some(133..=137))
    }
}

impl Extensions {
    /// Skips the extension headers (RFC 8200 4).
    fn of(packet: &[u8]) -> Option<Extensions> {
        let (mut protocol, mut at, mut fragment) = (packet[6], IPV6_HEADER, None);
        for _ in 0..MOST_EXTENSIONS {
            let length = match protocol {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (usize::from(*packet.get(at + 1)?) + 1) * 8,
                FRAGMENT => {
                    fragment = Some(u16_at(packet, at + 2)? >> 3);
                    8
                }
                _ => return Some(Extensions { protocol, payload: at, fragment }),
            };
            protocol = *packet.get(at)?;
            at += length;
            if at > packet.len() {
                return None;
            }
            if fragment.is_some_and(|offset| offset != 0) {
                // The rest are data of the whole packet.
                return Some(Extensions { protocol, payload: at, fragment });
            }
        }
        None
    }
}

/// An IPv6 header for a payload that follows. `checksum::finish` writes its length.
pub(super) fn ipv6_header(protocol: u8, hop_limit: u8, source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
    let mut header = vec![0x60, 0, 0, 0, 0, 0, protocol, hop_limit];
    header.extend(source.octets());
    header.extend(destination.octets());
    header
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet =
            ipv6_header(protocol, 64, "fd00:1::5".parse().unwrap(), "fd00:1::6".parse().unwrap());
        packet.extend_from_slice(payload);
        packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        packet
    }

    #[test]
    fn extension_headers_are_skipped() {
        let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
        let fragment = |next: u8, offset_and_more: u16| {
            let [a, b] = offset_and_more.to_be_bytes();
            [next, 0, a, b, 0, 0, 0, 7]
        };
        let udp = [0, 1, 0, 2, 0, 8, 0, 0];
        let cases = [
            (packet(17, &udp), (17, 40, None)),
            (packet(0, &[options(60), options(17), udp].concat()), (17, 56, None)),
            (packet(44, &[fragment(17, 1), udp].concat()), (17, 48, Some(0))),
            (packet(44, &[fragment(60, 8), udp].concat()), (60, 48, Some(1))),
            (packet(60, &[options(59), udp].concat()), (59, 48, None)),
        ];
        for (bytes, expected) in cases {
            let parsed = Ipv6Packet::parse(&bytes).unwrap();
            let found = (parsed.protocol(), parsed.header_length(), parsed.extensions.fragment);
            assert_eq!(found, expected, "{bytes:?}");
        }
        for cut in 0..56 {
            let whole = packet(0, &[options(60), options(17), udp].concat());
            assert!(Ipv6Packet::parse(&whole[..cut]).is_none(), "{cut}");
            let parsed = Ipv6Packet::parse_truncated(&whole[..cut]);
            assert!(parsed.is_none(), "the extension headers are complete: {cut}");
        }
        let many = packet(60, &options(60).repeat(20));
        assert!(Ipv6Packet::parse(&many).is_none());
        let padded = [packet(17, &udp), vec![0; 6]].concat();
        assert_eq!(Ipv6Packet::parse(&padded).unwrap().payload(), udp);
    }
}
