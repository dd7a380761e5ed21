//! Prepares packets from a tunnel for a link: completes checksums and enforces the MTU.

use super::checksum::{self, ChecksumState, TCP, finish};
use super::packet::{IpPacket, Ipv4Packet};

const FIN: u8 = 0x01;
const PUSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// Why a packet cannot be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// Its checksum is wrong, not merely incomplete.
    Checksum,
    /// It exceeds the MTU and must not be fragmented.
    TooBig,
}

/// Splits the packet into packets of at most `mtu` bytes with correct checksums.
pub(crate) fn complete(packet: &Ipv4Packet<'_>, mtu: usize) -> Result<Vec<Vec<u8>>, Unfit> {
    let state = checksum::state(&IpPacket::V4(*packet));
    match state {
        ChecksumState::Broken => Err(Unfit::Checksum),
        ChecksumState::Finished if packet.bytes().len() <= mtu => Ok(vec![packet.bytes().to_vec()]),
        ChecksumState::Unfinished if packet.bytes().len() <= mtu => {
            let mut whole = packet.bytes().to_vec();
            finish(&mut whole);
            Ok(vec![whole])
        }
        _ if packet.protocol() == TCP && !packet.is_fragment() => segments(packet, mtu).ok_or(Unfit::TooBig),
        _ if packet.dont_fragment() => Err(Unfit::TooBig),
        _ => {
            // A checksum over the whole datagram must be correct before the datagram is split.
            let mut whole = packet.bytes().to_vec();
            if state == ChecksumState::Unfinished {
                finish(&mut whole);
            }
            Ipv4Packet::parse(&whole).and_then(|whole| fragments(&whole, mtu)).ok_or(Unfit::TooBig)
        }
    }
}

/// Splits TCP as a network card would: each segment has the headers, its own sequence number and identification. FIN
/// and PSH go with the last segment, CWR with the first.
fn segments(packet: &Ipv4Packet<'_>, mtu: usize) -> Option<Vec<Vec<u8>>> {
    let ip_header = packet.header_length();
    let tcp_header = usize::from(packet.payload().get(12)? >> 4) * 4;
    if tcp_header < 20 {
        return None;
    }
    let (headers, data) = packet.bytes().split_at_checked(ip_header + tcp_header)?;
    let size = mtu.checked_sub(headers.len()).filter(|size| *size > 0)?;
    let sequence = u32::from_be_bytes(headers[ip_header + 4..ip_header + 8].try_into().ok()?);
    let identification = u16::from_be_bytes([headers[4], headers[5]]);
    let flags = headers[ip_header + 13];
    let last = data.chunks(size).len().saturating_sub(1);
    let segment = |(index, part): (usize, &[u8])| {
        let mut segment = [headers, part].concat();
        let length = (segment.len() as u16).to_be_bytes();
        segment[2..4].copy_from_slice(&length);
        segment[4..6].copy_from_slice(&identification.wrapping_add(index as u16).to_be_bytes());
        let sequence = sequence.wrapping_add((index * size) as u32);
        segment[ip_header + 4..ip_header + 8].copy_from_slice(&sequence.to_be_bytes());
        let not_here = if index == last { 0 } else { FIN | PUSH } | if index == 0 { 0 } else { CWR };
        segment[ip_header + 13] = flags & !not_here;
        finish(&mut segment);
        segment
    };
    Some(data.chunks(size).enumerate().map(segment).collect())
}

/// Splits a packet into fragments (RFC 791 3.2). Options stay with every fragment.
fn fragments(packet: &Ipv4Packet<'_>, mtu: usize) -> Option<Vec<Vec<u8>>> {
    let (header, data) = packet.bytes().split_at(packet.header_length());
    let size = mtu.checked_sub(header.len())? & !7;
    if size == 0 {
        return None;
    }
    let more_behind = header[6] & 0x20;
    let last = data.chunks(size).len().saturating_sub(1);
    let fragment = |(index, part): (usize, &[u8])| {
        let mut fragment = [header, part].concat();
        let length = (fragment.len() as u16).to_be_bytes();
        fragment[2..4].copy_from_slice(&length);
        let more = if index == last { more_behind } else { 0x20 };
        let offset = packet.fragment_offset() + (index * size / 8) as u16;
        fragment[6..8].copy_from_slice(&(u16::from(more) << 8 | offset).to_be_bytes());
        finish(&mut fragment);
        fragment
    };
    Some(data.chunks(size).enumerate().map(fragment).collect())
}
