//! Errors of this crate.

use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use thiserror::Error;

/// Why a server did not start, or did not do what was requested.
#[derive(Debug, Error)]
pub enum Error {
    /// A program is not installed or not built.
    #[error("{program} is missing: {remedy}")]
    Missing {
        /// The program.
        program: String,
        /// How to get it.
        remedy: String,
    },
    /// A server ended, or did not become ready in time.
    #[error("{server} {problem}; the last lines of its log:\n{log}")]
    Server {
        /// The server's name.
        server: String,
        /// What happened.
        problem: String,
        /// The last lines of its log.
        log: String,
    },
    /// A command such as kubectl or etcdctl failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// What it printed.
        output: String,
    },
    /// An operation on a file, folder, socket or process failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// A certificate could not be created.
    #[error("certificate for {subject}: {source}")]
    Certificate {
        /// The subject of the certificate.
        subject: String,
        /// The error of the library.
        #[source]
        source: rcgen::Error,
    },
}

/// Names the operation of an error of the system.
pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.into();
    |source| Error::Io { what, source }
}

/// Writes a file that only its owner may read: many have keys or tokens.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), Error> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(io(format!("writing {}", path.display())))
}
