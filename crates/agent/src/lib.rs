//! The node daemon: connects store, calc and dataplane, serves CNI, and writes reports.
//!
//! [`run`] sets up the node's tunnel end, feeds the dataplane, and only then serves CNI, so that everything is ready
//! for the first pod. Each part has a file of its own; this file connects them.

mod addresses;
mod announcement;
mod assigned;
mod bandwidth;
mod barrier;
mod bgp;
mod boot_id;
mod cluster_network;
mod cni_config;
pub mod control;
mod control_server;
#[cfg(test)]
mod damaged;
mod default_pool;
mod dns;
mod feed;
mod flannel;
mod flannel_etcd;
mod flannel_networks;
mod health;
mod holding;
mod http_server;
mod labels;
mod local;
mod locks;
mod metrics;
mod missing_leases;
mod node;
mod node_address;
mod obtain;
mod own_addresses;
#[doc(hidden)]
pub mod parsers;
mod pending;
mod plane;
mod pods;
mod policy_only;
mod publication;
mod publish;
mod queue;
mod reconfigure;
mod report;
mod runtime_config;
mod saved_state;
mod server;
mod services;
mod shared_ends;
mod tunnels;
mod unreachable;
mod unsupported;
mod windows_ipv6;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ipnet::Ipv4Net;
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tortie_api::Kind;
use tortie_api::kubernetes::Node;
use tortie_api::report::NodeStatus;
use tortie_dataplane::{Dataplane, PodWiring};
use tortie_deploy::ChainedPlugins;
use tortie_hcn::Hcn;
use tortie_ipam::{Ipam, IpamError};
use tortie_store::{Endpoints, Store, StoreError};

use assigned::AssignedPods;
use barrier::Barrier;
pub use bgp::{KINDS as BGP_KINDS, SERVICE_KINDS as BGP_SERVICE_KINDS};
pub use cni_config::CniIpam;
use cni_config::{ConfigFile, IpamSource};
use control_server::Answers;
pub use default_pool::DefaultPool;
use flannel_etcd::LeaseKeeper;
use health::{Progress, Stage};
use holding::Holding;
use http_server::{Paths, Sources};
use local::Listener;
use locks::Locks;
use metrics::{Measured, Metrics};
use node::Prepared;
pub use node_address::{AddressMethod, AddressMethods};
use plane::InForce;
use pods::Pods;
pub use policy_only::PolicyOnly;
pub use reconfigure::Reconfiguring;
use saved_state::Saver;
pub use services::ServiceProxy;
pub use tortie_flannel::FlannelEtcd;
pub use tortie_services::NodePortAddresses;
pub use tortie_windows::{AdapterSelector, Host, HostRoutes, SavedReport, StaticRules};
use unsupported::{PlainRoutes, Watched};

/// The configuration of an agent.
pub struct Config {
    /// The node's name.
    pub node: String,
    /// The datastore.
    pub store: Arc<dyn Endpoints>,
    /// The node's operating system.
    pub platform: Platform,
    /// The socket for the CNI plugin; on Windows, a named pipe ([`tortie_cni::local`]).
    pub cni_socket: PathBuf,
    /// The socket for operators ([`control`]).
    pub control_socket: PathBuf,
    /// Where the plugin stores deletions while the agent is down.
    pub deletion_queue: PathBuf,
}

/// What an agent does for its cluster and its node beside its main work. By default, nothing.
#[derive(Clone, Default)]
pub struct Extras {
    /// The pools that are created if the datastore has none of their family.
    pub default_pools: Vec<DefaultPool>,
    /// The folder where the container runtime looks for network configurations. The agent writes its own there when it
    /// serves ADD.
    pub cni_conf_dir: Option<PathBuf>,
    /// The plugins that the runtime calls after Tortie's.
    pub cni_plugins: ChainedPlugins,
    /// The section `ipam` of Tortie's plugin.
    pub cni_ipam: CniIpam,
    /// Where `/healthz`, `/readyz` and `/metrics` are served.
    pub health_address: Option<SocketAddr>,
    /// Where `/metrics` is served, too.
    pub metrics_address: Option<SocketAddr>,
    /// Whether the agent runs a BGP speaker. A Windows node with an overlay network cannot.
    pub bgp: bool,
    /// Whether pools without encapsulation get routes by way of the nodes themselves. Not with BGP, nor with the overlay network of a
    /// Windows node.
    pub direct_routes: bool,
    /// Whether nodes announce the networks of their pods by flannel's annotations. Not with BGP.
    pub flannel: bool,
    /// flannel's etcd, if the networks of the nodes' pods are leases there instead. With `flannel`.
    pub flannel_etcd: Option<FlannelEtcd>,
    /// Whether another CNI plugin connects the pods, and how the agent then recognises them.
    pub policy_only: Option<PolicyOnly>,
    /// Whether the agent serves the Services of the cluster on its node, and how. On Linux, without `policy_only`.
    pub services: Option<ServiceProxy>,
    /// The file where the agent saves the node's state, if it does. An agent that starts and finds no policy on the node reads it, and
    /// closes the pods to which policy applied until it knows the cluster.
    pub saved_state: Option<PathBuf>,
    /// How the node's own addresses are found.
    pub address_methods: AddressMethods,
    /// Reads and changes the log level at run time, for operators.
    pub log_level: Option<LogLevel>,
}

/// Changes the log level if there is a new one, in the syntax of `RUST_LOG`. Returns the level that now applies, or why the
/// new one is invalid.
pub type LogLevel = Arc<dyn Fn(Option<&str>) -> Result<String, String> + Send + Sync>;

/// The type of the network of a Windows node's pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WindowsNetwork {
    /// Packets to other nodes go in VXLAN.
    #[default]
    Overlay,
    /// Packets to other nodes leave as they are.
    L2Bridge,
}

/// The operating system of a node.
pub enum Platform {
    /// Linux, in the agent's own network namespace.
    #[cfg(target_os = "linux")]
    Linux,
    /// Windows.
    Windows {
        /// Its Host Compute Network API.
        hcn: Arc<dyn Hcn>,
        /// The rules of every pod before policy.
        static_rules: StaticRules,
        /// The machine under it, with the adapter of the overlay network.
        host: Host,
        /// The networks of the addresses of Services.
        services: Vec<Ipv4Net>,
        /// The type of the network of its pods.
        network: WindowsNetwork,
    },
    /// Another implementation of the two traits, for instance in a test. It reports its own tunnel end.
    Other {
        /// The dataplane.
        dataplane: Box<dyn Dataplane>,
        /// Connects pods.
        wiring: Arc<dyn PodWiring>,
    },
}

impl Platform {
    fn os(&self) -> &'static str {
        match self {
            #[cfg(target_os = "linux")]
            Platform::Linux => "linux",
            Platform::Windows { .. } => "windows",
            Platform::Other { .. } => "other",
        }
    }

    fn hcn(&self) -> Option<Arc<dyn Hcn>> {
        match self {
            Platform::Windows { hcn, .. } => Some(hcn.clone()),
            #[cfg(target_os = "linux")]
            Platform::Linux => None,
            Platform::Other { .. } => None,
        }
    }

    /// Whether it is a Windows node whose network has one block.
    fn is_bridge(&self) -> bool {
        matches!(self, Platform::Windows { network: WindowsNetwork::L2Bridge, .. })
    }

    /// What the runtime passes to the plugin. On Linux, kubelets write how pods resolve names.
    fn capabilities(&self) -> Vec<&'static str> {
        match self {
            Platform::Windows { .. } => vec!["dns"],
            #[cfg(target_os = "linux")]
            Platform::Linux => Vec::new(),
            Platform::Other { .. } => Vec::new(),
        }
    }

    /// The constant content of the node's reports.
    fn about(&self) -> NodeStatus {
        let static_rules = match self {
            Platform::Windows { static_rules, .. } => static_rules.reported(),
            #[cfg(target_os = "linux")]
            Platform::Linux => Vec::new(),
            Platform::Other { .. } => Vec::new(),
        };
        NodeStatus {
            os: self.os().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            heartbeat_seconds: report::HEARTBEAT.as_secs(),
            boot_id: boot_id::boot_id(),
            static_rules,
            ..NodeStatus::default()
        }
    }
}

/// Why an agent could not start, or stopped.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The store failed.
    #[error("the datastore: {0}")]
    Store(#[from] StoreError),
    /// The node has no block or tunnel address.
    #[error("addresses for the node itself: {0}")]
    Ipam(#[from] IpamError),
    /// The node lacks what the agent needs.
    #[error("node {node}: {problem}")]
    Node {
        /// The node.
        node: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// A part of the agent ended, which should never happen. The agent ends with it, and is complete after a restart.
    #[error("{part} has ended; what is in force stays so, and the agent has to be started again")]
    Ended {
        /// The part.
        part: &'static str,
    },
    /// The operating system returned an error.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// The error of the system.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl AgentError {
    pub(crate) fn system(
        what: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self::System { what: what.into(), source: Box::new(source) }
    }
}

/// Runs the agent until the future is dropped; what is in force stays in force. While another agent serves the same
/// socket, it waits.
///
/// # Errors
/// It cannot start, or a part of it has ended.
pub async fn run(config: Config) -> Result<(), AgentError> {
    run_with(config, Extras::default()).await
}

/// As [`run`], with extras.
///
/// # Errors
/// As for [`run`].
pub async fn run_with(config: Config, extras: Extras) -> Result<(), AgentError> {
    let begun = begin(&config.node, &config.cni_socket, &config.platform, &extras).await?;
    run_from(begun, config, extras).await
}

/// An agent that does not need the datastore yet. It is the only one of its socket, and keeps pods closed if the node has no policy.
/// They stay so when this is dropped.
pub struct Begun {
    _lock: std::fs::File,
    holding: Option<Holding>,
    saver: Option<Saver>,
}

/// Waits until no other agent serves the socket. Then closes the pods to which policy applied if the node has none now
/// ([`Extras::saved_state`]), and keeps them closed.
///
/// # Errors
/// The lock of the socket cannot be taken, or a thread cannot be started.
pub fn begin(
    node: &str,
    cni_socket: &Path,
    platform: &Platform,
    extras: &Extras,
) -> impl Future<Output = Result<Begun, AgentError>> + Send + use<> {
    let (node, cni_socket) = (node.to_owned(), cni_socket.to_owned());
    let saved = extras.saved_state.clone().zip(node::hold_opener(platform, extras));
    async move {
        let lock = server::lock(&cni_socket).await.map_err(|error| {
            AgentError::system(format!("the lock of the socket {}", cni_socket.display()), error)
        })?;
        let started = |error| AgentError::system("starting a thread for the saved state", error);
        let (mut holding, mut saver) = (None, None);
        if let Some((path, open)) = saved {
            holding = hold(&path, &node, open).transpose().map_err(started)?;
            saver = Some(Saver::start(path, &node).map_err(started)?);
        }
        Ok(Begun { _lock: lock, holding, saver })
    }
}

/// Keeps pods closed, if an earlier agent has saved which. A system that refuses it may also refuse what the agent does later, which says
/// more about it.
fn hold(path: &Path, node: &str, open: node::OpenHold) -> Option<std::io::Result<Holding>> {
    let saved = saved_state::read(path, node)?;
    let hold = open().inspect_err(|error| tracing::error!(%error, "cannot see whether the node has policy"));
    Some(Holding::start(hold.ok()?, saved))
}

/// Runs an agent that has begun.
///
/// # Errors
/// As for [`run`].
pub async fn run_from(begun: Begun, config: Config, extras: Extras) -> Result<(), AgentError> {
    let Config { node, store: endpoints, platform, cni_socket, control_socket, deletion_queue } = config;
    let Begun { _lock, holding, saver } = begun;
    let metrics = Arc::new(Metrics::new());
    let progress = Arc::new(Progress::new(holding.as_ref().map(Holding::has_closed)));
    let (started, events) = watch::channel(None);
    let taken = Arc::new(watch::Sender::default());
    let taken_now = taken.subscribe();
    let sources =
        Sources { metrics: metrics.clone(), progress: progress.clone(), events, taken: taken.clone() };
    let _http = serve_http(&extras, &sources);
    let store: Arc<dyn Store> = endpoints.clone();
    // Before anything waits for the datastore.
    policy_only::check(&node, &extras, &platform, &*endpoints)?;
    let found = node::wait_for_telling(&*store, &node, |problem| progress.wait_for(problem)).await?;
    let mut node_labels = found.metadata.labels;
    if let Platform::Windows { .. } = platform {
        // Windows needs some addresses of each block for itself, whatever the labels say.
        node_labels.insert(Node::OS.to_owned(), "windows".to_owned());
    }
    node::wait_until_unlocked(&*store, || progress.reach(Stage::Locked)).await;
    for pool in &extras.default_pools {
        default_pool::ensure(&*endpoints, pool).await;
    }
    progress.reach(Stage::PrepareNode);
    flannel::check(&node, &extras, &platform)?;
    let plain_routes = plain_routes(&node, &extras, &platform)?;
    if platform.is_bridge() && !extras.flannel && extras.cni_ipam.is_delegated() {
        return Err(AgentError::Node {
            node,
            problem: "a network of type L2Bridge has the node's block of an IPPool only: remove --cni-ipam (TORTIE_CNI_IPAM) or \
                      --windows-network l2bridge (TORTIE_WINDOWS_NETWORK)"
                .to_owned(),
        });
    }
    let of_services = services::prepare(&node, &platform, &extras)?;
    let of_bgp = bgp::prepare(&node, extras.bgp, &platform, control_socket.parent())?;
    let most_blocks = if platform.is_bridge() { 1 } else { node::most_blocks(platform.hcn()).await };
    let ipam = Ipam::new(store.clone(), &node, node_labels).with_most_blocks(most_blocks);
    let ipam = Arc::new(ipam);
    let about = platform.about();
    let capabilities = platform.capabilities();
    let Prepared { dataplane, wiring, announced, ipam_source, keeper } =
        node::prepare(&*endpoints, &ipam, &node, platform, &extras).await?;

    let mut kinds = tortie_calc::kinds(dataplane.asks_for_services());
    kinds.push(Kind::ClusterInformation);
    if endpoints.derives_from_kubernetes() {
        // Calc derives them itself from what it reads.
        kinds.retain(|kind| *kind != Kind::Profile);
    }
    // The position of an ADD's own endpoint covers all earlier ones.
    let of_barrier = kinds.iter().copied().filter(|kind| *kind != Kind::WorkloadEndpoint).collect();
    let barrier = Barrier::new(store.clone(), of_barrier);
    let dataplane = Box::new(Measured { inner: dataplane, metrics: metrics.clone() });
    let watched = Watched::new(&node)
        .with_most_blocks(most_blocks)
        .with_plain_routes(plain_routes)
        .with_flannel(extras.flannel)
        .with_leases(keeper.is_some())
        .with_policy_only(extras.policy_only.is_some());
    let assigned_pods = AssignedPods::default();
    let (batches, in_force) = plane::start(watched, assigned_pods.clone(), dataplane, holding, saver)
        .map_err(|error| AgentError::system("starting the dataplane's thread", error))?;
    assigned_pods.tell(batches.asker());
    progress.reach(Stage::ReadCluster);
    let bgp_conditions = watch::Sender::default();
    let service_conditions = watch::Sender::default();
    let cni_conditions = watch::Sender::default();
    let events = report::Events {
        in_force: in_force.clone(),
        taken: taken_now,
        bgp: bgp_conditions.subscribe(),
        services: service_conditions.subscribe(),
        cni_config: cni_conditions.subscribe(),
        addresses: match &announced {
            Some(announced) => announced.conditions(),
            None => watch::Sender::default().subscribe(),
        },
    };
    started.send_replace(Some(events.clone()));
    let asker = batches.asker();
    let mut parts = Parts { running: JoinSet::new(), in_force: in_force.clone() };
    parts.add(DATAPLANE, plane::ended(in_force.clone()));
    let leases = keeper.as_ref().map(LeaseKeeper::snapshot);
    parts.add("the feed of the dataplane", feed::run(store.clone(), kinds, batches, leases.clone()));
    if let Some(keeper) = keeper {
        parts.add("the keeping of flannel's lease", keeper.run());
    }
    if !endpoints.derives_from_kubernetes() {
        parts.add("the following of labels", labels::run(store.clone(), node.clone(), in_force.clone()));
    }
    parts.add("the report", report::run(store.clone(), node.clone(), about, events));
    let bgp = of_bgp.map(|system| {
        let (asked, questions) = mpsc::channel(MAX_QUESTIONS);
        parts.add(
            "the BGP speaker",
            bgp::run(endpoints.clone(), node.clone(), system, bgp_conditions, questions),
        );
        asked
    });
    if let (Some(system), Some(proxy)) = (of_services, extras.services.clone()) {
        let serving = services::run(node.clone(), proxy, system, in_force.clone(), service_conditions, taken);
        parts.add("the serving of Services", serving);
    }
    if let Some(announced) = announced {
        let announcing = announcement::keep_announced(
            endpoints.clone(),
            ipam.clone(),
            node.clone(),
            announced,
            in_force.clone(),
        );
        parts.add("the announcement of the node", announcing);
    }
    let mut first = in_force.clone();
    tokio::select! {
        // Everything is ready for the first pod; or calls can say why it is not.
        _ = first.wait_for(|now| !now.given.is_empty() || !now.blocking().is_empty()) => {}
        error = parts.ended() => return Err(error),
    }
    let control = Listener::bind(&control_socket)
        .map_err(|error| AgentError::system(format!("the socket {}", control_socket.display()), error))?;
    let answers = Answers { dataplane: asker, log_level: extras.log_level.clone(), bgp };
    parts.add("the control socket", control_server::run(node.clone(), answers, control));
    if extras.policy_only.is_some() {
        tokio::select! {
            _ = first.wait_for(|now| !now.positions.is_empty()) => {}
            error = parts.ended() => return Err(error),
        }
        tracing::info!("policy is in force; another CNI plugin connects the pods");
        progress.reach(Stage::Serve);
        return Err(parts.ended().await);
    }
    let (busy, addressing) = (Locks::default(), Locks::default());
    let has_bandwidth_plugin = extras.cni_plugins.has(BANDWIDTH_PLUGIN);
    let pods = Arc::new(Pods {
        busy,
        addressing,
        store: endpoints,
        ipam,
        wiring,
        node,
        has_bandwidth_plugin,
        in_force,
        barrier,
        assigned_pods,
        leases,
        metrics,
    });
    let listener = Listener::bind(&cni_socket)
        .map_err(|error| AgentError::system(format!("the socket {}", cni_socket.display()), error))?;
    match first.borrow().blocking().as_slice() {
        [] => tracing::info!(socket = %cni_socket.display(), "ready to add pods"),
        blocking => tracing::error!("no policy is applied and no pod is added: {}", blocking.join("; ")),
    }
    parts.add("the deletion queue", server::drain_queue(pods.clone(), deletion_queue));
    parts.add("the CNI server", server::run(pods, cni_socket, listener));
    tokio::select! {
        // Before, each ADD would fail. Kubelets report the node as ready when the configuration exists.
        _ = first.wait_for(|now| !now.positions.is_empty()) => {}
        error = parts.ended() => return Err(error),
    }
    match extras.cni_conf_dir {
        Some(folder) => {
            let file = ConfigFile { folder, chained: extras.cni_plugins, capabilities };
            let source = ipam_source.unwrap_or(IpamSource::Fixed(extras.cni_ipam));
            let written = move || progress.reach(Stage::Serve);
            parts.add("the CNI configuration", cni_config::keep(file, source, cni_conditions, written));
        }
        None => progress.reach(Stage::Serve),
    }
    Err(parts.ended().await)
}

/// How pools without encapsulation get routes.
fn plain_routes(node: &str, extras: &Extras, platform: &Platform) -> Result<PlainRoutes, AgentError> {
    let refuse = |problem: &str| Err(AgentError::Node { node: node.to_owned(), problem: problem.to_owned() });
    match (extras.bgp, extras.direct_routes, platform) {
        (_, false, _) => Ok(if extras.bgp { PlainRoutes::Bgp } else { PlainRoutes::OfNetwork }),
        (true, true, _) => refuse(
            "routes come from BGP or are direct; remove --bgp (TORTIE_BGP) or --direct-routes (TORTIE_DIRECT_ROUTES)",
        ),
        (false, true, Platform::Windows { network: WindowsNetwork::Overlay, .. }) => refuse(
            "a Windows node has direct routes with a network of type L2Bridge only; add --windows-network l2bridge \
             (TORTIE_WINDOWS_NETWORK), or remove --direct-routes (TORTIE_DIRECT_ROUTES)",
        ),
        (false, true, _) => Ok(PlainRoutes::Direct),
    }
}

/// The plugin to which runtimes pass the limits of a pod's annotations.
const BANDWIDTH_PLUGIN: &str = "bandwidth";
/// The maximum number of operators' questions that wait for the BGP speaker.
const MAX_QUESTIONS: usize = 16;

/// Serves health and metrics. The servers end when the result is dropped. An address that is taken is tried again: it must
/// not cost the pods their policy.
fn serve_http(extras: &Extras, sources: &Sources) -> JoinSet<()> {
    let addresses = [(extras.health_address, Paths::All), (extras.metrics_address, Paths::Metrics)];
    let mut servers = JoinSet::new();
    for (address, paths) in addresses {
        let Some(address) = address else { continue };
        servers.spawn(http_server::serve(address, paths, sources.clone()));
    }
    servers
}

/// The concurrent parts, each of which runs as long as the agent. Dropping this ends all of them.
struct Parts {
    running: JoinSet<&'static str>,
    in_force: watch::Receiver<Arc<InForce>>,
}

/// The part whose end makes others end, too.
const DATAPLANE: &str = "the dataplane's thread";

impl Parts {
    fn add(&mut self, name: &'static str, part: impl Future<Output = ()> + Send + 'static) {
        self.running.spawn(async move {
            part.await;
            name
        });
    }

    /// Waits for the first part that ends.
    async fn ended(&mut self) -> AgentError {
        match self.running.join_next().await {
            // A task that waits for the dataplane may end before the end of the dataplane is noticed.
            Some(Ok(_)) if self.in_force.has_changed().is_err() => AgentError::Ended { part: DATAPLANE },
            Some(Ok(part)) => AgentError::Ended { part },
            Some(Err(panic)) => AgentError::system("a part of the agent", panic),
            None => AgentError::Ended { part: "everything" },
        }
    }
}
