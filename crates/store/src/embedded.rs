//! The embedded backend: one file (redb), a revision for each write, and a log of the latest writes for watchers.
//!
//! One thread writes. It takes all waiting requests, executes them in one transaction, and answers when it is on
//! disk: under load many writes share one flush. Readers use snapshots and wait for nobody.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use async_trait::async_trait;
use futures::{Stream, StreamExt};
use redb::backends::InMemoryBackend;
use redb::{Database, ReadableTable, Table, TableDefinition, TableError};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tortie_api::{Key, Kind};

use crate::file::File;
use crate::ring::{Events, Reader};
use crate::{Event, Listing, Revision, Stopped, Store, StoreError, Stored, Watch, Write};

/// Objects: `(plural, namespace, name)` → revision (8 bytes, big-endian) and the value as JSON.
const OBJECTS: TableDefinition<(&str, &str, &str), &[u8]> = TableDefinition::new("objects");
/// The log: revision → `(plural, namespace, name, value)`; an empty value is a deletion.
const LOG: TableDefinition<u64, (&str, &str, &str, &[u8])> = TableDefinition::new("log");
/// The latest revision, under the only key.
const LATEST: TableDefinition<(), u64> = TableDefinition::new("latest");

/// The number of writes in the log.
const LOG_LENGTH: u64 = 20_000;
/// The maximum size of the values that a new watch reads from the log, in bytes of JSON.
const MAX_REPLAY_BYTES: usize = 32 << 20;
/// The maximum number of requests in a transaction.
const BATCH: usize = 256;
/// The maximum number of requests that wait for a transaction. Further callers wait until there is room.
const MAX_WAITING: usize = 1_024;

/// A store in one file. Clones share it.
#[derive(Clone)]
pub struct Embedded {
    file: Arc<File>,
    writer: mpsc::Sender<Request>,
    events: Events,
}

struct Request {
    writes: Vec<Write>,
    answer: oneshot::Sender<Answer>,
}

type Answer = Result<Vec<Revision>, Stopped>;

impl Embedded {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// The file cannot be read or written, is in use by another process, or is not a store.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let own = path.to_owned();
        let opened = File::new(move || Database::create(&own)).and_then(Self::over);
        opened.map_err(|error| match error {
            StoreError::Unavailable(problem) => {
                StoreError::Unavailable(format!("{}: {problem}", path.display()))
            }
            other => other,
        })
    }

    /// Creates a store that disappears with the process.
    ///
    /// # Errors
    /// The writer's thread cannot be started.
    pub fn in_memory() -> Result<Self, StoreError> {
        Self::over(File::new(|| Database::builder().create_with_backend(InMemoryBackend::new()))?)
    }

    fn over(file: File) -> Result<Self, StoreError> {
        let told = file.write(|transaction| {
            transaction.open_table(OBJECTS).map_err(failed)?;
            transaction.open_table(LOG).map_err(failed)?;
            latest(&transaction.open_table(LATEST).map_err(failed)?)
        })?;
        let file = Arc::new(file);

        let (writer, mut requests) = mpsc::channel(MAX_WAITING);
        let events = Events::new();
        let mut thread = Writer { file: file.clone(), events: events.clone(), told };
        thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || thread.run(&mut requests))
            .map_err(|error| StoreError::Unavailable(format!("its writer cannot be started: {error}")))?;
        Ok(Self { file, writer, events })
    }

    async fn write(&self, write: Write) -> Result<Revision, StoreError> {
        let revisions = self.write_all(vec![write]).await.map_err(|stopped| stopped.error)?;
        revisions.into_iter().next().ok_or_else(stopped)
    }
}

/// The logged events after a revision, and the latest revision that they reach. More bytes than the maximum count as
/// events that are no longer kept.
fn replay(
    file: &File,
    kinds: &[Kind],
    after: Revision,
    max_bytes: usize,
) -> Result<(Vec<Event>, Revision), StoreError> {
    file.read(|transaction| {
        let latest = latest(&transaction.open_table(LATEST).map_err(failed)?)?;
        let log = transaction.open_table(LOG).map_err(failed)?;
        let oldest = log.first().map_err(failed)?.map_or(latest + 1, |(revision, _)| revision.value());
        let next = after.saturating_add(1);
        if next < oldest {
            return Err(StoreError::Compacted(after));
        }
        let (mut events, mut bytes) = (Vec::new(), 0);
        for entry in log.range(next..).map_err(failed)? {
            let (revision, entry) = entry.map_err(failed)?;
            let (plural, namespace, name, value) = entry.value();
            let Some(kind) = kinds.iter().find(|kind| kind.plural() == plural) else { continue };
            bytes += value.len();
            if bytes > max_bytes {
                return Err(StoreError::Compacted(after));
            }
            let key = Key::namespaced(*kind, namespace, name);
            let revision = revision.value();
            events.push(match value {
                [] => Event::Deleted { key, revision },
                json => Event::Put(Stored { value: parse(&key, json)?, key, revision }),
            });
        }
        Ok((events, latest))
    })
}

#[async_trait]
impl Store for Embedded {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        self.file.read(|transaction| {
            let objects = transaction.open_table(OBJECTS).map_err(failed)?;
            let path = (key.kind.plural(), key.namespace.as_str(), key.name.as_str());
            let found = objects.get(path).map_err(failed)?;
            found.map(|bytes| decode(key.clone(), bytes.value())).transpose()
        })
    }

    async fn list(&self, kind: Kind) -> Result<Listing, StoreError> {
        self.file.read(|transaction| {
            let revision = latest(&transaction.open_table(LATEST).map_err(failed)?)?;
            let objects = transaction.open_table(OBJECTS).map_err(failed)?;
            let mut items = Vec::new();
            for entry in objects.range((kind.plural(), "", "")..).map_err(failed)? {
                let (key, bytes) = entry.map_err(failed)?;
                let (plural, namespace, name) = key.value();
                if plural != kind.plural() {
                    break;
                }
                items.push(decode(Key::namespaced(kind, namespace, name), bytes.value())?);
            }
            Ok(Listing { items, revision })
        })
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        let revision = self.write(Write::Create(key.clone(), value.clone())).await?;
        Ok(Stored { key: key.clone(), value, revision })
    }

    async fn update(&self, key: &Key, value: Value, expected: Revision) -> Result<Stored, StoreError> {
        let revision = self.write(Write::Update(key.clone(), value.clone(), expected)).await?;
        Ok(Stored { key: key.clone(), value, revision })
    }

    async fn delete(&self, key: &Key, expected: Option<Revision>) -> Result<Revision, StoreError> {
        self.write(Write::Delete(key.clone(), expected)).await
    }

    async fn write_all(&self, writes: Vec<Write>) -> Result<Vec<Revision>, Stopped> {
        let (answer, answered) = oneshot::channel();
        self.writer.send(Request { writes, answer }).await.map_err(|_| stopped())?;
        answered.await.map_err(|_| stopped())?
    }

    async fn watch(&self, kinds: &[Kind], after: Revision) -> Result<Watch, StoreError> {
        // Subscribe first: events in between are in both, and are delivered once.
        let reader = self.events.subscribe();
        let (past, reached) = replay(&self.file, kinds, after, MAX_REPLAY_BYTES)?;
        let kinds = kinds.to_vec();
        let live = read_all(reader).filter_map(move |event| {
            futures::future::ready(match event {
                Ok(event) if event.revision() <= reached.max(after) || !kinds.contains(&event.key().kind) => {
                    None
                }
                event => Some(event.map(Arc::unwrap_or_clone)),
            })
        });
        Ok(futures::stream::iter(past.into_iter().map(Ok)).chain(live).boxed())
    }
}

/// The events of a reader. The stream ends after an error.
fn read_all(reader: Reader) -> impl Stream<Item = Result<Arc<Event>, StoreError>> {
    futures::stream::unfold(Some(reader), async |reader| {
        let mut reader = reader?;
        match reader.next().await.transpose()? {
            Ok(event) => Some((Ok(event), Some(reader))),
            Err(error) => Some((Err(error), None)),
        }
    })
}

struct Writer {
    file: Arc<File>,
    events: Events,
    /// Watchers have received every event up to here.
    told: Revision,
}

impl Writer {
    fn run(&mut self, requests: &mut mpsc::Receiver<Request>) {
        let mut batch = Vec::new();
        while requests.blocking_recv_many(&mut batch, BATCH) > 0 {
            let (requests, answers): (Vec<_>, Vec<_>) =
                batch.drain(..).map(|request| (request.writes, request.answer)).unzip();
            match self.write(requests) {
                Ok((events, results)) => {
                    let first = events.first().map_or(0, Event::revision);
                    // Watchers may have missed what happened in a failed transaction.
                    match first > self.told + 1 {
                        true => self.catch_up(),
                        false => self.tell(events),
                    }
                    for (answer, result) in answers.into_iter().zip(results) {
                        let _ = answer.send(result);
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "a transaction of the store failed; reopening its file");
                    // Before the answer, so that the next request finds the file open.
                    self.recover();
                    for answer in answers {
                        let _ = answer.send(Err(error.clone().into()));
                    }
                }
            }
        }
    }

    fn tell(&mut self, events: Vec<Event>) {
        let last = events.last().map_or(0, Event::revision);
        self.told = self.told.max(last);
        self.events.send(events);
    }

    /// Reopens the file. A failed transaction may have been committed all the same; then watchers receive its events.
    fn recover(&mut self) {
        match self.file.reopen() {
            Ok(()) => self.catch_up(),
            Err(error) => tracing::error!(%error, "cannot open the store's file; Tortie retries"),
        }
    }

    /// Sends watchers every event in the log that they have not received.
    fn catch_up(&mut self) {
        let kinds: Vec<Kind> = Kind::all().collect();
        match replay(&self.file, &kinds, self.told, usize::MAX) {
            Ok((events, _)) => self.tell(events),
            Err(error) => {
                tracing::error!(%error, "cannot read the written events; watchers receive them with the next write")
            }
        }
    }

    /// Executes requests in one transaction. Returns the events, and the answer to each request.
    fn write(&self, requests: Vec<Vec<Write>>) -> Result<(Vec<Event>, Vec<Answer>), StoreError> {
        self.file.write(|transaction| {
            let mut events = Vec::new();
            let mut answers = Vec::with_capacity(requests.len());
            let mut tables = Tables {
                objects: transaction.open_table(OBJECTS).map_err(failed)?,
                log: transaction.open_table(LOG).map_err(failed)?,
                latest: transaction.open_table(LATEST).map_err(failed)?,
            };
            for writes in requests {
                answers.push(tables.carry_out_all(writes, &mut events)?);
            }
            Ok((events, answers))
        })
    }
}

struct Tables<'txn> {
    objects: Table<'txn, (&'static str, &'static str, &'static str), &'static [u8]>,
    log: Table<'txn, u64, (&'static str, &'static str, &'static str, &'static [u8])>,
    latest: Table<'txn, (), u64>,
}

impl Tables<'_> {
    /// The outer error comes from the file and ends the transaction; the inner one belongs to the request.
    fn carry_out_all(&mut self, writes: Vec<Write>, events: &mut Vec<Event>) -> Result<Answer, StoreError> {
        let mut done = Vec::with_capacity(writes.len());
        for write in writes {
            match self.carry_out(write)? {
                Ok(event) => {
                    done.push(event.revision());
                    events.push(event);
                }
                Err(error) => return Ok(Err(Stopped { done, error })),
            }
        }
        Ok(Ok(done))
    }

    fn carry_out(&mut self, write: Write) -> Result<Result<Event, StoreError>, StoreError> {
        let key = write.key().clone();
        let path = (key.kind.plural(), key.namespace.as_str(), key.name.as_str());
        let current = self
            .objects
            .get(path)
            .map_err(failed)?
            .map(|bytes| revision_of(&key, bytes.value()))
            .transpose()?;
        match (&write, current) {
            (Write::Create(..), Some(_)) => return Ok(Err(StoreError::AlreadyExists(key))),
            (Write::Update(..) | Write::Delete(..), None) => return Ok(Err(StoreError::NotFound(key))),
            (Write::Update(_, _, expected) | Write::Delete(_, Some(expected)), Some(current))
                if current != *expected =>
            {
                return Ok(Err(StoreError::Conflict(key)));
            }
            _ => {}
        }
        let revision = latest(&self.latest)? + 1;
        self.latest.insert((), revision).map_err(failed)?;
        let (plural, namespace, name) = path;
        let event = match write {
            Write::Create(_, value) | Write::Update(_, value, _) => {
                let json = value.to_string();
                let mut bytes = revision.to_be_bytes().to_vec();
                bytes.extend_from_slice(json.as_bytes());
                self.objects.insert(path, bytes.as_slice()).map_err(failed)?;
                self.log.insert(revision, (plural, namespace, name, json.as_bytes())).map_err(failed)?;
                Event::Put(Stored { key, value, revision })
            }
            Write::Delete(..) => {
                self.objects.remove(path).map_err(failed)?;
                self.log.insert(revision, (plural, namespace, name, &[][..])).map_err(failed)?;
                Event::Deleted { key, revision }
            }
        };
        if revision > LOG_LENGTH {
            self.log.remove(revision - LOG_LENGTH).map_err(failed)?;
        }
        Ok(Ok(event))
    }
}

fn latest(table: &impl ReadableTable<(), u64>) -> Result<Revision, StoreError> {
    Ok(table.get(()).map_err(failed)?.map_or(0, |revision| revision.value()))
}

fn revision_of(key: &Key, bytes: &[u8]) -> Result<Revision, StoreError> {
    let revision = bytes.first_chunk().map(|bytes| Revision::from_be_bytes(*bytes));
    revision.ok_or_else(|| StoreError::Damaged(format!("{key}: the record is cut off")))
}

fn decode(key: Key, bytes: &[u8]) -> Result<Stored, StoreError> {
    let revision = revision_of(&key, bytes)?;
    let value = parse(&key, &bytes[size_of::<Revision>()..])?;
    Ok(Stored { key, value, revision })
}

fn parse(key: &Key, json: &[u8]) -> Result<Value, StoreError> {
    serde_json::from_slice(json).map_err(|error| StoreError::Damaged(format!("{key}: {error}")))
}

fn stopped() -> StoreError {
    StoreError::Unavailable("its writer has stopped".to_owned())
}

pub(crate) fn failed(error: impl Into<FileError>) -> StoreError {
    StoreError::Unavailable(error.into().0)
}

/// Any of redb's errors, as text.
pub(crate) struct FileError(String);

macro_rules! file_error {
    ($($error:ty),*) => {
        $(impl From<$error> for FileError {
            fn from(error: $error) -> Self {
                Self(error.to_string())
            }
        })*
    };
}
file_error!(redb::DatabaseError, TableError, redb::TransactionError, redb::StorageError, redb::CommitError);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use redb::StorageBackend;
    use serde_json::json;

    use super::*;

    /// A disk that can be full.
    #[derive(Debug, Clone)]
    struct Disk(Arc<(InMemoryBackend, AtomicBool)>);

    impl Disk {
        fn check(&self) -> io::Result<()> {
            let full = self.0.1.load(Ordering::SeqCst);
            if full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }
    }

    impl StorageBackend for Disk {
        fn len(&self) -> io::Result<u64> {
            self.0.0.len()
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.0.0.read(offset, out)
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.check()?;
            self.0.0.set_len(len)
        }

        fn sync_data(&self) -> io::Result<()> {
            self.check()?;
            self.0.0.sync_data()
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.check()?;
            self.0.0.write(offset, data)
        }
    }

    #[tokio::test]
    async fn a_disk_that_was_full_ends_nothing() {
        let disk = Disk(Arc::new((InMemoryBackend::new(), AtomicBool::new(false))));
        let file = File::new({
            let disk = disk.clone();
            move || Database::builder().create_with_backend(disk.clone())
        });
        let store = Embedded::over(file.unwrap()).unwrap();
        let key = |name: &str| Key::global(Kind::Namespace, name);
        let create = async |name: &str| store.create(&key(name), json!({"metadata": {"name": name}})).await;
        create("before").await.unwrap();
        let mut events = store.watch(&[Kind::Namespace], 1).await.unwrap();
        for round in 0..3 {
            disk.0.1.store(true, Ordering::SeqCst);
            for _ in 0..3 {
                let refused = create("meanwhile").await;
                assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
            }
            disk.0.1.store(false, Ordering::SeqCst);
            let name = format!("after-{round}");
            create(&name).await.unwrap();
            let Some(Ok(Event::Put(event))) = events.next().await else { panic!("the watch goes on") };
            assert_eq!(event.key, key(&name));
            assert!(store.get(&key("before")).await.unwrap().is_some());
        }
        assert_eq!(store.list(Kind::Namespace).await.unwrap().items.len(), 4);
    }

    /// A disk that hangs costs the memory of the requests that may wait, and the others are made later.
    #[tokio::test]
    async fn requests_beyond_the_limit_wait_for_room() {
        let store = Embedded::in_memory().unwrap();
        let (entered, is_held) = std::sync::mpsc::channel();
        let (open, gate) = std::sync::mpsc::channel::<()>();
        // A transaction of somebody else blocks the writer.
        let file = store.file.clone();
        thread::spawn(move || {
            file.write(|_| {
                entered.send(()).unwrap();
                let _ = gate.recv();
                Ok(())
            })
        });
        is_held.recv().unwrap();
        let count = 3 * MAX_WAITING;
        let creations = (0..count).map(|number| {
            let store = store.clone();
            let key = Key::global(Kind::Namespace, format!("n{number}"));
            tokio::spawn(async move { store.create(&key, json!(number)).await })
        });
        let creations: Vec<_> = creations.collect();
        while store.writer.capacity() > 0 {
            tokio::task::yield_now().await;
        }
        open.send(()).unwrap();
        for created in futures::future::join_all(creations).await {
            created.unwrap().unwrap();
        }
        assert_eq!(store.list(Kind::Namespace).await.unwrap().items.len(), count);
    }
}
