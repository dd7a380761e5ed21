//! `tortie calico`: stops the components of Calico in a cluster that Tortie has taken over, starts them again, and removes what Calico's
//! operator protects from deletion. Policies, pools and addresses stay.

mod plan;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Subcommand;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tortie_api::report::NodeStatus;
use tortie_controllers::LEASE_NAME;
use tortie_deploy::{DAEMON_SET, DEFINITION_POLICY, NAMESPACE};
use tortie_store::kubernetes::{Kubernetes, ObjectError};
use tortie_store::stale;

use crate::install::INTERVAL;
use crate::install::cluster::{ClusterArguments, get, list};
use crate::install::rollout::{Rollout, problem};
use crate::output;
use crate::status::nodes_without_policy;
use plan::{Action, Change, Component, DAEMON_SETS, DEPLOYMENTS, NAMESPACES, OPERATOR, Undo};

/// The owner of the fields of the records.
const MANAGER: &str = "tortie-calico";
/// The ConfigMap with what `stop` has changed.
const RECORDS: &str = "tortie-calico";
/// The finalizer by which Calico's operator keeps the permissions of the CNI plugin.
const CNI_FINALIZER: &str = "tigera.io/cni-protector";
/// The objects that have it (`pkg/render/node.go` of tigera/operator).
const PROTECTED: [&str; 2] = ["calico-node", "calico-cni-plugin"];
/// The time for which stopped components must stay so: who restores them does it soon, as a rule.
const SETTLED: Duration = Duration::from_secs(5);
/// The maximum time since the Lease of Tortie's controllers was renewed.
const RENEWED: jiff::SignedDuration = jiff::SignedDuration::from_secs(60);
/// The reason of a node's condition when Calico's agent has ended.
const CALICO_IS_DOWN: &str = "CalicoIsDown";
/// DaemonSets with Calico's policy on flannel's network.
const CANAL: [&str; 2] = ["canal", "rke2-canal"];
/// The kinds by which Calico's operator is told what to install. Others follow from them.
const OPERATOR_KINDS: [&str; 2] = ["installations", "apiservers"];

#[derive(Subcommand)]
pub(crate) enum CalicoCommand {
    /// Stop Calico's operator, agents, controllers, Typha and API server, after Tortie's policy is in force on each node
    Stop(Stop),
    /// Start again what stop has stopped, as it was
    Start(Start),
    /// Delete what told Calico's operator to install Calico, and the finalizers that only it would remove. Definitions stay
    Remove(Remove),
}

#[derive(clap::Args)]
pub(crate) struct Stop {
    /// Print what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Stop Calico although Tortie's policy is not in force on some nodes, whose pods then lose policy and network
    #[arg(long)]
    force: bool,
    /// How long to wait until the pods have ended, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    #[command(flatten)]
    cluster: ClusterArguments,
}

#[derive(clap::Args)]
pub(crate) struct Start {
    /// Print what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    cluster: ClusterArguments,
}

#[derive(clap::Args)]
pub(crate) struct Remove {
    /// Print what would change, and change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    cluster: ClusterArguments,
}

impl CalicoCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        crate::runtime()?.block_on(async {
            match self {
                Self::Stop(stop) => stop.stop().await,
                Self::Start(start) => start.start().await,
                Self::Remove(remove) => remove.remove().await,
            }
        })
    }
}

impl Stop {
    async fn stop(self) -> anyhow::Result<ExitCode> {
        let cluster = self.cluster.open().await?;
        let operator = operator_namespace(&cluster).await?;
        let changes = plan::stop(&components(&cluster, &operator).await?);
        if self.dry_run {
            changes.iter().for_each(|change| output::line(&format!("would stop {}", change.path)));
        }
        if !self.force {
            self.refuse(&cluster).await?;
        }
        if self.dry_run {
            return Ok(ExitCode::SUCCESS);
        }
        warn_of_definitions(&cluster).await?;
        let stopped = self.carry_out(&cluster, &operator, &changes).await;
        // Also if something has failed: agents of Calico that have ended have left their nodes without network.
        let announced = announce_network(&cluster).await;
        stopped?;
        announced?;
        output::line(match changes.is_empty() {
            true => "none of Calico's components that this command knows runs",
            false => "the components above have stopped; tortie calico start takes this back",
        });
        output::line(
            "what Calico has left on each node goes with: kubectl -n tortie-system exec POD -- /tortie node cleanup --calico \
             --cni-conf-dir /host/etc/cni/net.d",
        );
        Ok(ExitCode::SUCCESS)
    }

    async fn carry_out(
        &self,
        cluster: &Kubernetes,
        operator: &str,
        changes: &[Change],
    ) -> anyhow::Result<()> {
        let mut records = records(cluster).await?.unwrap_or_default();
        let (of_operator, others): (Vec<_>, Vec<_>) =
            changes.iter().partition(|change| change.path.ends_with(OPERATOR));
        self.stop_each(cluster, &of_operator, &mut records).await?;
        // It would take the next changes back, also if an earlier run has scaled it down.
        self.wait_for_pods(cluster, &[(operator, OPERATOR)]).await?;
        self.stop_each(cluster, &others, &mut records).await?;
        self.wait_for_pods(cluster, &all_pods(operator)).await?;
        tokio::time::sleep(SETTLED).await;
        if let Some(change) = plan::stop(&components(cluster, operator).await?).first() {
            bail!(
                "{} is back: somebody else restores it, such as a tool that applies manifests again and again; pause that, and run the \
                 command again",
                change.path
            );
        }
        Ok(())
    }

    async fn stop_each(
        &self,
        cluster: &Kubernetes,
        changes: &[&Change],
        records: &mut Map<String, Value>,
    ) -> anyhow::Result<()> {
        for change in changes {
            // Before the change: after a crash in between, there is a record too many, which changes nothing. An older record is of a
            // component that somebody has started since.
            records.insert(change.key(), json!(change.record().to_string()));
            save(cluster, records).await?;
            carry_out(cluster, change).await?;
            output::line(&format!("stopped {}", change.path));
        }
        Ok(())
    }

    /// Refuses while pods would lose policy or network with Calico.
    async fn refuse(&self, cluster: &Kubernetes) -> anyhow::Result<()> {
        let mut problems = nodes_without_policy(cluster).await?;
        for name in CANAL {
            let path = format!("/apis/apps/v1/namespaces/kube-system/daemonsets/{name}");
            if get(cluster, &path).await?.is_some() {
                problems.push(format!(
                    "DaemonSet kube-system/{name} has flannel's network besides Calico's policy, and this command does not stop it"
                ));
            }
        }
        if !has_controllers(cluster).await? {
            problems.push(
                "no Tortie controllers lead (the Lease tortie-controllers in tortie-system is not renewed), so nobody would do what \
                 Calico's do: deploy tortie controllers"
                    .to_owned(),
            );
        }
        if problems.is_empty() {
            return Ok(());
        }
        problems.iter().for_each(|problem| output::error_line(problem));
        bail!(
            "pods could lose policy or network with Calico; correct what is named above, or use --force (nodes whose datastore is etcd \
             report there: tortie get nodereports --store etcd:URL). Nothing was changed"
        )
    }

    /// Waits until no pods of these namespaces and applications are left.
    async fn wait_for_pods(&self, cluster: &Kubernetes, applications: &[(&str, &str)]) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(self.timeout);
        loop {
            let left = pods(cluster, applications).await?;
            let Some(first) = left.first() else { return Ok(()) };
            if Instant::now() > deadline {
                bail!(
                    "after {} s, {} of Calico are still there, such as {first}; look at their nodes, and run the command again",
                    self.timeout,
                    output::count(left.len() as u64, "pod")
                );
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

impl Start {
    async fn start(self) -> anyhow::Result<ExitCode> {
        let cluster = self.cluster.open().await?;
        let Some(records) = records(&cluster).await? else {
            bail!("tortie calico stop has changed nothing in this cluster, or it was taken back already");
        };
        let undo = plan::start(&records).map_err(anyhow::Error::msg);
        let undo = undo.with_context(|| format!("ConfigMap {NAMESPACE}/{RECORDS}; correct or delete it"))?;
        let mut missing = 0;
        for undo in undo {
            let (Undo::Merge { path, .. } | Undo::Create { path, .. }) = &undo;
            if self.dry_run {
                output::line(&format!("would start {path}"));
                continue;
            }
            match take_back(&cluster, &undo).await? {
                true => output::line(&format!("started {path}")),
                false => {
                    missing += 1;
                    output::error_line(&format!("{path} does not exist any more"));
                }
            }
        }
        if missing > 0 {
            bail!(
                "install Calico again, and run the command again: the record of what was before stays. If Calico runs again without what is named \
                 above, delete the record: kubectl -n {NAMESPACE} delete configmap {RECORDS}"
            );
        }
        if !self.dry_run {
            cluster.delete_path(&records_path()).await?;
            output::line(
                "when calico-node is ready on each node, tortie uninstall --for-calico leaves the pods to it",
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Remove {
    async fn remove(self) -> anyhow::Result<ExitCode> {
        let cluster = self.cluster.open().await?;
        let operator = operator_namespace(&cluster).await?;
        let running = pods(&cluster, &all_pods(&operator)).await?;
        if let Some(first) = running.first() {
            bail!(
                "Calico still runs, for instance {first}: run tortie calico stop first. Nothing was changed"
            );
        }
        if !plan::stop(&components(&cluster, &operator).await?).is_empty() {
            bail!("components of Calico are not stopped: run tortie calico stop first. Nothing was changed");
        }
        let mut done = 0;
        for kind in OPERATOR_KINDS {
            for object in list(&cluster, &format!("/apis/operator.tigera.io/v1/{kind}")).await? {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                self.delete(&cluster, &format!("/apis/operator.tigera.io/v1/{kind}/{name}")).await?;
                done += 1;
            }
        }
        for path in protected_paths() {
            let Some(object) = get(&cluster, &path).await? else { continue };
            let finalizers = object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
            let (protecting, others): (Vec<_>, Vec<_>) =
                finalizers.into_iter().partition(|finalizer| finalizer == CNI_FINALIZER);
            if !protecting.is_empty() {
                self.release(&cluster, &path, &others).await?;
                done += 1;
            }
        }
        if !self.dry_run && cluster.delete_path(&records_path()).await? {
            output::line("the record of tortie calico stop is deleted; there is nothing to start again");
        }
        if done == 0 {
            output::line("Calico's operator has left nothing that holds up a deletion");
        }
        output::line("policies, pools and addresses stay: the definitions of Calico's kinds are not deleted");
        Ok(ExitCode::SUCCESS)
    }

    /// Deletes an object whose finalizers only the operator would remove.
    async fn delete(&self, cluster: &Kubernetes, path: &str) -> anyhow::Result<()> {
        if self.dry_run {
            output::line(&format!("would delete {path}"));
            return Ok(());
        }
        // In this order: an object that is being deleted takes no new finalizers from an operator that somebody starts.
        cluster.delete_path(path).await.with_context(|| path.to_owned())?;
        if get(cluster, path).await?.is_some() {
            merge_if_there(cluster, path, &json!({"metadata": {"finalizers": null}})).await?;
        }
        output::line(&format!("deleted {path}"));
        Ok(())
    }

    /// Leaves an object only these finalizers.
    async fn release(&self, cluster: &Kubernetes, path: &str, finalizers: &[Value]) -> anyhow::Result<()> {
        if self.dry_run {
            output::line(&format!("would remove the finalizer {CNI_FINALIZER} of {path}"));
            return Ok(());
        }
        merge_if_there(cluster, path, &json!({"metadata": {"finalizers": finalizers}})).await?;
        output::line(&format!("removed the finalizer {CNI_FINALIZER} of {path}"));
        Ok(())
    }
}

/// Changes fields of an object, unless it is gone by now.
async fn merge_if_there(cluster: &Kubernetes, path: &str, fields: &Value) -> anyhow::Result<()> {
    match cluster.merge_path(path, fields).await {
        Ok(_) | Err(ObjectError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error).with_context(|| path.to_owned()),
    }
}

/// `helm uninstall` of Calico's charts deletes the definitions with all policies, unless the API server refuses it.
async fn warn_of_definitions(cluster: &Kubernetes) -> anyhow::Result<()> {
    let path =
        format!("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{DEFINITION_POLICY}");
    if get(cluster, &path).await?.is_none() {
        output::error_line(&format!(
            "warning: nothing keeps Calico's definitions from being deleted with all policies, as `helm uninstall` of Calico may do: \
             ValidatingAdmissionPolicy {DEFINITION_POLICY} does not exist (tortie install creates it from Kubernetes 1.30 on)"
        ));
    }
    Ok(())
}

/// The objects that Calico's operator protects.
fn protected_paths() -> Vec<String> {
    let of_rbac = |plural: &str, name: &str| format!("/apis/rbac.authorization.k8s.io/v1/{plural}/{name}");
    let paths = PROTECTED.into_iter().flat_map(|name| {
        [
            of_rbac("clusterrolebindings", name),
            of_rbac("clusterroles", name),
            format!("/api/v1/namespaces/calico-system/serviceaccounts/{name}"),
        ]
    });
    paths.collect()
}

/// The namespaces and applications of Calico's pods.
fn all_pods(operator: &str) -> Vec<(&str, &'static str)> {
    let names = || DEPLOYMENTS.into_iter().chain(DAEMON_SETS);
    let of_calico = NAMESPACES.into_iter().flat_map(|namespace| names().map(move |name| (namespace, name)));
    std::iter::once((operator, OPERATOR)).chain(of_calico).collect()
}

/// The namespace of Calico's operator: charts install it in any.
async fn operator_namespace(cluster: &Kubernetes) -> anyhow::Result<String> {
    let path = format!("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{OPERATOR}");
    let binding = get(cluster, &path).await?.unwrap_or_default();
    let namespace = binding.pointer("/subjects/0/namespace").and_then(Value::as_str).unwrap_or_default();
    Ok(if namespace.is_empty() { OPERATOR } else { namespace }.to_owned())
}

/// Returns whether Tortie's controllers lead.
async fn has_controllers(cluster: &Kubernetes) -> anyhow::Result<bool> {
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{LEASE_NAME}");
    let lease = get(cluster, &path).await?.unwrap_or_default();
    let renewed = lease["spec"]["renewTime"].as_str().and_then(|time| time.parse::<jiff::Timestamp>().ok());
    let age = renewed.map(|renewed| jiff::Timestamp::now().duration_since(renewed).abs());
    Ok(age.is_some_and(|age| age < RENEWED))
}

/// Says for each node that its network is there, where Calico's agent has said that it is not when it ended (`node/pkg/lifecycle/shutdown`):
/// nothing else takes that back, and no pod is scheduled to such a node. A node without a ready agent of Tortie has no other network, and stays.
async fn announce_network(cluster: &Kubernetes) -> anyhow::Result<()> {
    let agents = Rollout::read(cluster, DAEMON_SET).await?;
    let mut reports = list(cluster, "/apis/tortie.io/v1/nodereports").await?;
    reports.retain(|report| is_fresh(report, jiff::Timestamp::now()));
    for node in list(cluster, "/api/v1/nodes").await? {
        let name = node["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let is_down = |one: &Value| {
            one["type"] == "NetworkUnavailable" && one["status"] == "True" && one["reason"] == CALICO_IS_DOWN
        };
        if !node["status"]["conditions"].as_array().is_some_and(|all| all.iter().any(is_down)) {
            continue;
        }
        if !has_agent(&name, &agents.pods, &reports) {
            output::error_line(&format!(
                "node {name}: Calico's agent has marked it as without network when it ended, and no agent of Tortie is ready there: no pod \
                 is scheduled to it until one is, and tortie calico stop has run again"
            ));
            continue;
        }
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let condition = json!({
            "type": "NetworkUnavailable", "status": "False", "reason": "TortieProvidesNetwork",
            "message": "Tortie has taken over from Calico", "lastTransitionTime": now, "lastHeartbeatTime": now,
        });
        let path = format!("/api/v1/nodes/{name}/status");
        let change = json!({"status": {"conditions": [condition]}});
        cluster.strategic_path(&path, &change).await.with_context(|| path.clone())?;
        output::line(&format!(
            "node {name}: its network is available; Calico's agent had said otherwise when it ended"
        ));
    }
    Ok(())
}

/// Returns whether the agent that wrote this report runs. The report of one that has ended stays, and gets old.
fn is_fresh(report: &Value, now: jiff::Timestamp) -> bool {
    NodeStatus::deserialize(&report["status"]).is_ok_and(|status| stale(&status, None, now).is_none())
}

/// Returns whether an agent of Tortie provides the node's network: by its ready pod, or by a fresh report where agents run outside of pods.
/// A report does not count where the node has a pod of the agent, because it stays for a while when the agent has ended.
fn has_agent(node: &str, pods: &[Value], reports: &[Value]) -> bool {
    let of_node: Vec<&Value> = pods.iter().filter(|pod| pod["spec"]["nodeName"] == node).collect();
    if of_node.is_empty() {
        return reports.iter().any(|report| report["metadata"]["name"] == node);
    }
    of_node.into_iter().any(|pod| problem(pod).is_none())
}

/// The names of the pods that are there.
async fn pods(cluster: &Kubernetes, applications: &[(&str, &str)]) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for (namespace, application) in applications {
        let path = format!("/api/v1/namespaces/{namespace}/pods?labelSelector=k8s-app%3D{application}");
        // Pods that have failed stay until somebody deletes them.
        let has_ended =
            |pod: &Value| ["Failed", "Succeeded"].iter().any(|phase| pod["status"]["phase"] == *phase);
        let names = list(cluster, &path).await?.into_iter().filter(|pod| !has_ended(pod));
        found.extend(
            names.filter_map(|pod| Some(format!("{namespace}/{}", pod["metadata"]["name"].as_str()?))),
        );
    }
    Ok(found)
}

/// The components that exist.
async fn components(cluster: &Kubernetes, operator: &str) -> anyhow::Result<Vec<Component>> {
    let mut components = Vec::new();
    for path in plan::paths(operator) {
        components.extend(get(cluster, &path).await?.map(|object| Component { path, object }));
    }
    Ok(components)
}

async fn carry_out(cluster: &Kubernetes, change: &Change) -> anyhow::Result<()> {
    let path = change.path.as_str();
    match &change.action {
        Action::Merge { now, .. } => {
            drop(cluster.merge_path(path, now).await.with_context(|| path.to_owned())?)
        }
        Action::Delete { .. } => drop(cluster.delete_path(path).await.with_context(|| path.to_owned())?),
    }
    Ok(())
}

/// Returns false if the component does not exist any more.
async fn take_back(cluster: &Kubernetes, undo: &Undo) -> anyhow::Result<bool> {
    match undo {
        Undo::Merge { path, fields } => {
            if get(cluster, path).await?.is_none() {
                return Ok(false);
            }
            cluster.merge_path(path, fields).await.with_context(|| path.clone())?;
        }
        Undo::Create { path, object } => {
            cluster.apply_path(path, MANAGER, object).await.with_context(|| path.clone())?;
        }
    }
    Ok(true)
}

/// Refuses what would delete the record of a stopped Calico: without it, nobody knows what was before.
pub(crate) async fn refuse_while_stopped(cluster: &Kubernetes) -> anyhow::Result<()> {
    if records(cluster).await?.is_some() {
        bail!(
            "tortie calico stop has stopped Calico, and its record would be deleted: run tortie calico start first, and wait until \
             calico-node is ready on each node, or tortie calico remove if Calico is not to come back. If Calico runs again already, \
             delete the record: kubectl -n {NAMESPACE} delete configmap {RECORDS}. Nothing was changed"
        );
    }
    Ok(())
}

fn records_path() -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/configmaps/{RECORDS}")
}

/// The record of `stop`.
async fn records(cluster: &Kubernetes) -> anyhow::Result<Option<Map<String, Value>>> {
    let map = get(cluster, &records_path()).await?;
    Ok(map.map(|map| map["data"].as_object().cloned().unwrap_or_default()))
}

async fn save(cluster: &Kubernetes, records: &Map<String, Value>) -> anyhow::Result<()> {
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": RECORDS, "namespace": NAMESPACE}, "data": records,
    });
    cluster.apply_path(&records_path(), MANAGER, &map).await.context("recording what is changed")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_network_only_by_a_ready_agent_or_a_report() {
        let pod = |node: &str, ready: &str| {
            let conditions = json!([{"type": "Ready", "status": ready}]);
            json!({"metadata": {"name": "p"}, "spec": {"nodeName": node}, "status": {"phase": "Running", "conditions": conditions}})
        };
        let report = json!({"metadata": {"name": "w"}});
        for (node, pods, reports, expected) in [
            ("one", vec![pod("one", "True")], vec![], true),
            ("one", vec![pod("one", "False")], vec![], false),
            ("w", vec![pod("w", "False")], vec![report.clone()], false),
            ("w", vec![pod("w", "False"), pod("w", "True")], vec![report.clone()], true),
            ("one", vec![pod("two", "True")], vec![report.clone()], false),
            ("w", vec![], vec![report], true),
            ("one", vec![], vec![], false),
        ] {
            assert_eq!(has_agent(node, &pods, &reports), expected, "{node} {pods:?} {reports:?}");
        }
    }

    #[test]
    fn the_report_of_an_agent_that_has_ended_gets_old() {
        let now: jiff::Timestamp = "2026-11-29T12:00:00Z".parse().unwrap();
        let report = |time: &str| json!({"metadata": {"name": "w"}, "status": {"os": "windows", "endpoints": 0, "positions": {}, "time": time, "heartbeatSeconds": 60}});
        for (report, expected) in [
            (report("2026-11-29T11:59:00Z"), true),
            (report("2026-11-29T11:00:00Z"), false),
            (report("unknown"), false),
            (json!({"metadata": {"name": "w"}}), false),
        ] {
            assert_eq!(is_fresh(&report, now), expected, "{report}");
        }
    }
}
