//! Hand-made packets, each with a tag that identifies it where it arrives.

use std::net::IpAddr;

use tortie_policy::program::Flow;

/// An Ethernet frame to this hardware address that begins the flow, with the tag at its end. Its checksums are
/// correct, because conntrack checks them. SCTP begins with an INIT (RFC 9260, 3.3.2).
///
/// # Panics
/// If the flow's addresses are of two families.
#[must_use]
pub fn frame(flow: &Flow, to: [u8; 6], tag: u32) -> Vec<u8> {
    let payload = transport(flow, tag);
    let packet = match (flow.source, flow.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let length = (20 + payload.len()) as u16;
            let mut header = vec![0x45, 0];
            header.extend(length.to_be_bytes());
            header.extend([0, 1, 0, 0, 64, flow.protocol.0, 0, 0]);
            header.extend(source.octets());
            header.extend(destination.octets());
            let sum = checksum(&header).to_be_bytes();
            header[10..12].copy_from_slice(&sum);
            [header, payload].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend((payload.len() as u16).to_be_bytes());
            header.extend([flow.protocol.0, 64]);
            header.extend(source.octets());
            header.extend(destination.octets());
            [header, payload].concat()
        }
        _ => panic!("a flow of two families"),
    };
    let kind: u16 = if flow.source.is_ipv4() { 0x0800 } else { 0x86dd };
    [&to[..], &[2, 0, 0, 0, 0, 9], &kind.to_be_bytes(), &packet].concat()
}

fn transport(flow: &Flow, tag: u32) -> Vec<u8> {
    let ports = [flow.source_port.to_be_bytes(), flow.destination_port.to_be_bytes()].concat();
    let tag = tagged(tag);
    let (mut packet, sum_at) = match flow.protocol.0 {
        // SYN, header of 20 bytes
        6 => ([&ports[..], &[0; 8], &[0x50, 2, 0xff, 0xff, 0, 0, 0, 0], &tag].concat(), Some(16)),
        17 => ([&ports[..], &[0, 12, 0, 0], &tag].concat(), Some(6)),
        // UDP-Lite whose checksum covers the whole packet (RFC 3828)
        136 => ([&ports[..], &[0; 4], &tag].concat(), Some(6)),
        1 | 58 => {
            let (icmp_type, icmp_code) = flow.icmp.unwrap_or_default();
            // The tag is also the identifier, so that two requests to one host are separate flows.
            ([&[icmp_type, icmp_code, 0, 0, tag[2], tag[3], 0, 7], &tag[..]].concat(), Some(2))
        }
        132 => return sctp_init(&ports, tag),
        _ => ([&[0; 8], &tag[..]].concat(), None),
    };
    if let Some(at) = sum_at {
        let bytes = |address: IpAddr| match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        let mut pseudo = Vec::new();
        if flow.protocol.0 != 1 {
            // Linux checks UDP-Lite in connection tracking as if it were UDP (`udplite_error`).
            let protocol = if flow.protocol.0 == 136 { 17 } else { flow.protocol.0 };
            pseudo = [bytes(flow.source), bytes(flow.destination), vec![0, protocol]].concat();
            pseudo.extend((packet.len() as u16).to_be_bytes());
        }
        let sum = checksum(&[pseudo, packet.clone()].concat());
        packet[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}

/// Ports, verification tag 0, checksum; INIT of 20 bytes: initiate tag, window, one stream each way, initial TSN.
fn sctp_init(ports: &[u8], tag: [u8; 4]) -> Vec<u8> {
    let init = [1, 0, 0, 20, 0, 0, 0, 7, 0, 0, 0xff, 0xff, 0, 1, 0, 1];
    let mut packet = [ports, &[0; 8], &init, &tag].concat();
    let sum = crc32c(&packet).to_le_bytes();
    packet[8..12].copy_from_slice(&sum);
    packet
}

/// Castagnoli's CRC, the checksum of SCTP packets (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    let shift = |crc: u32| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shift(crc)))
}

/// RFC 1071; 0 over bytes that include their own checksum.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Tags are combined with this number on the wire, because the kernel's own frames end with small numbers: a
/// multicast report ends with the address of all routers, `ff02::2`.
const MAGIC: u32 = 0x5eed_0000;

/// The last bytes of a packet.
pub(crate) fn tagged(tag: u32) -> [u8; 4] {
    (tag ^ MAGIC).to_be_bytes()
}

/// The tag at the end of a frame; for a foreign frame, some large number.
#[must_use]
pub fn tag(frame: &[u8]) -> u32 {
    let last = frame.last_chunk::<4>().copied().unwrap_or_default();
    u32::from_be_bytes(last) ^ MAGIC
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_crc_equals_castagnolis() {
        // RFC 3720, B.4
        assert_eq!(super::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(super::crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(super::crc32c(b"123456789"), 0xe306_9283);
    }
}
