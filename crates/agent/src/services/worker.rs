//! The thread that owns the Services of the node and their dataplane.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use jiff::Timestamp;
use tokio::sync::watch;
use tortie_api::{Key, Kind};
use tortie_dataplane::{Condition, Reason, ServiceDataplane};
use tortie_services::{Problem, ServiceName, Services};
use tortie_store::StoreError;
use tortie_store::backoff::{Backoff, random_seed};

use super::health::{ServiceHealth, is_eligible};
use super::{FindOther, OtherProxy, PodNetworks, ServiceProxy, ServiceSystem};
use crate::pending::Batch;
use crate::plane::forbidden;
use crate::queue::{Inbox, Work};

/// The interval at which the thread looks for another program that serves Services.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// The interval at which everything is read back, although nobody is known to have changed it.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
/// The same if the system does not report changes by others.
const UNWATCHED_INTERVAL: Duration = Duration::from_secs(30);
/// The delay before a repair when somebody else has changed something, because changes come in bursts.
const MEND_INTERVAL: Duration = Duration::from_millis(200);
/// The longest delay before a failed change is tried again.
const MAX_RETRY: Duration = Duration::from_secs(10);
/// For how many times its duration the next cleaning waits, so that changes have most of the thread's time: whoever changes endpoints all
/// the time would make it read all connections of the node all the time.
const SHARE_OF_CHANGES: u32 = 9;
/// The delay before a failed cleaning is tried again.
const CLEAN_UP_RETRY: Duration = Duration::from_secs(5);
/// The maximum number of problems of objects that become conditions.
const MAX_PROBLEMS: usize = 200;

pub(super) struct Worker {
    services: Services,
    dataplane: Box<dyn ServiceDataplane>,
    find_other: FindOther,
    pods: PodNetworks,
    api_server: Option<IpAddr>,
    conditions: watch::Sender<Vec<Condition>>,
    health: watch::Sender<ServiceHealth>,
    /// The own Node, and whether it is to get connections from balancers.
    node: Key,
    is_eligible: bool,
    /// Since when changes wait, and when the last ones were put in force.
    waits_since: Option<Instant>,
    updated: Option<Timestamp>,
    /// An earlier process has served Services.
    was_serving: bool,
    /// The networks that the dataplane has; none before the first call.
    given: Option<BTreeSet<IpNet>>,
    /// Kinds that cannot be read.
    unavailable: BTreeMap<Kind, StoreError>,
    /// Why no Services are served, or not as they are.
    blocked: Option<String>,
    failure: Option<String>,
    /// Why something of a former state is left, and when that is tried again.
    untidy: Option<String>,
    clean_up_at: Option<Instant>,
    /// The cleaning rests until then.
    rests_until: Instant,
    /// The problems of objects, and whether they may have changed.
    problems: Vec<Condition>,
    has_new_problems: bool,
    backoff: Backoff,
    is_watched: bool,
    look_at: Instant,
    resync_at: Instant,
}

impl Worker {
    pub(super) fn new(
        node: &str,
        proxy: &ServiceProxy,
        system: ServiceSystem,
        pods: PodNetworks,
        conditions: watch::Sender<Vec<Condition>>,
        health: watch::Sender<ServiceHealth>,
    ) -> Self {
        let ServiceSystem { dataplane, find_other, was_serving } = system;
        let now = Instant::now();
        Self {
            services: Services::new(node, proxy.node_ports.clone()),
            dataplane,
            find_other,
            pods,
            api_server: proxy.api_server,
            conditions,
            health,
            node: Key::global(Kind::Node, node),
            is_eligible: false,
            waits_since: None,
            updated: None,
            was_serving,
            given: None,
            unavailable: BTreeMap::new(),
            blocked: None,
            failure: None,
            untidy: None,
            clean_up_at: None,
            rests_until: now,
            problems: Vec::new(),
            has_new_problems: false,
            backoff: Backoff::new(random_seed()).with_max(MAX_RETRY),
            is_watched: false,
            look_at: now,
            resync_at: now + RESYNC_INTERVAL,
        }
    }

    /// Works until no more batches arrive. What is in force stays so.
    pub(super) fn run(mut self, inbox: &Inbox) {
        match self.dataplane.watch(Box::new(inbox.disturb())) {
            Ok(()) => self.is_watched = true,
            Err(error) => tracing::error!(
                %error,
                "cannot watch the table of Services; Tortie reads it every {} s",
                UNWATCHED_INTERVAL.as_secs()
            ),
        }
        loop {
            self.work();
            let Some(Work { batch, disturbed, .. }) = inbox.take(Some(self.next())) else { return };
            if let Some(batch) = batch {
                self.ingest(batch);
            }
            if disturbed && self.given.is_some() {
                self.resync_at = self.resync_at.min(Instant::now() + MEND_INTERVAL);
            }
        }
    }

    /// When there is something to do without a batch.
    fn next(&self) -> Instant {
        let of_dataplane =
            self.given.as_ref().map(|_| self.clean_up_at.map_or(self.resync_at, |at| at.min(self.resync_at)));
        of_dataplane.map_or(self.look_at, |at| at.min(self.look_at))
    }

    fn ingest(&mut self, batch: Batch) {
        self.has_new_problems = true;
        for (key, value) in batch.changes {
            if key == self.node {
                self.is_eligible = is_eligible(value.as_ref());
            }
            self.services.update(&key, value.as_ref());
        }
        for (kind, error) in batch.unavailable {
            match error {
                None => {
                    self.unavailable.remove(&kind);
                    self.services.listed(kind);
                }
                // An API server before 1.33 has no ServiceCIDRs.
                Some(StoreError::KindAbsent(_)) if kind.is_optional() => self.services.listed(kind),
                Some(error) => drop(self.unavailable.insert(kind, error)),
            }
        }
    }

    /// Puts in force what has changed, and repairs.
    fn work(&mut self) {
        let now = Instant::now();
        if now >= self.look_at {
            self.look();
            self.look_at = Instant::now() + LOOK_INTERVAL;
        }
        if !self.may_wait() || self.blocked.is_none() {
            self.apply();
        }
        if self.given.is_some() && Instant::now() >= self.resync_at {
            let result = self.dataplane.resync().map_err(|error| error.to_string());
            let interval = if self.is_watched { RESYNC_INTERVAL } else { UNWATCHED_INTERVAL };
            self.resync_at = Instant::now() + interval;
            self.note(result);
        }
        if self.clean_up_at.is_some_and(|at| Instant::now() >= at) {
            self.clean_up();
        }
        self.publish();
    }

    /// Ends what a former state has left. New connections do not depend on it, so a failure is no failure of the Services.
    fn clean_up(&mut self) {
        let begun = Instant::now();
        if begun < self.rests_until {
            self.clean_up_at = Some(self.rests_until);
            return;
        }
        let result = self.dataplane.clean_up();
        self.rests_until = Instant::now() + begun.elapsed() * SHARE_OF_CHANGES;
        self.clean_up_at = result.is_err().then(|| Instant::now() + CLEAN_UP_RETRY);
        self.untidy = result.err().map(|error| error.to_string());
    }

    /// True if nobody has served Services here, so that they can be left to another program.
    fn may_wait(&self) -> bool {
        self.updated.is_none() && !self.was_serving
    }

    /// Looks whether somebody else serves Services. If nobody has served them here yet, nothing is done beside another program.
    fn look(&mut self) {
        let is_first = self.may_wait();
        let found = (self.find_other)(is_first);
        self.blocked = match found {
            Err(error) => is_first.then(|| {
                format!("cannot see whether kube-proxy has left rules on this node: {error}; Tortie tries again")
            }),
            Ok(Some(OtherProxy::Runs(what))) if is_first => Some(format!(
                "{what} serves the Services of this node, so Tortie does not: keep it off the node, remove its rules \
                 (kube-proxy --cleanup), and Tortie serves them by itself; or remove --services (TORTIE_SERVICES)"
            )),
            Ok(Some(OtherProxy::Runs(what))) => Some(format!(
                "{what} runs beside Tortie, which serves the Services of this node, so connections get backends of either: remove one \
                 of them (kube-proxy from this node, or --services from its agent)"
            )),
            Ok(Some(OtherProxy::HasLeft(what))) => Some(format!(
                "kube-proxy has left {what} on this node, so Tortie does not serve Services: remove its rules (kube-proxy --cleanup), \
                 and Tortie serves them by itself"
            )),
            Ok(None) => self.api_server.filter(|address| is_first && self.services.has_cluster_ip(*address)).map(
                |address| {
                    format!(
                        "the agent reaches the API server at {address}, an address of a Service, which nobody would serve after a restart \
                         of the node: give it another one (tortie install --api-server HOST:PORT, or KUBERNETES_SERVICE_HOST and \
                         KUBERNETES_SERVICE_PORT)"
                    )
                },
            ),
        };
    }

    fn apply(&mut self) {
        let Some(pods) = self.pods.get() else { return };
        // kube-proxy may have started since the last look.
        if self.may_wait() && self.services.is_complete() {
            self.look();
            if self.blocked.is_some() {
                return;
            }
        }
        let Some(deltas) = self.services.flush() else { return };
        self.has_new_problems |= !deltas.is_empty();
        if deltas.is_empty() && self.given.as_ref() == Some(&pods) {
            return;
        }
        // Others see that the dataplane is stuck.
        self.waits_since = self.waits_since.or(Some(Instant::now()));
        self.publish_health();
        let result = self.dataplane.apply(&deltas, &pods).map_err(|error| error.to_string());
        if self.updated.is_none() && result.is_ok() {
            tracing::info!(frontends = self.services.state().frontends.len(), "the node serves Services");
        }
        self.given = Some(pods);
        self.note(result);
    }

    /// Notes the result of a call of the dataplane. A failure brings the next comparison forward; a change delays none.
    fn note(&mut self, result: Result<(), String>) {
        let now = Instant::now();
        self.failure = result.err();
        match self.failure {
            None => {
                self.backoff.succeeded();
                (self.waits_since, self.updated) = (None, Some(Timestamp::now()));
                self.clean_up();
            }
            Some(_) => {
                self.resync_at = self.resync_at.min(self.backoff.failed(now));
                self.waits_since = self.waits_since.or(Some(now));
            }
        }
    }

    fn publish_health(&self) {
        let health = ServiceHealth::new(self.services.state(), self.is_eligible);
        let now = health.with_progress(self.waits_since, self.updated);
        self.health.send_if_modified(|known| {
            let differs = *known != now;
            if differs {
                *known = now;
            }
            differs
        });
    }

    fn publish(&mut self) {
        self.publish_health();
        if std::mem::take(&mut self.has_new_problems) {
            self.problems = reported(self.services.problems());
        }
        let now = self.current_conditions();
        if *self.conditions.borrow() == now {
            return;
        }
        let known: BTreeSet<Condition> = self.conditions.borrow().iter().cloned().collect();
        let current: BTreeSet<Condition> = now.iter().cloned().collect();
        for condition in current.difference(&known) {
            tracing::warn!(reason = %condition.reason, "{condition}");
        }
        for condition in known.difference(&current) {
            tracing::info!(reason = %condition.reason, "resolved: {condition}");
        }
        self.conditions.send_replace(now);
    }

    fn current_conditions(&self) -> Vec<Condition> {
        let not_served = |message: &String| Condition::new(Reason::ServicesNotServed, message);
        let mut all: Vec<Condition> = self.blocked.iter().chain(&self.failure).map(not_served).collect();
        all.extend(self.untidy.iter().map(|error| {
            let message = format!(
                "clients of UDP or with session affinity may still be led to backends that have gone: {error}; Tortie tries again"
            );
            Condition::new(Reason::ServicesNotServed, message)
        }));
        let unread = self.unavailable.iter();
        all.extend(
            unread.map(|(kind, error)| Condition::new(Reason::KindForbidden, forbidden(*kind, error))),
        );
        all.extend(self.problems.iter().cloned());
        all
    }
}

/// The conditions of problems. There may be very many, and whoever causes them must not hold the thread up.
fn reported(problems: BTreeSet<Problem>) -> Vec<Condition> {
    let more = problems.len().saturating_sub(MAX_PROBLEMS);
    let mut conditions: Vec<Condition> = problems.into_iter().take(MAX_PROBLEMS).map(condition).collect();
    if more > 0 {
        let message =
            format!("{more} more fields of Services have no effect, or another Service has their addresses");
        conditions.push(Condition::new(Reason::FieldNotSupported, message));
    }
    conditions
}

fn condition(problem: Problem) -> Condition {
    let key = |ServiceName { namespace, name }: &ServiceName| Key::namespaced(Kind::Service, namespace, name);
    match problem {
        Problem::Field { object, field, problem } => {
            Condition::new(Reason::FieldNotSupported, format!("{field}: {problem}")).about(&object)
        }
        Problem::Taken { service, address, protocol, port, winner } => {
            let message = format!(
                "{address} port {port} of {protocol} leads to Service {winner}, which has it, too; remove it from one of them"
            );
            Condition::new(Reason::ServiceAddressTaken, message).about(key(&service))
        }
    }
}

#[cfg(test)]
mod tests;
