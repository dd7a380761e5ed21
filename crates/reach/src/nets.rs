//! Networks: which of them contain an address, and the regions into which they divide the address space.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// Finds the networks that contain an address.
pub(super) struct NetIndex<T> {
    by_length: BTreeMap<(bool, u8), HashMap<IpNet, Vec<T>>>,
}

impl<T: Copy> NetIndex<T> {
    pub(super) fn new(nets: impl IntoIterator<Item = (IpNet, T)>) -> Self {
        let mut by_length: BTreeMap<_, HashMap<IpNet, Vec<T>>> = BTreeMap::new();
        for (net, what) in nets {
            let of_length = by_length.entry((net.addr().is_ipv4(), net.prefix_len())).or_default();
            of_length.entry(net.trunc()).or_default().push(what);
        }
        Self { by_length }
    }

    pub(super) fn holding(&self, address: IpAddr) -> impl Iterator<Item = T> {
        let v4 = address.is_ipv4();
        let lengths = self.by_length.range((v4, 0)..=(v4, u8::MAX));
        lengths
            .filter_map(move |((_, length), nets)| nets.get(&IpNet::new(address, *length).ok()?.trunc()))
            .flatten()
            .copied()
    }
}

/// Documentation addresses that represent outsiders (RFC 5737, RFC 3849).
const EXAMPLES: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1)),
    IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// The networks that contain every address.
pub(super) fn everything(v6: bool) -> impl Iterator<Item = IpNet> {
    let whole = |address: IpAddr| IpNet::new(address, 0).ok();
    let v4 = whole(Ipv4Addr::UNSPECIFIED.into());
    v4.into_iter().chain(whole(Ipv6Addr::UNSPECIFIED.into()).filter(|_| v6))
}

/// One free address for each network that no narrower network contains, with the network. A network without such an
/// address has no region of its own.
pub(super) fn regions(nets: &BTreeSet<IpNet>, taken: &BTreeSet<IpAddr>) -> Vec<(IpAddr, IpNet)> {
    let mut sorted: Vec<IpNet> = nets.iter().map(IpNet::trunc).collect();
    sorted.sort_by_key(|net| (net.addr().is_ipv6(), number(net.addr()), net.prefix_len()));
    sorted.dedup();
    let of = |index| Some((own_address(&sorted, index, taken)?, *sorted.get(index)?));
    (0..sorted.len()).filter_map(of).collect()
}

fn own_address(sorted: &[IpNet], index: usize, taken: &BTreeSet<IpAddr>) -> Option<IpAddr> {
    let net = sorted.get(index)?;
    let inside = |other: &&IpNet| net.contains(*other);
    let inner: Vec<&IpNet> = sorted.get(index + 1..)?.iter().take_while(inside).collect();
    let free = |address: &IpAddr| !taken.contains(address) && !inner.iter().any(|net| net.contains(address));
    if net.prefix_len() == 0 {
        let example = EXAMPLES.iter().find(|address| net.contains(*address) && free(address));
        if example.is_some() {
            return example.copied();
        }
    }
    let (first, last) = (number(net.addr()), number(net.broadcast()));
    let v4 = net.addr().is_ipv4();
    let mut next = first;
    for hole in &inner {
        let (begin, end) = (number(hole.addr()), number(hole.broadcast()));
        if begin > next
            && let Some(found) = first_free(next, begin - 1, v4, taken)
        {
            return Some(found);
        }
        if end >= next {
            next = end.checked_add(1).filter(|next| *next <= last)?;
        }
    }
    first_free(next, last, v4, taken)
}

/// The first free address from `first` to `last`. The very first one is the last choice, because it often names the
/// network.
fn first_free(first: u128, last: u128, v4: bool, taken: &BTreeSet<IpAddr>) -> Option<IpAddr> {
    let mut at = if last - first >= 2 { first + 1 } else { first };
    while at <= last {
        let candidate = address(at, v4)?;
        if !taken.contains(&candidate) {
            return Some(candidate);
        }
        at = at.checked_add(1)?;
    }
    address(first, v4).filter(|candidate| !taken.contains(candidate))
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(number: u128, v4: bool) -> Option<IpAddr> {
    match v4 {
        true => Some(Ipv4Addr::from_bits(u32::try_from(number).ok()?).into()),
        false => Some(Ipv6Addr::from_bits(number).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions_of(nets: &[&str], taken: &[&str]) -> Vec<String> {
        let nets = nets.iter().map(|net| net.parse().unwrap()).collect();
        let taken = taken.iter().map(|address| address.parse().unwrap()).collect();
        regions(&nets, &taken).iter().map(|(address, net)| format!("{address} in {net}")).collect()
    }

    #[test]
    fn every_region_has_an_unused_address() {
        for (nets, taken, expected) in [
            (&["0.0.0.0/0"][..], &[][..], &["192.0.2.1 in 0.0.0.0/0"][..]),
            (&["0.0.0.0/0"], &["192.0.2.1"], &["198.51.100.1 in 0.0.0.0/0"]),
            (&["10.0.0.0/31", "10.0.0.0/32"], &[], &["10.0.0.1 in 10.0.0.0/31", "10.0.0.0 in 10.0.0.0/32"]),
            (&["10.0.0.0/31", "10.0.0.0/32"], &["10.0.0.1"], &["10.0.0.0 in 10.0.0.0/32"]),
            (
                &["10.0.0.0/24", "10.0.0.0/25", "10.0.0.128/25"],
                &[],
                &["10.0.0.1 in 10.0.0.0/25", "10.0.0.129 in 10.0.0.128/25"],
            ),
            (
                &["10.0.0.0/29", "10.0.0.0/30", "10.0.0.1/32"],
                &["10.0.0.5", "10.0.0.2"],
                &["10.0.0.6 in 10.0.0.0/29", "10.0.0.0 in 10.0.0.0/30", "10.0.0.1 in 10.0.0.1/32"],
            ),
            (&["255.255.255.255/32"], &[], &["255.255.255.255 in 255.255.255.255/32"]),
            (&["::/0", "2001:db8::/32"], &[], &["::1 in ::/0", "2001:db8::1 in 2001:db8::/32"]),
        ] {
            let mut expected: Vec<&str> = expected.to_vec();
            let mut got = regions_of(nets, taken);
            got.sort();
            expected.sort_unstable();
            assert_eq!(got, expected, "{nets:?} without {taken:?}");
        }
    }

    #[test]
    fn the_index_finds_what_a_search_finds() {
        let nets = ["0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/30", "10.0.0.1/32", "fd00::/8"];
        let nets: Vec<IpNet> = nets.iter().map(|net| net.parse().unwrap()).collect();
        let index = NetIndex::new(nets.iter().map(|net| (*net, *net)));
        for address in ["10.0.0.1", "10.0.0.2", "10.1.0.0", "192.0.2.1", "fd00::1", "fe80::1"] {
            let address: IpAddr = address.parse().unwrap();
            let mut found: Vec<IpNet> = index.holding(address).collect();
            let mut searched: Vec<IpNet> =
                nets.iter().filter(|net| net.contains(&address)).copied().collect();
            found.sort();
            searched.sort();
            assert_eq!(found, searched, "{address}");
        }
    }
}
