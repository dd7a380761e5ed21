//! The socket that the CNI plugin calls, and the deletions that it left on disk while the agent was away.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Mutex as AsyncMutex;
use tortie_cni::transport::{Answer, body_length, encode_answer};
use tortie_cni::{Code, Command, Failure, Invocation};

use crate::pods::Pods;

/// How long to wait before a deletion from disk is tried again.
const QUEUE_RETRY: Duration = Duration::from_secs(5);

/// Serves until the future is dropped.
pub(crate) async fn run(pods: Arc<Pods>, socket: &Path) -> io::Result<()> {
    if let Some(folder) = socket.parent() {
        std::fs::create_dir_all(folder)?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    let server = Arc::new(Server { pods, busy: Mutex::default() });
    tracing::info!(socket = %socket.display(), "pods can be added");
    loop {
        let (stream, _) = listener.accept().await?;
        let server = server.clone();
        tokio::spawn(async move {
            if let Err(error) = server.serve(stream).await {
                tracing::warn!(%error, "a call of the CNI plugin broke off; the runtime will try again");
            }
        });
    }
}

/// Carries out the deletions that the plugin left in this folder, until none is left.
pub(crate) async fn drain_queue(pods: Arc<Pods>, queue: &Path) {
    loop {
        let mut failed = false;
        for file in waiting(queue) {
            let call =
                std::fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Invocation>(&text).ok());
            let Some(call) = call else {
                tracing::error!(file = %file.display(), "a deletion that was left on disk cannot be read; it is skipped");
                continue;
            };
            match pods.del(&call).await {
                Ok(()) => drop(std::fs::remove_file(&file)),
                Err(failure) => {
                    tracing::warn!(%failure, container = call.container_id, "a deletion that was left on disk failed; it is tried again");
                    failed = true;
                }
            }
        }
        if !failed {
            return;
        }
        tokio::time::sleep(QUEUE_RETRY).await;
    }
}

fn waiting(queue: &Path) -> Vec<std::path::PathBuf> {
    let Ok(files) = std::fs::read_dir(queue) else { return Vec::new() };
    let files = files.flatten().map(|file| file.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect()
}

struct Server {
    pods: Arc<Pods>,
    /// One call at a time for each container: a runtime may give up on an ADD and send the DEL while it goes on.
    busy: Mutex<HashMap<String, Arc<AsyncMutex<()>>>>,
}

impl Server {
    async fn serve(&self, mut stream: UnixStream) -> io::Result<()> {
        let mut header = [0; 4];
        stream.read_exact(&mut header).await?;
        let mut body = vec![0; body_length(header)?];
        stream.read_exact(&mut body).await?;
        let answer = match serde_json::from_slice::<Invocation>(&body) {
            Ok(call) => self.carry_out(&call).await,
            Err(error) => {
                Err(Failure::new(Code::DECODING, "the plugin's call cannot be read", error.to_string()))
            }
        };
        stream.write_all(&encode_answer(answer)?).await
    }

    async fn carry_out(&self, call: &Invocation) -> Answer {
        let lock = self.lock_of(&call.container_id);
        let guard = lock.lock().await;
        let answer = match call.command {
            Command::Add => self.pods.add(call).await.map(Some),
            Command::Del => self.pods.del(call).await.map(|()| None),
            Command::Check => self.pods.check(call).await.map(|()| None),
            Command::Gc => self.pods.collect_garbage(call).await.map(|()| None),
            Command::Status | Command::Version => Ok(None),
        };
        drop(guard);
        drop(lock);
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.retain(|_, lock| Arc::strong_count(lock) > 1);
        answer
    }

    fn lock_of(&self, container: &str) -> Arc<AsyncMutex<()>> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.entry(container.to_owned()).or_default().clone()
    }
}
