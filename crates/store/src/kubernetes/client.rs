//! The connection to the API server.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use http::{Method, Request, header};
use http_body_util::BodyExt;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::Value;

use super::answer::{self, Lines, Operation, Rejection};
use crate::StoreError;
use crate::follow::{Event, Watch};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a watch may be silent. The API server sends a bookmark each minute.
const SILENCE: Duration = Duration::from_secs(150);

/// How to reach the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubernetesConfig {
    /// As the current context of this file says.
    Kubeconfig(PathBuf),
    /// With the service account of the pod in which this process runs.
    InCluster,
    /// As `KUBECONFIG` or `~/.kube/config` says; without them, with the service account.
    Inferred,
}

/// A client of the Kubernetes API. Clones share connections. It connects on first use.
#[derive(Clone)]
pub struct Kubernetes {
    client: kube::Client,
    /// The URL, for errors.
    server: Arc<str>,
}

impl Kubernetes {
    /// A client with this configuration. It needs a tokio runtime.
    ///
    /// # Errors
    /// A file is missing or invalid.
    pub async fn new(config: &KubernetesConfig) -> Result<Self, StoreError> {
        let mut loaded = match config {
            KubernetesConfig::Kubeconfig(path) => {
                let invalid = |error: &dyn std::error::Error| {
                    StoreError::Unavailable(format!("the kubeconfig {}: {}", path.display(), describe(error)))
                };
                let file = Kubeconfig::read_from(path).map_err(|error| invalid(&error))?;
                let options = KubeConfigOptions::default();
                kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| invalid(&error))?
            }
            KubernetesConfig::InCluster => kube::Config::incluster().map_err(|error| {
                StoreError::Unavailable(format!("the service account of this pod: {}", describe(&error)))
            })?,
            KubernetesConfig::Inferred => kube::Config::infer().await.map_err(|error| {
                StoreError::Unavailable(format!("the configuration for Kubernetes: {}", describe(&error)))
            })?,
        };
        loaded.connect_timeout = Some(CONNECT_TIMEOUT);
        // Callers decide whether to repeat a request.
        loaded.default_retry = false;
        let server = loaded.cluster_url.to_string().trim_end_matches('/').into();
        let client = kube::Client::try_from(loaded).map_err(|error| {
            StoreError::Unavailable(format!("the configuration for {server}: {}", describe(&error)))
        })?;
        Ok(Self { client, server })
    }

    /// Sends a request and returns the answer.
    pub(super) async fn call(
        &self,
        operation: &Operation,
        request: Request<Vec<u8>>,
    ) -> Result<Value, StoreError> {
        let answer = async {
            let response = self.send(operation, request).await?;
            let bytes = response.into_body().collect_bytes().await;
            bytes.map_err(|error| self.unavailable(operation, &describe(&error)))
        };
        let bytes = self.in_time(operation, answer).await?;
        serde_json::from_slice(&bytes)
            .map_err(|error| self.unavailable(operation, &format!("the answer is no JSON: {error}")))
    }

    /// Opens a watch. It ends with an error.
    pub(super) async fn open_watch(
        &self,
        operation: Operation,
        request: Request<Vec<u8>>,
    ) -> Result<Watch, StoreError> {
        let response = self.in_time(&operation, self.send(&operation, request)).await?;
        let bytes =
            response.into_body().into_data_stream().map(|part| part.map(|bytes| bytes.to_vec())).boxed();
        let open = OpenWatch {
            client: self.clone(),
            operation,
            bytes,
            lines: Lines::default(),
            ready: VecDeque::new(),
            has_ended: false,
        };
        let events =
            futures::stream::unfold(open, async |mut open| open.next().await.map(|event| (event, open)));
        Ok(events.boxed())
    }

    /// Sends a request, and returns the answer if it is a success.
    async fn send(
        &self,
        operation: &Operation,
        request: Request<Vec<u8>>,
    ) -> Result<http::Response<Body>, StoreError> {
        let sent = self.client.send(request.map(Body::from)).await;
        let response = sent.map_err(|error| self.unavailable(operation, &describe(&error)))?;
        let code = response.status();
        if code.is_success() {
            return Ok(response);
        }
        let seconds = response.headers().get(header::RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
        let bytes = response.into_body().collect_bytes().await;
        let bytes = bytes.map_err(|error| self.unavailable(operation, &describe(&error)))?;
        let status = serde_json::from_slice(&bytes).unwrap_or_default();
        let rejection = Rejection {
            code: code.as_u16(),
            retry_after: seconds.map(Duration::from_secs),
            status,
            text: String::from_utf8_lossy(&bytes).into_owned(),
        };
        Err(answer::error(operation, &rejection, &self.server))
    }

    async fn in_time<T>(
        &self,
        operation: &Operation,
        answer: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let late = |_| {
            let problem = format!("no answer in {} s", CALL_TIMEOUT.as_secs());
            Err(self.unavailable(operation, &problem))
        };
        tokio::time::timeout(CALL_TIMEOUT, answer).await.unwrap_or_else(late)
    }

    fn unavailable(&self, operation: &Operation, problem: &str) -> StoreError {
        let (server, verb, plural) = (&self.server, operation.verb, operation.kind.plural());
        StoreError::Unavailable(format!("{server}: {verb} {plural}: {problem}"))
    }
}

/// The answer to a watch.
struct OpenWatch {
    client: Kubernetes,
    operation: Operation,
    bytes: BoxStream<'static, Result<Vec<u8>, kube::Error>>,
    lines: Lines,
    ready: VecDeque<Result<Event, StoreError>>,
    has_ended: bool,
}

impl OpenWatch {
    async fn next(&mut self) -> Option<Result<Event, StoreError>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.has_ended {
                return None;
            }
            let problem = match tokio::time::timeout(SILENCE, self.bytes.next()).await {
                Ok(Some(Ok(bytes))) => {
                    let lines = self.lines.push(&bytes);
                    let event = |line: Vec<u8>| answer::event(&self.operation, &line, &self.client.server);
                    self.ready.extend(lines.into_iter().filter_map(event));
                    continue;
                }
                Ok(Some(Err(error))) => describe(&error),
                Ok(None) => "the API server ended the watch".to_owned(),
                Err(_) => format!("the watch is silent for {} s", SILENCE.as_secs()),
            };
            self.has_ended = true;
            self.ready.push_back(Err(self.client.unavailable(&self.operation, &problem)));
        }
    }
}

/// A request for JSON.
pub(super) fn request(method: Method, path: &str, body: Vec<u8>) -> Request<Vec<u8>> {
    let mut request = Request::new(body);
    *request.method_mut() = method;
    // Paths are escaped, so they are valid.
    *request.uri_mut() = path.parse().unwrap_or_default();
    let json = header::HeaderValue::from_static("application/json");
    request.headers_mut().insert(header::ACCEPT, json.clone());
    request.headers_mut().insert(header::CONTENT_TYPE, json);
    request
}

/// The message and its causes.
fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
