//! Errors of the switch and the service.

use std::io;

/// The emulator could not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("HNS emulator: cannot {operation}: {source}")]
    System {
        /// The failed operation, as in "cannot …".
        operation: &'static str,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// Interfaces, routes or namespaces could not be created as required.
    #[error("HNS emulator: {0}")]
    Linux(#[from] tortie_kernel::Error),
}

impl Error {
    /// A function for `map_err` that adds the failed operation.
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::System { operation, source }
    }
}
