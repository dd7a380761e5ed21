//! Addresses and networks as Kubernetes reads them: leading zeros are accepted (`ParseIPSloppy` of `k8s.io/utils/net`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// The address of a text, in its usual form. An IPv4 address that is written as an IPv6 address is an IPv4 address.
pub(crate) fn address(text: &str) -> Option<IpAddr> {
    without_leading_zeros(text).parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

/// The network of a text, without host bits. White space around it is ignored, as in `loadBalancerSourceRanges`.
pub(crate) fn network(text: &str) -> Option<IpNet> {
    let (before, length) = text.trim().split_once('/')?;
    let all_digits = !length.is_empty() && length.bytes().all(|byte| byte.is_ascii_digit());
    let length = length.parse::<u8>().ok().filter(|_| all_digits)?;
    let address: IpAddr = without_leading_zeros(before).parse().ok()?;
    IpNet::new(address, length).ok().map(|network| network.trunc())
}

/// True if packets to the address may be led elsewhere, and packets may be led there. The API server accepts no others as
/// external addresses or as endpoints (`ValidateNonSpecialIP`); other datastores do not check.
pub(crate) fn is_usable(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => Ipv4Addr::is_link_local(&address),
        IpAddr::V6(address) => Ipv6Addr::is_unicast_link_local(&address),
    };
    !(is_link_local || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

fn without_leading_zeros(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut number = String::new();
    let flush = |number: &mut String, result: &mut String| {
        let digits = number.trim_start_matches('0');
        result.push_str(if digits.is_empty() && !number.is_empty() { "0" } else { digits });
        number.clear();
    };
    for character in text.chars() {
        if character == '.' || character == ':' {
            flush(&mut number, &mut result);
            result.push(character);
        } else {
            number.push(character);
        }
    }
    flush(&mut number, &mut result);
    result
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_in_kubernetes() {
        for (text, expected) in [
            ("10.96.0.1", Some("10.96.0.1")),
            ("010.096.000.001", Some("10.96.0.1")),
            ("fd00:0000:0:00000::01", Some("fd00::1")),
            ("FD00::A", Some("fd00::a")),
            ("::ffff:10.0.0.01", Some("10.0.0.1")),
            ("::", Some("::")),
            ("10.96.0.256", None),
            ("10.96.1", None),
            ("0x0a.0.0.1", None),
            (" 10.0.0.1", None),
            ("fe80::1%eth0", None),
            ("None", None),
            ("", None),
        ] {
            assert_eq!(address(text), expected.map(|address| address.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn networks_are_read_as_in_kubernetes() {
        for (text, expected) in [
            ("10.0.0.0/8", Some("10.0.0.0/8")),
            (" 010.1.2.3/08 ", Some("10.0.0.0/8")),
            ("fd00::1/64", Some("fd00::/64")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("10.0.0.0", None),
            ("10.0.0.0/33", None),
            ("10.0.0.0/+8", None),
            ("10.0.0.0/", None),
            ("any/8", None),
        ] {
            assert_eq!(network(text), expected.map(|network| network.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn special_addresses_lead_nowhere() {
        for text in
            ["127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.169.254", "::1", "::", "ff02::1", "fe80::1"]
        {
            assert!(!is_usable(text.parse().unwrap()), "{text}");
        }
        for text in ["10.0.0.1", "192.0.2.1", "fd00::1"] {
            assert!(is_usable(text.parse().unwrap()), "{text}");
        }
    }
}
