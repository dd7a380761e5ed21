//! The node daemon: store → calc → dataplane, CNI in at the side, a report out.
//!
//! [`run`] brings the node's end of the overlay up, feeds the dataplane, and only then offers CNI: the first pod finds
//! everything in place. Each part is a file of its own; this one only wires them.

mod feed;
mod labels;
mod node;
mod plane;
mod pods;
mod report;
mod server;

use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;
use tortie_dataplane::{ClusterNetwork, Dataplane, PodWiring};
use tortie_hcn::Hcn;
use tortie_ipam::{Ipam, IpamError};
use tortie_store::{Store, StoreError};

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
    /// Where the plugin leaves deletions while the agent is away.
    pub deletion_queue: PathBuf,
}

/// What a node runs on.
pub enum Platform {
    /// Linux, in the agent's own network namespace.
    Linux,
    /// Windows, by its Host Compute Network API.
    Windows(Arc<dyn Hcn>),
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
            Platform::Windows(_) => "windows",
            Platform::Other { .. } => "other",
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
    /// The node is not as the agent needs it.
    #[error("node {node}: {problem}")]
    Node {
        /// Which node.
        node: String,
        /// What is wrong, and what to do.
        problem: String,
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
/// It cannot start, or its socket is lost.
pub async fn run(config: Config) -> Result<(), AgentError> {
    let Config { node, store, platform, cni_socket, deletion_queue } = config;
    let node_labels = node::wait_for(&*store, &node).await?.metadata.labels;
    let network = ClusterNetwork::default();
    let ipam = Ipam::new(store.clone(), &node, node_labels);
    let os = platform.os();
    let prepared = node::prepare(&*store, &ipam, &node, platform, &network).await?;

    let (batches, in_force) = plane::start(&node, prepared.dataplane)
        .map_err(|error| AgentError::system("starting the dataplane's thread", error))?;
    let feed = tokio::spawn(feed::run(store.clone(), batches));
    let labels = tokio::spawn(labels::run(store.clone(), node.clone()));
    let announce = prepared.announced.map(|announced| {
        tokio::spawn(node::keep_announced(store.clone(), node.clone(), announced, in_force.clone()))
    });
    let report = tokio::spawn(report::run(store.clone(), node.clone(), os, in_force.clone()));
    let pods = Arc::new(pods::Pods {
        store,
        ipam,
        wiring: prepared.wiring,
        node,
        os: os,
        mtu: network.mtu,
        in_force: in_force.clone(),
    });
    let mut first = in_force;
    // An error here means that the thread has ended; the server then refuses calls by itself.
    let _ = first.wait_for(|now| now.given > 0 || now.revision > 0).await;
    tokio::spawn({
        let pods = pods.clone();
        async move { server::drain_queue(pods, &deletion_queue).await }
    });
    let served = server::run(pods, &cni_socket).await;
    for task in [feed, labels, report].into_iter().chain(announce) {
        task.abort();
    }
    served.map_err(|error| AgentError::system(format!("the socket {}", cni_socket.display()), error))
}
