//! A deadline for calls that have none: each runs in a worker thread, and the caller waits for so long.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The number of threads. That many calls without an answer say that HNS hangs.
const MAX_WORKERS: usize = 64;

type Job = Box<dyn FnOnce() + Send>;

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NoResult {
    /// The work takes longer than its deadline.
    Late,
    /// All workers are busy, or no thread could be started.
    NoWorker,
}

/// Threads that do work. They live as long as the process.
#[derive(Default)]
pub(super) struct Workers(Mutex<Pool>);

#[derive(Default)]
struct Pool {
    idle: Vec<Sender<Job>>,
    count: usize,
}

/// The result of work that somebody waits for.
enum Slot<T> {
    Awaited,
    Done(T),
    Abandoned,
}

impl Workers {
    /// Does work in a worker thread, and returns its result. If it takes longer than `patience`, `late` gets the result when
    /// there is one.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
        late: impl FnOnce(T) + Send + 'static,
    ) -> Result<T, NoResult> {
        let slot = Arc::new((Mutex::new(Slot::Awaited), Condvar::new()));
        let filled = slot.clone();
        self.start(Box::new(move || {
            let result = work();
            let mut slot = locked(&filled.0);
            if let Slot::Abandoned = *slot {
                drop(slot);
                return late(result);
            }
            *slot = Slot::Done(result);
            filled.1.notify_one();
        }))?;
        let waited =
            slot.1.wait_timeout_while(locked(&slot.0), patience, |slot| matches!(slot, Slot::Awaited));
        let (mut slot, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *slot, Slot::Abandoned) {
            Slot::Done(result) => Ok(result),
            Slot::Awaited | Slot::Abandoned => Err(NoResult::Late),
        }
    }

    /// Gives the job to an idle worker or to a new one.
    fn start(self: &Arc<Self>, mut job: Job) -> Result<(), NoResult> {
        let mut pool = locked(&self.0);
        while let Some(idle) = pool.idle.pop() {
            match idle.send(job) {
                Ok(()) => return Ok(()),
                // It has ended by a panic.
                Err(back) => job = back.0,
            }
        }
        if pool.count >= MAX_WORKERS {
            return Err(NoResult::NoWorker);
        }
        let (sender, jobs) = channel::<Job>();
        let (pool_of_worker, own) = (self.clone(), sender.clone());
        let body = move || {
            let leaving = Leaving(pool_of_worker);
            for job in jobs {
                job();
                locked(&leaving.0.0).idle.push(own.clone());
            }
        };
        thread::Builder::new().name("hcn-call".to_owned()).spawn(body).map_err(|_| NoResult::NoWorker)?;
        pool.count += 1;
        drop(pool);
        sender.send(job).map_err(|_| NoResult::NoWorker)
    }
}

/// Counts the end of a worker.
struct Leaving(Arc<Workers>);

impl Drop for Leaving {
    fn drop(&mut self) {
        locked(&self.0.0).count -= 1;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn a_late_result_is_reported_and_delays_nobody() {
        let workers = Arc::new(Workers::default());
        let (release, held) = channel::<()>();
        let (told, late) = channel();
        let slow = workers.run(
            SHORT,
            move || {
                let _ = held.recv();
                7
            },
            move |result| {
                let _ = told.send(result);
            },
        );
        assert_eq!(slow, Err(NoResult::Late));
        assert_eq!(workers.run(LONG, || 1, |_| ()), Ok(1), "while the other call is under way");
        release.send(()).unwrap();
        assert_eq!(late.recv_timeout(LONG), Ok(7));
    }

    #[test]
    fn workers_are_used_again_and_limited() {
        let workers = Arc::new(Workers::default());
        for number in 0..1_000 {
            assert_eq!(workers.run(LONG, move || number, |_| ()), Ok(number));
        }
        // Some may not be back yet when the next call begins.
        assert!(locked(&workers.0).count <= 8, "{}", locked(&workers.0).count);
        let mut holds = Vec::new();
        let refused = loop {
            let (hold, held) = channel::<()>();
            holds.push(hold);
            match workers.run(Duration::ZERO, move || held.recv().is_err(), |_| ()) {
                Err(NoResult::Late) => assert!(holds.len() <= MAX_WORKERS),
                other => break other,
            }
        };
        assert_eq!(refused, Err(NoResult::NoWorker));
        holds.clear();
        let end = std::time::Instant::now() + LONG;
        while workers.run(LONG, || (), |()| ()).is_err() {
            assert!(std::time::Instant::now() < end, "no worker came back");
            thread::yield_now();
        }
    }
}
