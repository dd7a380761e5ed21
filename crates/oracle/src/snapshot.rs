//! The resources of a cluster, each with the place that it was written at.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::manifest::{Lines, Origin};
use tortie_api::{Key, Resource};

/// The resources that a verdict follows from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Shared, as one question may be asked of many snapshots that differ in a few resources.
    stored: BTreeMap<Key, Arc<Stored>>,
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
    #[must_use]
    pub fn place(&self, path: &str) -> Option<String> {
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
        let resource = resource.ok_or_else(|| tortie_api::in_words(&problems));
        self.stored.insert(key, Arc::new(Stored { value, resource, written }));
    }

    /// Takes an object out; says whether it was there.
    pub fn remove(&mut self, key: &Key) -> bool {
        self.stored.remove(key).is_some()
    }

    /// The resource under this key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.stored.get(key).map(Arc::as_ref)
    }

    /// Every resource.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Stored)> {
        self.stored.iter().map(|(key, stored)| (key, stored.as_ref()))
    }

    /// A snapshot of those resources only that are wanted.
    #[must_use]
    pub fn only(&self, wanted: impl Fn(&Key, &Stored) -> bool) -> Self {
        let kept = self.stored.iter().filter(|(key, stored)| wanted(key, stored));
        Self { stored: kept.map(|(key, stored)| (key.clone(), stored.clone())).collect() }
    }

    /// Every resource that can be understood.
    pub(super) fn resources(&self) -> impl Iterator<Item = (&Key, &Resource)> {
        self.stored.iter().filter_map(|(key, stored)| Some((key, stored.resource.as_ref().ok()?)))
    }
}
