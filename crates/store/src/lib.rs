//! The datastore behind one trait: get, list, watch, create, update and delete with compare-and-swap.
//!
//! [`Embedded`] keeps everything in one file. [`rpc`] serves it to other processes and is a backend itself. etcd and
//! the Kubernetes API are planned as further backends. `conformance` is the suite that each backend must pass.

mod apply;
#[cfg(feature = "conformance")]
#[expect(clippy::expect_used, reason = "a suite of tests says what it expects")]
pub mod conformance;
mod embedded;
mod file;
mod in_force;
mod pod;
mod ring;
pub mod rpc;
mod size;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::Value;
use thiserror::Error;
use tortie_api::{Key, Kind};

pub use apply::{Applied, apply, merged};
pub use embedded::Embedded;
pub use in_force::{
    NotInForce, wait_for_labels, wait_for_pods, wait_for_reports, wait_for_slices, wait_in_force,
};
pub use pod::{POD_UID, is_of, pod_of};
pub use size::size_of_value;

/// A point in the store's history: the number of writes so far. A later write has a higher revision.
pub type Revision = u64;

/// A stored object.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// Its key.
    pub key: Key,
    /// The complete object, as it was written.
    pub value: Value,
    /// The revision of its last write.
    pub revision: Revision,
}

/// All objects of one kind at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Listing {
    /// The objects, by key.
    pub items: Vec<Stored>,
    /// The moment. A watch from this revision on misses nothing.
    pub revision: Revision,
}

/// A change, as a watch delivers it.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The object was created or updated.
    Put(Stored),
    /// The object was deleted.
    Deleted {
        /// Its key.
        key: Key,
        /// The revision of the deletion.
        revision: Revision,
    },
}

impl Event {
    /// The revision of the event.
    #[must_use]
    pub fn revision(&self) -> Revision {
        match self {
            Event::Put(stored) => stored.revision,
            Event::Deleted { revision, .. } => *revision,
        }
    }

    /// The object that changed.
    #[must_use]
    pub fn key(&self) -> &Key {
        match self {
            Event::Put(stored) => &stored.key,
            Event::Deleted { key, .. } => key,
        }
    }
}

/// The events of a watch, in the order of their revisions. After an error it ends: list again, and watch from there.
pub type Watch = BoxStream<'static, Result<Event, StoreError>>;

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
    /// The history no longer reaches back that far: list again.
    #[error("the changes since revision {0} are no longer kept; list again")]
    Compacted(Revision),
    /// The watcher did not keep up: list again.
    #[error("the watch fell behind; list again")]
    FellBehind,
    /// The store cannot be reached, or cannot work now: retry later.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// A stored object or an answer is invalid.
    #[error("the store is damaged: {0}")]
    Damaged(String),
}

/// A write as a value.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Stores a new object.
    Create(Key, Value),
    /// Replaces an object, if its revision is still the given one.
    Update(Key, Value, Revision),
    /// Deletes an object, if its revision is still the given one (any revision, if that is `None`).
    Delete(Key, Option<Revision>),
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
    /// The revisions of the writes that are certainly done; they were the first ones. If the store became
    /// unavailable, more may be done.
    pub done: Vec<Revision>,
    /// Why the next write failed.
    #[source]
    pub error: StoreError,
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

    /// Every object of a kind.
    async fn list(&self, kind: Kind) -> Result<Listing, StoreError>;

    /// Stores a new object.
    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError>;

    /// Replaces an object, if its revision is still `expected`.
    async fn update(&self, key: &Key, value: Value, expected: Revision) -> Result<Stored, StoreError>;

    /// Deletes an object, if its revision is still `expected` (any revision, if that is `None`).
    async fn delete(&self, key: &Key, expected: Option<Revision>) -> Result<Revision, StoreError>;

    /// Executes several writes in this order, and returns the revision of each. A rejected write ends the sequence:
    /// the writes before it stay done, and those after it are not tried. After a crash, too, a prefix of the writes
    /// is done. A backend should do this in one round trip and one flush.
    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Revision>, Stopped> {
        let mut done = Vec::with_capacity(writes.len());
        for write in writes {
            let written = match write {
                Write::Create(key, value) => self.create(&key, value).await.map(|stored| stored.revision),
                Write::Update(key, value, expected) => {
                    self.update(&key, value, expected).await.map(|stored| stored.revision)
                }
                Write::Delete(key, expected) => self.delete(&key, expected).await,
            };
            match written {
                Ok(revision) => done.push(revision),
                Err(error) => return Err(Stopped { done, error }),
            }
        }
        Ok(done)
    }

    /// The changes of objects of these kinds after the revision `after`, in order.
    async fn watch(&self, kinds: &[Kind], after: Revision) -> Result<Watch, StoreError>;
}
