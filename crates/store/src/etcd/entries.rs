//! Keys of other programs in etcd, with their leases: reading, watching, and writing on a condition.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;

use super::client::Etcd;
use super::keys::Range;
use super::message::{
    Compare, CompareResult, CompareTarget, EventType, KeyValue, LeaseGrantRequest, LeaseRevokeRequest,
    PutRequest, RangeRequest, RequestOp, SortOrder, TargetUnion, TxnOperation, TxnRequest,
    WatchCreateRequest,
};
use super::{position, revision};
use crate::StoreError;

/// The maximum number of keys in a page.
const MAX_PAGE: i64 = 1_000;

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value, with replacements for what is no text.
    pub value: String,
    /// The revision of the last write.
    pub revision: u64,
    /// Whether the key ends with a lease.
    pub has_lease: bool,
}

/// All keys below a prefix, as of one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entries {
    /// By key.
    pub entries: Vec<Entry>,
    /// The revision.
    pub revision: u64,
}

/// A change of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryChange {
    /// It was written.
    Put(Entry),
    /// It was deleted, or its lease has ended.
    Deleted {
        /// The key.
        key: String,
        /// The revision.
        revision: u64,
    },
}

/// When a write takes place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition<'a> {
    /// The last write of the key was that of this revision.
    At(u64),
    /// The key does not exist, and no key with this prefix, which ends with a slash, was written after this revision.
    Absent {
        /// The prefix.
        prefix: &'a str,
        /// The revision.
        since: u64,
    },
}

/// A lease of etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EtcdLease {
    id: i64,
    /// How long it lasts from the moment on at which it was asked for.
    pub lasts: Duration,
}

impl Etcd {
    /// The value of a key, if there is one.
    ///
    /// # Errors
    /// etcd does not answer, or refuses.
    pub async fn entry(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        let request = RangeRequest { key: key.as_bytes().to_vec(), ..RangeRequest::default() };
        self.range(request).await?.kvs.into_iter().next().map(entry).transpose()
    }

    /// All keys with a prefix, which ends with a slash, in pages of one moment.
    ///
    /// # Errors
    /// As for [`Etcd::entry`]; or the moment is no longer kept.
    pub async fn entries(&self, prefix: &str) -> Result<Entries, StoreError> {
        let Range { mut start, end } = Range::prefix(prefix);
        let (mut entries, mut moment) = (Vec::new(), 0);
        loop {
            let request = RangeRequest {
                key: start,
                range_end: end.clone(),
                limit: MAX_PAGE,
                revision: i64::try_from(moment).unwrap_or(i64::MAX),
                sort_order: SortOrder::None.into(),
                ..RangeRequest::default()
            };
            let reply = self.range(request).await?;
            if moment == 0 {
                moment = revision(reply.header)?;
            }
            let last = reply.kvs.last().filter(|_| reply.more).map(|last| last.key.clone());
            for found in reply.kvs {
                entries.push(entry(found)?);
            }
            match last {
                Some(last) => start = last.into_iter().chain([0]).collect(),
                None => return Ok(Entries { entries, revision: moment }),
            }
        }
    }

    /// The changes of keys with a prefix, which ends with a slash, after a revision. After an error, list again.
    ///
    /// # Errors
    /// As for [`Etcd::entry`].
    pub async fn entry_changes(
        &self,
        prefix: &str,
        after: u64,
    ) -> Result<BoxStream<'static, Result<Vec<EntryChange>, StoreError>>, StoreError> {
        let Range { start, end } = Range::prefix(prefix);
        let start_revision = i64::try_from(after).unwrap_or(i64::MAX).saturating_add(1);
        let create =
            WatchCreateRequest { key: start, range_end: end, start_revision, progress_notify: false };
        let replies = self.open_watch(create).await?;
        let changes = replies.map(move |reply| {
            let reply = reply?;
            if reply.compact_revision > 0 {
                return Err(StoreError::Compacted(tortie_api::Position(after)));
            }
            if reply.canceled {
                return Err(StoreError::Unavailable(format!(
                    "etcd ended the watch: {}",
                    reply.cancel_reason
                )));
            }
            let changes = reply.events.into_iter().filter_map(|event| {
                let (kind, found) = (event.kind(), event.kv?);
                Some(match kind {
                    EventType::Put => entry(found).map(EntryChange::Put),
                    EventType::Delete => position(found.mod_revision)
                        .map(|at| EntryChange::Deleted { key: text(&found.key), revision: at.0 }),
                })
            });
            changes.collect()
        });
        Ok(changes.boxed())
    }

    /// A new lease, which ends by itself unless keys are written again with another one.
    ///
    /// # Errors
    /// As for [`Etcd::entry`].
    pub async fn grant_lease(&self, lasts: Duration) -> Result<EtcdLease, StoreError> {
        let ttl = i64::try_from(lasts.as_secs()).unwrap_or(i64::MAX).max(1);
        let granted = self.grant(LeaseGrantRequest { ttl }).await?;
        Ok(EtcdLease { id: granted.id, lasts: lasting(ttl, granted.ttl)? })
    }

    /// Ends a lease, and the keys that have it.
    ///
    /// # Errors
    /// As for [`Etcd::entry`].
    pub async fn revoke_lease(&self, lease: EtcdLease) -> Result<(), StoreError> {
        self.revoke(LeaseRevokeRequest { id: lease.id }).await
    }

    /// Writes a key, with a lease or without an end. Returns the revision, or `None` if the condition does not hold. After an
    /// error, the key may be written or not.
    ///
    /// # Errors
    /// As for [`Etcd::entry`].
    pub async fn put_if(
        &self,
        key: &str,
        value: &str,
        lease: Option<EtcdLease>,
        condition: Condition<'_>,
    ) -> Result<Option<u64>, StoreError> {
        let own = key.as_bytes().to_vec();
        let compare = match condition {
            Condition::At(at) => {
                let at = TargetUnion::ModRevision(i64::try_from(at).unwrap_or(i64::MAX));
                vec![compare(CompareResult::Equal, CompareTarget::Mod, own.clone(), at)]
            }
            Condition::Absent { prefix, since } => {
                let Range { start, end } = Range::prefix(prefix);
                let absent = TargetUnion::Version(0);
                let after =
                    TargetUnion::ModRevision(i64::try_from(since).unwrap_or(i64::MAX).saturating_add(1));
                let unchanged = compare(CompareResult::Less, CompareTarget::Mod, start, after);
                vec![
                    compare(CompareResult::Equal, CompareTarget::Version, own.clone(), absent),
                    Compare { range_end: end, ..unchanged },
                ]
            }
        };
        let lease = lease.map_or(0, |lease| lease.id);
        let put = PutRequest { key: own, value: value.as_bytes().to_vec(), lease };
        let success = vec![RequestOp { request: Some(TxnOperation::Put(put)) }];
        let reply = self.txn(TxnRequest { compare, success, failure: Vec::new() }).await?;
        let written = revision(reply.header)?;
        Ok(reply.succeeded.then_some(written))
    }
}

/// How long a lease lasts, of the seconds that were asked for and given. etcd may give more; whoever renews too early loses nothing.
pub(super) fn lasting(asked: i64, given: i64) -> Result<Duration, StoreError> {
    match u64::try_from(given.min(asked)) {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds)),
        _ => Err(StoreError::Unavailable(format!("etcd gave a lease of {given} s"))),
    }
}

fn compare(result: CompareResult, target: CompareTarget, key: Vec<u8>, value: TargetUnion) -> Compare {
    Compare {
        result: result.into(),
        target: target.into(),
        key,
        target_union: Some(value),
        range_end: Vec::new(),
    }
}

pub(super) fn entry(found: KeyValue) -> Result<Entry, StoreError> {
    let revision = position(found.mod_revision)?.0;
    Ok(Entry { key: text(&found.key), value: text(&found.value), revision, has_lease: found.lease != 0 })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that gives other times must cause neither a panic nor a renewal without a pause.
    #[test]
    fn a_lease_lasts_as_long_as_was_asked_for_at_most() {
        for (given, expected) in
            [(10, Some(10)), (60, Some(60)), (61, Some(60)), (i64::MAX, Some(60)), (0, None), (-1, None)]
        {
            assert_eq!(lasting(60, given).ok(), expected.map(Duration::from_secs), "{given}");
        }
    }
}
