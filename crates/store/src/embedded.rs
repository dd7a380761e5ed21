//! The embedded backend: one file (redb), a revision for each write, and a log of the latest writes for watchers.
//!
//! One thread writes. It takes all waiting requests, executes them in one transaction, and answers when it is on
//! disk: under load many writes share one flush. Readers use snapshots and wait for nobody.

mod log_watch;

use std::fs;
use std::ops::Bound;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use async_trait::async_trait;
use futures::StreamExt;
use redb::backends::InMemoryBackend;
use redb::{Database, ReadTransaction, ReadableTable, Table, TableDefinition};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tortie_api::{Key, Kind, Position, Positions};

use self::log_watch::LogWatch;
use crate::file::{File, failed};
use crate::follow::{self, Event, Follow, Source, Watch};
use crate::ring::Events;
use crate::{
    Endpoints, Interest, Page, PageToken, SharedEvent, SharedWatch, Stopped, Store, StoreError, Stored,
    Version, Write, Written, stored_json,
};

/// Objects: `(plural, namespace, name)` → revision (8 bytes, big-endian) and the value as JSON.
const OBJECTS: TableDefinition<(&str, &str, &str), &[u8]> = TableDefinition::new("objects");
/// The log: revision → `(plural, namespace, name, value)`; an empty value is a deletion.
const LOG: TableDefinition<u64, (&str, &str, &str, &[u8])> = TableDefinition::new("log");
/// The latest revision, under the only key.
const LATEST: TableDefinition<(), u64> = TableDefinition::new("latest");

/// The number of writes in the log.
const LOG_LENGTH: u64 = 20_000;
/// The maximum size of a page, in objects and in bytes of JSON.
const MAX_PAGE: (usize, usize) = (1_000, 4 << 20);
/// The maximum nesting of a value. The parser reads at most 128 levels.
const MAX_DEPTH: usize = 100;
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
    latest: Arc<Latest>,
}

/// The number of writes so far: the version and the position of the last one.
type Revision = u64;

struct Request {
    writes: Vec<Write>,
    answer: oneshot::Sender<Answer>,
}

type Answer = Result<Vec<Written>, Stopped>;

impl Embedded {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// The file cannot be read or written, is in use by another process, or is not a store.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let own = path.to_owned();
        let create = move || {
            let mut options = fs::OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            // Secrets may be in objects, so the file is the owner's only, whatever the umask.
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            options.open(&own).map_err(redb::StorageError::from)?;
            Database::create(&own)
        };
        let opened = File::new(create).and_then(Self::over);
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
        let sent = file.write(|transaction| {
            transaction.open_table(OBJECTS).map_err(failed)?;
            transaction.open_table(LOG).map_err(failed)?;
            latest(&transaction.open_table(LATEST).map_err(failed)?)
        })?;
        let latest = Arc::new(file.read(Latest::read)?);
        let file = Arc::new(file);

        let (writer, mut requests) = mpsc::channel(MAX_WAITING);
        let events = Events::new();
        let mut thread = Writer { file: file.clone(), events: events.clone(), latest: latest.clone(), sent };
        thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || thread.run(&mut requests))
            .map_err(|error| StoreError::Unavailable(format!("its writer cannot be started: {error}")))?;
        Ok(Self { file, writer, events, latest })
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

/// The position of the last write of each kind.
struct Latest(Mutex<Positions>);

impl Latest {
    /// From the log. Kinds whose last write is not in the log any more get the position before it.
    fn read(transaction: &ReadTransaction) -> Result<Self, StoreError> {
        let log = transaction.open_table(LOG).map_err(failed)?;
        let oldest = log.first().map_err(failed)?.map_or(0, |(revision, _)| revision.value());
        let before = Position(oldest.saturating_sub(1));
        let mut positions: Positions = Kind::all().map(|kind| (kind, before)).collect();
        for entry in log.iter().map_err(failed)? {
            let (revision, entry) = entry.map_err(failed)?;
            let plural = entry.value().0;
            if let Some(kind) = Kind::all().find(|kind| kind.plural() == plural) {
                positions.advance(kind, Position(revision.value()));
            }
        }
        Ok(Self(Mutex::new(positions)))
    }

    fn advance(&self, events: &[Event]) {
        let mut positions = self.lock();
        for event in events {
            if let Event::Put(Stored { key, .. }) | Event::Deleted { key, .. } = event {
                positions.advance(key.kind, event.position());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Positions> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Events of the log.
struct Replayed {
    events: Vec<Event>,
    /// They reach up to here.
    reached: Revision,
    /// Whether these are all.
    complete: bool,
}

/// The logged events after a revision, up to a number of bytes (but at least one event).
fn replay(
    file: &File,
    interests: &[Interest],
    after: Revision,
    max_bytes: usize,
) -> Result<Replayed, StoreError> {
    file.read(|transaction| {
        let latest = latest(&transaction.open_table(LATEST).map_err(failed)?)?;
        let log = transaction.open_table(LOG).map_err(failed)?;
        let oldest = log.first().map_err(failed)?.map_or(latest + 1, |(revision, _)| revision.value());
        let next = after.saturating_add(1);
        // A position of the future comes from another store, or from one that was restored from an older copy.
        if next < oldest || after > latest {
            return Err(StoreError::Compacted(Position(after)));
        }
        let (mut events, mut bytes) = (Vec::new(), 0);
        for entry in log.range(next..).map_err(failed)? {
            let (revision, entry) = entry.map_err(failed)?;
            let (plural, namespace, name, value) = entry.value();
            let Some(interest) = interests.iter().find(|it| it.kind.plural() == plural) else { continue };
            let revision = revision.value();
            bytes += value.len();
            if bytes > max_bytes && !events.is_empty() {
                return Ok(Replayed { events, reached: revision - 1, complete: false });
            }
            let key = Key::namespaced(interest.kind, namespace, name);
            let event = match value {
                [] => Event::Deleted { key, position: Position(revision) },
                json => {
                    let value = stored_json::decode(&key, json);
                    Event::Put(Stored::new(key, value, Written::at(revision)))
                }
            };
            events.push(narrowed(event, interests));
        }
        Ok(Replayed { events, reached: latest, complete: true })
    })
}

/// The event as it concerns a follower with these interests: an object outside of them is gone for it.
fn narrowed(event: Event, interests: &[Interest]) -> Event {
    match event {
        Event::Put(stored) if !interests.iter().any(|it| it.covers(&stored.key, &stored.value)) => {
            Event::Deleted { position: stored.position, key: stored.key }
        }
        event => event,
    }
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
        let (answer, answered) = oneshot::channel();
        self.writer.send(Request { writes, answer }).await.map_err(|_| stopped())?;
        answered.await.map_err(|_| stopped())?
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        follow::follow(&Arc::new(self.clone()), interests)
    }

    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        let latest = self.latest.lock();
        Ok(kinds.iter().filter_map(|kind| Some((*kind, latest.of(*kind)?))).collect())
    }
}

impl Endpoints for Embedded {}

#[async_trait]
impl Source for Embedded {
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
            let stored = decode(Key::namespaced(interest.kind, namespace, name), record.value())?;
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

struct Writer {
    file: Arc<File>,
    events: Events,
    latest: Arc<Latest>,
    /// Watchers have received every event up to here.
    sent: Revision,
}

impl Writer {
    fn run(&mut self, requests: &mut mpsc::Receiver<Request>) {
        let mut batch = Vec::new();
        while requests.blocking_recv_many(&mut batch, BATCH) > 0 {
            let (requests, answers): (Vec<_>, Vec<_>) =
                batch.drain(..).map(|request| (request.writes, request.answer)).unzip();
            match self.write(requests) {
                Ok((events, results)) => {
                    let first = events.first().map_or(0, |event| event.position().0);
                    // Watchers may have missed what happened in a failed transaction.
                    match first > self.sent + 1 {
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
        let last = events.last().map_or(0, |event| event.position().0);
        self.sent = self.sent.max(last);
        self.latest.advance(&events);
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
        let all: Vec<Interest> = Kind::all().map(Interest::all).collect();
        match replay(&self.file, &all, self.sent, usize::MAX) {
            Ok(replayed) => self.tell(replayed.events),
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
                    done.push(Written::at(event.position().0));
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
                if Written::at(current).version != *expected =>
            {
                return Ok(Err(StoreError::Conflict(key)));
            }
            _ => {}
        }
        if let Write::Create(_, value) | Write::Update(_, value, _) = &write
            && stored_json::is_deeper(value, MAX_DEPTH)
        {
            let problem =
                format!("it is nested deeper than {MAX_DEPTH} levels, and could never be read again");
            return Ok(Err(StoreError::Invalid { key, problem }));
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
                Event::Put(Stored::new(key, value, Written::at(revision)))
            }
            Write::Delete(..) => {
                self.objects.remove(path).map_err(failed)?;
                self.log.insert(revision, (plural, namespace, name, &[][..])).map_err(failed)?;
                Event::Deleted { key, position: Position(revision) }
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
    let value = stored_json::decode(&key, &bytes[size_of::<Revision>()..]);
    Ok(Stored::new(key, value, Written::at(revision)))
}

fn stopped() -> StoreError {
    StoreError::Unavailable("its writer has stopped".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use redb::{StorageBackend, WriteTransaction};
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
        let mut events = store.watch(&[Interest::all(Kind::Namespace)], Position(1)).await.unwrap();
        assert_eq!(events.next().await, Some(Ok(Event::Progress(Position(1)))));
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

    /// A damaged record is an object that no reader understands; the others of its kind are not affected.
    #[tokio::test]
    async fn a_damaged_record_stays_alone() {
        let store = Embedded::in_memory().unwrap();
        let key = |name: &str| Key::global(Kind::Namespace, name);
        for name in ["damaged", "whole"] {
            store.create(&key(name), json!({"metadata": {"name": name}})).await.unwrap();
        }
        let damage = |transaction: &WriteTransaction| {
            let mut objects = transaction.open_table(OBJECTS).map_err(failed)?;
            let record = [&1_u64.to_be_bytes()[..], b"{\"metadata\":"].concat();
            objects.insert(("namespaces", "", "damaged"), record.as_slice()).map_err(failed)?;
            let mut log = transaction.open_table(LOG).map_err(failed)?;
            log.insert(1, ("namespaces", "", "damaged", &b"{\"metadata\":"[..])).map_err(failed)?;
            Ok(())
        };
        store.file.write(damage).unwrap();
        let text = json!("{\"metadata\":");
        let listed = store.list(Kind::Namespace).await.unwrap().items;
        assert_eq!(
            listed.iter().map(|it| &it.value).collect::<Vec<_>>(),
            [&text, &json!({"metadata": {"name": "whole"}})]
        );
        let mut events = store.watch(&[Interest::all(Kind::Namespace)], Position(0)).await.unwrap();
        for expected in [&text, &listed[1].value] {
            let Some(Ok(Event::Put(stored))) = events.next().await else { panic!("both are delivered") };
            assert_eq!(stored.value, *expected);
        }
        let repaired = json!({"metadata": {"name": "damaged"}});
        store.update(&key("damaged"), repaired.clone(), &listed[0].version).await.unwrap();
        assert_eq!(store.get(&key("damaged")).await.unwrap().unwrap().value, repaired);
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
