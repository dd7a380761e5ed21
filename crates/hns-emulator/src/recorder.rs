//! Watches the calls that a client makes, and makes them fail on demand.

use std::sync::{Mutex, PoisonError};

use tortie_hcn::{Call, Failure, Hcn};

/// What a [`Recorder`] does with a call before it reaches HNS: an answer in HNS's place, or `None` to let it through.
type Fault = Box<dyn FnMut(&Call) -> Option<Result<String, Failure>> + Send>;

/// An [`Hcn`] that notes every call on its way to another.
pub struct Recorder<H> {
    inner: H,
    calls: Mutex<Vec<Call>>,
    fault: Mutex<Option<Fault>>,
}

impl<H: Hcn> Recorder<H> {
    /// Notes the calls to `inner`.
    pub fn new(inner: H) -> Recorder<H> {
        Recorder { inner, calls: Mutex::default(), fault: Mutex::default() }
    }

    /// Whom the calls go to.
    pub fn inner(&self) -> &H {
        &self.inner
    }

    /// The calls since the last time that this was asked.
    pub fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The calls since the last time that changed something.
    pub fn take_changes(&self) -> Vec<Call> {
        self.take().into_iter().filter(|call| !call.is_read()).collect()
    }

    /// From now on asks `fault` before each call. Its answer may be a failure, or a success of a call that never happened.
    pub fn set_fault(&self, fault: impl FnMut(&Call) -> Option<Result<String, Failure>> + Send + 'static) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(fault));
    }

    /// Lets all calls through again.
    pub fn clear_fault(&self) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl<H: Hcn> Hcn for Recorder<H> {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call.clone());
        let fault =
            self.fault.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|ask| ask(call));
        fault.unwrap_or_else(|| self.inner.call(call))
    }
}
