//! Internet checksums (RFC 1071), complete and incomplete.
//!
//! A kernel that relies on hardware to complete a packet leaves the sum of the pseudo header in the checksum field.
//! Such packets arrive in a UDP socket if the inner frame came from a VXLAN device on a virtual link.

use super::frame::Ipv4Packet;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

/// The state of the TCP or UDP checksum in a packet.
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

/// The offset of the checksum field in the header of a protocol that has one.
pub(crate) fn field(protocol: u8) -> Option<usize> {
    match protocol {
        TCP => Some(16),
        UDP => Some(6),
        _ => None,
    }
}

/// Source, destination, protocol and length, as in the checksums of TCP and UDP (RFC 9293 3.1).
fn pseudo_header(packet: &[u8], header: usize) -> [u8; 12] {
    let mut pseudo = [0; 12];
    pseudo[..8].copy_from_slice(&packet[12..20]);
    pseudo[9] = packet[9];
    pseudo[10..].copy_from_slice(&((packet.len() - header) as u16).to_be_bytes());
    pseudo
}

/// Checks the checksum of the packet's payload.
pub(crate) fn state(packet: &Ipv4Packet<'_>) -> ChecksumState {
    let Some(field) = field(packet.protocol()).filter(|_| !packet.is_fragment()) else {
        return ChecksumState::Finished;
    };
    let payload = packet.payload();
    let Some(found) = super::frame::u16_at(payload, field) else { return ChecksumState::Broken };
    if packet.protocol() == UDP && found == 0 {
        return ChecksumState::Finished;
    }
    let pseudo = pseudo_header(packet.bytes(), packet.header_length());
    if sum(&[&pseudo, payload]) == 0xffff {
        ChecksumState::Finished
    } else if found == sum(&[&pseudo]) {
        ChecksumState::Unfinished
    } else {
        ChecksumState::Broken
    }
}

/// Writes correct checksums into an IPv4 packet: that of the header, and that of TCP or UDP unless the packet is a
/// fragment.
pub(crate) fn finish(packet: &mut [u8]) {
    let Some(view) = Ipv4Packet::parse(packet) else { return };
    let (header, protocol, fragment) = (view.header_length(), view.protocol(), view.is_fragment());
    packet[10..12].fill(0);
    let check = !sum(&[&packet[..header]]);
    packet[10..12].copy_from_slice(&check.to_be_bytes());

    let Some(at) = field(protocol).map(|field| header + field) else { return };
    if fragment || packet.len() < at + 2 {
        return;
    }
    packet[at..at + 2].fill(0);
    let check = !sum(&[&pseudo_header(packet, header), &packet[header..]]);
    // In UDP, 0 means "no checksum".
    let check = if check == 0 && protocol == UDP { 0xffff } else { check };
    packet[at..at + 2].copy_from_slice(&check.to_be_bytes());
}
