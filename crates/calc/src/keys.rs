//! Keys of objects as maps keep them: the names shared with whatever else says them.

use std::sync::Arc;

use hashbrown::Equivalent;
use tortie_api::{Key, Kind};

/// The key of an object.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct SharedKey {
    pub(crate) kind: Kind,
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
}

/// The same, to look for: it hashes alike.
#[derive(Clone, Copy, Hash)]
pub(crate) struct KeyRef<'a> {
    pub(crate) kind: Kind,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
}

impl<'a> KeyRef<'a> {
    /// Of an object without a namespace.
    pub(crate) fn global(kind: Kind, name: &'a str) -> Self {
        Self { kind, namespace: "", name }
    }
}

impl<'a> From<&'a Key> for KeyRef<'a> {
    fn from(key: &'a Key) -> Self {
        Self { kind: key.kind, namespace: &key.namespace, name: &key.name }
    }
}

impl Equivalent<SharedKey> for KeyRef<'_> {
    fn equivalent(&self, key: &SharedKey) -> bool {
        self.kind == key.kind && *self.name == *key.name && *self.namespace == *key.namespace
    }
}
