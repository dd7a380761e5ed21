//! Stands in for the scheduler, the kubelets and the container runtimes: pods of the datastore get a node, a network
//! namespace, an interface by the CNI plugin, and a process.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind, Resource};
use tortie_hcn::schema::Namespace as HcnNamespace;
use tortie_hcn::{Guid, HcnExt, RemoteHcn};
use tortie_hns_emulator::bind_compartment;
use tortie_linux::namespace::NetNs;
use tortie_store::{Event, Store, StoreError, Stored};

use crate::{LabDir, LabError};

/// How long to wait before a pod that could not be started is tried again, as a kubelet does.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// What the runtime has to know of a node.
pub(crate) struct RuntimeNode {
    pub(crate) name: String,
    pub(crate) labels: Value,
    pub(crate) address: Ipv4Addr,
    pub(crate) netns: Arc<NetNs>,
    /// The HNS of a Windows node.
    pub(crate) hcn: Option<Arc<RemoteHcn>>,
    pub(crate) cni_socket: PathBuf,
    pub(crate) deletion_queue: PathBuf,
}

/// Starts the runtime of all nodes.
pub(crate) async fn start(
    dir: LabDir,
    store: Arc<dyn Store>,
    nodes: Vec<RuntimeNode>,
) -> Result<JoinHandle<()>, LabError> {
    let nodes = nodes.into_iter().map(|node| (node.name.clone(), Arc::new(node))).collect();
    let mut runtime = Runtime { dir, store, nodes, pods: HashMap::new(), bound: BTreeMap::new() };
    let listing = runtime.store.list(Kind::Pod).await?;
    let mut events = runtime.store.watch(&[Kind::Pod], listing.revision).await?;
    Ok(tokio::spawn(async move {
        for stored in listing.items {
            runtime.pod_is(stored).await;
        }
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Put(stored)) => runtime.pod_is(stored).await,
                Ok(Event::Deleted { key, .. }) => runtime.pod_is_gone(&key),
                Err(error) => {
                    tracing::error!(%error, "the lab's runtime lost the datastore; pods that come or go now are not seen");
                    return;
                }
            }
        }
    }))
}

struct Runtime {
    dir: LabDir,
    store: Arc<dyn Store>,
    nodes: BTreeMap<String, Arc<RuntimeNode>>,
    /// One task for each pod: what happens to a pod happens in order.
    pods: HashMap<Key, mpsc::UnboundedSender<Wish>>,
    /// The node of each pod that has been given one.
    bound: BTreeMap<Key, String>,
}

enum Wish {
    Run(Box<Pod>, Arc<RuntimeNode>),
    Stop,
}

impl Runtime {
    async fn pod_is(&mut self, stored: Stored) {
        let Ok(Resource::Pod(pod)) = Resource::read(&stored.key, &stored.value) else {
            tracing::warn!(pod = %stored.key, "the pod cannot be read; it is not run");
            return;
        };
        let Some(node) = pod.spec.node_name.clone() else { return self.schedule(stored, &pod).await };
        let Some(node) = self.nodes.get(&node) else {
            tracing::warn!(pod = %stored.key, node, "the pod's node is not of this lab; it is not run");
            return;
        };
        if self.bound.insert(stored.key.clone(), node.name.clone()).as_ref() == Some(&node.name) {
            return;
        }
        let wish = Wish::Run(Box::new(pod), node.clone());
        // A task ends only with the runtime.
        let _ = self.task_of(&stored.key).send(wish);
    }

    fn pod_is_gone(&mut self, key: &Key) {
        if self.bound.remove(key).is_some() {
            let _ = self.task_of(key).send(Wish::Stop);
        }
    }

    fn task_of(&mut self, key: &Key) -> &mpsc::UnboundedSender<Wish> {
        let (dir, store) = (&self.dir, &self.store);
        self.pods.entry(key.clone()).or_insert_with(|| {
            let (sender, wishes) = mpsc::unbounded_channel();
            tokio::spawn(PodTask { dir: dir.clone(), store: store.clone(), key: key.clone(), wishes }.run());
            sender
        })
    }

    /// Gives the pod the node with the fewest pods among those that its nodeSelector matches.
    async fn schedule(&self, mut stored: Stored, pod: &Pod) {
        let pods_on = |name: &str| self.bound.values().filter(|node| *node == name).count();
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
        match self.store.update(&stored.key, stored.value, stored.revision).await {
            // Changed in the meantime: the watch shows it again.
            Ok(_) | Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
            Err(error) => tracing::error!(pod = %stored.key, %error, "the pod could not be given a node"),
        }
    }
}

/// Writes a pod's status, if it is not so already.
async fn set_status(store: &dyn Store, key: &Key, status: Value) {
    loop {
        let written = match store.get(key).await {
            Ok(Some(mut stored)) if stored.value["status"] != status => {
                stored.value["status"] = status.clone();
                store.update(key, stored.value, stored.revision).await.map(drop)
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        match written {
            Err(StoreError::Conflict(_)) => {}
            Ok(()) | Err(StoreError::NotFound(_)) => return,
            Err(error) => return tracing::error!(pod = %key, %error, "the pod's status could not be written"),
        }
    }
}

/// What is there of a pod.
struct Sandbox {
    node: Arc<RuntimeNode>,
    container_id: String,
    netns: NetNs,
    /// What CNI calls the namespace: its path, or the GUID of the HCN namespace.
    cni_netns: String,
    hcn_namespace: Option<Guid>,
    process: Option<Child>,
}

struct PodTask {
    dir: LabDir,
    store: Arc<dyn Store>,
    key: Key,
    wishes: mpsc::UnboundedReceiver<Wish>,
}

impl PodTask {
    async fn run(mut self) {
        let mut sandbox: Option<Sandbox> = None;
        let mut next = self.wishes.recv().await;
        while let Some(wish) = next {
            if let Some(old) = sandbox.take() {
                self.tear_down(old).await;
            }
            next = match wish {
                Wish::Stop => self.wishes.recv().await,
                Wish::Run(pod, node) => match self.bring_up(&pod, &node).await {
                    Ok(new) => {
                        sandbox = Some(new);
                        self.wishes.recv().await
                    }
                    Err(error) => {
                        tracing::warn!(pod = %self.key, %error, "the pod could not be started; it is tried again");
                        let status = json!({"phase": "Pending", "message": error.to_string()});
                        set_status(&*self.store, &self.key, status).await;
                        match tokio::time::timeout(RETRY_DELAY, self.wishes.recv()).await {
                            Ok(newer) => newer,
                            Err(_) => Some(Wish::Run(pod, node)),
                        }
                    }
                },
            };
        }
    }

    async fn bring_up(&self, pod: &Pod, node: &Arc<RuntimeNode>) -> Result<Sandbox, LabError> {
        let mut sandbox = self.new_sandbox(node)?;
        match self.start(pod, &mut sandbox).await {
            Ok(()) => Ok(sandbox),
            Err(error) => {
                self.tear_down(sandbox).await;
                Err(error)
            }
        }
    }

    fn new_sandbox(&self, node: &Arc<RuntimeNode>) -> Result<Sandbox, LabError> {
        let netns = NetNs::create()?;
        let path = self.dir.pod_netns(&self.key.namespace, &self.key.name);
        netns.bind_to(&path)?;
        let mut sandbox = Sandbox {
            node: node.clone(),
            container_id: format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple()),
            netns,
            cni_netns: path.display().to_string(),
            hcn_namespace: None,
            process: None,
        };
        if let Some(hcn) = &node.hcn {
            let problem = |problem: String| LabError::Hns { node: node.name.clone(), problem };
            let id =
                hcn.create_namespace(&HcnNamespace::default()).map_err(|error| problem(error.to_string()))?;
            bind_compartment(&**hcn, id, Some(&path)).map_err(|failure| problem(failure.to_string()))?;
            sandbox.cni_netns = id.to_string();
            sandbox.hcn_namespace = Some(id);
        }
        Ok(sandbox)
    }

    async fn start(&self, pod: &Pod, sandbox: &mut Sandbox) -> Result<(), LabError> {
        let result = self.cni("ADD", sandbox).await?;
        let address =
            result["ips"][0]["address"].as_str().and_then(|text| text.split('/').next()).unwrap_or_default();
        sandbox.process = Some(self.start_process(pod, sandbox).await?);
        let status = json!({
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "hostIP": sandbox.node.address.to_string(),
            "conditions": [{"type": "Ready", "status": "True"}],
        });
        set_status(&*self.store, &self.key, status).await;
        Ok(())
    }

    /// Starts the pod's process and waits until it serves.
    async fn start_process(&self, pod: &Pod, sandbox: &Sandbox) -> Result<Child, LabError> {
        let mut command = Command::new(self.dir.binary("tortie-pod"));
        command
            .arg(format!("{}/{}", self.key.namespace, self.key.name))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        for port in pod.spec.containers.iter().flat_map(|container| &container.ports) {
            if port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP") {
                command.arg(port.container_port.to_string());
            }
        }
        sandbox.netns.enter_on_spawn(&mut command)?;
        let starting = || LabError::io(format!("starting the process of {}", self.key));
        let mut child =
            tokio::process::Command::from(command).kill_on_drop(true).spawn().map_err(starting())?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line).await.map_err(starting())?;
        }
        if line.trim() != "ready" {
            return Err(LabError::problem(&self.key, "its process ended before it served"));
        }
        Ok(child)
    }

    async fn tear_down(&self, mut sandbox: Sandbox) {
        if let Some(mut process) = sandbox.process.take() {
            let _ = process.kill().await;
        }
        if let Err(error) = self.cni("DEL", &sandbox).await {
            tracing::error!(pod = %self.key, %error, "the CNI plugin did not delete the pod");
        }
        if let (Some(hcn), Some(id)) = (&sandbox.node.hcn, sandbox.hcn_namespace) {
            let unbound = bind_compartment(&**hcn, id, None).map_err(|failure| failure.to_string());
            let deleted = unbound.and_then(|()| hcn.delete_namespace(id).map_err(|error| error.to_string()));
            if let Err(error) = deleted {
                tracing::error!(pod = %self.key, error, "the pod's HCN namespace was not deleted");
            }
        }
        let path = self.dir.pod_netns(&self.key.namespace, &self.key.name);
        if let Err(error) = NetNs::unbind(&path) {
            tracing::error!(pod = %self.key, %error, "the pod's network namespace was not removed");
        }
    }

    /// Executes the CNI plugin as a container runtime does.
    async fn cni(&self, verb: &str, sandbox: &Sandbox) -> Result<Value, LabError> {
        let network = if sandbox.hcn_namespace.is_some() { "Calico" } else { "k8s-pod-network" };
        let config = json!({
            "cniVersion": "1.0.0", "name": network, "type": "tortie-cni",
            "agentSocket": sandbox.node.cni_socket, "deletionQueue": sandbox.node.deletion_queue,
        });
        let mut command = Command::new(self.dir.binary("tortie-cni"));
        command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).envs([
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", &sandbox.container_id),
            ("CNI_NETNS", &sandbox.cni_netns),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", &self.dir.path().join("bin").display().to_string()),
            (
                "CNI_ARGS",
                &format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={}",
                    self.key.namespace, self.key.name, sandbox.container_id
                ),
            ),
        ]);
        sandbox.node.netns.enter_on_spawn(&mut command)?;
        let running = || LabError::io(format!("running the CNI plugin for {}", self.key));
        let mut child = tokio::process::Command::from(command).spawn().map_err(running())?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(config.to_string().as_bytes()).await.map_err(running())?;
        }
        let output = child.wait_with_output().await.map_err(running())?;
        let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        if output.status.success() {
            return Ok(document);
        }
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        Err(LabError::problem(&self.key, format!("CNI {verb} failed: {}{}", said.trim(), errors.trim())))
    }
}
