//! Errors of a lab.

use std::path::{Path, PathBuf};

use thiserror::Error;
use tortie_store::StoreError;

/// Why a lab did not start, or did not do what was requested.
#[derive(Debug, Error)]
pub enum LabError {
    /// A lab is already running.
    #[error(
        "a lab is running already in {0}; end it with `tortie lab down`, or set TORTIE_LAB to another folder"
    )]
    Running(PathBuf),
    /// No lab is running.
    #[error("no lab is running in {0}; start one with `tortie lab up`")]
    NotRunning(PathBuf),
    /// The kernel refused an operation.
    #[error(transparent)]
    Linux(#[from] tortie_kernel::Error),
    /// An operation on a file, folder or process failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// The datastore failed.
    #[error("the lab's datastore: {0}")]
    Store(#[from] StoreError),
    /// A server of the datastore, or kubectl, failed.
    #[error("the lab's datastore: {0}")]
    Server(#[from] tortie_servers::Error),
    /// The emulated HNS failed.
    #[error("the emulated HNS of node {node}: {problem}")]
    Hns {
        /// The node.
        node: String,
        /// The problem.
        problem: String,
    },
    /// The certificates could not be created.
    #[error("certificates for the lab: {0}")]
    Certificates(#[from] rcgen::Error),
    /// Something did not happen in time.
    #[error("{what} within {seconds} seconds{}", if log.is_empty() { String::new() } else { format!("; the last lines of its log:\n{log}") })]
    Timeout {
        /// What did not happen.
        what: String,
        /// How long the lab waited.
        seconds: u64,
        /// The end of the log of the process concerned.
        log: String,
    },
    /// Something else is wrong.
    #[error("{object}: {problem}")]
    Problem {
        /// The pod, node or other object.
        object: String,
        /// The problem and the remedy.
        problem: String,
    },
}

impl LabError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    pub(crate) fn file(doing: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io(format!("{doing} {}", path.display()))
    }

    pub(crate) fn problem(object: impl ToString, problem: impl Into<String>) -> Self {
        Self::Problem { object: object.to_string(), problem: problem.into() }
    }
}
