//! Waits until writes are in force on the nodes, by their reports (policy decision 29).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_api::report::{NodeReport, NodeStatus};
use tortie_api::{Key, Kind, Position, Positions, Resource, is_reserved_label};

use crate::{Cache, Epoch, Interest, Scope, Store, StoreError, Stored, Write, is_of};

/// How long to wait for what is stored already.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A report that is older than this number of heartbeats is stale.
const MAX_HEARTBEATS: i64 = 3;

/// Why it is unknown whether something is in force.
#[derive(Debug, Error)]
pub enum NotInForce {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Some nodes did not report it in time.
    #[error("after {seconds} seconds it is not in force on {nodes}; `tortie get nodereports` says more")]
    Late {
        /// The nodes.
        nodes: String,
        /// How long the call waited.
        seconds: u64,
        /// The last reports of the nodes.
        reports: BTreeMap<String, NodeStatus>,
    },
}

/// Waits until every node reports that everything up to these positions is in force; returns the last report of each.
///
/// # Errors
/// A node did not report it in time, or the store failed.
pub async fn wait_in_force(
    store: &dyn Store,
    positions: &Positions,
    timeout: Duration,
) -> Result<BTreeMap<String, NodeStatus>, NotInForce> {
    wait_for_reports(store, None, positions, timeout, |_| true).await
}

/// Waits until every node (or each of these nodes) reports that everything up to these positions is in force, in a report
/// that fulfils the condition; returns the last report of each. Stale reports do not count. Asks the nodes for reports, because otherwise
/// they write one a minute.
///
/// # Errors
/// A node had no such report in time, or the store failed.
pub async fn wait_for_reports(
    store: &dyn Store,
    nodes: Option<&BTreeSet<String>>,
    positions: &Positions,
    timeout: Duration,
    is_such: impl Fn(&NodeStatus) -> bool + Send + Sync,
) -> Result<BTreeMap<String, NodeStatus>, NotInForce> {
    let deadline = Instant::now() + timeout;
    let mut epoch = store.epoch().await?;
    let positions = &in_epoch(positions, epoch);
    let is_wanted = |node: &Stored| nodes.is_none_or(|nodes| nodes.contains(&node.key.name));
    let nodes: Vec<Stored> = store.list(Kind::Node).await?.items.into_iter().filter(is_wanted).collect();
    let mut cache = Cache::new(store, vec![Interest::all(Kind::NodeReport)]);
    loop {
        let (mut reports, mut late, mut requests) = (BTreeMap::new(), Vec::new(), Vec::new());
        for node in &nodes {
            let name = &node.key.name;
            let Some((stored, report)) = report_of(&cache, name) else {
                late.push(name.clone());
                continue;
            };
            let reached = &report.status.positions;
            if exceeds(reached, positions, epoch) {
                epoch = same(epoch, store.epoch().await?)?;
            }
            match stale(&report.status, boot_id(&node.value), Timestamp::now()) {
                Some(why) => late.push(format!("{name} ({why})")),
                None if exceeds(reached, positions, epoch) => {
                    late.push(format!("{name} (its report is about another history of the store)"));
                }
                None if reached.reach(positions) && is_such(&report.status) => {}
                None => late.push(name.clone()),
            }
            if !report.status.positions.reach(positions) {
                requests.extend(request(stored, &report, positions));
            }
            reports.insert(name.clone(), report.status);
        }
        if late.is_empty() {
            same(epoch, store.epoch().await?)?;
            return Ok(reports);
        }
        for write in requests {
            ask(store, write).await?;
        }
        if !changed(&mut cache, deadline).await? {
            return Err(NotInForce::Late { nodes: late.join(", "), seconds: timeout.as_secs(), reports });
        }
    }
}

/// These positions, but none from before the epoch: a position of another history can be higher than an old one of this
/// history, and is never in its current epoch.
fn in_epoch(positions: &Positions, epoch: Option<Epoch>) -> Positions {
    let mut positions = positions.clone();
    if let Some(epoch) = epoch {
        let kinds: Vec<Kind> = Kind::all().filter(|kind| positions.of(*kind).is_some()).collect();
        positions.extend(kinds.into_iter().map(|kind| (kind, epoch.begin)));
    }
    positions
}

/// Whether one of the positions that matter is beyond the epoch.
fn exceeds(reached: &Positions, wanted: &Positions, epoch: Option<Epoch>) -> bool {
    let Some(epoch) = epoch else { return false };
    let matters = |kind: &Kind| wanted.of(*kind).is_some();
    Kind::all().filter(matters).filter_map(|kind| reached.of(kind)).any(|position| position > epoch.latest)
}

/// The present state of the epoch. What was waited for may not be in the store that answers in another one.
fn same(before: Option<Epoch>, now: Option<Epoch>) -> Result<Option<Epoch>, StoreError> {
    if before.map(|epoch| epoch.begin) != now.map(|epoch| epoch.begin) {
        let problem = "it was restarted meanwhile, or serves another file; repeat the command";
        return Err(StoreError::Unavailable(problem.to_owned()));
    }
    Ok(now)
}

/// Fails if the store has begun another epoch since this one was read: what was read and written since then may not be in the
/// store that answers now. No epoch comes back, so one comparison at the end covers all that happened before.
///
/// # Errors
/// It has, or the store failed.
pub async fn refuse_other_epoch(store: &dyn Store, before: Option<Epoch>) -> Result<(), StoreError> {
    same(before, store.epoch().await?).map(drop)
}

/// Why a report says nothing about now: it is too old, from the future, or of another start of the node.
pub fn stale(report: &NodeStatus, boot_id: Option<&str>, now: Timestamp) -> Option<String> {
    let Ok(written) = report.time.parse::<Timestamp>() else {
        return Some("its report has no time".to_owned());
    };
    if let Some(boot_id) = boot_id
        && !report.boot_id.is_empty()
        && report.boot_id != boot_id
    {
        return Some("its report is from before its last start".to_owned());
    }
    let age = now.as_second() - written.as_second();
    let limit = MAX_HEARTBEATS * i64::try_from(report.heartbeat_seconds).unwrap_or(0);
    (age.abs() > limit).then(|| match age > 0 {
        true => format!("its report is {age} seconds old; check its agent and its clock"),
        false => format!("its report is from {} seconds in the future; check its clock", -age),
    })
}

fn boot_id(node: &Value) -> Option<&str> {
    node["status"]["nodeInfo"]["bootID"].as_str().filter(|id| !id.is_empty())
}

/// The write that asks a node for a report that reaches these positions; `None` if somebody has asked already.
fn request(stored: &Stored, report: &NodeReport, positions: &Positions) -> Option<Write> {
    let requested = report.requested();
    let mut wanted = requested.clone();
    wanted.advance_all(positions);
    if wanted == requested {
        return None;
    }
    let text = serde_json::to_string(&wanted).ok()?;
    let mut value = stored.value.clone();
    let annotations =
        &mut value.get_mut("metadata")?.as_object_mut()?.entry("annotations").or_insert(Value::Null);
    if !annotations.is_object() {
        **annotations = json!({});
    }
    annotations[NodeReport::REQUESTED] = json!(text);
    Some(Write::Update(stored.key.clone(), value, stored.version.clone()))
}

/// A report that the node writes at the same moment is asked for again when it arrives. Without the permission, and while the store does not
/// answer, the reports of every minute have to do.
async fn ask(store: &dyn Store, write: Write) -> Result<(), StoreError> {
    let Write::Update(key, value, version) = write else { return Ok(()) };
    match store.update(&key, value, &version).await {
        Ok(_) | Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => Ok(()),
        Err(StoreError::Forbidden(why) | StoreError::Unavailable(why)) => {
            tracing::debug!(why, "cannot ask the node for a report");
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Waits until the WorkloadEndpoints of a pod have its current labels; returns their last position, if the pod has
/// any.
///
/// # Errors
/// They did not change in time, or the store failed.
pub async fn wait_for_labels(
    store: &dyn Store,
    pod: &Key,
    timeout: Duration,
) -> Result<Option<Position>, NotInForce> {
    let deadline = Instant::now() + timeout;
    let endpoints = Interest { kind: Kind::WorkloadEndpoint, scope: Scope::Namespace(pod.namespace.clone()) };
    let mut cache = Cache::new(store, vec![Interest::in_object(pod), endpoints]);
    loop {
        let mut late = None;
        if cache.is_complete() {
            let Some(pod) = cache.get(pod) else { return Ok(None) };
            // Derived endpoints have some labels more.
            let labels = |of: &Stored| {
                let mut labels = of.value["metadata"]["labels"].as_object().cloned().unwrap_or_default();
                labels.retain(|name, _| !is_reserved_label(name));
                labels
            };
            let endpoints = || cache.objects().filter(|endpoint| is_of(endpoint, pod));
            late = endpoints().find(|endpoint| labels(endpoint) != labels(pod));
            if late.is_none() {
                return Ok(endpoints().map(|endpoint| endpoint.position).max());
            }
        }
        let node = late.and_then(|late| late.value["spec"]["node"].as_str()).unwrap_or_default().to_owned();
        if !changed(&mut cache, deadline).await? {
            let nodes = format!("{node}, which has not taken over the labels of {pod}");
            return Err(NotInForce::Late { nodes, seconds: timeout.as_secs(), reports: BTreeMap::new() });
        }
    }
}

/// Waits until pods run or have ended; returns those that do neither in time, with the known reason.
///
/// # Errors
/// The store failed.
pub async fn wait_for_pods(
    store: &dyn Store,
    pods: &[Key],
    timeout: Duration,
) -> Result<BTreeMap<Key, String>, StoreError> {
    let deadline = Instant::now() + timeout;
    let Some(first) = pods.first() else { return Ok(BTreeMap::new()) };
    let one_namespace = pods.iter().all(|pod| pod.namespace == first.namespace);
    let scope = if one_namespace { Scope::Namespace(first.namespace.clone()) } else { Scope::All };
    let mut cache = Cache::new(store, vec![Interest { kind: Kind::Pod, scope }]);
    loop {
        // A deleted pod is not waited for.
        let waiting = pods.iter().filter_map(|key| Some((key.clone(), why_not_running(cache.get(key)?)?)));
        let waiting: BTreeMap<Key, String> = waiting.collect();
        if (cache.is_complete() && waiting.is_empty()) || !changed(&mut cache, deadline).await? {
            return Ok(waiting);
        }
    }
}

/// Waits until all pods of workloads run; returns the pods, and the workloads of which some do not run in time, with the reason.
///
/// # Errors
/// The store failed.
pub async fn wait_for_workloads(
    store: &dyn Store,
    workloads: &[Key],
    timeout: Duration,
) -> Result<(BTreeSet<Key>, BTreeMap<Key, String>), StoreError> {
    let deadline = Instant::now() + timeout;
    let mut kinds: BTreeSet<Kind> = workloads.iter().map(|key| key.kind).collect();
    if kinds.is_empty() {
        return Ok(Default::default());
    }
    kinds.insert(Kind::Pod);
    let mut cache = Cache::new(store, kinds.into_iter().map(Interest::all).collect());
    loop {
        let (mut pods, mut waiting) = (BTreeSet::new(), BTreeMap::new());
        for key in workloads {
            // A deleted workload is not waited for.
            let Some(stored) = cache.get(key) else { continue };
            let Ok(Resource::Workload(workload)) = Resource::read(key, &stored.value) else { continue };
            let own = cache.objects().filter(|pod| {
                pod.key.kind == Kind::Pod
                    && pod.key.namespace == key.namespace
                    && workload.may_own(&pod.value)
            });
            let own: Vec<&Stored> = own.collect();
            if !workload.is_complete(key.kind, &stored.value) {
                let why = own.iter().find_map(|pod| Some(format!("{}: {}", pod.key, why_not_running(pod)?)));
                waiting
                    .insert(key.clone(), why.unwrap_or_else(|| "not all of its pods exist yet".to_owned()));
            }
            pods.extend(own.into_iter().map(|pod| pod.key.clone()));
        }
        if (cache.is_complete() && waiting.is_empty()) || !changed(&mut cache, deadline).await? {
            return Ok((pods, waiting));
        }
    }
}

/// Waits until the EndpointSlices that Services and pods imply are in the store, where their controller makes them;
/// returns the position of the last of them, if there are any. Stops waiting in time, whether or not they are.
///
/// # Errors
/// The store failed.
pub async fn wait_for_slices(store: &dyn Store, timeout: Duration) -> Result<Option<Position>, StoreError> {
    let deadline = Instant::now() + timeout;
    let kinds = [Kind::Service, Kind::Pod, Kind::EndpointSlice];
    let mut cache = Cache::new(store, kinds.map(Interest::all).to_vec());
    loop {
        let mut missing = implied_slices(cache.objects().map(|stored| (&stored.key, &stored.value)));
        let (mut latest, mut left_over) = (None, false);
        for slice in cache.objects().filter(|stored| is_implied(&stored.value)) {
            latest = latest.max(Some(slice.position));
            left_over |= missing.remove(&slice.key).as_ref() != Some(&slice.value);
        }
        let is_done = cache.is_complete() && missing.is_empty() && !left_over;
        if is_done || !changed(&mut cache, deadline).await? {
            return Ok(latest);
        }
    }
}

/// Why a pod does not run; `None` if it runs or has ended.
fn why_not_running(pod: &Stored) -> Option<String> {
    let status = &pod.value["status"];
    let done = ["Running", "Succeeded", "Failed"].contains(&status["phase"].as_str().unwrap_or_default());
    let why = status["message"].as_str().unwrap_or("no node has started it yet");
    (!done).then(|| why.to_owned())
}

/// Waits for a change; returns whether there was one in time. What is stored already always arrives.
async fn changed(cache: &mut Cache, deadline: Instant) -> Result<bool, StoreError> {
    // Even without time to wait, what is stored already must be known.
    let is_complete = cache.is_complete();
    let deadline = if is_complete { deadline } else { deadline.max(Instant::now() + ANSWER_TIMEOUT) };
    match timeout_at(deadline, cache.changed()).await {
        Ok(result) => result.map(|()| true),
        Err(_) if is_complete => Ok(false),
        Err(_) => Err(StoreError::Unavailable("it does not answer".to_owned())),
    }
}

fn report_of<'a>(cache: &'a Cache, node: &str) -> Option<(&'a Stored, NodeReport)> {
    let stored = cache.get(&Key::global(Kind::NodeReport, node))?;
    match Resource::read(&stored.key, &stored.value) {
        Ok(Resource::NodeReport(report)) => Some((stored, report)),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Embedded;

    const NOW: &str = "2026-01-01T12:00:00Z";

    #[cfg(unix)]
    #[tokio::test]
    async fn a_store_that_does_not_answer_a_request_for_a_report_ends_no_wait() {
        let away = crate::rpc::Remote::unix(std::path::Path::new("/dev/null/s.sock"));
        let key = Key::global(Kind::NodeReport, "n");
        ask(&away, Write::Update(key, Value::Null, crate::Version::new("1"))).await.unwrap();
    }

    #[test]
    fn stale_reports_are_recognised() {
        let table = [
            ("2026-01-01T12:00:00Z", "", None, ""),
            ("2026-01-01T11:57:00Z", "", None, ""),
            ("2026-01-01T11:56:59Z", "", None, "181 seconds old"),
            ("2025-01-01T12:00:00Z", "", None, "seconds old"),
            ("2026-01-01T12:03:00Z", "", None, ""),
            ("2026-01-01T12:03:01Z", "", None, "181 seconds in the future"),
            ("", "", None, "no time"),
            ("yesterday", "", None, "no time"),
            (NOW, "a", Some("a"), ""),
            (NOW, "a", Some("b"), "before its last start"),
            (NOW, "a", None, ""),
            (NOW, "", Some("b"), ""),
        ];
        for (time, report_boot, node_boot, expected) in table {
            let report = NodeStatus {
                time: time.to_owned(),
                boot_id: report_boot.to_owned(),
                heartbeat_seconds: 60,
                ..NodeStatus::default()
            };
            let why = stale(&report, node_boot, NOW.parse().unwrap());
            assert_eq!(why.is_none(), expected.is_empty(), "{time} {report_boot} {node_boot:?}: {why:?}");
            assert!(why.unwrap_or_default().contains(expected), "{time}");
        }
    }

    /// A report of a node whose agent is gone does not count, whatever it says.
    #[tokio::test]
    async fn a_stale_report_is_never_in_force() {
        let store = Embedded::in_memory().unwrap();
        let node = json!({"metadata": {"name": "n"}, "status": {"nodeInfo": {"bootID": "second"}}});
        let node = store.create(&Key::global(Kind::Node, "n"), node).await.unwrap();
        let positions: Positions = [(Kind::Node, node.position)].into_iter().collect();
        let now = Timestamp::now();
        let minutes_ago =
            |minutes: i64| Timestamp::from_second(now.as_second() - 60 * minutes).unwrap().to_string();
        let key = Key::global(Kind::NodeReport, "n");
        for (time, boot, expected) in [
            (minutes_ago(10), "second", "seconds old"),
            (minutes_ago(0), "first", "before its last start"),
            (minutes_ago(0), "second", ""),
        ] {
            let status = json!({"os": "linux", "endpoints": 0, "positions": positions, "time": time, "bootId": boot, "heartbeatSeconds": 60});
            let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "n"}, "status": status});
            let _ = store.delete(&key, None).await;
            store.create(&key, report).await.unwrap();
            let result = wait_in_force(&store, &positions, Duration::ZERO).await;
            assert_eq!(result.is_ok(), expected.is_empty(), "{result:?}");
            assert!(expected.is_empty() || result.unwrap_err().to_string().contains(expected));
        }
    }

    /// Only the nodes that are asked for count, and only their reports are written.
    #[tokio::test]
    async fn other_nodes_are_not_waited_for() {
        let store = Embedded::in_memory().unwrap();
        let report = |node: &str, position: u64| {
            let positions: Positions = [(Kind::Pod, Position(position))].into_iter().collect();
            let status = json!({"os": "linux", "endpoints": 0, "positions": positions,
                "time": Timestamp::now().to_string(), "heartbeatSeconds": 60});
            json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": node}, "status": status})
        };
        for number in 0..9 {
            store.create(&Key::namespaced(Kind::Pod, "n", format!("p{number}")), json!({})).await.unwrap();
        }
        for (node, position) in [("asked", 9), ("other", 1)] {
            store.create(&Key::global(Kind::Node, node), json!({"metadata": {"name": node}})).await.unwrap();
            store.create(&Key::global(Kind::NodeReport, node), report(node, position)).await.unwrap();
        }
        let other = store.get(&Key::global(Kind::NodeReport, "other")).await.unwrap();
        let wanted = [(Kind::Pod, Position(9))].into_iter().collect();
        let nodes = ["asked".to_owned()].into_iter().collect();
        let reports = wait_for_reports(&store, Some(&nodes), &wanted, Duration::ZERO, |_| true).await;
        assert_eq!(reports.unwrap().into_keys().collect::<Vec<_>>(), ["asked"]);
        assert_eq!(store.get(&Key::global(Kind::NodeReport, "other")).await.unwrap(), other);
        let all = wait_for_reports(&store, None, &wanted, Duration::ZERO, |_| true).await;
        assert!(matches!(all, Err(NotInForce::Late { nodes, .. }) if nodes == "other"));
    }

    /// Whoever waits asks once, and several requests become one.
    #[tokio::test]
    async fn whoever_waits_asks_for_reports() {
        let store = Embedded::in_memory().unwrap();
        store.create(&Key::global(Kind::Node, "n"), json!({"metadata": {"name": "n"}})).await.unwrap();
        let key = Key::global(Kind::NodeReport, "n");
        let time = Timestamp::now().to_string();
        let status =
            json!({"os": "linux", "endpoints": 0, "positions": {}, "time": time, "heartbeatSeconds": 60});
        let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "n"}, "status": status});
        store.create(&key, report).await.unwrap();
        let at = |pairs: &[(Kind, u64)]| -> Positions {
            pairs.iter().map(|(kind, position)| (*kind, Position(*position))).collect()
        };
        let mut versions = Vec::new();
        for (wanted, expected) in [
            (at(&[(Kind::Pod, 7)]), at(&[(Kind::Pod, 7)])),
            (at(&[(Kind::Pod, 5)]), at(&[(Kind::Pod, 7)])),
            (at(&[(Kind::Tier, 3)]), at(&[(Kind::Pod, 7), (Kind::Tier, 3)])),
        ] {
            let late = wait_in_force(&store, &wanted, Duration::ZERO).await;
            assert!(matches!(late, Err(NotInForce::Late { .. })), "{late:?}");
            let stored = store.get(&key).await.unwrap().unwrap();
            let Ok(Resource::NodeReport(report)) = Resource::read(&key, &stored.value) else {
                panic!("{stored:?}")
            };
            assert_eq!(report.requested(), expected);
            versions.push(stored.version);
        }
        assert!(versions[0] == versions[1] && versions[1] != versions[2], "one write for each new request");
    }
}
