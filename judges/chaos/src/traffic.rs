//! Real packets between all pods. The judge itself has the sockets in the pods' namespaces, so it knows what arrives where.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::RouteSocket;

use crate::known::{Moment, Span};
use crate::oracle::{Expected, Family, Packet, PodId};
use crate::rules::{PORT, Protocol};
use crate::run::Run;

/// The time between two datagrams from a pod to another one.
const UDP_PACE: Duration = Duration::from_millis(1_000);
/// After this time a datagram counts as lost.
const UDP_LOST: Duration = Duration::from_secs(3);
/// That many lost datagrams in a row are no accident of a busy machine.
const UDP_LOSSES: u32 = 4;
/// The time between two connections of a run, however many pods it has.
const TCP_PACE: Duration = Duration::from_millis(40);
/// After this time a connection counts as cut. The kernel sends a lost first packet again after one and after three seconds.
const TCP_LOST: Duration = Duration::from_secs(6);
/// The source ports, one after the other: a port that comes again is of no flow that a node still tracks.
const SOURCES: (u16, u16) = (10_000, 60_000);

/// A pod's namespace, with the judge's sockets in it.
pub(crate) struct Station {
    pub(crate) id: PodId,
    pub(crate) addresses: Vec<IpAddr>,
    netns: Arc<NetNs>,
    next_source: AtomicU16,
    receivers: Vec<JoinHandle<()>>,
}

impl Drop for Station {
    /// The sockets must go, because they keep the namespace.
    fn drop(&mut self) {
        self.receivers.iter().for_each(JoinHandle::abort);
    }
}

/// The stations of a run, and the datagrams that must arrive.
pub(crate) struct Traffic {
    run: Arc<Run>,
    stations: Mutex<BTreeMap<PodId, Arc<Station>>>,
    sent: Mutex<VecDeque<Sent>>,
    arrived: Mutex<BTreeMap<(PodId, IpAddr, u64), Moment>>,
    losses: Mutex<BTreeMap<(PodId, IpAddr), u32>>,
}

/// A datagram.
#[derive(Debug, Clone, Copy)]
struct Sent {
    from: PodId,
    to: PodId,
    address: IpAddr,
    number: u64,
    at: Moment,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Traffic {
    pub(crate) fn new(run: Arc<Run>) -> Arc<Self> {
        Arc::new(Self {
            run,
            stations: Mutex::default(),
            sent: Mutex::default(),
            arrived: Mutex::default(),
            losses: Mutex::default(),
        })
    }

    /// Opens the sockets of a pod, and returns its addresses.
    pub(crate) fn open(self: &Arc<Self>, id: PodId, netns: NetNs) -> Result<Vec<IpAddr>> {
        let addresses = netns.run(addresses)??;
        // For packets of both families.
        let everywhere = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), PORT);
        let sockets = netns.run(|| -> std::io::Result<_> {
            Ok((UdpSocket::bind(everywhere)?, std::net::TcpListener::bind(everywhere)?))
        })?;
        let (datagrams, listener) = sockets?;
        datagrams.set_nonblocking(true)?;
        listener.set_nonblocking(true)?;
        let datagrams = tokio::net::UdpSocket::from_std(datagrams)?;
        let listener = TcpListener::from_std(listener)?;
        let receivers = vec![
            tokio::spawn(Arc::clone(self).receive(id, datagrams)),
            tokio::spawn(answer_all(id, listener)),
        ];
        let next_source = AtomicU16::new(SOURCES.0);
        let station =
            Station { id, addresses: addresses.clone(), netns: Arc::new(netns), next_source, receivers };
        lock(&self.stations).insert(id, Arc::new(station));
        Ok(addresses)
    }

    /// Closes the sockets of a pod.
    pub(crate) fn close(&self, id: PodId) {
        lock(&self.stations).remove(&id);
    }

    pub(crate) fn stations(&self) -> Vec<Arc<Station>> {
        lock(&self.stations).values().cloned().collect()
    }

    async fn receive(self: Arc<Self>, id: PodId, socket: tokio::net::UdpSocket) {
        let mut buffer = [0; 100];
        while let Ok(length) = socket.recv(&mut buffer).await {
            let now = self.run.now();
            let text = String::from_utf8_lossy(&buffer[..length]);
            let words: Vec<&str> = text.split(' ').collect();
            let [from, to, number, micros] = words[..] else { continue };
            let (Ok(from), Ok(to), Ok(number), Ok(micros)) =
                (from.parse(), to.parse::<IpAddr>(), number.parse(), micros.parse())
            else {
                continue;
            };
            lock(&self.arrived).insert((from, to, number), now);
            let span = Span::new(Moment::from_micros(micros), now);
            let packet = Packet { from, to: id, protocol: Protocol::Udp, family: Family::of(to), span };
            self.run.judge(packet, true, "the datagram has arrived");
        }
    }

    /// Sends datagrams between all pods, until the run ends.
    pub(crate) async fn send_datagrams(self: Arc<Self>) {
        let mut number = 0;
        loop {
            sleep(UDP_PACE).await;
            self.send_to_all(number).await;
            number += 1;
            self.judge_losses();
        }
    }

    /// One datagram from each pod to each other one.
    async fn send_to_all(&self, number: u64) {
        let stations = self.stations();
        for station in &stations {
            let at = self.run.now();
            let mut datagrams = Vec::new();
            for other in stations.iter().filter(|other| other.id != station.id) {
                for address in station.targets(other) {
                    let sent = Sent { from: station.id, to: other.id, address, number, at };
                    lock(&self.sent).push_back(sent);
                    let text = format!("{} {address} {number} {}", station.id, at.as_micros());
                    datagrams.push((SocketAddr::new(mapped(address), PORT), text));
                }
            }
            let (netns, port) = (Arc::clone(&station.netns), source(number));
            let send = move || {
                netns.run(move || -> std::io::Result<()> {
                    // A port for all of them, and a new one for each round, so that none belongs to an established flow.
                    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?;
                    for (to, text) in datagrams {
                        // Policy may reject it at once.
                        let _ = socket.send_to(text.as_bytes(), to);
                    }
                    Ok(())
                })
            };
            if let Ok(Err(error)) = tokio::task::spawn_blocking(send).await.map(|sent| sent.map(drop)) {
                self.run.blame(format!("the judge cannot send from pod {}: {error}", station.id));
            }
        }
    }

    fn judge_losses(&self) {
        let now = self.run.now();
        loop {
            let mut sent = lock(&self.sent);
            let Some(first) = sent.front().copied().filter(|sent| sent.at + UDP_LOST < now) else { break };
            sent.pop_front();
            drop(sent);
            self.judge_loss(first);
        }
    }

    fn judge_loss(&self, Sent { from, to, address, number, at }: Sent) {
        let arrived = lock(&self.arrived).remove(&(from, address, number));
        let span = Span::new(at, arrived.unwrap_or(at + UDP_LOST));
        let packet = Packet { from, to, protocol: Protocol::Udp, family: Family::of(address), span };
        let mut losses = lock(&self.losses);
        let in_row = losses.entry((from, address)).or_default();
        let is_lost = arrived.is_none() && self.run.world().expected(packet) == Expected::Allowed;
        *in_row = if is_lost { *in_row + 1 } else { 0 };
        let in_row = *in_row;
        drop(losses);
        // That it has arrived was judged then.
        if arrived.is_none() && (!is_lost || in_row >= UDP_LOSSES) {
            self.run.judge(packet, false, &format!("{in_row} datagrams in a row are lost"));
        }
    }

    /// Connects from each pod to each other one, one after the other, until the run ends.
    pub(crate) async fn send_connections(self: Arc<Self>) {
        let mut turn: VecDeque<(PodId, PodId)> = VecDeque::new();
        loop {
            sleep(TCP_PACE).await;
            let stations = lock(&self.stations).clone();
            if turn.is_empty() {
                let pairs = stations.keys().flat_map(|from| stations.keys().map(|to| (*from, *to)));
                turn.extend(pairs.filter(|(from, to)| from != to));
            }
            let Some((from, to)) = turn.pop_front() else { continue };
            let (Some(from), Some(to)) = (stations.get(&from), stations.get(&to)) else { continue };
            for address in from.targets(to) {
                tokio::spawn(Arc::clone(&self).try_connection(Arc::clone(from), to.id, address));
            }
        }
    }

    /// Connects from a pod to another one once, and judges it.
    pub(crate) async fn try_connection(self: Arc<Self>, from: Arc<Station>, to: PodId, address: IpAddr) {
        let sent = self.run.now();
        let tried = timeout(TCP_LOST, ask(&from, address)).await;
        let now = self.run.now();
        let packet = |to| Packet {
            from: from.id,
            to,
            protocol: Protocol::Tcp,
            family: Family::of(address),
            span: Span::new(sent, now),
        };
        match tried {
            Ok(Ok(by)) => self.run.judge(packet(by), true, "the connection was answered"),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                self.run.judge(packet(to), true, "the connection was refused by the pod");
                self.run.judge(packet(to), false, "the connection was refused");
            }
            Ok(Err(error)) => self.run.judge(packet(to), false, &format!("the connection failed: {error}")),
            Err(_) => self.run.judge(packet(to), false, "the connection got no answer"),
        }
    }

    /// Tries all pairs at once, and judges them.
    pub(crate) async fn try_all(self: &Arc<Self>) {
        let stations = self.stations();
        let mut tries = Vec::new();
        for from in &stations {
            for to in stations.iter().filter(|to| to.id != from.id) {
                for address in from.targets(to) {
                    tries.push(tokio::spawn(Arc::clone(self).try_connection(from.clone(), to.id, address)));
                }
            }
            sleep(TCP_PACE).await;
        }
        for tried in tries {
            let _ = tried.await;
        }
    }
}

fn source(number: u64) -> u16 {
    let room = u64::from(SOURCES.1 - SOURCES.0);
    SOURCES.0 + u16::try_from(number % room).unwrap_or_default()
}

/// The addresses of the calling thread's namespace that others can reach.
fn addresses() -> Result<Vec<IpAddr>> {
    let all = RouteSocket::open()?.addresses()?.into_iter().map(|address| address.address);
    let is_local = |address: &IpAddr| match address {
        IpAddr::V4(address) => address.is_loopback(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unicast_link_local(),
    };
    Ok(all.filter(|address| !is_local(address)).collect())
}

/// An address as a socket for both families has it.
fn mapped(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => IpAddr::V6(address.to_ipv6_mapped()),
        IpAddr::V6(_) => address,
    }
}

impl Station {
    /// The addresses of another pod that this one has a family in common with.
    pub(crate) fn targets(&self, other: &Self) -> Vec<IpAddr> {
        let has = |address: &&IpAddr| self.addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4());
        other.addresses.iter().filter(has).copied().collect()
    }

    /// Connects to an address.
    pub(crate) async fn connect(&self, address: IpAddr) -> std::io::Result<TcpStream> {
        let port = self.next_source.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |port| {
            Some(if port + 1 < SOURCES.1 { port + 1 } else { SOURCES.0 })
        });
        let from = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port.unwrap_or(SOURCES.0));
        let make = || {
            let socket = TcpSocket::new_v6()?;
            socket.set_reuseaddr(true)?;
            socket.bind(from)?;
            Ok::<_, std::io::Error>(socket)
        };
        let made = self.netns.run(make).map_err(std::io::Error::other)?;
        made?.connect(SocketAddr::new(mapped(address), PORT)).await
    }
}

/// Connects, and returns the number of the pod that answers.
async fn ask(from: &Station, address: IpAddr) -> std::io::Result<PodId> {
    let mut stream = from.connect(address).await?;
    stream.write_all(b"who\n").await?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await?;
    line.trim().parse().map_err(|_| std::io::Error::other(format!("it was answered {line:?}")))
}

/// Answers each line with the pod's number.
async fn answer_all(id: PodId, listener: TcpListener) {
    // Connections end with the pod.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(async move {
            let (input, mut output) = stream.into_split();
            let mut lines = BufReader::new(input).lines();
            while let Ok(Some(_)) = lines.next_line().await {
                if output.write_all(format!("{id}\n").as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        while connections.try_join_next().is_some() {}
    }
}
