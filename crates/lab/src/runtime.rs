//! Replaces the scheduler and the kubelets: gives each pod of the datastore a node, and runs a task for it there.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tortie_api::kubernetes::Placement;
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
    let mut runtime = Runtime {
        dir,
        store,
        api,
        nodes,
        pods: HashMap::new(),
        bound: BTreeMap::new(),
        placed: BTreeMap::new(),
        unplaced: BTreeMap::new(),
        known_nodes: BTreeMap::new(),
    };
    let mut changes = runtime.store.follow(vec![Interest::all(Kind::Node), Interest::all(Kind::Pod)]);
    tokio::spawn(async move {
        while let Some(change) = changes.next().await {
            match change {
                Change::Put(stored) if stored.key.kind == Kind::Node => runtime.node_is(stored).await,
                Change::Gone { key, .. } if key.kind == Kind::Node => {
                    runtime.known_nodes.remove(&key.name);
                }
                Change::Put(stored) => runtime.pod_is(stored).await,
                Change::Gone { key, .. } => runtime.pod_is_gone(&key),
                Change::Unavailable(_, error) => {
                    tracing::error!(%error, "the lab's runtime cannot read pods and nodes, and misses their changes");
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
    /// The node of each pod, also of one whose binding is not delivered yet.
    placed: BTreeMap<Key, String>,
    /// The pods for which there is no node.
    unplaced: BTreeMap<Key, Stored>,
    /// The objects of the nodes, by name.
    known_nodes: BTreeMap<String, Value>,
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
                self.schedule(stored).await;
            }
            return;
        };
        self.unplaced.remove(&stored.key);
        self.placed.insert(stored.key.clone(), node.clone());
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

    /// A node that is new or has changed may be one for the pods that have none.
    async fn node_is(&mut self, node: Stored) {
        if self.known_nodes.insert(node.key.name, node.value.clone()) == Some(node.value) {
            return;
        }
        for pod in std::mem::take(&mut self.unplaced).into_values() {
            self.schedule(pod).await;
        }
    }

    fn pod_is_gone(&mut self, key: &Key) {
        self.placed.remove(key);
        self.unplaced.remove(key);
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

    /// Chooses a node on which the pod may run: the node with the fewest known pods, and among those the first by name.
    async fn schedule(&mut self, mut stored: Stored) {
        let placement = Placement::of(&stored.value);
        let pods_on = |name: &str| self.placed.values().filter(|node| *node == name).count();
        let fits =
            |name: &&String| self.known_nodes.get(*name).is_some_and(|node| placement.fits(node, false));
        let Some(node) = self.nodes.keys().filter(fits).min_by_key(|name| pods_on(name)).cloned() else {
            let message = "no node has the labels that its nodeSelector and its affinity require, and only taints that it tolerates";
            self.unplaced.insert(stored.key.clone(), stored.clone());
            let status = json!({"phase": "Pending", "reason": "Unschedulable", "message": message});
            let uid = stored.value["metadata"]["uid"].as_str();
            return set_status(&*self.store, &stored.key, uid, status).await;
        };
        stored.value["spec"]["nodeName"] = json!(node);
        match self.store.update(&stored.key, stored.value, &stored.version).await {
            Ok(_) => drop(self.placed.insert(stored.key, node)),
            // It has changed in the meantime; the watch delivers it again.
            Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
            Err(error) => tracing::error!(pod = %stored.key, %error, "cannot bind the pod to a node"),
        }
    }
}
