//! Waits until packets have left the chains of nftables.

use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, membarrier};

/// How long a packet may need to pass the chains, if the kernel does not say when it has left them. This is far more
/// than the chains need, but a virtual processor may be suspended in between (with one millisecond, a packet was lost
/// in about 300 changes of programs).
const GRACE: Duration = Duration::from_millis(10);
/// By then every packet has left the chains: the kernel complains about a processor that is suspended longer.
const LONG_AGO: Duration = Duration::from_secs(1);

/// Waits until packets that were inside the chains at that moment have left them. A packet passes all chains in
/// one RCU read section, and this `membarrier(2)` returns when all sections that had begun before have ended. A
/// kernel with one processor returns immediately; one with `nohz_full` or a strict seccomp filter refuses.
pub(crate) fn wait_for_packets(since: Instant) {
    if since.elapsed() > LONG_AGO {
        return;
    }
    let several = thread::available_parallelism().is_ok_and(|processors| processors.get() > 1);
    match membarrier(MembarrierCommand::Global) {
        Ok(()) if several => return,
        Ok(()) => {}
        Err(error) => tracing::debug!(%error, "cannot wait for packets in the chains; sleeping instead"),
    }
    thread::sleep(GRACE.saturating_sub(since.elapsed()));
}
