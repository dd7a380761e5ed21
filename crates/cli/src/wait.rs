//! `tortie apply --wait`: until what was applied is in force on every node, and what the nodes say of it.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use tortie_api::report::{NodeStatus, ReportedCondition};
use tortie_api::{Key, Kind};
use tortie_dataplane::Severity;
use tortie_store::{
    NotInForce, Revision, Store, wait_for_labels, wait_for_pods, wait_for_reports, wait_for_slices,
};

use crate::output;

/// Waits until the pods among these objects run and all of them, written at `revision` at the latest, are in force, and
/// prints what the nodes say. Fails where that does not happen in time, or where a node says something of one of the
/// objects. With `slices`, somebody makes the EndpointSlices that Services imply; these count as applied, too.
pub(crate) async fn in_force(
    store: &dyn Store,
    applied: &[Key],
    mut revision: Revision,
    (patience, slices): (Duration, bool),
) -> anyhow::Result<ExitCode> {
    let deadline = Instant::now() + patience;
    let left = || deadline.saturating_duration_since(Instant::now());
    let pods: Vec<Key> = applied.iter().filter(|key| key.kind == Kind::Pod).cloned().collect();
    let waiting = wait_for_pods(store, &pods, left()).await?;
    for pod in pods.iter().filter(|pod| !waiting.contains_key(pod)) {
        revision = revision.max(wait_for_labels(store, pod, left()).await?);
    }
    if slices && applied.iter().any(|key| matches!(key.kind, Kind::Pod | Kind::Service)) {
        revision = revision.max(wait_for_slices(store, left()).await?);
    }
    let failed = |report: &NodeStatus| {
        report.conditions.iter().any(|condition| Severity::of(&condition.reason) == Severity::Failure)
    };
    // What failed is tried again, and may pass.
    let waited =
        wait_for_reports(store, left(), |report| report.revision >= revision && !failed(report)).await;
    let (reports, late) = match waited {
        Ok(reports) => (reports, None),
        Err(NotInForce::Late { nodes, reports, .. }) => (reports, Some(nodes)),
        Err(error) => return Err(error.into()),
    };
    let (mut about, mut without_effect) = (0, false);
    for (node, report) in &reports {
        for condition in &report.conditions {
            let ReportedCondition { object, reason, message } = condition;
            let object = if object.is_empty() { String::new() } else { format!("{object}: ") };
            output::error_line(&format!("node {node}: {object}{reason}: {message}"));
            if applied.iter().any(|key| is_about(condition, key)) {
                about += 1;
                without_effect |= Severity::of(reason) == Severity::WithoutEffect;
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

/// Whether the condition is about the object: it is its object, or is named in its message.
fn is_about(condition: &ReportedCondition, key: &Key) -> bool {
    let name = key.to_string();
    let is_its_pod = key.kind == Kind::Pod && condition.object == format!("{}/{}", key.namespace, key.name);
    let goes_on = |rest: &str| {
        let mut rest = rest.chars();
        let in_name =
            |next: Option<char>| next.is_some_and(|next| next.is_ascii_alphanumeric() || next == '-');
        match rest.next() {
            Some('.') => in_name(rest.next()),
            next => in_name(next),
        }
    };
    let is_named = condition.message.match_indices(&name).any(|(at, _)| {
        !goes_on(&condition.message[at + name.len()..])
            && !condition.message[..at].ends_with(|before: char| before.is_ascii_alphanumeric())
    });
    condition.object == name || is_its_pod || is_named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_name_their_objects() {
        let policy = Key::namespaced(Kind::NetworkPolicy, "n", "web");
        let pod = Key::namespaced(Kind::Pod, "n", "p");
        let table = [
            ("NetworkPolicy n/web", "spec.selector: no", &policy, true),
            ("NetworkPolicy n/web2", "spec.selector: no", &policy, false),
            ("n/p", "NetworkPolicy n/web: Ingress rule 1 cannot be", &policy, true),
            ("n/p", "as NetworkPolicy n/web says.", &policy, true),
            ("n/p", "NetworkPolicy n/web.two: Ingress rule 1 cannot be", &policy, false),
            ("n/p", "NetworkPolicy n/web-two: Ingress rule 1 cannot be", &policy, false),
            ("n/p", "KubernetesNetworkPolicy n/web: Ingress rule 1 cannot be", &policy, false),
            ("n/p", "no route leads to the pod", &pod, true),
            ("n/q", "no route leads to the pod", &pod, false),
            ("", "the table is gone", &policy, false),
        ];
        for (object, message, key, expected) in table {
            let condition =
                ReportedCondition { object: object.into(), reason: "R".into(), message: message.into() };
            assert_eq!(is_about(&condition, key), expected, "{object}: {message}");
        }
    }
}
