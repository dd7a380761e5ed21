//! Sends calls to a process that implements HNS.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
#[cfg(unix)]
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::wire::{read_answer, write_call};
use crate::{Call, Failure, HResult, Hcn};

/// The address of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    #[cfg(unix)]
    Unix(PathBuf),
    /// TCP, on the loopback address only, because there is no authentication.
    Tcp(SocketAddr),
}

/// HNS in another process.
///
/// The client connects on first use, and reconnects when the connection is lost, so the service may restart. Calls of
/// several threads use separate connections. A call without an answer within the deadline fails with `ERROR_TIMEOUT`,
/// but **the service still completes it**: read the current state before you decide anything.
#[derive(Debug)]
pub struct RemoteHcn {
    address: Address,
    deadline: Duration,
    idle: Mutex<Vec<Stream>>,
}

impl RemoteHcn {
    /// A client of the service at `address`; no call takes longer than `deadline`.
    pub fn new(address: Address, deadline: Duration) -> RemoteHcn {
        RemoteHcn { address, deadline, idle: Mutex::default() }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Stream>> {
        // The list is always consistent, even if a thread died while holding the lock.
        self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Sends the call over `stream`, and keeps the stream for the next call on success.
    fn exchange(&self, stream: Stream, call: &Call, end: Instant) -> io::Result<Result<String, Failure>> {
        let mut stream = WithDeadline { stream, end };
        write_call(&mut stream, call)?;
        let answer = read_answer(&mut stream)?;
        self.idle().push(stream.stream);
        Ok(answer.into())
    }
}

impl Hcn for RemoteHcn {
    fn call(&self, call: &Call) -> Result<String, Failure> {
        let end = Instant::now() + self.deadline;
        let kept = self.idle().pop();
        if let Some(stream) = kept {
            match self.exchange(stream, call, end) {
                Ok(answer) => return answer,
                // The service was restarted since the connection was made. A call that changes something may have
                // arrived all the same, so the caller must read the state.
                Err(error) if !call.is_read() || is_timeout(&error) => return Err(lost(&error)),
                Err(_) => self.idle().clear(),
            }
        }
        let stream = Stream::connect(&self.address, remaining(end).map_err(|error| lost(&error))?)
            .map_err(|error| Failure::new(HResult::RPC_S_SERVER_UNAVAILABLE, unreachable(self, &error)))?;
        self.exchange(stream, call, end).unwrap_or_else(|error| Err(lost(&error)))
    }
}

fn unreachable(client: &RemoteHcn, error: &io::Error) -> String {
    format!("no connection to the HNS service at {:?}: {error}; is it running?", client.address)
}

/// The failure of a call that was sent and got no answer.
fn lost(error: &io::Error) -> Failure {
    let code = if is_timeout(error) { HResult::ERROR_TIMEOUT } else { HResult::RPC_S_CALL_FAILED };
    Failure::new(code, format!("no answer from the HNS service: {error}"))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

fn remaining(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[derive(Debug)]
enum Stream {
    #[cfg(unix)]
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn connect(address: &Address, timeout: Duration) -> io::Result<Stream> {
        match address {
            #[cfg(unix)]
            Address::Unix(path) => UnixStream::connect(path).map(Stream::Unix),
            Address::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, timeout)?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
        }
    }
}

/// A stream whose reads and writes all have one deadline.
struct WithDeadline {
    stream: Stream,
    end: Instant,
}

impl Read for WithDeadline {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = Some(remaining(self.end)?);
        match &mut self.stream {
            #[cfg(unix)]
            Stream::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
            Stream::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
        }
    }
}

impl Write for WithDeadline {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let left = Some(remaining(self.end)?);
        match &mut self.stream {
            #[cfg(unix)]
            Stream::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(buffer)),
            Stream::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(buffer)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
