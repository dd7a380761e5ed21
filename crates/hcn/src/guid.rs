//! Object identifiers.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// The identifier of an HNS object: 8-4-4-4-12 hexadecimal digits without braces (docs/hns.md, Documents).
///
/// HNS returns upper or lower case, depending on the call. Two spellings of one identifier are equal here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Guid(Uuid);

impl Guid {
    /// "None": HNS chooses an identifier, or the reference is empty.
    pub const ZERO: Guid = Guid(Uuid::nil());

    /// A new random identifier (version 4).
    pub fn random() -> Guid {
        Guid(Uuid::new_v4())
    }

    /// The identifier of `name` within `space` (version 5, RFC 9562 5.5). It is stable, so a later process finds the
    /// object without stored state.
    pub fn derived(space: Guid, name: &str) -> Guid {
        Guid(Uuid::new_v5(&space.0, name.as_bytes()))
    }

    /// The identifier with these bytes, in the order of its text form.
    pub const fn from_bytes(bytes: [u8; 16]) -> Guid {
        Guid(Uuid::from_bytes(bytes))
    }

    /// The bytes, in the order of the text form.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// Whether this is [`Guid::ZERO`].
    pub fn is_zero(&self) -> bool {
        self.0.is_nil()
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

/// The text is not an identifier in the form that HNS accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a GUID: 8-4-4-4-12 hexadecimal digits without braces are needed")]
pub struct NotAGuid(String);

impl FromStr for Guid {
    type Err = NotAGuid;

    fn from_str(text: &str) -> Result<Guid, NotAGuid> {
        // Uuid also accepts braces, "urn:uuid:" and 32 bare digits, which HNS rejects.
        match Uuid::try_parse(text) {
            Ok(uuid) if text.len() == 36 => Ok(Guid(uuid)),
            _ => Err(NotAGuid(text.to_owned())),
        }
    }
}

impl Serialize for Guid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Guid {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Guid, D::Error> {
        let text = String::deserialize(deserializer)?;
        // hcsshim writes "" for "no identifier".
        if text.is_empty() { Ok(Guid::ZERO) } else { text.parse().map_err(D::Error::custom) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_is_ignored_and_other_spellings_are_rejected() {
        let lower: Guid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8".parse().unwrap();
        assert_eq!("6BA7B810-9DAD-11D1-80B4-00C04FD430C8".parse(), Ok(lower));
        for bad in ["{6ba7b810-9dad-11d1-80b4-00c04fd430c8}", "6ba7b8109dad11d180b400c04fd430c8", "", "x"] {
            assert!(bad.parse::<Guid>().is_err(), "{bad}");
        }
    }

    #[test]
    fn derived_identifiers_are_stable() {
        // RFC 9562 appendix A.4: the DNS name space and "www.example.com".
        let dns: Guid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8".parse().unwrap();
        assert_eq!(Guid::derived(dns, "www.example.com").to_string(), "2ed6657d-e927-568b-95e1-2665a8aea6a2");
    }
}
