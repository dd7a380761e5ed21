//! A connection of a session.

use std::time::Duration;

use super::negotiation::Negotiated;
use super::{ConnectionId, Time};
use crate::codec::{Families, Notification};

/// A timer that expires so late was held up by a pause of this process, in which nothing of the peer was read.
const LATE: Duration = Duration::from_secs(1);
/// How long the peer may then take to be heard.
const GRACE: Duration = Duration::from_secs(10);

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    OpenSent,
    /// The peer's OPEN is there, and another connection is established. Until this time, that one shows whether it still is. The peer may have
    /// confirmed this end's OPEN meanwhile.
    Waiting {
        negotiated: Negotiated,
        until: Time,
        is_confirmed: bool,
    },
    OpenConfirm(Negotiated),
    Established {
        negotiated: Negotiated,
        since: Time,
    },
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: ConnectionId,
    pub(super) outgoing: bool,
    pub(super) phase: Phase,
    pub(super) hold_at: Option<Time>,
    /// Whether the hold time has been prolonged since the peer was heard.
    pub(super) is_prolonged: bool,
    pub(super) keepalive_at: Option<Time>,
}

/// Why a connection ends.
pub(super) enum End {
    /// It was lost.
    Lost,
    /// The peer sent this.
    Received(Notification),
    /// This is sent to the peer.
    Send(Notification),
}

impl Connection {
    pub(super) fn is_established(&self) -> bool {
        matches!(self.phase, Phase::Established { .. })
    }

    pub(super) fn negotiated(&self) -> Option<&Negotiated> {
        match &self.phase {
            Phase::OpenSent => None,
            Phase::Waiting { negotiated, .. }
            | Phase::OpenConfirm(negotiated)
            | Phase::Established { negotiated, .. } => Some(negotiated),
        }
    }

    /// The end of the wait for the established connection.
    pub(super) fn waits_until(&self) -> Option<Time> {
        match self.phase {
            Phase::Waiting { until, .. } => Some(until),
            Phase::OpenSent | Phase::OpenConfirm(_) | Phase::Established { .. } => None,
        }
    }

    /// Gives the peer one more chance if this end was late.
    pub(super) fn prolong(&mut self, now: Time) {
        if !self.is_prolonged && self.hold_at.is_some_and(|at| at + LATE <= now) {
            self.is_prolonged = true;
            self.hold_at = Some(now + GRACE);
        }
    }

    /// The peer is there.
    pub(super) fn heard(&mut self, now: Time) {
        self.is_prolonged = false;
        let hold_time = self.negotiated().map_or(0, |negotiated| negotiated.hold_time);
        self.hold_at = (hold_time > 0).then(|| now + Duration::from_secs(hold_time.into()));
    }

    /// The families whose routes outlive the session (RFC 4724 4.2, RFC 8538 4).
    pub(super) fn retained(&self, end: &End) -> Families {
        let Phase::Established { negotiated, .. } = &self.phase else { return Families::default() };
        let both_know_notifications =
            negotiated.graceful_restart.as_ref().is_some_and(|restart| restart.notification);
        let survives = match end {
            End::Lost => true,
            End::Received(notification) | End::Send(notification) => {
                both_know_notifications && !notification.is_hard_reset()
            }
        };
        if survives { negotiated.retainable() } else { Families::default() }
    }
}
