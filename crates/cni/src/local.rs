//! Connections to the agent of this machine: Unix sockets, and named pipes on Windows. Both have a path as their name;
//! that of a pipe begins with `\\.\pipe\`.
//!
//! The agent creates them for its own user, which is root on Linux, and for administrators and the system on Windows.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The agent's address for the CNI plugin.
#[must_use]
pub fn agent_address() -> PathBuf {
    if cfg!(windows) { r"\\.\pipe\tortie-agent".into() } else { "/run/tortie/agent.sock".into() }
}

/// The agent's address for operators.
#[must_use]
pub fn control_address() -> PathBuf {
    if cfg!(windows) { r"\\.\pipe\tortie-control".into() } else { "/run/tortie/control.sock".into() }
}

/// Where the plugin stores deletions while the agent is down.
#[must_use]
pub fn deletion_queue() -> PathBuf {
    state_folder().join("cni-deletions")
}

/// What outlives the agent and the plugin.
#[must_use]
pub fn state_folder() -> PathBuf {
    #[cfg(windows)]
    return tortie_hcn::native::program_data().join("tortie");
    #[cfg(not(windows))]
    "/var/lib/tortie".into()
}

/// Where the agent keeps the node's state for its next start.
#[must_use]
pub fn saved_state() -> PathBuf {
    state_folder().join("saved-state.json")
}

/// Where a selftest of HNS saves its report, and the agent reads it.
#[must_use]
pub fn selftest_report() -> PathBuf {
    state_folder().join("selftest.json")
}

/// Creates a folder for the state of the agent and the plugin. On Windows, every user may create folders below
/// `%ProgramData%`, so folders there are restricted to administrators and the system, and those of other users are refused.
///
/// # Errors
/// It cannot be created or restricted, or it belongs to another user.
pub fn make_folder(path: &Path) -> io::Result<()> {
    #[cfg(windows)]
    {
        if !path.starts_with(state_folder()) {
            return std::fs::create_dir_all(path);
        }
        if let Some(parent) = path.parent().filter(|parent| parent.starts_with(state_folder())) {
            make_folder(parent)?;
        }
        tortie_hcn::native::private_folder(path)
    }
    #[cfg(not(windows))]
    std::fs::create_dir_all(path)
}

/// Sends a request, and reads the answer until `is_complete`, or the other side's end. `patience` bounds the wait for each
/// part of the exchange.
///
/// # Errors
/// Nobody listens there, or the answer does not come in time.
pub fn exchange(
    address: &Path,
    request: Vec<u8>,
    patience: Duration,
    is_complete: fn(&[u8]) -> bool,
) -> io::Result<Vec<u8>> {
    system::exchange(address, request, patience, is_complete)
}

/// Writes the request and reads the answer.
fn over(
    stream: &mut (impl io::Read + io::Write),
    request: &[u8],
    is_complete: fn(&[u8]) -> bool,
) -> io::Result<Vec<u8>> {
    stream.write_all(request)?;
    let mut answer = Vec::new();
    let mut part = [0; 8192];
    while !is_complete(&answer) {
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&part[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(answer)
}

#[cfg(unix)]
mod system {
    use std::os::unix::net::UnixStream;

    use super::{Duration, Path, io, over};

    pub(super) fn exchange(
        address: &Path,
        request: Vec<u8>,
        patience: Duration,
        is_complete: fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(address)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        over(&mut stream, &request, is_complete)
    }
}

#[cfg(windows)]
mod system {
    use std::fs::File;
    use std::os::windows::fs::OpenOptionsExt;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::{Duration, Path, io, over};

    /// The interval of attempts while all instances of the pipe are in use.
    const BUSY_INTERVAL: Duration = Duration::from_millis(20);
    /// `ERROR_PIPE_BUSY`.
    const PIPE_BUSY: i32 = 231;
    /// `SECURITY_IDENTIFICATION`: whoever created the pipe cannot act in this process's name.
    const IDENTIFICATION: u32 = 0x0001_0000;

    /// The exchange runs in a thread of its own, because files have no timeouts.
    pub(super) fn exchange(
        address: &Path,
        request: Vec<u8>,
        patience: Duration,
        is_complete: fn(&[u8]) -> bool,
    ) -> io::Result<Vec<u8>> {
        let end = Instant::now() + patience;
        let mut pipe = open(address, end)?;
        let (done, answer) = mpsc::channel();
        let worker = thread::Builder::new().spawn(move || {
            // The receiver is gone if the answer comes too late.
            let _ = done.send(over(&mut pipe, &request, is_complete));
        })?;
        let left = end.saturating_duration_since(Instant::now());
        let Ok(answer) = answer.recv_timeout(left) else { return Err(io::ErrorKind::TimedOut.into()) };
        // The process may end next, and one that ends together with another of its threads was seen to hang under Wine.
        let _ = worker.join();
        answer
    }

    fn open(address: &Path, end: Instant) -> io::Result<File> {
        if !address.to_string_lossy().to_ascii_lowercase().starts_with(r"\\.\pipe\") {
            let problem =
                format!(r"{} is no named pipe: its name must begin with \\.\pipe\", address.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        loop {
            let opened =
                File::options().read(true).write(true).security_qos_flags(IDENTIFICATION).open(address);
            match opened {
                Err(error) if error.raw_os_error() == Some(PIPE_BUSY) && Instant::now() < end => {
                    thread::sleep(BUSY_INTERVAL);
                }
                Ok(pipe) => return tortie_hcn::native::check_pipe(&pipe).map(|()| pipe),
                Err(error) => return Err(error),
            }
        }
    }
}
