//! The thread that writes. It takes all waiting requests, executes them in one transaction, and answers when it is on disk:
//! under load many writes share one flush.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use redb::{ReadableTable, ReadableTableMetadata, Table};
use tokio::sync::mpsc;
use tortie_api::{Kind, Position};

use super::layout::{LATEST, LOG, OBJECTS};
use super::replay::replay;
use super::usage::{self, Room, Usage};
use super::{Answer, LOG_LENGTH, Latest, MAX_DEPTH, Request, Revision, ServedFile, latest, layout, records};
use crate::file::{File, failed};
use crate::follow::Event;
use crate::ring::Events;
use crate::{Interest, Stopped, StoreError, Stored, Write, Written, stored_json};

/// The maximum number of requests in a transaction.
const BATCH: usize = 256;

pub(super) struct Writer {
    pub(super) file: Arc<File>,
    pub(super) events: Events,
    pub(super) latest: Arc<Latest>,
    pub(super) served: Arc<ServedFile>,
    /// Watchers have received every event up to here.
    pub(super) sent: Revision,
    pub(super) room: Room,
    pub(super) usage: Usage,
    /// The bytes of the objects, for others.
    pub(super) used: Arc<AtomicU64>,
    pub(super) nearly_full: bool,
}

impl Writer {
    pub(super) fn run(&mut self, requests: &mut mpsc::Receiver<Request>) {
        self.set_usage(self.usage);
        let mut batch = Vec::new();
        while requests.blocking_recv_many(&mut batch, BATCH) > 0 {
            let (requests, answers): (Vec<_>, Vec<_>) =
                batch.drain(..).map(|Request { writes, limit, answer }| ((writes, limit), answer)).unzip();
            match self.write(requests) {
                Ok(Done { before, events, answers: results, usage }) => {
                    // Watchers may have missed what happened in a failed transaction, and the used room lacks it.
                    match before > self.sent {
                        true => self.catch_up(),
                        false => {
                            self.set_usage(usage);
                            self.tell(events);
                        }
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

    /// Tells once that the store is nearly full, until a tenth of it is free again.
    pub(super) fn set_usage(&mut self, usage: Usage) {
        let tenth = self.room.quota / 10;
        let was_told = self.nearly_full;
        self.nearly_full = usage.objects > 8 * tenth || (was_told && usage.objects > 7 * tenth);
        if self.nearly_full && !was_told {
            tracing::error!(
                bytes = usage.objects,
                quota = self.room.quota,
                "the store is nearly full: nodes create nothing any more. Delete what nobody needs, or serve it with a larger --quota"
            );
        }
        self.usage = usage;
        self.used.store(usage.objects, Ordering::Relaxed);
    }

    fn tell(&mut self, events: Vec<Event>) {
        let last = events.last().map_or(0, |event| event.position().0);
        self.sent = self.sent.max(last);
        self.served.told.store(self.sent, Ordering::SeqCst);
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
            // Nothing was committed, as on a full disk.
            Ok(replayed) if replayed.events.is_empty() => {}
            Ok(replayed) => {
                self.read_usage();
                self.tell(replayed.events);
            }
            Err(StoreError::Compacted(_)) => {
                self.read_usage();
                self.lose();
            }
            Err(error) => {
                tracing::error!(%error, "cannot read the written events; watchers receive them with the next write")
            }
        }
    }

    fn read_usage(&mut self) {
        match self.file.read(Usage::read) {
            Ok(usage) => self.set_usage(usage),
            Err(error) => tracing::error!(%error, "cannot read how much of the store is used"),
        }
    }

    /// Ends every watch, because its next events are lost.
    fn lose(&mut self) {
        match self.file.read(|transaction| latest(&transaction.open_table(LATEST).map_err(failed)?)) {
            Ok(latest) => {
                self.sent = latest;
                self.served.told.store(latest, Ordering::SeqCst);
                self.latest.advance_all(latest);
                self.events.lose();
            }
            Err(error) => {
                tracing::error!(%error, "cannot end the watches; Tortie retries with the next write")
            }
        }
    }

    /// Executes requests in one transaction, each with the limit of its client.
    fn write(&self, requests: Vec<(Vec<Write>, u64)>) -> Result<Done, StoreError> {
        self.file.write(|transaction| {
            let mut events = Vec::new();
            let mut answers = Vec::with_capacity(requests.len());
            let mut tables = Tables {
                objects: transaction.open_table(OBJECTS).map_err(failed)?,
                log: transaction.open_table(LOG).map_err(failed)?,
                latest: transaction.open_table(LATEST).map_err(failed)?,
                quota: self.room.quota,
                usage: self.usage,
                removed: None,
            };
            let before = latest(&tables.latest)?;
            for (writes, limit) in requests {
                answers.push(tables.carry_out_all(writes, limit, &mut events)?);
            }
            tables.shorten_log(self.room.log)?;
            let Tables { usage, removed, .. } = tables;
            removed.map_or(Ok(()), |removed| layout::set_removed(transaction, removed))?;
            Ok(Done { before, events, answers, usage })
        })
    }
}

/// The result of a transaction.
struct Done {
    /// The latest revision before it.
    before: Revision,
    events: Vec<Event>,
    /// The answer to each request.
    answers: Vec<Answer>,
    usage: Usage,
}

struct Tables<'txn> {
    objects: Table<'txn, (&'static str, &'static str, &'static str), &'static [u8]>,
    log: Table<'txn, Revision, (&'static str, &'static str, &'static str, &'static [u8])>,
    latest: Table<'txn, (), Revision>,
    quota: u64,
    usage: Usage,
    /// The last revision that was removed from the log in this transaction.
    removed: Option<Revision>,
}

impl Tables<'_> {
    /// The outer error comes from the file and ends the transaction; the inner one belongs to the request.
    fn carry_out_all(
        &mut self,
        writes: Vec<Write>,
        limit: u64,
        events: &mut Vec<Event>,
    ) -> Result<Answer, StoreError> {
        let mut done = Vec::with_capacity(writes.len());
        for write in writes {
            match self.carry_out(write, limit)? {
                Ok(event) => {
                    done.push(Written::at(event.position().0));
                    events.push(event);
                }
                Err(error) => return Ok(Err(Stopped { done, error })),
            }
        }
        Ok(Ok(done))
    }

    fn carry_out(&mut self, write: Write, limit: u64) -> Result<Result<Event, StoreError>, StoreError> {
        let key = write.key().clone();
        let path = (key.kind.plural(), key.namespace.as_str(), key.name.as_str());
        let current = self
            .objects
            .get(path)
            .map_err(failed)?
            .map(|record| (records::revision(path, record.value()), usage::bytes(path, record.value())));
        let old = current.map_or(0, |(_, bytes)| bytes);
        if let Some(error) = refused(&write, current.map(|(revision, _)| revision)) {
            return Ok(Err(error));
        }
        let revision = latest(&self.latest)? + 1;
        let (plural, namespace, name) = path;
        let event = match write {
            Write::Create(_, value) | Write::Update(_, value, _) => {
                let json = value.to_string();
                let object = records::object(path, revision, json.as_bytes());
                let new = usage::bytes(path, &object);
                if let Some(problem) = self.usage.refusal(old, new, limit, self.quota) {
                    return Ok(Err(StoreError::Full { key, problem }));
                }
                self.usage.objects = (self.usage.objects + new).saturating_sub(old);
                self.objects.insert(path, object.as_slice()).map_err(failed)?;
                self.log(path, revision, json.as_bytes())?;
                Event::Put(Stored::new(key, value, Written::at(revision)))
            }
            Write::Delete(..) => {
                self.usage.objects = self.usage.objects.saturating_sub(old);
                self.objects.remove((plural, namespace, name)).map_err(failed)?;
                self.log(path, revision, &[])?;
                Event::Deleted { key, position: Position(revision) }
            }
        };
        self.latest.insert((), revision).map_err(failed)?;
        Ok(Ok(event))
    }

    fn log(&mut self, path: records::Path<'_>, revision: Revision, json: &[u8]) -> Result<(), StoreError> {
        let logged = records::logged(path, revision, json);
        self.usage.log += usage::bytes(path, &logged);
        let (plural, namespace, name) = path;
        self.log.insert(revision, (plural, namespace, name, logged.as_slice())).map_err(failed)?;
        Ok(())
    }

    /// Removes the oldest writes of the log, but not the last one.
    fn shorten_log(&mut self, max_bytes: u64) -> Result<(), StoreError> {
        loop {
            let length = self.log.len().map_err(failed)?;
            if length <= 1 || (length <= LOG_LENGTH && self.usage.log <= max_bytes) {
                return Ok(());
            }
            let Some((revision, entry)) = self.log.pop_first().map_err(failed)? else { return Ok(()) };
            let (plural, namespace, name, record) = entry.value();
            let bytes = usage::bytes((plural, namespace, name), record);
            self.usage.log = self.usage.log.saturating_sub(bytes);
            self.removed = Some(revision.value());
        }
    }
}

/// Why a write is not done, if its object has this revision.
fn refused(write: &Write, current: Option<Revision>) -> Option<StoreError> {
    let key = || write.key().clone();
    match (write, current) {
        (Write::Create(..), Some(_)) => return Some(StoreError::AlreadyExists(key())),
        (Write::Update(..) | Write::Delete(..), None) => return Some(StoreError::NotFound(key())),
        (Write::Update(_, _, expected) | Write::Delete(_, Some(expected)), Some(current))
            if Written::at(current).version != *expected =>
        {
            return Some(StoreError::Conflict(key()));
        }
        _ => {}
    }
    match write {
        Write::Create(_, value) | Write::Update(_, value, _) if stored_json::is_deeper(value, MAX_DEPTH) => {
            let problem =
                format!("it is nested deeper than {MAX_DEPTH} levels, and could never be read again");
            Some(StoreError::Invalid { key: key(), problem })
        }
        _ => None,
    }
}
