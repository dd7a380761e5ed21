//! The node's report in the store: what is in force, and which problems there are.
//!
//! It is written when an operator must know (a condition comes or goes), when somebody waits for what is in force now (an
//! annotation of the report names the positions), and otherwise once in each heartbeat. Progress alone is no reason to
//! write: most changes do not concern most nodes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tortie_api::report::{NodeReport, NodeStatus, ObjectRef, ReportedCondition};
use tortie_api::{Key, Kind, Metadata, Positions, Resource};
use tortie_dataplane::{Condition, Reason, Severity};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Change, Interest, Store, StoreError, Stored};

use crate::health::Taken;
use crate::plane::{InForce, forbidden};

/// The maximum interval between reports.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(60);
/// The minimum interval between reports.
const INTERVAL: Duration = Duration::from_millis(50);
/// How often a write is tried again at once, when somebody asks for a report at the same moment.
const MAX_CONFLICTS: usize = 10;
/// The maximum number of conditions in a report; the rest is counted.
const MAX_CONDITIONS: usize = 50;

/// The maximum number of characters of a message, and of objects that cause a condition: messages quote objects, and whoever writes these must
/// not make a report larger than a datastore takes.
const MAX_MESSAGE: usize = 1_000;
const MAX_CAUSES: usize = 20;

/// What reports are made of.
#[derive(Clone)]
pub(crate) struct Events {
    pub(crate) in_force: watch::Receiver<Arc<InForce>>,
    /// The addresses for probes and metrics that cannot be served.
    pub(crate) taken: watch::Receiver<Taken>,
    /// The conditions of the BGP speaker.
    pub(crate) bgp: watch::Receiver<Vec<Condition>>,
    /// The conditions of Services.
    pub(crate) services: watch::Receiver<Vec<Condition>>,
    /// Why the CNI configuration cannot be written.
    pub(crate) cni_config: watch::Receiver<Option<Condition>>,
    /// The conditions of the node's own addresses.
    pub(crate) addresses: watch::Receiver<Vec<Condition>>,
}

/// Writes reports until the dataplane's thread ends. `about` is the constant content.
pub(crate) async fn run(store: Arc<dyn Store>, node: String, about: NodeStatus, events: Events) {
    let Events { mut in_force, mut taken, mut bgp, mut services, mut cni_config, mut addresses } = events;
    let key = Key::global(Kind::NodeReport, &node);
    let mut changes = store.follow(vec![Interest::in_object(&key)]);
    let heartbeat = Duration::from_secs(about.heartbeat_seconds);
    let mut backoff = Backoff::new(random_seed());
    let (mut exists, mut requested) = (false, Positions::default());
    let mut written: Option<Written> = None;
    if in_force.wait_for(|now| !now.given.is_empty() || !now.blocking().is_empty()).await.is_err() {
        return;
    }
    loop {
        let status = status(
            &about,
            &in_force.borrow_and_update(),
            &taken.borrow_and_update(),
            bgp.borrow_and_update()
                .iter()
                .chain(&*services.borrow_and_update())
                .chain(&*cni_config.borrow_and_update())
                .chain(&*addresses.borrow_and_update()),
        );
        let at = next_write(written.as_ref(), &status, &requested, heartbeat);
        if at.is_none_or(|at| at <= Instant::now()) {
            match write(&*store, &key, &status).await {
                Ok(()) => {
                    backoff.succeeded();
                    written = Some(Written { status, at: Instant::now() });
                    sleep(INTERVAL).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot write the node's report; Tortie retries");
                    backoff.wait().await;
                }
            }
            continue;
        }
        tokio::select! {
            changed = in_force.changed() => if changed.is_err() {
                return;
            },
            // The other end lives as long as the agent.
            Ok(()) = taken.changed() => {}
            Ok(()) = bgp.changed() => {}
            Ok(()) = services.changed() => {}
            Ok(()) = cni_config.changed() => {}
            Ok(()) = addresses.changed() => {}
            change = changes.next() => match change {
                Some(Change::Put(stored)) => {
                    exists = true;
                    requested = requested_of(&stored);
                }
                // Somebody has deleted it.
                Some(Change::Gone { .. }) => (exists, written) = (false, None),
                Some(Change::InSync(..)) if !exists => written = None,
                Some(Change::Unavailable(_, error)) => {
                    tracing::warn!(%error, "cannot follow the node's report; whoever waits for a policy gets one a minute");
                }
                _ => {}
            },
            () = sleep_until(at.unwrap_or_else(Instant::now)) => {}
        }
    }
}

/// The last written report.
struct Written {
    status: NodeStatus,
    at: Instant,
}

/// When to write the next report; `None` means now.
fn next_write(
    written: Option<&Written>,
    status: &NodeStatus,
    requested: &Positions,
    heartbeat: Duration,
) -> Option<Instant> {
    let Written { status: before, at } = written?;
    let must_be_known = before.conditions != status.conditions || before.more != status.more;
    let is_waited_for = status.positions.reach(requested) && !before.positions.reach(requested);
    (!must_be_known && !is_waited_for).then(|| *at + heartbeat)
}

fn requested_of(stored: &Stored) -> Positions {
    match Resource::read(&stored.key, &stored.value) {
        Ok(Resource::NodeReport(report)) => report.requested(),
        _ => Positions::default(),
    }
}

/// Writes the report. A request that it does not fulfil stays.
async fn write(store: &dyn Store, key: &Key, status: &NodeStatus) -> Result<(), StoreError> {
    let mut result = Err(StoreError::Conflict(key.clone()));
    for _ in 0..MAX_CONFLICTS {
        let stored = store.get(key).await?;
        let requested = stored.as_ref().map(requested_of).unwrap_or_default();
        let value = value(key, status, &requested)?;
        result = match stored {
            None => store.create(key, value).await,
            Some(stored) => store.update(key, value, &stored.version).await,
        }
        .map(drop);
        match &result {
            Err(StoreError::Conflict(_) | StoreError::AlreadyExists(_) | StoreError::NotFound(_)) => {}
            _ => break,
        }
    }
    result
}

fn value(key: &Key, status: &NodeStatus, requested: &Positions) -> Result<Value, StoreError> {
    let damaged = |error: serde_json::Error| StoreError::Damaged(error.to_string());
    let mut metadata = Metadata { name: key.name.clone(), ..Metadata::default() };
    if !requested.is_empty() && !status.positions.reach(requested) {
        let text = serde_json::to_string(requested).map_err(damaged)?;
        metadata.annotations.insert(NodeReport::REQUESTED.to_owned(), text);
    }
    let report = NodeReport {
        api_version: key.kind.api_version().to_owned(),
        kind: key.kind.name().to_owned(),
        metadata,
        status: NodeStatus { time: Timestamp::now().to_string(), ..status.clone() },
    };
    serde_json::to_value(report).map_err(damaged)
}

/// A kind that cannot be read. A kind that a healthy cluster may lack is no problem: nobody can have stored its objects.
fn unavailable(kind: Kind, error: &StoreError) -> Option<ReportedCondition> {
    let name = kind.name();
    let (reason, message) = match error {
        StoreError::KindAbsent(_) if kind.is_optional() => return None,
        StoreError::KindAbsent(_) => {
            let message =
                format!("the datastore has no kind {name}; install its CustomResourceDefinition to use it");
            (Reason::KindAbsent, message)
        }
        error => (Reason::KindForbidden, forbidden(kind, error)),
    };
    Some(ReportedCondition { object: None, about: Vec::new(), reason: reason.to_string(), message })
}

impl Events {
    /// The reasons of all conditions that the agent has now. A report has no more than [`MAX_CONDITIONS`] of them.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let (bgp, addresses) = (self.bgp.borrow(), self.addresses.borrow());
        let (services, cni_config) = (self.services.borrow(), self.cni_config.borrow());
        let others = bgp.iter().chain(&*services).chain(&*cni_config).chain(&*addresses);
        let all = all_conditions(&self.in_force.borrow(), &self.taken.borrow(), others);
        all.into_iter().map(|condition| condition.reason).collect()
    }
}

/// All conditions of the agent, of the node and its pods. `others` are those of other parts of the agent than the dataplane.
fn all_conditions<'a>(
    in_force: &InForce,
    taken: &Taken,
    others: impl Iterator<Item = &'a Condition>,
) -> Vec<ReportedCondition> {
    // The conditions of the agent itself come first: those of objects may be many.
    let mut conditions: Vec<_> = others.map(|condition| condition.reported(None)).collect();
    conditions.extend(self::conditions(in_force));
    conditions.extend(taken.iter().map(|(address, error)| {
        let message = format!(
            "health and metrics are not served at {address}: {error}; free the port or choose another"
        );
        Condition::new(Reason::AddressTaken, message).reported(None)
    }));
    conditions
}

/// The conditions of the dataplane's thread.
fn conditions(in_force: &InForce) -> Vec<ReportedCondition> {
    let of_object = |key: &Key, reason: Reason, message: &str| ReportedCondition {
        object: Some(key.into()),
        about: Vec::new(),
        reason: reason.to_string(),
        message: message.to_owned(),
    };
    let report = &in_force.report;
    let findings = in_force.findings.iter();
    let mut conditions: Vec<_> =
        findings.map(|finding| of_object(&finding.key, finding.reason, &finding.problem)).collect();
    let unsupported = in_force.unsupported.iter().chain(&in_force.lock);
    conditions.extend(unsupported.map(|it| of_object(&it.object, it.reason, &it.message)));
    conditions.extend(in_force.unavailable.iter().filter_map(|(kind, error)| unavailable(*kind, error)));
    conditions.extend(report.node.iter().map(|condition| condition.reported(None)));
    for (id, told) in &report.endpoints {
        let pod = Some(ObjectRef::from(id));
        conditions.extend(told.iter().map(|condition| condition.reported(pod.clone())));
    }
    conditions
}

/// `about` is the constant content, `others` are the conditions of other parts of the agent.
fn status<'a>(
    about: &NodeStatus,
    in_force: &InForce,
    taken: &Taken,
    others: impl Iterator<Item = &'a Condition>,
) -> NodeStatus {
    let mut conditions = sorted(all_conditions(in_force, taken, others));
    let more = conditions.len().saturating_sub(MAX_CONDITIONS);
    conditions.truncate(MAX_CONDITIONS);
    conditions.iter_mut().for_each(shorten);
    NodeStatus {
        positions: in_force.positions.clone(),
        endpoints: in_force.endpoints.len(),
        conditions,
        more,
        ..about.clone()
    }
}

/// Failures first, and then what is out of reach, so that a long list omits less urgent conditions. Then those of the node and of the
/// cluster's objects, and those of all namespaces in turn, so that one tenant's many objects hide nothing of others.
fn sorted(conditions: Vec<ReportedCondition>) -> Vec<ReportedCondition> {
    let mut counts: BTreeMap<(u8, String), usize> = BTreeMap::new();
    let mut rank = |condition: &ReportedCondition| {
        let urgency = urgency(Severity::of(&condition.reason));
        let namespace = condition.object.as_ref().map(|object| object.namespace.clone()).unwrap_or_default();
        if namespace.is_empty() {
            return (urgency, 0);
        }
        let count = counts.entry((urgency, namespace)).or_default();
        *count += 1;
        (urgency, *count)
    };
    let mut ranked: Vec<_> = conditions.into_iter().map(|condition| (rank(&condition), condition)).collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    ranked.into_iter().map(|(_, condition)| condition).collect()
}

/// The place of a severity in a report.
fn urgency(severity: Severity) -> u8 {
    match severity {
        Severity::Failure => 0,
        Severity::Unreachable => 1,
        Severity::WithoutEffect | Severity::Information => 2,
    }
}

/// Cuts what is longer than a report should have, and says how much is missing.
fn shorten(condition: &mut ReportedCondition) {
    if let Some((end, _)) = condition.message.char_indices().nth(MAX_MESSAGE) {
        let more = condition.message[end..].chars().count();
        condition.message.truncate(end);
        condition.message.push_str(&format!(" … ({more} characters more)"));
    }
    let more = condition.about.len().saturating_sub(MAX_CAUSES);
    if more > 0 {
        condition.about.truncate(MAX_CAUSES);
        condition.message.push_str(&format!(" ({more} more objects cause it)"));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::time::timeout;
    use tortie_api::Position;
    use tortie_store::{Embedded, Write, wait_in_force};

    use super::*;

    #[test]
    fn many_conditions_of_one_tenant_hide_none_of_others() {
        let of = |namespace: &str, name: &str, reason: Reason| ReportedCondition {
            object: Some(Key::namespaced(Kind::Pod, namespace, name).into()),
            about: Vec::new(),
            reason: reason.to_string(),
            message: name.to_owned(),
        };
        let mut conditions: Vec<_> =
            (0..60).map(|number| of("tenant", &number.to_string(), Reason::NotUnderstood)).collect();
        conditions.push(of("", "pool", Reason::PoolConflict));
        conditions.push(Condition::new(Reason::PolicyBypassed, "node").reported(None));
        conditions.push(of("other", "pod", Reason::HostPortTaken));
        let positions = |conditions: Vec<ReportedCondition>, names: &[&str]| {
            let sorted = sorted(conditions);
            let position =
                |name: &&str| sorted.iter().position(|condition| condition.message == *name).unwrap();
            names.iter().map(position).max().unwrap()
        };
        assert!(positions(conditions.clone(), &["pool", "node", "pod"]) < 5, "{conditions:?}");
        // A failure after many other conditions of its namespace, and many failures of another one.
        conditions.push(of("tenant", "failure", Reason::PolicyNotInForce));
        conditions
            .extend((0..60).map(|number| of("third", &format!("third {number}"), Reason::PolicyNotInForce)));
        assert!(positions(conditions, &["failure"]) < 5);
    }

    /// A node that reaches no other says so in a report that leaves conditions out, too.
    #[test]
    fn what_is_out_of_reach_comes_after_failures_and_before_the_rest() {
        let of = |reason: Reason| Condition::new(reason, "a message").reported(None);
        let mut conditions: Vec<_> = (0..60).map(|_| of(Reason::FieldNotSupported)).collect();
        conditions
            .extend([Reason::ForeignVxlanLink, Reason::CalicoLeftover, Reason::PolicyNotInForce].map(of));
        let first: Vec<String> = sorted(conditions).into_iter().map(|it| it.reason).take(3).collect();
        assert_eq!(first, ["PolicyNotInForce", "ForeignVxlanLink", "FieldNotSupported"]);
    }

    /// Metrics count all of them: alerts depend on it.
    #[test]
    fn the_reasons_are_those_of_all_parts_of_the_agent() {
        let condition = |reason: Reason| Condition::new(reason, "a message");
        let mut now = InForce::default();
        now.report.node.push(condition(Reason::RouteTaken));
        let taken: Taken = [("127.0.0.1:9198".parse().unwrap(), "in use".to_owned())].into();
        let events = Events {
            in_force: watch::channel(Arc::new(now)).1,
            taken: watch::channel(taken).1,
            bgp: watch::channel(vec![condition(Reason::BgpSessionDown)]).1,
            services: watch::channel(vec![condition(Reason::ServicesNotServed)]).1,
            cni_config: watch::channel(Some(condition(Reason::CniConfigNotWritten))).1,
            addresses: watch::channel(vec![condition(Reason::RouteRefused)]).1,
        };
        let expected = [
            "BgpSessionDown",
            "ServicesNotServed",
            "CniConfigNotWritten",
            "RouteRefused",
            "RouteTaken",
            "AddressTaken",
        ];
        assert_eq!(events.reasons(), expected);
    }

    const HOUR: u64 = 3_600;

    fn at(pairs: &[(Kind, u64)]) -> Positions {
        pairs.iter().map(|(kind, position)| (*kind, Position(*position))).collect()
    }

    #[test]
    fn a_report_is_written_for_conditions_waiters_and_heartbeats() {
        let condition = |message: &str| ReportedCondition {
            object: None,
            about: Vec::new(),
            reason: "Differs".to_owned(),
            message: message.to_owned(),
        };
        let reached = |position, conditions: &[&str]| NodeStatus {
            positions: at(&[(Kind::Pod, position), (Kind::Tier, 1)]),
            conditions: conditions.iter().map(|message| condition(message)).collect(),
            ..NodeStatus::default()
        };
        let start = Instant::now();
        let heartbeat = Some(start + HEARTBEAT);
        let written = |status| Some(Written { status, at: start });
        let table = [
            ("nothing is written", None, reached(1, &[]), at(&[]), None),
            ("nothing has changed", written(reached(1, &[])), reached(1, &[]), at(&[]), heartbeat),
            ("only progress", written(reached(1, &[])), reached(9, &[]), at(&[]), heartbeat),
            ("a condition", written(reached(1, &[])), reached(1, &["a"]), at(&[]), None),
            ("another condition", written(reached(1, &["a"])), reached(1, &["b"]), at(&[]), None),
            ("it is resolved", written(reached(1, &["a"])), reached(1, &[]), at(&[]), None),
            ("a waiter", written(reached(1, &[])), reached(9, &[]), at(&[(Kind::Pod, 5)]), None),
            ("not yet", written(reached(1, &[])), reached(4, &[]), at(&[(Kind::Pod, 5)]), heartbeat),
            ("reported already", written(reached(7, &[])), reached(9, &[]), at(&[(Kind::Pod, 5)]), heartbeat),
            (
                "not followed",
                written(reached(1, &[])),
                reached(9, &[]),
                at(&[(Kind::IpamHandle, 5)]),
                heartbeat,
            ),
        ];
        for (name, written, status, requested, expected) in table {
            assert_eq!(next_write(written.as_ref(), &status, &requested, HEARTBEAT), expected, "{name}");
        }
    }

    /// Selectors and fields that messages quote may be as long as an object.
    #[test]
    fn a_report_has_no_long_message() {
        let condition = |message: String| Condition::new(Reason::NotUnderstood, message);
        let (long, short) = ("ä".repeat(1_200_000), "ä".repeat(MAX_MESSAGE));
        let causes =
            (0..MAX_CAUSES + 2).map(|number| ObjectRef::from(&Key::global(Kind::Tier, number.to_string())));
        let many = causes.fold(condition("many".to_owned()), Condition::about);
        let bgp = [condition(long), condition(short.clone()), many];
        let status = status(&NodeStatus::default(), &InForce::default(), &Taken::default(), bgp.iter());
        let [first, second, third] = &status.conditions[..] else { panic!("{status:?}") };
        assert_eq!(first.message, format!("{short} … (1199000 characters more)"));
        assert_eq!(second.message, short);
        assert_eq!(
            (third.message.as_str(), third.about.len()),
            ("many (2 more objects cause it)", MAX_CAUSES)
        );
        assert!(serde_json::to_vec(&status).unwrap().len() < 10_000);
    }

    #[test]
    fn only_kinds_that_an_installation_defines_are_missed() {
        let forbidden = |kind| StoreError::Forbidden(format!("cannot list {kind:?}"));
        for (kind, error, expected) in [
            (Kind::ClusterNetworkPolicy, StoreError::KindAbsent(Kind::ClusterNetworkPolicy), None),
            (Kind::AdminNetworkPolicy, StoreError::KindAbsent(Kind::AdminNetworkPolicy), None),
            (
                Kind::BaselineAdminNetworkPolicy,
                StoreError::KindAbsent(Kind::BaselineAdminNetworkPolicy),
                None,
            ),
            (Kind::Tier, StoreError::KindAbsent(Kind::Tier), Some("KindAbsent")),
            (
                Kind::GlobalNetworkPolicy,
                StoreError::KindAbsent(Kind::GlobalNetworkPolicy),
                Some("KindAbsent"),
            ),
            (Kind::ClusterNetworkPolicy, forbidden(Kind::ClusterNetworkPolicy), Some("KindForbidden")),
            (Kind::KubernetesNetworkPolicy, forbidden(Kind::KubernetesNetworkPolicy), Some("KindForbidden")),
        ] {
            let now = InForce { unavailable: [(kind, error)].into(), ..InForce::default() };
            let told: Vec<String> = conditions(&now).into_iter().map(|condition| condition.reason).collect();
            assert_eq!(told, expected.map(str::to_owned).into_iter().collect::<Vec<_>>(), "{kind:?}");
        }
    }

    /// The part of an agent that writes reports, whose dataplane is the test.
    struct Reporter {
        store: Arc<Embedded>,
        in_force: watch::Sender<Arc<InForce>>,
    }

    impl Reporter {
        async fn new(heartbeat_seconds: u64) -> Self {
            let store = Arc::new(Embedded::in_memory().unwrap());
            store.create(&Key::global(Kind::Node, "n"), serde_json::json!({})).await.unwrap();
            let (in_force, receiver) = watch::channel(Arc::default());
            let about = NodeStatus { heartbeat_seconds, ..NodeStatus::default() };
            let (taken, bgp) = (watch::channel(Taken::new()).1, watch::channel(Vec::new()).1);
            let services = watch::channel(Vec::new()).1;
            let (cni_config, addresses) = (watch::channel(None).1, watch::channel(Vec::new()).1);
            let events = Events { in_force: receiver, taken, bgp, services, cni_config, addresses };
            tokio::spawn(run(store.clone(), "n".to_owned(), about, events));
            let reporter = Self { store, in_force };
            reporter.reach(1);
            reporter.report_after(None).await;
            reporter
        }

        fn reach(&self, position: u64) {
            let positions = at(&[(Kind::NetworkPolicy, position)]);
            let now = InForce { given: positions.clone(), positions, ..InForce::default() };
            self.in_force.send_replace(Arc::new(now));
        }

        async fn report(&self) -> Option<Stored> {
            self.store.get(&Key::global(Kind::NodeReport, "n")).await.unwrap()
        }

        /// Waits for another report than this.
        async fn report_after(&self, before: Option<Stored>) -> Stored {
            let changed = async {
                loop {
                    match self.report().await {
                        Some(report) if before.as_ref() != Some(&report) => return report,
                        _ => tokio::task::yield_now().await,
                    }
                }
            };
            timeout(Duration::from_secs(20), changed).await.expect("a report")
        }
    }

    /// A thousand changes that nobody waits for cause no report. Somebody who waits gets one, when they are in force.
    #[tokio::test(flavor = "multi_thread")]
    async fn progress_is_reported_to_those_who_wait() {
        let reporter = Reporter::new(HOUR).await;
        let first = reporter.report().await;
        for position in 2..=1_000 {
            reporter.reach(position);
            tokio::task::yield_now().await;
        }
        assert_eq!(reporter.report().await, first);

        // A report of a position that the store has not reached would be one about another history.
        let policy = |number: usize| Key::namespaced(Kind::NetworkPolicy, "n", format!("p{number}"));
        let writes = (0..2_000).map(|number| Write::Create(policy(number), serde_json::json!({})));
        reporter.store.write_all(writes.collect()).await.unwrap();
        let wanted = at(&[(Kind::NetworkPolicy, 1_500)]);
        let waiting = wait_in_force(&*reporter.store, &wanted, Duration::from_secs(20));
        tokio::pin!(waiting);
        let asked = tokio::select! {
            result = &mut waiting => panic!("it is not in force yet: {result:?}"),
            asked = reporter.report_after(first) => asked,
        };
        assert_eq!(requested_of(&asked), wanted);
        reporter.reach(1_499);
        reporter.reach(1_501);
        let reports = waiting.await.unwrap();
        assert_eq!(reports["n"].positions, at(&[(Kind::NetworkPolicy, 1_501)]));
        let after = reporter.report().await.unwrap();
        assert!(requested_of(&after).is_empty(), "the request is fulfilled: {after:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_report_is_written_again_after_each_heartbeat_and_if_it_is_deleted() {
        let reporter = Reporter::new(1).await;
        let first = reporter.report().await;
        let second = reporter.report_after(first).await;
        assert!(second.value["status"]["time"].as_str().is_some());

        let reporter = Reporter::new(HOUR).await;
        let before = reporter.report().await;
        reporter.store.delete(&Key::global(Kind::NodeReport, "n"), None).await.unwrap();
        reporter.report_after(before).await;
    }
}
