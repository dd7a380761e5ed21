//! The embedded backend: one file (redb), a revision for each write, and a log of the latest writes for watchers.
//!
//! One thread writes. Readers use snapshots and wait for nobody. A file has an identity, and whoever opens it begins an epoch,
//! so that no position of another history counts here.

mod backup;
mod check;
mod epochs;
mod files;
mod layout;
mod log_watch;
mod overlay;
pub(crate) mod parsers;
mod records;
mod replay;
#[cfg(test)]
mod tests;
mod usage;
mod writer;

use std::ops::Bound;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::SystemTime;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use redb::backends::InMemoryBackend;
use redb::{Database, DatabaseError, ReadableTable};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tortie_api::{Key, Kind, Position, Positions};

pub use self::backup::Salvaged;
pub(crate) use self::backup::{BackupPart, BackupRecord, TakePart, write as write_backup};
pub use self::check::FileCheck;
use self::files::ServedFile;
pub(crate) use self::files::sync_folder;
use self::layout::{LATEST, OBJECTS};
use self::log_watch::LogWatch;
use self::usage::{DEFAULT_QUOTA, Room, Usage};
use self::writer::Writer;
use crate::backoff::random_seed;
use crate::file::{Closing, File, failed};
use crate::follow::{self, Event, Follow, Source, Watch};
use crate::ring::Events;
use crate::{
    Endpoints, Epoch, Interest, Page, PageToken, SharedEvent, SharedWatch, Stopped, Store, StoreError,
    StoreId, Stored, Version, Write, Written,
};

/// The number of writes in the log.
const LOG_LENGTH: u64 = 20_000;
/// The maximum size of a page, in objects and in bytes of JSON.
const MAX_PAGE: (usize, usize) = (1_000, 4 << 20);
/// The maximum nesting of a value. The parser reads at most 128 levels.
const MAX_DEPTH: usize = 100;
/// The maximum number of requests that wait for a transaction. Further callers wait until there is room.
const MAX_WAITING: usize = 1_024;

/// A store in one file. Clones share it.
#[derive(Clone)]
pub struct Embedded {
    file: Arc<File>,
    writer: mpsc::Sender<Request>,
    events: Events,
    latest: Arc<Latest>,
    served: Arc<ServedFile>,
    id: StoreId,
    /// The begin of the epoch of this process.
    begin: Revision,
    quota: u64,
    used: Arc<AtomicU64>,
}

/// The number of a write: the version of its object, and its position. Each write has the next number, and an epoch begins
/// further ahead.
type Revision = u64;

struct Request {
    writes: Vec<Write>,
    /// Up to how many bytes of objects its client may fill the store.
    limit: u64,
    answer: oneshot::Sender<Answer>,
}

type Answer = Result<Vec<Written>, Stopped>;

impl Embedded {
    /// Makes a store in a new file: of a new identity, or of that of a lost store, whose followers then go on with this one.
    ///
    /// # Errors
    /// The file exists already, or cannot be written.
    pub fn init(path: &Path, id: Option<StoreId>) -> Result<StoreId, StoreError> {
        let id = id.unwrap_or_else(StoreId::random);
        files::init(path, id).map(|()| id)
    }

    /// Opens a file that [`Embedded::init`] has made, and begins an epoch. Its objects may have 2 GiB in all.
    ///
    /// # Errors
    /// The file does not exist, cannot be read or written, is in use by another process, or is not a store.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with_quota(path, DEFAULT_QUOTA)
    }

    /// The same. The objects may have so many bytes in all; what would need more is rejected.
    ///
    /// # Errors
    /// As for [`Embedded::open`].
    pub fn open_with_quota(path: &Path, quota: u64) -> Result<Self, StoreError> {
        let (file, served) = files::served(path)?;
        let now = epochs::microseconds(SystemTime::now());
        let next = |latest| epochs::next_begin(latest, now, random_seed());
        let room = Room { quota, ..Room::default() };
        Self::over(file, served, room, next).map_err(|error| files::of_file(path, error))
    }

    /// Creates a store that disappears with the process. Its first revision is 1.
    ///
    /// # Errors
    /// The writer's thread cannot be started.
    pub fn in_memory() -> Result<Self, StoreError> {
        let create = || Database::builder().create_with_backend(InMemoryBackend::new()).map_err(failed);
        Self::over_new(File::new(create)?)
    }

    /// The identity of a file that no process serves. Files of earlier versions get one when they are opened.
    ///
    /// # Errors
    /// The file does not exist, is in use by another process, or is not a store.
    pub fn identity_of(path: &Path) -> Result<Option<StoreId>, StoreError> {
        files::identity(path)
    }

    /// Gives a file that no process serves another identity.
    ///
    /// # Errors
    /// The file does not exist, cannot be written, is in use by another process, or is not a store.
    pub fn replace_identity(path: &Path, id: StoreId) -> Result<(), StoreError> {
        files::replace_identity(path, id)
    }

    /// Looks for damage in a file that no process serves. Its pages are whole if there is no error.
    ///
    /// # Errors
    /// The file does not exist, is damaged, is in use by another process, or is not a store.
    pub fn check(path: &Path) -> Result<FileCheck, StoreError> {
        check::check(path).map_err(|error| files::of_file(path, error))
    }

    /// Copies a file that no process serves to a new file: as a backup, or from a backup.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged; the new one exists already, or cannot be written.
    pub fn copy(from: &Path, to: &Path) -> Result<FileCheck, StoreError> {
        backup::copy(from, to)
    }

    /// Saves the objects of a damaged file whose records are whole in a new file.
    ///
    /// # Errors
    /// Nothing can be read; the new file exists already, or cannot be written.
    pub fn repair(from: &Path, to: &Path) -> Result<Salvaged, StoreError> {
        backup::repair(from, to)
    }

    /// Over an empty database, whose revisions begin with 1.
    fn over_new(file: File) -> Result<Self, StoreError> {
        file.write(|transaction| layout::make(transaction, StoreId::random()))?;
        Self::over(file, Arc::default(), Room::default(), |latest| latest)
    }

    fn over(
        file: File,
        served: Arc<ServedFile>,
        room: Room,
        next: impl FnOnce(Revision) -> Revision,
    ) -> Result<Self, StoreError> {
        let begun = file.write(|transaction| layout::begin(transaction, next))?;
        for name in file.read(check::objects)?.1 {
            tracing::error!(
                object = name,
                "the record of the object is damaged; it closes what it concerns. Apply or delete the object, or \
                restore a backup"
            );
        }
        let usage = file.read(Usage::read)?;
        let used = Arc::new(AtomicU64::new(usage.objects));
        served.told.store(begun.begin, Ordering::SeqCst);
        // Nobody else has the value, so it is not set yet.
        let _ = served.begun.set(begun);
        let layout::Begun { id, begin } = begun;
        let latest = Arc::new(Latest::of(begin));
        let file = Arc::new(file);

        let (writer, mut requests) = mpsc::channel(MAX_WAITING);
        let events = Events::new();
        let mut thread = Writer {
            file: file.clone(),
            events: events.clone(),
            latest: latest.clone(),
            served: served.clone(),
            sent: begin,
            room,
            usage,
            used: used.clone(),
            nearly_full: false,
        };
        thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || thread.run(&mut requests))
            .map_err(|error| StoreError::Unavailable(format!("its writer cannot be started: {error}")))?;
        Ok(Self { file, writer, events, latest, served, id, begin, quota: room.quota, used })
    }

    /// Tells when the file is closed, after the last clone is dropped.
    #[must_use]
    pub fn closing(&self) -> Closing {
        self.file.closing()
    }

    /// Waits until the store can write no more, because redb has panicked in the thread that writes; returns the error.
    pub async fn writer_ended(&self) -> StoreError {
        self.writer.closed().await;
        let problem = "its writer has failed; restart the service, which looks for damage in its file first";
        StoreError::Unavailable(problem.to_owned())
    }

    /// The parts of a backup, all from one moment.
    pub(crate) fn backup(&self) -> BoxStream<'static, Result<BackupPart, StoreError>> {
        let (sender, receiver) = mpsc::channel(2);
        let file = self.file.clone();
        let gone = || StoreError::Unavailable("nobody takes the backup any more".to_owned());
        tokio::task::spawn_blocking(move || {
            let mut take = |part| sender.blocking_send(Ok(part)).map_err(|_| gone());
            // Not in `File::read`: whoever takes the parts slowly would keep the writer from opening the file again. That ends
            // the backup with an error.
            let read = file.begin_read().and_then(|transaction| backup::read(&transaction, &mut take));
            if let Err(error) = read {
                let _ = sender.blocking_send(Err(match error {
                    StoreError::Unavailable(problem) => {
                        StoreError::Unavailable(format!("{problem}; repeat the backup"))
                    }
                    error => error,
                }));
            }
        });
        stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver))).boxed()
    }

    /// The bytes of all objects with their keys.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Executes writes as [`Store::write_all`], for a client that may fill only so many percent of the store.
    pub(crate) async fn write_within(
        &self,
        writes: Vec<Write>,
        percent: u64,
    ) -> Result<Vec<Written>, Stopped> {
        let (answer, answered) = oneshot::channel();
        let limit = self.quota * percent / 100;
        self.writer.send(Request { writes, limit, answer }).await.map_err(|_| stopped())?;
        answered.await.map_err(|_| stopped())?
    }

    async fn write(&self, write: Write) -> Result<Written, StoreError> {
        let written = self.write_all(vec![write]).await.map_err(|stopped| stopped.error)?;
        written.into_iter().next().ok_or_else(stopped)
    }
}

/// Reads on a thread where it may block.
async fn read<T: Send + 'static>(
    file: &Arc<File>,
    read: impl FnOnce(&File) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let file = file.clone();
    let read = tokio::task::spawn_blocking(move || read(&file)).await;
    read.unwrap_or_else(|panic| Err(StoreError::Unavailable(format!("a reader has failed: {panic}"))))
}

/// The position of the last write of each kind in this epoch.
struct Latest(Mutex<Positions>);

impl Latest {
    /// At the begin of an epoch, it is the begin: whoever has reached that has followed this history.
    fn of(begin: Revision) -> Self {
        Self(Mutex::new(Kind::all().map(|kind| (kind, Position(begin))).collect()))
    }

    fn advance(&self, events: &[Event]) {
        let mut positions = self.lock();
        for event in events {
            if let Event::Put(Stored { key, .. }) | Event::Deleted { key, .. } = event {
                positions.advance(key.kind, event.position());
            }
        }
    }

    fn advance_all(&self, latest: Revision) {
        self.lock().extend(Kind::all().map(|kind| (kind, Position(latest))));
    }

    fn lock(&self) -> MutexGuard<'_, Positions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for Embedded {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        let key = key.clone();
        read(&self.file, move |file| get(file, key)).await
    }

    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        let interest = interest.clone();
        read(&self.file, move |file| page(file, &interest, after)).await
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        let written = self.write(Write::Create(key.clone(), value.clone())).await?;
        Ok(Stored::new(key.clone(), value, written))
    }

    async fn update(&self, key: &Key, value: Value, expected: &Version) -> Result<Stored, StoreError> {
        let written = self.write(Write::Update(key.clone(), value.clone(), expected.clone())).await?;
        Ok(Stored::new(key.clone(), value, written))
    }

    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        Ok(self.write(Write::Delete(key.clone(), expected.cloned())).await?.position)
    }

    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Written>, Stopped> {
        self.write_within(writes, 100).await
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        follow::follow(&Arc::new(self.clone()), interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        let latest = self.latest.lock();
        Ok(kinds.iter().filter_map(|kind| Some((*kind, latest.of(*kind)?))).collect())
    }

    /// From memory: whoever asks often waits for no disk, and for no file that is being opened again.
    async fn epoch(&self) -> Result<Option<Epoch>, StoreError> {
        let latest = self.served.told.load(Ordering::SeqCst);
        Ok(Some(Epoch { begin: Position(self.begin), latest: Position(latest) }))
    }
}

impl Endpoints for Embedded {}

#[async_trait]
impl Source for Embedded {
    fn id(&self) -> Option<StoreId> {
        Some(self.id)
    }

    fn embedded(&self) -> Option<Embedded> {
        Some(self.clone())
    }

    /// One group: there is one log.
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        vec![interests]
    }

    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        let events = self.watch_shared(interests, after).await?;
        Ok(events.map(|event| event.map(SharedEvent::into_event)).boxed())
    }

    async fn watch_shared(&self, interests: &[Interest], after: Position) -> Result<SharedWatch, StoreError> {
        LogWatch::open(self.file.clone(), self.events.clone(), interests, after).await
    }
}

fn get(file: &File, key: Key) -> Result<Option<Stored>, StoreError> {
    file.read(|transaction| {
        let objects = transaction.open_table(OBJECTS).map_err(failed)?;
        let path = (key.kind.plural(), key.namespace.as_str(), key.name.as_str());
        let found = objects.get(path).map_err(failed)?;
        Ok(found.map(|record| records::stored(key.clone(), path, record.value())))
    })
}

/// The objects of an interest after the token, which is the namespace and name of the last object of the page before.
fn page(file: &File, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
    let bad_token = || StoreError::Unavailable("the page does not exist".to_owned());
    let after = after.as_ref().map(|token| token.0.split_once('/').ok_or_else(bad_token)).transpose()?;
    let plural = interest.kind.plural();
    file.read(|transaction| {
        let position = Position(latest(&transaction.open_table(LATEST).map_err(failed)?)?);
        let objects = transaction.open_table(OBJECTS).map_err(failed)?;
        let start = match after {
            Some((namespace, name)) => Bound::Excluded((plural, namespace, name)),
            None => Bound::Included((plural, "", "")),
        };
        let (mut items, mut bytes, mut next) = (Vec::new(), 0, None);
        for entry in objects.range((start, Bound::Unbounded)).map_err(failed)? {
            let (key, record) = entry.map_err(failed)?;
            let (of, namespace, name) = key.value();
            if of != plural {
                break;
            }
            let key = Key::namespaced(interest.kind, namespace, name);
            let stored = records::stored(key, (of, namespace, name), record.value());
            bytes += record.value().len();
            if interest.covers(&stored.key, &stored.value) {
                items.push(stored);
            }
            if items.len() == MAX_PAGE.0 || bytes >= MAX_PAGE.1 {
                next = Some(PageToken(format!("{namespace}/{name}")));
                break;
            }
        }
        Ok(Page { items, position, next })
    })
}

fn latest(table: &impl ReadableTable<(), u64>) -> Result<Revision, StoreError> {
    Ok(table.get(()).map_err(failed)?.map_or(0, |revision| revision.value()))
}

/// Converts an error in opening a database.
fn already_open(error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => {
            StoreError::Unavailable("the file is served by a process; end that first".to_owned())
        }
        error => failed(error),
    }
}

fn stopped() -> StoreError {
    StoreError::Unavailable("its writer has stopped".to_owned())
}

fn damaged(problem: &str) -> StoreError {
    StoreError::Damaged(format!("the store's file is inconsistent: {problem}; restore a backup"))
}
