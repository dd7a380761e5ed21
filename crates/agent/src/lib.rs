//! The node daemon: store → calc → dataplane, CNI in at the side, a report out.
//!
//! [`run`] brings the node's end of the overlay up, feeds the dataplane, and only then offers CNI: the first pod finds
//! everything in place. Each part is a file of its own; this one only wires them.

pub mod control;
mod control_server;

mod feed;
mod labels;
mod locks;
mod node;
mod plane;
mod pods;
mod publish;
mod report;
mod server;
mod unsupported;

use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tortie_api::report::NodeStatus;
use tortie_dataplane::{ClusterNetwork, Dataplane, PodWiring};
use tortie_hcn::Hcn;
use tortie_ipam::{Ipam, IpamError};
use tortie_store::{Store, StoreError};

use locks::Locks;
use node::Prepared;
use plane::InForce;
use pods::Pods;
pub use tortie_windows::StaticRules;

/// What an agent is told at its start.
pub struct Config {
    /// The node's name.
    pub node: String,
    /// The datastore.
    pub store: Arc<dyn Store>,
    /// What the node runs on.
    pub platform: Platform,
    /// The socket for the CNI plugin.
    pub cni_socket: PathBuf,
    /// The socket for operators' questions ([`control`]).
    pub control_socket: PathBuf,
    /// Where the plugin leaves deletions while the agent is away.
    pub deletion_queue: PathBuf,
}

/// What a node runs on.
pub enum Platform {
    /// Linux, in the agent's own network namespace.
    Linux,
    /// Windows.
    Windows {
        /// Its Host Compute Network API.
        hcn: Arc<dyn Hcn>,
        /// What every pod has before policy.
        static_rules: StaticRules,
    },
    /// Anything else that implements the two traits, such as a test's. Where its end of the overlay is, it says itself.
    Other {
        /// Makes true what the node must be.
        dataplane: Box<dyn Dataplane>,
        /// Connects pods.
        wiring: Arc<dyn PodWiring>,
    },
}

impl Platform {
    fn os(&self) -> &'static str {
        match self {
            Platform::Linux => "linux",
            Platform::Windows { .. } => "windows",
            Platform::Other { .. } => "other",
        }
    }

    /// What each report of the node says.
    fn about(&self) -> NodeStatus {
        let static_rules = match self {
            Platform::Windows { static_rules, .. } => static_rules.told(),
            Platform::Linux | Platform::Other { .. } => Vec::new(),
        };
        NodeStatus { os: self.os().to_owned(), static_rules, ..NodeStatus::default() }
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
    /// The node is not as the agent needs it.
    #[error("node {node}: {problem}")]
    Node {
        /// Which node.
        node: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A part of the agent ended, which none ever should. The agent ends with it: started again, it is whole.
    #[error("{part} has ended; what is in force stays so, and the agent has to be started again")]
    Ended {
        /// Which part.
        part: &'static str,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// What the system said.
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

/// Runs the agent until the future is dropped; what is in force stays in force.
///
/// # Errors
/// It cannot start, or a part of it has ended.
pub async fn run(config: Config) -> Result<(), AgentError> {
    let Config { node, store, platform, cni_socket, control_socket, deletion_queue } = config;
    let node_labels = node::wait_for(&*store, &node).await?.metadata.labels;
    let network = ClusterNetwork::default();
    let ipam = Ipam::new(store.clone(), &node, node_labels);
    let (os, about) = (platform.os(), platform.about());
    let Prepared { dataplane, wiring, announced } =
        node::prepare(&*store, &ipam, &node, platform, &network).await?;

    let kinds = tortie_calc::kinds(dataplane.asks_for_services());
    let (batches, in_force) = plane::start(&node, dataplane)
        .map_err(|error| AgentError::system("starting the dataplane's thread", error))?;
    let asker = batches.asker();
    let mut parts = Parts { running: JoinSet::new(), in_force: in_force.clone() };
    parts.add(DATAPLANE, plane::ended(in_force.clone()));
    parts.add("the feed of the dataplane", feed::run(store.clone(), kinds, batches));
    parts.add("the following of labels", labels::run(store.clone(), node.clone()));
    parts.add("the report", report::run(store.clone(), node.clone(), about, in_force.clone()));
    if let Some(announced) = announced {
        let announcing = node::keep_announced(store.clone(), node.clone(), announced, in_force.clone());
        parts.add("the announcement of the node", announcing);
    }
    let mut first = in_force.clone();
    tokio::select! {
        // The first pod finds everything in place.
        _ = first.wait_for(|now| now.given > 0) => {}
        error = parts.ended() => return Err(error),
    }
    let control = server::listen(&control_socket)
        .map_err(|error| AgentError::system(format!("the socket {}", control_socket.display()), error))?;
    parts.add("the control socket", control_server::run(node.clone(), asker, control));
    let (busy, mtu) = (Locks::default(), network.mtu);
    let pods = Arc::new(Pods { busy, store, ipam, wiring, node, os, mtu, in_force });
    let listener = server::listen(&cni_socket)
        .map_err(|error| AgentError::system(format!("the socket {}", cni_socket.display()), error))?;
    tracing::info!(socket = %cni_socket.display(), "pods can be added");
    parts.add("the deletion queue", server::drain_queue(pods.clone(), deletion_queue));
    parts.add("the CNI server", server::run(pods, listener));
    Err(parts.ended().await)
}

/// What runs side by side, each as long as the agent; all of it ends when this is dropped.
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
            // Whoever waits for the dataplane may be faster to end than it is to be told of.
            Some(Ok(_)) if self.in_force.has_changed().is_err() => AgentError::Ended { part: DATAPLANE },
            Some(Ok(part)) => AgentError::Ended { part },
            Some(Err(panic)) => AgentError::system("a part of the agent", panic),
            None => AgentError::Ended { part: "everything" },
        }
    }
}
