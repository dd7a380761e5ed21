//! Why a lab did not come up, or did not do what it was asked.

use std::path::{Path, PathBuf};

use thiserror::Error;
use tortie_store::StoreError;

/// Why a lab did not come up, or did not do what it was asked.
#[derive(Debug, Error)]
pub enum LabError {
    /// A lab runs already.
    #[error(
        "a lab is running already in {0}; end it with `tortie lab down`, or set TORTIE_LAB to another folder"
    )]
    Running(PathBuf),
    /// No lab runs.
    #[error("no lab is running in {0}; start one with `tortie lab up`")]
    NotRunning(PathBuf),
    /// The kernel refused something.
    #[error(transparent)]
    Linux(#[from] tortie_kernel::Error),
    /// A file, folder or process.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, on which object.
        what: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The datastore.
    #[error("the lab's datastore: {0}")]
    Store(#[from] StoreError),
    /// The emulated HNS.
    #[error("the emulated HNS of node {node}: {problem}")]
    Hns {
        /// Which node.
        node: String,
        /// What it said.
        problem: String,
    },
    /// The certificates.
    #[error("certificates for the lab: {0}")]
    Certificates(#[from] rcgen::Error),
    /// Something did not come about in time.
    #[error("{what} within {seconds} seconds{}", if log.is_empty() { String::new() } else { format!("; the last lines of its log:\n{log}") })]
    Timeout {
        /// What did not come about.
        what: String,
        /// How long was waited.
        seconds: u64,
        /// The end of the log of the process concerned.
        log: String,
    },
    /// Something else is not as it should be.
    #[error("{object}: {problem}")]
    Problem {
        /// The pod, node …
        object: String,
        /// What is wrong, and what to do.
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
