//! The task that owns sessions and tables: it gives inputs to the router, and carries out what the router wants.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::config::{Config, PeerConfig};
use super::connection::{OpenConnection, Report, Tagged};
use super::error::Error;
use super::socket;
use super::status::{PeerStatus, RouteEvent, SpeakerStatus};
use crate::codec::length;
use crate::fsm::{ConnectionId, State, Time};
use crate::rib::{OwnRoute, PeerId, Why};
use crate::router::{Effect, Router};

/// What the handle asks for.
pub(super) enum Command {
    Apply(Box<Config>, oneshot::Sender<Result<Vec<Error>, Error>>),
    SetOwn(Vec<(IpNet, Option<OwnRoute>)>),
    SetCosts(Vec<(IpAddr, Option<u32>)>),
    ForgetUnusedCosts(oneshot::Sender<Vec<IpAddr>>),
    Refresh(SocketAddr),
    Status(oneshot::Sender<SpeakerStatus>),
    Routes(oneshot::Sender<Vec<(IpNet, Vec<crate::rib::Chosen>)>>),
    Why(IpNet, oneshot::Sender<Option<(IpNet, Why)>>),
    ShutDown(String, oneshot::Sender<()>),
}

/// Streams that were opened.
pub(super) enum Opened {
    Outgoing(PeerId, std::io::Result<TcpStream>),
    Incoming(TcpStream, SocketAddr),
}

/// How many bytes of messages are taken before routes are decided and sent.
const BATCH: usize = 512 << 10;
/// What a report counts at least.
const LEAST: usize = 1 << 10;
/// How long timers wait at most while messages are taken.
const SLICE: Duration = Duration::from_millis(50);
/// The most reports of connections that wait. A full queue slows down the readers, and by way of TCP the peers.
const REPORTS: usize = 64;

pub(super) struct Owner {
    config: Config,
    router: Router,
    begin: Instant,
    ids: BTreeMap<SocketAddr, PeerId>,
    next_id: u32,
    next_connection: u64,
    connections: HashMap<ConnectionId, (PeerId, OpenConnection)>,
    listeners: BTreeMap<SocketAddr, (Arc<TcpListener>, JoinHandle<()>)>,
    commands: mpsc::Receiver<Command>,
    opened: (mpsc::Sender<Opened>, mpsc::Receiver<Opened>),
    reports: (mpsc::Sender<Tagged>, mpsc::Receiver<Tagged>),
    events: mpsc::UnboundedSender<RouteEvent>,
    was_deferring: bool,
    /// When timers were looked at.
    ticked: Instant,
}

impl Owner {
    pub(super) fn new(
        identifier: Ipv4Addr,
        seed: u64,
        restarted: Option<Duration>,
        commands: mpsc::Receiver<Command>,
        events: mpsc::UnboundedSender<RouteEvent>,
    ) -> Self {
        Self {
            config: Config { identifier, listen: Vec::new(), peers: BTreeMap::new() },
            router: Router::new(identifier, seed, Duration::ZERO, restarted),
            begin: Instant::now(),
            ids: BTreeMap::new(),
            next_id: 0,
            next_connection: 0,
            connections: HashMap::new(),
            listeners: BTreeMap::new(),
            commands,
            opened: mpsc::channel(REPORTS),
            reports: mpsc::channel(REPORTS),
            events,
            was_deferring: true,
            ticked: Instant::now(),
        }
    }

    /// Uses routes only when the costs of their next hops are known, and asks for these.
    pub(super) fn require_known_next_hops(&mut self) {
        self.router.require_known_next_hops();
    }

    fn now(&self) -> Time {
        self.begin.elapsed()
    }

    /// Works until it is told to end, or nobody can tell it anything any more.
    pub(super) async fn run(mut self) {
        loop {
            let deadline = self.router.deadline().map(|deadline| self.begin + deadline);
            // Without a deadline there is nothing to wait for.
            let sleep = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now));
            tokio::select! {
                command = self.commands.recv() => match command {
                    None => return,
                    Some(Command::ShutDown(text, done)) => {
                        self.shut_down(&text).await;
                        let _ = done.send(());
                        return;
                    }
                    Some(Command::Apply(config, done)) => {
                        let _ = done.send(self.apply(*config).await);
                    }
                    Some(command) => self.command(command),
                },
                Some(opened) = self.opened.1.recv() => self.opened(opened),
                Some(report) = self.reports.1.recv() => self.report(report),
                () = sleep, if deadline.is_some() => {}
            }
            // What has arrived counts before a hold timer expires.
            if let Ok(report) = self.reports.1.try_recv() {
                self.reports(report);
            }
            self.tick();
            self.flush();
        }
    }

    /// Lets timers expire.
    fn tick(&mut self) {
        self.ticked = Instant::now();
        let effects = self.router.tick(self.now());
        self.carry_out(effects);
    }

    /// Takes a report, and those that are there already, up to a limit: peers wait for what is decided, and their sessions for
    /// KEEPALIVEs.
    fn reports(&mut self, first: Tagged) {
        let mut next = Some(first);
        let mut taken = 0;
        while let Some(report) = next {
            taken += match &report {
                (_, _, Report::Messages(bytes)) => bytes.len().max(LEAST),
                _ => LEAST,
            };
            self.report(report);
            next = if taken < BATCH { self.reports.1.try_recv().ok() } else { None };
        }
    }

    /// Ends all sessions, and waits until the peers have been told, and until another speaker can use the addresses.
    async fn shut_down(&mut self, text: &str) {
        self.close_listeners(&[]).await;
        let mut closed = Vec::new();
        for effect in self.router.shut_down(self.now(), text) {
            match effect {
                Effect::Close(connection) => {
                    let connection = self.connections.remove(&connection);
                    closed.extend(connection.map(|(_, connection)| connection.close()));
                }
                effect => self.carry_out(vec![effect]),
            }
        }
        // They send at the same time, so the longest one decides how long this takes.
        for connection in closed {
            connection.finish().await;
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::SetOwn(routes) => {
                routes.into_iter().for_each(|(prefix, route)| self.router.set_own(prefix, route));
            }
            Command::SetCosts(costs) => self.router.set_costs(self.now(), costs),
            Command::Refresh(peer) => {
                if let Some(id) = self.ids.get(&peer).copied() {
                    let effects = self.router.request_refresh(id);
                    self.carry_out(effects);
                }
            }
            Command::ForgetUnusedCosts(answer) => {
                let _ = answer.send(self.router.forget_unused_costs());
            }
            Command::Status(answer) => {
                let _ = answer.send(self.status());
            }
            Command::Routes(answer) => {
                let routes = self.router.rib().routes();
                let _ = answer.send(routes.map(|(prefix, chosen)| (*prefix, chosen.to_vec())).collect());
            }
            Command::Why(of, answer) => {
                let rib = self.router.rib();
                let why = rib.longest(&of).and_then(|prefix| Some((prefix, rib.why(&prefix)?)));
                let _ = answer.send(why);
            }
            // They wait for tasks.
            Command::Apply(..) | Command::ShutDown(..) => {}
        }
    }

    /// Makes the configuration real. Sessions whose settings stay the same go on. Returns what is left out. After an error, the
    /// rest is in force.
    async fn apply(&mut self, config: Config) -> Result<Vec<Error>, Error> {
        if config.identifier != self.config.identifier {
            return Err(Error::Identifier { from: self.config.identifier, to: config.identifier });
        }
        let listening = self.listen(&config).await;
        let mut left_out = Vec::new();
        let old = std::mem::take(&mut self.config.peers);
        for (address, peer) in &old {
            // Another password or source address is a new connection.
            let stays = config.peers.get(address).is_some_and(|new| new.transport == peer.transport);
            if !stays && let Some(id) = self.ids.remove(address) {
                let effects = self.router.remove_peer(self.now(), id);
                self.carry_out(effects);
            }
            if !stays && peer.transport.password.is_some() {
                left_out.extend(self.set_password(address.ip(), None).err());
            }
        }
        for (address, peer) in &config.peers {
            // Without its protection, a session must not begin.
            if peer.transport.password.is_some()
                && let Err(error) = self.set_password(address.ip(), Some(peer))
            {
                left_out.push(error);
                continue;
            }
            let id = *self.ids.entry(*address).or_insert_with(|| {
                self.next_id += 1;
                PeerId(self.next_id)
            });
            let effects = self.router.set_peer(self.now(), id, peer.session.clone(), peer.rules.clone());
            self.carry_out(effects);
        }
        self.config = config;
        let absent = listening?;
        Ok(absent.into_iter().chain(left_out).collect())
    }

    fn set_password(&self, peer: IpAddr, config: Option<&PeerConfig>) -> Result<(), Error> {
        let password = config.and_then(|config| config.transport.password.as_ref());
        self.listeners.values().try_for_each(|(listener, _)| socket::set_password(listener, peer, password))
    }

    /// Opens and closes listening sockets. Returns which addresses the system does not have. Passwords of all peers are set
    /// afterwards.
    async fn listen(&mut self, config: &Config) -> Result<Vec<Error>, Error> {
        self.close_listeners(&config.listen).await;
        let (mut absent, mut refused) = (Vec::new(), None);
        for address in &config.listen {
            if self.listeners.contains_key(address) {
                continue;
            }
            let listener = match socket::listen(*address) {
                Ok(listener) => Arc::new(listener),
                Err(error @ Error::NoAddress { .. }) => {
                    absent.push(error);
                    continue;
                }
                // The others may be free.
                Err(error) => {
                    refused.get_or_insert(error);
                    continue;
                }
            };
            let task = tokio::spawn(accept(Arc::clone(&listener), self.opened.0.clone()));
            self.listeners.insert(*address, (listener, task));
        }
        if let Some(error) = refused {
            return Err(error);
        }
        match absent.pop() {
            // No peer could connect.
            Some(last) if self.listeners.is_empty() => Err(last),
            last => Ok(absent.into_iter().chain(last).collect()),
        }
    }

    /// Closes the listening sockets at other addresses than these. Their tasks have them open until they have ended, and the system lets
    /// nobody else listen at an address before.
    async fn close_listeners(&mut self, stay: &[SocketAddr]) {
        let gone: Vec<SocketAddr> =
            self.listeners.keys().filter(|address| !stay.contains(address)).copied().collect();
        for (_, task) in gone.iter().filter_map(|address| self.listeners.remove(address)) {
            task.abort();
            // It ends by that, or by a panic.
            let _ = task.await;
        }
    }

    fn opened(&mut self, opened: Opened) {
        let now = self.now();
        match opened {
            Opened::Outgoing(id, Err(error)) => {
                tracing::debug!(peer = id.0, %error, "cannot connect");
                let effects = self.router.connect_failed(now, id);
                self.carry_out(effects);
            }
            Opened::Outgoing(id, Ok(stream)) => {
                let Ok(own) = stream.local_addr() else {
                    let effects = self.router.connect_failed(now, id);
                    return self.carry_out(effects);
                };
                let connection = self.start(id, stream);
                let effects = self.router.connected(now, id, connection, own.ip());
                self.carry_out(effects);
            }
            Opened::Incoming(stream, from) => {
                let peer = self.ids.iter().find(|(address, _)| address.ip() == from.ip().to_canonical());
                let Some((address, id)) = peer.map(|(address, id)| (*address, *id)) else {
                    tracing::info!(%from, "connection of a stranger");
                    return;
                };
                let Some(config) = self.config.peers.get(&address) else { return };
                let own = match (socket::accepted(&stream, from.ip(), &config.transport), stream.local_addr())
                {
                    (Ok(()), Ok(own)) => own.ip().to_canonical(),
                    (Err(error), _) => return tracing::warn!(%error, "connection refused"),
                    (_, Err(_)) => return,
                };
                // As in BIRD 2. The other addresses of this node may be ones that no Node object lists, so agents do not keep pods away from them.
                if config.transport.source.is_some_and(|source| source != own) {
                    return tracing::info!(%from, to = %own, "a peer has connected to another address than that of its session");
                }
                let connection = self.start(id, stream);
                let effects = self.router.accepted(now, id, connection, own);
                self.carry_out(effects);
            }
        }
    }

    fn start(&mut self, id: PeerId, stream: TcpStream) -> ConnectionId {
        self.next_connection += 1;
        let number = ConnectionId(self.next_connection);
        let connection = OpenConnection::start(stream, id, number, self.reports.0.clone());
        self.connections.insert(number, (id, connection));
        number
    }

    fn report(&mut self, (id, connection, report): Tagged) {
        let now = self.now();
        match report {
            Report::Messages(bytes) => {
                let mut rest = bytes.as_slice();
                while let Ok(Some(length)) = length(rest)
                    && let Some((message, others)) = rest.split_at_checked(length)
                {
                    rest = others;
                    let effects = self.router.received(self.now(), id, connection, Ok(message));
                    self.carry_out(effects);
                    // A few bytes may cost a walk through the table.
                    if self.ticked.elapsed() >= SLICE {
                        self.tick();
                    }
                }
            }
            Report::Broken(notification) => {
                let effects = self.router.received(now, id, connection, Err(notification));
                self.carry_out(effects);
            }
            Report::Closed => {
                self.connections.remove(&connection);
                let effects = self.router.closed(now, id, connection);
                self.carry_out(effects);
            }
            Report::Drained => {}
        }
    }

    fn carry_out(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Connect(id) => self.connect(id),
                Effect::Send(connection, bytes) => {
                    if let Some((_, connection)) = self.connections.get(&connection) {
                        connection.send(bytes);
                    }
                }
                Effect::Probe(connection) => {
                    if let Some((_, connection)) = self.connections.get(&connection) {
                        connection.probe();
                    }
                }
                Effect::Close(connection) => drop(self.connections.remove(&connection)),
            }
        }
    }

    fn connect(&self, id: PeerId) {
        let address = self.ids.iter().find(|(_, known)| **known == id).map(|(address, _)| *address);
        let Some((address, config)) =
            address.and_then(|address| Some((address, self.config.peers.get(&address)?)))
        else {
            // It is being configured: the answer makes it try again.
            let opened = self.opened.0.clone();
            tokio::spawn(async move {
                let _ = opened.send(Opened::Outgoing(id, Err(std::io::ErrorKind::NotFound.into()))).await;
            });
            return;
        };
        let transport = config.transport.clone();
        let limit = Duration::from_secs(config.session.connect_retry.max(1).into());
        let opened = self.opened.0.clone();
        tokio::spawn(async move {
            let stream = socket::connect(address, &transport, limit).await;
            let _ = opened.send(Opened::Outgoing(id, stream)).await;
        });
    }

    /// Decides about routes, tells who listens, and tells peers as much as their connections take.
    fn flush(&mut self) {
        let unknown = self.router.take_unknown_next_hops();
        if !unknown.is_empty() {
            let _ = self.events.send(RouteEvent::UnknownNextHops(unknown));
        }
        let changes = self.router.take_changes();
        if !changes.is_empty() {
            let _ = self.events.send(RouteEvent::Changed(changes));
        }
        if self.was_deferring && !self.router.is_deferring() {
            self.was_deferring = false;
            let _ = self.events.send(RouteEvent::Complete);
        }
        let peers: Vec<PeerId> = self.router.peers().collect();
        for id in peers {
            loop {
                let connection = self.router.session(id).and_then(|session| session.connection());
                let Some((_, connection)) =
                    connection.and_then(|connection| self.connections.get(&connection))
                else {
                    break;
                };
                if connection.is_full() {
                    break;
                }
                let Some((_, messages)) = self.router.messages(id) else { break };
                messages.into_iter().for_each(|message| connection.send(message));
            }
        }
    }

    fn status(&self) -> SpeakerStatus {
        let peers = self.ids.iter().filter_map(|(address, id)| {
            let session = self.router.session(*id)?;
            let (received, advertised) = self.router.rib().counts(*id);
            let negotiated = session.negotiated();
            Some(PeerStatus {
                address: *address,
                id: *id,
                state: session.state(),
                since: negotiated.map(|(_, since)| self.now().saturating_sub(since)),
                negotiated: negotiated.map(|(negotiated, _)| negotiated.clone()),
                stale: session.stale(),
                received,
                advertised,
                established: session.established(),
                last_error: session.last_error().map(str::to_owned),
            })
        });
        let peers: Vec<PeerStatus> = peers.collect();
        let established = peers.iter().filter(|peer| peer.state == State::Established).count();
        SpeakerStatus { peers, established, deferring: self.router.is_deferring() }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.listeners.values().for_each(|(_, task)| task.abort());
    }
}

/// Accepts connections until the task is ended.
async fn accept(listener: Arc<TcpListener>, opened: mpsc::Sender<Opened>) {
    /// A pause after errors such as too many open files.
    const PAUSE: Duration = Duration::from_millis(100);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                if opened.send(Opened::Incoming(stream, from)).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
