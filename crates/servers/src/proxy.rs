//! A TCP proxy on loopback that disturbs connections on command.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::Error;
use crate::error::io;

/// How many chunks of at most 16 KiB may be under way in one direction of a connection.
const CHUNKS: usize = 64;

/// A proxy before one server. At first it forwards everything at once.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Wakes threads that wait for the end of a pause.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    delay: Duration,
    /// The maximum of what a connection adds to the delay.
    spread: Duration,
    paused: bool,
    refuses: bool,
    ended: bool,
    /// The open connections by number.
    connections: BTreeMap<u64, Connection>,
    /// How many connections there were.
    accepted: u64,
}

/// A fault of a network, caused by [`Proxy::disturb`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Everything arrives later.
    Delay,
    /// What is sent on several connections arrives in another order.
    Reordering,
    /// All connections end.
    Cut,
    /// All connections end, again and again.
    Cuts,
    /// Connections end, and new ones are refused for a second.
    Refusal,
    /// Nothing arrives for a second.
    Pause,
    /// Nothing arrives, and then all connections end.
    PauseAndCut,
    /// Nothing arrives for five seconds. Nobody ends the connections meanwhile.
    LostConnections,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 8] = [
        Self::Delay,
        Self::Reordering,
        Self::Cut,
        Self::Cuts,
        Self::Refusal,
        Self::Pause,
        Self::PauseAndCut,
        Self::LostConnections,
    ];
}

struct Connection {
    ends: [TcpStream; 2],
    /// The directions in which data may still follow.
    directions: u8,
}

/// A piece of data, and when it may be forwarded.
struct Chunk {
    due: Instant,
    data: Vec<u8>,
}

impl Proxy {
    /// Starts a proxy on a free port that forwards to this address.
    ///
    /// # Errors
    ///
    /// No port is free.
    pub fn start(target: SocketAddr) -> Result<Self, Error> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(io("starting a proxy"))?;
        let address = listener.local_addr().map_err(io("starting a proxy"))?;
        let shared = Arc::new(Shared::default());
        let acceptor = Arc::clone(&shared);
        std::thread::spawn(move || accept(&listener, target, &acceptor));
        Ok(Self { address, shared })
    }

    /// The address for clients.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Forwards everything that arrives from now on this much later, in both directions.
    pub fn delay(&self, delay: Duration) {
        self.shared.lock().delay = delay;
    }

    /// Delays each connection by a time of its own, up to this one. What is sent at the same time on several connections
    /// arrives in another order.
    pub fn spread(&self, most: Duration) {
        self.shared.lock().spread = most;
    }

    /// Forwards nothing more, and keeps connections open: half-open connections. New connections are accepted.
    pub fn pause(&self) {
        self.shared.lock().paused = true;
    }

    /// Forwards what has arrived during the pause, and all that follows.
    pub fn resume(&self) {
        self.shared.lock().paused = false;
        self.shared.changed.notify_all();
    }

    /// Closes all connections, and returns how many they were. New connections are accepted.
    pub fn cut(&self) -> usize {
        let connections = std::mem::take(&mut self.shared.lock().connections);
        connections.values().for_each(Connection::close);
        self.shared.changed.notify_all();
        connections.len()
    }

    /// Closes new connections at once, or accepts them again. Existing connections stay.
    pub fn refuse(&self, refuses: bool) {
        self.shared.lock().refuses = refuses;
    }

    /// Causes a fault, and waits until it is over. Delays stay until [`Self::calm`].
    pub fn disturb(&self, fault: Fault) {
        let pause_for = |milliseconds| {
            self.pause();
            sleep(Duration::from_millis(milliseconds));
        };
        match fault {
            Fault::Delay => self.delay(Duration::from_millis(300)),
            Fault::Reordering => self.spread(Duration::from_millis(500)),
            Fault::Cut => {
                self.cut();
            }
            Fault::Cuts => {
                for _ in 0..10 {
                    sleep(Duration::from_millis(70));
                    self.cut();
                }
            }
            Fault::Refusal => {
                self.refuse(true);
                self.cut();
                sleep(Duration::from_secs(1));
                self.refuse(false);
            }
            Fault::Pause => pause_for(1_000),
            Fault::PauseAndCut => {
                pause_for(500);
                self.cut();
            }
            Fault::LostConnections => {
                pause_for(5_000);
                self.cut();
            }
        }
        self.resume();
    }

    /// Ends all delays.
    pub fn calm(&self) {
        self.delay(Duration::ZERO);
        self.spread(Duration::ZERO);
    }

    /// How many connections are open.
    #[must_use]
    pub fn open(&self) -> usize {
        self.shared.lock().connections.len()
    }

    /// How many connections clients have opened so far.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.shared.lock().accepted
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.cut();
        // Wakes the thread that accepts connections.
        let _ = TcpStream::connect(self.address);
    }
}

impl Connection {
    fn close(&self) {
        for end in &self.ends {
            // An end that has closed already is as it must be.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much later a connection forwards now.
    fn delay_of(&self, connection: u64) -> Duration {
        // Neighbours get times that are far apart.
        const STEPS: u64 = 5;
        let state = self.lock();
        let step = u32::try_from(connection * 2 % STEPS).unwrap_or_default();
        state.delay + state.spread * step / 4
    }

    /// Waits until the connection may forward. Returns false if the connection was closed.
    fn may_forward(&self, connection: u64) -> bool {
        let mut state = self.lock();
        while state.paused && state.connections.contains_key(&connection) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.connections.contains_key(&connection)
    }

    fn close(&self, connection: u64) {
        if let Some(connection) = self.lock().connections.remove(&connection) {
            connection.close();
        }
        self.changed.notify_all();
    }

    /// Notes that one direction has ended. The connection is over when both have.
    fn end_direction(&self, number: u64) {
        let mut state = self.lock();
        let Some(connection) = state.connections.get_mut(&number) else { return };
        connection.directions -= 1;
        if connection.directions == 0 {
            state.connections.remove(&number);
        }
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        let mut state = shared.lock();
        if state.ended {
            return;
        }
        state.accepted += 1;
        let (number, refuses) = (state.accepted, state.refuses);
        drop(state);
        let Ok(client) = client else { continue };
        if !refuses {
            // A client whose server cannot be reached sees a closed connection.
            let _ = connect(client, target, number, shared);
        }
    }
}

fn connect(client: TcpStream, target: SocketAddr, number: u64, shared: &Arc<Shared>) -> std::io::Result<()> {
    let server = TcpStream::connect(target)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let pairs = [(client.try_clone()?, server.try_clone()?), (server.try_clone()?, client.try_clone()?)];
    let mut state = shared.lock();
    if state.ended {
        return Ok(());
    }
    state.connections.insert(number, Connection { ends: [client, server], directions: 2 });
    drop(state);
    for (from, to) in pairs {
        let (sender, receiver) = sync_channel(CHUNKS);
        let (reader, writer) = (Arc::clone(shared), Arc::clone(shared));
        std::thread::spawn(move || read(from, number, &sender, &reader));
        std::thread::spawn(move || write(to, number, &receiver, &writer));
    }
    Ok(())
}

/// Reads one direction of a connection until its end.
fn read(mut from: TcpStream, number: u64, sender: &SyncSender<Chunk>, shared: &Shared) {
    let mut buffer = vec![0; 16 * 1024];
    // The end of the data, and an error, end the channel; the other thread then closes this direction.
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let due = Instant::now() + shared.delay_of(number);
        if sender.send(Chunk { due, data: buffer[..count].to_vec() }).is_err() {
            return;
        }
    }
}

/// Writes one direction of a connection until its end.
fn write(mut to: TcpStream, number: u64, receiver: &Receiver<Chunk>, shared: &Shared) {
    for Chunk { due, data } in receiver {
        sleep(due.saturating_duration_since(Instant::now()));
        if !shared.may_forward(number) || to.write_all(&data).is_err() {
            shared.close(number);
            return;
        }
    }
    // One side has sent everything. The other direction may continue.
    if shared.may_forward(number) {
        let _ = to.shutdown(Shutdown::Write);
        shared.end_direction(number);
    }
}
