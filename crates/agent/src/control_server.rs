//! Serves the socket on which operators send requests to the agent ([`control`](crate::control)).

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::LogLevel;
use crate::bgp::{Asked, BgpQuestion};
use crate::control::{Answer, Ask, Outcome, Request, VERSION};
use crate::local::{Listener, Stream};
use crate::queue::{Asker, Unanswered};
use crate::server::MAX_ACCEPT_DELAY;
use tortie_store::backoff::{Backoff, random_seed};

/// The maximum size of a request in bytes.
const MAX_REQUEST_BYTES: usize = 64 << 10;
/// How long to wait for a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for the dataplane, which may be busy. A call of HNS may take this long.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(40);

/// Serves until the future is dropped.
pub(crate) async fn run(node: String, sources: Answers, mut listener: Listener) {
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_ACCEPT_DELAY);
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(%error, "cannot accept an operator's request; Tortie retries");
                backoff.wait().await;
                continue;
            }
        };
        backoff.succeeded();
        let (node, sources) = (node.clone(), sources.clone());
        tokio::spawn(async move {
            if let Err(error) = serve(node, sources, stream).await {
                tracing::warn!(%error, "an operator's request broke off");
            }
        });
    }
}

/// Where answers come from.
#[derive(Clone)]
pub(crate) struct Answers {
    pub(crate) dataplane: Asker,
    pub(crate) log_level: Option<LogLevel>,
    /// The BGP speaker, if the agent runs one.
    pub(crate) bgp: Option<mpsc::Sender<Asked>>,
}

async fn serve(node: String, sources: Answers, mut stream: Stream) -> io::Result<()> {
    let Answers { dataplane, log_level, bgp } = sources;
    let request = timeout(REQUEST_TIMEOUT, read_line(&mut stream)).await??;
    let outcome = match read(&request) {
        Ok(Ask::Show { namespace, pod }) => {
            match timeout(ANSWER_TIMEOUT, dataplane.show(namespace, pod)).await {
                Ok(Ok(shown)) => Outcome::Shown(shown),
                Ok(Err(Unanswered::NotReady)) => {
                    Outcome::Failed("the agent ends, or does not know the cluster yet; ask again".to_owned())
                }
                Ok(Err(Unanswered::TooMany)) => {
                    Outcome::Failed("too many requests wait for the dataplane; ask again later".to_owned())
                }
                Err(_) => Outcome::Failed(format!(
                    "the dataplane has been busy for {} seconds; the agent's log says with what",
                    ANSWER_TIMEOUT.as_secs()
                )),
            }
        }
        Ok(Ask::LogLevel { new }) => match log_level {
            Some(log_level) => log_level(new.as_deref()).map_or_else(Outcome::Failed, Outcome::LogLevel),
            None => Outcome::Failed("the log level of this agent is fixed".to_owned()),
        },
        Ok(Ask::BgpPeers) => of_bgp(bgp, BgpQuestion::Peers).await,
        Ok(Ask::BgpRoutes) => of_bgp(bgp, BgpQuestion::Routes).await,
        Ok(Ask::BgpWhy { network }) => of_bgp(bgp, BgpQuestion::Why(network)).await,
        Err(problem) => Outcome::Failed(problem),
    };
    let mut answer = serde_json::to_vec(&Answer { version: VERSION, node, outcome })?;
    answer.push(b'\n');
    stream.write_all(&answer).await?;
    stream.shutdown().await
}

async fn of_bgp(bgp: Option<mpsc::Sender<Asked>>, question: BgpQuestion) -> Outcome {
    let Some(bgp) = bgp else {
        return Outcome::Failed("this agent runs no BGP speaker; start it with --bgp".to_owned());
    };
    let (answer, answered) = oneshot::channel();
    let asked = async {
        bgp.send((question, answer)).await.ok()?;
        answered.await.ok()
    };
    match timeout(ANSWER_TIMEOUT, asked).await {
        Ok(Some(outcome)) => outcome,
        Ok(None) => Outcome::Failed("the agent ends; ask again".to_owned()),
        Err(_) => Outcome::Failed(format!(
            "the BGP speaker has been busy for {} seconds; the agent's log says with what",
            ANSWER_TIMEOUT.as_secs()
        )),
    }
}

/// Reads to the end of the line, or to the end of what the client sends.
async fn read_line(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let (mut request, mut part) = (Vec::new(), [0; 4096]);
    while !request.ends_with(b"\n") && request.len() < MAX_REQUEST_BYTES {
        match stream.read(&mut part).await? {
            0 => break,
            length => request.extend_from_slice(&part[..length]),
        }
    }
    Ok(request)
}

pub(crate) fn read(request: &[u8]) -> Result<Ask, String> {
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
