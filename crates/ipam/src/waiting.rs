//! Requests that wait for the block: the request that gets the lock serves all waiting ones.

use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;
use tortie_api::Position;

use crate::error::IpamError;
use crate::request::{Assignment, FollowUp, Request};

/// The address, and the position of the write that follows its allocation, if that was executed.
type Outcome = Result<(Assignment, Option<Position>), IpamError>;

/// The requests that nobody serves yet.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Vec<Waiter>>);

/// A request and the channel for its answer.
pub(crate) struct Waiter {
    pub(crate) request: Request,
    pub(crate) follow_up: Option<FollowUp>,
    answer: oneshot::Sender<Outcome>,
}

/// The channel on which the answer arrives.
pub(crate) struct Awaited(oneshot::Receiver<Outcome>);

impl Waiting {
    /// Adds a request to the queue.
    pub(crate) fn join(&self, request: &Request, follow_up: Option<FollowUp>) -> Awaited {
        let (answer, awaited) = oneshot::channel();
        let waiter = Waiter { request: request.clone(), follow_up, answer };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(waiter);
        Awaited(awaited)
    }

    /// Takes all requests, without those whose caller has given up.
    pub(crate) fn take_all(&self) -> Vec<Waiter> {
        let mut waiters = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        waiters.retain(|waiter| !waiter.answer.is_closed());
        waiters
    }
}

impl Waiter {
    /// Sends the answer. If the caller has given up, releasing the handle frees the address.
    pub(crate) fn answer(self, outcome: Outcome) {
        let _ = self.answer.send(outcome);
    }
}

impl Awaited {
    /// The answer, if it has arrived.
    pub(crate) fn take(&mut self) -> Option<Outcome> {
        self.0.try_recv().ok()
    }
}
