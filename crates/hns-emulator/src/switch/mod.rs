//! The switch: forwards real frames between network namespaces as [`Fabric`] decides.
//!
//! A separate network namespace, "the vSwitch", holds one end of a virtual cable for each port. The other end is a
//! pod's `eth0`, or the node's own interface on a network. One thread reads the frames at the vSwitch's ends, and
//! the VXLAN datagrams at a UDP socket of the node.

mod ports;
mod run;
mod translations;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tortie_hcn::Guid;
use tortie_kernel::namespace::NetNs;
use tracing::error;

use crate::counters::EndpointCounters;
use crate::error::Error;
use crate::fabric::Plan;
use ports::Ports;
use run::Engine;

/// A running switch. Dropping it stops the switch and removes its interfaces.
pub(crate) struct Switch {
    ports: Mutex<Ports>,
    engine: Arc<Engine>,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    /// Starts a switch on the node of the namespace `node`, with the address `provider` on the underlay.
    pub(crate) fn start(node: NetNs, provider: Ipv4Addr) -> Result<Switch, Error> {
        let engine = Arc::new(Engine::new(&node, provider)?);
        let ports = Mutex::new(Ports::new(node, Arc::clone(&engine))?);
        let runner = Arc::clone(&engine);
        let thread = std::thread::Builder::new()
            .name("hns-switch".into())
            .spawn(move || {
                if let Err(error) = runner.run() {
                    error!(%error, "the switch has stopped; no frame is forwarded any more");
                }
            })
            .map_err(Error::system("start the switch's thread"))?;
        Ok(Switch { ports, engine, thread: Some(thread) })
    }

    /// Makes ports and forwarding match the plans. `compartments` has the paths of the namespaces; an endpoint whose
    /// namespace has no path gets its port as soon as there is one. Returns the first error; the other ports are
    /// still created.
    pub(crate) fn apply(
        &self,
        plans: BTreeMap<Guid, Arc<Plan>>,
        compartments: &BTreeMap<Guid, PathBuf>,
    ) -> Result<(), Error> {
        let mut ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        // Forwarding stops before a port is removed, and a new port exists before frames arrive for it.
        let result = ports.make(&plans, compartments);
        let result = result.and(ports.set_translations(&plans));
        self.engine.set_plans(plans);
        result.and(ports.remove_the_rest())
    }

    /// What an endpoint's port has counted.
    pub(crate) fn counters(&self, endpoint: Guid) -> EndpointCounters {
        self.engine.counters(endpoint)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.engine.stop();
        if let Some(thread) = self.thread.take() {
            // The thread has already printed a panic.
            let _ = thread.join();
        }
    }
}
