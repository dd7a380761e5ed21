//! Ethernet, ARP, neighbour discovery and VXLAN, as far as a switch needs them.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::checksum::finish;
use super::packet::{IpPacket, Ipv4Packet, Ipv6Packet, ipv6_header};
use crate::flows::ICMPV6;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const ARP: [u8; 2] = [0x08, 0x06];
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Messages of neighbour discovery have this hop limit, so no router has passed them (RFC 4861).
const NEVER_FORWARDED: u8 = 255;

/// A parsed frame.
#[derive(Debug)]
pub(crate) enum Frame<'a> {
    /// An ARP request for an IPv4 address.
    ArpRequest(ArpRequest),
    /// A neighbour solicitation, which does for IPv6 what an ARP request does.
    Solicitation(Solicitation),
    /// An IP packet: the source MAC address, the destination MAC address, and the packet without padding.
    Ip { source: Mac, destination: Mac, packet: IpPacket<'a> },
    /// Anything else, or invalid. Other messages of neighbour discovery are among it, such as router advertisements.
    Other,
}

impl<'a> Frame<'a> {
    pub(crate) fn parse(frame: &'a [u8]) -> Frame<'a> {
        let (Some(destination), Some(source)) = (mac_at(frame, 0), mac_at(frame, 6)) else {
            return Frame::Other;
        };
        let Some(payload) = frame.get(ETHERNET..) else { return Frame::Other };
        if frame[12..14] == ARP {
            return ArpRequest::parse(payload).map_or(Frame::Other, Frame::ArpRequest);
        }
        let packet = match [frame[12], frame[13]] {
            IPV4 => Ipv4Packet::parse(payload).map(IpPacket::V4),
            IPV6 => Ipv6Packet::parse(payload).map(IpPacket::V6),
            _ => None,
        };
        match packet {
            Some(IpPacket::V6(packet)) if packet.is_of_link() => {
                Solicitation::parse(source, &packet).map_or(Frame::Other, Frame::Solicitation)
            }
            Some(packet) => Frame::Ip { source, destination, packet },
            None => Frame::Other,
        }
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

/// A neighbour solicitation (RFC 4861 4.3).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Solicitation {
    pub(crate) sender_mac: Mac,
    /// Unspecified if the sender asks whether an address is free.
    pub(crate) sender: Ipv6Addr,
    pub(crate) target: Ipv6Addr,
}

impl Solicitation {
    pub(crate) fn parse(sender_mac: Mac, packet: &Ipv6Packet<'_>) -> Option<Solicitation> {
        let message = packet.payload();
        let target: [u8; 16] = message.get(8..24)?.try_into().ok()?;
        let is_solicitation = packet.is_of_link()
            && !packet.is_fragment()
            && packet.bytes()[7] == NEVER_FORWARDED
            && message[..2] == [SOLICITATION, 0];
        is_solicitation.then(|| Solicitation { sender_mac, sender: packet.source(), target: target.into() })
    }

    /// The frame that answers with `mac`: a neighbour advertisement (RFC 4861 4.4).
    pub(crate) fn reply(&self, mac: Mac) -> Vec<u8> {
        const SOLICITED: u8 = 0x40;
        const OVERRIDE: u8 = 0x20;
        // Who has no address yet listens to all nodes' messages.
        let (to, flags) = match self.sender.is_unspecified() {
            true => (Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), OVERRIDE),
            false => (self.sender, SOLICITED | OVERRIDE),
        };
        let mut packet = ipv6_header(ICMPV6, NEVER_FORWARDED, self.target, to);
        packet.extend([ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0]);
        packet.extend(self.target.octets());
        // The option of the target's MAC address, one unit of eight bytes.
        packet.extend([2, 1]);
        packet.extend(mac);
        finish(&mut packet);
        let mut frame = ethernet(self.sender_mac, mac, IPV6);
        frame.extend(packet);
        frame
    }
}

/// A frame with this header around the packet.
pub(crate) fn ip_frame(destination: Mac, source: Mac, packet: &[u8]) -> Vec<u8> {
    let is_ipv6 = packet.first().is_some_and(|first| first >> 4 == 6);
    let mut frame = ethernet(destination, source, if is_ipv6 { IPV6 } else { IPV4 });
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

fn mac_at(bytes: &[u8], at: usize) -> Option<Mac> {
    bytes.get(at..at + 6)?.try_into().ok()
}

fn address_at(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    let octets: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(octets.into())
}
