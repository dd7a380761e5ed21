//! Connections and datagrams to Services, and what servers see of them.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tortie_kernel::namespace::NetNs;

use super::{PATIENCE, accept, greet};

/// How long a connection or datagram may take that may be refused.
const SOON: Duration = Duration::from_millis(400);
/// Enough connections to meet two servers, and enough attempts to meet the only one that lets them in.
pub(super) const MANY: usize = 16;
const ATTEMPTS: usize = 8;

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Tcp,
    Udp,
}

/// A server of both protocols.
pub(super) struct Server<'a> {
    pub(super) namespace: &'a NetNs,
    pub(super) address: Ipv4Addr,
    pub(super) tcp: u16,
    pub(super) udp: u16,
}

/// The servers that a client has met, the client's addresses that they saw, and how many attempts failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) servers: BTreeSet<Ipv4Addr>,
    pub(super) sources: BTreeSet<Ipv4Addr>,
    pub(super) failed: usize,
}

impl Seen {
    fn note(&mut self, met: Option<(Ipv4Addr, SocketAddr)>) -> Result<()> {
        let Some((server, source)) = met else {
            self.failed += 1;
            return Ok(());
        };
        let IpAddr::V4(source) = source.ip() else { bail!("IPv6") };
        self.servers.insert(server);
        self.sources.insert(source);
        Ok(())
    }
}

/// What a client does with a Service.
pub(super) struct Traffic<'a> {
    pub(super) from: &'a NetNs,
    pub(super) protocol: Protocol,
    pub(super) to: (Ipv4Addr, u16),
    pub(super) servers: Vec<Server<'a>>,
}

impl Traffic<'_> {
    /// Waits until all attempts succeed, reach these servers, and have this source.
    pub(super) fn reaches(&self, servers: &[Ipv4Addr], source: Ipv4Addr) -> Result<()> {
        let servers = servers.iter().copied().collect();
        let expected = Seen { servers, sources: BTreeSet::from([source]), failed: 0 };
        self.sees(MANY, |seen| *seen == expected).with_context(|| format!("expected {expected:?}"))
    }

    /// Waits until no attempt succeeds.
    pub(super) fn is_refused(&self) -> Result<()> {
        self.sees(ATTEMPTS, |seen| seen.servers.is_empty())
    }

    /// Waits until this number of attempts shows what it should.
    pub(super) fn sees(&self, attempts: usize, is_right: impl Fn(&Seen) -> bool) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let seen = self.exchange(attempts, SOON)?;
            if is_right(&seen) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{seen:?}");
        }
    }

    /// Makes connections, or sends datagrams, each of which is answered.
    pub(super) fn exchange(&self, attempts: usize, patience: Duration) -> Result<Seen> {
        let to = SocketAddr::from(self.to);
        let mut seen = Seen::default();
        match self.protocol {
            Protocol::Tcp => {
                let listeners: Vec<_> = self.servers.iter().map(listen).collect::<Result<_>>()?;
                for _ in 0..attempts {
                    seen.note(connect(self.from, to, &listeners, patience)?)?;
                }
            }
            Protocol::Udp => {
                let sockets: Vec<_> = self.servers.iter().map(bind).collect::<Result<_>>()?;
                for _ in 0..attempts {
                    seen.note(send(self.from, to, &sockets, patience)?)?;
                }
            }
        }
        Ok(seen)
    }

    /// Both ends of a connection.
    pub(super) fn open(&self) -> Result<[TcpStream; 2]> {
        let listeners: Vec<_> = self.servers.iter().map(listen).collect::<Result<_>>()?;
        let client = self.from.run(|| TcpStream::connect_timeout(&self.to.into(), PATIENCE))??;
        let (_, server) = accept(&listeners, PATIENCE)?.context("no server gets the connection")?;
        Ok([client, server])
    }
}

fn listen(server: &Server<'_>) -> Result<(Ipv4Addr, TcpListener)> {
    let listener = server.namespace.run(|| TcpListener::bind((server.address, server.tcp)))??;
    listener.set_nonblocking(true)?;
    Ok((server.address, listener))
}

fn bind(server: &Server<'_>) -> Result<(Ipv4Addr, UdpSocket)> {
    let socket = server.namespace.run(|| UdpSocket::bind((server.address, server.udp)))??;
    socket.set_nonblocking(true)?;
    Ok((server.address, socket))
}

fn connect(
    from: &NetNs,
    to: SocketAddr,
    listeners: &[(Ipv4Addr, TcpListener)],
    patience: Duration,
) -> Result<Option<(Ipv4Addr, SocketAddr)>> {
    let Ok(client) = from.run(|| TcpStream::connect_timeout(&to, patience))? else { return Ok(None) };
    // HNS may reset it when ACLs change.
    let Some((server, accepted)) = accept(listeners, patience)? else { return Ok(None) };
    let Ok(source) = accepted.peer_addr() else { return Ok(None) };
    Ok(greet(client, accepted).is_ok().then_some((server, source)))
}

/// A datagram from a port of its own, and the answer to it.
fn send(
    from: &NetNs,
    to: SocketAddr,
    sockets: &[(Ipv4Addr, UdpSocket)],
    patience: Duration,
) -> Result<Option<(Ipv4Addr, SocketAddr)>> {
    let client = from.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))??;
    client.connect(to)?;
    client.send(b"question")?;
    let end = Instant::now() + patience;
    let mut heard = [0; 16];
    while Instant::now() < end {
        for (server, socket) in sockets {
            match socket.recv_from(&mut heard) {
                Ok((length, source)) => {
                    ensure!(&heard[..length] == b"question", "{server} hears something else");
                    socket.send_to(b"answer", source)?;
                    client.set_read_timeout(Some(patience))?;
                    let answered = client.recv(&mut heard).is_ok_and(|length| &heard[..length] == b"answer");
                    return Ok(answered.then_some((*server, source)));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}
