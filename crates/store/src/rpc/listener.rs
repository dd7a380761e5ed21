//! Accepts connections: on TCP those of clients with a certificate of the authority, on a Unix socket those of root.
//! Connections of strangers cannot exhaust the process: their number and their time are limited, and the descriptors of
//! TCP leave enough for the Unix socket, which serves operators.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::stream;
use tokio::net::{TcpListener, TcpStream};
#[cfg(unix)]
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{interval, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;

use super::client_identity::Client;
use super::connection::{Connection, Permit};
use super::revocation::Revocations;
use super::tls::Reloaded;

/// The pause after a failed accept: without descriptors, it would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often the list of revoked certificates is read, besides for each new connection.
const REVOCATION_INTERVAL: Duration = Duration::from_secs(5);
/// The descriptors that TCP leaves to the rest of the process: its files, and operators on the Unix socket.
const RESERVED: u64 = 128;
/// The default of [`Limits::connections`], if there are enough descriptors.
const MAX_CONNECTIONS: u64 = 10_000;
/// The default of [`Limits::connections_of_client`], if there are enough descriptors.
const MAX_OF_CLIENT: u64 = 64;
/// The default of [`Limits::handshakes`], if there are enough descriptors.
const MAX_HANDSHAKES: u64 = 256;

/// The limits of a service on TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The number of connections of clients that have not proved yet who they are. A further one replaces the oldest:
    /// a client needs milliseconds, and whoever only occupies connections has the oldest ones.
    pub handshakes: usize,
    /// How long a client may take to prove who it is.
    pub handshake_timeout: Duration,
    /// The number of connections of clients that have proved who they are. Further ones are closed.
    pub connections: usize,
    /// The number of connections of one of these clients: of a node, the controllers, or an operator. Further ones are
    /// closed. An agent or a command needs one or two.
    pub connections_of_client: usize,
    /// How long a client may take nothing of what is sent to it.
    pub write_timeout: Duration,
}

impl Default for Limits {
    /// For this process, by its limit of file descriptors.
    fn default() -> Self {
        #[cfg(unix)]
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        // Windows has no limit of handles that matters here.
        #[cfg(not(unix))]
        let descriptors = None;
        Self::for_descriptors(descriptors)
    }
}

impl Limits {
    /// For a process with this limit of file descriptors.
    fn for_descriptors(descriptors: Option<u64>) -> Self {
        let available = descriptors.unwrap_or(u64::MAX).saturating_sub(RESERVED).max(2);
        let handshakes = (available / 4).clamp(1, MAX_HANDSHAKES);
        let connections = (available - handshakes).min(MAX_CONNECTIONS);
        let number = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        Self {
            handshakes: number(handshakes),
            handshake_timeout: Duration::from_secs(10),
            connections: number(connections),
            connections_of_client: number((connections / 2).clamp(1, MAX_OF_CLIENT)),
            write_timeout: Duration::from_secs(30),
        }
    }
}

/// Accepts clients on TCP.
pub(crate) struct TlsListener {
    listener: TcpListener,
    tls: Reloaded<ServerConfig>,
    revocations: Revocations,
    limits: Limits,
    /// The clients that prove who they are.
    handshakes: JoinSet<io::Result<(TlsStream<TcpStream>, Client)>>,
    /// The same, from the oldest to the newest; some have ended.
    order: VecDeque<AbortHandle>,
    connections: Arc<Semaphore>,
    /// The connections of each client that has one.
    of_clients: HashMap<String, Arc<Semaphore>>,
}

impl TlsListener {
    pub(crate) fn new(
        listener: TcpListener,
        tls: Reloaded<ServerConfig>,
        revocations: Revocations,
        limits: Limits,
    ) -> Self {
        let connections = Arc::new(Semaphore::new(limits.connections));
        let (handshakes, order, of_clients) = Default::default();
        Self { listener, tls, revocations, limits, handshakes, order, connections, of_clients }
    }

    /// The connections, for ever.
    pub(crate) fn incoming(self) -> impl Stream<Item = io::Result<Connection<TlsStream<TcpStream>>>> {
        stream::unfold(self, async |mut listener| {
            let connection = listener.next().await;
            Some((Ok(connection), listener))
        })
    }

    async fn next(&mut self) -> Connection<TlsStream<TcpStream>> {
        let mut look = interval(REVOCATION_INTERVAL);
        loop {
            tokio::select! {
                _ = look.tick() => self.revocations.refresh(&self.tls.authorities()),
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, peer)) => self.begin(stream, peer),
                    Err(error) => pause(&error).await,
                },
                Some(ended) = self.handshakes.join_next() => match ended {
                    Ok(Ok((stream, client))) => if let Some(connection) = self.admit(stream, client) {
                        return connection;
                    },
                    Ok(Err(error)) => tracing::debug!(%error, "a client has not proved who it is"),
                    // Replaced by a newer one.
                    Err(_) => {}
                },
            }
        }
    }

    fn begin(&mut self, stream: TcpStream, peer: SocketAddr) {
        self.order.retain(|handshake| !handshake.is_finished());
        while self.order.len() >= self.limits.handshakes {
            let Some(oldest) = self.order.pop_front() else { break };
            tracing::warn!(
                limit = self.limits.handshakes,
                "too many clients have not proved who they are; the oldest is disconnected"
            );
            oldest.abort();
        }
        let (acceptor, limit) = (TlsAcceptor::from(self.tls.get()), self.limits.handshake_timeout);
        let handshake = async move {
            let failed = |error| io::Error::other(format!("{peer}: {error}"));
            stream.set_nodelay(true)?;
            let too_late = |_| failed("no handshake in time".to_owned());
            let stream = timeout(limit, acceptor.accept(stream)).await.map_err(too_late)?;
            let stream = stream.map_err(|error| failed(error.to_string()))?;
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            // Its certificate is of a trusted authority, so this is no stranger.
            let client = Client::of_certificates(certificates).inspect_err(|error| {
                tracing::warn!(%peer, %error, "the client's certificates cannot be read; it is disconnected");
            });
            let client = client.map_err(|error| failed(error.to_string()))?;
            Ok((stream, client))
        };
        self.order.push_back(self.handshakes.spawn(handshake));
    }

    fn admit(
        &mut self,
        stream: TlsStream<TcpStream>,
        client: Client,
    ) -> Option<Connection<TlsStream<TcpStream>>> {
        self.revocations.refresh(&self.tls.authorities());
        if self.revocations.has_any(&client.chain) {
            tracing::warn!(client = %client.role, "the client's certificate is revoked; the client is disconnected");
            return None;
        }
        let refuse = |limit: usize, what: &str| tracing::warn!(limit, client = %client.role, "{what}; the client is disconnected");
        let Ok(one_of_all) = self.connections.clone().try_acquire_owned() else {
            refuse(self.limits.connections, "too many connections");
            return None;
        };
        // Each connection holds on to the semaphore of its client.
        self.of_clients.retain(|_, connections| Arc::strong_count(connections) > 1);
        let new = || Arc::new(Semaphore::new(self.limits.connections_of_client));
        let own = self.of_clients.entry(client.role.to_string()).or_insert_with(new);
        let Ok(one_of_client) = own.clone().try_acquire_owned() else {
            refuse(self.limits.connections_of_client, "too many connections of one client");
            return None;
        };
        let permit = Permit { _of_all: one_of_all, _of_client: one_of_client };
        let revocation = self.revocations.revocation(client.chain.clone());
        let connection = Connection::new(stream, client, self.limits.write_timeout, Some(permit));
        Some(connection.until(revocation))
    }
}

/// The connections to a Unix socket, for ever. Only root and this process's own user are operators; others are
/// disconnected, whatever the mode of the socket.
#[cfg(unix)]
pub(crate) fn operators(
    listener: UnixListener,
    write_timeout: Duration,
) -> impl Stream<Item = io::Result<Connection<UnixStream>>> {
    stream::unfold(listener, move |listener| async move {
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    pause(&error).await;
                    continue;
                }
            };
            match stream.peer_cred() {
                Ok(peer) if is_operator(peer.uid(), rustix::process::geteuid().as_raw()) => {
                    let connection = Connection::new(stream, Client::on_socket(), write_timeout, None);
                    return Some((Ok(connection), listener));
                }
                Ok(peer) => {
                    tracing::warn!(user = peer.uid(), "a user who is not root may not use the store's socket")
                }
                Err(error) => tracing::warn!(%error, "the user at the store's socket is unknown"),
            }
        }
    })
}

#[cfg(unix)]
fn is_operator(peer: u32, own: u32) -> bool {
    peer == 0 || peer == own
}

async fn pause(error: &io::Error) {
    tracing::warn!(%error, "cannot accept a connection; Tortie retries");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_own_user_are_operators() {
        for (peer, own, expected) in [(0, 0, true), (0, 7, true), (7, 7, true), (8, 7, false), (7, 0, false)]
        {
            assert_eq!(is_operator(peer, own), expected, "{peer} {own}");
        }
    }

    #[test]
    fn connections_leave_descriptors_for_the_rest() {
        for descriptors in [0, 1, 64, 129, 256, 1_024, 4_096, 20_000, 1 << 30] {
            let limits = Limits::for_descriptors(Some(descriptors));
            assert!(limits.handshakes >= 1 && limits.connections >= 1, "{descriptors}: {limits:?}");
            assert!((1..=limits.connections).contains(&limits.connections_of_client), "{limits:?}");
            let sum = (limits.handshakes + limits.connections) as u64;
            assert!(sum <= descriptors.saturating_sub(RESERVED).max(2), "{descriptors}: {limits:?}");
        }
        let enough = Limits::for_descriptors(None);
        assert_eq!((enough.handshakes, enough.connections), (256, 10_000));
    }
}
