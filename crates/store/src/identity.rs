//! The identity of a store, and the part of its history that it writes now.

use std::fmt;
use std::str::FromStr;

use tortie_api::Position;
use uuid::Uuid;

use crate::StoreError;

/// The identity of a store. Copies and backups of a store have its identity, and other stores have another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StoreId(Uuid);

impl StoreId {
    /// A new identity, which no other store has.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// Its bytes, as a file keeps them.
    pub(crate) fn bytes(self) -> [u8; 16] {
        self.0.into_bytes()
    }

    pub(crate) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        Uuid::from_slice(bytes).ok().map(Self)
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for StoreId {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let invalid = || StoreError::Damaged(format!("{text:?} is no identity of a store (a UUID)"));
        Uuid::parse_str(text.trim()).map(Self).map_err(|_| invalid())
    }
}

/// The part of a history that a store has written since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// Its first position. Everything before it was stored when the epoch began.
    pub begin: Position,
    /// The position of the latest write; `begin` before the first one.
    pub latest: Position,
}

impl Epoch {
    /// Whether a position belongs to the epoch. No other history has positions of it.
    #[must_use]
    pub fn contains(self, position: Position) -> bool {
        (self.begin..=self.latest).contains(&position)
    }
}
