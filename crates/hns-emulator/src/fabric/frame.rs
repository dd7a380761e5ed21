//! Ethernet, ARP, IPv4 and VXLAN, as far as a switch needs them.

use std::net::Ipv4Addr;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const ARP: [u8; 2] = [0x08, 0x06];

/// A parsed frame.
#[derive(Debug)]
pub(crate) enum Frame<'a> {
    /// An ARP request for an IPv4 address.
    ArpRequest(ArpRequest),
    /// IPv4: the source MAC address, the destination MAC address, and the packet without padding.
    Ipv4 { source: Mac, destination: Mac, packet: Ipv4Packet<'a> },
    /// Anything else, or invalid.
    Other,
}

impl<'a> Frame<'a> {
    pub(crate) fn parse(frame: &'a [u8]) -> Frame<'a> {
        let (Some(destination), Some(source)) = (mac_at(frame, 0), mac_at(frame, 6)) else {
            return Frame::Other;
        };
        let Some(payload) = frame.get(ETHERNET..) else { return Frame::Other };
        if frame[12..14] == IPV4 {
            return Ipv4Packet::parse(payload).map_or(Frame::Other, |packet| Frame::Ipv4 {
                source,
                destination,
                packet,
            });
        }
        if frame[12..14] == ARP {
            return ArpRequest::parse(payload).map_or(Frame::Other, Frame::ArpRequest);
        }
        Frame::Other
    }
}

/// An ARP request (RFC 826) for an IPv4 address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArpRequest {
    pub(crate) sender_mac: Mac,
    pub(crate) sender: Ipv4Addr,
    pub(crate) target: Ipv4Addr,
}

impl ArpRequest {
    fn parse(arp: &[u8]) -> Option<ArpRequest> {
        // Ethernet, IPv4, lengths 6 and 4, operation 1.
        if arp.get(..8)? != [0, 1, 8, 0, 6, 4, 0, 1] {
            return None;
        }
        Some(ArpRequest {
            sender_mac: mac_at(arp, 8)?,
            sender: address_at(arp, 14)?,
            target: address_at(arp, 24)?,
        })
    }

    /// The frame that answers with `mac`.
    pub(crate) fn reply(&self, mac: Mac) -> Vec<u8> {
        let mut frame = ethernet(self.sender_mac, mac, ARP);
        frame.extend([0, 1, 8, 0, 6, 4, 0, 2]);
        frame.extend(mac);
        frame.extend(self.target.octets());
        frame.extend(self.sender_mac);
        frame.extend(self.sender.octets());
        frame
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
        let header = usize::from(bytes.first()? & 0x0f) * 4;
        let length = usize::from(u16_at(bytes, 2)?);
        let whole = bytes[0] >> 4 == 4 && header >= 20 && header <= length && length <= bytes.len();
        whole.then(|| Ipv4Packet { bytes: &bytes[..length] })
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

/// A frame with this header around the packet.
pub(crate) fn ipv4_frame(destination: Mac, source: Mac, packet: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(destination, source, IPV4);
    frame.extend_from_slice(packet);
    frame
}

fn ethernet(destination: Mac, source: Mac, ethertype: [u8; 2]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(1600);
    frame.extend(destination);
    frame.extend(source);
    frame.extend(ethertype);
    frame
}

/// Encapsulates a frame in VXLAN (RFC 7348 5): the payload of the UDP datagram.
pub(crate) fn vxlan(vni: u32, frame: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::with_capacity(8 + frame.len());
    datagram.extend([0x08, 0, 0, 0]);
    datagram.extend((vni << 8).to_be_bytes());
    datagram.extend_from_slice(frame);
    datagram
}

/// The VNI and the frame of a VXLAN datagram.
pub(crate) fn unvxlan(datagram: &[u8]) -> Option<(u32, &[u8])> {
    let (header, frame) = datagram.split_at_checked(8)?;
    let has_vni = header[0] & 0x08 != 0;
    has_vni.then(|| (u32::from_be_bytes([0, header[4], header[5], header[6]]), frame))
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn mac_at(bytes: &[u8], at: usize) -> Option<Mac> {
    bytes.get(at..at + 6)?.try_into().ok()
}

fn address_at(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    let octets: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(octets.into())
}
