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

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;
    use tortie_kernel::nftables::Key;

    use super::super::packet_test::port_ranges;
    use super::super::sets::{Family, ranges};
    use super::*;

    /// A packet: protocol, destination port, last byte of the source.
    type Packet = (u8, u16, u8);

    const PROTOCOLS: [u8; 3] = [6, 17, 132];

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// A conjunction about some of the fields, each with one value or the opposite.
    fn conjunction() -> impl Strategy<Value = Conjunction> {
        let protocol = prop::option::of((prop::sample::select(PROTOCOLS.to_vec()), any::<bool>()));
        let port = prop::option::weighted(0.8, (0u16..12, 0u16..2, prop::bool::weighted(0.1)));
        let source = prop::option::of((0u8..6, prop::bool::weighted(0.1)));
        (protocol, port, source).prop_map(|(protocol, port, source)| {
            let protocol = protocol.map(|(number, invert)| Test::Protocol { numbers: vec![number], invert });
            let port = port.map(|(first, more, invert)| Test::Port {
                side: PacketEnd::Destination,
                ranges: port_ranges([(first, first + more)].into_iter()),
                invert,
            });
            let source = source.map(|(last, invert)| Test::Address {
                side: PacketEnd::Source,
                family: Family::V4,
                ranges: ranges([address(last).into()]),
                invert,
            });
            protocol.into_iter().chain(port).chain(source).collect()
        })
    }

    fn holds(test: &Test, (protocol, port, source): Packet) -> bool {
        let has =
            |ranges: &Ranges, key: Key| ranges.iter().any(|(first, last)| (first..=last).contains(&&key));
        match test {
            Test::Protocol { numbers, invert } => numbers.contains(&protocol) != *invert,
            Test::Port { ranges, invert, .. } => has(ranges, Key::port(port)) != *invert,
            Test::Address { ranges, invert, .. } => has(ranges, Key::address(address(source))) != *invert,
            _ => unreachable!("no such test is in a conjunction"),
        }
    }

    proptest! {
        #[test]
        fn merged_conjunctions_match_the_same_packets(all in prop::collection::vec(conjunction(), 0..40)) {
            let folded = fold(all.iter().cloned().zip((0..).map(|number| vec![number])).collect());
            for packet in PROTOCOLS.into_iter().flat_map(|protocol| {
                (0..14).flat_map(move |port| (0..7).map(move |source| (protocol, port, source)))
            }) {
                let matches = |tests: &Conjunction| tests.iter().all(|test| holds(test, packet));
                prop_assert_eq!(
                    folded.iter().any(|(tests, _)| matches(tests)), all.iter().any(matches), "{:?}", packet
                );
            }
            let mut origins: Vec<i32> = folded.into_iter().flat_map(|(_, origins)| origins).collect();
            origins.sort_unstable();
            prop_assert_eq!(origins, (0..all.len() as i32).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_hundred_ports_of_one_peer_are_one_conjunction() {
        let of_port = |port: u16| {
            let ranges = port_ranges([(2 * port, 2 * port)].into_iter());
            vec![Test::Port { side: PacketEnd::Destination, ranges, invert: false }]
        };
        let folded = fold((0..100).map(|port| (of_port(port), vec![port])).collect());
        let [(tests, origins)] = folded.as_slice() else { panic!("{folded:?}") };
        assert_eq!(origins.len(), 100);
        let all = port_ranges((0..100).map(|port| (2 * port, 2 * port)));
        assert_eq!(*tests, [Test::Port { side: PacketEnd::Destination, ranges: all, invert: false }]);
    }

    /// Each of the two matches what only the other one excludes. A union of the values would exclude both.
    #[test]
    fn conjunctions_that_exclude_different_values_stay_apart() {
        let addresses = [1, 2].map(|last| Test::Address {
            side: PacketEnd::Source,
            family: Family::V4,
            ranges: ranges([address(last).into()]),
            invert: true,
        });
        let ports = [1, 2].map(|port| Test::Port {
            side: PacketEnd::Destination,
            ranges: port_ranges([(port, port)].into_iter()),
            invert: true,
        });
        let protocols = [6, 17].map(|number| Test::Protocol { numbers: vec![number], invert: true });
        for [one, other] in [addresses, ports, protocols] {
            let all = vec![(vec![one], vec![1]), (vec![other], vec![2])];
            assert_eq!(fold(all.clone()), all);
        }
    }
}
