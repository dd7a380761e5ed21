//! Records the calls of a client, and makes calls fail on demand.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tortie_hcn::{Call, Failure, Hcn};

/// Decides about a call before it reaches HNS: an answer in place of HNS's, or `None` to pass the call on.
type Fault = Box<dyn FnMut(&Call) -> Option<Result<String, Failure>> + Send>;
/// Decides about the answer to a completed call: another answer, or `None`.
type Loss = Box<dyn FnMut(&Call) -> Option<Failure> + Send>;
/// Selects the calls to hold.
type Which = Box<dyn Fn(&Call) -> bool + Send>;

/// An [`Hcn`] that records every call before it passes it on.
pub struct Recorder<H> {
    inner: H,
    calls: Mutex<Vec<Call>>,
    fault: Mutex<Option<Fault>>,
    loss: Mutex<Option<Loss>>,
    held: Mutex<Option<(Which, Held)>>,
}

impl<H: Hcn> Recorder<H> {
    /// Records the calls to `inner`.
    pub fn new(inner: H) -> Recorder<H> {
        Recorder {
            inner,
            calls: Mutex::default(),
            fault: Mutex::default(),
            loss: Mutex::default(),
            held: Mutex::default(),
        }
    }

    /// The receiver of the calls.
    pub fn inner(&self) -> &H {
        &self.inner
    }

    /// Returns the calls since the last [`take`](Self::take).
    pub fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *lock(&self.calls))
    }

    /// Returns the calls since the last [`take`](Self::take) that changed something.
    pub fn take_changes(&self) -> Vec<Call> {
        self.take().into_iter().filter(|call| !call.is_read()).collect()
    }

    /// Runs `fault` before each call from now on. Its answer may be a failure, or a success of a call that never
    /// happened.
    pub fn set_fault(&self, fault: impl FnMut(&Call) -> Option<Result<String, Failure>> + Send + 'static) {
        *lock(&self.fault) = Some(Box::new(fault));
    }

    /// Runs `loss` after each successful call from now on. The caller gets its answer: the call has happened, and its
    /// reply is lost.
    pub fn lose_replies(&self, loss: impl FnMut(&Call) -> Option<Failure> + Send + 'static) {
        *lock(&self.loss) = Some(Box::new(loss));
    }

    /// Holds such calls before they reach HNS, until the returned value is dropped. This simulates a slow HNS.
    pub fn hold(&self, which: impl Fn(&Call) -> bool + Send + 'static) -> Hold {
        let held = Held::default();
        *lock(&self.held) = Some((Box::new(which), held.clone()));
        Hold(held)
    }

    /// Passes all calls on again.
    pub fn clear_fault(&self) {
        *lock(&self.fault) = None;
        *lock(&self.loss) = None;
    }
}

/// The calls that are held.
#[derive(Debug, Clone, Default)]
struct Held(Arc<(Mutex<Gate>, Condvar)>);

#[derive(Debug, Default)]
struct Gate {
    waiting: usize,
    open: bool,
}

/// Holds calls until it is dropped.
#[derive(Debug)]
pub struct Hold(Held);

impl Hold {
    /// Waits until that many calls are held at once. Returns false if this takes longer than `patience`.
    pub fn has(&self, calls: usize, patience: Duration) -> bool {
        let Held(shared) = &self.0;
        let (gate, changed) = &**shared;
        let end = Instant::now() + patience;
        let mut gate = lock(gate);
        while gate.waiting < calls {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            gate =
                changed.wait_timeout(gate, left).map_or_else(|error| error.into_inner().0, |(gate, _)| gate);
        }
        true
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Held(shared) = &self.0;
        lock(&shared.0).open = true;
        shared.1.notify_all();
    }
}

impl Held {
    fn pass(&self) {
        let (gate, changed) = &*self.0;
        let mut gate = lock(gate);
        gate.waiting += 1;
        changed.notify_all();
        while !gate.open {
            gate = changed.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
        gate.waiting -= 1;
    }
}

impl<H: Hcn> Hcn for Recorder<H> {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        lock(&self.calls).push(call.clone());
        let held = lock(&self.held).as_ref().filter(|(which, _)| which(call)).map(|(_, held)| held.clone());
        if let Some(held) = held {
            held.pass();
        }
        let fault = lock(&self.fault).as_mut().and_then(|ask| ask(call));
        let answer = fault.unwrap_or_else(|| self.inner.call(call))?;
        match lock(&self.loss).as_mut().and_then(|ask| ask(call)) {
            Some(failure) => Err(failure),
            None => Ok(answer),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
