//! `tortie apply --wait`: waits until the applied objects are in force on every node, and prints the nodes'
//! conditions.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tortie_api::report::NodeStatus;
use tortie_api::{Key, Kind, Positions};
use tortie_dataplane::Severity;
use tortie_store::{
    Epoch, NotInForce, Store, refuse_other_epoch, wait_for_labels, wait_for_pods, wait_for_reports,
    wait_for_slices, wait_for_workloads,
};

use crate::concerned::Policies;
use crate::{output, progress};

/// Waits until the pods among these objects run, and all objects, written at these positions at the latest, are in force
/// on every node that they concern.
/// Prints the nodes' conditions. Fails if this does not happen in time, if a node has a condition about one of the
/// objects, if pods of a node are out of reach, or if a report leaves conditions out, because they may be about the objects. With `slices`, also waits for the EndpointSlices that Services imply, which somebody else creates. `policies`
/// are the objects, if all of them are policies. Fails if the store is in another epoch than before the first write: what was
/// written may not be in it.
pub(crate) async fn in_force(
    store: &dyn Store,
    (applied, policies): (&[Key], Option<Policies>),
    (mut positions, epoch): (Positions, Option<Epoch>),
    (patience, slices): (Duration, bool),
) -> anyhow::Result<ExitCode> {
    refuse_other_epoch(store, epoch).await?;
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
    refuse_other_epoch(store, epoch).await?;
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
    let incomplete = reports.iter().filter(|(_, report)| may_hide(report, applied));
    let incomplete_reports: Vec<&str> = incomplete.map(|(node, _)| node.as_str()).collect();
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
        None if !incomplete_reports.is_empty() => output::error(&format!(
            "whether all that was applied is in force is unknown on {}: conditions are left out of the reports, and may be about it. Remove the \
             causes of the listed ones, and repeat the command",
            incomplete_reports.join(", ")
        )),
        None if waiting.is_empty() => {
            output::line(&format!("policy in force on {}", output::count(reports.len() as u64, "node")))
        }
        None => {}
    }
    match about {
        0 => {}
        1 => output::error("1 of these conditions is about what was applied"),
        _ => output::error(&format!("{about} of these conditions are about what was applied")),
    }
    let cut_off = out_of_reach(&reports);
    if let Some(cut_off) = &cut_off {
        output::error(cut_off);
    }
    let good = about == 0
        && late.is_none()
        && waiting.is_empty()
        && incomplete_reports.is_empty()
        && cut_off.is_none();
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The nodes whose pods and those of other nodes may not reach each other, with the reasons. Policy is in force nevertheless.
fn out_of_reach(reports: &BTreeMap<String, NodeStatus>) -> Option<String> {
    let of_node = |(node, report): (&String, &NodeStatus)| {
        let all = report.conditions.iter().map(|condition| condition.reason.as_str());
        let reasons: BTreeSet<&str> =
            all.filter(|reason| Severity::of(reason) == Severity::Unreachable).collect();
        let reasons: Vec<&str> = reasons.into_iter().collect();
        (!reasons.is_empty()).then(|| format!("{node} ({})", reasons.join(", ")))
    };
    let nodes: Vec<String> = reports.iter().filter_map(of_node).collect();
    (!nodes.is_empty()).then(|| {
        format!("pods of these nodes and those of other nodes may not reach each other: {}", nodes.join(", "))
    })
}

/// Whether conditions about the objects may be among those that a report leaves out. Agents list those of the node first, and then those of all
/// namespaces in turn: each namespace has the same number of them, unless it has no more.
fn may_hide(report: &NodeStatus, applied: &[Key]) -> bool {
    let mut listed: BTreeMap<&str, usize> = BTreeMap::new();
    for condition in &report.conditions {
        let namespace = condition.object.as_ref().map_or("", |object| &object.namespace);
        *listed.entry(namespace).or_default() += 1;
    }
    let most = listed.iter().filter(|(namespace, _)| !namespace.is_empty()).map(|(_, count)| *count).max();
    // What is about no namespace may concern the objects of all.
    let is_listed = |key: &Key| {
        let count = listed.get(key.namespace.as_str()).copied().unwrap_or_default();
        !key.namespace.is_empty() && most.is_some_and(|most| count + 1 < most)
    };
    report.more > 0 && !applied.iter().all(is_listed)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;
    use tortie_store::Embedded;

    use super::*;

    /// An older copy of the file is served after the write and before the wait. The agent follows it, and reports all of it.
    #[tokio::test]
    async fn an_object_that_the_served_store_does_not_have_is_never_in_force() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        Embedded::init(&path("right"), None).unwrap();
        let store = Embedded::open(&path("right")).unwrap();
        let node = json!({"metadata": {"name": "n"}});
        store.create(&Key::global(Kind::Node, "n"), node).await.unwrap();
        std::fs::copy(path("right"), path("older")).unwrap();
        let epoch = store.epoch().await.unwrap();
        let deny = Key::global(Kind::Namespace, "deny");
        let written = store.create(&deny, json!({"metadata": {"name": "deny"}})).await.unwrap();
        let positions: Positions = [(Kind::Namespace, written.position)].into_iter().collect();

        for (served, expected) in [(store, true), (Embedded::open(&path("older")).unwrap(), false)] {
            let reached = served.barrier(&[Kind::Namespace]).await.unwrap();
            let status = json!({"os": "linux", "endpoints": 0, "positions": reached,
                "time": Timestamp::now().to_string(), "heartbeatSeconds": 60});
            let report = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "n"}, "status": status});
            served.create(&Key::global(Kind::NodeReport, "n"), report).await.unwrap();
            let applied = [deny.clone()];
            let (written, wait) = ((positions.clone(), epoch), (Duration::ZERO, false));
            match in_force(&served, (&applied, None), written, wait).await {
                Ok(_) => assert!(expected, "it is in another history"),
                Err(error) => {
                    assert!(!expected && error.to_string().contains("repeat the command"), "{error}")
                }
            }
        }
    }

    /// A condition about the object may be among those that a report leaves out.
    #[tokio::test]
    async fn a_report_without_all_conditions_proves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        Embedded::init(&path, None).unwrap();
        let store = Embedded::open(&path).unwrap();
        store.create(&Key::global(Kind::Node, "n"), json!({"metadata": {"name": "n"}})).await.unwrap();
        let report = Key::global(Kind::NodeReport, "n");
        for (more, expected) in [(0, ExitCode::SUCCESS), (1, ExitCode::FAILURE)] {
            let reached = store.barrier(&[Kind::Node]).await.unwrap();
            let status = json!({"os": "linux", "endpoints": 0, "positions": reached, "more": more,
                "time": Timestamp::now().to_string(), "heartbeatSeconds": 60});
            let value = json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "n"}, "status": status});
            store.delete(&report, None).await.ok();
            store.create(&report, value).await.unwrap();
            let written = (reached, store.epoch().await.unwrap());
            let applied = [Key::global(Kind::Namespace, "any")];
            let exit = in_force(&store, (&applied, None), written, (Duration::ZERO, false)).await.unwrap();
            assert_eq!(exit, expected);
        }
    }

    /// Policy is in force there, and somebody must know all the same.
    #[test]
    fn nodes_that_reach_no_others_are_named_with_their_reasons() {
        let report = |reasons: &[&str]| {
            let conditions: Vec<_> =
                reasons.iter().map(|reason| json!({"reason": reason, "message": "m"})).collect();
            let status = json!({"os": "linux", "endpoints": 0, "positions": Positions::default(),
                "time": Timestamp::now().to_string(), "heartbeatSeconds": 60, "conditions": conditions});
            serde_json::from_value::<NodeStatus>(status).unwrap()
        };
        let well = ("a".to_owned(), report(&["CalicoLeftover", "FieldNotSupported", "PolicyNotInForce"]));
        assert_eq!(out_of_reach(&[well.clone()].into()), None);
        let cut_off =
            ("b".to_owned(), report(&["RouteTaken", "CalicoLeftover", "RouteTaken", "BlockUnreachable"]));
        let third = ("c".to_owned(), report(&["ForeignVxlanLink"]));
        let line = out_of_reach(&[well, cut_off, third].into()).unwrap();
        assert!(line.ends_with(": b (BlockUnreachable, RouteTaken), c (ForeignVxlanLink)"), "{line}");
    }

    /// Nobody can hide the conditions of other namespaces behind those of his own.
    #[test]
    fn a_namespace_without_further_conditions_is_known() {
        let report = |counts: &[(&str, usize)], more: usize| {
            let conditions = counts.iter().flat_map(|(namespace, count)| {
                let object = json!({"kind": "Pod", "namespace": namespace, "name": "p"});
                let condition = json!({"object": object, "reason": "Any", "message": "m"});
                std::iter::repeat_n(condition, *count)
            });
            let conditions: Vec<_> = conditions.collect();
            let status = json!({"os": "linux", "endpoints": 0, "positions": Positions::default(), "more": more,
                "time": Timestamp::now().to_string(), "heartbeatSeconds": 60, "conditions": conditions});
            serde_json::from_value::<NodeStatus>(status).unwrap()
        };
        let policy = |namespace: &str| Key::namespaced(Kind::NetworkPolicy, namespace, "p");
        let global = Key::global(Kind::GlobalNetworkPolicy, "g");
        let table = [
            (report(&[("noisy", 50)], 0), policy("noisy"), false),
            (report(&[("noisy", 50)], 9), policy("noisy"), true),
            (report(&[("noisy", 50)], 9), policy("calm"), false),
            (report(&[("noisy", 49), ("calm", 1)], 9), policy("calm"), false),
            // The third one of `noisy` comes after the second one of each other namespace.
            (report(&[("noisy", 3), ("calm", 1)], 9), policy("calm"), false),
            (report(&[("noisy", 2), ("calm", 1)], 9), policy("calm"), true),
            (report(&[("", 50)], 9), policy("calm"), true),
            (report(&[("noisy", 50)], 9), global, true),
        ];
        for (report, key, expected) in table {
            assert_eq!(may_hide(&report, std::slice::from_ref(&key)), expected, "{key} {report:?}");
        }
    }
}
