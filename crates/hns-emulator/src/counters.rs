//! What passes an endpoint's port of the switch.

#[cfg(target_os = "linux")]
use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use tortie_hcn::Guid;

#[cfg(target_os = "linux")]
use crate::acl::PacketDirection;
#[cfg(target_os = "linux")]
use crate::fabric::{Frame, Output, Port};

/// The calls of the emulator for `HcnQueryEndpointStats` and `HcnQueryEndpointAddresses`.
pub(crate) const ENDPOINT_STATS: &str = "endpoint-stats";
pub(crate) const ENDPOINT_ADDRESSES: &str = "endpoint-addresses";

/// The settings of these calls.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct AboutEndpoint {
    pub(crate) id: Guid,
}

/// The answer to the first of them (hcsshim, `internal/hns/hnsendpoint.go`).
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct EndpointStats {
    pub(crate) endpoint_id: Guid,
    pub(crate) instance_id: Guid,
    #[serde(flatten)]
    pub(crate) counters: EndpointCounters,
}

/// The IPv4 packets of an endpoint, as its own side counts them. What the switch drops is counted apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct EndpointCounters {
    pub(crate) bytes_received: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) packets_received: u64,
    pub(crate) packets_sent: u64,
    pub(crate) dropped_packets_incoming: u64,
    pub(crate) dropped_packets_outgoing: u64,
}

/// The counters of all endpoints with a port.
#[cfg(target_os = "linux")]
#[derive(Debug, Default)]
pub(crate) struct Counters(HashMap<Guid, EndpointCounters>);

#[cfg(target_os = "linux")]
impl Counters {
    pub(crate) fn of(&self, endpoint: Guid) -> EndpointCounters {
        self.0.get(&endpoint).copied().unwrap_or_default()
    }

    /// A frame has come from a port.
    pub(crate) fn sent(&mut self, port: Port, frame: &[u8]) {
        if let Some((counters, length)) = self.counted(port, frame) {
            counters.packets_sent += 1;
            counters.bytes_sent += length;
        }
    }

    /// These frames go to ports.
    pub(crate) fn received(&mut self, outputs: &[Output]) {
        for output in outputs {
            let Output::Frame(port, frame) = output else { continue };
            if let Some((counters, length)) = self.counted(*port, frame) {
                counters.packets_received += 1;
                counters.bytes_received += length;
            }
        }
    }

    /// The ACLs of an endpoint have dropped a packet.
    pub(crate) fn dropped(&mut self, endpoint: Guid, direction: PacketDirection) {
        let counters = self.0.entry(endpoint).or_default();
        match direction {
            PacketDirection::In => counters.dropped_packets_incoming += 1,
            PacketDirection::Out => counters.dropped_packets_outgoing += 1,
        }
    }

    /// Forgets ports that are gone.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&Guid) -> bool) {
        self.0.retain(|endpoint, _| is_there(endpoint));
    }

    /// The counters for a frame of an endpoint's port with an IP packet, and its length.
    fn counted(&mut self, port: Port, frame: &[u8]) -> Option<(&mut EndpointCounters, u64)> {
        let Port::Pod(endpoint) = port else { return None };
        let is_ip = matches!(Frame::parse(frame), Frame::Ip { .. });
        is_ip.then(|| (self.0.entry(endpoint).or_default(), frame.len() as u64))
    }
}
