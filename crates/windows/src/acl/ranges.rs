//! Sets of numbers: addresses, ports, protocols.

use std::net::Ipv4Addr;
use std::sync::Arc;

use ipnet::{Ipv4Net, Ipv4Subnets};
use tortie_api::net::Protocol;

/// A set of numbers from 0 to `MAX`, as sorted ranges that do not touch. Clones share their ranges.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Numbers<const MAX: u32> {
    ranges: Arc<[(u32, u32)]>,
}

/// A set of IPv4 addresses.
pub(super) type Addresses = Numbers<{ u32::MAX }>;
/// A set of ports.
pub(crate) type Ports = Numbers<65_535>;

impl<const MAX: u32> Numbers<MAX> {
    /// Every number.
    pub(crate) fn all() -> Self {
        Self::from_ranges(vec![(0, MAX)])
    }

    /// The numbers of inclusive ranges, in any order.
    pub(crate) fn from_ranges(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match merged.last_mut() {
                Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
                _ => merged.push((first, last)),
            }
        }
        Self { ranges: merged.into() }
    }

    /// The inclusive ranges, sorted; between two there is a gap.
    pub(crate) fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }

    /// Whether the number is in it.
    pub(crate) fn contains(&self, number: u32) -> bool {
        let after = self.ranges.partition_point(|(first, _)| *first <= number);
        after > 0 && number <= self.ranges[after - 1].1
    }

    /// Whether no number is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether every number is in it.
    pub(crate) fn is_all(&self) -> bool {
        *self.ranges == [(0, MAX)]
    }

    /// The intersection of both.
    pub(crate) fn and(&self, other: &Self) -> Self {
        if self.is_all() {
            return other.clone();
        }
        if other.is_all() {
            return self.clone();
        }
        let (mut mine, mut theirs) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        let mut both = Vec::new();
        while let (Some((a, b)), Some((c, d))) = (mine.peek(), theirs.peek()) {
            let (first, last) = (*a.max(c), *b.min(d));
            if first <= last {
                both.push((first, last));
            }
            if b < d {
                mine.next()
            } else {
                theirs.next()
            };
        }
        Self { ranges: both.into() }
    }

    /// The complement.
    pub(crate) fn not(&self) -> Self {
        let mut gaps = Vec::with_capacity(self.ranges.len() + 1);
        let mut next = Some(0);
        for (first, last) in self.ranges.iter() {
            if let Some(start) = next.filter(|start| start < first) {
                gaps.push((start, first - 1));
            }
            next = last.checked_add(1).filter(|next| *next <= MAX);
        }
        gaps.extend(next.map(|start| (start, MAX)));
        Self { ranges: gaps.into() }
    }

    /// Whether it is a subset of the other.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        other.is_all()
            || self.ranges.iter().all(|(first, last)| {
                let after = other.ranges.partition_point(|(start, _)| start <= first);
                after > 0 && *last <= other.ranges[after - 1].1
            })
    }
}

impl Addresses {
    /// The addresses of networks.
    pub(crate) fn of_nets(nets: impl IntoIterator<Item = Ipv4Net>) -> Addresses {
        let range = |net: Ipv4Net| (net.network().into(), net.broadcast().into());
        Addresses::from_ranges(nets.into_iter().map(range).collect())
    }

    /// The smallest number of networks with exactly these addresses, sorted.
    pub(crate) fn to_nets(&self) -> Vec<Ipv4Net> {
        let nets =
            |(first, last): &(u32, u32)| Ipv4Subnets::new(Ipv4Addr::from(*first), Ipv4Addr::from(*last), 0);
        self.ranges.iter().flat_map(nets).collect()
    }
}

/// A set of IP protocol numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Protocols([u64; 4]);

impl Protocols {
    /// Every protocol.
    pub(crate) const ALL: Protocols = Protocols([u64::MAX; 4]);
    /// None.
    pub(crate) const NONE: Protocols = Protocols([0; 4]);

    /// These protocols.
    pub(crate) fn of(protocols: &[Protocol]) -> Protocols {
        let mut set = Protocols::NONE;
        for Protocol(number) in protocols {
            set.0[usize::from(number >> 6)] |= 1 << (number & 63);
        }
        set
    }

    /// The protocols whose ports policy can match.
    pub(crate) fn with_ports() -> Protocols {
        let all: Vec<Protocol> = (0..=255).map(Protocol).filter(|protocol| protocol.has_ports()).collect();
        Protocols::of(&all)
    }

    /// The intersection of both.
    pub(crate) fn and(self, other: Protocols) -> Protocols {
        Protocols(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// The union of both.
    pub(crate) fn or(self, other: Protocols) -> Protocols {
        Protocols(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// The complement.
    pub(crate) fn not(self) -> Protocols {
        Protocols(self.0.map(|bits| !bits))
    }

    /// Whether it has none.
    pub(crate) fn is_empty(self) -> bool {
        self == Protocols::NONE
    }

    /// Whether it is a subset of the other.
    pub(crate) fn is_within(self, other: Protocols) -> bool {
        self.and(other) == self
    }

    /// Whether the protocol is in it.
    pub(crate) fn contains(self, Protocol(number): Protocol) -> bool {
        self.0[usize::from(number >> 6)] >> (number & 63) & 1 == 1
    }

    /// The protocols in it, ascending.
    pub(crate) fn iter(self) -> impl Iterator<Item = Protocol> {
        (0..=255).map(Protocol).filter(move |protocol| self.contains(*protocol))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Small = Numbers<31>;

    fn small() -> impl Strategy<Value = Small> {
        prop::collection::vec((0_u32..32, 0_u32..32), 0..6).prop_map(|pairs| {
            Small::from_ranges(pairs.into_iter().map(|(a, b)| (a.min(b), a.max(b))).collect())
        })
    }

    proptest! {
        #[test]
        fn operations_agree_with_those_of_sets(a in small(), b in small()) {
            let (both, not) = (a.and(&b), a.not());
            for n in 0..32 {
                prop_assert_eq!(both.contains(n), a.contains(n) && b.contains(n));
                prop_assert_eq!(not.contains(n), !a.contains(n));
            }
            prop_assert_eq!(a.is_within(&b), (0..32).all(|n| !a.contains(n) || b.contains(n)));
            prop_assert_eq!(a.is_all(), (0..32).all(|n| a.contains(n)));
            prop_assert_eq!(a.is_empty(), (0..32).all(|n| !a.contains(n)));
            for set in [&a, &both, &not] {
                prop_assert!(set.ranges().windows(2).all(|w| w[0].1 + 1 < w[1].0), "normal form");
            }
        }

        #[test]
        fn nets_cover_exactly_the_addresses(pairs in prop::collection::vec((any::<u32>(), any::<u16>()), 0..5)) {
            let ranges = pairs.into_iter().map(|(first, more)| (first, first.saturating_add(more.into())));
            let set = Addresses::from_ranges(ranges.collect());
            let nets = set.to_nets();
            prop_assert_eq!(Addresses::of_nets(nets.iter().copied()), set.clone());
            prop_assert!(nets.is_sorted());
            // A smaller list would contain a network that replaces two halves.
            let joins = |pair: &[Ipv4Net]| {
                let [one, other] = [pair[0], pair[1]].map(|net| net.supernet());
                pair[0].prefix_len() == pair[1].prefix_len() && one == other
            };
            prop_assert!(!nets.windows(2).any(joins), "{:?}", nets);
            prop_assert_eq!(nets.len(), fewest(&set, Ipv4Net::default()));
        }

        /// A small address space with many different sets.
        #[test]
        fn nets_are_minimal(bits in any::<u32>(), first in any::<u32>()) {
            let net = Ipv4Net::new(first.into(), 27).unwrap().trunc();
            let there = (u32::from(net.network())..=net.broadcast().into()).filter(|number| bits >> (number & 31) & 1 == 1);
            let set = Addresses::from_ranges(there.map(|number| (number, number)).collect());
            prop_assert_eq!(set.to_nets().len(), fewest(&set, net));
        }
    }

    /// The minimum number of networks for the part of the set in this network: one if it is all of it, otherwise
    /// those of both halves.
    fn fewest(set: &Addresses, net: Ipv4Net) -> usize {
        let whole = Addresses::of_nets([net]);
        if set.and(&whole).is_empty() {
            return 0;
        }
        match whole.is_within(set) {
            true => 1,
            false => net.subnets(net.prefix_len() + 1).unwrap().map(|half| fewest(set, half)).sum(),
        }
    }

    #[test]
    fn the_ends_of_the_address_space() {
        let everything = Addresses::all();
        assert_eq!(everything.to_nets(), ["0.0.0.0/0".parse().unwrap()]);
        assert!(everything.not().is_empty());
        let top = Addresses::of_nets(["255.255.255.255/32".parse().unwrap(), "0.0.0.0/32".parse().unwrap()]);
        assert_eq!(top.not().not(), top);
        assert_eq!(top.not().ranges(), [(1, u32::MAX - 1)]);
        assert_eq!(Ports::from_ranges(vec![(65_535, 65_535)]).not().ranges(), [(0, 65_534)]);
    }

    #[test]
    fn protocols() {
        let set = Protocols::of(&[Protocol::TCP, Protocol(0), Protocol(255), Protocol(64)]);
        assert_eq!(set.iter().map(|p| p.0).collect::<Vec<_>>(), [0, 6, 64, 255]);
        assert!(set.and(set.not()).is_empty());
        assert_eq!(set.or(set.not()), Protocols::ALL);
        assert_eq!(Protocols::with_ports(), Protocols::of(&[Protocol::TCP, Protocol::UDP, Protocol::SCTP]));
    }
}
