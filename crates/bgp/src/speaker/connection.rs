//! The tasks of a connection: one reads whole messages, one writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::socket;
use crate::codec::{Notification, length};
use crate::fsm::{ConnectionId, LOOK, UNACKNOWLEDGED};
use crate::rib::PeerId;

/// What a connection reports.
#[derive(Debug)]
pub(super) enum Report {
    /// Whole messages, one behind the other.
    Messages(Vec<u8>),
    /// What follows is no message.
    Broken(Notification),
    /// It has ended.
    Closed,
    /// There is room for more messages.
    Drained,
}

/// A report, and whose it is.
pub(super) type Tagged = (PeerId, ConnectionId, Report);

/// Nothing more is queued when this many bytes wait.
const FULL: usize = 256 << 10;
/// The most bytes in one read or write.
const READ: usize = 16 << 10;
/// How long a connection may take to send its last bytes.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The owner's end of a connection. Dropping it closes the connection after everything that was sent.
pub(super) struct OpenConnection {
    out: mpsc::UnboundedSender<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    reader: JoinHandle<()>,
    /// There until [`close`](Self::close).
    writer: Option<JoinHandle<()>>,
    /// Tells the reader, which has the socket also while the writer waits.
    probe: Arc<Notify>,
    /// The writer notices that it is dropped, also while it waits for a peer that does not read.
    _closing: oneshot::Sender<()>,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A connection that is closed after everything that was sent.
pub(super) struct ClosedConnection(Option<JoinHandle<()>>);

impl ClosedConnection {
    /// Waits until everything is sent, or time is over.
    pub(super) async fn finish(self) {
        if let Some(writer) = self.0 {
            // A panic of the task ends the connection, too.
            let _ = writer.await;
        }
    }
}

impl OpenConnection {
    /// Starts the tasks.
    pub(super) fn start(
        stream: TcpStream,
        peer: PeerId,
        id: ConnectionId,
        reports: mpsc::Sender<Tagged>,
    ) -> Self {
        let (read, write) = stream.into_split();
        let (out, messages) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let drained = reports.clone();
        let counter = Arc::clone(&waiting);
        let (_closing, closed) = oneshot::channel::<()>();
        let writer = tokio::spawn(async move {
            let writing = write_all(write, messages, &counter, || {
                // If the queue of reports is full, the owner will look at all connections anyway.
                let _ = drained.try_send((peer, id, Report::Drained));
            });
            let too_long = async {
                let _ = closed.await;
                tokio::time::sleep(LAST_WORDS).await;
            };
            tokio::select! {
                () = writing => {}
                () = too_long => {}
            }
        });
        let probe = Arc::new(Notify::new());
        let probed = Arc::clone(&probe);
        let reader = tokio::spawn(async move {
            read_all(read, &probed, |report| {
                let reports = reports.clone();
                async move { reports.send((peer, id, report)).await.is_ok() }
            })
            .await;
        });
        Self { out, waiting, reader, writer: Some(writer), probe, _closing }
    }

    /// Queues bytes. If the connection has ended, they are lost, and the end is reported.
    pub(super) fn send(&self, bytes: Vec<u8>) {
        self.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
        let _ = self.out.send(bytes);
    }

    /// Ends the connection if the peer's system acknowledges nothing of what is sent now.
    pub(super) fn probe(&self) {
        self.probe.notify_one();
    }

    /// Closes the connection after everything that was sent.
    pub(super) fn close(mut self) -> ClosedConnection {
        ClosedConnection(self.writer.take())
    }

    /// Whether more bytes should wait elsewhere.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= FULL
    }
}

async fn write_all(
    mut write: OwnedWriteHalf,
    mut messages: mpsc::UnboundedReceiver<Vec<u8>>,
    waiting: &AtomicUsize,
    drained: impl Fn(),
) {
    // Nothing is kept between batches: a speaker may have many connections that are idle.
    while let Some(mut batch) = messages.recv().await {
        while batch.len() < READ
            && let Ok(message) = messages.try_recv()
        {
            batch.extend(message);
        }
        let written = write.write_all(&batch).await;
        // A broken connection also ends the reader, which reports it.
        if written.is_err() {
            return;
        }
        let before = waiting.fetch_sub(batch.len(), Ordering::Relaxed);
        if before >= FULL && before - batch.len() < FULL {
            drained();
        }
    }
    let _ = write.shutdown().await;
}

async fn read_all<F: Future<Output = bool>>(
    read: OwnedReadHalf,
    probe: &Notify,
    report: impl Fn(Report) -> F,
) {
    let mut buffer: Vec<u8> = Vec::new();
    let mut look_at = None;
    loop {
        // An idle connection has no buffer.
        let ready = tokio::select! {
            ready = read.readable() => ready,
            () = probe.notified() => {
                look_at = Some(Instant::now() + LOOK);
                continue;
            }
            () = sleep_until(look_at.unwrap_or_else(Instant::now)), if look_at.is_some() => {
                look_at = None;
                if is_lost(&read) {
                    report(Report::Closed).await;
                    return;
                }
                continue;
            }
        };
        buffer.reserve(READ);
        match ready.and_then(|()| read.try_read_buf(&mut buffer)) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                buffer.shrink_to_fit();
                continue;
            }
            Ok(0) | Err(_) => {
                report(Report::Closed).await;
                return;
            }
            Ok(_) => {}
        }
        let (whole, problem) = whole_messages(&buffer);
        if whole > 0 {
            let rest = buffer[whole..].to_vec();
            let mut messages = std::mem::replace(&mut buffer, rest);
            messages.truncate(whole);
            messages.shrink_to_fit();
            if !report(Report::Messages(messages)).await {
                return;
            }
        }
        if let Some(notification) = problem {
            report(Report::Broken(notification)).await;
            return;
        }
    }
}

/// Whether the peer's system does not acknowledge the connection any more.
fn is_lost(read: &OwnedReadHalf) -> bool {
    socket::is_unacknowledged(read.as_ref(), UNACKNOWLEDGED).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot find out whether the peer still has the connection");
        false
    })
}

/// The length of the whole messages at the front, and what is wrong with what follows them.
fn whole_messages(bytes: &[u8]) -> (usize, Option<Notification>) {
    let mut at = 0;
    loop {
        match length(&bytes[at..]) {
            Ok(Some(length)) if at + length <= bytes.len() => at += length,
            Ok(_) => return (at, None),
            Err(notification) => return (at, Some(notification)),
        }
    }
}
