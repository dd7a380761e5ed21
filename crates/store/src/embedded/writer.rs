//! The thread that writes. It takes all waiting requests, executes them in one transaction, and answers when it is on disk:
//! under load many writes share one flush.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use redb::{ReadableTable, ReadableTableMetadata, Table};
use tokio::sync::mpsc;
use tortie_api::{Kind, Position};

use super::layout::{LATEST, LOG, OBJECTS};
use super::replay::replay;
use super::{Answer, LOG_LENGTH, Latest, MAX_DEPTH, Request, Revision, ServedFile, latest, records};
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
}

impl Writer {
    pub(super) fn run(&mut self, requests: &mut mpsc::Receiver<Request>) {
        let mut batch = Vec::new();
        while requests.blocking_recv_many(&mut batch, BATCH) > 0 {
            let (requests, answers): (Vec<_>, Vec<_>) =
                batch.drain(..).map(|request| (request.writes, request.answer)).unzip();
            match self.write(requests) {
                Ok((before, events, results)) => {
                    // Watchers may have missed what happened in a failed transaction.
                    match before > self.sent {
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
            Ok(replayed) => self.tell(replayed.events),
            Err(StoreError::Compacted(_)) => self.lose(),
            Err(error) => {
                tracing::error!(%error, "cannot read the written events; watchers receive them with the next write")
            }
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

    /// Executes requests in one transaction. Returns the latest revision before it, the events, and the answer to each
    /// request.
    fn write(&self, requests: Vec<Vec<Write>>) -> Result<(Revision, Vec<Event>, Vec<Answer>), StoreError> {
        self.file.write(|transaction| {
            let mut events = Vec::new();
            let mut answers = Vec::with_capacity(requests.len());
            let mut tables = Tables {
                objects: transaction.open_table(OBJECTS).map_err(failed)?,
                log: transaction.open_table(LOG).map_err(failed)?,
                latest: transaction.open_table(LATEST).map_err(failed)?,
            };
            let before = latest(&tables.latest)?;
            for writes in requests {
                answers.push(tables.carry_out_all(writes, &mut events)?);
            }
            Ok((before, events, answers))
        })
    }
}

struct Tables<'txn> {
    objects: Table<'txn, (&'static str, &'static str, &'static str), &'static [u8]>,
    log: Table<'txn, Revision, (&'static str, &'static str, &'static str, &'static [u8])>,
    latest: Table<'txn, (), Revision>,
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
        let current =
            self.objects.get(path).map_err(failed)?.map(|record| records::revision(path, record.value()));
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
                let object = records::object(path, revision, json.as_bytes());
                self.objects.insert(path, object.as_slice()).map_err(failed)?;
                let logged = records::logged(path, revision, json.as_bytes());
                self.log.insert(revision, (plural, namespace, name, logged.as_slice())).map_err(failed)?;
                Event::Put(Stored::new(key, value, Written::at(revision)))
            }
            Write::Delete(..) => {
                self.objects.remove(path).map_err(failed)?;
                let logged = records::logged(path, revision, &[]);
                self.log.insert(revision, (plural, namespace, name, logged.as_slice())).map_err(failed)?;
                Event::Deleted { key, position: Position(revision) }
            }
        };
        if self.log.len().map_err(failed)? > LOG_LENGTH {
            self.log.pop_first().map_err(failed)?;
        }
        Ok(Ok(event))
    }
}
