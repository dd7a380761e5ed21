//! Lists of addresses and ports in ACLs, and addresses of endpoints.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;

use ipnet::{IpNet, Ipv4Net};
use tortie_hcn::Feature;
use tortie_hcn::schema::Endpoint;

use crate::config::Config;

/// The IPv4 address of an endpoint, with its prefix length.
pub(crate) fn ipv4(endpoint: &Endpoint) -> Option<(Ipv4Addr, u8)> {
    let configurations = endpoint.ip_configurations.iter();
    configurations.filter_map(|it| Some((it.ip_address.parse().ok()?, it.prefix_length))).next()
}

/// The addresses of an endpoint, with their prefix lengths.
pub(crate) fn addresses(endpoint: &Endpoint) -> impl Iterator<Item = IpNet> {
    let configurations = endpoint.ip_configurations.iter();
    configurations.filter_map(|it| IpNet::new(it.ip_address.parse().ok()?, it.prefix_length).ok())
}

/// The ports or addresses in an ACL's list: any, or these ranges, sorted and without overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ranges<T> {
    Any,
    Of(Vec<RangeInclusive<T>>),
}

/// Addresses of both families. All of IPv4 come before those of IPv6, and no range has both.
pub(crate) type Addresses = Ranges<IpAddr>;

/// PortRanges.
pub(crate) type PortRanges = Ranges<u16>;

impl Addresses {
    /// The addresses in these networks.
    pub(crate) fn of_nets(nets: impl IntoIterator<Item = IpNet>) -> Addresses {
        Ranges::of(nets.into_iter().map(|net| net.network()..=net.broadcast()).collect())
    }
}

impl<T: Copy + Ord> Ranges<T> {
    pub(crate) fn contains(&self, value: T) -> bool {
        let Ranges::Of(ranges) = self else { return true };
        let after = ranges.partition_point(|range| *range.start() <= value);
        after > 0 && ranges[after - 1].contains(&value)
    }

    /// Nothing.
    pub(crate) fn none() -> Ranges<T> {
        Ranges::Of(vec![])
    }

    /// The union of two.
    pub(crate) fn or(&self, other: &Ranges<T>) -> Ranges<T> {
        match (self, other) {
            (Ranges::Of(a), Ranges::Of(b)) => Ranges::of([&a[..], b].concat()),
            _ => Ranges::Any,
        }
    }

    /// The intersection of two.
    pub(crate) fn and(&self, other: &Ranges<T>) -> Ranges<T> {
        let (Ranges::Of(ours), Ranges::Of(theirs)) = (self, other) else {
            return if *self == Ranges::Any { other.clone() } else { self.clone() };
        };
        let (mut both, mut a, mut b) = (Vec::new(), 0, 0);
        while let (Some(our), Some(their)) = (ours.get(a), theirs.get(b)) {
            let overlap = *our.start().max(their.start())..=*our.end().min(their.end());
            both.extend((!overlap.is_empty()).then_some(overlap));
            if our.end() < their.end() { a += 1 } else { b += 1 }
        }
        Ranges::Of(both)
    }

    fn of(mut ranges: Vec<RangeInclusive<T>>) -> Ranges<T> {
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<T>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start() <= last.end() => {
                    *last = *last.start()..=*last.end().max(range.end());
                }
                _ => merged.push(range),
            }
        }
        Ranges::Of(merged)
    }
}

/// Parses a comma-separated list of ports and port ranges (`80,8000-8080`); an empty list means any port. The error
/// is the invalid part.
pub(crate) fn ports(list: &str) -> Result<PortRanges, String> {
    if list.is_empty() {
        return Ok(Ranges::Any);
    }
    let port = |text: &str| text.parse::<u16>().ok();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = port(first)?..=port(last)?;
        (!range.is_empty()).then_some(range)
    };
    list.split(',')
        .map(|part| range(part).ok_or_else(|| part.to_owned()))
        .collect::<Result<_, _>>()
        .map(Ranges::of)
}

/// Parses an IPv4 address or CIDR.
pub(crate) fn cidr(text: &str) -> Option<Ipv4Net> {
    text.parse::<Ipv4Net>().ok().or_else(|| text.parse::<Ipv4Addr>().ok().map(Ipv4Net::from))
}

/// Parses an address or CIDR of a family that this HNS has.
pub(crate) fn any_cidr(text: &str, config: &Config) -> Option<IpNet> {
    let net = text.parse::<IpNet>().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))?;
    (matches!(net, IpNet::V4(_)) || config.version.supports(Feature::Ipv6DualStack)).then_some(net)
}

/// Parses a MAC address in the form of HNS: with dashes, in any case.
pub(crate) fn mac(text: &str) -> Option<[u8; 6]> {
    let separator = if text.contains(':') { ':' } else { '-' };
    let mut bytes = [0; 6];
    let mut parts = text.split(separator);
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}

/// Whether HNS takes this for a MAC address. A strict one takes dashes only, as it shows them. kube-proxy and flannel write colons.
pub(crate) fn is_mac(text: &str, config: &Config) -> bool {
    mac(text).is_some() && !(config.strict && text.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_ports() {
        let list = ports("80,8000-8080,8040-9000,1").unwrap();
        for (port, inside) in [(0, false), (1, true), (80, true), (81, false), (8081, true), (9001, false)] {
            assert_eq!(list.contains(port), inside, "{port}");
        }
        assert!(ports("").unwrap().contains(0));
        for bad in ["80,", "80, 81", "9-8", "65536", "http", "-1"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ranges_are_merged_and_split() {
        let of = |list: &str| ports(list).unwrap();
        let none = Ranges::none();
        let cases =
            [("1-5,10-20", "4-12", "1-20", "4-5,10-12"), ("1-5", "6-7", "1-5,6-7", ""), ("7", "7", "7", "7")];
        for (a, b, either, both) in cases {
            let both = if both.is_empty() { none.clone() } else { of(both) };
            assert_eq!((of(a).or(&of(b)), of(a).and(&of(b))), (of(either), both), "{a} {b}");
        }
        assert_eq!(of("1").and(&Ranges::Any), of("1"));
        assert_eq!(Ranges::Any.and(&of("1")), of("1"));
        assert_eq!(of("1").or(&Ranges::Any), Ranges::Any);
        assert!(!none.contains(0));
    }

    #[test]
    fn mac_addresses_have_dashes_or_colons() {
        let strict = Config::new(Config::NEWEST, Ipv4Addr::LOCALHOST);
        let lenient = Config::as_hns(Config::NEWEST, Ipv4Addr::LOCALHOST);
        for (text, if_strict) in [("0E-2A-0a-f4-03-05", true), ("0E:2A:0a:f4:03:05", false)] {
            assert_eq!(mac(text), Some([0x0e, 0x2a, 0x0a, 0xf4, 3, 5]));
            assert_eq!((is_mac(text, &strict), is_mac(text, &lenient)), (if_strict, true));
        }
        for bad in ["0E:2A-0a:f4-03:05", "0E-2A-0a-f4-03", "0E-2A-0a-f4-03-05-06", "E-2A-0a-f4-03-005"] {
            assert_eq!(mac(bad), None, "{bad}");
        }
    }
}
