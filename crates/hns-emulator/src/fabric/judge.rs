//! Decides what happens to a packet at an endpoint's port.

use std::net::IpAddr;
use std::time::Instant;

use super::checksum::{UDP, finish};
use super::packet::{IpPacket, Ipv4Packet, Ipv6Packet, ipv6_header, u16_at};
use crate::acl::{AccessControl, PacketDirection, Verdict};
use crate::flows::{Expected, Flows, ICMP, ICMPV6, Key, TCP};

const SCTP: u8 = 132;
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

/// The verdict on a packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// It passes.
    Pass,
    /// It is dropped.
    Drop,
    /// It is dropped, and its sender gets this packet.
    Answer(Vec<u8>),
}

/// Whether the packet passes the port.
pub(super) fn judge(
    flows: &mut Flows,
    packet: &IpPacket<'_>,
    direction: PacketDirection,
    acl: &AccessControl,
    now: Instant,
) -> Decision {
    let pass_if = |passes| if passes { Decision::Pass } else { Decision::Drop };
    if packet.fragment_offset() != 0 {
        // Later fragments have no ports. They pass if there is a flow between the same addresses.
        let (local, remote) = ends(packet.source(), packet.destination(), direction);
        return pass_if(flows.any_between(packet.protocol(), local, remote, now));
    }
    let Some(key) = key(packet, direction) else { return Decision::Drop };
    if acl.related_icmp_passes && is_related_to_known(flows, packet, direction, now) {
        return Decision::Pass;
    }
    let segment = Segment::of(packet);
    // A new connection may reuse the ports of an old one, so it is evaluated.
    let opens = segment.as_ref().is_some_and(|segment| segment.flags & (SYN | ACK) == SYN);
    if !opens && flows.is_over(&key, now) {
        return segment.and_then(|segment| segment.refusal(packet)).map_or(Decision::Drop, Decision::Answer);
    }
    let known = !opens && flows.is_known(&key, now);
    if !known && flows.begin(key, &key.seen(direction), acl, now) == Verdict::Block {
        return Decision::Drop;
    }
    flows.saw(&key, segment.map(|segment| segment.expected(direction)).unwrap_or_default(), now);
    Decision::Pass
}

/// The packets that reset a connection, for its local and its remote end.
pub(super) fn resets(key: &Key, expected: &Expected) -> [Option<Vec<u8>>; 2] {
    let (local, remote) = ((key.local, key.local_port), (key.remote, key.remote_port));
    [
        expected.local.and_then(|sequence| reset(remote, local, sequence)),
        expected.remote.and_then(|sequence| reset(local, remote, sequence)),
    ]
}

/// None if the addresses are not of one family.
fn reset(from: (IpAddr, u16), to: (IpAddr, u16), sequence: u32) -> Option<Vec<u8>> {
    let mut packet = match (from.0, to.0) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = [0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, TCP, 0, 0];
            [&header[..], &from.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => ipv6_header(TCP, 64, from, to),
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return None,
    };
    packet.extend(from.1.to_be_bytes());
    packet.extend(to.1.to_be_bytes());
    packet.extend(sequence.to_be_bytes());
    packet.extend([0, 0, 0, 0, 0x50, RST, 0, 0, 0, 0, 0, 0]);
    finish(&mut packet);
    Some(packet)
}

/// The fields of a TCP segment that matter for resets.
struct Segment {
    flags: u8,
    sequence: u32,
    acknowledges: u32,
    /// The number of sequence numbers that it occupies.
    length: u32,
}

impl Segment {
    fn of(packet: &IpPacket<'_>) -> Option<Segment> {
        let tcp = packet.payload();
        let header = usize::from(tcp.get(12)? >> 4) * 4;
        let flags = *tcp.get(13)?;
        let number = |at: usize| Some(u32::from_be_bytes(tcp.get(at..at + 4)?.try_into().ok()?));
        let data = tcp.len().checked_sub(header)? as u32;
        let length = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        let is_tcp = packet.protocol() == TCP;
        is_tcp.then_some(Segment { flags, sequence: number(4)?, acknowledges: number(8)?, length })
    }

    /// The sender expects the number that it acknowledges; the receiver expects the number after the segment.
    fn expected(&self, direction: PacketDirection) -> Expected {
        let sender = (self.flags & ACK != 0).then_some(self.acknowledges);
        let receiver = Some(self.sequence.wrapping_add(self.length));
        match direction {
            PacketDirection::In => Expected { local: receiver, remote: sender },
            PacketDirection::Out => Expected { local: sender, remote: receiver },
        }
    }

    /// The answer of an end that does not know the connection (RFC 9293 3.10.7.1).
    fn refusal(&self, packet: &IpPacket<'_>) -> Option<Vec<u8>> {
        let tcp = packet.payload();
        let (from, to) = (u16_at(tcp, 0)?, u16_at(tcp, 2)?);
        let answers = self.flags & RST == 0 && self.flags & ACK != 0;
        if !answers {
            return None;
        }
        reset((packet.destination(), to), (packet.source(), from), self.acknowledges)
    }
}

/// Whether the packet is an ICMP error about a packet of a known flow.
fn is_related_to_known(
    flows: &Flows,
    packet: &IpPacket<'_>,
    direction: PacketDirection,
    now: Instant,
) -> bool {
    let payload = packet.payload();
    // Destination unreachable, time exceeded, parameter problem, and packet too big of IPv6: the packet in question
    // follows (RFC 792, RFC 4443).
    let is_error = match packet {
        IpPacket::V4(_) => packet.protocol() == ICMP && matches!(payload.first(), Some(3 | 11 | 12)),
        IpPacket::V6(_) => packet.protocol() == ICMPV6 && matches!(payload.first(), Some(1..=4)),
    };
    let Some(about) = payload.get(8..).filter(|_| is_error) else { return false };
    let back = if direction == PacketDirection::In { PacketDirection::Out } else { PacketDirection::In };
    quoted_key(about, back).is_some_and(|key| flows.is_known(&key, now))
}

fn ends(source: IpAddr, destination: IpAddr, direction: PacketDirection) -> (IpAddr, IpAddr) {
    match direction {
        PacketDirection::In => (destination, source),
        PacketDirection::Out => (source, destination),
    }
}

fn key(packet: &IpPacket<'_>, direction: PacketDirection) -> Option<Key> {
    let (local, remote) = ends(packet.source(), packet.destination(), direction);
    let (protocol, payload) = (packet.protocol(), packet.payload());
    let (local_port, remote_port) = match protocol {
        TCP | UDP | SCTP => {
            let (source, destination) = (u16_at(payload, 0)?, u16_at(payload, 2)?);
            if direction == PacketDirection::In { (destination, source) } else { (source, destination) }
        }
        // Echo and timestamp, request and reply.
        ICMP if matches!(payload.first(), Some(0 | 8 | 13 | 14)) => {
            let identifier = u16_at(payload, 4)?;
            (identifier, identifier)
        }
        // Echo, request and reply.
        ICMPV6 if matches!(payload.first(), Some(128 | 129)) => {
            let identifier = u16_at(payload, 4)?;
            (identifier, identifier)
        }
        _ => (0, 0),
    };
    Some(Key { protocol, local, remote, local_port, remote_port })
}

/// The flow of the packet that an ICMP error quotes: its header is complete, the rest may be truncated.
fn quoted_key(quoted: &[u8], direction: PacketDirection) -> Option<Key> {
    let v6 = || Ipv6Packet::parse_truncated(quoted).map(IpPacket::V6);
    key(&Ipv4Packet::parse_truncated(quoted).map(IpPacket::V4).or_else(v6)?, direction)
}
