//! What can go wrong with the switch and the service.

use std::io;

/// The emulator could not do what it is asked to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("HNS emulator: cannot {operation}: {source}")]
    System {
        /// What was being done, as in "cannot …".
        operation: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Interfaces, routes or namespaces could not be made as they should be.
    #[error("HNS emulator: {0}")]
    Linux(#[from] tortie_kernel::Error),
}

impl Error {
    /// A function for `map_err` that says what was being done.
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::System { operation, source }
    }
}
