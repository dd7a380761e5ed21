//! Values that change while nobody knows exactly when a change counts.

use std::time::Duration;

/// A moment of a run: the time since its start.
pub(crate) type Moment = Duration;

/// From one moment to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) from: Moment,
    pub(crate) until: Moment,
}

impl Span {
    pub(crate) fn new(from: Moment, until: Moment) -> Self {
        Self { from, until }
    }
}

/// One of the values, and when it may count.
#[derive(Debug, Clone)]
struct Stay<T> {
    value: T,
    /// Its write begins.
    from: Moment,
    /// A later value is in force everywhere.
    until: Option<Moment>,
}

/// The values of something that is written, one after the other, and comes into force at some time after each write.
#[derive(Debug, Clone)]
pub(crate) struct Known<T> {
    /// The number of values that are forgotten.
    forgotten: usize,
    /// The number of values whose writes are done.
    written: usize,
    stays: Vec<Stay<T>>,
}

impl<T: Clone + PartialEq> Known<T> {
    /// A value that counts from the start of the run.
    pub(crate) fn new(value: T) -> Self {
        Self { forgotten: 0, written: 1, stays: vec![Stay { value, from: Moment::ZERO, until: None }] }
    }

    /// Another value is written from now on.
    pub(crate) fn change(&mut self, value: T, from: Moment) {
        self.stays.push(Stay { value, from, until: None });
    }

    /// The write of the last value is done.
    pub(crate) fn done(&mut self) {
        self.written = self.forgotten + self.stays.len();
    }

    /// The number of values whose writes are done.
    pub(crate) fn written(&self) -> usize {
        self.written
    }

    /// The last value whose write is done.
    pub(crate) fn stored(&self) -> Option<&T> {
        self.stays.get(self.written.checked_sub(self.forgotten + 1)?).map(|stay| &stay.value)
    }

    /// The last value, also if its write has only begun.
    pub(crate) fn latest(&self) -> Option<&T> {
        self.stays.last().map(|stay| &stay.value)
    }

    /// The last of the first `count` values is in force everywhere; the ones before it no longer count.
    pub(crate) fn settle(&mut self, count: usize, now: Moment) {
        let before = count.saturating_sub(self.forgotten + 1).min(self.stays.len());
        for stay in &mut self.stays[..before] {
            stay.until.get_or_insert(now);
        }
    }

    /// True if it is known which value counts.
    pub(crate) fn is_settled(&self) -> bool {
        self.stays.iter().filter(|stay| stay.until.is_none()).count() == 1
    }

    /// The values that may count at some moment of the span.
    pub(crate) fn possible(&self, span: Span) -> impl Iterator<Item = &T> {
        let counts = move |stay: &&Stay<T>| {
            stay.from <= span.until && stay.until.is_none_or(|until| until >= span.from)
        };
        self.stays.iter().filter(counts).map(|stay| &stay.value)
    }

    /// Forgets the values that no longer counted at this moment.
    pub(crate) fn forget(&mut self, before: Moment) {
        let old = self.stays.iter().take_while(|stay| stay.until.is_some_and(|until| until < before)).count();
        self.stays.drain(..old);
        self.forgotten += old;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::from_secs(seconds)
    }

    fn possible(known: &Known<char>, from: u64, until: u64) -> String {
        known.possible(Span::new(at(from), at(until))).collect()
    }

    #[test]
    fn old_values_count_until_a_later_one_is_in_force() {
        let mut known = Known::new('a');
        assert!(known.is_settled());
        known.change('b', at(10));
        assert_eq!((known.written(), known.stored()), (1, Some(&'a')));
        known.done();
        let count = known.written();
        known.change('c', at(20));
        assert_eq!((known.written(), known.stored(), known.latest()), (2, Some(&'b'), Some(&'c')));
        known.done();
        assert_eq!(possible(&known, 5, 9), "a");
        assert_eq!(possible(&known, 5, 10), "ab");
        assert_eq!(possible(&known, 25, 26), "abc");
        known.settle(count, at(30));
        assert_eq!(possible(&known, 31, 32), "bc", "the last value is not in force yet");
        assert_eq!(possible(&known, 29, 32), "abc");
        assert!(!known.is_settled());
        known.forget(at(40));
        assert_eq!(possible(&known, 29, 32), "bc");
        known.settle(count, at(41));
        assert_eq!(possible(&known, 42, 43), "bc", "nothing new is in force");
        known.settle(known.written(), at(45));
        assert_eq!(possible(&known, 46, 50), "c");
        assert_eq!(possible(&known, 44, 50), "bc");
        assert_eq!(known.latest(), Some(&'c'));
        assert!(known.is_settled());
        assert_eq!((known.written(), known.stored()), (3, Some(&'c')));
    }
}
