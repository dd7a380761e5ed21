//! What can go wrong between Tortie and the kernel.

use std::io;

use thiserror::Error;

use crate::netlink::Refusal;
use crate::nftables::Op;

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
    /// The kernel refused a netlink message.
    #[error("{object}: the kernel refused to {operation}: {refusal}")]
    Refused {
        /// What was asked for, as in "refused to …".
        operation: &'static str,
        /// The link, route, set … that it was about.
        object: String,
        /// The error number, and what the kernel said beside it.
        refusal: Refusal,
    },
    /// The kernel refused a change of an nftables table, and with it the whole transaction.
    #[error("table {table}, {op}: the kernel refused to {}: {refusal}", op.operation())]
    Transaction {
        /// The name of the table.
        table: String,
        /// The change that was refused.
        op: Box<Op>,
        /// The error number, and what the kernel said beside it.
        refusal: Refusal,
    },
    /// A table that only another connection may change (`NFT_TABLE_F_OWNER`).
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
    /// A function for `map_err` that says what was being done, and to what.
    pub fn system<E: Into<io::Error>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::System { operation, object, source: source.into() }
    }

    /// A function for `map_err` that says what was asked of the kernel, and about what.
    pub fn refused<E: Into<Refusal>>(
        operation: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |refusal| Self::Refused { operation, object, refusal: refusal.into() }
    }

    /// The kernel's error number, where there is one.
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
