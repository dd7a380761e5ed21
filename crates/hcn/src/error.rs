//! Errors of the typed calls.

use crate::schema::DocumentError;
use crate::{Class, Failure};

/// A call to HNS that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// HNS or the connection to it failed the call. The request is not shown; it is in the log at debug level.
    #[error("HNS: {call} of {object} failed: {failure}")]
    Call {
        /// The call, for instance `create`.
        call: &'static str,
        /// The kind and the identifier or name of the object.
        object: String,
        /// The failure.
        failure: Failure,
    },
    /// HNS returned a document that cannot be parsed.
    #[error("HNS: the answer to {call} of {object} cannot be read: {error}")]
    Answer {
        /// The call.
        call: &'static str,
        /// The object.
        object: String,
        /// The member and the problem.
        error: DocumentError,
    },
}

impl Error {
    /// What a caller may conclude. An unreadable answer says nothing about the object.
    pub fn class(&self) -> Class {
        match self {
            Error::Call { failure, .. } => failure.class(),
            Error::Answer { .. } => Class::Other,
        }
    }

    /// Whether the same call may succeed shortly, because a prerequisite of the network does not exist yet.
    pub fn is_not_ready(&self) -> bool {
        matches!(self, Error::Call { failure, .. } if failure.code.is_not_ready())
    }

    /// Whether the object is absent.
    pub fn is_not_found(&self) -> bool {
        self.class() == Class::NotFound
    }
}
