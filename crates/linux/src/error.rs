//! Errors of the dataplane.

use thiserror::Error;

/// An error, with the operation and its object.
#[derive(Debug, Error)]
pub enum Error {
    /// An interface of the kernel failed.
    #[error(transparent)]
    Kernel(#[from] tortie_kernel::Error),
    /// The kernel refused an nftables table because it lacks necessary modules.
    #[error(
        "{failure}; this kernel lacks {modules}: load them, or take a kernel that has them. Until then no policy of this \
         node changes, and what is new stays unconnected"
    )]
    ModuleMissing {
        /// The missing modules.
        modules: String,
        /// The refusal.
        #[source]
        failure: Box<tortie_kernel::Error>,
    },
    /// The name of a pod's link belongs to another pod: names are digests, and these two are equal.
    #[error("link {name} belongs to {owner}, whose name has the same hash; rename one of the two pods")]
    LinkTaken {
        /// The name of the link.
        name: String,
        /// The pod that has it, as namespace/pod/interface.
        owner: String,
    },
}

impl Error {
    /// The kernel's error number, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel(failure) => failure.errno(),
            Self::ModuleMissing { failure, .. } => failure.errno(),
            Self::LinkTaken { .. } => None,
        }
    }
}
