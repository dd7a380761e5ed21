//! A guard process that starts servers, and kills them when the process that wanted them has ended.
//!
//! The guard is a shell that reads orders from a pipe. However this process ends, also by SIGKILL, the kernel closes the
//! pipe. The guard then kills its servers and removes their folder. (The alternative, PR_SET_PDEATHSIG, ends a server when
//! the *thread* that started it ends, and needs unsafe code.)

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::Pid;

use crate::Error;
use crate::error::io;

/// `start LOG PROGRAM ARGUMENTS…` prints the server's process id. `reap PID` waits until it has ended.
const SCRIPT: &str = r#"
folder=$1
servers=
start() { log=$1; shift; "$@" >>"$log" 2>&1 </dev/null & servers="$servers $!"; echo "$!"; }
reap() {
    wait "$1"; status=$?; left=
    for server in $servers; do [ "$server" = "$1" ] || left="$left $server"; done
    servers=$left; echo "$status"
}
while IFS= read -r order; do eval "$order"; done
for server in $servers; do kill -KILL "$server" 2>/dev/null; done
wait
rm -rf "$folder"
"#;

/// A guard and the temporary folder of its servers.
pub(crate) struct Guard {
    shell: Mutex<Shell>,
    folder: PathBuf,
}

struct Shell {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Guard {
    /// Starts a guard with a new temporary folder.
    pub(crate) fn new(prefix: &str) -> Result<Self, Error> {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir().map_err(io("making a folder"))?;
        let errors = folder.path().join("guard.log");
        let errors = File::create(&errors).map_err(io(format!("creating {}", errors.display())))?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "tortie-servers-guard"]).arg(folder.path());
        // Its own process group: Ctrl-C in a terminal must not end the guard before its servers.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        // Proxies and settings of whoever runs the tests (ETCD_NAME, HTTPS_PROXY) do not concern the servers.
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        command.env_clear().env("PATH", path).env("HOME", folder.path()).current_dir(folder.path());
        let mut child = command.spawn().map_err(io("starting /bin/sh"))?;
        let no_pipe = || io("starting /bin/sh")(std::io::ErrorKind::BrokenPipe.into());
        let answers = BufReader::new(child.stdout.take().ok_or_else(no_pipe)?);
        let orders = Some(child.stdin.take().ok_or_else(no_pipe)?);
        // From here on, the guard removes the folder.
        let folder = folder.keep();
        Ok(Self { shell: Mutex::new(Shell { child, orders, answers }), folder })
    }

    /// The temporary folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts a program that appends its output to this log.
    pub(crate) fn start(&self, log: &Path, command: &[String]) -> Result<Pid, Error> {
        let words = std::iter::once(log.display().to_string()).chain(command.iter().cloned());
        let words: Vec<String> = words.map(|word| quoted(&word)).collect();
        let pid = self.order(&format!("start {}", words.join(" ")))?;
        Pid::from_raw(pid).ok_or_else(|| io("starting a server")(std::io::ErrorKind::InvalidData.into()))
    }

    /// Waits until the server has ended. Before that, its process id is not used again.
    pub(crate) fn reap(&self, server: Pid) -> Result<(), Error> {
        self.order(&format!("reap {}", server.as_raw_nonzero())).map(|_| ())
    }

    fn order(&self, line: &str) -> Result<i32, Error> {
        let mut shell = self.shell.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = || io(format!("giving the guard process the order `{line}`"));
        let Some(orders) = &mut shell.orders else {
            return Err(failed()(std::io::ErrorKind::BrokenPipe.into()));
        };
        writeln!(orders, "{line}").and_then(|()| orders.flush()).map_err(failed())?;
        let mut answer = String::new();
        shell.answers.read_line(&mut answer).map_err(failed())?;
        answer.trim().parse().map_err(|_| failed()(std::io::ErrorKind::InvalidData.into()))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let shell = self.shell.get_mut().unwrap_or_else(PoisonError::into_inner);
        shell.orders = None;
        let _ = shell.child.wait();
    }
}

/// A word as the shell reads it back unchanged.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
