//! Real connections from network namespaces. Waiting connections cost almost nothing, so many may wait at once; but
//! only few start at once, because a burst of first packets would overrun the links.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tortie_kernel::namespace::NetNs;

use crate::Progress;

/// After this time a connection counts as cut: a lost first packet is sent again after one second.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(2_500);

/// The maximum number of open connections, if the limit of open files allows it.
const AT_ONCE: usize = 4096;
/// The maximum number of starting connections.
const STARTING: usize = 256;
/// How long a connection counts as starting.
const FIRST_CHANCE: Duration = Duration::from_millis(100);
/// The number of sockets created at once.
const BATCH: usize = 32;
/// The interval of progress messages.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// The result of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The server answered with its page.
    Reached,
    /// The pod was reached, but nothing listens there.
    Refused,
    /// No answer arrived.
    Cut,
    /// It could not be tried, or failed in another way than by silence; the note says how.
    Failed,
}

/// A connection to try.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    pub(crate) netns: PathBuf,
    pub(crate) to: SocketAddr,
    /// The text that the page must contain.
    pub(crate) expect: String,
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Probed {
    pub(crate) verdict: Verdict,
    pub(crate) millis: f64,
    /// Why it failed, or something unusual, for the user.
    pub(crate) note: Option<String>,
}

/// Tries all connections. The results have the order of the probes.
pub(crate) async fn run_all(probes: Vec<Probe>, progress: &Progress) -> Vec<Probed> {
    let count = probes.len();
    let open = Arc::new(Semaphore::new(room()));
    let starting = Arc::new(Semaphore::new(STARTING));
    let mut tasks = JoinSet::new();
    let mut results: Vec<Option<Probed>> = vec![None; count];
    let mut tried = Tried { progress, count, done: 0, told: Instant::now() };
    let mut probes = probes.into_iter().enumerate().peekable();
    while let Some((_, first)) = probes.peek() {
        let netns = first.netns.clone();
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(probe) = probes.next_if(|(_, probe)| probe.netns == netns)
        {
            batch.push(probe);
        }
        let Ok(permits) = open.clone().acquire_many_owned(batch.len() as u32).await else { break };
        let permits = Arc::new(permits);
        let addresses: Vec<SocketAddr> = batch.iter().map(|(_, probe)| probe.to).collect();
        let sockets = tokio::task::spawn_blocking(move || sockets(&netns, &addresses)).await;
        let mut sockets = sockets.unwrap_or_else(|error| Err(error.to_string())).map(Vec::into_iter);
        for (index, probe) in batch {
            let socket = match &mut sockets {
                Ok(sockets) => sockets.next().unwrap_or_else(|| Err("no socket".to_owned())),
                Err(error) => Err(error.clone()),
            };
            let (permits, starting) = (permits.clone(), starting.clone());
            tasks.spawn(async move {
                let probed = probe.run(socket, &starting).await;
                drop(permits);
                (index, probed)
            });
        }
        while let Some(Ok(result)) = tasks.try_join_next() {
            tried.note(&mut results, result);
        }
    }
    while let Some(joined) = tasks.join_next().await {
        if let Ok(result) = joined {
            tried.note(&mut results, result);
        }
    }
    let lost = || Probed::failed("the probe was lost".to_owned());
    results.into_iter().map(|result| result.unwrap_or_else(lost)).collect()
}

/// The progress.
struct Tried<'a> {
    progress: &'a Progress,
    count: usize,
    done: usize,
    told: Instant,
}

impl Tried<'_> {
    fn note(&mut self, results: &mut [Option<Probed>], (index, probed): (usize, Probed)) {
        self.done += 1;
        results[index] = Some(probed);
        if self.told.elapsed() >= TELL_EVERY && self.done < self.count {
            self.told = Instant::now();
            let Self { done, count, .. } = self;
            self.progress.done(&format!("{done} of {count} connections are tried"));
        }
    }
}

/// Creates sockets in a network namespace, one for each address.
fn sockets(netns: &Path, to: &[SocketAddr]) -> Result<Vec<Result<TcpSocket, String>>, String> {
    let make = |to: &SocketAddr| match to {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    };
    let all = || to.iter().map(|to| make(to).map_err(|error| error.to_string())).collect();
    NetNs::open(netns).and_then(|netns| netns.run(all)).map_err(|error| error.to_string())
}

/// The maximum number of open connections: raises the limit of open files as far as possible, and returns what it
/// allows.
fn room() -> usize {
    let mut limits = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limits.maximum, maximum: limits.maximum };
    if setrlimit(Resource::Nofile, raised).is_ok() {
        limits = raised;
    }
    let limit = limits.current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    (limit / 2).clamp(BATCH, AT_ONCE)
}

impl Probed {
    fn failed(note: String) -> Self {
        Self { verdict: Verdict::Failed, millis: 0.0, note: Some(note) }
    }
}

impl Probe {
    /// Tries the connection for at most [`TIMEOUT`]. For [`FIRST_CHANCE`] it counts as starting.
    async fn run(&self, socket: Result<TcpSocket, String>, starting: &Semaphore) -> Probed {
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) => return Probed::failed(error),
        };
        let permit = starting.acquire().await;
        let begun = Instant::now();
        let mut fetching = pin!(timeout(TIMEOUT, fetch(socket, self.to)));
        let early = timeout(FIRST_CHANCE, &mut fetching).await;
        drop(permit);
        let result = match early {
            Ok(result) => result,
            Err(_) => fetching.await,
        };
        let millis = (begun.elapsed().as_secs_f64() * 1e5).round() / 100.0;
        let result = result.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
        let (verdict, note) = match result {
            Ok(page) if page.contains(&self.expect) => (Verdict::Reached, None),
            Ok(page) => (Verdict::Reached, Some(format!("the page does not name {}: {page:?}", self.expect))),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => (Verdict::Refused, None),
            Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                (Verdict::Cut, None)
            }
            Err(error) => (Verdict::Failed, Some(error.to_string())),
        };
        Probed { verdict, millis, note }
    }
}

async fn fetch(socket: TcpSocket, to: SocketAddr) -> std::io::Result<String> {
    let mut stream = socket.connect(to).await?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await?;
    let mut page = String::new();
    stream.take(65_536).read_to_string(&mut page).await?;
    Ok(page)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    fn probe(netns: &str, to: [u8; 4]) -> Probed {
        let probe = Probe { netns: netns.into(), to: (to, 80).into(), expect: String::new() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run_all(vec![probe], &Progress::new())).remove(0)
    }

    #[test]
    fn errors_other_than_silence_are_not_cut() {
        let missing = probe("/nowhere/netns", [127, 0, 0, 1]);
        assert_eq!(missing.verdict, Verdict::Failed);
        assert!(missing.note.unwrap().contains("/nowhere/netns"));

        let alone = NetNs::create().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("alone");
        std::os::unix::fs::symlink(format!("/proc/self/fd/{}", alone.as_fd().as_raw_fd()), &path).unwrap();
        let path = path.to_str().unwrap();
        let routeless = probe(path, [192, 0, 2, 1]);
        assert_eq!(routeless.verdict, Verdict::Failed);
        assert!(routeless.note.unwrap().contains("unreachable"));
        assert_eq!(probe(path, [127, 0, 0, 1]).verdict, Verdict::Refused);
    }
}
