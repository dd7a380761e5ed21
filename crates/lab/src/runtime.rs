//! Replaces the scheduler and the kubelets: gives each pod of the datastore a node, and runs a task for it there.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind, Resource};
use tortie_store::{Change, Interest, Store, StoreError, Stored};

use crate::LabDir;
use crate::sandbox::{DesiredPod, PodApi, PodTask, RuntimeNode, Wish, set_status};

/// Starts the runtime of all nodes.
pub(crate) fn start(
    dir: LabDir,
    store: Arc<dyn Store>,
    api: PodApi,
    nodes: Vec<RuntimeNode>,
) -> JoinHandle<()> {
    let nodes = nodes.into_iter().map(|node| (node.name.clone(), Arc::new(node))).collect();
    let mut runtime = Runtime { dir, store, api, nodes, pods: HashMap::new(), bound: BTreeMap::new() };
    let mut changes = runtime.store.follow(vec![Interest::all(Kind::Pod)]);
    tokio::spawn(async move {
        while let Some(change) = changes.next().await {
            match change {
                Change::Put(stored) => runtime.pod_is(stored).await,
                Change::Gone { key, .. } => runtime.pod_is_gone(&key),
                Change::Unavailable(_, error) => {
                    tracing::error!(%error, "the lab's runtime cannot read pods and misses their changes");
                }
                Change::InSync(..) | Change::Progress(..) | Change::Restarted(_) => {}
            }
        }
    })
}

struct Runtime {
    dir: LabDir,
    store: Arc<dyn Store>,
    api: PodApi,
    nodes: BTreeMap<String, Arc<RuntimeNode>>,
    /// One task for each pod, so that operations on a pod happen in order.
    pods: HashMap<Key, mpsc::UnboundedSender<Wish>>,
    /// The node and the uid of each pod that has been given to its task.
    bound: BTreeMap<Key, (String, Option<String>)>,
}

impl Runtime {
    async fn pod_is(&mut self, stored: Stored) {
        let Ok(Resource::Pod(pod)) = Resource::read(&stored.key, &stored.value) else {
            tracing::warn!(pod = %stored.key, "cannot parse the pod; it is not started");
            return;
        };
        let Some(node) = pod.spec.node_name.clone() else {
            // Otherwise the real scheduler does it.
            if let PodApi::Stored(_) = self.api {
                self.schedule(stored, &pod).await;
            }
            return;
        };
        let Some(node) = self.nodes.get(&node) else {
            tracing::warn!(pod = %stored.key, node, "the pod's node does not belong to this lab; the pod is not started");
            return;
        };
        let metadata = &stored.value["metadata"];
        let uid = metadata["uid"].as_str().map(str::to_owned);
        if metadata.get("deletionTimestamp").is_some() {
            self.bound.remove(&stored.key);
            let _ = self.task_of(&stored.key).send(Wish::Stop { deleted: uid });
            return;
        }
        let bound = (node.name.clone(), uid.clone());
        if self.bound.get(&stored.key) == Some(&bound) {
            return;
        }
        let containers = stored.value["spec"]["containers"].as_array().cloned().unwrap_or_default();
        let wish = Wish::Run(Box::new(DesiredPod { pod, uid, containers, node: node.clone() }));
        self.bound.insert(stored.key.clone(), bound);
        // A task ends only with the runtime.
        let _ = self.task_of(&stored.key).send(wish);
    }

    fn pod_is_gone(&mut self, key: &Key) {
        if self.bound.remove(key).is_some() {
            let _ = self.task_of(key).send(Wish::Stop { deleted: None });
        }
    }

    fn task_of(&mut self, key: &Key) -> &mpsc::UnboundedSender<Wish> {
        let (dir, api) = (&self.dir, &self.api);
        self.pods.entry(key.clone()).or_insert_with(|| {
            let (sender, wishes) = mpsc::unbounded_channel();
            tokio::spawn(PodTask::new(dir, api, key, wishes).run());
            sender
        })
    }

    /// Chooses a node that matches the pod's nodeSelector: the node with the fewest known pods, and among those the
    /// first by name.
    async fn schedule(&self, mut stored: Stored, pod: &Pod) {
        let pods_on = |name: &str| self.bound.values().filter(|(node, _)| node == name).count();
        let fits = |node: &&Arc<RuntimeNode>| {
            pod.spec
                .node_selector
                .iter()
                .all(|(label, value)| node.labels.get(label).and_then(Value::as_str) == Some(value))
        };
        let Some(node) = self.nodes.values().filter(fits).min_by_key(|node| pods_on(&node.name)) else {
            let message = format!("no node has the labels of its nodeSelector {:?}", pod.spec.node_selector);
            set_status(
                &*self.store,
                &stored.key,
                json!({"phase": "Pending", "reason": "Unschedulable", "message": message}),
            )
            .await;
            return;
        };
        stored.value["spec"]["nodeName"] = json!(node.name);
        match self.store.update(&stored.key, stored.value, &stored.version).await {
            // It has changed in the meantime; the watch delivers it again.
            Ok(_) | Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
            Err(error) => tracing::error!(pod = %stored.key, %error, "cannot bind the pod to a node"),
        }
    }
}
