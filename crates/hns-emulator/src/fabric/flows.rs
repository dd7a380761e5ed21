//! Flows that a port has let through: their later packets pass both ways without asking the ACLs again (hns.md 4.1).

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use super::checksum::{TCP, UDP};
use super::frame::{Ipv4Packet, u16_at};
use crate::acl::{AccessControl, Packet, Verdict, Way};

const ICMP: u8 = 1;
const SCTP: u8 = 132;

/// How long a flow without packets is kept.
fn lifetime(protocol: u8) -> Duration {
    Duration::from_secs(if protocol == TCP { 3600 } else { 120 })
}

/// Past this many flows, those that are over are looked for.
const MANY: usize = 4096;

/// A flow, seen from the endpoint, so that both directions have the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    protocol: u8,
    local: Ipv4Addr,
    remote: Ipv4Addr,
    /// Ports; for an ICMP question and its answer their identifier, twice.
    local_port: u16,
    remote_port: u16,
}

/// The flows of one port.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    last_seen: HashMap<Key, Instant>,
}

impl Flows {
    /// Whether the packet passes the port.
    pub(crate) fn judge(
        &mut self,
        packet: &Ipv4Packet<'_>,
        way: Way,
        acl: &AccessControl,
        now: Instant,
    ) -> Verdict {
        if packet.fragment_offset() != 0 {
            return self.judge_fragment(packet, way, now);
        }
        let Some(key) = key(packet, way) else { return Verdict::Block };
        if self.related_to_known(packet, way, now) {
            return Verdict::Allow;
        }
        // A new connection may use the ports of an old one: it is asked about.
        if self.is_known(&key, now) && !opens_connection(packet) {
            self.last_seen.insert(key, now);
            return Verdict::Allow;
        }
        let verdict = acl.judge(&seen(&key, way));
        match verdict {
            Verdict::Allow => self.remember(key, now),
            Verdict::Block => drop(self.last_seen.remove(&key)),
        }
        verdict
    }

    fn is_known(&self, key: &Key, now: Instant) -> bool {
        self.last_seen.get(key).is_some_and(|seen| now.duration_since(*seen) < lifetime(key.protocol))
    }

    fn remember(&mut self, key: Key, now: Instant) {
        if self.last_seen.len() >= MANY {
            self.last_seen.retain(|key, seen| now.duration_since(*seen) < lifetime(key.protocol));
        }
        self.last_seen.insert(key, now);
    }

    /// Later fragments have no ports: they pass when there is a flow between the same addresses.
    fn judge_fragment(&self, packet: &Ipv4Packet<'_>, way: Way, now: Instant) -> Verdict {
        let (local, remote) = ends(packet.source(), packet.destination(), way);
        let same = |key: &&Key| {
            key.protocol == packet.protocol()
                && key.local == local
                && key.remote == remote
                && self.is_known(key, now)
        };
        if self.last_seen.keys().any(|key| same(&key)) { Verdict::Allow } else { Verdict::Block }
    }

    /// Whether it is an ICMP error about a packet of a known flow.
    fn related_to_known(&self, packet: &Ipv4Packet<'_>, way: Way, now: Instant) -> bool {
        let payload = packet.payload();
        // Destination unreachable, time exceeded, parameter problem: the packet that it is about follows (RFC 792).
        let is_error = packet.protocol() == ICMP && matches!(payload.first(), Some(3 | 11 | 12));
        let Some(about) = payload.get(8..).filter(|_| is_error) else { return false };
        let back = if way == Way::In { Way::Out } else { Way::In };
        quoted_key(about, back).is_some_and(|key| self.is_known(&key, now))
    }
}

fn ends(source: Ipv4Addr, destination: Ipv4Addr, way: Way) -> (Ipv4Addr, Ipv4Addr) {
    match way {
        Way::In => (destination, source),
        Way::Out => (source, destination),
    }
}

fn key(packet: &Ipv4Packet<'_>, way: Way) -> Option<Key> {
    let (local, remote) = ends(packet.source(), packet.destination(), way);
    key_of(packet.protocol(), packet.payload(), local, remote, way)
}

/// The flow of a packet that an ICMP error quotes: the header is whole, what follows may be cut short.
fn quoted_key(quoted: &[u8], way: Way) -> Option<Key> {
    let header = usize::from(quoted.first()? & 0x0f) * 4;
    let address = |at: usize| -> Option<Ipv4Addr> {
        let octets: [u8; 4] = quoted.get(at..at + 4)?.try_into().ok()?;
        Some(octets.into())
    };
    let (local, remote) = ends(address(12)?, address(16)?, way);
    key_of(*quoted.get(9)?, quoted.get(header..)?, local, remote, way)
}

fn key_of(protocol: u8, payload: &[u8], local: Ipv4Addr, remote: Ipv4Addr, way: Way) -> Option<Key> {
    let (local_port, remote_port) = match protocol {
        TCP | UDP | SCTP => {
            let (source, destination) = (u16_at(payload, 0)?, u16_at(payload, 2)?);
            if way == Way::In { (destination, source) } else { (source, destination) }
        }
        // Echo and timestamp, question and answer.
        ICMP if matches!(payload.first(), Some(0 | 8 | 13 | 14)) => {
            let identifier = u16_at(payload, 4)?;
            (identifier, identifier)
        }
        _ => (0, 0),
    };
    Some(Key { protocol, local, remote, local_port, remote_port })
}

/// What an ACL sees: an ICMP identifier is not a port.
fn seen(key: &Key, way: Way) -> Packet {
    let Key { protocol, local, remote, .. } = *key;
    let (local_port, remote_port) = if protocol == ICMP { (0, 0) } else { (key.local_port, key.remote_port) };
    Packet { way, protocol, local, remote, local_port, remote_port }
}

/// TCP with SYN and without ACK.
fn opens_connection(packet: &Ipv4Packet<'_>) -> bool {
    packet.protocol() == TCP && packet.payload().get(13).is_some_and(|flags| flags & 0x12 == 0x02)
}
