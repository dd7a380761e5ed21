//! The node's report in the store: what is in force, and what is wrong.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tortie_api::report::{NodeReport, NodeStatus, ReportedCondition};
use tortie_api::{Key, Kind, Metadata};
use tortie_store::{Store, StoreError};

use crate::plane::InForce;

/// How long a report stands before the next one is written.
const INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait after the store failed.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// How many conditions a report lists; the rest is counted.
const MAX_CONDITIONS: usize = 50;

/// Writes reports until the dataplane's thread ends.
pub(crate) async fn run(
    store: Arc<dyn Store>,
    node: String,
    os: &'static str,
    mut in_force: watch::Receiver<Arc<InForce>>,
) {
    let key = Key::global(Kind::NodeReport, &node);
    let mut written = None;
    while in_force.changed().await.is_ok() {
        let status = status(os, &in_force.borrow_and_update());
        if written.as_ref() == Some(&status) {
            continue;
        }
        match write(&*store, &key, &status).await {
            Ok(()) => {
                written = Some(status);
                tokio::time::sleep(INTERVAL).await;
            }
            Err(error) => {
                tracing::warn!(%error, "the node's report could not be written; it is written again");
                in_force.mark_changed();
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }
    }
}

async fn write(store: &dyn Store, key: &Key, status: &NodeStatus) -> Result<(), StoreError> {
    let report = NodeReport {
        api_version: key.kind.api_version().to_owned(),
        kind: key.kind.name().to_owned(),
        metadata: Metadata { name: key.name.clone(), ..Metadata::default() },
        status: status.clone(),
    };
    let value: Value =
        serde_json::to_value(report).map_err(|error| StoreError::Damaged(error.to_string()))?;
    match store.get(key).await? {
        None => store.create(key, value).await.map(drop),
        Some(stored) => store.update(key, value, stored.revision).await.map(drop),
    }
}

fn status(os: &str, in_force: &InForce) -> NodeStatus {
    let node = in_force.report.node.iter().map(|condition| (String::new(), condition));
    let endpoints = in_force.report.endpoints.iter();
    let endpoints = endpoints
        .flat_map(|(id, conditions)| conditions.iter().map(|c| (format!("{}/{}", id.namespace, id.pod), c)));
    let conditions = node.chain(endpoints).map(|(object, condition)| ReportedCondition {
        object,
        reason: condition.reason.to_owned(),
        message: condition.message.clone(),
    });
    let findings = in_force.findings.iter().map(|finding| ReportedCondition {
        object: finding.key.to_string(),
        reason: "NotUnderstood".to_owned(),
        message: finding.problem.clone(),
    });
    let mut conditions: Vec<ReportedCondition> = conditions.chain(findings).collect();
    let more = conditions.len().saturating_sub(MAX_CONDITIONS);
    conditions.truncate(MAX_CONDITIONS);
    NodeStatus {
        os: os.to_owned(),
        revision: in_force.revision,
        endpoints: in_force.endpoints.len(),
        conditions,
        more,
    }
}
