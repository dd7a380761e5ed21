//! What becomes of a message with a malformed attribute (RFC 7606), as a table.

use std::fmt;

use super::attributes::{flag, kind};

/// What becomes of a message with an error, the mildest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Treatment {
    /// The attribute counts as absent.
    AttributeDiscard,
    /// The routes of the message count as withdrawn.
    TreatAsWithdraw,
    /// The session ends.
    SessionReset,
}

/// An error in an attribute that did not end the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed {
    /// The type of the attribute.
    pub kind: u8,
    /// What became of it.
    pub treatment: Treatment,
    /// What was wrong.
    pub problem: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, treatment, problem } = self;
        let treatment = match treatment {
            Treatment::AttributeDiscard => "the attribute is ignored",
            Treatment::TreatAsWithdraw => "the routes count as withdrawn",
            Treatment::SessionReset => "the session ends",
        };
        write!(f, "attribute {kind}: {problem}; {treatment}")
    }
}

/// A known attribute.
pub(super) struct Definition {
    pub(super) kind: u8,
    /// OPTIONAL and TRANSITIVE, as they must be.
    pub(super) flags: u8,
    /// What happens if the value is malformed.
    pub(super) malformed: Treatment,
    /// Whether it has no meaning between autonomous systems, and is then ignored.
    pub(super) internal_only: bool,
}

const WELL_KNOWN: u8 = flag::TRANSITIVE;
const OPTIONAL: u8 = flag::OPTIONAL;
const TRANSITIVE: u8 = flag::OPTIONAL | flag::TRANSITIVE;

/// RFC 7606 section 7, RFC 6793 6 (types 17 and 18), RFC 8092 3 (type 32).
pub(super) const DEFINITIONS: [Definition; 16] = {
    use Treatment::{AttributeDiscard, SessionReset, TreatAsWithdraw};
    const fn row(kind: u8, flags: u8, malformed: Treatment, internal_only: bool) -> Definition {
        Definition { kind, flags, malformed, internal_only }
    }
    [
        row(kind::ORIGIN, WELL_KNOWN, TreatAsWithdraw, false),
        row(kind::AS_PATH, WELL_KNOWN, TreatAsWithdraw, false),
        row(kind::NEXT_HOP, WELL_KNOWN, TreatAsWithdraw, false),
        row(kind::MED, OPTIONAL, TreatAsWithdraw, false),
        row(kind::LOCAL_PREF, WELL_KNOWN, TreatAsWithdraw, true),
        row(kind::ATOMIC_AGGREGATE, WELL_KNOWN, AttributeDiscard, false),
        row(kind::AGGREGATOR, TRANSITIVE, AttributeDiscard, false),
        row(kind::COMMUNITIES, TRANSITIVE, TreatAsWithdraw, false),
        row(kind::ORIGINATOR_ID, OPTIONAL, TreatAsWithdraw, true),
        row(kind::CLUSTER_LIST, OPTIONAL, TreatAsWithdraw, true),
        row(kind::MP_REACH, OPTIONAL, SessionReset, false),
        row(kind::MP_UNREACH, OPTIONAL, SessionReset, false),
        row(kind::EXTENDED_COMMUNITIES, TRANSITIVE, TreatAsWithdraw, false),
        row(kind::AS4_PATH, TRANSITIVE, AttributeDiscard, false),
        row(kind::AS4_AGGREGATOR, TRANSITIVE, AttributeDiscard, false),
        row(kind::LARGE_COMMUNITIES, TRANSITIVE, TreatAsWithdraw, false),
    ]
};

pub(super) fn definition(kind: u8) -> Option<&'static Definition> {
    DEFINITIONS.iter().find(|definition| definition.kind == kind)
}
