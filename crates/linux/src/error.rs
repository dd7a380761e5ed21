//! Errors between Tortie and the kernel.

use std::io;

use thiserror::Error;

use crate::netlink::Refusal;
use crate::nftables::Op;

/// An error with the failed operation and its object.
#[derive(Debug, Error)]
pub enum Error {
    /// A system call failed.
    #[error("{object}: cannot {operation}: {source}")]
    System {
        /// The operation, as in "cannot …".
        operation: &'static str,
        /// The file, interface or namespace.
        object: String,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// New namespaces cannot be created here.
    #[error("cannot {operation}: {source}. {advice}")]
    Namespaces {
        /// The operation, as in "cannot …".
        operation: &'static str,
        /// The error of the kernel.
        #[source]
        source: io::Error,
        /// The remedy.
        advice: String,
    },
    /// The kernel refused a netlink message.
    #[error("{object}: the kernel refused to {operation}: {refusal}")]
    Refused {
        /// The operation, as in "refused to …".
        operation: &'static str,
        /// The link, route, set or other object.
        object: String,
        /// The error number, and the kernel's message.
        refusal: Refusal,
    },
    /// The kernel refused a change of an nftables table, and with it the whole transaction.
    #[error("table {table}, {op}: the kernel refused to {}: {refusal}", op.operation())]
    Transaction {
        /// The name of the table.
        table: String,
        /// The refused change.
        op: Box<Op>,
        /// The error number, and the kernel's message.
        refusal: Refusal,
    },
    /// The kernel refused an nftables table because it lacks modules for it.
    #[error(
        "{failure}; this kernel lacks {modules}: load them, or take a kernel that has them. Until then no policy of this \
         node changes, and what is new stays unconnected"
    )]
    ModuleMissing {
        /// The missing modules.
        modules: String,
        /// The refusal.
        #[source]
        failure: Box<Error>,
    },
    /// The name of a pod's link belongs to another pod: names are digests, and these two are equal.
    #[error(
        "link {name} is that of {owner}, whose name comes to the same digits; give one of the two pods another name"
    )]
    LinkTaken {
        /// The name of the link.
        name: String,
        /// The pod that has it, as namespace/pod/interface.
        owner: String,
    },
    /// Only another connection may change the table (`NFT_TABLE_F_OWNER`).
    #[error(
        "table {table} belongs to another process (netlink port {owner}, usually its process id); end that process, \
         which may be another agent"
    )]
    TableOwned {
        /// The name of the table.
        table: String,
        /// The port id of the owner's socket.
        owner: u32,
    },
}

impl Error {
    /// A function for `map_err` that adds the operation and its object.
    pub(crate) fn system<E: Into<io::Error>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::System { operation, object, source: source.into() }
    }

    /// A function for `map_err` that adds the request and its object.
    pub(crate) fn refused<E: Into<Refusal>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |refusal| Self::Refused { operation, object, refusal: refusal.into() }
    }

    /// The kernel's error number, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::System { source, .. } | Self::Namespaces { source, .. } => source.raw_os_error(),
            Self::Refused { refusal, .. } | Self::Transaction { refusal, .. } => {
                refusal.source.raw_os_error()
            }
            Self::ModuleMissing { failure, .. } => failure.errno(),
            Self::TableOwned { .. } | Self::LinkTaken { .. } => None,
        }
    }
}
