//! The datastore behind one trait: get, list, create, update and delete with compare-and-swap, and [`Store::follow`],
//! which delivers objects and their changes.
//!
//! Versions are opaque, and positions are ordered within one kind only, because the Kubernetes API guarantees no more.
//! [`Embedded`] keeps everything in one file. [`rpc`] serves it to other processes and is a backend itself. [`etcd`] keeps
//! Calico's data in etcd, and [`kubernetes`] in the Kubernetes API. `conformance` is the suite that each backend must pass.

mod apply;
pub mod backoff;
mod cache;
pub mod calico_form;
#[cfg(feature = "conformance")]
#[expect(clippy::expect_used, reason = "a suite of tests says what it expects")]
pub mod conformance;
mod embedded;
mod endpoints;
pub mod etcd;
mod evictions;
mod file;
mod follow;
mod identity;
mod in_force;
mod interest;
pub mod kubernetes;
mod lock;
#[doc(hidden)]
pub mod parsers;
mod pod;
mod ring;
pub mod rpc;
mod secrets;
mod shared;
mod size;
mod stored_json;
mod tracker;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use thiserror::Error;
use tortie_api::manifest::Object;
use tortie_api::support;
use tortie_api::{Key, Kind, Position, Positions};

pub use apply::{Applied, applied, check_preconditions, create, identify, replace, replaced, without_record};
pub use cache::Cache;
pub use calico_form::StorageForm;
pub use embedded::{Embedded, FileCheck, Salvaged};
pub use endpoints::Endpoints;
pub use evictions::{Eviction, Evictions, Permission};
pub use file::Closing;
pub use follow::{Change, Event, Follow, SharedWatch, Source, Watch, follow};
pub use identity::{Epoch, StoreId};
pub use in_force::{
    NotInForce, refuse_other_epoch, stale, wait_for_labels, wait_for_pods, wait_for_reports, wait_for_slices,
    wait_for_workloads, wait_in_force,
};
pub use interest::{Interest, Scope};
pub use lock::is_locked;
pub use pod::{COPIED_FROM, POD_UID, endpoint_labels, endpoint_labels_of, is_of, pod_of};
pub use secrets::{SecretData, SecretState, Secrets};
pub use shared::SharedEvent;
pub use size::size_of_value;

/// A stored object.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// Its key.
    pub key: Key,
    /// The object. [`Store::get`] and [`Store::list_page`] return it as it was written, in the form of [`Store::storage_form`].
    pub value: Value,
    /// Its version, for [`Store::update`] and [`Store::delete`].
    pub version: Version,
    /// The position of its last write.
    pub position: Position,
}

impl Stored {
    /// The object, written as a value.
    #[must_use]
    pub fn new(key: Key, value: Value, written: Written) -> Self {
        let Written { version, position } = written;
        Self { key, value, version, position }
    }
}

/// The version of an object. It is opaque: only equality means something.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Version(Arc<str>);

impl Version {
    /// The version with this text, which the backend defines.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The result of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The version of the object; of a deleted one, a version that it never had.
    pub version: Version,
    /// The position of the write.
    pub position: Position,
}

impl Written {
    /// In a backend whose versions are the revisions of writes.
    #[must_use]
    pub fn at(revision: u64) -> Self {
        Self { version: Version::new(&revision.to_string()), position: Position(revision) }
    }
}

/// The objects of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Listing {
    /// The objects, by key.
    pub items: Vec<Stored>,
    /// Everything up to here is in `items`. They may be newer.
    pub position: Position,
}

/// Some of the objects of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    /// The objects, by key.
    pub items: Vec<Stored>,
    /// Everything up to here is in `items`, as far as they reach.
    pub position: Position,
    /// How to continue, if there are more.
    pub next: Option<PageToken>,
}

/// Where a page begins: opaque, from the page before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageToken(pub String);

/// Errors of the store.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreError {
    /// There is no such object.
    #[error("{0} does not exist")]
    NotFound(Key),
    /// The object exists already.
    #[error("{0} exists already")]
    AlreadyExists(Key),
    /// Somebody changed the object since it was read: read it again and decide anew.
    #[error("{0} was changed by another writer in the meantime")]
    Conflict(Key),
    /// The manifest means another object than the stored one.
    #[error(
        "{key}: conflict: metadata.{field} is {given}, and the stored object has another one: it has changed since it was \
         read. Read it again and repeat the change, or remove metadata.resourceVersion and metadata.uid from the manifest"
    )]
    Outdated {
        /// The object.
        key: Key,
        /// The field of `metadata`.
        field: &'static str,
        /// What the manifest has there.
        given: String,
    },
    /// The store rejects the object.
    #[error("the store rejects {key}: {problem}")]
    Invalid {
        /// The object.
        key: Key,
        /// The problem, with the field.
        problem: String,
    },
    /// The store has no room for the object. It may have some later.
    #[error("there is no room for {key}: {problem}")]
    Full {
        /// The object.
        key: Key,
        /// How full the store is, and what to do.
        problem: String,
    },
    /// This client has not the permission.
    #[error("no permission: {0}")]
    Forbidden(String),
    /// The store has no such kind, for instance because a CustomResourceDefinition is not installed.
    #[error("the store does not have {}", .0.plural())]
    KindAbsent(Kind),
    /// The store limits the rate of requests: retry after this time.
    #[error("the store limits the rate of requests; retry in {} ms", .0.as_millis())]
    Throttled(Duration),
    /// The history no longer reaches back that far: list again.
    #[error("the changes since position {0} are no longer kept; list again")]
    Compacted(Position),
    /// The store was restored from a backup, or it no longer has the history that would prove the contrary: list again.
    #[error("the store may have another history than before, as after a restore from a backup; list again")]
    OtherHistory,
    /// The watcher did not keep up: list again.
    #[error("the watch fell behind; list again")]
    FellBehind,
    /// The store cannot be reached, or cannot work now: retry later.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// The store has another identity than the one that was accepted before.
    #[error("{}", describe_other(*.expected, *.found))]
    OtherStore {
        /// The accepted identity.
        expected: StoreId,
        /// That of the store that answers; `None` if it tells none.
        found: Option<StoreId>,
    },
    /// A stored object or an answer is invalid.
    #[error("the store is damaged: {0}")]
    Damaged(String),
}

fn describe_other(expected: StoreId, found: Option<StoreId>) -> String {
    let Some(found) = found else {
        return format!(
            "this is not the store {expected}, or a version of it from before stores had identities: upgrade the service"
        );
    };
    format!(
        "this is the store {found}, and {expected} was accepted before; what is in force stays. Serve the file of the former store \
         again, or let this one succeed it: end its service, and run `tortie store identity --replace-with {expected}`"
    )
}

/// A write as a value.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Stores a new object.
    Create(Key, Value),
    /// Replaces an object, if its version is still the given one.
    Update(Key, Value, Version),
    /// Deletes an object, if its version is still the given one (any version, if that is `None`).
    Delete(Key, Option<Version>),
}

impl Write {
    /// The object of the write.
    #[must_use]
    pub fn key(&self) -> &Key {
        match self {
            Write::Create(key, _) | Write::Update(key, ..) | Write::Delete(key, _) => key,
        }
    }
}

/// Not all of several writes were done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{error}; the {} writes before it are done", done.len())]
pub struct Stopped {
    /// The results of the writes that are certainly done; they were the first ones. If the store became unavailable,
    /// more may be done.
    pub done: Vec<Written>,
    /// Why the next write failed.
    #[source]
    pub error: StoreError,
}

/// A last write was not done, or not certainly, because it or one before it failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{error}")]
pub struct Unfinished {
    /// How many of the writes before the last one were tried, from the first one on. Each of them may be done.
    pub tried: usize,
    /// Why one of them failed.
    #[source]
    pub error: StoreError,
}

impl Stopped {
    /// The failure of the write that `count` others precede.
    #[must_use]
    pub fn before(self, count: usize) -> Unfinished {
        let Self { done, error } = self;
        let is_refusal =
            matches!(error, StoreError::AlreadyExists(_) | StoreError::Conflict(_) | StoreError::NotFound(_));
        // If the answer is lost, all of them may be done.
        let tried = if is_refusal { count.min(done.len() + 1) } else { count };
        Unfinished { tried, error }
    }
}

impl From<StoreError> for Stopped {
    fn from(error: StoreError) -> Self {
        Self { done: Vec::new(), error }
    }
}

/// A datastore.
#[async_trait]
pub trait Store: Send + Sync {
    /// The object, if it exists.
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError>;

    /// Some of the objects of an interest: the first ones, or those after another page.
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError>;

    /// The form in which it keeps objects.
    fn storage_form(&self) -> StorageForm {
        StorageForm::AsGiven
    }

    /// Stores a new object.
    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError>;

    /// Replaces an object, if its version is still `expected`.
    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError>;

    /// Deletes an object, if its version is still `expected` (any version, if that is `None`).
    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError>;

    /// Adds a finalizer to an object with this version, or removes it, and changes nothing else. Only a Kubernetes API keeps deleted
    /// objects with finalizers.
    async fn set_finalizer(
        &self,
        key: &Key,
        finalizer: &str,
        present: bool,
        expected: &Version,
    ) -> Result<(), StoreError> {
        let mut stored = self.get(key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
        support::set_finalizer(&mut stored.value, finalizer, present);
        self.update(key, stored.value, expected).await.map(drop)
    }

    /// Stores an object of a manifest, whether or not it exists. Keeps what others added to it; see [`applied`].
    async fn apply(&self, object: &Object) -> Result<Applied, StoreError> {
        apply::apply(self, object).await
    }

    /// The objects of these interests and their changes, for ever. After a lost connection or lost history, the backend
    /// reconnects, lists again if it must, and delivers the differences. Each interest must be of another kind.
    fn follow(&self, interests: Vec<Interest>) -> Follow;

    /// A position of each of these kinds such that whoever follows the kind up to there has everything that was stored
    /// before this call.
    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError>;

    /// The part of the history that the store writes now. `None` if the backend's positions do not tell histories apart.
    async fn epoch(&self) -> Result<Option<Epoch>, StoreError> {
        Ok(None)
    }

    /// Executes several writes in this order. A rejected write ends the sequence: the writes before it stay done, and
    /// those after it are not tried. After a crash, too, a prefix of the writes is done. A backend should do this in
    /// one round trip and one flush.
    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        let mut done = Vec::with_capacity(writes.len());
        for write in writes {
            match execute(self, write).await {
                Ok(written) => done.push(written),
                Err(error) => return Err(Stopped { done, error }),
            }
        }
        Ok(done)
    }

    /// Executes `first` in any order, and then `last` if all of them succeeded. Their keys must differ. A backend without
    /// transactions should execute `first` at the same time.
    async fn write_before(&self, mut first: Vec<Write>, last: Write) -> Result<Written, Unfinished> {
        let count = first.len();
        first.push(last);
        match self.write_all(first).await {
            Ok(written) => written.into_iter().last().ok_or_else(|| {
                let error = StoreError::Damaged("a write has no result".to_owned());
                Unfinished { tried: count, error }
            }),
            Err(stopped) => Err(stopped.before(count)),
        }
    }

    /// Every object of a kind.
    async fn list(&self, kind: Kind) -> Result<Listing, StoreError> {
        self.list_all(&Interest::all(kind)).await
    }

    /// The key of every object of a kind, at less cost than the objects. Objects that are being deleted, or that cannot be
    /// read, may be among them.
    async fn keys(&self, kind: Kind) -> Result<Vec<Key>, StoreError> {
        Ok(self.list(kind).await?.items.into_iter().map(|stored| stored.key).collect())
    }

    /// Every object of an interest.
    async fn list_all(&self, interest: &Interest) -> Result<Listing, StoreError> {
        let Page { mut items, position, mut next } = self.list_page(interest, None).await?;
        while let Some(after) = next {
            let page = self.list_page(interest, Some(after)).await?;
            items.extend(page.items);
            next = page.next;
        }
        Ok(Listing { items, position })
    }
}

/// Executes one write.
async fn execute<S: Store + ?Sized>(store: &S, write: Write) -> Result<Written, StoreError> {
    match write {
        Write::Create(key, value) => store.create(&key, value).await.map(written),
        Write::Update(key, value, expected) => store.update(&key, value, &expected).await.map(written),
        Write::Delete(key, expected) => {
            store.delete(&key, expected.as_ref()).await.map(|position| Written::at(position.0))
        }
    }
}

fn written(stored: Stored) -> Written {
    Written { version: stored.version, position: stored.position }
}
