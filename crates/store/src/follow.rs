//! Follows objects for ever: lists, watches, reconnects, and lists again where the history is lost. Each backend is a
//! [`Source`]; what is common to them is here, and what is pure is in the tracker.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::{self, Discriminant};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio::time::Instant;
use tortie_api::{Key, Kind, Position};

use crate::backoff::{Backoff, random_seed};
use crate::tracker::Tracker;
use crate::{Embedded, Interest, PageToken, SharedEvent, Store, StoreError, StoreId, Stored};

/// The maximum number of events between two reports of progress.
const MAX_BATCH: usize = 1_024;
/// The maximum delay before a kind is tried again that is absent or forbidden.
const MAX_RETRY: Duration = Duration::from_secs(30);

/// Objects and their changes, as [`Store::follow`] delivers them. It never ends.
pub type Follow = BoxStream<'static, Change>;

/// A change, as a follower receives it.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The object was created or updated, or is there already.
    Put(Stored),
    /// The object was deleted, or does not belong to the interest any more.
    Gone {
        /// Its key.
        key: Key,
        /// At or before this position.
        position: Position,
    },
    /// Everything that is stored of this kind, up to this position, has been delivered.
    InSync(Kind, Position),
    /// Everything up to this position of the kind has been delivered.
    Progress(Kind, Position),
    /// The history of the kind was lost, or may be another one now. Only differences are delivered, and [`InSync`] when
    /// they are complete.
    ///
    /// [`InSync`]: Self::InSync
    Restarted(Kind),
    /// The kind cannot be read: it is absent, or forbidden. What was delivered stays. It is tried again, and
    /// [`InSync`] tells that it can be read.
    ///
    /// [`InSync`]: Self::InSync
    Unavailable(Kind, StoreError),
}

/// An event of a watch.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The object was created or updated.
    Put(Stored),
    /// The object was deleted, or has left the interest.
    Deleted {
        /// Its key.
        key: Key,
        /// The position of the deletion.
        position: Position,
    },
    /// Everything up to this position has been delivered.
    Progress(Position),
}

impl Event {
    /// The position of the event.
    #[must_use]
    pub fn position(&self) -> Position {
        match self {
            Event::Put(stored) => stored.position,
            Event::Deleted { position, .. } | Event::Progress(position) => *position,
        }
    }
}

/// The events of a watch, in the order of their positions. After an error it ends.
pub type Watch = BoxStream<'static, Result<Event, StoreError>>;

/// The same, for a service whose clients share encoded events.
pub type SharedWatch = BoxStream<'static, Result<SharedEvent, StoreError>>;

/// What a backend provides for [`Store::follow`].
#[async_trait]
pub trait Source: Store {
    /// The identity of the store, if its backend has identities.
    fn id(&self) -> Option<StoreId> {
        None
    }

    /// The embedded store, if it is one: only that has backups.
    fn embedded(&self) -> Option<Embedded> {
        None
    }

    /// Splits interests into groups. The kinds of a group have one order of events, so that one watch serves them, and
    /// the position of an event applies to all of them.
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>>;

    /// Whether a watch finds out if positions still belong to the history of the store. After its end, none counts until then.
    fn proves_history(&self) -> bool {
        false
    }

    /// The changes of a group after a position, in order.
    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError>;

    /// The same changes. A backend that has many watchers in this process shares the events among them.
    async fn watch_shared(&self, interests: &[Interest], after: Position) -> Result<SharedWatch, StoreError> {
        let events = self.watch(interests, after).await?;
        Ok(events.map(|event| event.map(SharedEvent::new)).boxed())
    }
}

/// Follows a source.
pub fn follow(source: &Arc<impl Source + 'static>, interests: Vec<Interest>) -> Follow {
    let groups = source.groups(interests).into_iter();
    let followers = groups.map(|group| {
        stream::unfold(Follower::new(source.clone(), group), async |mut follower| {
            let change = follower.next().await;
            Some((change, follower))
        })
        .boxed()
    });
    stream::select_all(followers).boxed()
}

/// Follows one group.
struct Follower<S> {
    source: Arc<S>,
    /// The kinds, for messages.
    kinds: String,
    tracker: Tracker,
    /// The next page of the kind that is being listed.
    page: Option<(Kind, PageToken)>,
    watch: Option<Watch>,
    /// The changes that have not been delivered yet.
    ready: VecDeque<Change>,
    backoff: Backoff,
    /// When to try again to read kinds that cannot be read, and the delays between attempts.
    retries: BTreeMap<Kind, (Instant, Backoff)>,
    /// The kinds that have been reported as unavailable, and not been listed since.
    reported: BTreeSet<Kind>,
    /// The kind of error with which the last attempt failed.
    failing: Option<Discriminant<StoreError>>,
    /// What to wait for before the next attempt.
    pause: Pause,
}

/// A delay before the next attempt.
enum Pause {
    None,
    Backoff,
    For(Duration),
}

impl<S: Source> Follower<S> {
    fn new(source: Arc<S>, group: Vec<Interest>) -> Self {
        let kinds: Vec<&str> = group.iter().map(|interest| interest.kind.plural()).collect();
        Self {
            source,
            kinds: kinds.join(", "),
            tracker: Tracker::new(group),
            page: None,
            watch: None,
            ready: VecDeque::new(),
            backoff: Backoff::new(random_seed()),
            retries: BTreeMap::new(),
            reported: BTreeSet::new(),
            failing: None,
            pause: Pause::None,
        }
    }

    async fn next(&mut self) -> Change {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return change;
            }
            let mut changes = Vec::new();
            match mem::replace(&mut self.pause, Pause::None) {
                Pause::None => {}
                Pause::Backoff => self.backoff.wait().await,
                Pause::For(time) => tokio::time::sleep(time).await,
            }
            if let Err(error) = self.step(&mut changes).await {
                self.recover(&error, &mut changes);
            }
            self.tracker.progress(&mut changes);
            self.ready.extend(changes);
        }
    }

    /// Reads a page, opens the watch, or reads events.
    async fn step(&mut self, changes: &mut Vec<Change>) -> Result<(), StoreError> {
        if let Some(interest) = self.tracker.next_unlisted() {
            return self.list(&interest, changes).await;
        }
        if self.watch.is_none() {
            let Some((interests, after)) = self.tracker.to_watch() else {
                self.wait_for_retry().await;
                return Ok(());
            };
            match self.source.watch(&interests, after).await {
                Ok(watch) => {
                    self.watch = Some(watch);
                    self.tracker.resume(changes);
                }
                Err(error @ (StoreError::KindAbsent(_) | StoreError::Forbidden(_)))
                    if interests.len() == 1 =>
                {
                    interests.iter().for_each(|interest| self.lose(interest.kind, error.clone(), changes));
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            for kind in interests.iter().map(|interest| interest.kind) {
                if self.retries.remove(&kind).is_some() {
                    tracing::info!(kind = kind.plural(), "the kind can be read now");
                }
            }
        }
        self.read_events(changes).await
    }

    /// Reads the next page of a kind that is not completely listed.
    async fn list(&mut self, interest: &Interest, changes: &mut Vec<Change>) -> Result<(), StoreError> {
        // A watch that is open does not contain the kind.
        self.watch = None;
        let kind = interest.kind;
        let after = self.page.take().filter(|(of, _)| *of == kind).map(|(_, after)| after);
        if after.is_none() {
            self.tracker.list_again(kind);
        }
        let page = match self.source.list_page(interest, after).await {
            Ok(page) => page,
            Err(error @ (StoreError::KindAbsent(_) | StoreError::Forbidden(_))) => {
                self.lose(kind, error, changes);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.page = page.next.clone().map(|next| (kind, next));
        self.tracker.page(kind, page, changes);
        if self.page.is_none() {
            self.reported.remove(&kind);
        }
        Ok(())
    }

    /// Reads the next event, and those that are there already.
    async fn read_events(&mut self, changes: &mut Vec<Change>) -> Result<(), StoreError> {
        let ended = || StoreError::Unavailable("the watch ended".to_owned());
        let retry = self.next_retry();
        let Some(watch) = &mut self.watch else { return Ok(()) };
        let first = tokio::select! {
            event = watch.next() => event.ok_or_else(ended)??,
            () = sleep_until(retry) => {
                self.retry();
                return Ok(());
            }
        };
        let mut next = Some(first);
        let (mut count, mut changed) = (0, false);
        while let Some(event) = next.take() {
            if let Event::Put(Stored { key, .. }) | Event::Deleted { key, .. } = &event {
                tracing::debug!(position = event.position().0, object = %key, "an object has changed in the store");
            }
            changed |= !matches!(event, Event::Progress(_));
            self.tracker.event(event, changes);
            count += 1;
            if count < MAX_BATCH {
                next = match futures::FutureExt::now_or_never(watch.next()) {
                    Some(event) => Some(event.ok_or_else(ended)??),
                    None => None,
                };
            }
        }
        if changed {
            self.backoff.succeeded();
        }
        if self.failing.take().is_some() {
            tracing::info!(kinds = self.kinds, "the store is reachable again");
        }
        Ok(())
    }

    /// Decides what to do after an error. What was read before it is delivered first.
    fn recover(&mut self, error: &StoreError, changes: &mut Vec<Change>) {
        self.watch = None;
        self.page = None;
        // Also after lost history, because a burst of writes makes every follower lose it at the same time.
        self.pause = Pause::Backoff;
        if self.source.proves_history() {
            self.tracker.interrupt(changes);
        }
        match error {
            StoreError::Throttled(after) => self.pause = Pause::For(*after),
            StoreError::Compacted(_) | StoreError::FellBehind => {
                tracing::info!(%error, kinds = self.kinds, "the watch cannot continue; Tortie lists everything again");
                self.tracker.restart(changes);
            }
            StoreError::OtherHistory => {
                tracing::warn!(%error, kinds = self.kinds, "Tortie lists everything again");
                self.tracker.restart(changes);
                self.tracker.forget_positions();
            }
            // The listing tells which of several kinds it is about.
            StoreError::KindAbsent(_) | StoreError::Forbidden(_) => self.tracker.restart(changes),
            error if self.failing != Some(mem::discriminant(error)) => {
                tracing::warn!(%error, kinds = self.kinds, "the store cannot be read; what is known stays in force, and Tortie reconnects");
                self.failing = Some(mem::discriminant(error));
            }
            error => tracing::debug!(%error, kinds = self.kinds, "the store still cannot be read"),
        }
    }

    fn lose(&mut self, kind: Kind, error: StoreError, changes: &mut Vec<Change>) {
        let fresh = || (Instant::now(), Backoff::new(random_seed()).with_max(MAX_RETRY));
        let is_new = !self.retries.contains_key(&kind);
        let (at, backoff) = self.retries.entry(kind).or_insert_with(fresh);
        *at = backoff.failed(Instant::now().into_std()).into();
        if is_new {
            tracing::warn!(%error, kind = kind.plural(), "the kind cannot be read; Tortie goes on without it and retries");
        }
        self.tracker.lose(kind);
        if self.reported.insert(kind) {
            changes.push(Change::Unavailable(kind, error));
        }
    }

    fn next_retry(&self) -> Option<Instant> {
        self.retries.values().map(|(at, _)| *at).min()
    }

    async fn wait_for_retry(&mut self) {
        sleep_until(self.next_retry()).await;
        self.retry();
    }

    /// Lists the kinds again whose time has come.
    fn retry(&mut self) {
        let unavailable: Vec<Kind> = self.tracker.unavailable().collect();
        for kind in unavailable {
            if self.retries.get(&kind).is_none_or(|(at, _)| *at <= Instant::now()) {
                self.tracker.list_again(kind);
            }
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
