//! What the typed calls fail with.

use crate::schema::DocumentError;
use crate::{Class, Failure};

/// A call on HNS that did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// HNS, or the way to it, said no. The request is not shown: it stands in the log at debug level.
    #[error("HNS: {call} of {object} failed: {failure}")]
    Call {
        /// The call, e.g. `create`.
        call: &'static str,
        /// The kind and the identifier or name of the object.
        object: String,
        /// What came back.
        failure: Failure,
    },
    /// HNS answered with a document that cannot be read.
    #[error("HNS: the answer to {call} of {object} cannot be read: {error}")]
    Answer {
        /// The call.
        call: &'static str,
        /// The object.
        object: String,
        /// Which member, and what is wrong with it.
        error: DocumentError,
    },
}

impl Error {
    /// What may be concluded. An answer that cannot be read says nothing about the object.
    pub fn class(&self) -> Class {
        match self {
            Error::Call { failure, .. } => failure.class(),
            Error::Answer { .. } => Class::Other,
        }
    }

    /// Whether the same call may go well in a moment, as what the network stands on is not there yet.
    pub fn is_not_ready(&self) -> bool {
        matches!(self, Error::Call { failure, .. } if failure.code.is_not_ready())
    }

    /// Whether the object is absent.
    pub fn is_not_found(&self) -> bool {
        self.class() == Class::NotFound
    }
}
