//! Waits until writes are in force on the nodes, by their reports (policy decision 29).

use std::collections::BTreeMap;
use std::time::Duration;

use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Position, Positions, Resource, is_reserved_label};

use crate::{Cache, Interest, Scope, Store, StoreError, Stored, is_of};

/// How long to wait for what is stored already.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

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
    wait_for_reports(store, timeout, |report| report.positions.reach(positions)).await
}

/// Waits until the report of every node fulfils the condition; returns the last report of each.
///
/// # Errors
/// A node had no such report in time, or the store failed.
pub async fn wait_for_reports(
    store: &dyn Store,
    timeout: Duration,
    is_such: impl Fn(&NodeStatus) -> bool + Send + Sync,
) -> Result<BTreeMap<String, NodeStatus>, NotInForce> {
    let deadline = Instant::now() + timeout;
    let nodes = store.list(Kind::Node).await?.items.into_iter().map(|node| node.key.name);
    let nodes: Vec<String> = nodes.collect();
    let mut cache = Cache::new(store, vec![Interest::all(Kind::NodeReport)]);
    loop {
        let reports: BTreeMap<String, NodeStatus> =
            nodes.iter().filter_map(|node| Some((node.clone(), report_of(&cache, node)?))).collect();
        let late = nodes.iter().filter(|node| !reports.get(*node).is_some_and(&is_such));
        let late: Vec<&str> = late.map(String::as_str).collect();
        if late.is_empty() {
            return Ok(reports);
        }
        if !changed(&mut cache, deadline).await? {
            return Err(NotInForce::Late { nodes: late.join(", "), seconds: timeout.as_secs(), reports });
        }
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

fn report_of(cache: &Cache, node: &str) -> Option<NodeStatus> {
    let stored = cache.get(&Key::global(Kind::NodeReport, node))?;
    match Resource::read(&stored.key, &stored.value) {
        Ok(Resource::NodeReport(report)) => Some(report.status),
        _ => None,
    }
}
