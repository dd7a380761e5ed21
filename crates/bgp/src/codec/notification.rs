//! NOTIFICATION: why a session ends (RFC 4271 4.5, RFC 4486, RFC 8203, RFC 8538, RFC 9003).

use std::fmt;

use super::family::Family;

/// The reason why a session ends, as it goes to the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// The error code.
    pub code: u8,
    /// The error subcode; 0 for none.
    pub subcode: u8,
    /// More about it, in a form that the code decides.
    pub data: Vec<u8>,
}

/// The error codes.
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod code {
    pub const HEADER: u8 = 1;
    pub const OPEN: u8 = 2;
    pub const UPDATE: u8 = 3;
    pub const HOLD_TIMER_EXPIRED: u8 = 4;
    pub const FINITE_STATE_MACHINE: u8 = 5;
    pub const CEASE: u8 = 6;
    pub const ROUTE_REFRESH: u8 = 7;
}

/// The subcodes of errors in a header.
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod header {
    pub const NOT_SYNCHRONIZED: u8 = 1;
    pub const BAD_LENGTH: u8 = 2;
    pub const BAD_TYPE: u8 = 3;
}

/// The subcodes of errors in an OPEN.
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod open {
    pub const UNSUPPORTED_VERSION: u8 = 1;
    pub const BAD_PEER_AS: u8 = 2;
    pub const BAD_IDENTIFIER: u8 = 3;
    pub const UNSUPPORTED_PARAMETER: u8 = 4;
    pub const UNACCEPTABLE_HOLD_TIME: u8 = 6;
    pub const UNSUPPORTED_CAPABILITY: u8 = 7;
}

/// The subcodes of errors in an UPDATE.
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod update {
    pub const MALFORMED_ATTRIBUTES: u8 = 1;
    pub const UNRECOGNIZED_WELL_KNOWN: u8 = 2;
    pub const OPTIONAL_ATTRIBUTE: u8 = 9;
    pub const INVALID_NETWORK: u8 = 10;
}

/// The subcodes of Cease (RFC 4486, RFC 8538).
#[expect(missing_docs, reason = "the names are those of the standards")]
pub mod cease {
    pub const MAXIMUM_PREFIXES: u8 = 1;
    pub const ADMINISTRATIVE_SHUTDOWN: u8 = 2;
    pub const PEER_DECONFIGURED: u8 = 3;
    pub const ADMINISTRATIVE_RESET: u8 = 4;
    pub const CONNECTION_REJECTED: u8 = 5;
    pub const CONFIGURATION_CHANGE: u8 = 6;
    pub const COLLISION: u8 = 7;
    pub const OUT_OF_RESOURCES: u8 = 8;
    pub const HARD_RESET: u8 = 9;
}

/// The longest text for operators (RFC 9003).
const LONGEST_COMMUNICATION: usize = 255;

impl Notification {
    /// A notification without data.
    #[must_use]
    pub fn new(code: u8, subcode: u8) -> Self {
        Self { code, subcode, data: Vec::new() }
    }

    /// A notification with data.
    #[must_use]
    pub fn with(code: u8, subcode: u8, data: impl Into<Vec<u8>>) -> Self {
        Self { code, subcode, data: data.into() }
    }

    /// An end by the operator, with a text for the other one. A text of more than 255 bytes is cut.
    #[must_use]
    pub fn shutdown(subcode: u8, text: &str) -> Self {
        let mut end = text.len().min(LONGEST_COMMUNICATION);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut data = Vec::new();
        if end > 0 {
            data.push(end as u8);
            data.extend(&text.as_bytes()[..end]);
        }
        Self { code: code::CEASE, subcode, data }
    }

    /// The end because of too many prefixes.
    #[must_use]
    pub fn too_many_prefixes(family: Family, limit: u32) -> Self {
        let mut data = family.afi().to_be_bytes().to_vec();
        data.push(family.safi());
        data.extend(limit.to_be_bytes());
        Self { code: code::CEASE, subcode: cease::MAXIMUM_PREFIXES, data }
    }

    /// The same reason, in the form after which the peer keeps no routes (RFC 8538).
    #[must_use]
    pub fn hard(self) -> Self {
        let mut data = vec![self.code, self.subcode];
        data.extend(self.data);
        Self { code: code::CEASE, subcode: cease::HARD_RESET, data }
    }

    /// Whether routes may not outlive the session.
    #[must_use]
    pub fn is_hard_reset(&self) -> bool {
        (self.code, self.subcode) == (code::CEASE, cease::HARD_RESET)
    }

    /// The operator's text, if there is one that can be shown: control characters are left out.
    #[must_use]
    pub fn communication(&self) -> Option<String> {
        let (subcode, data) = match (self.code, self.subcode, self.data.as_slice()) {
            (code::CEASE, cease::HARD_RESET, [code::CEASE, subcode, data @ ..]) => (*subcode, data),
            (code::CEASE, subcode, data) => (subcode, data),
            _ => return None,
        };
        if ![cease::ADMINISTRATIVE_SHUTDOWN, cease::ADMINISTRATIVE_RESET].contains(&subcode) {
            return None;
        }
        let (length, rest) = data.split_first()?;
        let text = std::str::from_utf8(rest.get(..usize::from(*length))?).ok()?;
        let text: String = text.chars().filter(|c| !c.is_control()).collect();
        (!text.is_empty()).then_some(text)
    }

    /// The family and the limit, if there were too many prefixes and the sender says so.
    #[must_use]
    pub fn prefix_limit(&self) -> Option<(Family, u32)> {
        let (code, subcode, data) = match (self.is_hard_reset(), self.data.as_slice()) {
            (true, [code, subcode, data @ ..]) => (*code, *subcode, data),
            (_, data) => (self.code, self.subcode, data),
        };
        match ((code, subcode), data) {
            ((code::CEASE, cease::MAXIMUM_PREFIXES), [high, low, safi, a, b, c, d]) => {
                let family = Family::from_numbers(u16::from_be_bytes([*high, *low]), *safi)?;
                Some((family, u32::from_be_bytes([*a, *b, *c, *d])))
            }
            _ => None,
        }
    }

    /// The name of code and subcode.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match (self.code, self.subcode) {
            (code::HEADER, header::NOT_SYNCHRONIZED) => "connection not synchronized",
            (code::HEADER, header::BAD_LENGTH) => "bad message length",
            (code::HEADER, header::BAD_TYPE) => "bad message type",
            (code::HEADER, _) => "message header error",
            (code::OPEN, open::UNSUPPORTED_VERSION) => "unsupported version",
            (code::OPEN, open::BAD_PEER_AS) => "bad peer AS",
            (code::OPEN, open::BAD_IDENTIFIER) => "bad BGP identifier",
            (code::OPEN, open::UNSUPPORTED_PARAMETER) => "unsupported optional parameter",
            (code::OPEN, open::UNACCEPTABLE_HOLD_TIME) => "unacceptable hold time",
            (code::OPEN, open::UNSUPPORTED_CAPABILITY) => "unsupported capability",
            (code::OPEN, _) => "OPEN message error",
            (code::UPDATE, update::MALFORMED_ATTRIBUTES) => "malformed attribute list",
            (code::UPDATE, update::UNRECOGNIZED_WELL_KNOWN) => "unrecognized well-known attribute",
            (code::UPDATE, update::OPTIONAL_ATTRIBUTE) => "optional attribute error",
            (code::UPDATE, update::INVALID_NETWORK) => "invalid network field",
            (code::UPDATE, _) => "UPDATE message error",
            (code::HOLD_TIMER_EXPIRED, _) => "hold timer expired",
            (code::FINITE_STATE_MACHINE, _) => "unexpected message",
            (code::CEASE, cease::MAXIMUM_PREFIXES) => "maximum number of prefixes reached",
            (code::CEASE, cease::ADMINISTRATIVE_SHUTDOWN) => "administrative shutdown",
            (code::CEASE, cease::PEER_DECONFIGURED) => "peer deconfigured",
            (code::CEASE, cease::ADMINISTRATIVE_RESET) => "administrative reset",
            (code::CEASE, cease::CONNECTION_REJECTED) => "connection rejected",
            (code::CEASE, cease::CONFIGURATION_CHANGE) => "other configuration change",
            (code::CEASE, cease::COLLISION) => "connection collision",
            (code::CEASE, cease::OUT_OF_RESOURCES) => "out of resources",
            (code::CEASE, cease::HARD_RESET) => "hard reset",
            (code::CEASE, _) => "cease",
            (code::ROUTE_REFRESH, _) => "ROUTE-REFRESH message error",
            _ => "unknown error",
        }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend([self.code, self.subcode]);
        out.extend(&self.data);
    }
}

impl fmt::Display for Notification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}/{})", self.name(), self.code, self.subcode)?;
        if self.is_hard_reset()
            && let [code, subcode, data @ ..] = self.data.as_slice()
        {
            let inner = Self { code: *code, subcode: *subcode, data: data.to_vec() };
            write!(f, ": {} ({code}/{subcode})", inner.name())?;
        }
        if let Some((family, limit)) = self.prefix_limit() {
            write!(f, ": {limit} {family} prefixes")?;
        }
        self.communication().map_or(Ok(()), |text| write!(f, ": {text:?}"))
    }
}
