//! What can go wrong between Tortie and the kernel.

use std::io;

use thiserror::Error;

/// A failure, with what was being done to which object.
#[derive(Debug, Error)]
pub enum Error {
    /// A system call failed.
    #[error("{object}: cannot {operation}: {source}")]
    System {
        /// What was being done, as in "cannot …".
        operation: &'static str,
        /// The file, interface or namespace that it was done to.
        object: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// New namespaces cannot be made here.
    #[error("cannot {operation}: {source}. {advice}")]
    Namespaces {
        /// What was being done, as in "cannot …".
        operation: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
        /// How to go on.
        advice: String,
    },
}

impl Error {
    /// A function for `map_err` that says what was being done, and to what.
    pub(crate) fn system<E: Into<io::Error>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::System { operation, object, source: source.into() }
    }

    /// The kernel's error number, where there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } | Self::Namespaces { source, .. } => source.raw_os_error(),
        }
    }
}
