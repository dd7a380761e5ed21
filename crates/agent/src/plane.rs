//! The thread that owns calc and the dataplane: batches of changes in, what is in force out.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::watch;
use tortie_api::Key;
use tortie_calc::{Calc, Finding};
use tortie_dataplane::{Dataplane, EndpointId, Report};
use tortie_store::Revision;

/// How often the dataplane reads everything back.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);
/// How soon after a failure it tries again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Changes that belong together: nothing is made true between them.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Objects with their new values; `None` is gone.
    pub(crate) changes: Vec<(Key, Option<Value>)>,
    /// The store's history up to here is contained.
    pub(crate) revision: Revision,
}

/// What is in force on the node.
#[derive(Debug, Clone, Default)]
pub(crate) struct InForce {
    /// What the dataplane was last given.
    pub(crate) given: Revision,
    /// Everything up to here is in force, but for what the report says of single endpoints.
    pub(crate) revision: Revision,
    pub(crate) endpoints: Vec<EndpointId>,
    pub(crate) report: Report,
    pub(crate) findings: Vec<Finding>,
}

impl InForce {
    /// Whether the endpoint is there, with its policy as of `revision` in force.
    pub(crate) fn covers(&self, endpoint: &EndpointId, revision: Revision) -> bool {
        let failed = self.report.retry
            && (self.report.endpoints.contains_key(endpoint) || !self.report.node.is_empty());
        self.given >= revision && !failed && self.endpoints.binary_search(endpoint).is_ok()
    }
}

/// Starts the thread. It ends when the sender is dropped, and leaves everything in force.
pub(crate) fn start(
    node: &str,
    dataplane: Box<dyn Dataplane>,
) -> std::io::Result<(mpsc::Sender<Batch>, watch::Receiver<Arc<InForce>>)> {
    let (sender, batches) = mpsc::channel();
    let (publish, in_force) = watch::channel(Arc::new(InForce::default()));
    let mut plane = Plane { calc: Calc::new(node), dataplane, publish, revision: 0 };
    thread::Builder::new().name("dataplane".to_owned()).spawn(move || plane.run(&batches))?;
    Ok((sender, in_force))
}

struct Plane {
    calc: Calc,
    dataplane: Box<dyn Dataplane>,
    publish: watch::Sender<Arc<InForce>>,
    /// The last revision without a failure.
    revision: Revision,
}

impl Plane {
    fn run(&mut self, batches: &mpsc::Receiver<Batch>) {
        // Nothing is made true before the whole state of the cluster is known: half of it may allow too much.
        let Ok(mut batch) = batches.recv() else { return };
        let mut next_resync;
        loop {
            let mut given = batch.revision;
            self.take_in(batch);
            for more in batches.try_iter() {
                given = more.revision;
                self.take_in(more);
            }
            let deltas = self.calc.flush();
            let report = self.dataplane.apply(&deltas);
            next_resync = self.settle(given, report);
            batch = loop {
                match batches.recv_timeout(next_resync.saturating_duration_since(Instant::now())) {
                    Ok(batch) => break batch,
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        let report = self.dataplane.resync();
                        next_resync = self.settle(given, report);
                    }
                }
            };
        }
    }

    fn take_in(&mut self, batch: Batch) {
        for (key, value) in batch.changes {
            self.calc.update(&key, value.as_ref());
        }
    }

    /// Publishes what is in force now, and says when to look again.
    fn settle(&mut self, given: Revision, report: Report) -> Instant {
        for condition in report.node.iter().chain(report.endpoints.values().flatten()) {
            tracing::warn!(reason = condition.reason, "{}", condition.message);
        }
        // What is wrong with single endpoints stands in the report; it must not hold up what is known of the node.
        if report.node.is_empty() {
            self.revision = given;
        }
        let interval = if report.retry { RETRY_INTERVAL } else { RESYNC_INTERVAL };
        self.publish.send_replace(Arc::new(InForce {
            given,
            revision: self.revision,
            endpoints: self.calc.state().endpoints.keys().cloned().collect(),
            report,
            findings: self.calc.findings(),
        }));
        Instant::now() + interval
    }
}
