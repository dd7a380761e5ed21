//! Errors of the kernel's interfaces.

use std::io;

use thiserror::Error;

use crate::netlink::Refusal;
use crate::nftables::Op;

/// An error, with the operation and its object.
#[derive(Debug, Error)]
pub enum Error {
    /// A system call failed.
    #[error("{object}: cannot {operation}: {source}")]
    System {
        /// The operation, as in "cannot …".
        operation: &'static str,
        /// The file, interface or namespace.
        object: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel does not permit new namespaces here.
    #[error("cannot {operation}: {source}. {advice}")]
    Namespaces {
        /// The operation, as in "cannot …".
        operation: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
        /// What the user can do.
        advice: String,
    },
    /// The kernel refused a netlink message.
    #[error("{object}: the kernel refused to {operation}: {refusal}")]
    Refused {
        /// The operation, as in "refused to …".
        operation: &'static str,
        /// The link, route, set ….
        object: String,
        /// The error number and the kernel's message.
        refusal: Refusal,
    },
    /// The kernel refused a change of an nftables table, and with it the whole transaction.
    #[error("table {table}, {op}: the kernel refused to {}: {refusal}", op.operation())]
    Transaction {
        /// The name of the table.
        table: String,
        /// The refused change.
        op: Box<Op>,
        /// The error number and the kernel's message.
        refusal: Refusal,
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
    /// Returns a function for `map_err` that adds the operation and its object to the error of a system call.
    pub fn system<E: Into<io::Error>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::System { operation, object, source: source.into() }
    }

    /// Returns a function for `map_err` that adds the operation and its object to the kernel's refusal.
    pub fn refused<E: Into<Refusal>>(
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
            Self::TableOwned { .. } => None,
        }
    }
}
