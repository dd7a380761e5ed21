//! `tortie uninstall`.
//!
//! The order: the agents end first, because they would repair what is removed. Then a DaemonSet cleans the nodes: the CNI
//! configuration goes first, so that the runtime starts no pod without a network; then the links of pods, and only then
//! the policy, so that nothing opens. The permissions and the namespace go when no pod needs them, and the data last.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tokio::time::Instant;
use tortie_api::Kind;
use tortie_api::kubernetes::Node;
use tortie_api::support::{is_protected, is_terminating};
use tortie_controllers::release_pool;
use tortie_deploy::{CLEANUP_SET, DAEMON_SET, NAMESPACE, Values};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes};
use tortie_store::{Store, StoreError, Stored};

use crate::install::INTERVAL;
use crate::install::cluster::{
    ClusterArguments, MANAGER, get, has_admission_policies, is_admission_policy, list, name_of, path_of,
};
use crate::install::rollout::Rollout;
use crate::output;

/// How long an API server may go on with an admission policy that is deleted.
const FORGETS_POLICY: Duration = Duration::from_secs(20);
/// The definition that has no data of users.
const REPORTS: &str = "nodereports.tortie.io";

#[derive(clap::Args)]
pub(crate) struct Uninstall {
    /// Delete all policies, pools and addresses, too: the CustomResourceDefinitions and their objects
    #[arg(long)]
    data: bool,
    /// Leave pods and their connections to Calico, whose agent must run on each node already
    #[arg(long, conflicts_with_all = ["data", "skip_nodes"])]
    for_calico: bool,
    /// Leave the nodes as they are
    #[arg(long)]
    skip_nodes: bool,
    /// The image for cleaning the nodes. By default, that of the agents
    #[arg(long, value_name = "NAME")]
    image: Option<String>,
    /// How long to wait for each step, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    #[command(flatten)]
    cluster: ClusterArguments,
}

impl Uninstall {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("warn");
        crate::runtime()?.block_on(self.uninstall()).or_else(|error| {
            match error.downcast::<SomethingLeft>() {
                Ok(left) => {
                    output::error(&left.to_string());
                    Ok(ExitCode::FAILURE)
                }
                Err(error) => Err(error),
            }
        })
    }

    async fn uninstall(self) -> anyhow::Result<ExitCode> {
        let cluster = self.cluster.open().await?;
        crate::calico::refuse_while_stopped(&cluster).await?;
        if self.data {
            refuse_shared_data(&cluster).await?;
        }
        let agents = get(&cluster, &set_path(DAEMON_SET)).await?;
        let earlier = get(&cluster, &set_path(CLEANUP_SET)).await?;
        let is_installed = get(&cluster, &namespace_path()).await?.is_some();
        let cleanup = is_installed.then(|| self.cleanup(agents.as_ref(), earlier));
        remove_set(&cluster, DAEMON_SET, self.timeout()).await?;
        if !self.skip_nodes
            && let Some(cleanup) = cleanup
        {
            self.clean_nodes(&cluster, &cleanup).await?;
        }
        remove_set(&cluster, CLEANUP_SET, self.timeout()).await?;
        let values = Values::default();
        let (definitions, others): (Vec<_>, Vec<_>) = tortie_deploy::objects(&values)
            .into_iter()
            .rev()
            .partition(|object| object["kind"] == "CustomResourceDefinition");
        let restricts_nodes = has_admission_policies(&cluster).await?;
        for object in others.iter().filter(|object| restricts_nodes || !is_admission_policy(object)) {
            delete(&cluster, object).await?;
        }
        // The controllers, which keep deleted pools while they are in use, have no permissions any more.
        release_pools(&cluster).await?;
        for object in definitions.iter().filter(|object| self.data || object["metadata"]["name"] == REPORTS) {
            delete(&cluster, object).await?;
        }
        if self.data {
            forget_nodes(&cluster).await?;
            // The API server first deletes the objects of a definition.
            for definition in &definitions {
                wait_until_gone(&cluster, &path_of(definition)?, self.timeout()).await?;
            }
        }
        wait_until_gone(&cluster, &namespace_path(), self.timeout()).await?;
        if self.for_calico {
            output::line("pods keep their network, which is Calico's from now on");
        }
        output::line(match (self.data, self.skip_nodes) {
            (true, false) => "nothing of Tortie is left, except for annotations of pods",
            (true, true) => "the nodes are as they were: run `tortie node cleanup` there",
            (false, _) => "policies, pools and addresses are kept",
        });
        Ok(ExitCode::SUCCESS)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// The DaemonSet that cleans nodes: with the image and folders of the agents, or of an earlier attempt.
    fn cleanup(&self, agents: Option<&Value>, earlier: Option<Value>) -> Value {
        let set = agents.or(earlier.as_ref()).unwrap_or(&Value::Null);
        let spec = &set["spec"]["template"]["spec"];
        let container = &spec["containers"][0];
        let folder = |name: &str| {
            let volumes = spec["volumes"].as_array()?;
            let volume = volumes.iter().find(|volume| volume["name"] == name)?;
            volume["hostPath"]["path"].as_str().map(str::to_owned)
        };
        let mut values = Values::default();
        if let Some(image) = self.image.as_deref().or(container["image"].as_str()) {
            values.image = image.to_owned();
        }
        if let Some(policy) = container["imagePullPolicy"].as_str() {
            values.pull_policy = policy.to_owned();
        }
        // Agents that only enforce policy have neither folder, and the host may not let them be made.
        values.policy_only = agents.is_some() && folder("cni-bin").is_none() && folder("cni-conf").is_none();
        values.cni_bin_dir = folder("cni-bin").unwrap_or(values.cni_bin_dir);
        values.cni_conf_dir = folder("cni-conf").unwrap_or(values.cni_conf_dir);
        tortie_deploy::cleanup(&values, self.for_calico)
    }

    /// Cleans the nodes, and waits until each one is clean.
    async fn clean_nodes(&self, cluster: &Kubernetes, cleanup: &Value) -> anyhow::Result<()> {
        let mut cleanup = cleanup.clone();
        for field in ["status"] {
            if let Some(object) = cleanup.as_object_mut() {
                object.remove(field);
            }
        }
        cleanup["metadata"] = json!({"name": CLEANUP_SET, "namespace": NAMESPACE});
        cluster.apply_path(&path_of(&cleanup)?, MANAGER, &cleanup).await.context("starting the clean-up")?;
        let deadline = Instant::now() + self.timeout();
        let mut shown = String::new();
        loop {
            let rollout = Rollout::read(cluster, CLEANUP_SET).await?;
            let progress = format!("cleaning nodes: {}", rollout.progress());
            if progress != shown {
                output::line(&progress);
                shown = progress;
            }
            let linux = list(cluster, "/api/v1/nodes?labelSelector=kubernetes.io/os%3Dlinux").await?;
            if rollout.is_complete() || linux.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(SomethingLeft(format!(
                    "some nodes are not clean: {}. Run tortie uninstall again, or leave them with --skip-nodes and run \
                     `tortie node cleanup` there",
                    rollout.missing().join("; ")
                ))
                .into());
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

/// What a removal has left when its time was over. It goes on when the command runs again.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct SomethingLeft(String);

fn namespace_path() -> String {
    format!("/api/v1/namespaces/{NAMESPACE}")
}

fn set_path(name: &str) -> String {
    format!("/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{name}")
}

/// Calico uses the same definitions.
async fn refuse_shared_data(cluster: &Kubernetes) -> anyhow::Result<()> {
    for set in list(cluster, "/apis/apps/v1/daemonsets").await? {
        if set["metadata"]["name"] == "calico-node" {
            bail!("--data would delete the data of Calico, which runs in this cluster");
        }
    }
    if cluster.group().await? == CalicoGroup::Native {
        bail!(
            "--data would delete the data of Calico, which keeps them in {}. If they may be deleted, delete the \
             CustomResourceDefinitions of that group",
            CalicoGroup::Native
        );
    }
    // Tortie's controllers create it without a version.
    let information = get(cluster, "/apis/crd.projectcalico.org/v1/clusterinformations/default").await?;
    let version =
        information.as_ref().and_then(|object| object["spec"]["calicoVersion"].as_str()).unwrap_or_default();
    if !version.is_empty() {
        bail!(
            "--data would delete the data of Calico {version}, which has used this cluster. If they may be deleted, delete its \
             ClusterInformation first: kubectl delete clusterinformations.crd.projectcalico.org default"
        );
    }
    Ok(())
}

/// Deletes a DaemonSet, and waits until its pods have ended.
async fn remove_set(cluster: &Kubernetes, name: &str, timeout: Duration) -> anyhow::Result<()> {
    let path = set_path(name);
    if cluster.delete_path(&path).await? {
        wait_until_gone(cluster, &path, timeout).await?;
        output::line(&format!("daemonset/{name} deleted"));
    }
    Ok(())
}

async fn delete(cluster: &Kubernetes, object: &Value) -> anyhow::Result<()> {
    let (name, path) = (name_of(object), path_of(object)?);
    let deadline = Instant::now() + FORGETS_POLICY;
    let deleted = loop {
        match cluster.delete_path(&path).await {
            // The policy is deleted, and the API server goes on with it for a moment.
            Err(error)
                if error.to_string().contains(tortie_deploy::DEFINITION_POLICY)
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(INTERVAL).await;
            }
            deleted => break deleted.with_context(|| name.clone())?,
        }
    };
    if deleted {
        output::line(&format!("{name} deleted"));
    }
    Ok(())
}

async fn wait_until_gone(cluster: &Kubernetes, path: &str, timeout: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + timeout;
    while let Some(object) = get(cluster, path).await? {
        if Instant::now() > deadline {
            let conditions = &object["status"]["conditions"];
            let (name, seconds) = (name_of(&object), timeout.as_secs());
            return Err(SomethingLeft(format!(
                "{name} is still being deleted after {seconds} s: {conditions}"
            ))
            .into());
        }
        tokio::time::sleep(INTERVAL).await;
    }
    Ok(())
}

/// Removes the finalizer of pools, which nobody else removes when they are deleted.
async fn release_pools(cluster: &Kubernetes) -> anyhow::Result<()> {
    let pools = match cluster.list(Kind::IpPool).await {
        Ok(pools) => pools.items,
        Err(StoreError::KindAbsent(_)) => return Ok(()),
        Err(error) => return Err(error).context("reading the pools"),
    };
    for Stored { key, value, .. } in pools.into_iter().filter(|stored| is_protected(&stored.value)) {
        release_pool(cluster, &key).await.with_context(|| format!("removing the finalizer of {key}"))?;
        if is_terminating(&value) {
            output::line(&format!(
                "{key} is gone: it was deleted before, and stayed while its addresses were in use"
            ));
        }
    }
    Ok(())
}

/// Removes the annotations of Nodes.
async fn forget_nodes(cluster: &Kubernetes) -> anyhow::Result<()> {
    let annotations = json!({
        Node::ADDRESS: null, Node::VXLAN_ADDRESS: null, Node::VXLAN_MAC: null, Node::HNS_NETWORK: null,
        Node::ADDRESS_V6: null, Node::VXLAN_ADDRESS_V6: null, Node::VXLAN_MAC_V6: null, Node::IPIP_ADDRESS: null,
        Node::ANNOUNCED: null, Node::ANNOUNCED_V6: null,
    });
    for node in list(cluster, "/api/v1/nodes").await? {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let change = json!({"metadata": {"annotations": annotations}});
        cluster.merge_path(&format!("/api/v1/nodes/{name}"), &change).await?;
    }
    Ok(())
}
