//! Timers that do not all expire at once (RFC 4271 10).

use std::time::Duration;

/// A source of numbers. Each session has its own, so that a run with the same input gives the same output.
#[derive(Debug, Clone)]
pub(super) struct Jitter(u64);

impl Jitter {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number (SplitMix64).
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Three to four quarters of the time.
    pub(super) fn shortened(&mut self, time: Duration) -> Duration {
        let quarter = time / 4;
        quarter * 3 + self.below(quarter)
    }

    /// Up to the time.
    pub(super) fn below(&mut self, time: Duration) -> Duration {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(if nanoseconds == 0 { 0 } else { self.next() % nanoseconds })
    }
}
