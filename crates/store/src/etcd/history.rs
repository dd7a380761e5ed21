//! Notices that etcd has another history than the followed one: it was restored from a backup, and its revisions have grown past the position at
//! which a watch goes on. etcd would resume that watch without a word, and the changes in between would be missing for ever.
//!
//! A [`Witness`] remembers of the keys of one kind, at one revision, how many there are, which ones were written last, and which one was deleted
//! last. Before a watch goes on, etcd is asked for the same at that revision, which costs it time in proportion to the number of keys. The keys
//! of the changed kind would have to agree in all of them to go unnoticed: for instance if both histories have only deleted keys of it, as many,
//! and the last one in common.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use tortie_api::Kind;

use super::keys::Range;
use super::message::{
    EventType, KeyValue, RangeRequest, RequestOp, SortOrder, SortTarget, TxnOperation, TxnRequest,
    TxnResponse, WatchResponse,
};

/// The number of keys that are remembered. It is more than one transaction may write, whose keys have one revision.
const RECENT: usize = 256;

/// The witnesses of a follower, by kind; none without a follower. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Witnesses(Option<Arc<Mutex<HashMap<Kind, Witness>>>>);

impl Witnesses {
    /// Those of a new follower.
    pub(super) fn of_follower() -> Self {
        Self(Some(Arc::default()))
    }

    /// A listing of the kind begins, at that revision, of so many keys.
    pub(super) fn begin(&self, kind: Kind, revision: i64, count: i64) {
        if let Some(all) = &self.0 {
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.insert(kind, Witness { revision, count, ..Witness::default() });
        }
    }

    /// Changes the witness of a kind.
    pub(super) fn change(&self, kind: Kind, change: impl FnOnce(&mut Witness)) {
        if let Some(all) = &self.0 {
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(witness) = all.get_mut(&kind) {
                change(witness);
            }
        }
    }

    /// The witness of a kind that was listed.
    pub(super) fn of(&self, kind: Kind) -> Option<Witness> {
        let all = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&kind).cloned()
    }
}

/// The keys of a kind at one revision.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Witness {
    /// All of the following is from this revision.
    revision: i64,
    count: i64,
    /// The keys that were written last, by the revision of that write, with hashes of their values. Every other key was written before all
    /// of them.
    recent: BTreeMap<(i64, Vec<u8>), u64>,
    /// The key that was deleted last, if nobody has created it again.
    deleted: Option<Vec<u8>>,
}

impl Witness {
    /// The keys of a page of the listing.
    pub(super) fn listed(&mut self, keys: &[KeyValue]) {
        for found in keys {
            self.remember(found);
        }
    }

    /// Ingests an answer to a watch. Events that are known already may be repeated.
    pub(super) fn observe(&mut self, answer: &WatchResponse) {
        let known = self.revision;
        let is_progress = answer.events.is_empty() && !answer.created && !answer.canceled;
        if let Some(header) = answer.header.as_ref().filter(|_| is_progress) {
            self.revision = known.max(header.revision);
        }
        for event in &answer.events {
            let Some(found) = event.kv.as_ref().filter(|found| found.mod_revision > known) else { continue };
            self.recent.retain(|(_, key), _| *key != found.key);
            match event.kind() {
                EventType::Put => {
                    // The first write after the creation.
                    self.count += i64::from(found.version == 1);
                    self.deleted.take_if(|key| *key == found.key);
                    self.remember(found);
                }
                EventType::Delete => {
                    self.count -= 1;
                    self.deleted = Some(found.key.clone());
                }
            }
            self.revision = self.revision.max(found.mod_revision);
        }
    }

    fn remember(&mut self, found: &KeyValue) {
        self.recent.insert((found.mod_revision, found.key.clone()), hash(&found.value));
        if self.recent.len() > RECENT {
            self.recent.pop_first();
        }
    }

    /// Asks etcd for the same, at the revision of the witness. etcd refuses if it does not have that revision yet, or no more.
    pub(super) fn question(&self, range: &Range) -> TxnRequest {
        let at = RangeRequest { revision: self.revision, limit: 1, ..RangeRequest::default() };
        let newest = RangeRequest {
            key: range.start.clone(),
            range_end: range.end.clone(),
            sort_order: SortOrder::Descend.into(),
            sort_target: SortTarget::Mod.into(),
            ..at.clone()
        };
        let deleted = self.deleted.clone().map(|key| RangeRequest { key, ..at });
        let operation = |range| RequestOp { request: Some(TxnOperation::Range(range)) };
        TxnRequest {
            success: [newest].into_iter().chain(deleted).map(operation).collect(),
            ..TxnRequest::default()
        }
    }

    /// Whether the answer shows the history that the witness has seen.
    pub(super) fn is_confirmed_by(&self, answer: &TxnResponse) -> bool {
        let ranges: Option<Vec<_>> = answer.responses.iter().map(|it| it.range.as_ref()).collect();
        let Some([newest, deleted @ ..]) = ranges.as_deref() else { return false };
        let is_newest = match (newest.kvs.as_slice(), self.recent.last_key_value()) {
            ([], None) => true,
            ([found], Some(((revision, _), _))) => {
                let known = self.recent.get(&(found.mod_revision, found.key.clone()));
                found.mod_revision == *revision && known == Some(&hash(&found.value))
            }
            _ => false,
        };
        newest.count == self.count && is_newest && deleted.iter().all(|range| range.kvs.is_empty())
    }
}

fn hash(value: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
