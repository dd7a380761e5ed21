//! The state machine of a session (RFC 4271 8): input and the time in, output out.
//!
//! A session has up to one connection that is established, and others that compete to become it. What the standard
//! describes as one machine for each connection is [`Phase`]; collisions are decided between connections.

mod backoff;
mod connection;
mod jitter;
mod negotiation;

use std::time::Duration;

pub use negotiation::{Negotiated, SessionSettings};

use self::backoff::Backoff;
use self::connection::{Connection, End, Phase};
use self::jitter::Jitter;
use self::negotiation::negotiate;
use crate::codec::notification::{cease, code};
use crate::codec::{
    Families, Family, Message, Notification, RefreshKind, Update, encode_keepalive, encode_notification,
    encode_open,
};

/// The time since some fixed instant.
pub type Time = Duration;

/// The hold time until the peer's OPEN is there (RFC 4271 8.2.2 suggests four minutes).
const LARGE_HOLD_TIME: Duration = Duration::from_secs(240);
/// The longest time to wait for a peer after errors.
const LONGEST_RETRY: Duration = Duration::from_secs(120);
/// An established session that is younger wins against a new connection: both may come from one collision.
const YOUNG: Duration = Duration::from_secs(10);
/// How long an established connection may take to end after a probe.
const PROBE: Duration = Duration::from_secs(5);
/// When the shell looks whether the peer's system has acknowledged the probe.
pub(crate) const LOOK: Duration = Duration::from_secs(4);
/// A probed connection is lost if something is outstanding then, and nothing was acknowledged for this long.
pub(crate) const UNACKNOWLEDGED: Duration = Duration::from_secs(3);
/// How long a peer that came back may take to send its routes.
const LONGEST_INITIAL_UPDATE: Duration = Duration::from_secs(360);
/// The longest delay of the first attempt to connect.
const FIRST_DELAY: Duration = Duration::from_millis(100);

/// A connection, by a number that its opener chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// What a session is told.
#[derive(Debug)]
pub enum Input<'a> {
    /// Begin.
    Start,
    /// End, and tell the peer why.
    Stop(Notification),
    /// End, tell the peer why, and try again after a while.
    Reset(Notification),
    /// Time has passed.
    Tick,
    /// The requested connection is there.
    Connected(ConnectionId),
    /// The requested connection did not come about.
    ConnectFailed,
    /// The peer has connected.
    Accepted(ConnectionId),
    /// A whole message of the peer, or an error in its header.
    Received(ConnectionId, Result<&'a [u8], Notification>),
    /// The connection has ended.
    Closed(ConnectionId),
}

/// What a session wants.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// Connect to the peer; answer with `Connected` or `ConnectFailed`.
    Connect,
    /// Send these bytes.
    Send(ConnectionId, Vec<u8>),
    /// The next bytes show whether the peer still has the connection: end it if the peer's system does not acknowledge them within some seconds.
    Probe(ConnectionId),
    /// End the connection after what was sent before.
    Close(ConnectionId),
    /// The session is established. All routes are to be sent, then the end of the first routes.
    Up(ConnectionId),
    /// The session has ended. Routes of these families become stale, the others go.
    Down(Families),
    /// Stale routes of these families go.
    Forget(Families),
    /// The peer sent routes.
    Update(Update),
    /// The peer says something about routes that are sent again.
    Refresh(Family, RefreshKind),
}

/// The state of a session (RFC 4271 8.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are those of the standard")]
pub enum State {
    Idle,
    Active,
    Connect,
    OpenSent,
    OpenConfirm,
    Established,
}

/// A session with one peer.
#[derive(Debug)]
pub struct Session {
    settings: SessionSettings,
    jitter: Jitter,
    is_started: bool,
    is_connecting: bool,
    /// Whether this end has just restarted, and still waits for its peers' routes.
    restarted: bool,
    connections: Vec<Connection>,
    retry_at: Option<Time>,
    /// Connections of the peer are rejected until then.
    refuse_until: Option<Time>,
    backoff: Backoff,
    /// The families with stale routes, and until when they may be.
    stale: Families,
    stale_until: Option<Time>,
    last_error: Option<String>,
    established: u64,
}

impl Session {
    /// A session that is not started. The seed decides about its delays.
    #[must_use]
    pub fn new(settings: SessionSettings, seed: u64) -> Self {
        Self {
            settings,
            jitter: Jitter::new(seed),
            is_started: false,
            is_connecting: false,
            restarted: false,
            connections: Vec::new(),
            retry_at: None,
            refuse_until: None,
            backoff: Backoff::default(),
            stale: Families::default(),
            stale_until: None,
            last_error: None,
            established: 0,
        }
    }

    /// Says whether this end has just restarted, with its forwarding state preserved.
    pub fn set_restarted(&mut self, restarted: bool) {
        self.restarted = restarted;
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &SessionSettings {
        &self.settings
    }

    /// The state of the connection that is furthest.
    #[must_use]
    pub fn state(&self) -> State {
        let of = |connection: &Connection| match connection.phase {
            Phase::OpenSent | Phase::Waiting { .. } => State::OpenSent,
            Phase::OpenConfirm(_) => State::OpenConfirm,
            Phase::Established { .. } => State::Established,
        };
        let idle = match () {
            () if !self.is_started => State::Idle,
            () if self.is_connecting => State::Connect,
            () => State::Active,
        };
        self.connections.iter().map(of).max().unwrap_or(idle)
    }

    /// What was agreed on, and since when, while the session is established.
    #[must_use]
    pub fn negotiated(&self) -> Option<(&Negotiated, Time)> {
        self.connections.iter().find_map(|connection| match &connection.phase {
            Phase::Established { negotiated, since } => Some((negotiated, *since)),
            _ => None,
        })
    }

    /// The established connection.
    #[must_use]
    pub fn connection(&self) -> Option<ConnectionId> {
        self.connections.iter().find(|connection| connection.is_established()).map(|connection| connection.id)
    }

    /// Why the last connection ended.
    #[must_use]
    pub fn last_error(&self) -> Option<&str> {
        self.last_error.as_deref()
    }

    /// How often the session was established.
    #[must_use]
    pub fn established(&self) -> u64 {
        self.established
    }

    /// The families whose stale routes are kept.
    #[must_use]
    pub fn stale(&self) -> Families {
        self.stale
    }

    /// When the next timer expires.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        let timers = self.connections.iter().flat_map(|it| [it.hold_at, it.keepalive_at, it.waits_until()]);
        timers.chain([self.retry_at, self.stale_until]).flatten().min()
    }

    /// Handles an input at this time.
    pub fn handle(&mut self, now: Time, input: Input<'_>) -> Vec<Output> {
        let mut out = Vec::new();
        match input {
            Input::Start => self.start(now),
            Input::Stop(notification) => self.stop(now, &notification, &mut out),
            Input::Reset(notification) => self.reset(now, notification, &mut out),
            Input::Tick => self.tick(now, &mut out),
            Input::Connected(id) => {
                self.is_connecting = false;
                self.opened(now, id, true, &mut out);
            }
            Input::ConnectFailed => {
                self.is_connecting = false;
                self.backoff.failed();
                self.retry(now);
            }
            Input::Accepted(id) => self.opened(now, id, false, &mut out),
            Input::Received(id, message) => self.received(now, id, message, &mut out),
            Input::Closed(id) => {
                if let Some(index) = self.index(id) {
                    self.end(now, index, End::Lost, &mut out);
                }
            }
        }
        out
    }

    fn index(&self, id: ConnectionId) -> Option<usize> {
        self.connections.iter().position(|connection| connection.id == id)
    }

    fn start(&mut self, now: Time) {
        if !self.is_started {
            self.is_started = true;
            if !self.settings.passive {
                self.retry_at = Some(now + self.jitter.below(FIRST_DELAY));
            }
        }
    }

    fn stop(&mut self, now: Time, notification: &Notification, out: &mut Vec<Output>) {
        self.is_started = false;
        while !self.connections.is_empty() {
            self.end(now, 0, End::Send(self.firmly(notification.clone())), out);
        }
        self.retry_at = None;
        self.forget_all(out);
    }

    fn reset(&mut self, now: Time, notification: Notification, out: &mut Vec<Output>) {
        let notification = self.firmly(notification);
        // The established one is the first, so none that waits for its end is left then.
        while let Some(last) = self.connections.len().checked_sub(1) {
            self.end(now, last, End::Send(notification.clone()), out);
        }
        self.forget_all(out);
    }

    /// The notification in the form after which the peer keeps no routes, if it would keep some otherwise.
    fn firmly(&self, notification: Notification) -> Notification {
        let keeps = |(negotiated, _): (&Negotiated, Time)| {
            negotiated.graceful_restart.as_ref().is_some_and(|restart| restart.notification)
        };
        if self.negotiated().is_some_and(keeps) { notification.hard() } else { notification }
    }

    fn forget_all(&mut self, out: &mut Vec<Output>) {
        let stale = std::mem::take(&mut self.stale);
        self.stale_until = None;
        if !stale.is_empty() {
            out.push(Output::Forget(stale));
        }
    }

    fn tick(&mut self, now: Time, out: &mut Vec<Output>) {
        let is_due = |at: Option<Time>| at.is_some_and(|at| at <= now);
        self.connections.iter_mut().for_each(|connection| connection.prolong(now));
        while let Some(index) = self.connections.iter().position(|connection| is_due(connection.hold_at)) {
            self.end(now, index, End::Send(Notification::new(code::HOLD_TIMER_EXPIRED, 0)), out);
        }
        while let Some(index) = self.connections.iter().position(|it| is_due(it.waits_until())) {
            // The peer's system has acknowledged the probe, or this one does not tell (Windows) and was not reset.
            self.end(now, index, End::Send(Notification::new(code::CEASE, cease::COLLISION)), out);
        }
        for index in 0..self.connections.len() {
            if is_due(self.connections[index].keepalive_at) {
                self.keepalive(now, index, out);
            }
        }
        if is_due(self.stale_until) {
            self.forget_all(out);
        }
        if is_due(self.retry_at) {
            self.retry_at = None;
            let is_served =
                self.is_connecting || self.connections.iter().any(|c| c.outgoing || c.is_established());
            if self.is_started && !is_served {
                self.is_connecting = true;
                out.push(Output::Connect);
            }
        }
    }

    /// Sends a KEEPALIVE, and sets the timer of the next.
    fn keepalive(&mut self, now: Time, index: usize, out: &mut Vec<Output>) {
        let connection = &mut self.connections[index];
        out.push(Output::Send(connection.id, encode_keepalive()));
        let Some(negotiated) = connection.negotiated() else { return };
        let third = negotiated.hold_time / 3;
        let seconds = self.settings.keepalive_time.map_or(third, |time| time.min(third));
        connection.keepalive_at = (negotiated.hold_time > 0)
            .then(|| now + self.jitter.shortened(Duration::from_secs(seconds.max(1).into())));
    }

    /// Sets the timer of the next attempt to connect.
    fn retry(&mut self, now: Time) {
        if !self.is_started || self.settings.passive || self.retry_at.is_some() {
            return;
        }
        let usual = Duration::from_secs(self.settings.connect_retry.max(1).into());
        let delay = self.backoff.delay(usual);
        self.retry_at = Some(now + self.jitter.shortened(delay));
    }

    /// A new connection, by whoever.
    fn opened(&mut self, now: Time, id: ConnectionId, outgoing: bool, out: &mut Vec<Output>) {
        let is_refused = self.refuse_until.is_some_and(|until| now < until);
        let is_superfluous = outgoing && self.connection().is_some();
        if !self.is_started || is_refused || is_superfluous {
            let subcode = if is_superfluous { cease::COLLISION } else { cease::CONNECTION_REJECTED };
            out.push(Output::Send(id, encode_notification(&Notification::new(code::CEASE, subcode))));
            out.push(Output::Close(id));
            return;
        }
        // The peer would not connect again if the earlier connection was of any use to it.
        while let Some(index) =
            self.connections.iter().position(|other| other.outgoing == outgoing && !other.is_established())
        {
            self.end(now, index, End::Send(Notification::new(code::CEASE, cease::COLLISION)), out);
        }
        // A lost session has not changed what the kernel does. Without the flag, the peer would remove the routes that it has kept
        // (RFC 4724 4.2, RFC 8538 4).
        let has_forwarded = self.restarted || self.established > 0;
        out.push(Output::Send(id, encode_open(&self.settings.open(self.restarted, has_forwarded))));
        self.connections.push(Connection {
            id,
            outgoing,
            phase: Phase::OpenSent,
            hold_at: Some(now + LARGE_HOLD_TIME),
            is_prolonged: false,
            keepalive_at: None,
        });
    }

    fn received(
        &mut self,
        now: Time,
        id: ConnectionId,
        bytes: Result<&[u8], Notification>,
        out: &mut Vec<Output>,
    ) {
        let Some(index) = self.index(id) else { return };
        let context = self.connections[index].negotiated().map(|negotiated| negotiated.context);
        let context = context.unwrap_or(crate::codec::Context {
            four_octet: true,
            internal: self.settings.is_internal(),
            extended_next_hop: false,
            families: Families::default(),
        });
        let message = bytes.and_then(|bytes| Message::decode(bytes, &context));
        let message = match message {
            Ok(Message::Notification(notification)) => {
                return self.end(now, index, End::Received(notification), out);
            }
            Ok(message) => message,
            Err(notification) => return self.end(now, index, End::Send(notification), out),
        };
        let connection = &mut self.connections[index];
        let was_established = connection.is_established();
        match (&mut connection.phase, message) {
            (Phase::OpenSent, Message::Open(open)) => self.opened_by_peer(now, index, &open, out),
            (Phase::Waiting { is_confirmed, .. }, Message::Keepalive) => *is_confirmed = true,
            (Phase::OpenConfirm(_), Message::Keepalive) => {
                connection.heard(now);
                self.establish(now, index, out);
            }
            (Phase::Established { .. }, Message::Keepalive) => connection.heard(now),
            (Phase::Established { .. }, Message::Update(update)) => {
                connection.heard(now);
                if let Some(family) = update.end_of_rib
                    && self.stale.remove(family)
                    && self.stale.is_empty()
                {
                    self.stale_until = None;
                }
                out.push(Output::Update(update));
            }
            (Phase::Established { negotiated, .. }, Message::RouteRefresh { afi, safi, kind }) => {
                let family = Family::from_numbers(afi, safi);
                let family = family.filter(|family| negotiated.context.families.contains(*family));
                let is_known = match kind {
                    RefreshKind::Request => true,
                    RefreshKind::Begin | RefreshKind::End => negotiated.enhanced_refresh,
                    RefreshKind::Other(_) => false,
                };
                connection.heard(now);
                out.extend(family.filter(|_| is_known).map(|family| Output::Refresh(family, kind)));
            }
            // RFC 6608: the subcode is the state.
            (phase, _) => {
                let subcode = match phase {
                    Phase::OpenSent => 1,
                    Phase::Waiting { .. } | Phase::OpenConfirm(_) => 2,
                    Phase::Established { .. } => 3,
                };
                let notification = Notification::new(code::FINITE_STATE_MACHINE, subcode);
                self.end(now, index, End::Send(notification), out);
            }
        }
        if was_established && self.connection() == Some(id) {
            // The peer is there. What it sent before a crash would count, too: then its next attempt succeeds.
            while let Some(index) = self.connections.iter().position(|it| it.waits_until().is_some()) {
                self.end(now, index, End::Send(Notification::new(code::CEASE, cease::COLLISION)), out);
            }
        }
    }

    /// The OPEN of the peer on one of the connections.
    fn opened_by_peer(&mut self, now: Time, index: usize, open: &crate::codec::Open, out: &mut Vec<Output>) {
        let negotiated = match negotiate(&self.settings, open) {
            Ok(negotiated) => negotiated,
            Err(notification) => return self.end(now, index, End::Send(notification), out),
        };
        let id = self.connections[index].id;
        if !self.survives_collision(now, index, &negotiated, out) {
            return;
        }
        let Some(index) = self.index(id) else { return };
        self.confirm(now, index, negotiated, out);
    }

    /// Confirms the OPEN of the peer.
    fn confirm(&mut self, now: Time, index: usize, negotiated: Negotiated, out: &mut Vec<Output>) {
        let hold_time = Duration::from_secs(negotiated.hold_time.into());
        let connection = &mut self.connections[index];
        connection.hold_at = (!hold_time.is_zero()).then(|| now + hold_time);
        connection.phase = Phase::OpenConfirm(negotiated);
        self.keepalive(now, index, out);
    }

    /// Decides between this connection and others (RFC 4271 6.8, RFC 4724 5), and ends those that lose.
    fn survives_collision(
        &mut self,
        now: Time,
        index: usize,
        peer: &Negotiated,
        out: &mut Vec<Output>,
    ) -> bool {
        let collision = || End::Send(Notification::new(code::CEASE, cease::COLLISION));
        let (id, is_outgoing) = (self.connections[index].id, self.connections[index].outgoing);
        if let Some((negotiated, since)) = self.negotiated() {
            // A peer that connects again may have restarted, if it can. So may somebody who has its address, so the old connection
            // has to show it: a peer without it resets it, or acknowledges nothing (unlike RFC 4724 5, which believes the new one).
            let may_have_restarted =
                !negotiated.retainable().is_empty() && now.saturating_sub(since) >= YOUNG;
            if !may_have_restarted || is_outgoing {
                // Without a hold time, nothing else finds out that the peer has lost the old connection.
                let silent =
                    self.connections.iter().find(|old| old.is_established() && old.hold_at.is_none());
                out.extend(silent.map(|old| Output::Send(old.id, encode_keepalive())));
                self.end(now, index, collision(), out);
                return false;
            }
            let old = self.connection();
            out.extend(
                old.into_iter().flat_map(|id| [Output::Probe(id), Output::Send(id, encode_keepalive())]),
            );
            let connection = &mut self.connections[index];
            connection.phase =
                Phase::Waiting { negotiated: peer.clone(), until: now + PROBE, is_confirmed: false };
            return false;
        }
        // The end with the higher identifier, or number if identifiers are equal, keeps its own connection.
        let own = (self.settings.identifier, self.settings.local_as);
        let keeps_outgoing = own > (peer.identifier, self.settings.peer_as);
        let is_rival = |other: &Connection| {
            other.id != id && other.outgoing != is_outgoing && matches!(other.phase, Phase::OpenConfirm(_))
        };
        let Some(rival) = self.connections.iter().position(is_rival) else { return true };
        let survives = keeps_outgoing == is_outgoing;
        let loser = if survives { Some(rival) } else { self.index(id) };
        if let Some(loser) = loser {
            self.end(now, loser, collision(), out);
        }
        survives
    }

    fn establish(&mut self, now: Time, index: usize, out: &mut Vec<Output>) {
        let id = self.connections[index].id;
        while let Some(other) = self.connections.iter().position(|connection| connection.id != id) {
            self.end(now, other, End::Send(Notification::new(code::CEASE, cease::COLLISION)), out);
        }
        let Some(connection) = self.connections.first_mut() else { return };
        let Phase::OpenConfirm(negotiated) = &connection.phase else { return };
        let negotiated = negotiated.clone();
        // What the peer did not preserve while it was away, or does not speak any more, is gone.
        let kept = self.stale.iter().filter(|family| {
            let restart = negotiated.graceful_restart.as_ref();
            negotiated.context.families.contains(*family)
                && restart.and_then(|restart| restart.forwarding(*family)) == Some(true)
        });
        let kept: Families = kept.collect();
        let lost: Families = self.stale.iter().filter(|family| !kept.contains(*family)).collect();
        connection.phase = Phase::Established { negotiated, since: now };
        self.stale = kept;
        self.stale_until = (!kept.is_empty()).then(|| now + LONGEST_INITIAL_UPDATE);
        self.backoff.established();
        self.retry_at = None;
        self.established += 1;
        if !lost.is_empty() {
            out.push(Output::Forget(lost));
        }
        out.push(Output::Up(id));
    }

    /// Ends a connection. If it was the established one, so does the session.
    fn end(&mut self, now: Time, index: usize, end: End, out: &mut Vec<Output>) {
        let connection = self.connections.remove(index);
        let retained = connection.retained(&end);
        match &end {
            End::Send(notification) => {
                out.push(Output::Send(connection.id, encode_notification(notification)));
                self.last_error = Some(match notification.prefix_limit() {
                    Some((family, limit)) => format!(
                        "the peer sent more than {limit} {family} prefixes, which is the limit; let it send fewer, such as a default route"
                    ),
                    None => format!("sent: {notification}"),
                });
            }
            End::Received(notification) => self.last_error = Some(format!("received: {notification}")),
            End::Lost if connection.is_established() => {
                self.last_error = Some("the connection was lost".to_owned());
            }
            End::Lost => {}
        }
        out.push(Output::Close(connection.id));
        if let Phase::Established { negotiated, .. } = &connection.phase {
            let restart = negotiated.graceful_restart.as_ref();
            let wait =
                restart.map_or(Duration::ZERO, |restart| Duration::from_secs(restart.restart_time.into()));
            self.stale = retained;
            self.stale_until = (!retained.is_empty()).then(|| now + wait);
            out.push(Output::Down(retained));
        }
        let age = match &connection.phase {
            Phase::Established { since, .. } => Some(now.saturating_sub(*since)),
            Phase::OpenSent | Phase::Waiting { .. } | Phase::OpenConfirm(_) => None,
        };
        self.backoff.ended(&end, age);
        if let End::Send(notification) = &end
            && notification.prefix_limit().is_some()
        {
            // The next session would end in the same way.
            let pause = self.jitter.shortened(LONGEST_RETRY);
            self.refuse_until = Some(now + pause);
            self.retry_at = (self.is_started && !self.settings.passive).then(|| now + pause);
        }
        self.retry(now);
        if connection.is_established() && self.is_started {
            self.confirm_waiting(now, out);
        }
    }

    /// The established connection has ended, so one that waited for that goes on.
    fn confirm_waiting(&mut self, now: Time, out: &mut Vec<Output>) {
        let next = self.connections.iter().enumerate().find_map(|(index, it)| match &it.phase {
            Phase::Waiting { negotiated, is_confirmed, .. } => {
                Some((index, negotiated.clone(), *is_confirmed))
            }
            Phase::OpenSent | Phase::OpenConfirm(_) | Phase::Established { .. } => None,
        });
        let Some((index, negotiated, is_confirmed)) = next else { return };
        self.confirm(now, index, negotiated, out);
        if is_confirmed {
            self.establish(now, index, out);
        }
    }
}
