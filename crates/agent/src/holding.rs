//! Keeps pods closed while the node's state is unknown, and the system has no policy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tortie_dataplane::{Hold, HoldError};

use crate::saved_state::Saved;

/// The interval of looks at the system.
const INTERVAL: Duration = Duration::from_secs(1);

/// The thread that holds. Dropping this ends it, and leaves in force what is in force.
pub(crate) struct Holding {
    /// `None` while it is dropped.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    has_closed: Arc<AtomicBool>,
}

impl Holding {
    /// Looks at the system at once and then regularly, in a thread of its own. A call of HNS may take long.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(mut hold: Box<dyn Hold>, saved: Saved) -> std::io::Result<Self> {
        let (pods, closed) = saved.state.pods();
        let mut look = Look { pods, closed, has_pods: saved.has_pods, failed: false };
        let saved = saved.state.into_state();
        let (stop, stopped) = mpsc::channel();
        let has_closed = Arc::new(AtomicBool::new(false));
        let told = has_closed.clone();
        // It looks at least once, however soon it is dropped.
        let run = move || loop {
            if look.report(hold.hold(&saved)) {
                told.store(true, Ordering::Relaxed);
            }
            if let Err(RecvTimeoutError::Disconnected) = stopped.recv_timeout(INTERVAL) {
                return;
            }
        };
        let thread = thread::Builder::new().name("hold".to_owned()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), has_closed })
    }

    /// Whether pods were open, so that it has closed them.
    pub(crate) fn has_closed(&self) -> Arc<AtomicBool> {
        self.has_closed.clone()
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that kept pods closed has failed");
        }
    }
}

/// The messages about what the looks found.
struct Look {
    pods: usize,
    closed: usize,
    has_pods: bool,
    failed: bool,
}

impl Look {
    /// Returns whether something was open.
    fn report(&mut self, held: Result<bool, HoldError>) -> bool {
        let failed = held.is_err();
        match &held {
            Ok(true) if self.has_pods => tracing::error!(
                pods = self.pods,
                closed = self.closed,
                "the node had no policy, because somebody has removed it. The pods to which policy applied, and unknown ones, are closed until \
                 the agent knows the cluster"
            ),
            Ok(true) => tracing::warn!(
                "the node has no policy yet, because the machine has started or the saved state is lost. Its pods are closed until the \
                 agent knows the cluster"
            ),
            Err(error) if !self.failed => {
                tracing::error!(%error, "cannot see whether the node has policy, or cannot close its pods; Tortie retries");
            }
            Ok(false) | Err(_) => {}
        }
        self.failed = failed;
        matches!(held, Ok(true))
    }
}
