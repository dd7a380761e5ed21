//! Parts of objects as text, addresses and networks.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

/// The items of a list that may be absent.
pub(super) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A text; empty if it is absent.
pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The family as EndpointSlices name it.
pub(super) fn family_of(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// An address with leading zeros or without.
pub(super) fn ip(text: &str) -> Option<IpAddr> {
    let decimal = |part: &str| part.parse::<u32>().ok().map(|number| number.to_string());
    if !text.contains(':') {
        let parts: Option<Vec<String>> = text.split('.').map(decimal).collect();
        return parts?.join(".").parse().ok();
    }
    let group = |part: &str| match part {
        "" => Some(String::new()),
        _ if part.contains('.') => ip(part).map(|address| address.to_string()),
        _ => u32::from_str_radix(part, 16).ok().map(|number| format!("{number:x}")),
    };
    let groups: Option<Vec<String>> = text.split(':').map(group).collect();
    groups?.join(":").parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

/// A network with white space around it or without.
pub(super) fn net(text: &str) -> Option<IpNet> {
    let (address, length) = text.trim().split_once('/')?;
    Some(IpNet::new(ip(address)?, length.parse().ok()?).ok()?.trunc())
}
