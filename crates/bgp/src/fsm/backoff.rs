//! How long a session waits before it connects again.

use std::time::Duration;

use super::{End, LONGEST_RETRY, Time};
use crate::codec::notification::{cease, code};

/// The time to the second attempt, if the peer did not answer the first; later ones take twice as long each, up to the
/// usual time. Speakers of a cluster often start at once.
const SECOND_ATTEMPT: Duration = Duration::from_millis(250);
/// A session that ends by an error before that age is likely to end in the same way the next time.
const LASTING: Duration = Duration::from_secs(180);

/// How the last connections ended.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    /// Errors in a row.
    errors: u32,
    /// Sessions in a row that an error has ended soon after they were established.
    short_sessions: u32,
    /// Attempts in a row that found nobody, or somebody who closed the connection without a word.
    failures: u32,
}

impl Backoff {
    /// An attempt found nobody.
    pub(super) fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// The session is established.
    pub(super) fn established(&mut self) {
        (self.errors, self.failures) = (0, 0);
    }

    /// A connection has ended; `age` is that of the session, if it was established.
    pub(super) fn ended(&mut self, end: &End, age: Option<Time>) {
        let notification = match end {
            End::Lost if age.is_none() => return self.failed(),
            End::Lost => return,
            End::Received(notification) | End::Send(notification) => notification,
        };
        if (notification.code, notification.subcode) == (code::CEASE, cease::COLLISION) {
            return;
        }
        self.errors = self.errors.saturating_add(1);
        // Whoever ends a session on purpose may do so again soon.
        if let Some(age) = age.filter(|_| notification.code != code::CEASE) {
            self.short_sessions = if age < LASTING { self.short_sessions.saturating_add(1) } else { 0 };
            self.errors = self.errors.max(self.short_sessions);
        }
    }

    /// The time to the next attempt; `usual` is the configured one.
    pub(super) fn delay(&self, usual: Duration) -> Duration {
        if self.errors == 0 && self.failures > 0 {
            (SECOND_ATTEMPT * 2_u32.saturating_pow((self.failures - 1).min(10))).min(usual)
        } else {
            (usual * 2_u32.saturating_pow(self.errors.min(10))).min(LONGEST_RETRY.max(usual))
        }
    }
}
