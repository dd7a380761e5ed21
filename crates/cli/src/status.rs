//! `tortie status`: the nodes, what is in force there, and what is wrong, on one screen.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::SystemTime;

use serde_json::Value;
use tortie_api::Kind;
use tortie_api::report::{NodeReport, NodeStatus, ReportedCondition};
use tortie_controllers::{CALICO_CONTROLLERS, NAMESPACES, ready_controllers};
use tortie_dataplane::{Reason, Severity};
use tortie_deploy::DAEMON_SET;
use tortie_store::Store;
use tortie_store::kubernetes::Kubernetes;

use crate::install::cluster::{ClusterArguments, get};
use crate::install::rollout::{Rollout, problem};
use crate::output;
use crate::store::Purpose;

/// The maximum number of problems on the screen, and of notes.
const MAX_LINES: usize = 20;
/// The maximum number of nodes on the screen.
const MAX_NODES: usize = 30;
/// The column of the screen that says whether policy is in force.
const IN_FORCE: usize = 6;
/// The column that says whether pods of the node and those of other nodes reach each other.
#[cfg(test)]
const CONNECTED: usize = 7;
/// How many heartbeats a report may be old.
const STALE_HEARTBEATS: u64 = 3;

#[derive(clap::Args)]
pub(crate) struct Status {
    #[command(flatten)]
    cluster: ClusterArguments,
}

/// What the cluster says.
#[derive(Debug, Default)]
struct Observed {
    /// Absent if the datastore is no Kubernetes API, or a lab's, whose agents no DaemonSet has.
    rollout: Option<Rollout>,
    nodes: Vec<Value>,
    reports: Vec<Value>,
    pools: Vec<Value>,
    /// The Deployments of Calico's kube-controllers, each with its namespace.
    calico_controllers: Vec<(&'static str, Option<Value>)>,
    controllers_configuration: Option<Value>,
}

/// A screen.
#[derive(Debug, Default, PartialEq, Eq)]
struct Screen {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    /// The nodes that have no row.
    more_nodes: Option<String>,
    problems: Vec<String>,
    /// What needs attention, and does not keep policy from being in force.
    notes: Vec<String>,
}

impl Status {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        let store = self.cluster.store()?;
        let screen = crate::runtime()?.block_on(async {
            let cluster = match store.lab() {
                Some(_) => None,
                None => store.open_kubernetes(Purpose::Read).await?,
            };
            let observed = match &cluster {
                Some(cluster) => read(&**cluster, Some(cluster)).await?,
                None => read(&*store.open().await?, None).await?,
            };
            anyhow::Ok(screen(&observed, now()))
        })?;
        screen.head.iter().for_each(|line| output::line(line));
        if !screen.rows.is_empty() {
            output::line("");
            output::columns(&screen.rows);
            screen.more_nodes.iter().for_each(|line| output::line(line));
        }
        print(&screen.problems);
        print(&screen.notes);
        Ok(if screen.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}

/// Prints a paragraph of lines.
fn print(lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    output::line("");
    lines.iter().take(MAX_LINES).for_each(|line| output::line(line));
    if lines.len() > MAX_LINES {
        let more = lines.len() - MAX_LINES;
        output::line(&format!("and {more} more: tortie get nodereports -o json"));
    }
}

/// Reads the datastore, and of a Kubernetes API also what an installation has there.
async fn read(store: &dyn Store, cluster: Option<&Kubernetes>) -> anyhow::Result<Observed> {
    let mut observed = Observed::default();
    if let Some(cluster) = cluster {
        for namespace in NAMESPACES {
            let path = format!("/apis/apps/v1/namespaces/{namespace}/deployments/{CALICO_CONTROLLERS}");
            observed.calico_controllers.push((namespace, get(cluster, &path).await?));
        }
        let configuration = format!("/apis/{}/kubecontrollersconfigurations/default", cluster.group().await?);
        observed.controllers_configuration = get(cluster, &configuration).await?;
        observed.rollout = Some(Rollout::read(cluster, DAEMON_SET).await?);
    }
    for (kind, objects) in [
        (Kind::Node, &mut observed.nodes),
        (Kind::NodeReport, &mut observed.reports),
        (Kind::IpPool, &mut observed.pools),
    ] {
        objects.extend(crate::store::list(store, kind).await?.into_iter().map(|stored| stored.value));
    }
    Ok(observed)
}

/// The nodes on which Tortie's policy is not known to be in force, with the reasons.
pub(crate) async fn nodes_without_policy(cluster: &Kubernetes) -> anyhow::Result<Vec<String>> {
    Ok(without_policy(&read(cluster, Some(cluster)).await?, now()))
}

fn without_policy(cluster: &Observed, now: i64) -> Vec<String> {
    let reports = reports(cluster);
    let mut without = Vec::new();
    for node in &cluster.nodes {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let report = reports.get(name);
        let (row, problems) = of_node(node, name, cluster.rollout.as_ref(), report, now);
        let all = report.into_iter().flat_map(|report| &report.conditions);
        let unenforced = all.filter(|one| leaves_out(&one.reason));
        let unenforced: Vec<String> =
            unenforced.map(|one| format!("node {name}: {}", output::condition(one))).collect();
        if row.get(IN_FORCE).is_none_or(|in_force| in_force != "yes") || !unenforced.is_empty() {
            without.push(format!("node {name}: not all policy is known to be in force"));
            without.extend(problems);
            without.extend(unenforced);
        }
    }
    without
}

/// Returns whether a condition says that policy is not enforced, or that pods get no network. Fields of FelixConfiguration that Calico's own programs write
/// have no effect here, and are none of them.
fn leaves_out(reason: &str) -> bool {
    use Reason::{
        CniConfigNotWritten, HostEndpointNotEnforced, KindForbidden, NotUnderstood, PolicyBypassed,
        PoolMissing,
    };
    let named = [
        CniConfigNotWritten,
        HostEndpointNotEnforced,
        KindForbidden,
        NotUnderstood,
        PolicyBypassed,
        PoolMissing,
    ];
    named.iter().any(|one| one.to_string() == reason)
}

/// The last report of each node.
fn reports(cluster: &Observed) -> BTreeMap<String, NodeStatus> {
    let reports = cluster.reports.iter();
    let reports = reports.filter_map(|report| serde_json::from_value::<NodeReport>(report.clone()).ok());
    reports.map(|report| (report.metadata.name, report.status)).collect()
}

/// The seconds since 1970.
fn now() -> i64 {
    let elapsed = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_secs());
    i64::try_from(elapsed).unwrap_or(i64::MAX)
}

fn screen(cluster: &Observed, now: i64) -> Screen {
    let mut screen = Screen::default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pools: Vec<String> = cluster.pools.iter().map(|pool| text(&pool["spec"]["cidr"])).collect();
    let reports = reports(cluster);
    screen.head.push(format!("agents: {}", agents(cluster, &reports)));
    screen
        .head
        .push(format!("pools:  {}", if pools.is_empty() { "none".to_owned() } else { pools.join(", ") }));
    if pools.is_empty() {
        screen.problems.push("the cluster has no IPPool, so pods get no addresses".to_owned());
    }
    let is_installed = cluster.rollout.as_ref().is_none_or(|rollout| rollout.set.is_some());
    if !is_installed && reports.is_empty() {
        screen.problems.push("Tortie is not installed: tortie install".to_owned());
    }
    if !cluster.nodes.is_empty() {
        let names =
            ["NODE", "READY", "AGENT", "OS", "VERSION", "PODS", "IN FORCE", "CONNECTED", "CONDITIONS"];
        screen.rows.push(names.map(str::to_owned).to_vec());
    }
    let mut rows = Vec::new();
    for node in &cluster.nodes {
        let name = text(&node["metadata"]["name"]);
        let report = reports.get(&name);
        let (row, problems) = of_node(node, &name, cluster.rollout.as_ref(), report, now);
        let is_well = problems.is_empty() && report.is_some_and(|report| report.conditions.is_empty());
        rows.push((row, is_well));
        screen.problems.extend(problems);
        screen.problems.extend(conditions(&name, report, |severity| severity != Severity::Information));
        screen.notes.extend(conditions(&name, report, |severity| severity == Severity::Information));
    }
    let configuration = cluster.controllers_configuration.as_ref();
    let calico = ready_controllers(&cluster.calico_controllers, configuration, true);
    screen.notes.extend(calico.map(|calico| calico.to_string()));
    let (rows, more) = of_nodes_on_screen(rows);
    screen.rows.extend(rows);
    screen.more_nodes = more;
    let pods = cluster.rollout.iter().flat_map(|rollout| &rollout.pods);
    let unscheduled = pods.filter(|pod| pod["spec"]["nodeName"].is_null());
    screen.problems.extend(unscheduled.filter_map(problem));
    let known = |name: &String| cluster.nodes.iter().any(|node| node["metadata"]["name"] == **name);
    for name in reports.keys().filter(|name| !known(name)) {
        screen.problems.push(format!(
            "node {name}: it has a NodeReport and does not exist: tortie delete nodereport {name}"
        ));
    }
    screen
}

/// How many agents run, by the DaemonSet, or by their reports where there is none.
fn agents(cluster: &Observed, reports: &BTreeMap<String, NodeStatus>) -> String {
    match &cluster.rollout {
        Some(rollout) if rollout.set.is_some() || reports.is_empty() => rollout.progress(),
        _ => {
            let named = cluster.nodes.iter().filter_map(|node| node["metadata"]["name"].as_str());
            let reporting = named.filter(|name| reports.contains_key(*name)).count();
            format!("{reporting} of {} nodes have reported", cluster.nodes.len())
        }
    }
}

/// The rows of nodes that one screen has space for, and a line about the others. Of many nodes, those that are not well come first.
fn of_nodes_on_screen(mut rows: Vec<(Vec<String>, bool)>) -> (Vec<Vec<String>>, Option<String>) {
    let mut more = None;
    if rows.len() > MAX_NODES {
        rows.sort_by_key(|(_, is_well)| *is_well);
        let others = rows.split_off(MAX_NODES);
        let well = others.iter().filter(|(_, is_well)| *is_well).count();
        more = Some(format!(
            "and {} more nodes, of which {well} are well: tortie get nodereports -o json",
            others.len()
        ));
    }
    (rows.into_iter().map(|(row, _)| row).collect(), more)
}

/// The row of a node, and its problems.
fn of_node(
    node: &Value,
    name: &str,
    rollout: Option<&Rollout>,
    report: Option<&NodeStatus>,
    now: i64,
) -> (Vec<String>, Vec<String>) {
    let mut problems = Vec::new();
    let ready =
        node["status"]["conditions"].as_array().into_iter().flatten().find(|one| one["type"] == "Ready");
    let is_ready = match ready.map(|one| &one["status"]) {
        Some(status) if status == "True" => "yes",
        // Only a Kubernetes API has what kubelets report.
        None if rollout.is_none() => "-",
        _ => {
            let message =
                ready.and_then(|one| one["message"].as_str()).unwrap_or("its kubelet has not reported");
            problems.push(format!("node {name}: not ready: {message}"));
            "no"
        }
    };
    let os = node["metadata"]["labels"]["kubernetes.io/os"].as_str();
    let os = os.or(report.map(|report| report.os.as_str())).unwrap_or("?");
    let pod = rollout.and_then(|rollout| rollout.pods.iter().find(|pod| pod["spec"]["nodeName"] == name));
    let pod_problem = pod.and_then(problem);
    let has_problem = pod_problem.is_some();
    problems.extend(pod_problem);
    if report.is_none() {
        let runs_none = rollout.is_some() && pod.is_none();
        let why = if runs_none { "no agent runs there" } else { "its agent has not reported" };
        problems.push(format!("node {name}: {why}"));
    }
    let age = report.and_then(|report| Some(now - report.time.parse::<jiff::Timestamp>().ok()?.as_second()));
    let boot = node["status"]["nodeInfo"]["bootID"].as_str().unwrap_or_default();
    let in_force = match report {
        None => "unknown",
        Some(report) if !report.boot_id.is_empty() && !boot.is_empty() && report.boot_id != boot => {
            problems.push(format!("node {name}: it has restarted, and its agent has not reported since"));
            "unknown"
        }
        Some(report)
            if age.is_none_or(|age| age.unsigned_abs() > STALE_HEARTBEATS * report.heartbeat_seconds) =>
        {
            let age = age.map_or("without a time".to_owned(), |age| format!("{age} s old"));
            problems.push(format!("node {name}: its report is {age}; does its agent run?"));
            "unknown"
        }
        Some(report)
            if report.conditions.iter().any(|one| Severity::of(&one.reason) == Severity::Failure) =>
        {
            "no"
        }
        Some(_) => "yes",
    };
    let agent = match pod {
        Some(_) if has_problem => "not ready",
        Some(_) => "ready",
        None if in_force != "unknown" => "reports",
        None => "-",
    };
    let connected = report.filter(|_| in_force != "unknown").map_or("unknown", connected);
    let count = report.map_or(0, |report| report.conditions.len() + report.more);
    let of_report = |value: fn(&NodeStatus) -> String| report.map_or("-".to_owned(), value);
    let row = vec![
        name.to_owned(),
        is_ready.to_owned(),
        agent.to_owned(),
        os.to_owned(),
        of_report(|report| if report.version.is_empty() { "?".to_owned() } else { report.version.clone() }),
        of_report(|report| report.endpoints.to_string()),
        in_force.to_owned(),
        connected.to_owned(),
        count.to_string(),
    ];
    (row, problems)
}

/// The word for a node whose pods and those of others reach each other, or do not, as far as its report says. Reports list failures first,
/// and then what is out of reach.
fn connected(report: &NodeStatus) -> &'static str {
    let is_failure = |one: &ReportedCondition| Severity::of(&one.reason) == Severity::Failure;
    match () {
        () if report.conditions.iter().any(|one| Reason::named_disconnects(&one.reason)) => "no",
        () if report.more > 0 && report.conditions.iter().all(is_failure) => "unknown",
        () => "yes",
    }
}

/// The conditions of a node with such a severity.
fn conditions(name: &str, report: Option<&NodeStatus>, is_wanted: fn(Severity) -> bool) -> Vec<String> {
    let all = report.into_iter().flat_map(|report| &report.conditions);
    let wanted = all.filter(|condition| is_wanted(Severity::of(&condition.reason)));
    wanted.map(|condition| format!("node {name}: {}", output::condition(condition))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn report(age: i64, boot: &str, reasons: &[&str]) -> Value {
        let time = jiff::Timestamp::from_second(NOW - age).unwrap().to_string();
        let conditions: Vec<Value> =
            reasons.iter().map(|reason| json!({"reason": reason, "message": "a message"})).collect();
        json!({"apiVersion": "tortie.io/v1", "kind": "NodeReport", "metadata": {"name": "one"}, "status": {
            "os": "linux", "version": "0.1.0", "time": time, "heartbeatSeconds": 60, "bootId": boot, "endpoints": 3,
            "conditions": conditions,
        }})
    }

    fn cluster(report: Option<Value>, ready: &str) -> Observed {
        let node = json!({
            "metadata": {"name": "one", "labels": {"kubernetes.io/os": "linux"}},
            "status": {"nodeInfo": {"bootID": "b"}, "conditions": [{"type": "Ready", "status": ready, "message": "cni"}]},
        });
        let pod = json!({
            "metadata": {"name": "p"}, "spec": {"nodeName": "one"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        });
        let set = json!({"metadata": {"generation": 1}, "status": {
            "desiredNumberScheduled": 1, "updatedNumberScheduled": 1, "numberReady": 1, "observedGeneration": 1,
        }});
        Observed {
            rollout: Some(Rollout { set: Some(set), pods: vec![pod] }),
            nodes: vec![node],
            reports: report.into_iter().collect(),
            pools: vec![json!({"spec": {"cidr": "10.244.0.0/16"}})],
            ..Observed::default()
        }
    }

    #[test]
    fn ready_controllers_of_calico_are_a_note() {
        let mut cluster = cluster(Some(report(10, "b", &[])), "True");
        let env = json!([{"name": "DATASTORE_TYPE", "value": "kubernetes"}]);
        let deployment = |ready: u64| {
            let containers = json!([{"name": "c", "env": env}]);
            json!({"spec": {"replicas": 1, "template": {"spec": {"containers": containers}}}, "status": {"readyReplicas": ready}})
        };
        cluster.calico_controllers = vec![("calico-system", Some(deployment(1))), ("kube-system", None)];
        let ready = screen(&cluster, NOW);
        assert!(ready.problems.is_empty() && ready.notes.len() == 1, "{ready:?}");
        let expected = "Deployment calico-system/calico-kube-controllers of Calico is ready";
        assert!(ready.notes[0].starts_with(expected), "{}", ready.notes[0]);
        cluster.calico_controllers[0].1 = Some(deployment(0));
        assert!(screen(&cluster, NOW).notes.is_empty());
    }

    #[test]
    fn a_node_is_in_force_only_by_a_current_report_without_failures() {
        for (report_of, ready, in_force, connected, problem) in [
            (Some(report(10, "b", &[])), "True", "yes", "yes", ""),
            (Some(report(10, "b", &["ForeignChainMayDrop"])), "True", "yes", "yes", ""),
            (Some(report(10, "b", &["FieldNotSupported"])), "True", "yes", "yes", "FieldNotSupported"),
            (Some(report(10, "b", &["KindForbidden"])), "True", "yes", "yes", "KindForbidden"),
            (Some(report(10, "b", &["PolicyNotInForce"])), "True", "no", "yes", "PolicyNotInForce"),
            // Policy is in force on a node that reaches no other.
            (Some(report(10, "b", &["ForeignVxlanLink"])), "True", "yes", "no", "ForeignVxlanLink"),
            (Some(report(10, "b", &["BlockUnreachable"])), "True", "yes", "no", "BlockUnreachable"),
            (Some(report(181, "b", &["RouteTaken"])), "True", "unknown", "unknown", "181 s old"),
            (Some(report(181, "b", &[])), "True", "unknown", "unknown", "181 s old"),
            (Some(report(-181, "b", &[])), "True", "unknown", "unknown", "-181 s old"),
            (Some(report(10, "a", &[])), "True", "unknown", "unknown", "has restarted"),
            (Some(report(10, "b", &[])), "False", "yes", "yes", "not ready: cni"),
            (None, "True", "unknown", "unknown", "its agent has not reported"),
        ] {
            let screen = screen(&cluster(report_of.clone(), ready), NOW);
            assert_eq!(screen.rows[1][IN_FORCE], in_force, "{report_of:?}");
            assert_eq!(screen.rows[1][CONNECTED], connected, "{report_of:?}");
            let without = without_policy(&cluster(report_of.clone(), ready), NOW);
            let is_whole = in_force == "yes" && problem != "KindForbidden";
            assert_eq!(without.is_empty(), is_whole, "{report_of:?}: {without:?}");
            let problems = screen.problems.join("\n");
            assert!(problems.contains(problem) && problems.is_empty() == problem.is_empty(), "{problems}");
        }
    }

    /// A report that leaves conditions out lists what is out of reach after the failures.
    #[test]
    fn a_report_of_failures_only_does_not_say_that_a_node_is_connected() {
        for (reasons, more, expected) in [
            (&["PolicyNotInForce"][..], 0, "yes"),
            (&["PolicyNotInForce"], 3, "unknown"),
            (&["PolicyNotInForce", "CalicoLeftover"], 3, "yes"),
            (&["PolicyNotInForce", "RouteTaken"], 3, "no"),
        ] {
            let mut report = report(10, "b", reasons);
            report["status"]["more"] = json!(more);
            let screen = screen(&cluster(Some(report), "True"), NOW);
            assert_eq!(screen.rows[1][CONNECTED], expected, "{reasons:?}");
        }
    }

    #[test]
    fn a_condition_that_keeps_nothing_from_being_in_force_is_a_note() {
        let noted = screen(
            &cluster(Some(report(10, "b", &["ForeignChainMayDrop", "PolicyNotInForce"])), "True"),
            NOW,
        );
        assert_eq!(noted.notes, ["node one: ForeignChainMayDrop: a message"]);
        assert_eq!(noted.problems, ["node one: PolicyNotInForce: a message"]);
    }

    #[test]
    fn of_many_nodes_the_screen_has_those_that_are_not_well() {
        let rows = |well: usize, others: usize| -> Vec<(Vec<String>, bool)> {
            let numbered = |word: &'static str, is_well| {
                move |number: usize| (vec![format!("{word}-{number}")], is_well)
            };
            (0..well).map(numbered("well", true)).chain((0..others).map(numbered("other", false))).collect()
        };
        let (few, more) = of_nodes_on_screen(rows(MAX_NODES - 1, 1));
        assert_eq!((few.len(), few[0][0].as_str(), more), (MAX_NODES, "well-0", None));
        let (many, more) = of_nodes_on_screen(rows(100, 2));
        let names: Vec<&str> = many.iter().map(|row| row[0].as_str()).take(3).collect();
        assert_eq!((many.len(), names), (MAX_NODES, vec!["other-0", "other-1", "well-0"]));
        assert_eq!(more.unwrap(), "and 72 more nodes, of which 72 are well: tortie get nodereports -o json");
        let (_, more) = of_nodes_on_screen(rows(10, 100));
        assert!(more.unwrap().starts_with("and 80 more nodes, of which 10 are well"));
    }

    #[test]
    fn a_node_is_well_only_without_problems_and_conditions() {
        for (report_of, is_well) in [
            (Some(report(10, "b", &[])), true),
            (Some(report(10, "b", &["ForeignChainMayDrop"])), false),
            (Some(report(181, "b", &[])), false),
            (None, false),
        ] {
            let mut cluster = cluster(report_of.clone(), "True");
            // The other nodes have no report.
            let others = (0..MAX_NODES)
                .map(|number| json!({"metadata": {"name": format!("other-{number}")}, "status": {}}));
            cluster.nodes.extend(others);
            let screen = screen(&cluster, NOW);
            let more = screen.more_nodes.unwrap();
            assert!(
                more.contains(&format!("and 1 more nodes, of which {} are well", usize::from(is_well))),
                "{report_of:?}: {more}"
            );
        }
    }

    #[test]
    fn what_is_not_installed_is_named() {
        let empty = Observed { rollout: Some(Rollout::default()), ..Observed::default() };
        let shown = screen(&empty, NOW);
        assert!(shown.problems.iter().any(|problem| problem.contains("not installed")));
        assert!(shown.problems.iter().any(|problem| problem.contains("no IPPool")));
        // Other datastores have no DaemonSet, and agents that no DaemonSet has report, too.
        let others = [None, Some(Rollout::default())];
        for (rollout, reports) in others.into_iter().zip([vec![], vec![report(10, "b", &[])]]) {
            let shown = screen(&Observed { rollout, reports, ..cluster(None, "True") }, NOW);
            assert!(!shown.problems.iter().any(|problem| problem.contains("not installed")), "{shown:?}");
        }
    }
}
