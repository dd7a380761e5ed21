//! The outer process of a lab: creates namespaces, runs the lab in one child, and cleans up.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use rustix::process::{Pid, Signal, getuid, kill_process};
use tokio::process::Child;
use tokio::signal::unix::{self, SignalKind};
use tortie_kernel::namespace::{Namespaces, die_with_parent, enter};

use crate::{LabDir, LabError};

/// How a lab ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It completed.
    Done,
    /// It failed, and has reported why.
    Failed,
    /// It was asked to end.
    Interrupted,
}

/// Runs this program again, with these arguments, as the first process of a lab, and waits for it. That process must
/// begin with [`enter_inside`]. Must be called before the calling process starts any thread.
///
/// # Errors
/// The lab could not be started, or its folder could not be removed.
pub fn supervise(dir: &LabDir, arguments: &[String]) -> Result<Outcome, LabError> {
    let lock = dir.take()?;
    let outcome = supervise_in(dir, arguments);
    // The folder is removed in any case; of two errors, the first one is reported.
    let removed = dir.remove(lock);
    let outcome = outcome?;
    removed.map(|()| outcome)
}

fn supervise_in(dir: &LabDir, arguments: &[String]) -> Result<Outcome, LabError> {
    let program = std::env::current_exe().map_err(LabError::io("finding this program's own file"))?;
    link_binaries(dir, &program)?;
    enter(Namespaces { user: !getuid().is_root(), mount: false, net: true, pid: true })?;

    // One thread: the kernel allows no more after entering a PID namespace.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(LabError::io("starting the supervisor"))?;
    runtime.block_on(async {
        let signals = HandedOn::listen()?;
        let mut command = Command::new(&program);
        command.args(arguments).env("TORTIE_LAB", dir.path());
        die_with_parent(&mut command);
        let mut command = tokio::process::Command::from(command);
        let mut child = command.spawn().map_err(LabError::io("starting the lab"))?;
        let pid = child.id().map(|pid| pid.to_string()).unwrap_or_default();
        std::fs::write(dir.pid_file(), pid).map_err(LabError::file("writing", &dir.pid_file()))?;
        let (status, interrupted) = signals.wait(&mut child, Some(Signal::TERM)).await?;
        Ok(if interrupted { Outcome::Interrupted } else { outcome(status) })
    })
}

/// Prepares the first process inside the lab. It must be called before anything else, and before any thread starts.
/// The process gets its own mounts, so that they end with it and the supervisor can remove the folder.
///
/// # Errors
/// The kernel refused a mount namespace.
pub fn enter_inside() -> Result<(), LabError> {
    Ok(enter(Namespaces { mount: true, ..Namespaces::default() })?)
}

/// The signals that ask a process to end, which it passes on to its child. It listens from before the child exists: until then, a
/// signal would end the process without a word to the child.
pub(crate) struct HandedOn {
    interrupt: unix::Signal,
    terminate: unix::Signal,
    hangup: unix::Signal,
}

impl HandedOn {
    /// Listens for the signals. It needs a runtime of tokio.
    pub(crate) fn listen() -> Result<Self, LabError> {
        let listen = |kind| unix::signal(kind).map_err(LabError::io("listening for signals"));
        let (interrupt, terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        Ok(Self { interrupt, terminate, hangup: listen(SignalKind::hangup())? })
    }

    /// Waits for a child, and passes the signals on to it, unchanged or as the given signal. Returns its exit status, and
    /// whether there was such a signal.
    pub(crate) async fn wait(
        mut self,
        child: &mut Child,
        hand_on: Option<Signal>,
    ) -> Result<(ExitStatus, bool), LabError> {
        let mut interrupted = false;
        loop {
            let received = tokio::select! {
                // A terminal signals both processes. The signal must count even if the child ends first.
                biased;
                _ = self.interrupt.recv() => Signal::INT,
                _ = self.terminate.recv() => Signal::TERM,
                _ = self.hangup.recv() => Signal::HUP,
                status = child.wait() => {
                    return Ok((status.map_err(LabError::io("waiting for the process"))?, interrupted));
                }
            };
            interrupted = true;
            let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
            if let Some(pid) = pid {
                // It may have ended just now; then the wait above sees it.
                let _ = kill_process(pid, hand_on.unwrap_or(received));
            }
        }
    }
}

fn outcome(status: ExitStatus) -> Outcome {
    match status.code() {
        Some(0) => Outcome::Done,
        Some(130) => Outcome::Interrupted,
        _ => Outcome::Failed,
    }
}

/// Links the single binary under each of these names.
pub(crate) fn link_binaries(dir: &LabDir, program: &PathBuf) -> Result<(), LabError> {
    for name in ["tortie", "tortie-cni", "tortie-hns", "tortie-pod"] {
        let link = dir.binary(name);
        std::os::unix::fs::symlink(program, &link).map_err(LabError::file("linking", &link))?;
    }
    Ok(())
}

/// Asks a running lab to end.
///
/// # Errors
/// It no longer runs, or belongs to somebody else.
pub fn signal_end(dir: &LabDir) -> Result<(), LabError> {
    let path = dir.pid_file();
    let text = std::fs::read_to_string(&path).map_err(LabError::file("reading", &path))?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| LabError::problem(path.display(), "holds no process number"))?;
    kill_process(pid, Signal::TERM).map_err(|error| LabError::io("telling the lab to end")(error.into()))
}
