//! Waits until writes are in force on the nodes, by their reports (policy decision 29).

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use thiserror::Error;
use tokio::time::{Instant, timeout_at};
use tortie_api::kubernetes::{implied_slices, is_implied};
use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Resource};

use crate::{Event, Revision, Store, StoreError, Stored, Watch, is_of, pod_of};

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

/// Waits until every node reports that everything up to `revision` is in force; returns the last report of each.
///
/// # Errors
/// A node did not report it in time, or the store failed.
pub async fn wait_in_force(
    store: &dyn Store,
    revision: Revision,
    patience: Duration,
) -> Result<BTreeMap<String, NodeStatus>, NotInForce> {
    wait_for_reports(store, patience, |report| report.revision >= revision).await
}

/// Waits until the report of every node fulfils the condition; returns the last report of each.
///
/// # Errors
/// A node had no such report in time, or the store failed.
pub async fn wait_for_reports(
    store: &dyn Store,
    patience: Duration,
    is_such: impl Fn(&NodeStatus) -> bool + Send + Sync,
) -> Result<BTreeMap<String, NodeStatus>, NotInForce> {
    let mut reports: BTreeMap<String, Option<NodeStatus>> = BTreeMap::new();
    for node in store.list(Kind::Node).await?.items {
        reports.insert(node.key.name, None);
    }
    let listing = store.list(Kind::NodeReport).await?;
    for stored in &listing.items {
        note(&mut reports, stored);
    }
    let mut events = store.watch(&[Kind::NodeReport], listing.revision).await?;
    let deadline = Instant::now() + patience;
    loop {
        let late = reports.iter().filter(|(_, report)| !report.as_ref().is_some_and(&is_such));
        let late: Vec<String> = late.map(|(node, _)| node.clone()).collect();
        let known = reports.iter().filter_map(|(node, report)| Some((node.clone(), report.clone()?)));
        if late.is_empty() {
            return Ok(known.collect());
        }
        match next(&mut events, deadline).await? {
            Some(Event::Put(stored)) => note(&mut reports, &stored),
            Some(Event::Deleted { .. }) => {}
            None => {
                let (nodes, seconds) = (late.join(", "), patience.as_secs());
                return Err(NotInForce::Late { nodes, seconds, reports: known.collect() });
            }
        }
    }
}

/// Waits until the WorkloadEndpoints of a pod have its current labels; returns their last revision, or 0 if the pod
/// has none.
///
/// # Errors
/// They did not change in time, or the store failed.
pub async fn wait_for_labels(
    store: &dyn Store,
    pod: &Key,
    patience: Duration,
) -> Result<Revision, NotInForce> {
    let deadline = Instant::now() + patience;
    let start = store.list(Kind::WorkloadEndpoint).await?.revision;
    let mut events = store.watch(&[Kind::WorkloadEndpoint], start).await?;
    loop {
        let Some(pod) = store.get(pod).await? else { return Ok(0) };
        let mut endpoints = store.list(Kind::WorkloadEndpoint).await?.items;
        endpoints.retain(|endpoint| is_of(endpoint, &pod));
        let labels = |of: &Stored| of.value["metadata"]["labels"].as_object().cloned().unwrap_or_default();
        let Some(late) = endpoints.iter().find(|endpoint| labels(endpoint) != labels(&pod)) else {
            return Ok(endpoints.iter().map(|endpoint| endpoint.revision).max().unwrap_or(0));
        };
        // Nothing can have changed until an event of this pod arrives.
        loop {
            match next(&mut events, deadline).await? {
                Some(Event::Put(endpoint)) if pod_of(&endpoint) != pod.key => {}
                Some(_) => break,
                None => {
                    let node = late.value["spec"]["node"].as_str().unwrap_or_default();
                    let nodes = format!("{node}, which has not taken over the labels of {}", pod.key);
                    let (seconds, reports) = (patience.as_secs(), BTreeMap::new());
                    return Err(NotInForce::Late { nodes, seconds, reports });
                }
            }
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
    patience: Duration,
) -> Result<BTreeMap<Key, String>, StoreError> {
    let deadline = Instant::now() + patience;
    let start = store.list(Kind::Pod).await?.revision;
    let mut events = store.watch(&[Kind::Pod], start).await?;
    let mut waiting = BTreeMap::new();
    for key in pods {
        if let Some(why) = store.get(key).await?.as_ref().and_then(why_not_running) {
            waiting.insert(key.clone(), why);
        }
    }
    while !waiting.is_empty() {
        match next(&mut events, deadline).await? {
            Some(Event::Put(pod)) if waiting.contains_key(&pod.key) => match why_not_running(&pod) {
                Some(why) => drop(waiting.insert(pod.key, why)),
                None => drop(waiting.remove(&pod.key)),
            },
            // A deleted pod is not waited for.
            Some(Event::Deleted { key, .. }) => drop(waiting.remove(&key)),
            Some(_) => {}
            None => break,
        }
    }
    Ok(waiting)
}

/// Waits until the EndpointSlices that Services and pods imply are in the store, where their controller makes them; gives
/// the revision at which the last of them was written. Stops waiting in time, whether or not they are.
///
/// # Errors
/// The store failed.
pub async fn wait_for_slices(store: &dyn Store, patience: Duration) -> Result<Revision, StoreError> {
    let deadline = Instant::now() + patience;
    let kinds = [Kind::Service, Kind::Pod, Kind::EndpointSlice];
    let start = store.list(Kind::Service).await?.revision;
    let mut events = store.watch(&kinds, start).await?;
    loop {
        let mut objects = Vec::new();
        for kind in kinds {
            objects.extend(store.list(kind).await?.items);
        }
        let mut missing = implied_slices(objects.iter().map(|stored| (&stored.key, &stored.value)));
        let (mut latest, mut left_over) = (0, false);
        for slice in objects.iter().filter(|stored| is_implied(&stored.value)) {
            latest = latest.max(slice.revision);
            left_over |= missing.remove(&slice.key).as_ref() != Some(&slice.value);
        }
        if missing.is_empty() && !left_over {
            return Ok(latest);
        }
        if next(&mut events, deadline).await?.is_none() {
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

/// The next event; `None` if none arrives in time.
async fn next(events: &mut Watch, deadline: Instant) -> Result<Option<Event>, StoreError> {
    match timeout_at(deadline, events.next()).await {
        Ok(Some(event)) => event.map(Some),
        Ok(None) => Err(StoreError::Unavailable("the watch ended".to_owned())),
        Err(_) => Ok(None),
    }
}

fn note(reports: &mut BTreeMap<String, Option<NodeStatus>>, stored: &Stored) {
    if let (Some(known), Ok(Resource::NodeReport(report))) =
        (reports.get_mut(&stored.key.name), Resource::read(&stored.key, &stored.value))
    {
        *known = Some(report.status);
    }
}
