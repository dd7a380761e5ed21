//! Sets of members as nftables sets.
//!
//! A selector's members become up to four sets. Addresses are in hash sets, in which adding or removing one takes
//! microseconds, however many there are. Networks are in interval sets, for which the kernel looks at the whole set.
//! The set of IPv4 addresses always exists; the others exist only if they have members, so that rules have no
//! unnecessary tests.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::net::IpAddr;

use ipnet::IpNet;
use sha2::{Digest, Sha256};
use tortie_dataplane::NodeState;
use tortie_kernel::nftables::{Element, Field, Key, Register, Set, SetSpec, Value};
use tortie_policy::program::{Member, SetId, SetKind};

/// The address family of a set or a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    pub(crate) fn field(self) -> Field {
        match self {
            Self::V4 => Field::Ipv4,
            Self::V6 => Field::Ipv6,
        }
    }

    /// The kernel's number.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::V4 => libc::NFPROTO_IPV4 as u8,
            Self::V6 => libc::NFPROTO_IPV6 as u8,
        }
    }

    /// The number of registers for an address.
    pub(crate) fn registers(self) -> Register {
        self.field().length() as Register / 4
    }
}

/// The part of a set's members in an nftables set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Addresses(Family),
    Nets(Family),
    AddressPorts(Family),
}

impl Part {
    pub(super) const ALL: [Self; 6] = [
        Self::Addresses(Family::V4),
        Self::Addresses(Family::V6),
        Self::Nets(Family::V4),
        Self::Nets(Family::V6),
        Self::AddressPorts(Family::V4),
        Self::AddressPorts(Family::V6),
    ];

    /// The name of the nftables set. It is short, because the kernel finds a set by comparing the names of all.
    pub(super) fn name(self, id: &SetId) -> String {
        let prefix = match self {
            Self::Addresses(Family::V4) => "a4",
            Self::Addresses(Family::V6) => "a6",
            Self::Nets(Family::V4) => "n4",
            Self::Nets(Family::V6) => "n6",
            Self::AddressPorts(Family::V4) => "p4",
            Self::AddressPorts(Family::V6) => "p6",
        };
        let mut bits =
            Sha256::digest(id.0.as_bytes()).iter().take(8).fold(0, |bits, byte| bits << 8 | u64::from(*byte));
        let mut name = prefix.to_owned();
        for _ in 0..DIGITS {
            name.push(char::from(ALPHABET[(bits % 32) as usize]));
            bits /= 32;
        }
        name
    }

    pub(super) fn spec(self) -> SetSpec {
        match self {
            Self::Addresses(family) => SetSpec::hash(&[family.field()]),
            Self::Nets(family) => SetSpec::interval(&[family.field()]),
            Self::AddressPorts(family) => SetSpec::hash(&[family.field(), Field::Protocol, Field::Port]),
        }
    }

    /// Whether the nftables set exists even without members.
    pub(super) fn always(self, kind: SetKind) -> bool {
        match kind {
            SetKind::Nets => self == Self::Addresses(Family::V4),
            SetKind::AddressPorts => self == Self::AddressPorts(Family::V4),
        }
    }

    /// The part of a member.
    pub(super) fn of(member: &Member) -> Self {
        match member {
            Member::Net(net) if net.prefix_len() == net.max_prefix_len() => {
                Self::Addresses(Family::of(net.addr()))
            }
            Member::Net(net) => Self::Nets(Family::of(net.addr())),
            Member::AddressPort { address, .. } => Self::AddressPorts(Family::of(*address)),
        }
    }
}

/// The nftables sets of one set, by name; none if the set is unknown, or has more members than these. Policies that name it then deny.
pub(super) fn kernel_sets(state: &NodeState, id: &SetId, most: usize) -> BTreeMap<String, Set> {
    let known = state.sets.get(id).filter(|(_, members)| members.len() <= most);
    let Some((kind, members)) = known else { return BTreeMap::new() };
    let parts = Part::ALL.into_iter().filter_map(|part| {
        let elements = elements(part, members);
        let wanted = part.always(*kind) || !elements.is_empty();
        wanted.then(|| (part.name(id), set(part.spec(), elements)))
    });
    parts.collect()
}

/// A set with these elements.
pub(super) fn set(spec: SetSpec, elements: impl IntoIterator<Item = Element>) -> Set {
    Set { spec, elements: elements.into_iter().map(|element| (element.key, element.value)).collect() }
}

fn elements(part: Part, members: &BTreeSet<Member>) -> Vec<Element> {
    let members = members.iter().filter(|member| Part::of(member) == part);
    match part {
        Part::Nets(_) => ranges(members.filter_map(network))
            .iter()
            .map(|(first, last)| Element::range(*first, *last))
            .collect(),
        _ => members.map(single).map(Element::key).collect(),
    }
}

/// The element changes in a part's nftables set when members of the part are added or removed. `there` are the
/// current elements, and `members` the new members. A key may get its current value again.
pub(super) fn changes(
    part: Part,
    affected: &[&Member],
    members: &BTreeSet<Member>,
    there: &BTreeMap<Key, Value>,
) -> BTreeMap<Key, Option<Value>> {
    let affected = affected.iter().copied();
    match part {
        Part::Nets(_) => range_changes(&affected.filter_map(network).collect::<Vec<_>>(), members, there),
        _ => {
            let wanted = |member: &Member| members.contains(member).then(Value::default);
            affected.map(|member| (single(member), wanted(member))).collect()
        }
    }
}

/// The same for networks. Coverage can change only within the added and removed networks: it is recomputed there, and
/// outside the old ranges stay. Only ranges that overlap or touch these networks can change.
fn range_changes(
    affected: &[IpNet],
    members: &BTreeSet<Member>,
    there: &BTreeMap<Key, Value>,
) -> BTreeMap<Key, Option<Value>> {
    let changed = ranges(affected.iter().copied());
    let old = Ranges::new(changed.iter().flat_map(|range| neighbours(range, there)).collect());
    let new = ranges(affected.iter().flat_map(|net| held(*net, members)));
    let new = Ranges::new(without(&old, &changed)).union(&new);
    let mut changes: BTreeMap<_, _> = old.iter().map(|(first, _)| (*first, None)).collect();
    let come = new.iter().map(|(first, last)| Element::range(*first, *last));
    changes.extend(come.map(|element| (element.key, Some(element.value))));
    changes
}

/// The ranges of a set that overlap or touch a range.
fn neighbours((first, last): &(Key, Key), there: &BTreeMap<Key, Value>) -> impl Iterator<Item = (Key, Key)> {
    let from = first.previous().unwrap_or(*first);
    let to = last.next().unwrap_or(*last);
    let before =
        there.range(..=to).rev().map(|(first, value)| (*first, value.end().copied().unwrap_or(*first)));
    before.take_while(move |(_, last)| *last >= from)
}

/// The part of some ranges that is not in others.
fn without(ranges: &Ranges, others: &Ranges) -> Vec<(Key, Key)> {
    let mut left = Vec::new();
    let mut others = others.iter().peekable();
    for (first, last) in ranges.iter() {
        let mut next = Some(*first);
        // A range that extends beyond this one may overlap the next one, too.
        while let (Some(from), Some((begin, end))) = (next, others.peek().filter(|(begin, _)| begin <= last))
        {
            left.extend(begin.previous().filter(|before| from <= *before).map(|before| (from, before)));
            next = end.next().map(|behind| behind.max(from)).filter(|behind| behind <= last);
            if end <= last {
                others.next();
            }
        }
        left.extend(next.map(|from| (from, *last)));
    }
    left
}

/// The part of a network that members cover: all of it, if one of them contains it, or the members inside it.
fn held(net: IpNet, members: &BTreeSet<Member>) -> Vec<IpNet> {
    if iter::successors(Some(net), IpNet::supernet).any(|net| members.contains(&Member::Net(net))) {
        return vec![net];
    }
    let last = IpNet::from(net.broadcast());
    let inside = members.range(Member::Net(net)..=Member::Net(last));
    inside.filter(|member| matches!(Part::of(member), Part::Nets(_))).filter_map(network).collect()
}

fn network(member: &Member) -> Option<IpNet> {
    match member {
        Member::Net(net) => Some(*net),
        Member::AddressPort { .. } => None,
    }
}

/// The key of a member that is a single element.
fn single(member: &Member) -> Key {
    match member {
        Member::Net(net) => Key::address(net.addr()),
        Member::AddressPort { address, protocol, port } => Key::address_port(*address, protocol.0, *port),
    }
}

/// The smallest number of ranges with the same addresses as networks of one family.
pub(crate) fn ranges(nets: impl IntoIterator<Item = IpNet>) -> Ranges {
    let ends = |net: IpNet| (Key::address(net.network()), Key::address(net.broadcast()));
    Ranges::new(nets.into_iter().map(ends).collect())
}

/// The number of digits in this alphabet for 64 bits.
const DIGITS: usize = 13;
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// The first 32 bits of the SHA-256.
pub(crate) fn digest_number(text: &str) -> u32 {
    Sha256::digest(text.as_bytes()).iter().take(4).fold(0, |number, byte| (number << 8) | u32::from(*byte))
}

/// The first 16 hexadecimal digits of the SHA-256.
pub(super) fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Sorted ranges of keys of one length, both ends included, that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ranges(Vec<(Key, Key)>);

impl Ranges {
    /// Merges ranges that overlap or touch.
    pub(super) fn new(mut ranges: Vec<(Key, Key)>) -> Self {
        ranges.sort_unstable();
        let mut joined: Vec<(Key, Key)> = Vec::new();
        for (first, last) in ranges {
            match joined.last_mut() {
                // The last range reaches the next one, or the end of the key space.
                Some((_, end)) if end.next().is_none_or(|behind| first <= behind) => *end = last.max(*end),
                _ => joined.push((first, last)),
            }
        }
        Self(joined)
    }

    /// The union of two.
    pub(super) fn union(&self, other: &Self) -> Self {
        Self::new([&self.0[..], &other.0].concat())
    }

    pub(super) fn as_slice(&self) -> &[(Key, Key)] {
        &self.0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Key, Key)> {
        self.0.iter()
    }

    /// The single keys, if there are at most this many.
    pub(super) fn keys(&self, most: usize) -> Option<Vec<Key>> {
        let mut keys = Vec::new();
        for (first, last) in &self.0 {
            let mut next = Some(*first);
            while let Some(key) = next.filter(|key| key <= last) {
                if keys.len() == most {
                    return None;
                }
                keys.push(key);
                next = key.next();
            }
        }
        Some(keys)
    }

    /// Whether they contain everything (true) or nothing (false), if one of the two holds.
    pub(super) fn always(&self) -> Option<bool> {
        match self.0.as_slice() {
            [] => Some(false),
            [(first, last)] if first.previous().is_none() && last.next().is_none() => Some(true),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_differ_if_ids_or_parts_differ() {
        let ids = ["s:abc", "s.abc", "", "a b", "ä", &"x".repeat(300), &"y".repeat(300)];
        let ids = ids.map(SetId::new);
        let names: BTreeSet<_> = ids.iter().flat_map(|id| Part::ALL.map(|part| part.name(id))).collect();
        assert_eq!(names.len(), ids.len() * Part::ALL.len(), "{names:?}");
        assert!(names.iter().all(|name| name.len() == 15 && name.is_ascii()), "{names:?}");
    }

    /// The address at this distance from the first, or from the last, address of a family.
    fn near_an_end(family: Family, distance: u32, from_last: bool) -> IpAddr {
        let count = |last: u128| if from_last { last - u128::from(distance) } else { distance.into() };
        match family {
            Family::V4 => (count(u32::MAX.into()) as u32).to_be_bytes().into(),
            Family::V6 => count(u128::MAX).to_be_bytes().into(),
        }
    }

    proptest! {
        #[test]
        fn ranges_contain_the_same_addresses_as_the_networks(
            family in prop_oneof![Just(Family::V4), Just(Family::V6)],
            nets in prop::collection::vec((0u32..600, any::<bool>(), prop_oneof![9 => 0u8..=12, 1 => Just(128)]), 0..8),
            probes in prop::collection::vec((0u32..700, any::<bool>()), 40),
        ) {
            let nets: Vec<IpNet> = nets.into_iter()
                .map(|(distance, from_last, host_bits)| {
                    let net = IpNet::from(near_an_end(family, distance, from_last));
                    IpNet::new(net.addr(), net.max_prefix_len().saturating_sub(host_bits)).unwrap().trunc()
                })
                .collect();
            let merged: Vec<_> = ranges(nets.clone()).iter().copied().collect();
            for pair in merged.windows(2) {
                prop_assert!(pair[0].1.next().unwrap() < pair[1].0, "apart and not touching: {merged:?}");
            }
            for (distance, from_last) in probes {
                let address = near_an_end(family, distance, from_last);
                let key = Key::address(address);
                let held = merged.iter().any(|(first, last)| (first..=last).contains(&&key));
                prop_assert_eq!(held, nets.iter().any(|net| net.contains(&address)));
            }
        }
    }

    #[test]
    fn everything_is_one_range() {
        let halves = ["0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8"].map(|net| net.parse().unwrap());
        assert_eq!(ranges(halves).always(), Some(true));
        assert_eq!(ranges(["::/0".parse().unwrap()]).always(), Some(true));
        assert_eq!(ranges(["::/1".parse().unwrap()]).always(), None);
    }

    /// A network of more than one address would admit its first one only.
    #[test]
    fn a_network_is_no_address_whatever_its_length() {
        for (net, expected) in [
            ("10.0.0.1/32", Part::Addresses(Family::V4)),
            ("10.0.0.0/31", Part::Nets(Family::V4)),
            ("0.0.0.0/0", Part::Nets(Family::V4)),
            ("fd00::1/128", Part::Addresses(Family::V6)),
            ("fd00::/127", Part::Nets(Family::V6)),
            ("fd00::/64", Part::Nets(Family::V6)),
            ("fd00::/32", Part::Nets(Family::V6)),
            ("::/0", Part::Nets(Family::V6)),
        ] {
            assert_eq!(Part::of(&Member::Net(net.parse().unwrap())), expected, "{net}");
        }
    }
}
