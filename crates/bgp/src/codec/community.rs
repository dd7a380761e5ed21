//! Communities (RFC 1997) and large communities (RFC 8092).

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A community, written `AS:VALUE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Community(pub u32);

impl Community {
    /// Routes with it stay within the autonomous system (its confederation).
    pub const NO_EXPORT: Self = Self(0xffff_ff01);
    /// Routes with it go to no peer.
    pub const NO_ADVERTISE: Self = Self(0xffff_ff02);
    /// Routes with it go to no external peer.
    pub const NO_EXPORT_SUBCONFED: Self = Self(0xffff_ff03);
}

/// A large community, written `AS:VALUE:VALUE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LargeCommunity(pub u32, pub u32, pub u32);

/// A community of either form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AnyCommunity {
    /// Two numbers of 16 bits.
    Standard(Community),
    /// Three numbers of 32 bits.
    Large(LargeCommunity),
}

/// A text that is no community.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no community; write two numbers up to 65535 as AS:VALUE, or three up to 4294967295 as AS:VALUE:VALUE"
)]
pub struct NotACommunity(String);

impl FromStr for AnyCommunity {
    type Err = NotACommunity;

    fn from_str(text: &str) -> Result<Self, NotACommunity> {
        let numbers: Option<Vec<u32>> = text.split(':').map(|number| number.parse().ok()).collect();
        let halves = |high: u32, low: u32| Some((u16::try_from(high).ok()?, u16::try_from(low).ok()?));
        match numbers.as_deref() {
            Some([high, low]) => halves(*high, *low)
                .map(|(high, low)| Self::Standard(Community(u32::from(high) << 16 | u32::from(low)))),
            Some([global, first, second]) => Some(Self::Large(LargeCommunity(*global, *first, *second))),
            _ => None,
        }
        .ok_or_else(|| NotACommunity(text.to_owned()))
    }
}

impl fmt::Display for Community {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.0 >> 16, self.0 & 0xffff)
    }
}

impl fmt::Display for LargeCommunity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.0, self.1, self.2)
    }
}
