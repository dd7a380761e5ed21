//! Lists of addresses and ports, as ACLs write them.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

use ipnet::Ipv4Net;

/// What an ACL's list of numbers holds: anything, or these ranges, sorted and without overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ranges {
    Any,
    Of(Vec<RangeInclusive<u32>>),
}

impl Ranges {
    pub(crate) fn contains(&self, number: u32) -> bool {
        let Ranges::Of(ranges) = self else { return true };
        let after = ranges.partition_point(|range| *range.start() <= number);
        after > 0 && ranges[after - 1].contains(&number)
    }

    fn of(mut ranges: Vec<RangeInclusive<u32>>) -> Ranges {
        ranges.sort_by_key(|range| *range.start());
        let mut merged: Vec<RangeInclusive<u32>> = Vec::with_capacity(ranges.len());
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

/// The text of one part of a list that is none of what such a list may hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NotUnderstood(pub String);

/// Reads a comma list of ports and ranges of ports (`80,8000-8080`); empty is any.
pub(crate) fn ports(list: &str) -> Result<Ranges, NotUnderstood> {
    if list.is_empty() {
        return Ok(Ranges::Any);
    }
    let port = |text: &str| text.parse::<u16>().ok().map(u32::from);
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = port(first)?..=port(last)?;
        (!range.is_empty()).then_some(range)
    };
    list.split(',')
        .map(|part| range(part).ok_or_else(|| NotUnderstood(part.to_owned())))
        .collect::<Result<_, _>>()
        .map(Ranges::of)
}

/// Reads a comma list of addresses and CIDRs; empty is any. What is neither is looked up with `set`, which gives the
/// list that a set of that name holds.
pub(crate) fn addresses<'a>(
    list: &str,
    set: &dyn Fn(&str) -> Option<&'a str>,
) -> Result<Ranges, NotUnderstood> {
    if list.is_empty() {
        return Ok(Ranges::Any);
    }
    let mut ranges = Vec::new();
    for part in list.split(',') {
        match (cidr(part), set(part)) {
            (Some(net), _) => ranges.push(range(net)),
            (None, Some(members)) => {
                for member in members.split(',').filter(|member| !member.is_empty()) {
                    // A member of a nested set is a set of addresses; deeper nesting does not exist.
                    match (cidr(member), set(member)) {
                        (Some(net), _) => ranges.push(range(net)),
                        (None, Some(inner)) => ranges.extend(inner.split(',').filter_map(cidr).map(range)),
                        (None, None) => return Err(NotUnderstood(member.to_owned())),
                    }
                }
            }
            (None, None) => return Err(NotUnderstood(part.to_owned())),
        }
    }
    Ok(Ranges::of(ranges))
}

/// An IPv4 address or CIDR.
pub(crate) fn cidr(text: &str) -> Option<Ipv4Net> {
    text.parse::<Ipv4Net>().ok().or_else(|| text.parse::<Ipv4Addr>().ok().map(Ipv4Net::from))
}

fn range(net: Ipv4Net) -> RangeInclusive<u32> {
    net.network().into()..=net.broadcast().into()
}

/// A MAC address as HNS reads it: with dashes, in any case.
pub(crate) fn mac(text: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.split('-');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_sets(_: &str) -> Option<&'static str> {
        None
    }

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
    fn lists_of_addresses() {
        let list = addresses("10.0.0.0/8,192.168.1.5,0.0.0.0/32,255.255.255.255", &no_sets).unwrap();
        let cases = [
            ("10.255.0.1", true),
            ("11.0.0.0", false),
            ("192.168.1.5", true),
            ("192.168.1.6", false),
            ("0.0.0.0", true),
            ("0.0.0.1", false),
            ("255.255.255.255", true),
        ];
        for (address, inside) in cases {
            assert_eq!(list.contains(address.parse::<Ipv4Addr>().unwrap().into()), inside, "{address}");
        }
        for bad in ["Any", "10.0.0.0/33", "10.0.0.1,", " 10.0.0.1", "::1"] {
            assert!(addresses(bad, &no_sets).is_err(), "{bad}");
        }
    }

    #[test]
    fn sets_stand_for_their_members() {
        let set = |id: &str| match id {
            "inner" => Some("10.0.0.1,10.0.0.2"),
            "outer" => Some("inner"),
            "empty" => Some(""),
            "broken" => Some("gone"),
            _ => None,
        };
        let holds = |list: &str| addresses(list, &set).map(|ranges| ranges.contains(0x0a00_0002));
        assert_eq!(holds("inner"), Ok(true));
        assert_eq!(holds("outer"), Ok(true));
        assert_eq!(holds("empty"), Ok(false), "an empty set is nobody, not anybody");
        assert_eq!(holds("broken"), Err(NotUnderstood("gone".into())));
    }

    #[test]
    fn mac_addresses_have_dashes() {
        assert_eq!(mac("0E-2A-0a-f4-03-05"), Some([0x0e, 0x2a, 0x0a, 0xf4, 3, 5]));
        for bad in ["0E:2A:0a:f4:03:05", "0E-2A-0a-f4-03", "0E-2A-0a-f4-03-05-06", "E-2A-0a-f4-03-005"] {
            assert_eq!(mac(bad), None, "{bad}");
        }
    }
}
