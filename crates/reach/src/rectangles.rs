//! Summarizes changes of many pairs for readers.

use std::collections::BTreeMap;

use super::judge::{Cell, Decision};
use super::path::{ByStop, Stop};
use tortie_oracle::Verdict;

/// A cell without irrelevant parts: the verdict, and the decider at each stop.
pub(super) type Plain = (Verdict, ByStop<usize>);

/// Sender, receiver, and the index of their change in [`Shapes`].
pub(super) type Pairs = Vec<(usize, usize, usize)>;

/// The distinct sets of ports that change together, with their decisions before.
#[derive(Default)]
pub(super) struct Shapes {
    ports: Vec<Vec<usize>>,
    /// The index of the ports, and the decisions before.
    shapes: Vec<(usize, Vec<Plain>)>,
}

impl Shapes {
    /// The changes, by the decision after.
    pub(super) fn of(&mut self, cells: impl Iterator<Item = (usize, Cell, Cell)>) -> Vec<(Plain, usize)> {
        let mut changes: BTreeMap<Plain, (Vec<usize>, Vec<Plain>)> = BTreeMap::new();
        for (port, one, other) in cells.filter(|(_, one, other)| one.verdict != other.verdict) {
            let (ports, before) = changes.entry(plain(&other, &one)).or_default();
            ports.push(port);
            let one = plain(&one, &other);
            if !before.contains(&one) {
                before.push(one);
            }
        }
        let mut shape = |(ports, before): (Vec<usize>, Vec<Plain>)| {
            let known = self.ports.iter().position(|known| *known == ports);
            let number = known.unwrap_or(self.ports.len());
            if known.is_none() {
                self.ports.push(ports);
            }
            self.add(number, before)
        };
        changes.into_iter().map(|(after, change)| (after, shape(change))).collect()
    }

    /// One shape for several with the same ports.
    pub(super) fn joined(&mut self, shapes: &[usize]) -> usize {
        if let [only] = shapes {
            return *only;
        }
        let mut before: Vec<Plain> = shapes.iter().flat_map(|shape| self.before(*shape)).copied().collect();
        before.sort();
        before.dedup();
        let ports = shapes.first().map_or(0, |shape| self.ports_of(*shape));
        let known = (ports, before);
        match self.shapes.iter().position(|shape| *shape == known) {
            Some(number) => number,
            None => self.add(ports, known.1),
        }
    }

    fn add(&mut self, ports: usize, before: Vec<Plain>) -> usize {
        self.shapes.push((ports, before));
        self.shapes.len() - 1
    }

    pub(super) fn ports(&self, number: usize) -> &[usize] {
        self.ports.get(number).map_or(&[], Vec::as_slice)
    }

    /// The index of its ports.
    pub(super) fn ports_of(&self, shape: usize) -> usize {
        self.shapes.get(shape).map_or(0, |(ports, _)| *ports)
    }

    pub(super) fn before(&self, shape: usize) -> &[Plain] {
        self.shapes.get(shape).map_or(&[], |(_, before)| before)
    }
}

/// If packets are dropped, the deciders that drop them. If packets pass, the pods' policies, and those host endpoints
/// that drop the packets in the other snapshot.
fn plain(cell: &Cell, other: &Cell) -> Plain {
    let denies =
        |decision: Option<Decision>| decision.is_some_and(|decision| decision.verdict == Verdict::Deny);
    let counts = |stop: Stop| {
        let decision = cell.at(stop).filter(|decision| decision.verdict == cell.verdict);
        decision.filter(|_| cell.verdict == Verdict::Deny || !stop.is_host() || denies(other.at(stop)))
    };
    (cell.verdict, Stop::ALL.map(|stop| counts(stop).map(|decision| decision.by)))
}

/// The index of the ports, the senders, the receivers.
type Rectangle = (usize, Vec<usize>, Vec<usize>);

/// The pairs as rectangles: either senders with the same receivers on the same ports, or receivers with the same
/// senders, whichever gives fewer rectangles.
pub(super) fn rectangles(pairs: &Pairs, shapes: &Shapes) -> Vec<Rectangle> {
    let ports = |shape: &usize| shapes.ports_of(*shape);
    let by_sender = together(pairs.iter().map(|(from, to, shape)| (ports(shape), *from, *to)));
    let by_receiver = together(pairs.iter().map(|(from, to, shape)| (ports(shape), *to, *from)));
    match by_receiver.len() < by_sender.len() {
        true => by_receiver.into_iter().map(|(ports, to, from)| (ports, from, to)).collect(),
        false => by_sender,
    }
}

/// Groups those that have the same counterparts.
fn together(pairs: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Rectangle> {
    let mut others: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (ports, one, other) in pairs {
        others.entry((ports, one)).or_default().push(other);
    }
    let mut alike: BTreeMap<(usize, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for ((ports, one), others) in others {
        alike.entry((ports, others)).or_default().push(one);
    }
    alike.into_iter().map(|((ports, others), ones)| (ports, ones, others)).collect()
}
