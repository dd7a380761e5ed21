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
use tokio::time::Instant;

use super::answer::{self, Lines, Operation, Rejection};
use super::connection;
use super::group::{CalicoGroup, Groups};
use super::resources;
use super::trim::{self, Keep};
use crate::StoreError;
use crate::follow::{Event, Watch};

/// How long to wait for an answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a watch may be silent until it is opened again. The API server sends a bookmark each minute, but none of a kind that nobody
/// has changed since its start, if etcd reports no progress. A connection whose other side has vanished ends sooner.
const SILENCE: Duration = Duration::from_secs(90);
/// After this time, the API server ends a watch, so that it can distribute clients.
const WATCH_SECONDS: u32 = 300;
/// A watch that ends so soon is not opened again immediately.
const SHORT_WATCH: Duration = Duration::from_millis(500);

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
    /// After this time, the API server ends a watch.
    watch_seconds: u32,
    /// How long a watch may be silent.
    silence: Duration,
    /// The group of Calico's kinds.
    groups: Arc<Groups>,
}

impl Kubernetes {
    /// A client with this configuration. It needs a tokio runtime.
    ///
    /// # Errors
    /// A file is missing or invalid.
    pub async fn new(config: &KubernetesConfig) -> Result<Self, StoreError> {
        let loaded = match config {
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
        let server = loaded.cluster_url.to_string().trim_end_matches('/').into();
        let client = connection::open(loaded).map_err(|error| {
            StoreError::Unavailable(format!("the configuration for {server}: {}", describe(&error)))
        })?;
        Ok(Self { client, server, watch_seconds: WATCH_SECONDS, silence: SILENCE, groups: Arc::default() })
    }

    /// The same client with watches that the API server ends after this time. They are opened again.
    #[must_use]
    pub fn with_watch_seconds(self, watch_seconds: u32) -> Self {
        Self { watch_seconds, ..self }
    }

    /// The same client, which opens a watch again that is silent for this time.
    #[must_use]
    pub fn with_silence(self, silence: Duration) -> Self {
        Self { silence, ..self }
    }

    /// The same client, which uses this group for Calico's kinds and does not look for it.
    #[must_use]
    pub fn with_group(self, group: CalicoGroup) -> Self {
        Self { groups: Arc::new(Groups::chosen(group)), ..self }
    }

    pub(super) fn calico_groups(&self) -> &Groups {
        &self.groups
    }

    pub(super) fn client(&self) -> &kube::Client {
        &self.client
    }

    /// The URL of the API server.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Sends a request and returns the answer.
    pub(super) async fn call(
        &self,
        operation: &Operation,
        request: Request<Vec<u8>>,
    ) -> Result<Value, StoreError> {
        self.call_for(operation, request, Keep::All).await
    }

    /// Sends a request and returns these parts of the answer.
    pub(super) async fn call_for(
        &self,
        operation: &Operation,
        request: Request<Vec<u8>>,
        keep: Keep,
    ) -> Result<Value, StoreError> {
        let answer = async {
            let response = self.send(operation, request).await?;
            let bytes = response.into_body().collect_bytes().await;
            bytes.map_err(|error| self.unavailable(operation, &describe(&error)))
        };
        let bytes = self.in_time(operation, answer).await?;
        trim::read(keep, &bytes)
            .map_err(|error| self.unavailable(operation, &format!("the answer is no JSON: {error}")))
    }

    /// Opens a watch. When the API server ends it, it is opened again. It ends with an error.
    pub(super) async fn open_watch(&self, operation: Operation, path: String) -> Result<Watch, StoreError> {
        let bytes = self.watch_bytes(&operation, &path).await?;
        let open = OpenWatch {
            client: self.clone(),
            operation,
            path,
            bytes,
            opened: Instant::now(),
            lines: Lines::default(),
            ready: VecDeque::new(),
            has_ended: false,
        };
        let events =
            futures::stream::unfold(open, async |mut open| open.next().await.map(|event| (event, open)));
        Ok(events.boxed())
    }

    /// The answer to a watch from the position of the operation.
    async fn watch_bytes(&self, operation: &Operation, path: &str) -> Result<Bytes, StoreError> {
        let (seconds, after) = (self.watch_seconds, operation.after);
        let options = "watch=true&allowWatchBookmarks=true";
        let path = format!("{path}{options}&timeoutSeconds={seconds}&resourceVersion={after}");
        let request = request(Method::GET, &path, Vec::new());
        let response = self.in_time(operation, self.send(operation, request)).await?;
        let bytes = response.into_body().into_data_stream();
        Ok(bytes.map(|part| part.map(|bytes| bytes.to_vec())).boxed())
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
        let error = answer::error(operation, &rejection, &self.server);
        if matches!(error, StoreError::KindAbsent(kind) if resources::is_calico(kind)) {
            self.groups.forget();
        }
        Err(error)
    }

    /// The result of this future, if it is ready in time.
    pub(super) async fn in_time<T>(
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

/// The parts of an answer, as they arrive.
type Bytes = BoxStream<'static, Result<Vec<u8>, kube::Error>>;

/// A watch from the position of its operation.
struct OpenWatch {
    client: Kubernetes,
    operation: Operation,
    /// The path and the query, to which options can be added.
    path: String,
    bytes: Bytes,
    opened: Instant,
    lines: Lines,
    ready: VecDeque<Result<Event, StoreError>>,
    has_ended: bool,
}

impl OpenWatch {
    async fn next(&mut self) -> Option<Result<Event, StoreError>> {
        while self.ready.is_empty() && !self.has_ended {
            if let Err(error) = self.read().await {
                self.has_ended = true;
                self.ready.push_back(Err(error));
            }
        }
        let event = self.ready.pop_front();
        if let Some(Ok(event)) = &event {
            self.operation.after = event.position();
        }
        event
    }

    /// Reads what has arrived, or opens the watch again. All events have been delivered before.
    async fn read(&mut self) -> Result<(), StoreError> {
        let unavailable = |problem: &str| Err(self.client.unavailable(&self.operation, problem));
        let silence = self.client.silence;
        match tokio::time::timeout(silence, self.bytes.next()).await {
            Ok(Some(Ok(bytes))) => {
                let lines = self.lines.push(&bytes);
                let event = |line: Vec<u8>| answer::event(&self.operation, &line, &self.client.server);
                self.ready.extend(lines.into_iter().map(event));
                Ok(())
            }
            Ok(Some(Err(error))) => unavailable(&describe(&error)),
            Ok(None) if self.opened.elapsed() < SHORT_WATCH => unavailable("the API server ends each watch"),
            // A server that is stuck does not open it.
            Ok(None) | Err(_) => {
                self.bytes = self.client.watch_bytes(&self.operation, &self.path).await?;
                self.lines = Lines::default();
                self.opened = Instant::now();
                Ok(())
            }
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
pub(super) fn describe(error: &dyn std::error::Error) -> String {
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
