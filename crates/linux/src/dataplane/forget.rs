//! Removes connections from connection tracking: those of released addresses and, if configured, those that policy
//! denies now ([`Cut`]). This requires a dump of the kernel's whole table, which takes about 10 ms, so a thread does
//! it once for all addresses of an interval.
//!
//! Nobody may inherit connections: before an address is reused, [`Forgetter::wait_for`] must be called. It waits only
//! if the address is still queued.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::{Error, Result};

use super::cut::Cut;

/// How long addresses are collected before the table is read.
const COLLECT: Duration = Duration::from_millis(200);
/// The maximum delay while more and more addresses are released.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// The delay before a retry.
const RETRY: Duration = Duration::from_secs(1);

/// Removes connections in a separate thread, in the network namespace in which it was opened.
#[derive(Debug)]
pub(super) struct Forgetter {
    work: Arc<Work>,
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The state shared by the thread and the callers.
#[derive(Debug)]
struct Work {
    /// Locked while the table is read.
    conntrack: Mutex<Conntrack>,
    /// Locked only briefly.
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: BTreeSet<IpAddr>,
    cut: Cut,
    /// The addresses whose connections are being removed.
    busy: BTreeSet<IpAddr>,
}

impl Forgetter {
    /// Opens a netlink connection, and starts the thread.
    pub(super) fn open() -> Result<Self> {
        let work =
            Arc::new(Work { conntrack: Mutex::new(Conntrack::open()?), queue: Mutex::new(Queue::default()) });
        let (wake, woken) = channel();
        let its = work.clone();
        let thread = std::thread::Builder::new().name("conntrack".to_owned()).spawn(move || its.run(&woken));
        let thread = thread.map_err(Error::system("start a thread", "conntrack"))?;
        Ok(Self { work, wake: Some(wake), thread: Some(thread) })
    }

    /// The addresses that have connections now.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(super) fn addresses(&self) -> Result<BTreeSet<IpAddr>> {
        lock(&self.work.conntrack).addresses()
    }

    /// The number of connections by the address that began them.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(super) fn connections(&self) -> Result<BTreeMap<IpAddr, usize>> {
        lock(&self.work.conntrack).by_source()
    }

    /// Schedules the removal of the connections of these addresses.
    pub(super) fn ask(&self, addresses: BTreeSet<IpAddr>) {
        if addresses.is_empty() {
            return;
        }
        lock(&self.work.queue).waiting.extend(addresses);
        if let Some(wake) = &self.wake {
            let _ = wake.send(()); // the thread ends only with us
        }
    }

    /// Schedules the removal of the connections that policy denies now.
    pub(super) fn ask_to_cut(&self, cut: Cut) {
        lock(&self.work.queue).cut.ingest(cut);
        if let Some(wake) = &self.wake {
            let _ = wake.send(()); // the thread ends only with us
        }
    }

    /// Waits until the scheduled removals of these addresses are done. Usually there are none.
    ///
    /// # Errors
    /// An error of the kernel; the removal is retried.
    pub(super) fn wait_for<'a>(&self, addresses: impl IntoIterator<Item = &'a IpAddr>) -> Result<()> {
        let queue = lock(&self.work.queue);
        let waits = |address: &&IpAddr| queue.waiting.contains(*address) || queue.busy.contains(*address);
        let Some(address) = addresses.into_iter().find(waits) else { return Ok(()) };
        tracing::debug!(%address, "an address is reused while its old connections are still being removed");
        drop(queue);
        self.work.forget()
    }
}

impl Drop for Forgetter {
    /// Waits until all removals are done.
    fn drop(&mut self) {
        self.wake.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it does not panic, and here nothing could be done about it
        }
    }
}

impl Work {
    fn run(&self, woken: &Receiver<()>) {
        while woken.recv().is_ok() {
            let begun = Instant::now();
            while begun.elapsed() < MAX_WAIT && woken.recv_timeout(COLLECT).is_ok() {}
            while let Err(error) = self.forget().and_then(|()| self.cut()) {
                tracing::warn!(%error, "cannot remove old connections; Tortie retries");
                if woken.recv_timeout(RETRY) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
            }
        }
    }

    /// Removes the connections of all queued addresses, after the removal in progress.
    fn forget(&self) -> Result<()> {
        let mut conntrack = lock(&self.conntrack);
        let addresses = {
            let mut queue = lock(&self.queue);
            queue.busy = std::mem::take(&mut queue.waiting);
            queue.busy.clone()
        };
        let forgotten = conntrack.forget(&addresses);
        let mut queue = lock(&self.queue);
        let busy = std::mem::take(&mut queue.busy);
        if forgotten.is_err() {
            queue.waiting.extend(busy);
        }
        drop(queue);
        tracing::debug!(?addresses, count = forgotten?, "removed connections of released addresses");
        Ok(())
    }

    /// Removes the connections that policy denies now.
    fn cut(&self) -> Result<()> {
        let cut = std::mem::take(&mut lock(&self.queue).cut);
        if cut.is_empty() {
            return Ok(());
        }
        let forgotten = lock(&self.conntrack).forget_flows(|flow| cut.denies(flow));
        match forgotten {
            Ok(count) => tracing::debug!(count, "removed connections that policy denies now"),
            Err(error) => {
                let mut queue = lock(&self.queue);
                let newer = std::mem::replace(&mut queue.cut, cut);
                queue.cut.ingest(newer);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// The data behind these locks is consistent even after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tortie_kernel::namespace::NetNs;

    use super::*;

    fn address(last: u8) -> IpAddr {
        [10, 65, 0, last].into()
    }

    #[test]
    fn requests_do_not_wait_for_the_kernel_and_share_one_reading() {
        let forgetter = NetNs::create().unwrap().run(Forgetter::open).unwrap().unwrap();
        let reading = lock(&forgetter.work.conntrack);
        for last in [1, 2, 3] {
            forgetter.ask(BTreeSet::from([address(last)])); // would wait for ever for what this thread holds
        }
        forgetter.wait_for(&[address(4)]).unwrap();
        drop(reading);
        forgetter.wait_for(&[address(2)]).unwrap();
        let queue = lock(&forgetter.work.queue);
        assert!(queue.waiting.is_empty() && queue.busy.is_empty(), "{queue:?}");
    }

    #[test]
    fn continuously_released_addresses_are_not_starved() {
        let forgetter = NetNs::create().unwrap().run(Forgetter::open).unwrap().unwrap();
        let begun = Instant::now();
        loop {
            forgetter.ask(BTreeSet::from([address(2)]));
            if begun.elapsed() < MAX_WAIT / 10 {
                forgetter.ask(BTreeSet::from([address(1)]));
            } else if !lock(&forgetter.work.queue).waiting.contains(&address(1)) {
                return;
            }
            assert!(begun.elapsed() < MAX_WAIT * 5);
            std::thread::sleep(COLLECT / 10);
        }
    }

    #[test]
    fn waiting_for_an_address_waits_for_the_running_reading() {
        let forgetter = NetNs::create().unwrap().run(Forgetter::open).unwrap().unwrap();
        let reading = lock(&forgetter.work.conntrack);
        lock(&forgetter.work.queue).busy.insert(address(1));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| forgetter.wait_for(&[address(1)]));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            drop(reading);
            waiting.join().unwrap().unwrap();
        });
    }
}
