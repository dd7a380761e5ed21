//! Replaces the network of a Windows node (`tortie windows reconfigure`): observes, carries out one step of
//! [`tortie_windows::next_step`], and returns it.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tortie_api::kubernetes::{Node, Pod};
use tortie_api::report::NodeReport;
use tortie_api::{Key, Kind, Resource};
use tortie_dataplane::Reason;
use tortie_hcn::schema::{LoadBalancer, Query};
use tortie_hcn::{Class, Guid, Hcn, HcnExt};
use tortie_store::{Store, Stored};
use tortie_windows::{
    NETWORK, RECONFIGURATION, Reconfiguration, ReconfigureStep, ReconfiguredNode, UsedNetwork,
    is_of_kube_proxy, next_step, source_vip,
};

use crate::AgentError;

/// Conditions that leave open whether the network is as it should be.
const TROUBLE: [Reason; 5] = [
    Reason::AdapterNotUsable,
    Reason::HnsRefused,
    Reason::HnsUnavailable,
    Reason::NetworkMissing,
    Reason::NetworkNotReady,
];

/// A Windows node whose network is replaced. It keeps nothing between two steps.
pub struct Reconfiguring {
    /// The datastore, with the right to change the Node and to delete its pods.
    pub store: Arc<dyn Store>,
    /// HNS of the node.
    pub hcn: Arc<dyn Hcn>,
    /// The node's name.
    pub node: String,
    /// Whether it deletes pods. Otherwise somebody else drains the node, and it waits.
    pub deletes_pods: bool,
}

impl Reconfiguring {
    /// Carries out the next step, and returns it. An error leaves the node as it is: the next call observes it again.
    ///
    /// # Errors
    /// The datastore or HNS, or the node is no Windows node.
    pub async fn step(&self, waited: Duration, patience: Duration) -> Result<ReconfigureStep, AgentError> {
        let stored = self.read_node().await?;
        let mut observed = self.observe(&stored).await?;
        if !self.deletes_pods {
            observed.pods.iter_mut().for_each(|(_, goes)| *goes = true);
        }
        let step = next_step(&observed, waited, patience);
        match &step {
            ReconfigureStep::NothingToDo | ReconfigureStep::Wait(_) | ReconfigureStep::GiveUp(_) => {}
            ReconfigureStep::Cordon(record) => self.mark(stored, Some(record), false).await?,
            ReconfigureStep::Restore { schedulable } => self.mark(stored, None, *schedulable).await?,
            ReconfigureStep::DeletePods(names) => {
                for name in names {
                    self.delete_pod(name).await?;
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
            other => Err(problem(format!("it cannot be read: {other:?}"))),
        }
    }

    async fn observe(&self, node: &Stored) -> Result<ReconfiguredNode, AgentError> {
        let recorded = match &node.value["metadata"]["annotations"][RECONFIGURATION] {
            Value::String(text) => Some(serde_json::from_str::<Reconfiguration>(text).map_err(|error| {
                let problem = format!(
                    "its annotation {RECONFIGURATION} cannot be read ({error}); correct it, or remove it and uncordon the node"
                );
                AgentError::Node { node: self.node.clone(), problem }
            })?),
            _ => None,
        };
        let (differs, trouble) = self.reported().await?;
        let hcn = self.hcn.clone();
        Ok(ReconfiguredNode {
            recorded,
            schedulable: node.value["spec"]["unschedulable"] != true,
            pods: self.pods().await?,
            differs,
            trouble,
            network: blocking(move || used(&*hcn)).await?,
        })
    }

    /// What the agent reports about the network: how it differs, and other trouble with it.
    async fn reported(&self) -> Result<(Option<String>, Option<String>), AgentError> {
        let stored = self.store.get(&Key::global(Kind::NodeReport, &self.node)).await?;
        let report = stored.and_then(|stored| serde_json::from_value::<NodeReport>(stored.value).ok());
        let Some(report) = report else { return Ok((None, Some("nothing yet".to_owned()))) };
        let found = |reasons: &[Reason]| {
            let names: Vec<String> = reasons.iter().map(|reason| format!("{reason:?}")).collect();
            let of_node = report.status.conditions.iter().filter(|condition| condition.object.is_none());
            of_node.filter(|it| names.contains(&it.reason)).map(|it| it.message.clone()).next()
        };
        Ok((found(&[Reason::NetworkDiffers]), found(&TROUBLE)))
    }

    /// The node's pods with an address of its network, and whether each is being deleted.
    async fn pods(&self) -> Result<Vec<(String, bool)>, AgentError> {
        let mut pods = Vec::new();
        for stored in self.store.list(Kind::Pod).await?.items {
            let Ok(Resource::Pod(Pod { spec, .. })) = Resource::read(&stored.key, &stored.value) else {
                continue;
            };
            let has_ended =
                ["Succeeded", "Failed"].map(Value::from).contains(&stored.value["status"]["phase"]);
            if spec.node_name.as_deref() == Some(&self.node) && !spec.host_network && !has_ended {
                let goes = !stored.value["metadata"]["deletionTimestamp"].is_null();
                pods.push((format!("{}/{}", stored.key.namespace, stored.key.name), goes));
            }
        }
        Ok(pods)
    }

    async fn delete_pod(&self, name: &str) -> Result<(), AgentError> {
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        match self.store.delete(&Key::namespaced(Kind::Pod, namespace, name), None).await {
            Ok(_) | Err(tortie_store::StoreError::NotFound(_)) => Ok(()),
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
    let vip = source_vip(&network).ok();
    let endpoints = hcn.endpoints_of_network(network.id)?;
    let (others, pods): (Vec<_>, Vec<_>) = endpoints.iter().partition(|it| is_of_kube_proxy(it, vip));
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
    Ok(Some(UsedNetwork { pods: pods.iter().map(name).collect(), others, balancers }))
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
