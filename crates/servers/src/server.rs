//! One server process.

use std::fmt;
use std::net::{SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::Error;
use crate::error::io;
use crate::guard::Guard;

/// How long a server may take to become ready, on a busy machine. The servers take one to five seconds.
const READY: Duration = Duration::from_secs(120);
/// The pause between two questions to a server.
const POLL: Duration = Duration::from_millis(50);
/// How many lines of a log an error shows.
const LOG_LINES: usize = 15;
/// The number of lines of a log that a failed test shows.
const LOG_LINES_OF_TEST: usize = 60;

/// A server: its process may be killed, paused and restarted. A restart uses the same port and data.
pub struct Server {
    name: String,
    guard: Arc<Guard>,
    command: Vec<String>,
    log: PathBuf,
    is_ready: Box<dyn Fn() -> bool + Send + Sync>,
    process: Mutex<Option<Pid>>,
}

impl Server {
    /// Starts a server. It may not be ready yet.
    pub(crate) fn spawn(
        guard: &Arc<Guard>,
        name: &str,
        command: Vec<String>,
        is_ready: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let log = guard.folder().join(format!("{name}.log"));
        let process = guard.start(&log, &command)?;
        Ok(Self {
            name: name.to_owned(),
            guard: Arc::clone(guard),
            command,
            log,
            is_ready: Box::new(is_ready),
            process: Mutex::new(Some(process)),
        })
    }

    /// The server's name, such as `etcd-1`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id, unless the server was killed or stopped.
    #[must_use]
    pub fn process_id(&self) -> Option<i32> {
        self.process().map(|process| process.as_raw_nonzero().get())
    }

    /// The file with the server's output.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Waits until the server answers.
    ///
    /// # Errors
    ///
    /// The server has ended, or does not answer within two minutes.
    pub fn wait_until_ready(&self) -> Result<(), Error> {
        let deadline = Instant::now() + READY;
        while !(self.is_ready)() {
            if self.process().is_none_or(has_ended) {
                return Err(self.failed("has ended"));
            }
            if Instant::now() > deadline {
                return Err(self.failed(&format!("was not ready within {} seconds", READY.as_secs())));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Kills the server by SIGKILL, and waits until it has ended.
    ///
    /// # Errors
    ///
    /// The signal cannot be sent.
    pub fn kill(&self) -> Result<(), Error> {
        self.end(Signal::KILL)
    }

    /// Stops the server by SIGTERM, and waits until it has ended. The API server takes many seconds.
    ///
    /// # Errors
    ///
    /// The signal cannot be sent.
    pub fn stop(&self) -> Result<(), Error> {
        self.end(Signal::TERM)
    }

    /// Pauses the server by SIGSTOP: its connections stay open, and it answers nothing.
    ///
    /// # Errors
    ///
    /// The server does not run.
    pub fn pause(&self) -> Result<(), Error> {
        self.signal(Signal::STOP)
    }

    /// Lets a paused server continue.
    ///
    /// # Errors
    ///
    /// The server does not run.
    pub fn resume(&self) -> Result<(), Error> {
        self.signal(Signal::CONT)
    }

    /// Starts a killed or stopped server again, on the same port and data, and does not wait until it is ready.
    ///
    /// # Errors
    ///
    /// The server runs, or cannot be started.
    pub fn start_again(&self) -> Result<(), Error> {
        let mut process = self.process.lock().unwrap_or_else(PoisonError::into_inner);
        if process.is_some() {
            return Err(self.failed("runs already; kill or stop it first"));
        }
        *process = Some(self.guard.start(&self.log, &self.command)?);
        Ok(())
    }

    /// Kills the server if it runs, starts it again on the same port and data, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// The server cannot be started, or does not become ready.
    pub fn restart(&self) -> Result<(), Error> {
        if self.process().is_some() {
            self.kill()?;
        }
        self.start_again()?;
        self.wait_until_ready()
    }

    fn end(&self, signal: Signal) -> Result<(), Error> {
        self.signal(signal)?;
        let process = self.process.lock().unwrap_or_else(PoisonError::into_inner).take();
        process.map_or(Ok(()), |process| self.guard.reap(process))
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        let process = self.process().ok_or_else(|| self.failed("does not run"))?;
        kill_process(process, signal)
            .map_err(|error| io(format!("sending a signal to {}", self.name))(error.into()))
    }

    fn process(&self) -> Option<Pid> {
        *self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error of this server, with the end of its log.
    pub(crate) fn failed(&self, problem: &str) -> Error {
        let log = self.last_lines(LOG_LINES);
        Error::Server { server: self.name.clone(), problem: problem.to_owned(), log }
    }

    fn last_lines(&self, count: usize) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }
}

impl Drop for Server {
    /// Prints the end of the log if a test fails: it goes with the server.
    #[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the end of the log of {}:\n{}", self.name, self.last_lines(LOG_LINES_OF_TEST));
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("name", &self.name).field("process", &self.process()).finish()
    }
}

/// Whether a process has ended; its parent, the guard, may not have noticed yet. (`/proc` may belong to another PID
/// namespace, as in a lab.)
fn has_ended(process: Pid) -> bool {
    let Ok(descriptor) = pidfd_open(process, PidfdFlags::empty()) else { return true };
    let mut ends = [PollFd::new(&descriptor, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut ends, Some(&now)).is_ok_and(|ended| ended > 0)
}

/// True if something accepts connections at this address.
pub(crate) fn listens(address: SocketAddrV4) -> bool {
    TcpStream::connect_timeout(&address.into(), Duration::from_secs(1)).is_ok()
}
