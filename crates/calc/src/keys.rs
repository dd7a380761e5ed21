//! Keys, and the numbers of the things that bear them.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;

use hashbrown::HashTable;
use tortie_api::{Key, Kind};

use crate::slab::No;

/// A map that a borrowed key finds its way in, and that makes an own one only to keep it. Others choose what is hashed here,
/// so the hash is the standard library's.
pub(crate) type Map<K, V> = hashbrown::HashMap<K, V, RandomState>;

/// The key of an object, the names shared with whatever else says them.
#[derive(Clone)]
pub(crate) struct SharedKey {
    pub(crate) kind: Kind,
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
}

impl SharedKey {
    pub(crate) fn borrowed(&self) -> KeyRef<'_> {
        KeyRef { kind: self.kind, namespace: &self.namespace, name: &self.name }
    }
}

/// The same, to look for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
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

/// Numbers by key. The things keep their keys themselves, and this the hashes: it takes little room, and reads no key
/// when it grows.
#[derive(Default)]
pub(crate) struct ByKey {
    hasher: RandomState,
    table: HashTable<(u64, No)>,
}

impl ByKey {
    /// The number under this key; `bears` says whether a thing bears it.
    pub(crate) fn get(&self, key: impl Hash, bears: impl Fn(No) -> bool) -> Option<No> {
        let hash = self.hasher.hash_one(key);
        self.table.find(hash, |(its, no)| *its == hash && bears(*no)).map(|(_, no)| *no)
    }

    /// All numbers under this key, and perhaps others.
    pub(crate) fn candidates(&self, key: impl Hash) -> impl Iterator<Item = No> {
        let hash = self.hasher.hash_one(key);
        self.table.iter_hash(hash).filter(move |(its, _)| *its == hash).map(|(_, no)| *no)
    }

    pub(crate) fn insert(&mut self, key: impl Hash, no: No) {
        let hash = self.hasher.hash_one(key);
        self.table.insert_unique(hash, (hash, no), |(hash, _)| *hash);
    }

    pub(crate) fn remove(&mut self, key: impl Hash, no: No) {
        if let Ok(found) = self.table.find_entry(self.hasher.hash_one(key), |(_, its)| *its == no) {
            found.remove();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// All numbers.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = No> {
        self.table.iter().map(|(_, no)| *no)
    }
}
