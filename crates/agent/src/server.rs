//! The socket for the CNI plugin, and the deletions that it stored on disk while the agent was down.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tortie_cni::transport::{body_length, encode_answer};
use tortie_cni::{Code, Command, Failure, Invocation};

use crate::local::{Listener, Stream, make_folder_of, path_of_lock, private};
use crate::pods::Pods;
use tortie_store::backoff::{Backoff, random_seed};

/// The interval of checks for deletions on disk. The plugin stores one whenever it cannot reach the agent, which the
/// agent may not notice otherwise.
const QUEUE_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum delay after a failed accept, which is mostly caused by a lack of file descriptors.
pub(crate) const MAX_ACCEPT_DELAY: Duration = Duration::from_secs(1);

/// How long the plugin may take to send its call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of calls at a time: a node has at most some hundred pods, and one call for each.
const MAX_CALLS: usize = 1024;
/// The interval of checks whether the socket is still there.
const SOCKET_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of attempts to become the node's agent.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);
/// The number of deletions on disk that are executed at a time.
const DELETIONS_AT_A_TIME: usize = 16;

/// Waits until no other agent serves this socket: two would undo each other's work. The lock ends with the file.
pub(crate) async fn lock(socket: &Path) -> io::Result<File> {
    make_folder_of(socket)?;
    let path = path_of_lock(socket);
    let file = private(OpenOptions::new().create(true).read(true).append(true)).open(&path)?;
    let mut has_waited = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {
                if !std::mem::replace(&mut has_waited, true) {
                    tracing::warn!(lock = %path.display(), "another agent serves this node; this one starts when that one has ended");
                }
                tokio::time::sleep(LOCK_INTERVAL).await;
            }
        }
    }
}

/// Serves until the future is dropped. If somebody removes or replaces the socket, it is created again.
pub(crate) async fn run(pods: Arc<Pods>, socket: PathBuf, mut listener: Listener) {
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_ACCEPT_DELAY);
    let calls = Arc::new(Semaphore::new(MAX_CALLS));
    let mut check = tokio::time::interval(SOCKET_INTERVAL);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = check.tick() => {
                if listener.is_there() {
                    continue;
                }
                tracing::warn!(socket = %socket.display(), "somebody has removed or replaced the socket; Tortie creates it again");
                match Listener::bind(&socket) {
                    Ok(new) => listener = new,
                    Err(error) => tracing::error!(%error, socket = %socket.display(), "cannot create the socket; Tortie retries"),
                }
                continue;
            }
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(%error, "cannot accept a call of the CNI plugin; Tortie retries");
                backoff.wait().await;
                continue;
            }
        };
        backoff.succeeded();
        let Ok(permit) = calls.clone().try_acquire_owned() else {
            tracing::error!(
                calls = MAX_CALLS,
                "too many calls of the CNI plugin; Tortie rejects one, and the runtime retries"
            );
            continue;
        };
        let pods = pods.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(&pods, stream).await {
                tracing::warn!(%error, "a call of the CNI plugin broke off; the runtime retries");
            }
            drop(permit);
        });
    }
}

async fn serve(pods: &Pods, mut stream: Stream) -> io::Result<()> {
    let body = timeout(CALL_TIMEOUT, read_call(&mut stream)).await??;
    let answer = match serde_json::from_slice::<Invocation>(&body) {
        Ok(call) => pods.carry_out(&call, hung_up(&stream)).await,
        Err(error) => {
            Err(Failure::new(Code::DECODING, "the plugin's call cannot be read", error.to_string()))
        }
    };
    stream.write_all(&encode_answer(answer)?).await
}

async fn read_call(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).await?;
    let mut body = vec![0; body_length(header)?];
    stream.read_exact(&mut body).await?;
    Ok(body)
}

/// Waits until the plugin disconnects. It sends nothing after its call, so the socket becomes readable only then.
async fn hung_up(stream: &Stream) {
    while stream.readable().await.is_ok() {
        match stream.try_read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

/// Executes the deletions that the plugin stores in this folder, until the future is dropped.
pub(crate) async fn drain_queue(pods: Arc<Pods>, queue: PathBuf) {
    loop {
        // One that has to wait must not hold up the others.
        let deletions = stream::iter(waiting(&queue)).map(|file| {
            let pods = pods.clone();
            async move {
                if let Err(error) = carry_out(&pods, &file).await {
                    tracing::warn!(%error, file = %file.display(), "a queued deletion failed; Tortie retries");
                }
            }
        });
        deletions.buffer_unordered(DELETIONS_AT_A_TIME).collect::<Vec<()>>().await;
        tokio::time::sleep(QUEUE_INTERVAL).await;
    }
}

async fn carry_out(pods: &Pods, file: &Path) -> io::Result<()> {
    let call = match serde_json::from_slice::<Invocation>(&std::fs::read(file)?) {
        Ok(call) => Invocation { command: Command::Del, ..call },
        Err(error) => {
            let aside = file.with_extension("unreadable");
            tracing::error!(%error, file = %aside.display(), "cannot read a queued deletion; Tortie moves the file aside");
            return std::fs::rename(file, aside);
        }
    };
    match pods.carry_out(&call, std::future::pending()).await {
        Ok(_) => std::fs::remove_file(file),
        // For instance without the pod's name. No retry changes that.
        Err(failure) if failure.code == Code::INVALID_ENVIRONMENT => {
            let aside = file.with_extension("rejected");
            tracing::error!(%failure, file = %aside.display(), "cannot execute a queued deletion; Tortie moves the file aside");
            std::fs::rename(file, aside)
        }
        Err(failure) => Err(io::Error::other(failure)),
    }
}

fn waiting(queue: &Path) -> Vec<PathBuf> {
    let Ok(files) = std::fs::read_dir(queue) else { return Vec::new() };
    let files = files.flatten().map(|file| file.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}
