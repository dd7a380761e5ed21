//! Established flows of a port: their later packets pass in both directions without evaluation of the ACLs
//! (docs/hns.md, ACLs).

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::acl::{AccessControl, Packet, PacketDirection, Verdict};

pub(crate) const ICMP: u8 = 1;
pub(crate) const ICMPV6: u8 = 58;
pub(crate) const TCP: u8 = 6;

/// How long a flow without packets is kept.
pub(crate) fn lifetime(protocol: u8) -> Duration {
    Duration::from_secs(if protocol == TCP { 3600 } else { 120 })
}

/// Beyond this number of flows, expired ones are removed.
const MANY: usize = 4096;

/// A flow, seen from the endpoint, so that both directions have the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) protocol: u8,
    pub(crate) local: IpAddr,
    pub(crate) remote: IpAddr,
    /// Ports; for an ICMP request and its reply, their identifier in both fields.
    pub(crate) local_port: u16,
    pub(crate) remote_port: u16,
}

impl Key {
    /// The flow of a packet. All ICMP between two addresses is one flow.
    pub(crate) fn of(packet: &Packet) -> Key {
        let Packet { protocol, local, remote, local_port, remote_port, .. } = *packet;
        Key { protocol, local, remote, local_port, remote_port }
    }

    /// The packet as an ACL sees it: an ICMP identifier is not a port.
    pub(crate) fn seen(&self, direction: PacketDirection) -> Packet {
        let Key { protocol, local, remote, .. } = *self;
        let (local_port, remote_port) = match protocol {
            ICMP | ICMPV6 => (0, 0),
            _ => (self.local_port, self.remote_port),
        };
        Packet { direction, protocol, local, remote, local_port, remote_port }
    }
}

/// The sequence numbers that the two ends of a TCP connection expect next, as far as seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) local: Option<u32>,
    pub(crate) remote: Option<u32>,
}

#[derive(Debug)]
struct Flow {
    last_seen: Instant,
    expected: Expected,
    /// Whether it was reset: its later packets belong to no flow.
    over: bool,
}

/// The flows of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    flows: HashMap<Key, Flow>,
    /// The number of resets of the endpoint that these flows have seen.
    resets: u64,
}

impl Flows {
    /// No flows, for an endpoint with that number of resets.
    pub(crate) fn new(resets: u64) -> Flows {
        Flows { flows: HashMap::new(), resets }
    }

    /// Handles the first packet of a flow: evaluates the ACLs for the packet that they see.
    pub(crate) fn begin(&mut self, key: Key, seen: &Packet, acl: &AccessControl, now: Instant) -> Verdict {
        let verdict = acl.judge(seen);
        match verdict {
            Verdict::Allow => self.remember(key, now),
            Verdict::Block => drop(self.flows.remove(&key)),
        }
        verdict
    }

    fn remember(&mut self, key: Key, now: Instant) {
        if self.flows.len() >= MANY {
            self.flows.retain(|key, flow| now.duration_since(flow.last_seen) < lifetime(key.protocol));
        }
        self.flows.insert(key, Flow { last_seen: now, expected: Expected::default(), over: false });
    }

    fn alive(&self, key: &Key, now: Instant) -> Option<&Flow> {
        let is_alive = |flow: &&Flow| now.duration_since(flow.last_seen) < lifetime(key.protocol);
        self.flows.get(key).filter(is_alive)
    }

    /// Whether packets of the flow pass without evaluation.
    pub(crate) fn is_known(&self, key: &Key, now: Instant) -> bool {
        self.alive(key, now).is_some_and(|flow| !flow.over)
    }

    /// Whether the flow was reset.
    pub(crate) fn is_over(&self, key: &Key, now: Instant) -> bool {
        self.alive(key, now).is_some_and(|flow| flow.over)
    }

    /// Whether any flow of the protocol is known between two addresses.
    #[cfg(target_os = "linux")]
    pub(crate) fn any_between(&self, protocol: u8, local: IpAddr, remote: IpAddr, now: Instant) -> bool {
        let same = |key: &&Key| (key.protocol, key.local, key.remote) == (protocol, local, remote);
        self.flows.keys().filter(same).any(|key| self.is_known(key, now))
    }

    /// Handles a packet of a known flow; the ends expect at least these sequence numbers from now on.
    #[cfg(target_os = "linux")]
    pub(crate) fn saw(&mut self, key: &Key, expected: Expected, now: Instant) {
        let Some(flow) = self.flows.get_mut(key) else { return };
        let later = |known: Option<u32>, new: Option<u32>| match (known, new) {
            // Sequence numbers are compared modulo 2^32 (RFC 9293 3.4).
            (Some(known), Some(new)) if new.wrapping_sub(known) as i32 <= 0 => Some(known),
            (known, new) => new.or(known),
        };
        flow.last_seen = now;
        flow.expected.local = later(flow.expected.local, expected.local);
        flow.expected.remote = later(flow.expected.remote, expected.remote);
    }

    /// Compares the number of resets of the endpoint. If it has changed, all flows end, and the connections among
    /// them are returned, in order.
    pub(crate) fn follow(&mut self, resets: u64) -> Vec<(Key, Expected)> {
        if std::mem::replace(&mut self.resets, resets) == resets {
            return vec![];
        }
        self.flows.retain(|key, flow| key.protocol == TCP && !flow.over);
        self.flows.values_mut().for_each(|flow| flow.over = true);
        let mut cut: Vec<_> = self.flows.iter().map(|(key, flow)| (*key, flow.expected)).collect();
        cut.sort_by_key(|(key, _)| *key);
        cut
    }
}
