//! Waiting until what was written is in force on the nodes, by their reports (semantics 29).

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use thiserror::Error;
use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Resource};

use crate::{Event, Revision, Store, StoreError};

/// Why it is not known that something is in force.
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
        /// How long was waited.
        seconds: u64,
    },
}

/// Waits until every node has reported that everything up to `revision` is in force; gives the last report of each.
///
/// # Errors
/// A node did not report it in time, or the store failed.
pub async fn wait_in_force(
    store: &dyn Store,
    revision: Revision,
    patience: Duration,
) -> Result<BTreeMap<String, NodeStatus>, NotInForce> {
    let mut reports: BTreeMap<String, Option<NodeStatus>> = BTreeMap::new();
    for node in store.list(Kind::Node).await?.items {
        reports.insert(node.key.name, None);
    }
    let listing = store.list(Kind::NodeReport).await?;
    for stored in listing.items {
        note(&mut reports, &stored.key, &stored.value);
    }
    let mut events = store.watch(&[Kind::NodeReport], listing.revision).await?;
    let deadline = tokio::time::Instant::now() + patience;
    loop {
        let late: Vec<String> = reports
            .iter()
            .filter(|(_, report)| !reached(report.as_ref(), revision))
            .map(|(n, _)| n.clone())
            .collect();
        if late.is_empty() {
            return Ok(reports.into_iter().filter_map(|(node, report)| Some((node, report?))).collect());
        }
        match tokio::time::timeout_at(deadline, events.next()).await {
            Ok(Some(Ok(Event::Put(stored)))) => note(&mut reports, &stored.key, &stored.value),
            Ok(Some(Ok(Event::Deleted { .. }))) => {}
            Ok(Some(Err(error))) => return Err(error.into()),
            Ok(None) => return Err(StoreError::Unavailable("the watch ended".to_owned()).into()),
            Err(_) => return Err(NotInForce::Late { nodes: late.join(", "), seconds: patience.as_secs() }),
        }
    }
}

fn reached(report: Option<&NodeStatus>, revision: Revision) -> bool {
    report.is_some_and(|report| report.revision >= revision)
}

fn note(reports: &mut BTreeMap<String, Option<NodeStatus>>, key: &Key, value: &serde_json::Value) {
    if let (Some(known), Ok(Resource::NodeReport(report))) =
        (reports.get_mut(&key.name), Resource::read(key, value))
    {
        *known = Some(report.status);
    }
}
