//! Keys and the numbers of the objects with these keys.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;

use hashbrown::HashTable;
use tortie_api::{Key, Kind};

use crate::slab::No;

/// A map looked up by borrowed key; the key is cloned only on insert. Users choose the hashed names, so the hash
/// function is the standard library's.
pub(crate) type Map<K, V> = hashbrown::HashMap<K, V, RandomState>;

/// The key of an object, with shared names.
#[derive(Clone)]
pub(crate) struct SharedKey {
    pub(crate) kind: Kind,
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
}

impl SharedKey {
    pub(crate) fn to_key(&self) -> Key {
        Key { kind: self.kind, namespace: self.namespace.to_string(), name: self.name.to_string() }
    }

    pub(crate) fn borrowed(&self) -> KeyRef<'_> {
        KeyRef { kind: self.kind, namespace: &self.namespace, name: &self.name }
    }
}

/// Borrowed form of [`SharedKey`], for lookups.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct KeyRef<'a> {
    pub(crate) kind: Kind,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
}

impl<'a> KeyRef<'a> {
    /// The key of an object without a namespace.
    pub(crate) fn global(kind: Kind, name: &'a str) -> Self {
        Self { kind, namespace: "", name }
    }
}

impl<'a> From<&'a Key> for KeyRef<'a> {
    fn from(key: &'a Key) -> Self {
        Self { kind: key.kind, namespace: &key.namespace, name: &key.name }
    }
}

/// Numbers by key. The objects keep their keys, and this map keeps only hashes: it needs little memory, and reads no
/// keys when it grows.
#[derive(Default)]
pub(crate) struct ByKey {
    hasher: RandomState,
    table: HashTable<(u64, No)>,
}

impl ByKey {
    /// The number under this key; `bears` says whether the object with a number has the key.
    pub(crate) fn get(&self, key: impl Hash, bears: impl Fn(No) -> bool) -> Option<No> {
        let hash = self.hasher.hash_one(key);
        self.table.find(hash, |(its, no)| *its == hash && bears(*no)).map(|(_, no)| *no)
    }

    /// All numbers under this key, and possibly others.
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
