//! The socket on which the agent answers operators: what is in force for a pod (`tortie policy show`), its log
//! level, and what BGP knows (`tortie bgp`).
//!
//! A request and its answer are one line with a JSON document each. Only the agent's own user may connect, which is root
//! outside of a lab; on Windows, administrators may.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tortie_api::report::ReportedCondition;
use tortie_cni::local;
use tortie_dataplane::{AskedFor, EndpointId, ShowError, Shown};

/// The version of requests and answers. An agent answers other versions with [`Outcome::Failed`].
pub const VERSION: u32 = 1;

/// How long a caller waits: until the agent has certainly given up.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A request to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// The request.
    pub ask: Ask,
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ask {
    /// Requests what is in force for a pod.
    Show {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
    },
    /// Requests the log level.
    LogLevel {
        /// The new one, in the syntax of `RUST_LOG`; absent to keep it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        new: Option<String>,
    },
    /// Requests the peers of the BGP speaker.
    BgpPeers,
    /// Requests the routes that the BGP speaker has chosen.
    BgpRoutes,
    /// Requests why the BGP speaker has chosen its route to a network or address.
    BgpWhy {
        /// The network. The longest prefix with a route that contains it is explained.
        network: IpNet,
    },
}

/// An answer of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// [`VERSION`].
    pub version: u32,
    /// The agent's node.
    pub node: String,
    /// The outcome.
    pub outcome: Outcome,
}

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// The pod's interfaces; none if the node has no such pod.
    Shown(Vec<ShownEndpoint>),
    /// The log level that now applies.
    LogLevel(String),
    /// The peers of the BGP speaker, by address.
    BgpPeers(Vec<BgpPeer>),
    /// The routes that the BGP speaker has chosen, by prefix; of routes to one prefix, the best one first.
    BgpRoutes(Vec<BgpRoute>),
    /// Why the BGP speaker has chosen a route; none if there is no route.
    BgpWhy(Option<BgpWhy>),
    /// Why there is no answer.
    Failed(String),
}

/// What is in force for one interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownEndpoint {
    /// The endpoint.
    pub id: EndpointId,
    /// What is desired for it.
    pub asked: AskedFor,
    /// The conditions of the endpoint and of the node: where policy is narrower than requested, or not in force.
    pub conditions: Vec<ReportedCondition>,
    /// What the system has.
    pub system: Result<Shown, ShowError>,
}

/// A peer of the BGP speaker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpPeer {
    /// Its address and port.
    pub address: SocketAddr,
    /// Its autonomous system, as configured.
    pub as_number: Option<u32>,
    /// The state of the session (RFC 4271 8.2.2), such as `Established`.
    pub state: String,
    /// For how many seconds the session is established.
    pub established_seconds: Option<u64>,
    /// How many routes the peer sent.
    pub received: u32,
    /// How many routes it was sent.
    pub advertised: usize,
    /// Why the last session ended.
    pub last_error: Option<String>,
}

/// A route that the BGP speaker has chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpRoute {
    /// The destination.
    pub prefix: IpNet,
    /// The peer that sent it; none for the node's own routes.
    pub from: Option<SocketAddr>,
    /// The next hop. Only zeroes stand for the node itself.
    pub next_hop: IpAddr,
    /// LOCAL_PREF.
    pub local_preference: Option<u32>,
    /// AS_PATH, the latest system first.
    pub as_path: String,
    /// COMMUNITIES, as `64512:100`.
    pub communities: Vec<String>,
}

/// Everything that the BGP speaker knows about a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpWhy {
    /// The prefix.
    pub prefix: IpNet,
    /// All routes to it, the best one first.
    pub candidates: Vec<BgpCandidate>,
    /// What each peer is told about the best route.
    pub peers: Vec<BgpAdvertised>,
    /// What the kernel has.
    pub kernel: BgpInKernel,
}

/// A route that the BGP speaker might have chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpCandidate {
    /// The route: after the import filters if they accept it, otherwise as the peer sent it.
    #[serde(flatten)]
    pub route: BgpRoute,
    /// ORIGIN.
    pub origin: String,
    /// MULTI_EXIT_DISC.
    pub med: Option<u32>,
    /// Whether it is from before the peer's restart.
    pub stale: bool,
    /// What became of it.
    pub outcome: BgpOutcome,
    /// The step of the choice or the filter that decided.
    pub reason: String,
}

/// What became of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BgpOutcome {
    /// It is the best one.
    Best,
    /// It is as good for forwarding.
    AsGood,
    /// Another one is better.
    Worse,
    /// An import filter rejects it.
    Rejected,
    /// It can never be used, for instance because it is a loop.
    NotUsable,
    /// The node has no route to its next hop.
    NextHopUnreachable,
}

/// What a peer is told about the best route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpAdvertised {
    /// The peer.
    pub peer: SocketAddr,
    /// The next hop that it is told; none if it is told nothing.
    pub next_hop: Option<IpAddr>,
    /// Why it is told nothing.
    pub reason: Option<String>,
}

/// What the kernel has for a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpInKernel {
    /// The learned route.
    pub route: Option<String>,
    /// Why there is none.
    pub reason: Option<String>,
    /// Routes of others to the same destination.
    pub others: Vec<String>,
}

/// Why a request to an agent failed.
#[derive(Debug, Error)]
pub enum AskError {
    /// No agent answers there.
    #[error("no agent answers at {}: {source}", socket.display())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The answer cannot be parsed.
    #[error("what the agent at {} answers cannot be read; it may be of another version: {source}", socket.display())]
    Unreadable {
        /// The socket.
        socket: PathBuf,
        /// The problem.
        #[source]
        source: serde_json::Error,
    },
}

/// Sends a request to the agent at a socket, and waits for its answer.
///
/// # Errors
/// No agent answers, or its answer cannot be parsed.
pub fn ask(socket: &Path, ask: Ask) -> Result<Answer, AskError> {
    let silent = |source| AskError::Silent { socket: socket.to_owned(), source };
    let unreadable = |source| AskError::Unreadable { socket: socket.to_owned(), source };
    let mut request = serde_json::to_vec(&Request { version: VERSION, ask }).map_err(unreadable)?;
    request.push(b'\n');
    let is_complete = |answer: &[u8]| answer.ends_with(b"\n");
    let answer = local::exchange(socket, request, CALL_TIMEOUT, is_complete).map_err(silent)?;
    serde_json::from_slice(&answer).map_err(unreadable)
}
