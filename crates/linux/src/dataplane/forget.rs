//! Forgetting connections: those of released addresses, and, where that is set, those that policy denies by now
//! ([`Cut`]). To find them the kernel's whole table of connections is read, which
//! takes some 10 ms; a thread does that, once for all addresses of a while.
//!
//! Nobody may inherit connections: whoever gives an address again first calls [`Forgetter::settle`], which waits only
//! where the address still has its turn before it.

use std::collections::BTreeSet;
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
/// How long that is put off at the most, while more and more are released.
const LONGEST: Duration = Duration::from_secs(1);
/// How long after a refusal it is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Forgets connections, in a thread of its own, in the network namespace in which it was opened.
#[derive(Debug)]
pub struct Forgetter {
    work: Arc<Work>,
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and those who wait share.
#[derive(Debug)]
struct Work {
    /// Held while the table is read.
    conntrack: Mutex<Conntrack>,
    /// Held for a moment only.
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    asked: BTreeSet<IpAddr>,
    cut: Cut,
    /// Whose connections are being forgotten.
    busy: BTreeSet<IpAddr>,
}

impl Forgetter {
    /// Opens a connection to the kernel, and starts the thread.
    pub fn open() -> Result<Self> {
        let work =
            Arc::new(Work { conntrack: Mutex::new(Conntrack::open()?), queue: Mutex::new(Queue::default()) });
        let (wake, woken) = channel();
        let its = work.clone();
        let thread = std::thread::Builder::new().name("conntrack".to_owned()).spawn(move || its.run(&woken));
        let thread = thread.map_err(Error::system("start a thread", "conntrack"))?;
        Ok(Self { work, wake: Some(wake), thread: Some(thread) })
    }

    /// Has the connections of these addresses forgotten soon.
    pub fn ask(&self, addresses: BTreeSet<IpAddr>) {
        if addresses.is_empty() {
            return;
        }
        lock(&self.work.queue).asked.extend(addresses);
        if let Some(wake) = &self.wake {
            let _ = wake.send(()); // the thread ends only with us
        }
    }

    /// Has the connections that policy denies by now forgotten soon.
    pub fn ask_to_cut(&self, cut: Cut) {
        lock(&self.work.queue).cut.take_in(cut);
        if let Some(wake) = &self.wake {
            let _ = wake.send(()); // the thread ends only with us
        }
    }

    /// Returns when none of these addresses has connections that were to be forgotten: at once, for most.
    ///
    /// # Errors
    /// The kernel's refusal; it is tried again.
    pub fn settle<'a>(&self, addresses: impl IntoIterator<Item = &'a IpAddr>) -> Result<()> {
        let queue = lock(&self.work.queue);
        let waits = |address: &&IpAddr| queue.asked.contains(*address) || queue.busy.contains(*address);
        let Some(address) = addresses.into_iter().find(waits) else { return Ok(()) };
        tracing::debug!(%address, "an address is given again while its old connections are still being forgotten");
        drop(queue);
        self.work.forget()
    }
}

impl Drop for Forgetter {
    /// Waits until all is forgotten.
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
            while begun.elapsed() < LONGEST && woken.recv_timeout(COLLECT).is_ok() {}
            while let Err(error) = self.forget().and_then(|()| self.cut()) {
                tracing::warn!(%error, "connections that are over are not forgotten; it is tried again");
                if woken.recv_timeout(RETRY) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
            }
        }
    }

    /// Forgets the connections of all addresses that have been asked for, after what is being forgotten already.
    fn forget(&self) -> Result<()> {
        let mut conntrack = lock(&self.conntrack);
        let addresses = {
            let mut queue = lock(&self.queue);
            queue.busy = std::mem::take(&mut queue.asked);
            queue.busy.clone()
        };
        let forgotten = conntrack.forget(&addresses);
        let mut queue = lock(&self.queue);
        let busy = std::mem::take(&mut queue.busy);
        if forgotten.is_err() {
            queue.asked.extend(busy);
        }
        drop(queue);
        tracing::debug!(?addresses, count = forgotten?, "forgot connections of released addresses");
        Ok(())
    }

    /// Forgets the connections that policy denies by now.
    fn cut(&self) -> Result<()> {
        let cut = std::mem::take(&mut lock(&self.queue).cut);
        if cut.is_empty() {
            return Ok(());
        }
        let forgotten = lock(&self.conntrack).forget_flows(|flow| cut.denies(flow));
        match forgotten {
            Ok(count) => tracing::debug!(count, "forgot connections that policy denies by now"),
            Err(error) => {
                let mut queue = lock(&self.queue);
                let newer = std::mem::replace(&mut queue.cut, cut);
                queue.cut.take_in(newer);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// What is behind these locks fits together also after a panic.
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
    fn asking_does_not_wait_for_the_kernel_and_one_reading_serves_all() {
        let forgetter = NetNs::create().unwrap().run(Forgetter::open).unwrap().unwrap();
        let reading = lock(&forgetter.work.conntrack);
        for last in [1, 2, 3] {
            forgetter.ask(BTreeSet::from([address(last)])); // would wait for ever for what this thread holds
        }
        forgetter.settle(&[address(4)]).unwrap();
        drop(reading);
        forgetter.settle(&[address(2)]).unwrap();
        let queue = lock(&forgetter.work.queue);
        assert!(queue.asked.is_empty() && queue.busy.is_empty(), "{queue:?}");
    }

    #[test]
    fn addresses_that_are_released_all_the_time_have_their_turn() {
        let forgetter = NetNs::create().unwrap().run(Forgetter::open).unwrap().unwrap();
        let begun = Instant::now();
        loop {
            forgetter.ask(BTreeSet::from([address(2)]));
            if begun.elapsed() < LONGEST / 10 {
                forgetter.ask(BTreeSet::from([address(1)]));
            } else if !lock(&forgetter.work.queue).asked.contains(&address(1)) {
                return;
            }
            assert!(begun.elapsed() < LONGEST * 5);
            std::thread::sleep(COLLECT / 10);
        }
    }

    #[test]
    fn what_waits_is_settled_only_after_the_reading_that_goes_on() {
        let forgetter = NetNs::create().unwrap().run(Forgetter::open).unwrap().unwrap();
        let reading = lock(&forgetter.work.conntrack);
        lock(&forgetter.work.queue).busy.insert(address(1));
        std::thread::scope(|scope| {
            let settling = scope.spawn(|| forgetter.settle(&[address(1)]));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!settling.is_finished());
            drop(reading);
            settling.join().unwrap().unwrap();
        });
    }
}
