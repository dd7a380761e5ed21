//! The agent's HTTP server: `/healthz`, `/readyz` and `/metrics`.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::CONTENT_TYPE;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;
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
/// The connections that wait to be accepted, as in the standard library.
const BACKLOG: i32 = 128;
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
    pub(crate) taken: Arc<watch::Sender<Taken>>,
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
    let listener = bind(address, OtherFamily::AsTheSystemSays, &sources.taken).await;
    answer_all(listener, move |request| Some(sources.answer(paths, request.path))).await;
}

/// Whether a socket of all IPv6 addresses takes connections to IPv4 addresses, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherFamily {
    AsTheSystemSays,
    Taken,
    Refused,
}

/// Opens the address, as often as it takes.
pub(crate) async fn bind(
    address: SocketAddr,
    other_family: OtherFamily,
    taken: &watch::Sender<Taken>,
) -> TcpListener {
    let mut backoff = Backoff::new(random_seed());
    loop {
        match listen(address, other_family) {
            Ok(listener) => {
                taken.send_if_modified(|taken| taken.remove(&address).is_some());
                return listener;
            }
            Err(error) => {
                if !taken.borrow().contains_key(&address) {
                    tracing::error!(%error, %address, "cannot serve health or metrics; Tortie retries");
                }
                taken.send_modify(|taken| drop(taken.insert(address, error.to_string())));
                backoff.wait().await;
            }
        }
    }
}

fn listen(address: SocketAddr, other_family: OtherFamily) -> io::Result<TcpListener> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    match other_family {
        _ if address.is_ipv4() => {}
        OtherFamily::AsTheSystemSays => {}
        OtherFamily::Taken => socket.set_only_v6(false)?,
        OtherFamily::Refused => socket.set_only_v6(true)?,
    }
    // As the standard library: on Windows, the option lets others take the port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// A request.
pub(crate) struct AskedPath<'a> {
    /// The address to which the client connected.
    pub(crate) local: SocketAddr,
    pub(crate) path: &'a str,
}

/// Serves until the future is dropped. A connection to which there is no answer is closed.
pub(crate) async fn answer_all(
    listener: TcpListener,
    answer: impl Fn(AskedPath<'_>) -> Option<Response<String>> + Clone + Send + Sync + 'static,
) {
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
        let Ok(local) = stream.local_addr() else { continue };
        let answer = answer.clone();
        connections.spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let answered = answer(AskedPath { local, path: request.uri().path() }).ok_or(Refused);
                async move { answered }
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

/// There is no answer.
#[derive(Debug, Error)]
#[error("nothing is served at this address")]
struct Refused;

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
