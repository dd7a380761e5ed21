//! Frames that attackers make by hand, and the places where one listens for them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};

use anyhow::{Context, Result, ensure};
use testkit::frames;
use tortie_api::net::Protocol;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::RouteSocket;
use tortie_policy::program::Flow;

/// The port to which attackers send.
pub(crate) const PORT: u16 = 7000;
/// The longest frame.
const LONGEST: usize = 65_536;

/// An interface by which an attacker sends what he likes.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: PacketSocket,
    /// The hardware address to which he sends.
    pub(crate) to: [u8; 6],
}

impl Wire {
    /// An interface of a namespace.
    pub(crate) fn open(netns: &NetNs, interface: &str, to: [u8; 6]) -> Result<Self> {
        let socket = netns.run(|| PacketSocket::open(interface_index(interface)?))??;
        Ok(Self { socket, to })
    }

    /// The interface of a pod, which sends to its node.
    pub(crate) fn of_pod(pod: &NetNs, node: &NetNs) -> Result<Self> {
        let peer = pod.run(|| RouteSocket::open()?.link("eth0"))??.and_then(|link| link.peer);
        let links = node.run(|| RouteSocket::open()?.links())??;
        let far = links.into_iter().find(|link| link.kind == "veth" && Some(link.index) == peer);
        let mac = far.and_then(|link| link.mac).context("the pod's interface has no other end")?;
        Self::open(pod, "eth0", mac.0)
    }

    /// Sends a frame.
    pub(crate) fn send(&self, frame: &[u8]) -> Result<()> {
        // The queue is short, and the kernel empties it.
        for _ in 0..1000 {
            if self.socket.send(frame)? {
                return Ok(());
            }
            std::thread::yield_now();
        }
        ensure!(self.socket.send(frame)?, "there is no room for a frame");
        Ok(())
    }

    /// Sends a packet of a flow, with a tag.
    pub(crate) fn send_flow(&self, flow: &Flow, tag: u32) -> Result<()> {
        self.send(&frames::frame(flow, self.to, tag))
    }
}

/// A datagram to [`PORT`].
pub(crate) fn datagram(source: IpAddr, destination: IpAddr) -> Flow {
    flow(Protocol::UDP, source, destination)
}

/// The first packet of a flow; ICMP is a request.
pub(crate) fn flow(protocol: Protocol, source: IpAddr, destination: IpAddr) -> Flow {
    let icmp = match protocol {
        Protocol::ICMP => Some((8, 0)),
        Protocol::ICMPV6 => Some((128, 0)),
        _ => None,
    };
    Flow { source, destination, protocol, source_port: 40_000, destination_port: PORT, icmp }
}

/// A packet in another one: the inner packet is that of `frames::frame` without its Ethernet header.
pub(crate) fn in_ip(source: IpAddr, destination: IpAddr, protocol: u8, inner: &[u8], to: [u8; 6]) -> Vec<u8> {
    // The protocol has no meaning for the builder, which makes a header and a tag around nothing; both are replaced.
    let outer = Flow { protocol: Protocol(protocol), ..datagram(source, destination) };
    let frame = frames::frame(&outer, to, 0);
    let header = if source.is_ipv4() { 20 } else { 40 };
    let mut packet = frame[..14 + header].to_vec();
    if source.is_ipv4() {
        packet[16..18].copy_from_slice(&length(20 + inner.len()));
        packet[24..26].fill(0);
        let sum = frames::checksum(&packet[14..34]);
        packet[24..26].copy_from_slice(&sum.to_be_bytes());
    } else {
        packet[18..20].copy_from_slice(&length(inner.len()));
    }
    packet.extend(inner);
    packet
}

/// A frame in VXLAN (RFC 7348), in UDP without a checksum.
pub(crate) fn in_vxlan(source: IpAddr, destination: IpAddr, vni: u32, inner: &[u8], to: [u8; 6]) -> Vec<u8> {
    let udp = [40_001_u16.to_be_bytes(), 4789_u16.to_be_bytes(), length(16 + inner.len()), [0; 2]].concat();
    let vxlan = [&[8, 0, 0, 0], &(vni << 8).to_be_bytes()[..]].concat();
    in_ip(source, destination, 17, &[&udp, &vxlan, inner].concat(), to)
}

fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes()
}

/// A place where packets arrive.
#[derive(Debug)]
pub(crate) enum Ear {
    /// All frames of an interface.
    Frames(PacketSocket),
    /// The datagrams to [`PORT`] that a machine takes.
    Datagrams(UdpSocket),
}

impl Ear {
    pub(crate) fn frames(netns: &NetNs, interface: &str) -> Result<Self> {
        let socket = netns.run(|| PacketSocket::open(interface_index(interface)?))??;
        socket.set_receive_buffer(16 << 20)?;
        Ok(Self::Frames(socket))
    }

    pub(crate) fn datagrams(netns: &NetNs) -> Result<Self> {
        let socket = netns.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT)))??;
        socket.set_nonblocking(true)?;
        Ok(Self::Datagrams(socket))
    }

    /// The tags of what has arrived since the last call.
    pub(crate) fn tags(&self) -> Result<BTreeSet<u32>> {
        Ok(self.received()?.iter().map(|packet| frames::tag(packet)).collect())
    }

    /// What has arrived since the last call.
    pub(crate) fn received(&self) -> Result<Vec<Vec<u8>>> {
        let (mut buffer, mut packets) = (vec![0; LONGEST], Vec::new());
        loop {
            let received = match self {
                Self::Frames(socket) => socket.receive(&mut buffer)?,
                Self::Datagrams(socket) => socket.recv(&mut buffer).ok(),
            };
            let Some(length) = received else { return Ok(packets) };
            packets.push(buffer[..length].to_vec());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header whose checksum and length fit, with the inner packet behind it.
    #[test]
    fn an_outer_packet_has_a_valid_header_and_keeps_the_inner_one() {
        let [a, b] = [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])];
        let inner = frames::frame(&datagram(a, b), [2; 6], 7);
        let frame = in_ip(b, a, 4, &inner[14..], [3; 6]);
        assert_eq!(frames::checksum(&frame[14..34]), 0);
        assert_eq!(usize::from(u16::from_be_bytes([frame[16], frame[17]])), frame.len() - 14);
        assert_eq!((frame[23], &frame[34..]), (4, &inner[14..]));

        let [c, d] = [IpAddr::from(Ipv6Addr::LOCALHOST), IpAddr::from(Ipv6Addr::from_bits(2))];
        let frame = in_ip(c, d, 4, &inner[14..], [3; 6]);
        assert_eq!(usize::from(u16::from_be_bytes([frame[18], frame[19]])), frame.len() - 54);
        assert_eq!((frame[20], &frame[54..]), (4, &inner[14..]));

        let frame = in_vxlan(a, b, 4096, &inner, [3; 6]);
        assert_eq!(usize::from(u16::from_be_bytes([frame[38], frame[39]])), frame.len() - 34);
        assert_eq!(frame[42..50], [8, 0, 0, 0, 0, 0x10, 0, 0]);
        assert_eq!((&frame[50..], frames::tag(&frame)), (&inner[..], 7));
    }
}
