//! The socket for the CNI plugin, and the deletions that it stored on disk while the agent was down.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tortie_cni::transport::{body_length, encode_answer};
use tortie_cni::{Code, Command, Failure, Invocation};

use crate::pods::Pods;
use tortie_store::backoff::{Backoff, random_seed};

/// The interval of checks for deletions on disk. The plugin stores one whenever it cannot reach the agent, which the
/// agent may not notice otherwise.
const QUEUE_INTERVAL: Duration = Duration::from_secs(5);
/// The maximum delay after a failed accept, which is mostly caused by a lack of file descriptors.
pub(crate) const MAX_ACCEPT_DELAY: Duration = Duration::from_secs(1);

/// Creates a socket for the agent's own user. An abandoned one is replaced.
pub(crate) fn listen(socket: &Path) -> io::Result<UnixListener> {
    if let Some(folder) = socket.parent() {
        std::fs::create_dir_all(folder)?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves until the future is dropped.
pub(crate) async fn run(pods: Arc<Pods>, listener: UnixListener) {
    let mut backoff = Backoff::new(random_seed()).with_max(MAX_ACCEPT_DELAY);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::error!(%error, "cannot accept a call of the CNI plugin; Tortie retries");
                backoff.wait().await;
                continue;
            }
        };
        backoff.succeeded();
        let pods = pods.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(&pods, stream).await {
                tracing::warn!(%error, "a call of the CNI plugin broke off; the runtime retries");
            }
        });
    }
}

async fn serve(pods: &Pods, mut stream: UnixStream) -> io::Result<()> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).await?;
    let mut body = vec![0; body_length(header)?];
    stream.read_exact(&mut body).await?;
    let answer = match serde_json::from_slice::<Invocation>(&body) {
        Ok(call) => pods.carry_out(&call, hung_up(&stream)).await,
        Err(error) => {
            Err(Failure::new(Code::DECODING, "the plugin's call cannot be read", error.to_string()))
        }
    };
    stream.write_all(&encode_answer(answer)?).await
}

/// Waits until the plugin disconnects. It sends nothing after its call, so the socket becomes readable only then.
async fn hung_up(stream: &UnixStream) {
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
        for file in waiting(&queue) {
            if let Err(error) = carry_out(&pods, &file).await {
                tracing::warn!(%error, file = %file.display(), "a queued deletion failed; Tortie retries");
            }
        }
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
    pods.carry_out(&call, std::future::pending()).await.map_err(io::Error::other)?;
    std::fs::remove_file(file)
}

fn waiting(queue: &Path) -> Vec<PathBuf> {
    let Ok(files) = std::fs::read_dir(queue) else { return Vec::new() };
    let files = files.flatten().map(|file| file.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}
