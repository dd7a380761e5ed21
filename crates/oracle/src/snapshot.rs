//! The resources of a cluster, each with its source location.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use tortie_api::manifest::{Lines, Origin};
use tortie_api::{Key, Resource};

/// The resources that determine verdicts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// Shared, because one question may be evaluated for many snapshots that differ in a few resources.
    stored: BTreeMap<Key, Arc<Stored>>,
}

/// One resource, as far as it was understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// The stored object.
    pub value: Value,
    /// Its typed form, or the problem.
    pub resource: Result<Resource, String>,
    /// The source location of it and of its fields, if known.
    pub written: Option<(Origin, Lines)>,
}

impl Stored {
    /// The location of a field, as `file:line`.
    #[must_use]
    pub fn location(&self, path: &str) -> Option<String> {
        let (origin, lines) = self.written.as_ref()?;
        Some(format!("{}:{}", origin.file, lines.of(path)))
    }
}

impl Snapshot {
    /// Creates an empty snapshot.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a stored object. An object that was not understood stays in; if it is a policy, it denies.
    pub fn insert(&mut self, key: Key, value: Value, written: Option<(Origin, Lines)>) {
        let (resource, problems) = Resource::read_what_can_be(&key, &value);
        let resource = resource.ok_or_else(|| tortie_api::in_words(&problems));
        self.stored.insert(key, Arc::new(Stored { value, resource, written }));
    }

    /// Removes an object; returns whether it was there.
    pub fn remove(&mut self, key: &Key) -> bool {
        self.stored.remove(key).is_some()
    }

    /// The resource with this key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.stored.get(key).map(Arc::as_ref)
    }

    /// Every resource.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Stored)> {
        self.stored.iter().map(|(key, stored)| (key, stored.as_ref()))
    }

    /// A snapshot with only the selected resources.
    #[must_use]
    pub fn only(&self, wanted: impl Fn(&Key, &Stored) -> bool) -> Self {
        let kept = self.stored.iter().filter(|(key, stored)| wanted(key, stored));
        Self { stored: kept.map(|(key, stored)| (key.clone(), stored.clone())).collect() }
    }

    /// Every resource that was understood.
    pub(super) fn resources(&self) -> impl Iterator<Item = (&Key, &Resource)> {
        self.stored.iter().filter_map(|(key, stored)| Some((key, stored.resource.as_ref().ok()?)))
    }
}
