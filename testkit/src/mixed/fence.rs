//! Packets that are not subject to policy. Once they have arrived, earlier packets have been received or dropped.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tortie_api::net::Protocol;
use tortie_dataplane::MacAddress;
use tortie_kernel::namespace::NetNs;
use tortie_policy::program::Flow;

use super::TIMEOUT;
use crate::frames;

const PORT: u16 = 7;

/// A node's own end of the overlay, with a socket.
pub(super) struct Marker {
    socket: UdpSocket,
    address: Ipv4Addr,
    _namespace: NetNs,
}

impl Marker {
    pub(super) fn new(namespace: NetNs, address: Ipv4Addr) -> Result<Self> {
        let socket = namespace.run(|| UdpSocket::bind((address, PORT)))?;
        let socket = socket.with_context(|| format!("{address} port {PORT}"))?;
        Ok(Self { socket, address, _namespace: namespace })
    }

    /// A flow from this socket to a pod.
    pub(super) fn flow(&self, destination: IpAddr, destination_port: u16) -> Flow {
        let (source, source_port, protocol) = (self.address.into(), PORT, Protocol::UDP);
        Flow { source, destination, protocol, source_port, destination_port, icmp: None }
    }

    /// Whether the flow starts at this socket.
    pub(super) fn is_source_of(&self, flow: &Flow) -> bool {
        *flow == self.flow(flow.destination, flow.destination_port)
    }

    /// Sends a packet of such a flow.
    pub(super) fn send(&self, flow: &Flow, tag: u32) -> Result<()> {
        self.socket.send_to(&frames::tagged(tag), (flow.destination, flow.destination_port))?;
        Ok(())
    }

    /// Waits until it has received this number from that many senders; other numbers are late packets.
    fn wait(&self, number: u64, mut senders: usize, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        while senders > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            self.socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let mut buffer = [0; 8];
            match self.socket.recv_from(&mut buffer) {
                Ok(_) if u64::from_be_bytes(buffer) == number => senders -= 1,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && left.is_zero() => {
                    return Ok(false);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

/// Sends from each node to each other node, and waits until everything has arrived.
pub(super) fn through_tunnels<'a>(markers: impl Iterator<Item = &'a Marker> + Clone) -> Result<()> {
    ensure!(
        all_arrive(markers, TIMEOUT)?,
        "a packet between nodes, which no policy is asked of, did not arrive"
    );
    Ok(())
}

/// The same with new packets until all of them arrive, because links come up one after another.
pub(super) fn wait_for_tunnels<'a>(markers: impl Iterator<Item = &'a Marker> + Clone) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !all_arrive(markers.clone(), Duration::from_millis(200))? {
        ensure!(Instant::now() < deadline, "the nodes do not reach each other");
    }
    Ok(())
}

fn all_arrive<'a>(markers: impl Iterator<Item = &'a Marker> + Clone, patience: Duration) -> Result<bool> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    for from in markers.clone() {
        for to in markers.clone().filter(|to| to.address != from.address) {
            from.socket.send_to(&number.to_be_bytes(), (to.address, PORT))?;
        }
    }
    let others = markers.clone().count() - 1;
    for to in markers {
        if !to.wait(number, others, patience)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// An ARP request (RFC 826) for an address that nobody else asks for, so that its answer is unique. The address is
/// outside the subnet, where the switch answers every request.
pub(super) struct Question {
    mac: MacAddress,
    own: Ipv4Addr,
    target: Ipv4Addr,
}

impl Question {
    pub(super) fn new(mac: MacAddress, own: Ipv4Addr) -> Self {
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let [_, a, b, c] = ASKED.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        Self { mac, own, target: Ipv4Addr::new(100, a, b, c) }
    }

    pub(super) fn frame(&self) -> Vec<u8> {
        let (mac, own, target) = (self.mac.0, self.own.octets(), self.target.octets());
        let ethernet = [&[0xff; 6][..], &mac, &[0x08, 0x06]].concat();
        [&ethernet, &[0, 1, 8, 0, 6, 4, 0, 1][..], &mac, &own, &[0; 6], &target].concat()
    }

    pub(super) fn is_answered_by(&self, frame: &[u8]) -> bool {
        let is_reply = frame.get(12..22) == Some(&[0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2]);
        is_reply && frame.get(28..32) == Some(&self.target.octets())
    }
}
