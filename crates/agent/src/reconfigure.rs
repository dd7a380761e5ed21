//! Replaces the network of a Windows node (`tortie windows reconfigure`): observes, carries out one step of
//! [`tortie_windows::next_step`], and returns it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};
use tortie_api::kubernetes::Node;
use tortie_api::report::NodeReport;
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::{Reason, Severity};
use tortie_hcn::schema::{LoadBalancer, Query};
use tortie_hcn::{Class, Guid, Hcn, HcnExt};
use tortie_store::{Interest, Store, StoreError, Stored, Version};
use tortie_windows::{
    Drain, NETWORK, NetworkReport, NodePod, PodOrigin, RECONFIGURATION, Reconfiguration, ReconfigureStep,
    ReconfiguredNode, UsedNetwork, belongs_to_no_pod, is_of_node, next_step, source_vips,
};

use crate::AgentError;

/// The annotation by which Calico and Tortie record a pod's address before its status has it.
const POD_IP: &str = "cni.projectcalico.org/podIP";

/// The annotation of a static pod's image in the API.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// A Windows node whose network is replaced. It keeps nothing between two steps.
pub struct Reconfiguring {
    /// The datastore, with the right to change the Node and to delete its pods.
    pub store: Arc<dyn Store>,
    /// HNS of the node.
    pub hcn: Arc<dyn Hcn>,
    /// The node's name.
    pub node: String,
    /// Which pods it deletes.
    pub drain: Drain,
}

/// A pod, and the version that was looked at. Another pod of the same name has another version.
type ObservedPod = (NodePod, Version);

impl Reconfiguring {
    /// Carries out steps to the end, which it returns. `on_step` gets each step, and each error after which it tries again.
    ///
    /// # Errors
    /// The node is none whose network can be replaced; a permission is missing; or the last error when patience has ended.
    pub async fn run(
        &self,
        patience: Duration,
        pause: Duration,
        mut on_step: impl FnMut(Result<&ReconfigureStep, &AgentError>),
    ) -> Result<ReconfigureStep, AgentError> {
        let started = Instant::now();
        loop {
            match self.step(started.elapsed(), patience).await {
                Ok(step) => {
                    on_step(Ok(&step));
                    match step {
                        ReconfigureStep::NothingToDo
                        | ReconfigureStep::Refuse(_)
                        | ReconfigureStep::GiveUp { .. }
                        | ReconfigureStep::Restore { .. } => return Ok(step),
                        ReconfigureStep::Cordon(_)
                        | ReconfigureStep::DeletePods(_)
                        | ReconfigureStep::RemoveOthers { .. }
                        | ReconfigureStep::Wait(_) => {}
                    }
                }
                Err(error @ (AgentError::Node { .. } | AgentError::Store(StoreError::Forbidden(_)))) => {
                    return Err(error);
                }
                Err(error) if started.elapsed() >= patience => return Err(error),
                Err(error) => on_step(Err(&error)),
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Carries out the next step, and returns it. An error leaves the node as it is: the next call observes it again.
    ///
    /// # Errors
    /// The datastore or HNS, or the node is no Windows node.
    pub async fn step(&self, waited: Duration, patience: Duration) -> Result<ReconfigureStep, AgentError> {
        let stored = self.read_node().await?;
        let pods = self.pods().await?;
        let observed = self.observe(&stored, &pods).await?;
        let step = next_step(&observed, waited, patience);
        match &step {
            ReconfigureStep::NothingToDo
            | ReconfigureStep::Refuse(_)
            | ReconfigureStep::Wait(_)
            | ReconfigureStep::GiveUp { .. } => {}
            ReconfigureStep::Cordon(record) => self.mark(stored, Some(record), false).await?,
            ReconfigureStep::Restore { schedulable } => self.mark(stored, None, *schedulable).await?,
            ReconfigureStep::DeletePods(names) => {
                for (pod, version) in pods.iter().filter(|(pod, _)| names.contains(&pod.name)) {
                    self.delete_pod(&pod.name, version).await?;
                }
            }
            ReconfigureStep::RemoveOthers { balancers, endpoints } => {
                let (hcn, balancers, endpoints) = (self.hcn.clone(), balancers.clone(), endpoints.clone());
                blocking(move || remove(&*hcn, &balancers, &endpoints)).await?;
            }
        }
        Ok(step)
    }

    async fn read_node(&self) -> Result<Stored, AgentError> {
        let problem = |problem: String| AgentError::Node { node: self.node.clone(), problem };
        let key = Key::global(Kind::Node, &self.node);
        let stored = self.store.get(&key).await?;
        let stored = stored
            .ok_or_else(|| problem("it does not exist; name the Node of this machine (--node)".into()))?;
        match Resource::read(&key, &stored.value) {
            Ok(Resource::Node(node)) if node.is_windows() => Ok(stored),
            Ok(Resource::Node(_)) => {
                let label = Node::OS;
                Err(problem(format!(
                    "its label {label} is not windows, and other nodes have nothing to replace"
                )))
            }
            Ok(_) => Err(problem("it is no Node".to_owned())),
            Err(errors) => {
                let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
                Err(problem(format!("it cannot be read: {}", errors.join("; "))))
            }
        }
    }

    async fn observe(&self, node: &Stored, pods: &[ObservedPod]) -> Result<ReconfiguredNode, AgentError> {
        let recorded = match &node.value["metadata"]["annotations"][RECONFIGURATION] {
            Value::String(text) => Some(serde_json::from_str::<Reconfiguration>(text).map_err(|error| {
                let problem = format!(
                    "its annotation {RECONFIGURATION} cannot be read ({error}); correct it, or remove it and uncordon the node"
                );
                AgentError::Node { node: self.node.clone(), problem }
            })?),
            _ => None,
        };
        let report = self.reported(&node.value).await?;
        let hcn = self.hcn.clone();
        Ok(ReconfiguredNode {
            recorded,
            schedulable: node.value["spec"]["unschedulable"] != true,
            pods: pods.iter().map(|(pod, _)| pod.clone()).collect(),
            drain: self.drain,
            report,
            network: blocking(move || used(&*hcn)).await?,
        })
    }

    /// What the agent reports about the network.
    async fn reported(&self, node: &Value) -> Result<NetworkReport, AgentError> {
        let stored = self.store.get(&Key::global(Kind::NodeReport, &self.node)).await?;
        let report = stored.and_then(|stored| serde_json::from_value::<NodeReport>(stored.value).ok());
        let Some(NodeReport { status, .. }) = report else {
            let stale = Some("the node has no report that can be read; check its agent".to_owned());
            return Ok(NetworkReport { stale, ..NetworkReport::default() });
        };
        let boot_id = node["status"]["nodeInfo"]["bootID"].as_str().filter(|id| !id.is_empty());
        let mut report = NetworkReport {
            stale: tortie_store::stale(&status, boot_id, Timestamp::now()),
            ..NetworkReport::default()
        };
        let [differs, adapter] =
            [Reason::NetworkDiffers, Reason::AdapterDiffers].map(|reason| reason.to_string());
        let of_node = status.conditions.into_iter().filter(|condition| condition.object.is_none());
        for condition in of_node.filter(|it| Severity::of(&it.reason) == Severity::Failure) {
            let kind = match condition.reason {
                reason if reason == differs => &mut report.differs,
                reason if reason == adapter => &mut report.other_adapter,
                _ => &mut report.trouble,
            };
            kind.get_or_insert(condition.message);
        }
        Ok(report)
    }

    /// The node's pods with an address of its network. One without an address waits for the new network.
    async fn pods(&self) -> Result<Vec<ObservedPod>, AgentError> {
        let stored = self.store.list_all(&Interest::of_node(Kind::Pod, &self.node)).await?.items;
        let mut pods = Vec::new();
        for Stored { key, value, version, .. } in stored {
            let has_ended = ["Succeeded", "Failed"].map(Value::from).contains(&value["status"]["phase"]);
            let annotations = &value["metadata"]["annotations"];
            let address = [&value["status"]["podIP"], &annotations[POD_IP]];
            let has_address = address.iter().any(|it| it.as_str().is_some_and(|it| !it.is_empty()));
            if value["spec"]["hostNetwork"] == true || has_ended || !has_address {
                continue;
            }
            let mut owners = value["metadata"]["ownerReferences"].as_array().into_iter().flatten();
            let origin = match annotations[MIRROR].is_null() {
                false => PodOrigin::Kubelet,
                true if owners.any(|owner| owner["controller"] == true) => PodOrigin::Controller,
                true => PodOrigin::Nobody,
            };
            let is_ending = !value["metadata"]["deletionTimestamp"].is_null();
            pods.push((
                NodePod { name: format!("{}/{}", key.namespace, key.name), is_ending, origin },
                version,
            ));
        }
        Ok(pods)
    }

    /// A pod that has changed since is looked at again: it may be another one of the same name.
    async fn delete_pod(&self, name: &str, version: &Version) -> Result<(), AgentError> {
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        match self.store.delete(&Key::namespaced(Kind::Pod, namespace, name), Some(version)).await {
            Ok(_) | Err(StoreError::NotFound(_) | StoreError::Conflict(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes record and cordon at once, so that nobody is interrupted in between. A Node that has changed since is read again.
    async fn mark(
        &self,
        node: Stored,
        record: Option<&Reconfiguration>,
        schedulable: bool,
    ) -> Result<(), AgentError> {
        let mut value = node.value;
        let text = record.map(serde_json::to_string).transpose();
        let text = text.map_err(|error| AgentError::system("writing the annotation of the Node", error))?;
        let annotations = &mut value["metadata"]["annotations"];
        match (text, annotations.as_object_mut()) {
            (Some(text), Some(all)) => drop(all.insert(RECONFIGURATION.to_owned(), json!(text))),
            (Some(text), None) => *annotations = json!({ RECONFIGURATION: text }),
            (None, Some(all)) => drop(all.remove(RECONFIGURATION)),
            (None, None) => {}
        }
        match (schedulable, value["spec"].as_object_mut()) {
            (false, Some(spec)) => drop(spec.insert("unschedulable".to_owned(), json!(true))),
            (false, None) => value["spec"] = json!({"unschedulable": true}),
            (true, Some(spec)) => drop(spec.remove("unschedulable")),
            (true, None) => {}
        }
        self.store.update(&node.key, value, &node.version).await?;
        Ok(())
    }
}

/// Who uses the network.
fn used(hcn: &dyn Hcn) -> Result<Option<UsedNetwork>, tortie_hcn::Error> {
    let Some(network) = hcn.network_by_name(NETWORK)? else { return Ok(None) };
    let vips: Vec<_> = source_vips(&network).collect();
    let mut endpoints = hcn.endpoints_of_network(network.id)?;
    // The agent's own endpoint goes with the network.
    endpoints.retain(|endpoint| !is_of_node(endpoint));
    let (others, pods): (Vec<_>, Vec<_>) = endpoints.iter().partition(|it| belongs_to_no_pod(it, &vips));
    let others: Vec<Guid> = others.iter().map(|endpoint| endpoint.id).collect();
    let mut balancers = Vec::new();
    for id in hcn.enumerate(tortie_hcn::Kind::LoadBalancer, &Query::all())? {
        match hcn.load_balancer(id) {
            Ok(LoadBalancer { host_compute_endpoints, .. }) => {
                balancers.extend(host_compute_endpoints.iter().any(|it| others.contains(it)).then_some(id));
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let name = |endpoint: &&tortie_hcn::schema::Endpoint| match endpoint.name.is_empty() {
        true => endpoint.id.to_string(),
        false => endpoint.name.clone(),
    };
    Ok(Some(UsedNetwork { id: network.id, pods: pods.iter().map(name).collect(), others, balancers }))
}

fn remove(hcn: &dyn Hcn, balancers: &[Guid], endpoints: &[Guid]) -> Result<(), tortie_hcn::Error> {
    let is_fine = |result: Result<(), tortie_hcn::Error>| match result {
        // kube-proxy removes them, too.
        Err(error) if error.class() == Class::NotFound => Ok(()),
        result => result,
    };
    balancers.iter().try_for_each(|id| is_fine(hcn.delete_load_balancer(*id)))?;
    endpoints.iter().try_for_each(|id| is_fine(hcn.delete_endpoint(*id)))
}

/// A call of HNS may take long, and must not block other tasks.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, tortie_hcn::Error> + Send + 'static,
) -> Result<T, AgentError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|error| AgentError::system("a call of HNS", error))?;
    done.map_err(|error| AgentError::system("the network of the node", error))
}
