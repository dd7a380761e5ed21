//! The resources of a cluster, each with the place that it was written at.

use std::collections::BTreeMap;

use serde_json::Value;
use tortie_api::manifest::{Lines, Origin};
use tortie_api::{Key, Resource};

/// The resources that a verdict follows from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    stored: BTreeMap<Key, Stored>,
}

/// One resource, as far as it can be understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// What was written.
    pub value: Value,
    /// Its typed view, or what is wrong with it.
    pub resource: Result<Resource, String>,
    /// Where it and its fields were written, if that is known.
    pub written: Option<(Origin, Lines)>,
}

impl Stored {
    /// Where a field was written, as `file:line`.
    pub(super) fn place(&self, path: &str) -> Option<String> {
        let (origin, lines) = self.written.as_ref()?;
        Some(format!("{}:{}", origin.file, lines.of(path)))
    }
}

impl Snapshot {
    /// Nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in an object as it is stored. One that cannot be understood stays in: a policy then denies.
    pub fn insert(&mut self, key: Key, value: Value, written: Option<(Origin, Lines)>) {
        let (resource, problems) = Resource::read_what_can_be(&key, &value);
        let resource = resource.ok_or_else(|| crate::in_words(&problems));
        self.stored.insert(key, Stored { value, resource, written });
    }

    /// Takes an object out; says whether it was there.
    pub fn remove(&mut self, key: &Key) -> bool {
        self.stored.remove(key).is_some()
    }

    /// The resource under this key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.stored.get(key)
    }

    /// Every resource.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Stored)> {
        self.stored.iter()
    }

    /// Every resource that can be understood.
    pub(super) fn resources(&self) -> impl Iterator<Item = (&Key, &Resource)> {
        self.stored.iter().filter_map(|(key, stored)| Some((key, stored.resource.as_ref().ok()?)))
    }
}
