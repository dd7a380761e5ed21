//! Internet checksums (RFC 1071), complete and incomplete.
//!
//! A kernel that relies on hardware to complete a packet leaves the sum of the pseudo header in the checksum field.
//! Such packets arrive in a UDP socket if the inner frame came from a VXLAN device on a virtual link.

use super::packet::{IPV6_HEADER, IpPacket, u16_at};
use crate::flows::ICMPV6;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// The state of the checksum of a packet's payload: that of TCP, UDP or ICMPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChecksumState {
    /// Correct, or there is none to check (another protocol, a fragment, UDP without checksum).
    Finished,
    /// Only the sum of the pseudo header.
    Unfinished,
    /// Incorrect.
    Broken,
}

/// The sum of the 16-bit words, folded; an odd last byte counts as the high byte of a word.
pub(crate) fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum: u64 = 0;
    for part in parts {
        let words = part.chunks_exact(2);
        if let [last] = words.remainder() {
            sum += u64::from(*last) << 8;
        }
        sum += words.map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u64>();
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The offset of the checksum field in the payload, if its protocol has one with a pseudo header.
pub(crate) fn field(packet: &IpPacket<'_>) -> Option<usize> {
    match (packet, packet.protocol()) {
        (_, TCP) => Some(16),
        (_, UDP) => Some(6),
        (IpPacket::V6(_), ICMPV6) => Some(2),
        _ => None,
    }
}

/// The sum of source, destination, protocol and length, as in the checksums of TCP and UDP (RFC 9293 3.1, RFC 8200 8.1).
fn pseudo_header(packet: &IpPacket<'_>) -> u16 {
    let addresses = match packet {
        IpPacket::V4(packet) => &packet.bytes()[12..20],
        IpPacket::V6(packet) => &packet.bytes()[8..IPV6_HEADER],
    };
    let length = (packet.payload().len() as u16).to_be_bytes();
    sum(&[addresses, &[0, packet.protocol()], &length])
}

/// Checks the checksum of the packet's payload.
pub(crate) fn state(packet: &IpPacket<'_>) -> ChecksumState {
    let Some(field) = field(packet).filter(|_| !packet.is_fragment()) else {
        return ChecksumState::Finished;
    };
    let payload = packet.payload();
    let Some(found) = u16_at(payload, field) else { return ChecksumState::Broken };
    if packet.protocol() == UDP && found == 0 {
        return ChecksumState::Finished;
    }
    let pseudo = pseudo_header(packet);
    if sum(&[&pseudo.to_be_bytes(), payload]) == 0xffff {
        ChecksumState::Finished
    } else if found == pseudo {
        ChecksumState::Unfinished
    } else {
        ChecksumState::Broken
    }
}

/// Writes correct checksums into a packet: that of an IPv4 header, and that of TCP, UDP or ICMPv6 unless the packet is a
/// fragment. The length of an IPv6 packet is written, too.
pub(crate) fn finish(packet: &mut [u8]) {
    if packet.len() >= IPV6_HEADER && packet[0] >> 4 == 6 {
        let length = (packet.len() - IPV6_HEADER) as u16;
        packet[4..6].copy_from_slice(&length.to_be_bytes());
    }
    let Some(view) = IpPacket::parse(packet) else { return };
    let (header, protocol, fragment) = (view.header_length(), view.protocol(), view.is_fragment());
    let (pseudo, field) = (pseudo_header(&view).to_be_bytes(), field(&view));
    if matches!(view, IpPacket::V4(_)) {
        packet[10..12].fill(0);
        let check = !sum(&[&packet[..header]]);
        packet[10..12].copy_from_slice(&check.to_be_bytes());
    }
    let Some(at) = field.map(|field| header + field) else { return };
    if fragment || packet.len() < at + 2 {
        return;
    }
    packet[at..at + 2].fill(0);
    let check = !sum(&[&pseudo, &packet[header..]]);
    // In UDP, 0 means "no checksum".
    let check = if check == 0 && protocol == UDP { 0xffff } else { check };
    packet[at..at + 2].copy_from_slice(&check.to_be_bytes());
}
