//! Prefixes on the wire: a length in bits, and as many bytes as that needs (RFC 4271 4.3).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::family::Family;
use super::wire::Reader;

/// Reads prefixes to the end of the bytes. `None` if one is too long or incomplete; no prefix can then be trusted.
pub(super) fn decode(family: Family, mut bytes: Reader<'_>) -> Option<Vec<IpNet>> {
    let mut prefixes = Vec::new();
    while !bytes.is_empty() {
        let length = bytes.u8().filter(|length| *length <= family.bits())?;
        let given = bytes.take(usize::from(length.div_ceil(8)))?;
        let address = match family {
            Family::Ipv4 => IpAddr::from(Ipv4Addr::from(padded::<4>(given))),
            Family::Ipv6 => IpAddr::from(Ipv6Addr::from(padded::<16>(given))),
        };
        // The bits after the length have no meaning.
        prefixes.push(IpNet::new(address, length).ok()?.trunc());
    }
    Some(prefixes)
}

fn padded<const N: usize>(given: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..given.len()].copy_from_slice(given);
    bytes
}

/// Writes a prefix.
pub(super) fn encode(prefix: &IpNet, out: &mut Vec<u8>) {
    let length = prefix.prefix_len();
    out.push(length);
    let bytes = usize::from(length.div_ceil(8));
    match prefix.network() {
        IpAddr::V4(address) => out.extend(&address.octets()[..bytes]),
        IpAddr::V6(address) => out.extend(&address.octets()[..bytes]),
    }
}

/// The number of bytes of a prefix.
pub(super) fn encoded_length(prefix: &IpNet) -> usize {
    1 + usize::from(prefix.prefix_len().div_ceil(8))
}
