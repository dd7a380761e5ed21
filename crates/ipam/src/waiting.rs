//! Requests that wait for their turn at the block: whoever has the turn serves all that wait.

use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;

use crate::error::IpamError;
use crate::request::{Assignment, Request};

type Outcome = Result<Assignment, IpamError>;

/// The requests that nobody has begun to serve.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Vec<Waiter>>);

/// A request, and where its answer goes.
pub(crate) struct Waiter {
    pub(crate) request: Request,
    answer: oneshot::Sender<Outcome>,
}

/// Where the answer comes.
pub(crate) struct Awaited(oneshot::Receiver<Outcome>);

impl Waiting {
    /// Puts a request where the next one whose turn it is finds it.
    pub(crate) fn join(&self, request: &Request) -> Awaited {
        let (answer, awaited) = oneshot::channel();
        let waiter = Waiter { request: request.clone(), answer };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(waiter);
        Awaited(awaited)
    }

    /// All of them, for the one whose turn it is. Those whose caller has given up are left out.
    pub(crate) fn take_all(&self) -> Vec<Waiter> {
        let mut waiters = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        waiters.retain(|waiter| !waiter.answer.is_closed());
        waiters
    }
}

impl Waiter {
    /// Answers. A caller that has given up is as one that went away with its address: releasing the handle frees it.
    pub(crate) fn answer(self, outcome: Outcome) {
        let _ = self.answer.send(outcome);
    }
}

impl Awaited {
    /// The answer, if it is there.
    pub(crate) fn take(&mut self) -> Option<Outcome> {
        self.0.try_recv().ok()
    }
}
