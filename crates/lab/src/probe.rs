//! One real connection from a network namespace.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tortie_linux::namespace::NetNs;

/// How long a connection may take before it counts as cut: a lost first packet is sent again after one second.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(2_500);

/// What became of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The server answered with its page.
    Reached,
    /// The pod was reached, and nothing serves there.
    Refused,
    /// Nothing came back.
    Cut,
    /// It could not be tried, or ended by something else than silence; the note says what.
    Failed,
}

/// A connection to be tried.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    pub(crate) netns: PathBuf,
    pub(crate) to: SocketAddr,
    /// What the page must name.
    pub(crate) expect: String,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Probed {
    pub(crate) verdict: Verdict,
    pub(crate) millis: f64,
    /// What was odd or failed, for the person who looks.
    pub(crate) note: Option<String>,
}

impl Probe {
    /// Tries the connection; takes as long as [`TIMEOUT`].
    pub(crate) fn run(&self) -> Probed {
        let begun = Instant::now();
        let result = match NetNs::open(&self.netns).and_then(|netns| netns.run(|| fetch(self.to))) {
            Ok(result) => result,
            Err(error) => {
                return Probed { verdict: Verdict::Failed, millis: 0.0, note: Some(error.to_string()) };
            }
        };
        let millis = (begun.elapsed().as_secs_f64() * 1e5).round() / 100.0;
        let (verdict, note) = match result {
            Ok(page) if page.contains(&self.expect) => (Verdict::Reached, None),
            Ok(page) => (Verdict::Reached, Some(format!("the page does not name {}: {page:?}", self.expect))),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => (Verdict::Refused, None),
            Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock) => {
                (Verdict::Cut, None)
            }
            Err(error) => (Verdict::Failed, Some(error.to_string())),
        };
        Probed { verdict, millis, note }
    }
}

fn fetch(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.take(65_536).read_to_string(&mut page)?;
    Ok(page)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    fn probe(netns: &str, to: [u8; 4]) -> Probed {
        Probe { netns: netns.into(), to: (to, 80).into(), expect: String::new() }.run()
    }

    #[test]
    fn what_is_no_silence_is_not_called_cut() {
        let missing = probe("/nowhere/netns", [127, 0, 0, 1]);
        assert_eq!(missing.verdict, Verdict::Failed);
        assert!(missing.note.unwrap().contains("/nowhere/netns"));

        let alone = NetNs::create().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("alone");
        std::os::unix::fs::symlink(format!("/proc/self/fd/{}", alone.as_fd().as_raw_fd()), &path).unwrap();
        let path = path.to_str().unwrap();
        let routeless = probe(path, [192, 0, 2, 1]);
        assert_eq!(routeless.verdict, Verdict::Failed);
        assert!(routeless.note.unwrap().contains("unreachable"));
        assert_eq!(probe(path, [127, 0, 0, 1]).verdict, Verdict::Refused);
    }
}
