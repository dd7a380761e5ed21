//! The programs of a node: started, watched, restarted.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};

use crate::LabError;

/// The delay before the first restart; each further delay is twice as long.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// The maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// A program that ran this long counts as stable, and the delays start again.
const SETTLED: Duration = Duration::from_secs(10);

/// A running program. Dropping the value kills it.
pub(crate) struct Process {
    pub(crate) name: String,
    command: Command,
    child: Child,
}

impl Process {
    pub(crate) fn start(name: String, command: std::process::Command) -> Result<Self, LabError> {
        let mut command = Command::from(command);
        let child = spawn(&name, command.kill_on_drop(true))?;
        Ok(Self { name, command, child })
    }

    /// Whether it has ended, or its state is unknown.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until it ends.
    pub(crate) async fn end(&mut self) -> Result<ExitStatus, LabError> {
        self.child.wait().await.map_err(LabError::io(format!("waiting for {}", self.name)))
    }

    /// Restarts it whenever it ends, as a kubelet does with the pods of a DaemonSet.
    pub(crate) async fn keep(mut self) {
        let mut delay = FIRST_DELAY;
        loop {
            let started = Instant::now();
            let ended = self.end().await.map_or_else(|error| error.to_string(), |status| status.to_string());
            if started.elapsed() >= SETTLED {
                delay = FIRST_DELAY;
            }
            tracing::warn!(
                process = self.name,
                ended,
                ?delay,
                "a node's process has ended; the lab restarts it"
            );
            loop {
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(MAX_DELAY);
                match spawn(&self.name, &mut self.command) {
                    Ok(child) => break self.child = child,
                    Err(error) => {
                        tracing::error!(%error, ?delay, "cannot start a node's process; the lab retries")
                    }
                }
            }
        }
    }

    /// Stops it.
    pub(crate) async fn stop(mut self) {
        if let Err(error) = self.child.kill().await {
            tracing::warn!(process = self.name, %error, "cannot stop the process; the kernel ends it with the lab");
        }
    }
}

fn spawn(name: &str, command: &mut Command) -> Result<Child, LabError> {
    command.spawn().map_err(LabError::io(format!("starting {name}")))
}
