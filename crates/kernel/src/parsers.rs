//! The parsers of what the kernel answers, for `judges/fuzz`: in the product, they are behind sockets.

use crate::netlink::{self, Reply};
use crate::xtables::{Legacy, LegacyFamily};
use crate::{conntrack, nftables, route};

/// Reads each message of a datagram in every way in which it could be read, and returns how many objects there are. For messages of routes,
/// the kind decides; those of netfilter are read by each of its parsers.
#[must_use]
pub fn datagram(bytes: &[u8]) -> usize {
    let objects: Vec<Reply> = netlink::objects(bytes);
    for reply in &objects {
        route::read_any(reply);
        conntrack::read_any(reply);
    }
    nftables::read_any(&objects);
    objects.len()
}

/// Reads the kernel's description of a legacy table (`struct ipt_getinfo`, and its entries), and what `tortie` does with it.
///
/// # Errors
/// The place that cannot be read.
pub fn legacy_table(family: LegacyFamily, info: &[u8; 84], entries: &[u8]) -> Result<usize, String> {
    let table = Legacy::parse(family, info, entries)?;
    table.read_any()?;
    Ok(table.rules())
}
