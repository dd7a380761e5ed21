//! The switch's thread: waits for frames and datagrams, calls the fabric, and sends.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt;
use tortie_hcn::Guid;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tracing::{debug, trace};

use crate::counters::EndpointCounters;
use crate::error::Error;
use crate::fabric::{Fabric, Output, Plan, Port};

/// The port of VXLAN (RFC 7348). Windows supports no other.
const VXLAN_PORT: u16 = 4789;
/// The largest packet that a kernel passes in one piece.
const BUFFER: usize = 1 << 17;
/// The number of frames read from one source before the other sources.
const BURST: usize = 64;

const STOP: u64 = 0;
const TUNNEL: u64 = 1;
const FIRST_PORT: u64 = 2;

/// The state shared by the thread and by changes of ports.
pub(super) struct Engine {
    epoll: OwnedFd,
    stop: OwnedFd,
    tunnel: UdpSocket,
    fabric: Mutex<Fabric>,
    ports: Mutex<Sockets>,
}

#[derive(Default)]
struct Sockets {
    by_token: BTreeMap<u64, (Port, Arc<PacketSocket>)>,
    by_port: BTreeMap<Port, (u64, Arc<PacketSocket>)>,
    last_token: u64,
}

impl Engine {
    pub(super) fn new(node: &NetNs, provider: Ipv4Addr) -> Result<Engine, Error> {
        let tunnel = node.run(|| UdpSocket::bind((provider, VXLAN_PORT)))?;
        let tunnel = tunnel.map_err(Error::system("bind UDP port 4789 to the provider address"))?;
        let set_up = || -> io::Result<(OwnedFd, OwnedFd)> {
            tunnel.set_nonblocking(true)?;
            // Bursts of a fast sender wait here; the system may grant less.
            sockopt::set_socket_recv_buffer_size(&tunnel, 4 << 20)?;
            let epoll = epoll::create(CreateFlags::CLOEXEC)?;
            let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN)?;
            epoll::add(&epoll, &tunnel, EventData::new_u64(TUNNEL), EventFlags::IN)?;
            Ok((epoll, stop))
        };
        let (epoll, stop) = set_up().map_err(Error::system("set up the switch's event loop"))?;
        Ok(Engine { epoll, stop, tunnel, fabric: Mutex::default(), ports: Mutex::default() })
    }

    pub(super) fn add_port(&self, port: Port, socket: PacketSocket) -> Result<(), Error> {
        let socket = Arc::new(socket);
        let mut ports = self.ports();
        ports.last_token = ports.last_token.max(FIRST_PORT - 1) + 1;
        let token = ports.last_token;
        epoll::add(&self.epoll, &socket, EventData::new_u64(token), EventFlags::IN)
            .map_err(|error| Error::system("wait for a port's frames")(error.into()))?;
        ports.by_token.insert(token, (port, Arc::clone(&socket)));
        ports.by_port.insert(port, (token, socket));
        Ok(())
    }

    pub(super) fn remove_port(&self, port: Port) {
        let mut ports = self.ports();
        if let Some((token, socket)) = ports.by_port.remove(&port) {
            ports.by_token.remove(&token);
            // It may have been removed already because of an error.
            let _ = epoll::delete(&self.epoll, &socket);
        }
    }

    pub(super) fn set_plans(&self, plans: BTreeMap<Guid, Arc<Plan>>) {
        let mut fabric = self.fabric();
        let outputs = fabric.set_plans(plans, Instant::now());
        fabric.counters.received(&outputs);
        drop(fabric);
        self.send(outputs);
    }

    /// What an endpoint's port has counted.
    pub(super) fn counters(&self, endpoint: Guid) -> EndpointCounters {
        self.fabric().counters.of(endpoint)
    }

    /// Makes [`run`](Self::run) return.
    pub(super) fn stop(&self) {
        // A full counter is also a request to stop.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// Forwards until [`stop`](Self::stop).
    pub(super) fn run(&self) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER];
        let mut events = Vec::with_capacity(BURST);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let data = event.data;
                let token = data.u64();
                match token {
                    STOP => return Ok(()),
                    TUNNEL => self.read_tunnel(&mut buffer)?,
                    _ => self.read_port(token, &mut buffer),
                }
            }
        }
    }

    fn read_tunnel(&self, buffer: &mut [u8]) -> io::Result<()> {
        for _ in 0..BURST {
            match self.tunnel.recv_from(buffer) {
                Ok((length, SocketAddr::V4(sender))) => {
                    let mut fabric = self.fabric();
                    let outputs = fabric.arrive_by_tunnel(*sender.ip(), &buffer[..length], Instant::now());
                    fabric.counters.received(&outputs);
                    drop(fabric);
                    self.send(outputs);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // Another node refused a datagram or is unreachable: the result of an earlier send.
                Err(error) => debug!(%error, "VXLAN socket"),
            }
        }
        Ok(())
    }

    fn read_port(&self, token: u64, buffer: &mut [u8]) {
        let Some((port, socket)) = self.ports().by_token.get(&token).cloned() else { return };
        for _ in 0..BURST {
            match socket.receive(buffer) {
                Ok(Some(length)) => {
                    let mut fabric = self.fabric();
                    let outputs = fabric.arrive(port, &buffer[..length], Instant::now());
                    fabric.counters.sent(port, &buffer[..length]);
                    fabric.counters.received(&outputs);
                    drop(fabric);
                    self.send(outputs);
                }
                Ok(None) => return,
                Err(error) => {
                    // Mostly ENETDOWN: the far end is down temporarily or gone. Reading the error clears it.
                    debug!(?port, %error, "receiving");
                    return;
                }
            }
        }
    }

    fn send(&self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Frame(port, frame) => {
                    let socket = self.ports().by_port.get(&port).map(|(_, socket)| Arc::clone(socket));
                    let Some(socket) = socket else { continue };
                    match socket.send(&frame) {
                        Ok(true) => {}
                        Ok(false) => trace!(?port, "no room: a frame is dropped"),
                        Err(error) => debug!(?port, %error, length = frame.len(), "sending a frame"),
                    }
                }
                Output::Tunnel(to, datagram) => {
                    if let Err(error) = self.tunnel.send_to(&datagram, (to, VXLAN_PORT)) {
                        debug!(%to, %error, length = datagram.len(), "sending a VXLAN datagram");
                    }
                }
            }
        }
    }

    fn ports(&self) -> MutexGuard<'_, Sockets> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fabric(&self) -> MutexGuard<'_, Fabric> {
        self.fabric.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
