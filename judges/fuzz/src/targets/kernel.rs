//! What the Linux kernel answers.

use tortie_kernel::parsers;
use tortie_kernel::xtables::LegacyFamily;

use crate::input::Input;

/// A datagram of netlink.
pub fn netlink(bytes: &[u8]) {
    let _ = parsers::datagram(bytes);
}

/// A legacy table of `iptables`: a byte for the family, its description, and its entries.
pub fn legacy_table(bytes: &[u8]) {
    let mut input = Input(bytes);
    let family = if input.byte() == 0 { LegacyFamily::V4 } else { LegacyFamily::V6 };
    let Some((info, entries)) = input.0.split_first_chunk() else { return };
    let _ = parsers::legacy_table(family, info, entries);
}
