//! The etcd backend: Calico's keys and values in etcd 3.4 or later, and Tortie's own kinds below `/tortie/v1/`.
//!
//! Versions are the revisions of the last write of a key (`mod_revision`), as in Calico, and so are positions. Others
//! write to the same etcd, and one transaction may give several keys one revision.

mod client;
mod entries;
mod history;
mod keys;
mod message;
pub(crate) mod parsers;
mod values;

use std::sync::Arc;

use async_trait::async_trait;
use futures::StreamExt;
use serde_json::Value;
use tortie_api::{Key, Kind, Position, Positions};

pub use client::{Etcd, EtcdConfig, Login, refuse_credentials};
pub use entries::{Condition, Entries, Entry, EntryChange, EtcdLease};
use history::Witnesses;
use message::{
    Compare, CompareResult, CompareTarget, DeleteRangeRequest, EventType, KeyValue, PutRequest, RangeRequest,
    RequestOp, SortOrder, SortTarget, TargetUnion, TxnOperation, TxnRequest, WatchCreateRequest,
};

use crate::calico_form::{Origin, StorageForm, is_calico_resource, lacks_identity};
use crate::follow::{Event, Follow, Source, Watch, follow};
use crate::{
    Endpoints, Interest, Page, PageToken, Stopped, Store, StoreError, Stored, Version, Write, Written,
};

/// The etcd key of an object.
#[must_use]
pub fn key_of(object: &Key) -> String {
    keys::encode(object)
}

/// The object of an etcd key; `None` if it is that of another kind, or of no object.
#[must_use]
pub fn object_of(kind: Kind, key: &str) -> Option<Key> {
    keys::decode(kind, key.as_bytes())
}

/// The maximum number of keys in a page.
const MAX_PAGE: i64 = 500;
/// The maximum number of keys in a page without values.
const MAX_KEYS: i64 = 2_000;
/// The maximum number of writes in a transaction (etcd's default of `--max-txn-ops`).
const MAX_WRITES: usize = 128;

/// A write, as etcd sees it.
struct Encoded {
    key: Vec<u8>,
    /// The condition for the write.
    compare: Compare,
    request: TxnOperation,
}

impl Encoded {
    /// `None` if the expected version is none of etcd's, so that the write is a conflict. `origin` is for an object without identity.
    fn new(write: &Write, origin: Origin<'_>) -> Option<Self> {
        let key = keys::encode(write.key()).into_bytes();
        let condition = |result: CompareResult, target: CompareTarget, value: TargetUnion| Compare {
            result: result.into(),
            target: target.into(),
            key: key.clone(),
            target_union: Some(value),
            range_end: Vec::new(),
        };
        let is_at = |version: &Version| {
            let revision = version.as_str().parse().ok()?;
            Some(condition(CompareResult::Equal, CompareTarget::Mod, TargetUnion::ModRevision(revision)))
        };
        let exists = |result| condition(result, CompareTarget::Version, TargetUnion::Version(0));
        let put = |value: &Value| {
            TxnOperation::Put(PutRequest {
                key: key.clone(),
                value: values::encode(write.key(), value.clone(), origin),
                lease: 0,
            })
        };
        let delete = TxnOperation::DeleteRange(DeleteRangeRequest { key: key.clone() });
        let (compare, request) = match write {
            Write::Create(_, value) => (exists(CompareResult::Equal), put(value)),
            Write::Update(_, value, expected) => (is_at(expected)?, put(value)),
            Write::Delete(_, Some(expected)) => (is_at(expected)?, delete),
            Write::Delete(_, None) => (exists(CompareResult::Greater), delete),
        };
        Some(Self { key, compare, request })
    }
}

/// The identity of an object that has none.
struct Identity {
    uid: String,
    created: String,
}

impl Identity {
    fn new() -> Self {
        let created = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        Self { uid: uuid::Uuid::new_v4().to_string(), created }
    }

    /// The parts that a stored object has, and new ones in place of the others.
    fn from_stored(stored: &Stored) -> Self {
        let Self { mut uid, mut created } = Self::new();
        for (own, field) in [(&mut uid, "uid"), (&mut created, "creationTimestamp")] {
            if let Some(known) = stored.value["metadata"][field].as_str().filter(|text| !text.is_empty()) {
                known.clone_into(own);
            }
        }
        Self { uid, created }
    }

    fn origin(&self) -> Origin<'_> {
        Origin { uid: &self.uid, created: &self.created }
    }
}

impl Etcd {
    /// The identity that the object of a write gets if the write names none: that of the stored object, because Calico's client refuses to
    /// change one.
    async fn identity(&self, write: &Write) -> Result<Identity, StoreError> {
        let stored = match write {
            Write::Update(key, value, _) if is_calico_resource(key.kind) && lacks_identity(value) => {
                self.get(key).await?
            }
            _ => None,
        };
        Ok(stored.map_or_else(Identity::new, |stored| Identity::from_stored(&stored)))
    }

    /// Creates an object, or updates this version of it, and returns it as it is stored.
    async fn put(&self, key: &Key, value: Value, expected: Option<&Version>) -> Result<Stored, StoreError> {
        let write = match expected {
            None => Write::Create(key.clone(), value.clone()),
            Some(expected) => Write::Update(key.clone(), value.clone(), expected.clone()),
        };
        let identity = self.identity(&write).await?;
        let written = self.execute(&write, identity.origin()).await?;
        let value = match is_calico_resource(key.kind) {
            true => values::decode(key, &values::encode(key, value, identity.origin())),
            false => value,
        };
        Ok(Stored::new(key.clone(), value, written))
    }

    /// Executes one write.
    async fn write(&self, write: &Write) -> Result<Written, StoreError> {
        let identity = self.identity(write).await?;
        self.execute(write, identity.origin()).await
    }

    async fn execute(&self, write: &Write, origin: Origin<'_>) -> Result<Written, StoreError> {
        let Some(Encoded { key, compare, request }) = Encoded::new(write, origin) else {
            return Err(self.rejected(write, self.get(write.key()).await?.is_some()));
        };
        let current = RangeRequest { key, keys_only: true, ..RangeRequest::default() };
        let reply = self
            .txn(TxnRequest {
                compare: vec![compare],
                success: vec![RequestOp { request: Some(request) }],
                failure: vec![RequestOp { request: Some(TxnOperation::Range(current)) }],
            })
            .await
            .map_err(|error| too_large(error, write.key()))?;
        if reply.succeeded {
            return Ok(Written::at(revision(reply.header)?));
        }
        let current = reply.responses.into_iter().filter_map(|response| response.range);
        let exists = current.flat_map(|range| range.kvs).next().is_some();
        Err(self.rejected(write, exists))
    }

    /// Why a write was rejected, by whether the object exists.
    fn rejected(&self, write: &Write, exists: bool) -> StoreError {
        let key = write.key().clone();
        match (write, exists) {
            (Write::Create(..), _) => StoreError::AlreadyExists(key),
            (_, false) => StoreError::NotFound(key),
            (_, true) => StoreError::Conflict(key),
        }
    }

    /// Executes writes of different keys in one transaction; `None` if one of them was rejected.
    async fn write_together(&self, writes: &[Write]) -> Result<Option<Vec<Written>>, StoreError> {
        let mut encoded = Vec::with_capacity(writes.len());
        for write in writes {
            let identity = self.identity(write).await?;
            let Some(one) = Encoded::new(write, identity.origin()) else { return Ok(None) };
            encoded.push(one);
        }
        let (compare, success) = encoded
            .into_iter()
            .map(|write| (write.compare, RequestOp { request: Some(write.request) }))
            .unzip();
        let reply = self.txn(TxnRequest { compare, success, failure: Vec::new() }).await?;
        let written = Written::at(revision(reply.header)?);
        Ok(reply.succeeded.then(|| vec![written; writes.len()]))
    }
}

#[async_trait]
impl Store for Etcd {
    fn storage_form(&self) -> StorageForm {
        StorageForm::Calico
    }

    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        let request = RangeRequest { key: keys::encode(key).into_bytes(), ..RangeRequest::default() };
        let found = self.range(request).await?.kvs.into_iter().next();
        found.map(|found| stored(key.clone(), &found)).transpose()
    }

    /// All pages are from one moment: the token is the revision of the first page and the last key.
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        let keys::Range { mut start, end } = keys::range(interest);
        let mut moment = 0;
        if let Some(PageToken(token)) = &after {
            let bad_token = || StoreError::Unavailable("the page does not exist".to_owned());
            let (revision, last) = token.split_once(' ').ok_or_else(bad_token)?;
            moment = revision.parse().map_err(|_| bad_token())?;
            start = last.as_bytes().iter().copied().chain([0]).collect();
        }
        let request = RangeRequest {
            key: start,
            range_end: end,
            limit: MAX_PAGE,
            revision: moment,
            sort_order: SortOrder::None.into(),
            ..RangeRequest::default()
        };
        let reply = self.range(request).await?;
        if moment == 0 {
            moment = i64::try_from(revision(reply.header)?).unwrap_or(i64::MAX);
            self.witnesses.begin(interest.kind, moment, reply.count);
        }
        self.witnesses.change(interest.kind, |witness| witness.listed(&reply.kvs));
        let last = reply.kvs.last().filter(|_| reply.more);
        let token = |last: &KeyValue| PageToken(format!("{moment} {}", String::from_utf8_lossy(&last.key)));
        let next = last.map(token);
        let mut items = Vec::with_capacity(reply.kvs.len());
        for found in reply.kvs {
            let Some(key) = keys::decode(interest.kind, &found.key) else { continue };
            let stored = stored(key, &found)?;
            if interest.covers(&stored.key, &stored.value) {
                items.push(stored);
            }
        }
        // The order of etcd's keys is not the one of names with slashes.
        items.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(Page { items, position: position(moment)?, next })
    }

    /// In pages, because etcd reads the values, too.
    async fn keys(&self, kind: Kind) -> Result<Vec<Key>, StoreError> {
        let keys::Range { mut start, end } = keys::range(&Interest::all(kind));
        let (mut keys, mut moment) = (Vec::new(), 0);
        loop {
            let request = RangeRequest {
                key: start,
                range_end: end.clone(),
                limit: MAX_KEYS,
                revision: moment,
                keys_only: true,
                ..RangeRequest::default()
            };
            let reply = self.range(request).await?;
            if moment == 0 {
                moment = i64::try_from(revision(reply.header)?).unwrap_or(i64::MAX);
            }
            keys.extend(reply.kvs.iter().filter_map(|found| keys::decode(kind, &found.key)));
            match reply.kvs.last().filter(|_| reply.more) {
                Some(last) => start = last.key.iter().copied().chain([0]).collect(),
                None => return Ok(keys),
            }
        }
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.put(key, value, None).await
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        self.put(key, value, Some(expected)).await
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        Ok(self.write(&Write::Delete(key.clone(), expected.cloned())).await?.position)
    }

    /// Writes of different keys are one transaction. If it is rejected, or a key occurs twice, they are executed one
    /// after another.
    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        let mut done = Vec::with_capacity(writes.len());
        for chunk in writes.chunks(MAX_WRITES) {
            let distinct: std::collections::HashSet<&Key> = chunk.iter().map(Write::key).collect();
            if chunk.len() > 1 && distinct.len() == chunk.len() {
                match self.write_together(chunk).await {
                    Ok(Some(written)) => {
                        done.extend(written);
                        continue;
                    }
                    Ok(None) => {}
                    Err(error) => return Err(Stopped { done, error }),
                }
            }
            for write in chunk {
                match self.write(write).await {
                    Ok(written) => done.push(written),
                    Err(error) => return Err(Stopped { done, error }),
                }
            }
        }
        Ok(done)
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        let mut source = self.clone();
        source.witnesses = Witnesses::of_follower();
        follow(&Arc::new(source), interests)
    }

    /// The revision of the newest key of each kind, in one transaction. (A progress request on the watches would be
    /// cheaper, but before 3.4.25 and 3.5.8 etcd answers it before it has sent all events: etcd issue 15220.)
    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        let newest = |kind: &Kind| {
            let keys::Range { start, end } = keys::range(&Interest::all(*kind));
            RequestOp {
                request: Some(TxnOperation::Range(RangeRequest {
                    key: start,
                    range_end: end,
                    limit: 1,
                    sort_order: SortOrder::Descend.into(),
                    sort_target: SortTarget::Mod.into(),
                    keys_only: true,
                    ..RangeRequest::default()
                })),
            }
        };
        let success = kinds.iter().map(newest).collect();
        let reply = self.txn(TxnRequest { success, ..TxnRequest::default() }).await?;
        let mut positions = Positions::default();
        for (kind, response) in kinds.iter().zip(reply.responses) {
            for found in response.range.into_iter().flat_map(|range| range.kvs) {
                positions.advance(*kind, position(found.mod_revision)?);
            }
        }
        Ok(positions)
    }
}

impl Endpoints for Etcd {}

#[async_trait]
impl Source for Etcd {
    /// A watch for each kind, so that etcd sends only what is wanted.
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        interests.into_iter().map(|interest| vec![interest]).collect()
    }

    fn proves_history(&self) -> bool {
        true
    }

    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        let [interest] = interests else {
            return Err(StoreError::Unavailable("etcd has one watch for each kind".to_owned()));
        };
        let interest = interest.clone();
        let range = keys::range(&interest);
        let keys::Range { start, end } = range.clone();
        // An etcd that was restored from an older backup would wait for its history to reach this position again. A
        // member that lags behind answers this question only after it has caught up.
        let request = RangeRequest { key: start.clone(), keys_only: true, ..RangeRequest::default() };
        if revision(self.range(request).await?.header)? < after.0 {
            let is_known = self.witnesses.of(interest.kind).is_some();
            return Err(if is_known { StoreError::OtherHistory } else { StoreError::Compacted(after) });
        }
        let create = WatchCreateRequest {
            key: start,
            range_end: end,
            start_revision: i64::try_from(after.0).unwrap_or(i64::MAX).saturating_add(1),
            progress_notify: true,
        };
        let replies = self.open_watch(create).await?;
        // After the watch has begun, because etcd ends it before it is restored again.
        self.confirm(interest.kind, &range).await?;
        let witnesses = self.witnesses.clone();
        let events = replies.flat_map(move |reply| {
            let events = reply.map(|reply| {
                witnesses.change(interest.kind, |witness| witness.observe(&reply));
                events(&interest, after, reply)
            });
            futures::stream::iter(events.unwrap_or_else(|error| vec![Err(error)]))
        });
        let ended = StoreError::Unavailable("etcd ended the watch".to_owned());
        Ok(events.chain(futures::stream::iter([Err(ended)])).boxed())
    }
}

impl Etcd {
    /// Checks that the history is the one that the follower has seen.
    async fn confirm(&self, kind: Kind, range: &keys::Range) -> Result<(), StoreError> {
        let Some(witness) = self.witnesses.of(kind) else { return Ok(()) };
        let answer = self.read_at(witness.question(range)).await?;
        let is_confirmed = answer.is_some_and(|answer| witness.is_confirmed_by(&answer));
        if is_confirmed { Ok(()) } else { Err(StoreError::OtherHistory) }
    }
}

/// The events of an answer to a watch that began after a position.
fn events(
    interest: &Interest,
    after: Position,
    reply: message::WatchResponse,
) -> Vec<Result<Event, StoreError>> {
    if reply.compact_revision > 0 {
        return vec![Err(StoreError::Compacted(after))];
    }
    if reply.canceled {
        let problem = format!("etcd ended the watch: {}", reply.cancel_reason);
        return vec![Err(StoreError::Unavailable(problem))];
    }
    if reply.created {
        return Vec::new();
    }
    if reply.events.is_empty() {
        return vec![revision(reply.header).map(|revision| Event::Progress(Position(revision)))];
    }
    reply.events.into_iter().filter_map(|it| event(interest, it)).collect()
}

/// `None` if the key is no object.
fn event(interest: &Interest, event: message::WatchEvent) -> Option<Result<Event, StoreError>> {
    let kind = event.kind();
    let found = event.kv?;
    let key = keys::decode(interest.kind, &found.key)?;
    Some(match kind {
        EventType::Put => stored(key, &found).map(Event::Put),
        EventType::Delete => position(found.mod_revision).map(|position| Event::Deleted { key, position }),
    })
}

/// etcd limits the size of a request. That is a problem of the object, not of etcd.
fn too_large(error: StoreError, key: &Key) -> StoreError {
    match error {
        StoreError::Unavailable(text) if text.contains("request is too large") => {
            let problem = format!("it is larger than etcd allows (--max-request-bytes): {text}");
            StoreError::Invalid { key: key.clone(), problem }
        }
        error => error,
    }
}

fn stored(key: Key, found: &KeyValue) -> Result<Stored, StoreError> {
    let value = values::decode(&key, &found.value);
    Ok(Stored::new(key, value, Written::at(position(found.mod_revision)?.0)))
}

fn position(revision: i64) -> Result<Position, StoreError> {
    let position = u64::try_from(revision).map(Position);
    position.map_err(|_| StoreError::Damaged(format!("etcd answers with the revision {revision}")))
}

fn revision(header: Option<message::ResponseHeader>) -> Result<u64, StoreError> {
    let header = header.ok_or_else(|| StoreError::Damaged("an answer of etcd has no header".to_owned()))?;
    Ok(position(header.revision)?.0)
}
