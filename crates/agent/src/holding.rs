//! Keeps pods closed while the node's state is unknown, and the system has no policy.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tortie_dataplane::{Hold, SavedState};

/// The interval of looks at the system.
const INTERVAL: Duration = Duration::from_secs(1);

/// The thread that holds. Dropping this ends it, and leaves in force what is in force.
pub(crate) struct Holding {
    /// `None` while it is dropped.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Holding {
    /// Looks at the system at once and then regularly, in a thread of its own. A call of HNS may take long.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(mut hold: Box<dyn Hold>, saved: SavedState) -> std::io::Result<Self> {
        let (pods, closed) = saved.pods();
        let saved = saved.into_state();
        let (stop, stopped) = mpsc::channel();
        let mut look = Look::default();
        let mut look = move || look.report(hold.hold(&saved), (pods, closed));
        // It looks at least once, however soon it is dropped.
        let run = move || loop {
            look();
            if let Err(RecvTimeoutError::Disconnected) = stopped.recv_timeout(INTERVAL) {
                return;
            }
        };
        let thread = thread::Builder::new().name("hold".to_owned()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
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
#[derive(Default)]
struct Look {
    failed: bool,
}

impl Look {
    fn report(&mut self, held: Result<bool, tortie_dataplane::HoldError>, (pods, closed): (usize, usize)) {
        match held {
            Ok(true) => tracing::error!(
                pods,
                closed,
                "the node had no policy, because somebody has removed it or the machine has started; Tortie has closed the pods \
                 to which policy applied until the datastore answers, and on Linux those that it does not know, too"
            ),
            Ok(false) => {}
            Err(error) if !self.failed => {
                tracing::error!(%error, "cannot see whether the node has policy, or cannot close its pods; Tortie retries");
                self.failed = true;
                return;
            }
            Err(_) => return,
        }
        self.failed = false;
    }
}
