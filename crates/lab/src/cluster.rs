//! The cluster, inside the lab's namespaces.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tortie_api::manifest::Object;
use tortie_api::{Key, Kind, Positions, Resource};
use tortie_kernel::namespace::mount;
use tortie_servers::wine::WindowsPrograms;
use tortie_store::rpc::{Limits, serve_tls, serve_unix};
use tortie_store::{Change, Interest, NotInForce, Source, Store, StoreError, wait_in_force};

use crate::controller::MissingWrites;
use crate::datastore::{self, Datastore, Kubernetes, Servers};
use crate::kubelet::Kubelet;
use crate::node::{Node, Os, StoreAccess};
use crate::pki::Authority;
use crate::runtime;
use crate::sandbox::{PodApi, RuntimeNode};
use crate::services::{self, addresses, dns};
use crate::wine::Programs;
use crate::{LabDir, LabError, Progress, controller, slices, underlay, wine, workloads};

/// How long to wait for a node's first report.
pub(crate) const NODE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait until pods run.
const POD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to wait until a policy is in force.
const POLICY_TIMEOUT: Duration = Duration::from_secs(30);
/// How many log lines an error shows.
const LOG_LINES: usize = 15;

/// What replaces the controllers of a Kubernetes API: what each keeps, the kinds that it reads, and its decisions.
const CONTROLLERS: &[(&str, &[Kind], MissingWrites)] = &[
    ("EndpointSlices", &slices::KINDS, slices::missing_writes),
    ("addresses of Services", &addresses::KINDS, addresses::missing_writes),
    ("DNS", &dns::KINDS, dns::missing_writes),
    ("pods of workloads", &workloads::KINDS, workloads::missing_writes),
];

/// The nodes of a lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Linux nodes: `primary`, `linux-2`, …
    pub linux: usize,
    /// Windows nodes: `minion`, `windows-2`, …
    pub windows: usize,
    /// Whether nodes run a BGP speaker; Windows nodes only with `l2bridge`.
    pub bgp: bool,
    /// Whether pools without encapsulation get direct routes; on Windows nodes only with `l2bridge`.
    pub direct_routes: bool,
    /// Whether the networks of Windows nodes are of type L2Bridge.
    pub l2bridge: bool,
    /// Whether Linux nodes and their pods have IPv6 addresses, too.
    pub ipv6: bool,
    /// The programs that Windows nodes run under Wine; `None`: they run those of Linux.
    pub wine: Option<WindowsPrograms>,
}

impl Shape {
    /// The mode of the first pools. Windows nodes of such a lab have no VXLAN, and all nodes have routes to pods.
    fn vxlan_mode(&self) -> &'static str {
        let has_routes = self.bgp || self.direct_routes;
        if self.l2bridge && has_routes { "Never" } else { "Always" }
    }
}

/// A running cluster.
pub struct Cluster {
    dir: LabDir,
    store: Arc<dyn Source>,
    datastore: Datastore,
    /// The servers of a Kubernetes API, and a client for what kubelets write there.
    kubernetes: Option<(Arc<Kubernetes>, Kubelet)>,
    nodes: Vec<Node>,
    tasks: Vec<JoinHandle<()>>,
}

impl Cluster {
    /// Starts the cluster. Must be called as the first process inside [`supervise`](crate::supervise).
    ///
    /// # Errors
    /// Something did not start; the error contains the log of the process concerned.
    pub async fn up(
        dir: LabDir,
        shape: Shape,
        datastore: Datastore,
        progress: &Progress,
    ) -> Result<Self, LabError> {
        let count = shape.linux + shape.windows;
        if count == 0 || count > underlay::MAX_NODES {
            return Err(LabError::problem(
                "the lab",
                format!("needs 1 to {} nodes, not {count}", underlay::MAX_NODES),
            ));
        }
        mount::tmpfs(&dir.netns_folder())?;
        if let Some(programs) = &shape.wine {
            wine::prepare(programs).await?;
            progress.done("a Windows machine is prepared for Wine");
        }
        underlay::lay(count)?;
        let authority = Authority::new()?;
        let names = names(&shape);
        let all: Vec<String> = names.iter().map(|(name, _)| name.clone()).collect();
        let (store, servers) = datastore::open(datastore, &dir, &authority, &all).await?;
        let (tasks, kubernetes) = match servers {
            Servers::None => (Vec::new(), None),
            Servers::Etcd(process) => (vec![tokio::spawn(process.keep())], None),
            Servers::Kubernetes(servers) => {
                (Vec::new(), Some((servers, Kubelet::new(&dir.kubeconfig()).await?)))
            }
        };
        let mut cluster = Self { dir, store, datastore, kubernetes, nodes: Vec::new(), tasks };
        cluster.serve_store(&authority).await?;
        cluster.seed(&shape).await?;
        progress.done(match datastore {
            Datastore::Embedded => "the datastore is served",
            Datastore::Etcd => "the datastore is served by etcd",
            Datastore::Kubernetes => "the datastore is a Kubernetes API, with its controllers and scheduler",
        });

        for (index, (name, os)) in names.into_iter().enumerate() {
            let mut node = Node::new(&cluster.dir, name, os, index, &underlay::neighbours(index, count))?;
            let is_bridge = os == Os::Windows && shape.l2bridge;
            let takes_plain = os == Os::Linux || is_bridge;
            // An overlay network of a Windows node has no IPv6.
            if shape.ipv6 && takes_plain {
                node.add_ipv6(index)?;
            }
            if let Some(programs) = shape.wine.as_ref().filter(|_| os == Os::Windows) {
                node.use_wine(&cluster.dir, programs)?;
            }
            let options = [
                (shape.bgp && takes_plain, "--bgp"),
                (shape.direct_routes && takes_plain, "--direct-routes"),
                (is_bridge, "--windows-network=l2bridge"),
                (os == Os::Linux, "--services"),
                // Nobody else has the cluster's Services.
                (os == Os::Linux && datastore == Datastore::Etcd, "--services-source=datastore"),
            ];
            let options = options.into_iter().filter(|(is_given, _)| *is_given);
            let options: Vec<&str> = options.map(|(_, option)| option).collect();
            cluster.add_node(node, &options, &authority).await?;
        }
        cluster.wait_for_nodes(progress).await?;
        cluster.tasks.extend(cluster.nodes.iter_mut().flat_map(Node::watch));
        cluster.start_runtime().await?;
        cluster.keep_nodes();
        Ok(cluster)
    }

    /// The cluster's datastore.
    #[must_use]
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Applies a manifest as users do: with kubectl if the datastore is a Kubernetes API, except that only Tortie and
    /// calicoctl write Calico's kinds there. Returns the positions of its objects.
    pub(crate) async fn apply(&self, manifest: &str, objects: &[Object]) -> Result<Positions, LabError> {
        let mut positions = Positions::default();
        let is_calicos = |object: &Object| object.key.kind.api_version().starts_with("projectcalico.org/");
        if let Some((kubernetes, _)) = &self.kubernetes
            && !objects.iter().any(is_calicos)
        {
            kubernetes.apply(manifest).await?;
            for object in objects {
                if let Some(stored) = self.store.get(&object.key).await? {
                    positions.advance(object.key.kind, stored.position);
                }
            }
            return Ok(positions);
        }
        for object in objects {
            positions.advance(object.key.kind, self.store.apply(object).await?.position());
        }
        Ok(positions)
    }

    /// The lab's folder.
    #[must_use]
    pub fn dir(&self) -> &LabDir {
        &self.dir
    }

    /// Waits until everything up to these positions is in force on all nodes.
    ///
    /// # Errors
    /// A node did not report it in time.
    pub async fn wait_in_force(&self, positions: &Positions) -> Result<(), LabError> {
        match wait_in_force(&*self.store, positions, POLICY_TIMEOUT).await {
            Ok(_) => Ok(()),
            Err(NotInForce::Store(error)) => Err(error.into()),
            Err(late @ NotInForce::Late { .. }) => Err(LabError::problem("the policy", late.to_string())),
        }
    }

    /// Waits until these pods run; returns their addresses and nodes.
    ///
    /// # Errors
    /// A pod did not run in time; the error contains what its node reported about it.
    pub async fn wait_for_pods(&self, keys: &[Key]) -> Result<BTreeMap<Key, (IpAddr, String)>, LabError> {
        let deadline = Instant::now() + POD_TIMEOUT;
        let mut running = BTreeMap::new();
        for key in keys {
            loop {
                let stored = self.store.get(key).await?;
                let value = stored.map(|stored| stored.value).unwrap_or_default();
                if let Ok(Resource::Pod(pod)) = Resource::read(key, &value)
                    && let (Some("Running"), Some(address)) = (pod.status.phase.as_deref(), pod.status.pod_ip)
                {
                    running.insert(key.clone(), (address, pod.spec.node_name.unwrap_or_default()));
                    break;
                }
                if Instant::now() > deadline {
                    let reason = value["status"]["message"].as_str().unwrap_or("no node has taken it");
                    return Err(LabError::problem(key, format!("does not run: {reason}")));
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        Ok(running)
    }

    /// Stops the nodes. The rest ends with the lab's first process.
    pub async fn down(mut self) {
        // In the reverse order of the start: the runtime, each node's agent and then its HNS, the datastore.
        for task in std::mem::take(&mut self.tasks).into_iter().rev() {
            task.abort();
            let _ = task.await; // only that it was aborted
        }
        for node in &mut self.nodes {
            node.stop().await;
        }
    }

    async fn serve_store(&mut self, authority: &Authority) -> Result<(), LabError> {
        let (store, socket) = (self.store.clone(), self.dir.store_socket());
        self.tasks.push(tokio::spawn(async move {
            report("the datastore's socket", serve_unix(store, &socket).await)
        }));
        if self.datastore != Datastore::Embedded {
            return Ok(());
        }
        let (store, identity) = (self.store.clone(), authority.issue("tortie-store")?.into());
        let address = SocketAddr::new(IpAddr::V4(underlay::LAB), underlay::STORE_PORT);
        self.tasks.push(tokio::spawn(async move {
            report("the datastore's port", serve_tls(store, address, identity, Limits::default()).await)
        }));
        Ok(())
    }

    /// Creates the objects that a cluster has before anything is deployed.
    async fn seed(&self, shape: &Shape) -> Result<(), LabError> {
        let vxlan_mode = shape.vxlan_mode();
        let pool = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "default-ipv4-ippool"},
            "spec": {"cidr": "10.244.0.0/16", "blockSize": 26, "vxlanMode": vxlan_mode, "natOutgoing": true},
        });
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}});
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "default"}});
        let ipam = json!({"strict_affinity": true, "auto_allocate_blocks": true});
        let pool_v6 = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "IPPool", "metadata": {"name": "default-ipv6-ippool"},
            "spec": {"cidr": "fd00:10:244::/56", "blockSize": 122, "vxlanMode": vxlan_mode, "natOutgoing": true},
        });
        let pool_v6 = shape.ipv6.then(|| (Key::global(Kind::IpPool, "default-ipv6-ippool"), pool_v6));
        let pools = [(Key::global(Kind::IpPool, "default-ipv4-ippool"), pool)].into_iter().chain(pool_v6);
        for (key, value) in pools.chain([
            (Key::global(Kind::Namespace, "default"), namespace),
            (Key::namespaced(Kind::ServiceAccount, "default", "default"), account),
            (Key::global(Kind::IpamConfig, "default"), ipam),
        ]) {
            match self.store.create(&key, value).await {
                // A Kubernetes API has the namespace and its service account already.
                Ok(_) | Err(StoreError::AlreadyExists(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    async fn add_node(
        &mut self,
        mut node: Node,
        options: &[&str],
        authority: &Authority,
    ) -> Result<(), LabError> {
        let os = node.os;
        match &self.kubernetes {
            Some((_, kubelet)) => {
                kubelet.register(&node.object(), os.name(), &node.address.to_string()).await?;
            }
            None => {
                self.store.create(&Key::global(Kind::Node, &node.name), node.object()).await?;
            }
        }
        if os == Os::Windows {
            node.start_hns(&self.dir)?;
        }
        let access = match (&self.kubernetes, self.datastore) {
            (Some((kubernetes, _)), _) => StoreAccess::Kubeconfig(kubernetes.kubeconfig_of(&node.name)),
            (None, datastore) => {
                let address = match datastore {
                    Datastore::Etcd => format!("etcd:{}", datastore::etcd::url()),
                    _ => format!("tls:{}:{}", underlay::LAB, underlay::STORE_PORT),
                };
                StoreAccess::Tls { address, identity: authority.issue_for_node(&node.name)? }
            }
        };
        node.start_agent(&self.dir, &access, options)?;
        self.nodes.push(node);
        Ok(())
    }

    async fn wait_for_nodes(&mut self, progress: &Progress) -> Result<(), LabError> {
        let deadline = Instant::now() + NODE_TIMEOUT;
        for node in &mut self.nodes {
            wait_until_it_takes_pods(&self.dir, node, deadline).await?;
            let os = match (node.os, &node.programs) {
                (Os::Linux, _) => "Linux",
                (Os::Windows, Programs::Native) => "Windows, emulated HNS",
                (Os::Windows, Programs::Wine(_)) => "Windows under Wine, emulated HNS",
            };
            progress.done(&format!("node {} ({os}) is up at {}", node.name, node.address));
        }
        Ok(())
    }

    async fn start_runtime(&mut self) -> Result<(), LabError> {
        let nodes: Vec<RuntimeNode> = self.nodes.iter().map(|node| node.for_runtime(&self.dir)).collect();
        // Agents of Linux nodes serve Services themselves.
        let proxied = nodes.iter().filter_map(|node| Some((node.name.clone(), node.hcn.clone()?)));
        let proxied = proxied.collect();
        let (dir, store) = (self.dir.clone(), self.store.clone());
        match &self.kubernetes {
            Some((_, kubelet)) => {
                let names = self.nodes.iter().map(|node| node.name.clone()).collect();
                self.tasks.push(kubelet.keep_leases(names));
                self.tasks.push(runtime::start(dir, store, PodApi::Kubernetes(kubelet.clone()), nodes));
            }
            None => {
                self.tasks.push(runtime::start(dir, store.clone(), PodApi::Stored(store.clone()), nodes));
                for (what, kinds, missing_writes) in CONTROLLERS {
                    self.tasks.push(controller::start(store.clone(), what, kinds, *missing_writes).await?);
                }
            }
        }
        self.tasks.push(services::start(self.store.clone(), proxied).await?);
        Ok(())
    }

    /// Registers nodes again whose objects were deleted, as kubelets do.
    fn keep_nodes(&mut self) {
        let objects = self.nodes.iter().map(|node| {
            let address = node.address.to_string();
            (Key::global(Kind::Node, &node.name), (node.object(), node.os, address))
        });
        let objects: BTreeMap<Key, (Value, Os, String)> = objects.collect();
        let store = self.store.clone();
        let kubelet = self.kubernetes.as_ref().map(|(_, kubelet)| kubelet.clone());
        let mut changes = store.follow(vec![Interest::all(Kind::Node)]);
        self.tasks.push(tokio::spawn(async move {
            while let Some(change) = changes.next().await {
                let Change::Gone { key, .. } = change else { continue };
                let Some((object, os, address)) = objects.get(&key) else { continue };
                let registered = match &kubelet {
                    Some(kubelet) => kubelet.register(object, os.name(), address).await,
                    None => match store.create(&key, object.clone()).await {
                        Ok(_) | Err(StoreError::AlreadyExists(_)) => Ok(()),
                        Err(error) => Err(error.into()),
                    },
                };
                if let Err(error) = registered {
                    tracing::error!(%error, "cannot register the node again");
                }
            }
        }));
    }
}

/// Waits until the agent of a node serves the CNI plugin.
pub(crate) async fn wait_until_it_takes_pods(
    dir: &LabDir,
    node: &mut Node,
    deadline: Instant,
) -> Result<(), LabError> {
    while !node.takes_pods(dir) {
        if let Some(process) = node.ended_process() {
            let problem = format!("ended; the last lines of its log:\n{}", log_tail(dir, &process));
            return Err(LabError::problem(process, problem));
        }
        if Instant::now() > deadline {
            let what = format!("the agent of node {} does not take pods", node.name);
            let log = log_tail(dir, &format!("{}-agent", node.name));
            return Err(LabError::Timeout { what, seconds: NODE_TIMEOUT.as_secs(), log });
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn log_tail(dir: &LabDir, process: &str) -> String {
    let text = fs::read_to_string(dir.log(process)).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

/// The nodes' names and systems.
fn names(shape: &Shape) -> Vec<(String, Os)> {
    let names = |first: &'static str, more: &'static str, count: usize, os: Os| {
        (1..=count).map(move |n| (if n == 1 { first.to_owned() } else { format!("{more}-{n}") }, os))
    };
    let linux = names("primary", "linux", shape.linux, Os::Linux);
    linux.chain(names("minion", "windows", shape.windows, Os::Windows)).collect()
}

impl Drop for Cluster {
    /// Without this, tasks would report that the datastore is lost while it is taken down.
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn report(what: &str, result: Result<(), StoreError>) {
    if let Err(error) = result {
        tracing::error!(%error, "{what} is lost; nodes keep what is in force");
    }
}
