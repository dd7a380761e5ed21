//! The thread that owns calc and the dataplane: batches of changes in, what is in force out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::sync::watch;
use tortie_api::report::ReportedCondition;
use tortie_api::{Key, Kind, Position, Positions};
use tortie_calc::{Calc, Finding};
use tortie_dataplane::{
    AskedFor, Condition, Dataplane, Delta, EndpointId, HostPort, Reason, Report, RouteTarget,
};
use tortie_flannel::LeaseSnapshot;
use tortie_policy::ALL_NODES;
use tortie_policy::program::PolicyKind;
use tortie_store::StoreError;
use tortie_store::backoff::{Backoff, random_seed};

use crate::assigned::AssignedPods;
use crate::control::ShownEndpoint;
use crate::holding::Holding;
use crate::missing_leases::MissingLeases;
use crate::pending::Batch;
use crate::queue::{Batches, Inbox, Question, Work, queue};
use crate::saved_state::Saver;
use crate::shared_ends::shared_ends;
use crate::unreachable::{Unreachable, refused_tunnels};
use crate::unsupported::{Unsupported, Watched};
use crate::{flannel, flannel_etcd};

/// The interval at which the dataplane reads everything back.
const RESYNC_INTERVAL: Duration = Duration::from_secs(10);
/// The delay before a repair when somebody else has changed something, because changes come in bursts.
const MEND_INTERVAL: Duration = Duration::from_millis(200);
/// For how many times the duration of a comparison the next one waits, so that comparisons need a twentieth of the thread's time.
const SHARE_OF_CHANGES: u32 = 19;
/// What is in force on the node.
#[derive(Debug, Clone, Default)]
pub(crate) struct InForce {
    /// The positions of the last input of the dataplane; empty means nothing yet.
    pub(crate) given: Positions,
    /// Everything up to here is in force, except for what the report says about single endpoints.
    pub(crate) positions: Positions,
    pub(crate) endpoints: Vec<EndpointId>,
    /// The endpoints of the node by address.
    pub(crate) holders: BTreeMap<IpAddr, EndpointId>,
    /// The networks of the node's pods.
    pub(crate) pod_networks: BTreeSet<IpNet>,
    /// The ports of the node that lead to pods, or are to do so.
    pub(crate) host_ports: Vec<(HostPort, EndpointId)>,
    pub(crate) report: Report,
    pub(crate) findings: Vec<Finding>,
    /// Stored objects that are not in force.
    pub(crate) unsupported: Vec<Unsupported>,
    /// Kinds that cannot be read.
    pub(crate) unavailable: BTreeMap<Kind, StoreError>,
    /// Why no changes are applied, if somebody has locked the datastore.
    pub(crate) lock: Option<Unsupported>,
}

impl InForce {
    /// Why the agent applies nothing, with the remedies: the datastore is locked, or there are kinds that the agent may not
    /// read and has never read. Policy could depend on them.
    pub(crate) fn blocking(&self) -> Vec<String> {
        let lock = self.lock.iter().map(|lock| format!("{}: {}", lock.object, lock.message));
        let unread = self.unavailable.iter().filter(|(_, error)| !matches!(error, StoreError::KindAbsent(_)));
        let unread = unread.filter(|_| self.given.is_empty());
        lock.chain(unread.map(|(kind, error)| forbidden(*kind, error))).collect()
    }

    /// Whether the endpoint exists, with its policy as of these positions in force.
    pub(crate) fn covers(&self, endpoint: &EndpointId, positions: &Positions) -> bool {
        self.given.reach(positions)
            && self.report.failures_of(endpoint).next().is_none()
            && self.endpoints.binary_search(endpoint).is_ok()
    }

    /// Why the policy of the endpoint is not in force, if it is not.
    pub(crate) fn problem_of(&self, endpoint: &EndpointId) -> Option<String> {
        let failures: Vec<String> = self.report.failures_of(endpoint).map(ToString::to_string).collect();
        if !failures.is_empty() {
            return Some(format!("its policy is not in force: {}", failures.join("; ")));
        }
        let is_known = self.endpoints.binary_search(endpoint).is_ok();
        (!is_known).then(|| {
            "its policy is not in force: the agent has not read its endpoint yet, and retries by itself"
                .to_owned()
        })
    }
}

/// A kind that may not be read, and what to do.
pub(crate) fn forbidden(kind: Kind, error: &StoreError) -> String {
    // The error names the resource, which may be another one: some kinds are derived.
    format!(
        "the agent cannot read objects of kind {} ({error}); grant it get, list and watch there, in Kubernetes by the \
         ClusterRole tortie-node",
        kind.name()
    )
}

/// Starts the thread. It ends when the [`Batches`] are dropped, and leaves everything in force.
pub(crate) fn start(
    watched: Watched,
    assigned_pods: AssignedPods,
    dataplane: Box<dyn Dataplane>,
    holding: Option<Holding>,
    saver: Option<Saver>,
) -> std::io::Result<(Batches, watch::Receiver<Arc<InForce>>)> {
    let (batches, inbox) = queue();
    let in_force = start_with(watched, assigned_pods, dataplane, (holding, saver), inbox)?;
    Ok((batches, in_force))
}

fn start_with(
    watched: Watched,
    assigned_pods: AssignedPods,
    mut dataplane: Box<dyn Dataplane>,
    (holding, saver): (Option<Holding>, Option<Saver>),
    inbox: Inbox,
) -> std::io::Result<watch::Receiver<Arc<InForce>>> {
    dataplane.watch(Box::new(inbox.disturb()));
    let (publish, in_force) = watch::channel(Arc::new(InForce::default()));
    let (report, logged, read, given, positions, unavailable) = Default::default();
    let calc = Calc::new(watched.node());
    let calc = if dataplane.asks_for_services() { calc.with_services() } else { calc };
    let calc = if watched.has_direct_routes() { calc.with_direct_routes() } else { calc };
    let calc = if watched.has_flannel() { calc.with_flannel() } else { calc };
    let calc = if watched.has_leases() { calc.with_flannel_leases() } else { calc };
    let calc = if watched.has_policy_only() { calc.with_policy_only() } else { calc };
    let backoff = Backoff::new(random_seed());
    let mut plane = Plane {
        calc,
        watched,
        assigned_pods,
        dataplane,
        holding,
        saver,
        publish,
        read,
        is_changed: true,
        given,
        positions,
        unavailable,
        report,
        backoff,
        took: Duration::ZERO,
        logged,
        leases: Arc::default(),
        missing_leases: MissingLeases::default(),
        unreachable: Unreachable::default(),
        shared_ends: BTreeMap::new(),
    };
    thread::Builder::new().name("dataplane".to_owned()).spawn(move || plane.run(&inbox))?;
    Ok(in_force)
}

/// Waits for the thread's end.
pub(crate) async fn ended(mut in_force: watch::Receiver<Arc<InForce>>) {
    while in_force.changed().await.is_ok() {}
}

struct Plane {
    calc: Calc,
    watched: Watched,
    assigned_pods: AssignedPods,
    dataplane: Box<dyn Dataplane>,
    /// Keeps pods closed until the first call of the dataplane.
    holding: Option<Holding>,
    /// Saves the state for the next agent.
    saver: Option<Saver>,
    publish: watch::Sender<Arc<InForce>>,
    /// The positions of what calc has.
    read: Positions,
    /// The dataplane does not have all that calc has.
    is_changed: bool,
    /// The positions of the last input of the dataplane.
    given: Positions,
    /// The last positions without a failure of the whole node.
    positions: Positions,
    /// Kinds that cannot be read.
    unavailable: BTreeMap<Kind, StoreError>,
    report: Report,
    backoff: Backoff,
    /// The duration of the last comparison.
    took: Duration,
    /// The conditions that were logged and still hold.
    logged: BTreeSet<(Reason, String)>,
    /// flannel's leases in etcd.
    leases: Arc<LeaseSnapshot>,
    /// The Nodes without any of them.
    missing_leases: MissingLeases,
    /// The nodes to whose pods no route leads.
    unreachable: Unreachable,
    /// The nodes that share the MAC address of their tunnel with another one.
    shared_ends: BTreeMap<String, String>,
}

impl Plane {
    fn run(&mut self, inbox: &Inbox) {
        // Nothing is applied before the whole cluster is known, because half of it may allow too much. Until then,
        // requests get the answer that nothing is known yet.
        while self.publish.borrow().given.is_empty() {
            match inbox.take(None) {
                Some(Work { batch: Some(part), .. }) => self.ingest(part),
                Some(_) => {}
                None => return,
            }
        }
        let mut resync_at = self.next_resync();
        loop {
            if Instant::now() >= resync_at {
                self.resync();
                resync_at = self.next_resync();
            }
            let Some(Work { batch, questions, disturbed, assigned }) = inbox.take(Some(resync_at)) else {
                return;
            };
            let had_failed = self.report.retry;
            // Without a batch, what is assigned is the only change.
            if let Some(batch) = batch.or_else(|| assigned.then(Batch::default)) {
                self.ingest(batch);
            }
            questions.into_iter().for_each(|question| self.answer(question));
            // Changes do not delay the resync, however many there are; a failure brings it forward.
            if disturbed {
                self.look();
                resync_at = resync_at.min(Instant::now() + MEND_INTERVAL);
            }
            if !self.report.retry {
                self.backoff.succeeded();
            } else if !had_failed {
                resync_at = resync_at.min(self.next_resync());
            }
        }
    }

    /// Applies a batch. A batch without changes only reports positions.
    fn ingest(&mut self, batch: Batch) {
        let Batch { changes, positions, restarted, unavailable, leases, more_follows } = batch;
        self.is_changed |= !changes.is_empty() || leases.is_some();
        if let Some(leases) = leases {
            self.calc.update_flannel_leases(leases.own.clone(), leases.others.clone());
            self.leases = leases;
        }
        let kinds: BTreeSet<Kind> = changes.keys().map(|key| key.kind).collect();
        let of_changes: Positions =
            kinds.into_iter().filter_map(|kind| Some((kind, positions.of(kind)?))).collect();
        let span = tracing::debug_span!("change", objects = changes.len(), positions = %of_changes);
        let _entered = span.enter();
        for kind in restarted {
            self.read.reset(kind);
            // What is in force belongs to another history, even if nothing of this one is applied for a while.
            if !self.given.is_empty() {
                self.given.reset(kind);
                self.positions.reset(kind);
            }
        }
        self.read.advance_all(&positions);
        for (kind, error) in unavailable {
            match error {
                Some(error) => {
                    self.unavailable.insert(kind, error);
                }
                None => {
                    self.unavailable.remove(&kind);
                }
            }
        }
        // What is stored of such a kind, and not known here, is not in force.
        self.unavailable.keys().for_each(|kind| self.read.advance(*kind, Position(0)));
        // An ADD records an address before it publishes it.
        for (endpoint, assigned) in self.assigned_pods.take_changes() {
            self.is_changed = true;
            self.calc.update_assigned(&endpoint, assigned);
        }
        for (key, value) in changes {
            self.calc.update(&key, value.as_ref());
            self.watched.update(&key, value.as_ref());
        }
        if more_follows || self.watched.lock().is_some() {
            self.publish_blocking();
            return;
        }
        self.given = self.read.clone();
        if self.is_changed {
            self.is_changed = false;
            let deltas = self.calc.flush();
            tracing::debug!(
                deltas = deltas.len(),
                "the dataplane applies what the changes mean for the node"
            );
            if deltas.iter().any(is_of_tunnels) {
                self.shared_ends = shared_ends(self.calc.state());
            }
            if deltas.iter().any(is_saved) {
                self.save();
            }
            // The table of policy has one owner.
            self.holding = None;
            self.report = self.dataplane.apply(self.calc.state(), &deltas);
        }
        self.publish_in_force();
    }

    /// Publishes why nothing is applied: kinds that cannot be read, while the first snapshot is not complete, or a lock.
    fn publish_blocking(&self) {
        let (unavailable, lock) = (&self.unavailable, self.watched.lock());
        if let Some(lock) = lock.as_ref().filter(|_| self.publish.borrow().lock.is_none()) {
            tracing::error!(reason = %lock.reason, "{}: {}", lock.object, lock.message);
        }
        self.publish.send_if_modified(|now| {
            let differs = now.unavailable != *unavailable
                || now.lock != lock
                || now.given != self.given
                || now.positions != self.positions;
            if differs {
                let now = Arc::make_mut(now);
                (now.unavailable, now.lock) = (unavailable.clone(), lock);
                (now.given, now.positions) = (self.given.clone(), self.positions.clone());
            }
            differs
        });
    }

    fn look(&mut self) {
        if let Some(report) = self.dataplane.look(self.calc.state()) {
            self.report = report;
            self.publish_in_force();
        }
    }

    /// Saves the state for the next agent, before it is in force.
    fn save(&mut self) {
        if let Some(saver) = &mut self.saver {
            saver.save(self.calc.state());
        }
    }

    fn resync(&mut self) {
        let span = tracing::debug_span!("resync");
        let _entered = span.enter();
        if self.saver.as_ref().is_some_and(|saver| saver.problem().is_some()) {
            self.save();
        }
        let begun = Instant::now();
        self.report = self.dataplane.resync(self.calc.state());
        self.took = begun.elapsed();
        self.publish_in_force();
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
        let pod = Key::namespaced(Kind::Pod, &*id.namespace, &*id.pod);
        let found = self.calc.findings().into_iter().filter(|finding| finding.key == pod);
        let found =
            found.map(|finding| Condition::new(finding.reason, finding.problem).reported(Some(id.into())));
        own.chain(found)
            .chain(self.report.node_failures().map(|condition| condition.reported(None)))
            .collect()
    }

    /// The time of the next resync after a call of the dataplane.
    fn next_resync(&mut self) -> Instant {
        let now = Instant::now();
        let retry = self.report.retry.then(|| self.backoff.failed(now));
        if retry.is_none() {
            self.backoff.succeeded();
        }
        next_comparison(now, self.took, retry)
    }

    /// Publishes what is in force now.
    fn publish_in_force(&mut self) {
        let is_known = self.leases.unreachable.is_none();
        self.missing_leases.update(self.calc.without_flannel_lease(), is_known, Instant::now());
        self.unreachable.update(&self.calc.without_route(), Instant::now());
        self.log();
        let lock = self.watched.lock();
        if lock.is_none() && self.publish.borrow().lock.is_some() {
            tracing::info!(
                "the datastore is unlocked; its changes are in force, or in the conditions of the node"
            );
        }
        // Problems of single endpoints are in the report; they must not delay the node's positions.
        let failed = self.report.node_failures().next().is_some();
        if !failed {
            self.positions = self.given.clone();
        }
        tracing::debug!(
            in_force = !failed,
            failures = self.report.conditions().filter(|condition| condition.reason.is_failure()).count(),
            "the dataplane has finished"
        );
        self.publish.send_replace(Arc::new(InForce {
            given: self.given.clone(),
            positions: self.positions.clone(),
            endpoints: self.calc.state().endpoints.keys().cloned().collect(),
            holders: self.holders(),
            pod_networks: self.pod_networks(),
            host_ports: self.host_ports(),
            report: self.report.clone(),
            findings: self.calc.findings(),
            unsupported: self.unsupported(),
            unavailable: self.unavailable.clone(),
            lock,
        }));
    }

    fn holders(&self) -> BTreeMap<IpAddr, EndpointId> {
        let endpoints = self.calc.state().endpoints.iter();
        endpoints.flat_map(|(id, endpoint)| endpoint.addresses.iter().map(|one| (*one, id.clone()))).collect()
    }

    /// The node's own blocks, so that pods belong to them from their first packet, and the addresses of pods elsewhere.
    fn pod_networks(&self) -> BTreeSet<IpNet> {
        let state = self.calc.state();
        let blocks = state.routes.iter().filter(|(_, target)| matches!(target, RouteTarget::Local));
        let blocks: BTreeSet<IpNet> = blocks.map(|(network, _)| *network).collect();
        let addresses = state.endpoints.values().flat_map(|endpoint| &endpoint.addresses);
        let others = addresses.filter(|address| !blocks.iter().any(|block| block.contains(*address)));
        let others: Vec<IpNet> = others.map(|address| IpNet::from(*address)).collect();
        blocks.into_iter().chain(others).collect()
    }

    fn host_ports(&self) -> Vec<(HostPort, EndpointId)> {
        let endpoints = self.calc.state().endpoints.iter();
        endpoints
            .flat_map(|(id, endpoint)| endpoint.host_ports.iter().map(|port| (port.clone(), id.clone())))
            .collect()
    }

    /// Stored objects that are not in force here.
    fn unsupported(&self) -> Vec<Unsupported> {
        let mut all = self.watched.all();
        all.extend(self.unreachable.conditions(self.watched.node()));
        all.extend(refused_tunnels(self.calc.refused_tunnels(), &self.unreachable));
        all.extend(flannel::unreachable(self.watched.node(), self.calc.flannel_problems()));
        let shared = self.shared_ends.iter().map(|(node, problem)| (node.as_str(), problem.clone()));
        all.extend(flannel::unreachable(self.watched.node(), shared.collect()));
        all.extend(flannel_etcd::conditions(self.watched.node(), &self.leases));
        all.extend(self.missing_leases.conditions());
        all.extend(self.saver.as_ref().and_then(Saver::problem).map(|problem| Unsupported {
            object: Key::global(Kind::Node, self.watched.node()),
            reason: Reason::StateNotSaved,
            message: problem.to_owned(),
        }));
        all
    }

    /// Logs new conditions, and those that have ended.
    fn log(&mut self) {
        let unsupported = self.unsupported().into_iter();
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

/// The time of the next comparison after one that took so long: the thread must have time for changes. After a failure it is when the
/// backoff says, as soon as there was as much time for changes as for the comparison.
fn next_comparison(now: Instant, took: Duration, retry: Option<Instant>) -> Instant {
    match retry {
        Some(at) => at.max(now + took),
        None => now + RESYNC_INTERVAL.max(took * SHARE_OF_CHANGES),
    }
}

/// Whether a tunnel of this node or another one may have changed.
fn is_of_tunnels(delta: &Delta) -> bool {
    matches!(delta, Delta::Node(_) | Delta::Vtep(_) | Delta::VtepRemoved(..))
}

/// Whether the saved state may change. It has no policies, and no sets except for that of all nodes.
fn is_saved(delta: &Delta) -> bool {
    match delta {
        Delta::SetCreated(id, ..) | Delta::SetChanged { id, .. } => *id == *ALL_NODES,
        Delta::Policy(id, _) => id.kind == PolicyKind::Profile,
        Delta::Service(..) | Delta::ServiceRemoved(_) | Delta::SetRemoved(_) | Delta::PolicyRemoved(_) => {
            false
        }
        Delta::HostEndpoint(..) | Delta::HostEndpointRemoved(_) => false,
        // One that is gone is still that of a node.
        Delta::RouteRemoved(_) => false,
        Delta::Route(route) => matches!(route.target, RouteTarget::Ipip { .. }),
        Delta::Node(_)
        | Delta::Settings(_)
        | Delta::Endpoint(..)
        | Delta::EndpointRemoved(_)
        | Delta::Vtep(_)
        | Delta::VtepRemoved(..) => true,
    }
}

#[cfg(test)]
mod tests;
