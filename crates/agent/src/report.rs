//! The node's report in the store: what is in force, and which problems there are.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tortie_api::report::{NodeReport, NodeStatus, ObjectRef, ReportedCondition};
use tortie_api::{Key, Kind, Metadata};
use tortie_dataplane::{Reason, Severity};
use tortie_store::backoff::{Backoff, random_seed};
use tortie_store::{Store, StoreError};

use crate::plane::InForce;

/// The minimum interval between reports.
const INTERVAL: Duration = Duration::from_millis(50);
/// The number of reports with nothing but progress that may be written at that rate, and the interval at which one
/// more is allowed: somebody may be waiting for a recent write, but nobody for each step of a steady stream.
const BURST: u32 = 60;
const REFILL: Duration = Duration::from_secs(1);
/// The maximum number of conditions in a report; the rest is counted.
const MAX_CONDITIONS: usize = 50;

/// Writes reports until the dataplane's thread ends. `about` is the constant content.
pub(crate) async fn run(
    store: Arc<dyn Store>,
    node: String,
    about: NodeStatus,
    mut in_force: watch::Receiver<Arc<InForce>>,
) {
    let key = Key::global(Kind::NodeReport, &node);
    let mut backoff = Backoff::new(random_seed());
    let mut written: Option<NodeStatus> = None;
    let mut allowance = Allowance { left: BURST, counted: Instant::now() };
    while in_force.changed().await.is_ok() {
        let status = status(&about, &in_force.borrow_and_update());
        let pause = match &written {
            Some(written) if *written == status => continue,
            Some(written) if written.conditions == status.conditions => allowance.take(Instant::now()).err(),
            _ => None,
        };
        if let Some(pause) = pause {
            // An urgent change may arrive meanwhile.
            if let Ok(Err(_)) = timeout(pause, in_force.changed()).await {
                return;
            }
            in_force.mark_changed();
            continue;
        }
        match write(&*store, &key, &status).await {
            Ok(()) => {
                backoff.succeeded();
                written = Some(status);
                sleep(INTERVAL).await;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot write the node's report; Tortie retries");
                in_force.mark_changed();
                backoff.wait().await;
            }
        }
    }
}

/// Limits the rate of reports with nothing but progress.
struct Allowance {
    left: u32,
    /// The time up to which `left` has been refilled.
    counted: Instant,
}

impl Allowance {
    /// Takes one, or returns the time until one is available.
    fn take(&mut self, now: Instant) -> Result<(), Duration> {
        while self.left < BURST && now >= self.counted + REFILL {
            self.left += 1;
            self.counted += REFILL;
        }
        if self.left == BURST {
            self.counted = now;
        }
        self.left = self.left.checked_sub(1).ok_or((self.counted + REFILL).saturating_duration_since(now))?;
        Ok(())
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
        Some(stored) => store.update(key, value, &stored.version).await.map(drop),
    }
}

/// A kind that cannot be read.
fn unavailable(kind: Kind, error: &StoreError) -> ReportedCondition {
    let name = kind.name();
    let (reason, message) = match error {
        StoreError::KindAbsent(_) => {
            let message =
                format!("the datastore has no kind {name}; install its CustomResourceDefinition to use it");
            (Reason::KindAbsent, message)
        }
        error => {
            // The error names the resource, which may be another one: some kinds are derived.
            let message = format!(
                "the agent cannot read objects of kind {name} ({error}); grant it get, list and watch there"
            );
            (Reason::KindForbidden, message)
        }
    };
    ReportedCondition { object: None, about: Vec::new(), reason: reason.to_string(), message }
}

/// `about` is the constant content.
fn status(about: &NodeStatus, in_force: &InForce) -> NodeStatus {
    let of_object = |key: &Key, reason: Reason, message: &str| ReportedCondition {
        object: Some(key.into()),
        about: Vec::new(),
        reason: reason.to_string(),
        message: message.to_owned(),
    };
    let report = &in_force.report;
    let findings = in_force.findings.iter();
    let mut conditions: Vec<_> =
        findings.map(|finding| of_object(&finding.key, Reason::NotUnderstood, &finding.problem)).collect();
    let unsupported = in_force.unsupported.iter();
    conditions.extend(unsupported.map(|it| of_object(&it.object, it.reason, &it.message)));
    conditions.extend(in_force.unavailable.iter().map(|(kind, error)| unavailable(*kind, error)));
    conditions.extend(report.node.iter().map(|condition| condition.reported(None)));
    for (id, told) in &report.endpoints {
        let pod = Some(ObjectRef::from(id));
        conditions.extend(told.iter().map(|condition| condition.reported(pod.clone())));
    }
    // Failures first, so that a long list omits less urgent conditions.
    conditions.sort_by_key(|condition| Severity::of(&condition.reason) != Severity::Failure);
    let more = conditions.len().saturating_sub(MAX_CONDITIONS);
    conditions.truncate(MAX_CONDITIONS);
    NodeStatus {
        positions: in_force.positions.clone(),
        endpoints: in_force.endpoints.len(),
        conditions,
        more,
        ..about.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_reported_in_a_burst_and_then_once_a_second() {
        let start = Instant::now();
        let mut allowance = Allowance { left: BURST, counted: start };
        // Twenty requests per second for ten minutes.
        let asked = (0..12_000).map(|number| start + INTERVAL * number);
        let written = asked.filter(|now| allowance.take(*now).is_ok()).count();
        assert!((600..=600 + 64).contains(&written), "{written}");
        let after_a_rest = start + Duration::from_secs(3_600);
        let burst =
            (0..BURST).filter(|number| allowance.take(after_a_rest + INTERVAL * *number).is_ok()).count();
        assert_eq!(burst, 60, "a rest gives the burst back");
    }
}
