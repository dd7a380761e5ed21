//! Which addresses of a network are in use.

use std::fmt;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tortie_api::ipam::Attribute;

/// The users of addresses of a network, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InUse {
    count: u64,
    /// The owner of the first one.
    first: String,
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, first } = self;
        write!(f, "{count} {}, the first of {first}", if *count == 1 { "address" } else { "addresses" })
    }
}

/// The users of addresses of a network; `None` if there are none. Addresses that Windows reserves in its blocks and addresses that
/// rest after their release have no user. One whose attributes cannot be read has.
#[must_use]
pub fn in_use<'a>(net: &IpNet, blocks: impl IntoIterator<Item = &'a Value>) -> Option<InUse> {
    let (mut count, mut first) = (0_u64, None);
    for block in blocks {
        let cidr: Option<IpNet> = block["cidr"].as_str().and_then(|text| text.parse().ok());
        if !cidr.is_some_and(|cidr| net.contains(&cidr)) {
            continue;
        }
        for offset in block["allocations"].as_array().into_iter().flatten() {
            let Some(attribute) = offset.as_u64().and_then(|index| usize::try_from(index).ok()) else {
                continue;
            };
            let attribute = Attribute::deserialize(&block["attributes"][attribute]).unwrap_or_default();
            if attribute.is_windows() || attribute.released_at.is_some() {
                continue;
            }
            count += 1;
            first.get_or_insert_with(|| owner_of(&attribute));
        }
    }
    Some(InUse { count, first: first? })
}

fn owner_of(attribute: &Attribute) -> String {
    let text = |name: &str| attribute.owner.as_ref()?.get(name);
    if let (Some(namespace), Some(service)) = (text("namespace"), text("service")) {
        return format!("Service {namespace}/{service}");
    }
    match (text("namespace"), text("pod"), text("node"), &attribute.handle_id) {
        (Some(namespace), Some(pod), ..) => format!("pod {namespace}/{pod}"),
        (_, _, Some(node), _) => format!("node {node}"),
        (.., Some(handle)) => format!("handle {handle}"),
        _ => "an unknown owner".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn block(allocations: &Value, attributes: &Value) -> Value {
        json!({"cidr": "10.0.0.0/26", "allocations": allocations, "attributes": attributes})
    }

    #[test]
    fn addresses_in_use_are_those_of_pods_and_nodes() {
        let pod = json!({"handle_id": "h", "secondary": {"namespace": "n", "pod": "p", "node": "one"}});
        let node = json!({"handle_id": "t", "secondary": {"node": "one", "type": "vxlanTunnelAddress"}});
        let service = json!({"handle_id": "lb-x", "secondary": {"namespace": "n", "service": "s", "type": "LoadBalancer"}});
        let kept =
            json!({"handle_id": "windows-reserved-ipam-handle", "secondary": {"note": "windows reserved"}});
        let net = |text: &str| -> IpNet { text.parse().unwrap_or_default() };
        let cases = [
            (
                "10.0.0.0/16",
                json!([0, null, 0]),
                json!([pod.clone()]),
                Some("2 addresses, the first of pod n/p"),
            ),
            ("10.0.0.0/16", json!([0]), json!([service]), Some("1 address, the first of Service n/s")),
            ("10.0.0.0/16", json!([0]), json!([node]), Some("1 address, the first of node one")),
            (
                "10.0.0.0/16",
                json!([0]),
                json!([{"handle_id": "h"}]),
                Some("1 address, the first of handle h"),
            ),
            (
                "10.0.0.0/16",
                json!([1]),
                json!([kept.clone()]),
                Some("1 address, the first of an unknown owner"),
            ),
            ("10.0.0.0/16", json!([0]), json!([{"releasedAt": "2026-01-01T00:00:00Z"}]), None),
            ("10.0.0.0/16", json!([0]), json!([kept]), None),
            ("10.0.0.0/16", json!([null]), json!([]), None),
            ("10.1.0.0/16", json!([0]), json!([pod]), None),
        ];
        for (within, allocations, attributes, expected) in cases {
            let found = in_use(&net(within), [&block(&allocations, &attributes)]);
            let message = found.map(|found| found.to_string());
            assert_eq!(message.as_deref(), expected, "{within} {allocations}");
        }
    }
}
