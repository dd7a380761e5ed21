//! The backoff of failed operations.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// Failed operations, the number of consecutive failures, and the time of the next attempt: at once, then after 1, 2,
/// 4 … seconds.
#[derive(Debug)]
pub(crate) struct Backoff<K>(BTreeMap<K, Wait>);

impl<K> Default for Backoff<K> {
    fn default() -> Self {
        Backoff(BTreeMap::new())
    }
}

#[derive(Debug, Clone, Copy)]
struct Wait {
    failures: u32,
    until: Instant,
}

impl<K: Ord + Clone> Backoff<K> {
    /// The failed operations.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.keys()
    }

    pub(crate) fn contains(&self, key: &K) -> bool {
        self.0.contains_key(key)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records a failure.
    pub(crate) fn failed(&mut self, key: K, now: Instant) {
        let wait = self.0.entry(key).or_insert(Wait { failures: 0, until: now });
        let delay =
            1_u64.checked_shl(wait.failures).map_or(MAX_DELAY, |twice| Duration::from_secs(twice / 2));
        *wait = Wait { failures: wait.failures.saturating_add(1), until: now + delay.min(MAX_DELAY) };
    }

    /// Records a success, or removes the operation.
    pub(crate) fn forget(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// The operations that are due.
    pub(crate) fn due(&self, now: Instant) -> impl Iterator<Item = K> {
        self.0.iter().filter(move |(_, wait)| wait.until <= now).map(|(key, _)| key.clone())
    }

    /// Whether it failed and is not due yet.
    pub(crate) fn has_to_wait(&self, key: &K, now: Instant) -> bool {
        self.0.get(key).is_some_and(|wait| now < wait.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_minute() {
        let mut now = Instant::now();
        let mut backoff = Backoff::default();
        for seconds in [0, 1, 2, 4, 8, 16, 32, 60, 60].into_iter().chain([60; 80]) {
            backoff.failed("x", now);
            if seconds > 0 {
                now += Duration::from_secs(seconds - 1);
                assert!(backoff.has_to_wait(&"x", now) && backoff.due(now).next().is_none(), "{seconds}");
                now += Duration::from_secs(1);
            }
            assert!(!backoff.has_to_wait(&"x", now) && backoff.due(now).eq(["x"]), "{seconds}");
        }
        backoff.forget(&"x");
        assert!(backoff.is_empty());
    }
}
