//! A pod on its node, as a container runtime creates it: a network namespace, an interface by the CNI plugin, a
//! process.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Child;
use tokio::sync::mpsc;
use tortie_api::Key;
use tortie_api::kubernetes::Pod;
use tortie_hcn::schema::Namespace as HcnNamespace;
use tortie_hcn::{Guid, Hcn, HcnExt, RemoteHcn};
use tortie_hns_emulator::bind_compartment;
use tortie_kernel::namespace::NetNs;
use tortie_servers::wine;
use tortie_store::{Store, StoreError};

use crate::kubelet::Kubelet;
use crate::pod_status::{End, PodStatus};
use crate::program::{self, Program};
use crate::services::dns;
use crate::wine::Programs;
use crate::{LabDir, LabError};

/// The delay before a pod that could not be started, or deleted, is retried, as a kubelet does.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// A node, as the runtime knows it.
pub(crate) struct RuntimeNode {
    pub(crate) name: String,
    pub(crate) address: Ipv4Addr,
    pub(crate) netns: Arc<NetNs>,
    pub(crate) programs: Programs,
    /// The HNS of a Windows node.
    pub(crate) hcn: Option<Arc<RemoteHcn>>,
    pub(crate) cni_socket: PathBuf,
    pub(crate) deletion_queue: PathBuf,
}

/// A command for a pod's task.
pub(crate) enum Wish {
    Run(Box<DesiredPod>),
    /// Stop it, and end its deletion in the API if it has this uid there.
    Stop {
        deleted: Option<String>,
    },
}

/// A pod that should run on a node.
pub(crate) struct DesiredPod {
    pub(crate) pod: Pod,
    pub(crate) uid: Option<String>,
    /// Its containers, as they are in the API.
    pub(crate) containers: Vec<Value>,
    pub(crate) node: Arc<RuntimeNode>,
}

/// Where the status of pods is written.
#[derive(Clone)]
pub(crate) enum PodApi {
    /// Into the stored objects, which belong to nobody else.
    Stored(Arc<dyn Store>),
    Kubernetes(Kubelet),
}

impl PodApi {
    async fn set_status(&self, key: &Key, wanted: &DesiredPod, status: &PodStatus) {
        match self {
            Self::Stored(store) => {
                set_status(&**store, key, wanted.uid.as_deref(), status.stored()).await;
            }
            Self::Kubernetes(kubelet) => {
                let uid = wanted.uid.as_deref().unwrap_or_default();
                kubelet.set_status(key, uid, status, &wanted.containers).await;
            }
        }
    }

    async fn end_deletion(&self, key: &Key, uid: &str) {
        match self {
            Self::Stored(_) => {}
            Self::Kubernetes(kubelet) => kubelet.end_deletion(key, uid).await,
        }
    }
}

/// Starts and stops a pod, in the order of the commands.
pub(crate) struct PodTask {
    dir: LabDir,
    api: PodApi,
    key: Key,
    wishes: mpsc::UnboundedReceiver<Wish>,
}

/// The existing parts of a pod.
struct Sandbox {
    node: Arc<RuntimeNode>,
    uid: Option<String>,
    container_id: String,
    /// Its own network namespace, or its node's for a hostNetwork pod.
    netns: Arc<NetNs>,
    hcn_namespace: Option<Guid>,
    /// Whether the CNI plugin has been called with ADD.
    added: bool,
    process: Option<Child>,
    /// The process of a pod that runs the program itself, and may end.
    program: Option<Program>,
}

impl Sandbox {
    /// Waits until the pod's program ends; for ever if it runs none.
    async fn program_ends(&mut self) -> End {
        match &mut self.program {
            Some(program) => program.end().await,
            None => std::future::pending().await,
        }
    }

    /// Calls the node's HNS in a thread that may block.
    async fn hns<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Hcn) -> Result<T, E> + Send + 'static,
    ) -> Result<T, LabError> {
        let problem = |problem: String| LabError::Hns { node: self.node.name.clone(), problem };
        let hcn = self.node.hcn.clone().ok_or_else(|| problem("a Linux node has none".to_owned()))?;
        let called = tokio::task::spawn_blocking(move || call(&*hcn)).await;
        called.map_err(|error| problem(error.to_string()))?.map_err(|error| problem(error.to_string()))
    }
}

impl PodTask {
    pub(crate) fn new(dir: &LabDir, api: &PodApi, key: &Key, wishes: mpsc::UnboundedReceiver<Wish>) -> Self {
        Self { dir: dir.clone(), api: api.clone(), key: key.clone(), wishes }
    }

    pub(crate) async fn run(mut self) {
        let mut sandbox: Option<Sandbox> = None;
        let mut next = self.wishes.recv().await;
        while let Some(wish) = next {
            if let Some(old) = sandbox.take() {
                self.tear_down(old).await;
            }
            next = match wish {
                Wish::Stop { deleted } => {
                    if let Some(uid) = deleted {
                        self.api.end_deletion(&self.key, &uid).await;
                    }
                    self.wishes.recv().await
                }
                Wish::Run(wanted) => match self.bring_up(&wanted).await {
                    Ok((mut new, addresses)) => {
                        let newer = tokio::select! {
                            newer = self.wishes.recv() => Some(newer),
                            end = new.program_ends() => {
                                let node = new.node.address.to_string();
                                let status = PodStatus::Ended { addresses, node, end };
                                self.api.set_status(&self.key, &wanted, &status).await;
                                None
                            }
                        };
                        sandbox = Some(new);
                        match newer {
                            Some(newer) => newer,
                            None => self.wishes.recv().await,
                        }
                    }
                    Err(error) => {
                        tracing::warn!(pod = %self.key, %error, "cannot start the pod; the lab retries");
                        let status = PodStatus::Waiting(error.to_string());
                        self.api.set_status(&self.key, &wanted, &status).await;
                        match tokio::time::timeout(RETRY_DELAY, self.wishes.recv()).await {
                            Ok(newer) => newer,
                            Err(_) => Some(Wish::Run(wanted)),
                        }
                    }
                },
            };
        }
    }

    /// Starts the pod; returns its addresses, too.
    async fn bring_up(&self, wanted: &DesiredPod) -> Result<(Sandbox, Vec<String>), LabError> {
        let mut sandbox = self.new_sandbox(wanted)?;
        match self.start(wanted, &mut sandbox).await {
            Ok(addresses) => Ok((sandbox, addresses)),
            Err(error) => {
                self.tear_down(sandbox).await;
                Err(error)
            }
        }
    }

    fn new_sandbox(&self, wanted: &DesiredPod) -> Result<Sandbox, LabError> {
        let netns = match wanted.pod.spec.host_network {
            true => wanted.node.netns.clone(),
            false => Arc::new(NetNs::create()?),
        };
        netns.bind_to(&self.netns_path())?;
        Ok(Sandbox {
            node: wanted.node.clone(),
            uid: wanted.uid.clone(),
            container_id: format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple()),
            netns,
            hcn_namespace: None,
            added: false,
            process: None,
            program: None,
        })
    }

    async fn start(&self, wanted: &DesiredPod, sandbox: &mut Sandbox) -> Result<Vec<String>, LabError> {
        // A hostNetwork pod uses its node's network, so the CNI plugin is not called.
        let addresses = match wanted.pod.spec.host_network {
            true => vec![sandbox.node.address.to_string()],
            false => self.connect(sandbox).await?,
        };
        if !wanted.pod.spec.host_network {
            self.write_resolver()?;
        }
        match program::arguments(&wanted.containers) {
            Some(arguments) => {
                let resolver =
                    (!wanted.pod.spec.host_network).then(|| self.dir.resolver(&self.key.namespace));
                sandbox.program =
                    Some(Program::start(&self.dir, &sandbox.netns, &arguments, resolver.as_deref())?);
            }
            None => sandbox.process = Some(self.start_process(wanted, sandbox).await?),
        }
        let node = sandbox.node.address.to_string();
        let status = PodStatus::Running { addresses: addresses.clone(), node };
        self.api.set_status(&self.key, wanted, &status).await;
        Ok(addresses)
    }

    /// Writes what `tortie lab exec` shows to commands as `/etc/resolv.conf`.
    fn write_resolver(&self) -> Result<(), LabError> {
        let path = self.dir.resolver(&self.key.namespace);
        std::fs::write(&path, dns::resolver(&self.key.namespace)).map_err(LabError::file("writing", &path))
    }

    /// Connects the sandbox by the CNI plugin, and returns its addresses.
    async fn connect(&self, sandbox: &mut Sandbox) -> Result<Vec<String>, LabError> {
        if sandbox.node.hcn.is_some() {
            self.make_hcn_namespace(sandbox).await?;
        }
        sandbox.added = true; // also where it fails: CNI wants a DEL then
        let result = self.cni("ADD", sandbox).await?;
        let addresses = result["ips"].as_array().into_iter().flatten();
        let addresses = addresses.filter_map(|ip| ip["address"].as_str()?.split('/').next());
        Ok(addresses.map(str::to_owned).collect())
    }

    /// Creates an HCN namespace for the sandbox of a Windows node, with the network namespace as its compartment.
    async fn make_hcn_namespace(&self, sandbox: &mut Sandbox) -> Result<(), LabError> {
        let id = sandbox.hns(|hcn| hcn.create_namespace(&HcnNamespace::default())).await?;
        sandbox.hcn_namespace = Some(id);
        let path = self.netns_path();
        sandbox.hns(move |hcn| bind_compartment(hcn, id, Some(&path))).await
    }

    /// Starts the pod's process and waits until it is ready.
    async fn start_process(&self, wanted: &DesiredPod, sandbox: &Sandbox) -> Result<Child, LabError> {
        let pod = &wanted.pod;
        let is_dns = wanted.containers.iter().any(|container| container["image"] == dns::IMAGE);
        let mut command = Command::new(self.dir.binary("tortie-pod"));
        command
            .arg(format!("{}/{}", self.key.namespace, self.key.name))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if is_dns {
            command.arg("--dns").arg(self.dir.path());
        }
        for port in pod.spec.containers.iter().flat_map(|container| &container.ports) {
            if !is_dns && port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP") {
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
            let problem = match pod.spec.host_network {
                true => {
                    "its process ended before it served; does another hostNetwork pod of its node use the port?"
                }
                false => "its process ended before it served",
            };
            return Err(LabError::problem(&self.key, problem));
        }
        Ok(child)
    }

    async fn tear_down(&self, mut sandbox: Sandbox) {
        if let Some(mut process) = sandbox.process.take() {
            let _ = process.kill().await;
        }
        if let Some(program) = sandbox.program.take() {
            program.kill().await;
        }
        // Runtimes repeat DEL. Otherwise the pod's endpoint and address would stay for ever if an agent cannot reach the datastore now.
        while sandbox.added {
            match self.cni("DEL", &sandbox).await {
                Ok(_) => sandbox.added = false,
                Err(error) => {
                    tracing::warn!(pod = %self.key, %error, "the CNI plugin did not delete the pod; the lab retries");
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            }
        }
        if let Some(id) = sandbox.hcn_namespace {
            let unbound = sandbox.hns(move |hcn| bind_compartment(hcn, id, None)).await;
            let deleted = sandbox.hns(move |hcn| hcn.delete_namespace(id)).await;
            if let Err(error) = unbound.and(deleted) {
                tracing::error!(pod = %self.key, %error, "the pod's HCN namespace was not deleted");
            }
        }
        if let Err(error) = NetNs::unbind(&self.netns_path()) {
            tracing::error!(pod = %self.key, %error, "the pod's network namespace was not removed");
        }
    }

    fn netns_path(&self) -> PathBuf {
        self.dir.pod_netns(&self.key.namespace, &self.key.name)
    }

    /// Executes the CNI plugin as a container runtime does.
    async fn cni(&self, verb: &str, sandbox: &Sandbox) -> Result<Value, LabError> {
        // The namespace as CNI names it: its path, or the GUID of the HCN namespace.
        let (network, netns) = match sandbox.hcn_namespace {
            Some(id) => ("Calico", id.to_string()),
            None => ("k8s-pod-network", self.netns_path().display().to_string()),
        };
        let uid = sandbox.uid.iter().map(|uid| format!(";K8S_POD_UID={uid}")).collect::<String>();
        let mut config = json!({"cniVersion": "1.0.0", "name": network, "type": "tortie-cni"});
        let mut command = sandbox.node.programs.command(&self.dir, "tortie-cni");
        // Under Wine, it needs variables of Wine, and finds the agent by the name of its pipe.
        if let Programs::Native = sandbox.node.programs {
            command.env_clear();
            config["agentSocket"] = json!(sandbox.node.cni_socket);
            config["deletionQueue"] = json!(sandbox.node.deletion_queue);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).envs([
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", &sandbox.container_id),
            ("CNI_NETNS", &netns),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", &sandbox.node.programs.path(&self.dir.path().join("bin"))),
            (
                "CNI_ARGS",
                &format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={}{uid}",
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
        let has_succeeded = match sandbox.node.programs {
            Programs::Native => output.status.success(),
            Programs::Wine(_) => wine::plugin_has_succeeded(&output),
        };
        if has_succeeded {
            return Ok(document);
        }
        let answer = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        Err(LabError::problem(&self.key, format!("CNI {verb} failed: {}{}", answer.trim(), errors.trim())))
    }
}

/// Writes a pod's status, unless it is already stored, or another pod has the name by now.
pub(crate) async fn set_status(store: &dyn Store, key: &Key, uid: Option<&str>, status: Value) {
    let is_meant = |value: &Value| value["status"] != status && value["metadata"]["uid"].as_str() == uid;
    loop {
        let written = match store.get(key).await {
            Ok(Some(mut stored)) if is_meant(&stored.value) => {
                stored.value["status"] = status.clone();
                store.update(key, stored.value, &stored.version).await.map(drop)
            }
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        match written {
            Err(StoreError::Conflict(_)) => {}
            Ok(()) | Err(StoreError::NotFound(_)) => return,
            Err(error) => return tracing::error!(pod = %key, %error, "cannot write the pod's status"),
        }
    }
}
