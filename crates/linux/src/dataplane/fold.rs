//! Merges conjunctions, so that fewer of them match the same packets.
//!
//! Among conjunctions with the same action, it does not matter which one matches a packet. Two conjunctions that
//! differ only in one field, and match alternatives of that field, become one with the values of both: a policy with
//! a rule for each of a hundred ports becomes one nftables rule with a set of ports.

use std::collections::{BTreeMap, HashMap};

use super::packet_test::{Conjunction, PacketEnd, Test};
use super::sets::Ranges;

/// A field whose values can be merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Joint {
    Port(PacketEnd),
    Address(PacketEnd),
    Protocol,
}

const JOINTS: [Joint; 5] = [
    Joint::Port(PacketEnd::Destination),
    Joint::Port(PacketEnd::Source),
    Joint::Protocol,
    Joint::Address(PacketEnd::Source),
    Joint::Address(PacketEnd::Destination),
];

impl Joint {
    /// Whether the test matches alternatives of the field.
    fn is_matched_by(self, test: &Test) -> bool {
        match test {
            Test::Protocol { invert: false, .. } => self == Self::Protocol,
            Test::Address { side, invert: false, .. } => self == Self::Address(*side),
            Test::Port { side, invert: false, .. } => self == Self::Port(*side),
            _ => false,
        }
    }
}

/// Merges conjunctions as far as possible. Each keeps its origins.
pub(super) fn fold<T>(mut all: Vec<(Conjunction, Vec<T>)>) -> Vec<(Conjunction, Vec<T>)> {
    loop {
        let before = all.len();
        all = JOINTS.into_iter().fold(all, join);
        if all.len() == before {
            return all;
        }
    }
}

/// Merges those that differ in one field only.
fn join<T>(all: Vec<(Conjunction, Vec<T>)>, joint: Joint) -> Vec<(Conjunction, Vec<T>)> {
    let mut joined: Vec<(Conjunction, Vec<T>)> = Vec::with_capacity(all.len());
    // By all tests except that of the field: the index, and the position of the field's test.
    let mut alike: HashMap<Conjunction, (usize, usize)> = HashMap::new();
    // Merged at the end, because each merge costs as much as the result is long.
    let mut more: BTreeMap<(usize, usize), Vec<Test>> = BTreeMap::new();
    for (mut tests, origins) in all {
        let Some(position) = tests.iter().position(|test| joint.is_matched_by(test)) else {
            joined.push((tests, origins));
            continue;
        };
        let test = tests.remove(position);
        match alike.get(&tests) {
            Some((index, position)) => {
                more.entry((*index, *position)).or_default().push(test);
                joined[*index].1.extend(origins);
            }
            None => {
                let rest = tests.clone();
                tests.insert(position, test);
                alike.insert(rest, (joined.len(), position));
                joined.push((tests, origins));
            }
        }
    }
    for ((index, position), tests) in more {
        joined[index].0[position].absorb(tests);
    }
    // A field that may have any value needs no test.
    for (tests, _) in &mut joined {
        tests.retain(|test| match test {
            Test::Address { ranges, invert: false, .. } | Test::Port { ranges, invert: false, .. } => {
                ranges.always() != Some(true)
            }
            _ => true,
        });
    }
    joined
}

impl Test {
    /// Adds the values of other tests of the same field.
    fn absorb(&mut self, others: Vec<Test>) {
        match self {
            Self::Protocol { numbers, .. } => {
                let of_others = others.into_iter().filter_map(|other| match other {
                    Self::Protocol { numbers, .. } => Some(numbers),
                    _ => None,
                });
                numbers.extend(of_others.flatten());
                numbers.sort_unstable();
                numbers.dedup();
            }
            Self::Address { ranges, .. } | Self::Port { ranges, .. } => {
                let of_others = others.iter().filter_map(|other| match other {
                    Self::Address { ranges, .. } | Self::Port { ranges, .. } => Some(ranges),
                    _ => None,
                });
                let all = of_others.chain([&*ranges]).flat_map(Ranges::iter).copied().collect();
                *ranges = Ranges::new(all);
            }
            _ => unreachable!("tests that are not of one field"),
        }
    }
}
