//! Session affinity: the backends that clients had. The time is an argument, in seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::state::ServicePortId;

/// The backends of the last connections of clients. All frontends of a port of a Service share them, and no other port does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affinities {
    last: BTreeMap<(Arc<ServicePortId>, IpAddr), BTreeMap<SocketAddr, u64>>,
}

impl Affinities {
    /// Notes a new connection at this time. Packets of existing connections change nothing.
    pub fn connected(&mut self, port: &Arc<ServicePortId>, client: IpAddr, backend: SocketAddr, now: u64) {
        self.last.entry((port.clone(), client)).or_default().insert(backend, now);
    }

    /// The backends of the client's connections within the time-out before now, in seconds.
    #[must_use]
    pub fn of(
        &self,
        port: &Arc<ServicePortId>,
        client: IpAddr,
        timeout: u32,
        now: u64,
    ) -> BTreeSet<SocketAddr> {
        let last = self.last.get(&(port.clone(), client)).into_iter().flatten();
        let is_current = |at: u64| now.saturating_sub(at) < u64::from(timeout);
        last.filter(|(_, at)| is_current(**at)).map(|(backend, _)| *backend).collect()
    }

    /// Forgets a backend that has left both pools of a port.
    pub fn gone(&mut self, port: &Arc<ServicePortId>, backend: SocketAddr) {
        for ((of, _), last) in &mut self.last {
            if of == port {
                last.remove(&backend);
            }
        }
    }
}
