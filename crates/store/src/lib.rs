//! The datastore behind one trait: get, list, watch, create, update and delete with compare-and-swap.
//!
//! [`Embedded`] keeps everything in one file; [`rpc`] serves it to other processes and is a backend itself.
//! etcd and the Kubernetes API will be further backends; `conformance` is the suite that each has to pass.

mod apply;
#[cfg(feature = "conformance")]
#[expect(clippy::expect_used, reason = "a suite of tests says what it expects")]
pub mod conformance;
mod embedded;
mod file;
mod in_force;
mod pod;
pub mod rpc;

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

/// A point in the store's history: the count of writes so far. A later write has a higher one.
pub type Revision = u64;

/// An object as it is stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// Its key.
    pub key: Key,
    /// All of it, as it was written.
    pub value: Value,
    /// The write that made it what it is.
    pub revision: Revision,
}

/// All objects of one kind at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Listing {
    /// The objects, by key.
    pub items: Vec<Stored>,
    /// The moment. A watch from here on misses nothing.
    pub revision: Revision,
}

/// A change, as a watch tells it.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The object was created or updated.
    Put(Stored),
    /// The object is gone.
    Deleted {
        /// Its key.
        key: Key,
        /// The write that deleted it.
        revision: Revision,
    },
}

impl Event {
    /// The write that the event tells of.
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

/// The events of a watch, in the order of their revisions. It ends with an error: then list again and watch from there.
pub type Watch = BoxStream<'static, Result<Event, StoreError>>;

/// Why the store did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StoreError {
    /// There is no such object.
    #[error("{0} does not exist")]
    NotFound(Key),
    /// There is such an object already.
    #[error("{0} exists already")]
    AlreadyExists(Key),
    /// Somebody changed the object since it was read: read it again and decide anew.
    #[error("{0} was changed by somebody else in the meantime")]
    Conflict(Key),
    /// The history does not reach back that far any more: list again.
    #[error("the changes since revision {0} are no longer kept; list again")]
    Compacted(Revision),
    /// The watcher did not keep up: list again.
    #[error("the watch fell behind; list again")]
    FellBehind,
    /// The store cannot be reached, or cannot work now: try again later.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// What is stored, or what was answered, makes no sense.
    #[error("the store is damaged: {0}")]
    Damaged(String),
}

/// A write, as a value.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Stores a new object.
    Create(Key, Value),
    /// Replaces an object, if this is still its revision.
    Update(Key, Value, Revision),
    /// Deletes an object, if this is still its revision (any, if that is `None`).
    Delete(Key, Option<Revision>),
}

impl Write {
    /// The object that it is about.
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
    /// The revisions of the writes that are surely done; they were the first ones. Where the store became unavailable,
    /// more may be.
    pub done: Vec<Revision>,
    /// What became of the next one.
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

    /// Deletes an object, if its revision is still `expected` (any, if that is `None`).
    async fn delete(&self, key: &Key, expected: Option<Revision>) -> Result<Revision, StoreError>;

    /// Does several writes in this order, and gives the revision of each. One that is refused ends it: those before it
    /// stay done, those after it are not tried. A crash, too, leaves the first so many of them done. A backend that
    /// can, does it in one trip and one flush.
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

    /// What happens to objects of these kinds after the write `after`, in order.
    async fn watch(&self, kinds: &[Kind], after: Revision) -> Result<Watch, StoreError>;
}
