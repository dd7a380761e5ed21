//! `tortie apply --wait`: waits until the applied objects are in force on every node, and prints the nodes'
//! conditions.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Positions};
use tortie_dataplane::Severity;
use tortie_store::{
    NotInForce, Store, wait_for_labels, wait_for_pods, wait_for_reports, wait_for_slices, wait_for_workloads,
};

use crate::concerned::Policies;
use crate::{output, progress};

/// Waits until the pods among these objects run, and all objects, written at these positions at the latest, are in force
/// on every node that they concern.
/// Prints the nodes' conditions. Fails if this does not happen in time, or if a node has a condition about one of the
/// objects. With `slices`, also waits for the EndpointSlices that Services imply, which somebody else creates. `policies`
/// are the objects, if all of them are policies.
pub(crate) async fn in_force(
    store: &dyn Store,
    (applied, policies): (&[Key], Option<Policies>),
    mut positions: Positions,
    (patience, slices): (Duration, bool),
) -> anyhow::Result<ExitCode> {
    let deadline = Instant::now() + patience;
    let left = || deadline.saturating_duration_since(Instant::now());
    let spinner = progress::spinner("pods start");
    let workloads: Vec<Key> = applied.iter().filter(|key| key.kind.is_workload()).cloned().collect();
    let (made, incomplete) = wait_for_workloads(store, &workloads, left()).await?;
    let pods: BTreeSet<Key> =
        applied.iter().filter(|key| key.kind == Kind::Pod).cloned().chain(made).collect();
    let pods: Vec<Key> = pods.into_iter().collect();
    let mut waiting = match incomplete.is_empty() {
        true => wait_for_pods(store, &pods, left()).await?,
        false => BTreeMap::new(),
    };
    waiting.extend(incomplete);
    for pod in pods.iter().filter(|pod| !waiting.contains_key(pod)) {
        let position = wait_for_labels(store, pod, left()).await?;
        positions.extend(position.map(|position| (Kind::WorkloadEndpoint, position)));
    }
    if slices && (!pods.is_empty() || applied.iter().any(|key| key.kind == Kind::Service)) {
        let position = wait_for_slices(store, left()).await?;
        positions.extend(position.map(|position| (Kind::EndpointSlice, position)));
    }
    spinner.set_message("nodes put it in force");
    let failed = |report: &NodeStatus| {
        report.conditions.iter().any(|condition| Severity::of(&condition.reason) == Severity::Failure)
    };
    // A failure is retried, and may end.
    let nodes = match policies {
        Some(policies) => policies.nodes(store).await?,
        None => None,
    };
    let waited = wait_for_reports(store, nodes.as_ref(), &positions, left(), |report| !failed(report)).await;
    let (reports, late) = match waited {
        Ok(reports) => (reports, None),
        Err(NotInForce::Late { nodes, reports, .. }) => (reports, Some(nodes)),
        Err(error) => return Err(error.into()),
    };
    drop(spinner);
    let (mut about, mut without_effect) = (0, false);
    for (node, report) in &reports {
        for condition in &report.conditions {
            output::error_line(&format!("node {node}: {}", output::condition(condition)));
            if applied.iter().any(|key| condition.concerns(key)) {
                about += 1;
                without_effect |= Severity::of(&condition.reason) == Severity::WithoutEffect;
            }
        }
        if report.more > 0 {
            output::error_line(&format!("node {node}: and {} conditions more", report.more));
        }
    }
    let seconds = patience.as_secs();
    for (pod, why) in &waiting {
        output::error(&format!("after {seconds} seconds {pod} does not run: {why}"));
    }
    match &late {
        Some(nodes) => output::error(&format!("after {seconds} seconds it is not in force on {nodes}")),
        None if without_effect => output::error("not all that was applied is in force"),
        None if nodes.as_ref().is_some_and(BTreeSet::is_empty) => {
            output::line("no pod and no host endpoint is selected")
        }
        None if waiting.is_empty() => {
            output::line(&format!("in force on {}", output::count(reports.len() as u64, "node")))
        }
        None => {}
    }
    match about {
        0 => {}
        1 => output::error("1 of these conditions is about what was applied"),
        _ => output::error(&format!("{about} of these conditions are about what was applied")),
    }
    let good = about == 0 && late.is_none() && waiting.is_empty();
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
