//! The epochs of a file. An epoch begins whenever a process opens the file, and begins where no other history of the store
//! has been: at the time of the clock in microseconds, if that is ahead. So a copy of the file that was served meanwhile has
//! other positions from then on, and nobody can resume at a position of one history in another one.

use std::time::{Duration, SystemTime};

use redb::{ReadableTable, Table};

use super::{Revision, damaged};
use crate::StoreError;
use crate::file::failed;

/// The number of epochs in a file. Whoever followed the store before the oldest of them lists again.
const MAX_EPOCHS: usize = 256;
/// 2020-01-01 00:00:00 UTC, in seconds of Unix time.
const ORIGIN: Duration = Duration::from_secs(1_577_836_800);
/// The clock counts only before this revision (the year 2162): numbers in JSON are exact below 2⁵³.
const MAX_CLOCK: Revision = 1 << 52;
/// The random part of the begin of an epoch. It is small if the clock is ahead, so that the clock decides.
const RANDOM_AFTER_CLOCK: Revision = 1 << 10;
/// Without the clock, only the random part distinguishes two histories.
const RANDOM_WITHOUT_CLOCK: Revision = 1 << 30;

/// The revisions from the first to the last one. The first one is that of no write.
pub(super) type EpochRange = (Revision, Revision);

/// The microseconds since 2020.
pub(super) fn microseconds(now: SystemTime) -> u64 {
    let since = now.duration_since(SystemTime::UNIX_EPOCH + ORIGIN).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Where an epoch begins after the latest revision of the file.
pub(super) fn next_begin(latest: Revision, microseconds: u64, random: u64) -> Revision {
    match latest < microseconds && microseconds < MAX_CLOCK {
        true => microseconds + random % RANDOM_AFTER_CLOCK,
        false => latest + 1 + random % RANDOM_WITHOUT_CLOCK,
    }
}

/// Whether a revision belongs to the history of these epochs. The last one ends with the latest revision.
pub(super) fn contain(epochs: &[EpochRange], latest: Revision, revision: Revision) -> bool {
    let is_in = |index: usize, (begin, end): EpochRange| {
        let end = if index + 1 == epochs.len() { latest } else { end };
        (begin..=end).contains(&revision)
    };
    epochs.iter().enumerate().any(|(index, range)| is_in(index, *range))
}

/// Ends the epoch of a file, and begins the next one. Returns the begin.
pub(super) fn begin(
    epochs: &mut Table<'_, Revision, Revision>,
    latest: &mut Table<'_, (), Revision>,
    next: impl FnOnce(Revision) -> Revision,
) -> Result<Revision, StoreError> {
    let end = super::latest(latest)?;
    let current = epochs.last().map_err(failed)?.map(|(begin, _)| begin.value());
    if let Some(current) = current {
        epochs.insert(current, end).map_err(failed)?;
    }
    let begin = next(end);
    if current.is_some_and(|current| begin <= current) || begin < end {
        return Err(damaged("its epochs are not in order"));
    }
    latest.insert((), begin).map_err(failed)?;
    epochs.insert(begin, begin).map_err(failed)?;
    while read(epochs)?.len() > MAX_EPOCHS {
        epochs.pop_first().map_err(failed)?;
    }
    Ok(begin)
}

/// The epochs of a file, from the oldest on.
pub(super) fn read(table: &impl ReadableTable<Revision, Revision>) -> Result<Vec<EpochRange>, StoreError> {
    let entries = table.iter().map_err(failed)?;
    entries.map(|entry| entry.map(|(begin, end)| (begin.value(), end.value())).map_err(failed)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_clock_counts_in_microseconds_since_2020() {
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        for (time, expected) in [
            (at(0), 0),
            (at(1_577_836_800), 0),
            (at(1_577_836_801), 1_000_000),
            (at(1_577_836_800) + Duration::from_nanos(2_999), 2),
        ] {
            assert_eq!(microseconds(time), expected, "{time:?}");
        }
    }

    #[test]
    fn positions_count_only_in_the_epochs_of_the_history() {
        let epochs = [(100, 120), (200, 200), (300, 300)];
        let latest = 310;
        let table = [
            (0, false),
            (99, false),
            (100, true),
            (120, true),
            (121, false),
            (200, true),
            (201, false),
            (299, false),
            (300, true),
            (310, true),
            (311, false),
            (u64::MAX, false),
        ];
        for (revision, expected) in table {
            assert_eq!(contain(&epochs, latest, revision), expected, "{revision}");
        }
        assert!(!contain(&[], 5, 5), "a history without epochs");
    }

    proptest! {
        /// Also if the clock goes back, stands still, or is centuries ahead.
        #[test]
        fn epochs_go_forward_and_stay_exact_in_json(
            clocks in proptest::collection::vec(prop_oneof![Just(0), Just(u64::MAX), 0..MAX_CLOCK], 1..50), random: u64,
        ) {
            let mut latest = 0;
            for clock in clocks {
                let begin = next_begin(latest, clock, random);
                prop_assert!(begin > latest && begin < 1 << 53);
                if latest < clock && clock < MAX_CLOCK {
                    prop_assert!(begin - clock < RANDOM_AFTER_CLOCK);
                }
                latest = begin;
            }
        }
    }
}
