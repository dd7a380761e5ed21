//! Sets of numbers: addresses, ports, protocols.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use tortie_api::net::{IpVersion, Protocol};

/// A number of a set.
pub(crate) trait Number: Copy + Ord {
    /// The first number.
    const FIRST: Self;
    /// The last number.
    const LAST: Self;

    /// The number before it.
    fn previous(self) -> Option<Self>;

    /// The number after it.
    fn next(self) -> Option<Self>;
}

macro_rules! number {
    ($type:ty) => {
        impl Number for $type {
            const FIRST: Self = 0;
            const LAST: Self = <$type>::MAX;

            fn previous(self) -> Option<Self> {
                self.checked_sub(1)
            }

            fn next(self) -> Option<Self> {
                self.checked_add(1)
            }
        }
    };
}

number!(u16);
number!(u128);

/// A set of numbers, as sorted ranges that do not touch. Clones share their ranges.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Numbers<N> {
    ranges: Arc<[(N, N)]>,
}

/// A set of addresses of one family, which the user of the set knows. An IPv6 address is one number. An IPv4
/// address stands for 2^96 numbers: those whose first 32 bits are the address. So a prefix of either family is a range, and the
/// complement of a set is one of its family.
pub(super) type Addresses = Numbers<u128>;
/// A set of ports.
pub(crate) type Ports = Numbers<u16>;

/// The number of bits after an IPv4 address.
const AFTER_IPV4: u32 = 96;

/// The first number of an address.
pub(super) fn number_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)) << AFTER_IPV4,
        IpAddr::V6(address) => address.into(),
    }
}

/// The address with this number.
pub(super) fn address_of(number: u128, family: IpVersion) -> IpAddr {
    match family {
        IpVersion::V4 => IpAddr::V4(ipv4(number)),
        IpVersion::V6 => IpAddr::V6(number.into()),
    }
}

fn ipv4(number: u128) -> Ipv4Addr {
    Ipv4Addr::from((number >> AFTER_IPV4) as u32)
}

impl<N: Number> Numbers<N> {
    /// Every number.
    pub(crate) fn all() -> Self {
        Self::from_ranges(vec![(N::FIRST, N::LAST)])
    }

    /// The numbers of inclusive ranges, in any order.
    pub(crate) fn from_ranges(mut ranges: Vec<(N, N)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(N, N)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match merged.last_mut() {
                Some((_, end)) if end.next().is_none_or(|next| first <= next) => *end = last.max(*end),
                _ => merged.push((first, last)),
            }
        }
        Self { ranges: merged.into() }
    }

    /// The inclusive ranges, sorted; between two there is a gap.
    pub(crate) fn ranges(&self) -> &[(N, N)] {
        &self.ranges
    }

    /// Whether the number is in it.
    pub(crate) fn contains(&self, number: N) -> bool {
        let after = self.ranges.partition_point(|(first, _)| *first <= number);
        after > 0 && number <= self.ranges[after - 1].1
    }

    /// Whether no number is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether every number is in it.
    pub(crate) fn is_all(&self) -> bool {
        *self.ranges == [(N::FIRST, N::LAST)]
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
        let mut next = Some(N::FIRST);
        for (first, last) in self.ranges.iter() {
            if let (Some(start), Some(end)) = (next.filter(|start| start < first), first.previous()) {
                gaps.push((start, end));
            }
            next = last.next();
        }
        gaps.extend(next.map(|start| (start, N::LAST)));
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
    /// The addresses of those of the networks that are of this family.
    pub(crate) fn of_nets(family: IpVersion, nets: impl IntoIterator<Item = IpNet>) -> Addresses {
        let ranges =
            nets.into_iter().filter(|net| IpVersion::of(&net.addr()) == family).map(|net| match net {
                IpNet::V4(net) => {
                    let after = (1 << AFTER_IPV4) - 1;
                    (number_of(net.network().into()), number_of(net.broadcast().into()) | after)
                }
                IpNet::V6(net) => (net.network().into(), net.broadcast().into()),
            });
        Addresses::from_ranges(ranges.collect())
    }

    /// Those of the addresses that are of this family.
    pub(crate) fn of(family: IpVersion, addresses: impl IntoIterator<Item = IpAddr>) -> Addresses {
        Addresses::of_nets(family, addresses.into_iter().map(IpNet::from))
    }

    /// The smallest number of networks with exactly these addresses, sorted.
    pub(crate) fn to_nets(&self, family: IpVersion) -> Vec<IpNet> {
        let nets = |(first, last): &(u128, u128)| -> Vec<IpNet> {
            match family {
                IpVersion::V4 => Ipv4Subnets::new(ipv4(*first), ipv4(*last), 0).map(IpNet::from).collect(),
                IpVersion::V6 => Ipv6Subnets::new(Ipv6Addr::from(*first), Ipv6Addr::from(*last), 0)
                    .map(IpNet::from)
                    .collect(),
            }
        };
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
    use ipnet::{Ipv4Net, Ipv6Net};
    use proptest::prelude::*;

    use super::*;

    number!(u8);

    type Small = Numbers<u8>;

    fn small() -> impl Strategy<Value = Small> {
        // The ends of the space are frequent.
        let number = prop_oneof![any::<u8>(), Just(0), Just(u8::MAX)];
        prop::collection::vec((number.clone(), number), 0..6).prop_map(|pairs| {
            Small::from_ranges(pairs.into_iter().map(|(a, b)| (a.min(b), a.max(b))).collect())
        })
    }

    proptest! {
        #[test]
        fn operations_agree_with_those_of_sets(a in small(), b in small()) {
            let (both, not) = (a.and(&b), a.not());
            for n in 0..=u8::MAX {
                prop_assert_eq!(both.contains(n), a.contains(n) && b.contains(n));
                prop_assert_eq!(not.contains(n), !a.contains(n));
            }
            prop_assert_eq!(a.is_within(&b), (0..=u8::MAX).all(|n| !a.contains(n) || b.contains(n)));
            prop_assert_eq!(a.is_all(), (0..=u8::MAX).all(|n| a.contains(n)));
            prop_assert_eq!(a.is_empty(), (0..=u8::MAX).all(|n| !a.contains(n)));
            for set in [&a, &both, &not] {
                prop_assert!(set.ranges().windows(2).all(|w| w[0].1 + 1 < w[1].0), "normal form");
            }
        }

        #[test]
        fn nets_cover_exactly_the_addresses(
            pairs in prop::collection::vec((any::<u32>(), any::<u16>()), 0..5),
            is_ipv6 in any::<bool>(),
        ) {
            let family = if is_ipv6 { IpVersion::V6 } else { IpVersion::V4 };
            let addresses = |(first, more): (u32, u16)| (first, first.saturating_add(more.into()));
            let range = |(first, last): (u32, u32)| match family {
                IpVersion::V4 => (u128::from(first) << 96, (u128::from(last) << 96) | ((1 << 96) - 1)),
                IpVersion::V6 => (first.into(), last.into()),
            };
            let set = Addresses::from_ranges(pairs.into_iter().map(addresses).map(range).collect());
            let nets = set.to_nets(family);
            prop_assert_eq!(Addresses::of_nets(family, nets.iter().copied()), set.clone());
            prop_assert!(nets.is_sorted());
            // A smaller list would contain a network that replaces two halves.
            let joins = |pair: &[IpNet]| {
                let [one, other] = [pair[0], pair[1]].map(|net| net.supernet());
                pair[0].prefix_len() == pair[1].prefix_len() && one == other
            };
            prop_assert!(!nets.windows(2).any(joins), "{:?}", nets);
            prop_assert_eq!(nets.len(), fewest(&set, all_of(family)));
        }

        /// A small address space with many different sets.
        #[test]
        fn nets_are_minimal(bits in any::<u32>(), first in any::<u32>()) {
            let net = Ipv4Net::new(first.into(), 27).unwrap().trunc();
            let there = (u32::from(net.network())..=net.broadcast().into()).map(Ipv4Addr::from).filter(|address| bits >> (u32::from(*address) & 31) & 1 == 1);
            let set = Addresses::of(IpVersion::V4, there.map(IpAddr::V4));
            prop_assert_eq!(set.to_nets(IpVersion::V4).len(), fewest(&set, net.into()));
        }
    }

    fn all_of(family: IpVersion) -> IpNet {
        match family {
            IpVersion::V4 => Ipv4Net::default().into(),
            IpVersion::V6 => Ipv6Net::default().into(),
        }
    }

    /// The minimum number of networks for the part of the set in this network: one if it is all of it, otherwise
    /// those of both halves.
    fn fewest(set: &Addresses, net: IpNet) -> usize {
        let whole = Addresses::of_nets(IpVersion::of(&net.addr()), [net]);
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
        assert_eq!(everything.to_nets(IpVersion::V4), ["0.0.0.0/0".parse().unwrap()]);
        assert_eq!(everything.to_nets(IpVersion::V6), ["::/0".parse().unwrap()]);
        assert!(everything.not().is_empty());
        let ends = ["255.255.255.255/32", "0.0.0.0/32", "::/128"].map(|net| net.parse().unwrap());
        let top = Addresses::of_nets(IpVersion::V4, ends);
        assert_eq!(top.not().not(), top);
        let middle = [Ipv4Addr::new(0, 0, 0, 1), Ipv4Addr::new(255, 255, 255, 254)].map(IpAddr::V4);
        let [(first, last)] = top.not().ranges()[..] else { panic!("{top:?}") };
        assert_eq!([first, last].map(|number| address_of(number, IpVersion::V4)), middle);
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

    #[test]
    fn ranges_become_the_union_of_them_all() {
        for (ranges, expected) in [
            (vec![(1, 9), (3, 4)], vec![(1, 9)]),
            (vec![(3, 4), (1, 9)], vec![(1, 9)]),
            (vec![(1, 9), (3, 4), (10, 12)], vec![(1, 12)]),
            (vec![(1, 4), (3, 9)], vec![(1, 9)]),
            (vec![(1, 4), (5, 9)], vec![(1, 9)]),
            (vec![(1, 4), (6, 9)], vec![(1, 4), (6, 9)]),
            (vec![(0, u8::MAX), (7, 7)], vec![(0, u8::MAX)]),
            (vec![], vec![]),
        ] {
            assert_eq!(Small::from_ranges(ranges.clone()).ranges(), expected, "{ranges:?}");
        }
    }
}
