//! The agent's HTTP server: `/healthz`, `/readyz` and `/metrics`.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::CONTENT_TYPE;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::health::{Progress, Taken, health, readiness};
use crate::metrics::Metrics;
use crate::plane::InForce;
use crate::report::Events;
use tortie_store::backoff::{Backoff, random_seed};

/// The maximum number of connections at a time. A further one replaces the oldest: a probe needs milliseconds, and whoever only occupies
/// connections has the oldest ones.
const MAX_CONNECTIONS: usize = 128;
/// How long a client may take for its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum duration of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The delay after a failed accept, which is mostly caused by a lack of file descriptors.
const ACCEPT_DELAY: Duration = Duration::from_secs(1);

/// What the server tells.
#[derive(Clone)]
pub(crate) struct Sources {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) progress: Arc<Progress>,
    /// Has a value when the dataplane's thread has started.
    pub(crate) events: watch::Receiver<Option<Events>>,
    /// Receives the addresses that are taken.
    pub(crate) taken: watch::Sender<Taken>,
}

/// Which paths an address serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Paths {
    /// All.
    All,
    /// `/metrics` only.
    Metrics,
}

/// Opens the address, as often as it takes, and serves until the future is dropped.
pub(crate) async fn serve(address: SocketAddr, paths: Paths, sources: Sources) {
    let mut backoff = Backoff::new(random_seed());
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                if !sources.taken.borrow().contains_key(&address) {
                    tracing::error!(%error, %address, "cannot serve health and metrics; Tortie retries");
                }
                sources.taken.send_modify(|taken| drop(taken.insert(address, error.to_string())));
                backoff.wait().await;
            }
        }
    };
    sources.taken.send_if_modified(|taken| taken.remove(&address).is_some());
    run(listener, paths, sources).await;
}

/// Serves until the future is dropped.
async fn run(listener: TcpListener, paths: Paths, sources: Sources) {
    let mut connections = Connections::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a request for health or metrics; Tortie retries");
                tokio::time::sleep(ACCEPT_DELAY).await;
                continue;
            }
        };
        let sources = sources.clone();
        connections.spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let answer = sources.answer(paths, request.uri().path());
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_TIMEOUT)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            if let Ok(Err(error)) = timeout(CONNECTION_TIMEOUT, connection).await {
                tracing::debug!(%error, "a request for health or metrics broke off");
            }
        });
    }
}

/// The connections from the oldest to the newest; some have ended.
#[derive(Default)]
struct Connections(VecDeque<AbortHandle>);

impl Connections {
    fn spawn(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        self.0.retain(|connection| !connection.is_finished());
        while self.0.len() >= MAX_CONNECTIONS {
            let Some(oldest) = self.0.pop_front() else { break };
            oldest.abort();
        }
        self.0.push_back(tokio::spawn(connection).abort_handle());
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl Sources {
    fn answer(&self, paths: Paths, path: &str) -> Response<String> {
        let events = self.events.borrow();
        let now: Arc<InForce> =
            events.as_ref().map(|events| events.in_force.borrow().clone()).unwrap_or_default();
        let of_result = |result: Result<(), String>| match result {
            Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
            Err(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
        };
        let mut kind = "text/plain; charset=utf-8";
        let (status, text) = match (path, paths) {
            ("/metrics", _) => {
                kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                let reasons = events.as_ref().map(Events::reasons).unwrap_or_default();
                (StatusCode::OK, self.metrics.text(&now, reasons))
            }
            ("/healthz", Paths::All) => of_result(health(self.metrics.busy(Instant::now()))),
            ("/readyz", Paths::All) => of_result(readiness(&self.progress, &now)),
            _ => (StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n".to_owned()),
        };
        let response = Response::builder().status(status).header(CONTENT_TYPE, kind);
        response.body(text).unwrap_or_default()
    }
}
