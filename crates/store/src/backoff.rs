//! The delays between attempts of a failed operation: the one policy for retries.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// The maximum of the first delay.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// The maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Doubles the delay with each failure, up to a maximum, until an attempt succeeds. Each delay is shortened at random, by up
/// to half of it, so that agents that fail together do not retry together.
#[derive(Debug, Clone)]
pub struct Backoff {
    max: Duration,
    failures: u32,
    random: u64,
}

impl Backoff {
    /// The delays depend only on the seed.
    pub fn new(seed: u64) -> Self {
        Self { max: MAX_DELAY, failures: 0, random: seed }
    }

    /// The same with another maximum.
    pub fn with_max(self, max: Duration) -> Self {
        Self { max, ..self }
    }

    /// Records a failure, and returns the time of the next attempt.
    pub fn failed(&mut self, now: Instant) -> Instant {
        let doubled = 1_u32.checked_shl(self.failures).and_then(|times| FIRST_DELAY.checked_mul(times));
        let delay = doubled.map_or(self.max, |delay| delay.min(self.max));
        self.failures = self.failures.saturating_add(1);
        // A linear congruential generator, with the factors of Knuth's MMIX; its upper bits are the random ones.
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let upper = u32::try_from(self.random >> 32).unwrap_or(u32::MAX);
        now + delay - (delay / 2).mul_f64(f64::from(upper) / f64::from(u32::MAX))
    }

    /// Records a success: the next failure is followed by the first delay.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// Records a failure, and waits for the time of the next attempt.
    pub async fn wait(&mut self) {
        let now = tokio::time::Instant::now().into_std();
        tokio::time::sleep_until(self.failed(now).into()).await;
    }
}

/// A seed that differs between processes and calls.
pub fn random_seed() -> u64 {
    RandomState::new().hash_one(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_start_again_after_a_success() {
        let now = Instant::now();
        for seed in 0..1_000 {
            let mut backoff = Backoff::new(seed);
            for round in 0..2 {
                for longest in [200, 400, 800, 1_600, 3_200, 5_000].into_iter().chain([5_000; 80]) {
                    let longest = Duration::from_millis(longest);
                    let delay = backoff.failed(now) - now;
                    assert!(
                        longest / 2 <= delay && delay <= longest,
                        "{seed}, {round}: {longest:?}, {delay:?}"
                    );
                }
                backoff.succeeded();
            }
        }
    }

    #[test]
    fn a_smaller_maximum_also_limits_the_first_delay() {
        let (now, max) = (Instant::now(), Duration::from_millis(50));
        let mut backoff = Backoff::new(1).with_max(max);
        assert!((0..10).all(|_| backoff.failed(now) <= now + max));
    }

    #[test]
    fn agents_that_fail_together_do_not_retry_together() {
        let now = Instant::now();
        let mut delays: Vec<_> =
            (0..1_000).map(|seed| (Backoff::new(seed).failed(now) - now).as_millis()).collect();
        delays.sort_unstable();
        delays.dedup();
        assert!(delays.len() > 80, "{} different delays of 101 possible ones", delays.len());
        assert_eq!(Backoff::new(7).failed(now), Backoff::new(7).failed(now), "one seed, one delay");
        assert_ne!(random_seed(), random_seed());
    }
}
