//! Values that change while nobody knows exactly when a change counts.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::fault::Node;

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
    /// When a later value is in force on a node.
    until: BTreeMap<Node, Moment>,
}

/// The values of something that is written, one after the other, and comes into force on each
/// node at some time after each write.
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
        Self {
            forgotten: 0,
            written: 1,
            stays: vec![Stay { value, from: Moment::ZERO, until: BTreeMap::new() }],
        }
    }

    /// Another value is written from now on.
    pub(crate) fn change(&mut self, value: T, from: Moment) {
        self.stays.push(Stay { value, from, until: BTreeMap::new() });
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

    /// The last of the first `count` values is in force on a node; the ones before it no longer count there.
    pub(crate) fn settle(&mut self, node: Node, count: usize, now: Moment) {
        let before = count.saturating_sub(self.forgotten + 1).min(self.stays.len());
        for stay in &mut self.stays[..before] {
            stay.until.entry(node).or_insert(now);
        }
    }

    /// True if it is known which value counts on a node.
    pub(crate) fn is_settled(&self, node: Node) -> bool {
        self.stays.iter().filter(|stay| !stay.until.contains_key(&node)).count() == 1
    }

    /// The values that may count on a node at some moment of the span.
    pub(crate) fn possible(&self, node: Node, span: Span) -> impl Iterator<Item = &T> {
        let counts = move |stay: &&Stay<T>| {
            stay.from <= span.until && stay.until.get(&node).is_none_or(|until| *until >= span.from)
        };
        self.stays.iter().filter(counts).map(|stay| &stay.value)
    }

    /// Forgets the values that no longer counted on any of these nodes at this moment.
    pub(crate) fn forget(&mut self, nodes: &[Node], before: Moment) {
        let counts = |stay: &Stay<T>| {
            nodes.iter().any(|node| stay.until.get(node).is_none_or(|until| *until >= before))
        };
        let old = self.stays.iter().take_while(|stay| !counts(stay)).count();
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
        known.possible(0, Span::new(at(from), at(until))).collect()
    }

    #[test]
    fn old_values_count_until_a_later_one_is_in_force() {
        let mut known = Known::new('a');
        assert!(known.is_settled(0));
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
        known.settle(0, count, at(30));
        assert_eq!(possible(&known, 31, 32), "bc", "the last value is not in force yet");
        assert_eq!(possible(&known, 29, 32), "abc");
        assert!(!known.is_settled(0));
        known.forget(&[0], at(40));
        assert_eq!(possible(&known, 29, 32), "bc");
        known.settle(0, count, at(41));
        assert_eq!(possible(&known, 42, 43), "bc", "nothing new is in force");
        known.settle(0, known.written(), at(45));
        assert_eq!(possible(&known, 46, 50), "c");
        assert_eq!(possible(&known, 44, 50), "bc");
        assert!(known.is_settled(0));
        assert_eq!((known.written(), known.stored()), (3, Some(&'c')));
    }

    #[test]
    fn each_node_follows_in_its_own_time() {
        let mut known = Known::new('a');
        known.change('b', at(10));
        known.done();
        known.settle(1, known.written(), at(20));
        let span = Span::new(at(30), at(31));
        assert_eq!(known.possible(0, span).collect::<String>(), "ab");
        assert_eq!(known.possible(1, span).collect::<String>(), "b");
        assert!(!known.is_settled(0) && known.is_settled(1));
        known.forget(&[0, 1], at(30));
        assert_eq!(known.possible(0, span).collect::<String>(), "ab", "node 0 may still have it");
        known.settle(0, known.written(), at(40));
        known.forget(&[0, 1], at(41));
        assert_eq!(known.possible(0, span).collect::<String>(), "b");
    }
}
