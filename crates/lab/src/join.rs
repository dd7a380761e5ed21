//! Joins a running lab from another terminal: this process moves into the lab's namespaces.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tortie_kernel::namespace::{die_with_parent, groups, with_default_signals, with_own_mounts};

use crate::supervise::HandedOn;
use crate::{LabDir, LabError};

/// What a process does after it has joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It runs a command, whose processes belong to the lab and end with it. It cannot start threads of its own.
    RunCommand,
    /// It starts threads, and stays out of the lab's PID namespace.
    StartThreads,
}

/// Moves the calling process into the lab's user, mount and network namespaces. If it runs a command, its children
/// move into the PID namespace. Must be called before the process starts any thread.
///
/// # Errors
/// No lab runs, or it belongs to somebody else.
pub fn join(dir: &LabDir, next: Next) -> Result<(), LabError> {
    if !dir.in_use() {
        return Err(LabError::NotRunning(dir.path().to_owned()));
    }
    let path = dir.pid_file();
    let pid = fs::read_to_string(&path).map_err(LabError::file("reading", &path))?;
    // Opened before the first move, because /proc may differ afterwards.
    let mut moves = Vec::new();
    for (name, kind) in [
        ("user", LinkNameSpaceType::User),
        ("pid", LinkNameSpaceType::ProcessID),
        ("net", LinkNameSpaceType::Network),
        ("mnt", LinkNameSpaceType::Mount),
    ] {
        if kind == LinkNameSpaceType::ProcessID && next == Next::StartThreads {
            continue;
        }
        let theirs = format!("/proc/{}/ns/{name}", pid.trim());
        let ours = format!("/proc/self/ns/{name}");
        let target = |path: &str| fs::read_link(path).map_err(LabError::io(format!("looking at {path}")));
        // The kernel refuses to enter the current user namespace again.
        if target(&theirs)? != target(&ours)? {
            let file = File::open(&theirs).map_err(LabError::io(format!("opening {theirs}")))?;
            moves.push((name, kind, file));
        }
    }
    let here = std::env::current_dir();
    for (name, kind, file) in moves {
        move_into_link_name_space(file.as_fd(), Some(kind))
            .map_err(|error| LabError::io(format!("entering the lab's {name} namespace"))(error.into()))?;
    }
    // Entering a mount namespace leads to its root, and arguments may be relative. A folder on something that was mounted later
    // is not there.
    if let Err(error) = here.and_then(std::env::set_current_dir) {
        tracing::warn!(%error, "the current folder does not exist in the lab; relative names lead to other files");
    }
    Ok(())
}

/// Runs kubectl as the administrator of a lab whose datastore is a Kubernetes API, and returns its exit code. The process
/// must have joined.
///
/// # Errors
/// The lab has another datastore.
pub fn kubectl(dir: &LabDir, arguments: &[String]) -> Result<u8, LabError> {
    let kubeconfig = dir.kubeconfig();
    if !kubeconfig.exists() {
        let remedy =
            "its datastore is no Kubernetes API; start it with `tortie lab up --datastore kubernetes`";
        return Err(LabError::problem("this lab", remedy));
    }
    let mut command = Command::new(dir.binary("kube"));
    command.arg("kubectl").arg("--kubeconfig").arg(kubeconfig);
    run("kubectl", command, arguments, None)
}

/// Runs a command in a network namespace of the lab and returns its exit code as a shell does: 126 for a program that
/// cannot be run, 127 for one that does not exist, 128 plus the number for a signal. Passes termination signals on to
/// the command, which ends with this process in any case. The command sees the file `resolver` as `/etc/resolv.conf`. The
/// process must have joined.
///
/// # Errors
/// The namespace does not exist.
pub fn exec(netns: &Path, object: &str, command: &[String], resolver: Option<&Path>) -> Result<u8, LabError> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(LabError::problem(object, "no command was given; write it after --"));
    };
    let file = File::open(netns).map_err(|_| LabError::problem(object, "is not running in this lab"))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|error| LabError::io(format!("entering the network namespace of {object}"))(error.into()))?;
    let mut command = Command::new(program);
    // As root, tcpdump switches to another user. The lab of an ordinary user has no other user, and groups cannot be
    // set.
    let is_tcpdump = Path::new(program).file_name().is_some_and(|name| name == "tcpdump");
    if is_tcpdump && !arguments.iter().any(|argument| argument.starts_with("-Z")) {
        command.args(["-Z", "root"]);
        if groups::are_fixed() {
            groups::pretend_to_set(&mut command);
        }
    }
    run(program, command, arguments, resolver)
}

/// Runs a command with these last arguments, and returns its exit code as a shell does.
fn run(
    program: &str,
    mut command: Command,
    arguments: &[String],
    resolver: Option<&Path>,
) -> Result<u8, LabError> {
    with_own_mounts(with_default_signals(die_with_parent(&mut command)), resolver);
    command.args(arguments);
    // One thread: the kernel allows no more after entering a PID namespace.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(LabError::io("starting the command"))?;
    runtime.block_on(async {
        let signals = HandedOn::listen()?;
        let mut child = match tokio::process::Command::from(command).spawn() {
            Ok(child) => child,
            Err(source) => return not_run(program, &source),
        };
        let status = signals.wait(&mut child, None).await?.0;
        Ok(match (status.code(), status.signal()) {
            (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
            (None, signal) => u8::try_from(128 + signal.unwrap_or_default()).unwrap_or(u8::MAX),
        })
    })
}

/// Reports a program that cannot be run, as a shell does.
fn not_run(program: &str, error: &std::io::Error) -> Result<u8, LabError> {
    let (code, why) = match error.kind() {
        ErrorKind::NotFound => (127, "not found".to_owned()),
        _ => (126, error.to_string()),
    };
    // Possibly nobody reads any more; the exit code also reports it.
    let _ = writeln!(std::io::stderr(), "error: {program}: {why}");
    Ok(code)
}
