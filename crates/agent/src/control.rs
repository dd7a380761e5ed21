//! The socket on which the agent answers operators: what is in force for a pod (`tortie policy show`).
//!
//! A request and its answer are one JSON document each; after writing its document, each side closes its direction of
//! the stream. Only the agent's own user may connect, which is root outside of a lab.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;
use tortie_api::report::ReportedCondition;
use tortie_dataplane::{AskedFor, EndpointId, ShowError, Shown};

use crate::plane::Asker;

/// The version of requests and answers. An agent answers other versions with [`Outcome::Failed`].
pub const VERSION: u32 = 1;

/// The maximum size of a request in bytes.
const MOST_REQUEST_BYTES: u64 = 64 << 10;
/// How long to wait for a request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for the dataplane, which may be busy. A call of HNS may take this long.
const ANSWER_PATIENCE: Duration = Duration::from_secs(40);
/// How long a caller waits: until the agent has certainly given up.
const CALL_PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait after a failed accept, which is mostly caused by a lack of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

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
    let request = serde_json::to_vec(&Request { version: VERSION, ask }).map_err(unreadable)?;
    let answer = exchange(socket, &request).map_err(silent)?;
    serde_json::from_slice(&answer).map_err(unreadable)
}

fn exchange(socket: &Path, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = BlockingStream::connect(socket)?;
    stream.set_read_timeout(Some(CALL_PATIENCE))?;
    stream.set_write_timeout(Some(CALL_PATIENCE))?;
    stream.write_all(request)?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

/// Serves until the future is dropped.
pub(crate) async fn run(node: String, asker: Asker, listener: UnixListener) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::error!(%error, "a question of an operator cannot be accepted; it waits");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let (node, asker) = (node.clone(), asker.clone());
        tokio::spawn(async move {
            if let Err(error) = serve(node, &asker, stream).await {
                tracing::warn!(%error, "a question of an operator broke off");
            }
        });
    }
}

async fn serve(node: String, asker: &Asker, mut stream: UnixStream) -> io::Result<()> {
    let mut request = Vec::new();
    let mut reader = (&mut stream).take(MOST_REQUEST_BYTES);
    timeout(REQUEST_PATIENCE, reader.read_to_end(&mut request)).await??;
    let outcome = match read(&request) {
        Ok(Ask::Show { namespace, pod }) => {
            match timeout(ANSWER_PATIENCE, asker.show(namespace, pod)).await {
                Ok(Some(shown)) => Outcome::Shown(shown),
                Ok(None) => {
                    Outcome::Failed("the agent ends, or does not know the cluster yet; ask again".to_owned())
                }
                Err(_) => Outcome::Failed(format!(
                    "the dataplane has been busy for {} seconds; the agent's log says with what",
                    ANSWER_PATIENCE.as_secs()
                )),
            }
        }
        Err(problem) => Outcome::Failed(problem),
    };
    let answer = serde_json::to_vec(&Answer { version: VERSION, node, outcome })?;
    stream.write_all(&answer).await?;
    stream.shutdown().await
}

fn read(request: &[u8]) -> Result<Ask, String> {
    let unreadable = |error: serde_json::Error| format!("the question cannot be read: {error}");
    let value: serde_json::Value = serde_json::from_slice(request).map_err(unreadable)?;
    match value["version"].as_u64() {
        Some(version) if version == u64::from(VERSION) => {
            serde_json::from_value::<Request>(value).map(|request| request.ask).map_err(unreadable)
        }
        version => Err(format!(
            "the question is of version {}, the agent speaks version {VERSION}: use the `tortie` of the agent's version",
            version.map_or_else(|| "(none)".to_owned(), |version| version.to_string())
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_of_other_versions_are_told_so() {
        let show = |version: u32| {
            format!(r#"{{"version":{version},"ask":{{"show":{{"namespace":"n","pod":"p"}}}}}}"#)
        };
        let asked = Ask::Show { namespace: "n".to_owned(), pod: "p".to_owned() };
        assert_eq!(read(show(1).as_bytes()), Ok(asked));
        assert!(read(show(2).as_bytes()).unwrap_err().contains("version 2"));
        assert!(read(b"{}").unwrap_err().contains("version (none)"));
        assert!(read(b"meow").is_err());
    }
}
