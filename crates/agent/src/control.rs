//! The socket that operators ask the agent of a node by: what is in force for a pod (`tortie policy show`).
//!
//! A request and its answer are one JSON document each; whoever has said it closes that direction of the stream. Only
//! the agent's own user may connect, which is root but in a lab.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tortie_dataplane::{AskedFor, EndpointId, ShowError, Shown};

/// Which form requests and answers have. An agent answers others with [`Outcome::Failed`].
pub const VERSION: u32 = 1;

/// How long a caller waits: until the agent has surely given up.
const CALL_PATIENCE: Duration = Duration::from_secs(60);

/// What an agent is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// The question.
    pub ask: Ask,
}

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ask {
    /// What is in force for a pod.
    Show {
        /// Its namespace.
        namespace: String,
        /// Its name.
        pod: String,
    },
}

/// What an agent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// [`VERSION`].
    pub version: u32,
    /// The agent's node.
    pub node: String,
    /// The answer itself.
    pub outcome: Outcome,
}

/// The answer itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// The pod's interfaces; none where the node has no such pod.
    Shown(Vec<ShownEndpoint>),
    /// Why there is no answer.
    Failed(String),
}

/// What is in force for one interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownEndpoint {
    /// Which one.
    pub id: EndpointId,
    /// What it is asked for.
    pub asked: AskedFor,
    /// What the node reports of it, and of itself: where policy is narrower than it was asked for, or not in force.
    pub conditions: Vec<Told>,
    /// What the system has.
    pub system: Result<Shown, ShowError>,
}

/// A condition that the node reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// Its short name, such as `RuleNotExpressible`.
    pub reason: String,
    /// What it says.
    pub message: String,
}

/// Why an agent could not be asked.
#[derive(Debug, Error)]
pub enum AskError {
    /// Nobody answers there.
    #[error("no agent answers at {}: {source}", socket.display())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It answers something else.
    #[error("what the agent at {} answers cannot be read; it may be of another version: {source}", socket.display())]
    Unreadable {
        /// The socket.
        socket: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

/// Asks the agent at a socket, and waits for its answer.
///
/// # Errors
/// Nobody answers, or not in a way that can be understood.
pub fn ask(socket: &Path, ask: Ask) -> Result<Answer, AskError> {
    let silent = |source| AskError::Silent { socket: socket.to_owned(), source };
    let unreadable = |source| AskError::Unreadable { socket: socket.to_owned(), source };
    let request = serde_json::to_vec(&Request { version: VERSION, ask }).map_err(unreadable)?;
    let answer = exchange(socket, &request).map_err(silent)?;
    serde_json::from_slice(&answer).map_err(unreadable)
}

fn exchange(socket: &Path, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(CALL_PATIENCE))?;
    stream.set_write_timeout(Some(CALL_PATIENCE))?;
    stream.write_all(request)?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}
