//! The thread that owns calc and the dataplane: batches of changes in, what is in force out.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tortie_api::Key;
use tortie_api::report::ReportedCondition;
use tortie_calc::{Calc, Finding};
use tortie_dataplane::{AskedFor, Dataplane, EndpointId, Reason, Report};
use tortie_store::Revision;

use crate::control::ShownEndpoint;
use crate::unsupported::{Unsupported, Watched};

/// The interval at which the dataplane reads everything back.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);
/// The delay before a retry after a failure.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// The delay before a repair when somebody else has changed something, because changes come in bursts.
const MEND_INTERVAL: Duration = Duration::from_millis(200);
/// The maximum number of waiting batches that are applied together.
const TOGETHER: usize = 64;

/// Changes that belong together: nothing is applied between them.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Objects with their new values; `None` means deleted.
    pub(crate) changes: Vec<(Key, Option<Value>)>,
    /// The batch contains the store's history up to this revision.
    pub(crate) revision: Revision,
}

/// The events of the thread.
#[derive(Debug)]
enum Event {
    /// The cluster has changed.
    Batch(Batch),
    /// Somebody else has changed what the dataplane created.
    Disturbed,
    /// An operator requests what is in force for a pod.
    Show(Question),
    /// No more batches will arrive.
    End,
}

/// A request about a pod.
#[derive(Debug)]
struct Question {
    namespace: String,
    pod: String,
    answer: oneshot::Sender<Vec<ShownEndpoint>>,
}

/// Sends operators' requests to the thread.
#[derive(Debug, Clone)]
pub(crate) struct Asker(mpsc::Sender<Event>);

impl Asker {
    /// What is in force for the interfaces of a pod; `None` if the thread has ended.
    pub(crate) async fn show(&self, namespace: String, pod: String) -> Option<Vec<ShownEndpoint>> {
        let (answer, answered) = oneshot::channel();
        self.0.send(Event::Show(Question { namespace, pod, answer })).ok()?;
        answered.await.ok()
    }
}

/// Sends batches to the thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Batches(mpsc::Sender<Event>);

impl Batches {
    /// Sends a batch; returns whether the thread still runs.
    pub(crate) fn send(&self, batch: Batch) -> bool {
        self.0.send(Event::Batch(batch)).is_ok()
    }

    /// Sends requests to the same thread.
    pub(crate) fn asker(&self) -> Asker {
        Asker(self.0.clone())
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        // If the thread has ended, nobody receives it.
        let _ = self.0.send(Event::End);
    }
}

/// What is in force on the node.
#[derive(Debug, Clone, Default)]
pub(crate) struct InForce {
    /// The revision of the last input of the dataplane.
    pub(crate) given: Revision,
    /// Everything up to here is in force, except for what the report says about single endpoints; 0 means nothing
    /// yet.
    pub(crate) revision: Revision,
    pub(crate) endpoints: Vec<EndpointId>,
    pub(crate) report: Report,
    pub(crate) findings: Vec<Finding>,
    /// Stored objects that are not in force.
    pub(crate) unsupported: Vec<Unsupported>,
}

impl InForce {
    /// Whether the endpoint exists, with its policy as of `revision` in force.
    pub(crate) fn covers(&self, endpoint: &EndpointId, revision: Revision) -> bool {
        self.given >= revision
            && self.report.failures_of(endpoint).next().is_none()
            && self.endpoints.binary_search(endpoint).is_ok()
    }
}

/// Starts the thread. It ends when the [`Batches`] are dropped, and leaves everything in force.
pub(crate) fn start(
    node: &str,
    mut dataplane: Box<dyn Dataplane>,
) -> std::io::Result<(Batches, watch::Receiver<Arc<InForce>>)> {
    let (sender, events) = mpsc::channel();
    let disturb = sender.clone();
    // If the thread has ended, nobody repairs.
    dataplane.watch(Box::new(move || drop(disturb.send(Event::Disturbed))));
    let (publish, in_force) = watch::channel(Arc::new(InForce::default()));
    let (report, logged) = Default::default();
    let calc = Calc::new(node);
    let calc = if dataplane.asks_for_services() { calc.with_services() } else { calc };
    let watched = Watched::new(node);
    let mut plane = Plane { calc, watched, dataplane, publish, given: 0, revision: 0, report, logged };
    thread::Builder::new().name("dataplane".to_owned()).spawn(move || plane.run(&events))?;
    Ok((Batches(sender), in_force))
}

/// Waits for the thread's end.
pub(crate) async fn ended(mut in_force: watch::Receiver<Arc<InForce>>) {
    while in_force.changed().await.is_ok() {}
}

struct Plane {
    calc: Calc,
    watched: Watched,
    dataplane: Box<dyn Dataplane>,
    publish: watch::Sender<Arc<InForce>>,
    /// The revision of the last input of the dataplane.
    given: Revision,
    /// The last revision without a failure of the whole node.
    revision: Revision,
    report: Report,
    /// The conditions that were logged and still hold.
    logged: BTreeSet<(Reason, String)>,
}

impl Plane {
    fn run(&mut self, events: &mpsc::Receiver<Event>) {
        // Nothing is applied before the whole cluster is known, because half of it may allow too much.
        loop {
            match events.recv() {
                Ok(Event::Batch(first)) => break self.take_in([first]),
                // The caller gets the answer that nothing is known yet.
                Ok(Event::Disturbed | Event::Show(_)) => {}
                Ok(Event::End) | Err(_) => return,
            }
        }
        let mut resync_at = Instant::now() + self.pause();
        loop {
            let now = Instant::now();
            if now >= resync_at {
                self.report = self.dataplane.resync(self.calc.state());
                self.settle();
                resync_at = Instant::now() + self.pause();
            }
            let first = match events.recv_timeout(resync_at.saturating_duration_since(now)) {
                Ok(first) => first,
                Err(mpsc::RecvTimeoutError::Timeout) => continue,
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            };
            let (mut batches, mut questions, mut pause) = (Vec::new(), Vec::new(), None);
            for event in std::iter::once(first).chain(events.try_iter().take(TOGETHER)) {
                match event {
                    Event::Batch(batch) => batches.push(batch),
                    Event::Disturbed => pause = Some(MEND_INTERVAL),
                    Event::Show(question) => questions.push(question),
                    Event::End => return,
                }
            }
            if !batches.is_empty() {
                self.take_in(batches);
            }
            questions.into_iter().for_each(|question| self.answer(question));
            // Changes do not delay the resync, however many there are; a failure brings it forward.
            resync_at = resync_at.min(Instant::now() + pause.unwrap_or_else(|| self.pause()));
        }
    }

    /// Applies batches. A batch without changes only reports the store's revision.
    fn take_in(&mut self, batches: impl IntoIterator<Item = Batch>) {
        let mut changed = self.given == 0;
        for batch in batches {
            self.given = batch.revision;
            for (key, value) in batch.changes {
                self.calc.update(&key, value.as_ref());
                self.watched.update(&key, value.as_ref());
                changed = true;
            }
        }
        if changed {
            let deltas = self.calc.flush();
            self.report = self.dataplane.apply(self.calc.state(), &deltas);
        }
        self.settle();
    }

    /// Answers a request about a pod's interfaces. The caller may be gone.
    fn answer(&mut self, Question { namespace, pod, answer }: Question) {
        let state = self.calc.state();
        let is_asked = |id: &&EndpointId| *id.namespace == *namespace && *id.pod == *pod;
        let ids = state.endpoints.keys().filter(is_asked).cloned();
        let asked = ids.filter_map(|id| Some((AskedFor::of(state, &id)?, id)));
        let asked: Vec<_> = asked.collect();
        let mut shown = Vec::new();
        for (asked, id) in asked {
            let (conditions, system) = (self.conditions_of(&id), self.dataplane.show(self.calc.state(), &id));
            shown.push(ShownEndpoint { conditions, system, asked, id });
        }
        let _ = answer.send(shown);
    }

    /// The conditions of an endpoint, and the failures of the whole node.
    fn conditions_of(&self, id: &EndpointId) -> Vec<ReportedCondition> {
        let own = self.report.endpoints.get(id).into_iter().flatten();
        let own = own.map(|condition| condition.reported(Some(id.into())));
        own.chain(self.report.node_failures().map(|condition| condition.reported(None))).collect()
    }

    fn pause(&self) -> Duration {
        if self.report.retry { RETRY_INTERVAL } else { RESYNC_INTERVAL }
    }

    /// Publishes what is in force now.
    fn settle(&mut self) {
        self.log();
        // Problems of single endpoints are in the report; they must not delay the node's revision.
        if self.report.node_failures().next().is_none() {
            self.revision = self.given;
        }
        self.publish.send_replace(Arc::new(InForce {
            given: self.given,
            revision: self.revision,
            endpoints: self.calc.state().endpoints.keys().cloned().collect(),
            report: self.report.clone(),
            findings: self.calc.findings(),
            unsupported: self.watched.all(),
        }));
    }

    /// Logs new conditions, and those that have ended.
    fn log(&mut self) {
        let unsupported = self.watched.all().into_iter();
        let unsupported = unsupported.map(|it| (it.reason, format!("{}: {}", it.object, it.message)));
        let node = self.report.node.iter().map(|condition| (condition.reason, condition.to_string()));
        let endpoints = self.report.endpoints.iter().flat_map(|(id, conditions)| {
            conditions.iter().map(move |condition| (condition.reason, format!("pod {id}: {condition}")))
        });
        let now: BTreeSet<(Reason, String)> = unsupported.chain(node).chain(endpoints).collect();
        for (reason, message) in now.difference(&self.logged) {
            tracing::warn!(%reason, "{message}");
        }
        for (reason, message) in self.logged.difference(&now) {
            tracing::info!(%reason, "resolved: {message}");
        }
        self.logged = now;
    }
}
