//! The queue of the dataplane's thread: changes, disturbances, and operators' requests. It is bounded: changes of the
//! same object replace each other, disturbances are a flag, and what is full makes the sender wait or is rejected.

use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot};

use crate::control::ShownEndpoint;
use crate::pending::{Batch, Pending};

/// The bytes of waiting changes at which the feed stops reading the store; as many may be with the thread at the same
/// time. The store then ends a watch that has fallen behind, and the feed lists everything again once the thread has taken
/// the changes.
const MAX_BYTES: usize = 16 << 20;
/// The maximum number of waiting requests.
const MAX_QUESTIONS: usize = 64;

/// A request about a pod.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) answer: oneshot::Sender<Vec<ShownEndpoint>>,
}

/// Why there is no answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The thread has ended, or does not know the cluster yet.
    NotReady,
    /// Too many requests wait.
    TooMany,
}

/// What has arrived since the last call.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) batch: Option<Batch>,
    pub(crate) questions: Vec<Question>,
    /// Somebody else has changed what the dataplane created.
    pub(crate) disturbed: bool,
    /// A pod has got addresses from this agent, or lost them.
    pub(crate) assigned: bool,
}

/// Creates the two ends of a queue.
pub(crate) fn queue() -> (Batches, Inbox) {
    bounded(MAX_BYTES)
}

/// The same with another limit.
pub(crate) fn bounded(max_bytes: usize) -> (Batches, Inbox) {
    let state = State { max_bytes, ..State::default() };
    let shared = Arc::new(Shared { state: Mutex::new(state), arrived: Condvar::new(), taken: Notify::new() });
    (Batches(shared.clone()), Inbox(shared))
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Wakes the thread.
    arrived: Condvar,
    /// Wakes the feed.
    taken: Notify,
}

#[derive(Debug, Default)]
struct State {
    max_bytes: usize,
    pending: Pending,
    questions: Vec<Question>,
    disturbed: bool,
    /// A pod has got addresses, or lost them.
    assigned: bool,
    /// No more batches will arrive.
    closed: bool,
    /// The thread has ended.
    ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends batches to the thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Batches(Arc<Shared>);

impl Batches {
    /// Adds a batch to those that wait; returns whether the thread still runs. A batch is never rejected:
    /// [`wait_for_room`](Self::wait_for_room) first.
    pub(crate) fn send(&self, batch: Batch) -> bool {
        let mut state = self.0.lock();
        if state.ended {
            return false;
        }
        state.pending.add(batch);
        self.0.arrived.notify_one();
        true
    }

    /// Waits until fewer changes wait than the limit; returns whether the thread still runs.
    pub(crate) async fn wait_for_room(&self) -> bool {
        loop {
            {
                let state = self.0.lock();
                if state.ended || state.pending.bytes() < state.max_bytes {
                    return !state.ended;
                }
            }
            self.0.taken.notified().await;
        }
    }

    /// Sends requests to the same thread.
    pub(crate) fn asker(&self) -> Asker {
        Asker(self.0.clone())
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.arrived.notify_one();
    }
}

/// Sends operators' requests to the thread.
#[derive(Debug, Clone)]
pub(crate) struct Asker(Arc<Shared>);

impl Asker {
    /// What is in force for the interfaces of a pod.
    pub(crate) async fn show(
        &self,
        namespace: String,
        pod: String,
    ) -> Result<Vec<ShownEndpoint>, Unanswered> {
        let (answer, answered) = oneshot::channel();
        self.ask(Question { namespace, pod, answer })?;
        answered.await.map_err(|_| Unanswered::NotReady)
    }

    /// A pod has got addresses, or lost them: see [`crate::assigned`].
    pub(crate) fn assigned(&self) {
        self.0.lock().assigned = true;
        self.0.arrived.notify_one();
    }

    fn ask(&self, question: Question) -> Result<(), Unanswered> {
        let mut state = self.0.lock();
        if state.ended {
            return Err(Unanswered::NotReady);
        }
        state.questions.retain(|waiting| !waiting.answer.is_closed());
        if state.questions.len() >= MAX_QUESTIONS {
            return Err(Unanswered::TooMany);
        }
        state.questions.push(question);
        self.0.arrived.notify_one();
        Ok(())
    }
}

/// The thread's end of the queue. The thread has ended when this is dropped.
#[derive(Debug)]
pub(crate) struct Inbox(Arc<Shared>);

impl Inbox {
    /// Takes what has arrived; waits for it until the deadline, if there is one. `None` if no more batches will
    /// arrive.
    pub(crate) fn take(&self, deadline: Option<Instant>) -> Option<Work> {
        let mut state = self.0.lock();
        loop {
            if state.closed {
                return None;
            }
            let work = Work {
                batch: state.pending.take(),
                questions: mem::take(&mut state.questions),
                disturbed: mem::take(&mut state.disturbed),
                assigned: mem::take(&mut state.assigned),
            };
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let is_late = left.is_some_and(|left| left.is_zero());
            let is_called = work.disturbed || work.assigned;
            if work.batch.is_some() || is_called || !work.questions.is_empty() || is_late {
                self.0.taken.notify_one();
                return Some(work);
            }
            state = match left {
                Some(left) => {
                    let waited = self.0.arrived.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.0.arrived.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// The number of changed objects that wait, and their bytes.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> (usize, usize) {
        self.waiting_of()()
    }

    /// The same, after the thread has taken this end.
    #[cfg(test)]
    pub(crate) fn waiting_of(&self) -> impl Fn() -> (usize, usize) + use<> {
        let shared = self.0.clone();
        move || {
            let state = shared.lock();
            (state.pending.len(), state.pending.bytes())
        }
    }

    /// Returns the callback for changes by somebody else.
    pub(crate) fn disturb(&self) -> impl Fn() + Send + use<> {
        let shared = self.0.clone();
        move || {
            shared.lock().disturbed = true;
            shared.arrived.notify_one();
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        // Their senders receive the answer that there is none.
        state.questions.clear();
        drop(state.pending.take());
        self.0.taken.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> (Question, oneshot::Receiver<Vec<ShownEndpoint>>) {
        let (answer, answered) = oneshot::channel();
        (Question { namespace: "n".to_owned(), pod: "p".to_owned(), answer }, answered)
    }

    #[test]
    fn waiting_requests_are_bounded_and_abandoned_ones_do_not_count() {
        let (batches, inbox) = queue();
        let asker = batches.asker();
        let mut waiting: Vec<_> = (0..MAX_QUESTIONS)
            .map(|_| {
                let (question, answered) = question();
                asker.ask(question).unwrap();
                answered
            })
            .collect();
        assert_eq!(asker.ask(question().0), Err(Unanswered::TooMany));
        waiting.pop();
        let (last, mut answered) = question();
        asker.ask(last).unwrap();
        assert_eq!(inbox.take(None).unwrap().questions.len(), MAX_QUESTIONS);
        let (unheard, mut unanswered) = question();
        asker.ask(unheard).unwrap();
        drop(inbox);
        assert!(answered.try_recv().is_err() && unanswered.try_recv().is_err());
        assert_eq!(asker.ask(question().0), Err(Unanswered::NotReady));
    }

    #[tokio::test]
    async fn the_ends_notice_each_other() {
        let (batches, inbox) = queue();
        assert!(batches.wait_for_room().await && batches.send(Batch::default()));
        drop(inbox);
        assert!(!batches.wait_for_room().await && !batches.send(Batch::default()));

        let (batches, inbox) = queue();
        let (disturb, asker) = (inbox.disturb(), batches.asker());
        (0..100).for_each(|_| disturb());
        let work = inbox.take(None).unwrap();
        assert!(work.disturbed && work.batch.is_none());
        assert!(!inbox.take(Some(Instant::now())).unwrap().disturbed, "a hundred disturbances are one");
        drop(batches);
        assert!(inbox.take(None).is_none(), "an asker does not keep the thread alive");
        drop(asker);
    }
}
