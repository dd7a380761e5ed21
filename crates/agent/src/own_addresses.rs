//! The node's own addresses, as the annotations of its Node have them and as they should be.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::Value;
use tortie_api::kubernetes::Node;
use tortie_api::net::IpVersion;

use crate::AgentError;
use crate::node_address::AddressFinder;

/// The annotation of the node's own address of a family.
const fn own(version: IpVersion) -> &'static str {
    match version {
        IpVersion::V4 => Node::ADDRESS,
        IpVersion::V6 => Node::ADDRESS_V6,
    }
}

/// The annotations of the node's own addresses that may have to change. Fails if a method finds no address.
pub(crate) async fn own_annotations(
    node: &str,
    value: &Value,
    finder: &AddressFinder,
    with_flannel: bool,
) -> Result<BTreeMap<&'static str, Option<String>>, AgentError> {
    let current = &value["metadata"]["annotations"];
    let mut annotations = BTreeMap::new();
    for version in IpVersion::ALL {
        let own = own(version);
        let known = current[own].as_str();
        let found = finder.find(version).await;
        let found = found.map_err(|problem| AgentError::Node { node: node.to_owned(), problem })?;
        if let Some(found) = found {
            annotations.insert(own, Some(found.to_string()));
        } else if let Some(network) = own_network(value, version, known, finder) {
            annotations.insert(own, Some(network));
        } else if let Some(network) =
            left_by_flannel(current, version, finder).filter(|_| with_flannel && known.is_none())
        {
            annotations.insert(own, Some(network));
        } else if known.is_some_and(|known| is_lost(value, version, known, finder)) {
            annotations.insert(own, None);
        }
    }
    Ok(annotations)
}

/// The address by which flannel's daemons reach the node, given its annotations and those that will change. As for flanneld, it
/// may be that of a router before the node.
pub(crate) fn own_address(
    current: &Value,
    changed: &BTreeMap<&str, Option<String>>,
    version: IpVersion,
) -> Option<String> {
    let overwritten = current[Node::FLANNEL_OVERWRITE.of(version)].as_str().map(str::to_owned);
    overwritten.or_else(|| {
        let known = || current[own(version)].as_str().map(str::to_owned);
        let address = changed.get(own(version)).cloned().unwrap_or_else(known)?;
        Some(address.split('/').next()?.to_owned())
    })
}

/// The node's own address as its kubelet reports it, with the length of its network's prefix as far as that is known. `None`
/// if the Node has another one already, because Calico's agents and administrators write some; but one that no interface has
/// any more is replaced by one that an interface has.
fn own_network(
    node: &Value,
    version: IpVersion,
    current: Option<&str>,
    finder: &AddressFinder,
) -> Option<String> {
    let address = internal_address(node, version)?;
    let length = finder.prefix_length(address);
    let is_kept = |current: &str| match current.split('/').next().unwrap_or_default().parse::<IpAddr>() {
        Ok(known) if known == address => current.contains('/'),
        Ok(known) => length.is_none() || finder.prefix_length(known).is_some(),
        Err(_) => true,
    };
    if current.is_some_and(is_kept) {
        return None;
    }
    Some(length.map_or_else(|| address.to_string(), |length| format!("{address}/{length}")))
}

/// The address that flanneld has found on the node before, if an interface has it. Kubelets often report IPv4 only.
fn left_by_flannel(annotations: &Value, version: IpVersion, finder: &AddressFinder) -> Option<String> {
    let address = annotations[Node::FLANNEL_ADDRESS.of(version)].as_str()?.parse().ok()?;
    finder.prefix_length(address).map(|length| format!("{address}/{length}"))
}

/// Whether the node has an address of this family no longer: its kubelet reports others only, and no interface has it.
fn is_lost(node: &Value, version: IpVersion, known: &str, finder: &AddressFinder) -> bool {
    let reports = |version| internal_address(node, version).is_some();
    let Ok(address) = known.split('/').next().unwrap_or_default().parse() else { return false };
    let others = IpVersion::ALL.into_iter().any(reports) && !reports(version);
    others && finder.lacks(address)
}

/// The node's address as its kubelet reports it.
fn internal_address(node: &Value, version: IpVersion) -> Option<IpAddr> {
    let addresses = node["status"]["addresses"].as_array()?.iter();
    let internal = addresses.filter(|one| one["type"] == "InternalIP");
    let mut addresses = internal.filter_map(|one| one["address"].as_str()?.parse().ok());
    addresses.find(|address| IpVersion::of(address) == version)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node_address::{AddressMethods, Machine};

    fn finder() -> AddressFinder {
        AddressFinder { methods: AddressMethods::default(), machine: Machine::Linux }
    }

    /// CrossSubnet pools need it. Earlier agents wrote the address alone.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_address_has_the_prefix_length_of_its_interface() {
        let status = json!({"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]});
        let node = json!({"status": status});
        let finder = finder();
        for (current, expected) in [
            (None, Some("127.0.0.1/8")),
            (Some("127.0.0.1"), Some("127.0.0.1/8")),
            (Some("127.0.0.1/8"), None),
            // No interface has it, and one has that of the kubelet.
            (Some("192.0.2.9/24"), Some("127.0.0.1/8")),
            (Some("::1/128"), None),
            (Some("none"), None),
        ] {
            let found = own_network(&node, IpVersion::V4, current, &finder);
            assert_eq!(found.as_deref(), expected, "{current:?}");
        }
        assert_eq!(own_network(&node, IpVersion::V6, None, &finder), None);
        for (version, known, expected) in [
            (IpVersion::V6, "2001:db8::1/64", true),
            (IpVersion::V6, "::1/128", false),
            (IpVersion::V4, "192.0.2.9/24", false),
        ] {
            assert_eq!(is_lost(&node, version, known, &finder), expected, "{known}");
        }
        assert!(!is_lost(&json!({}), IpVersion::V6, "2001:db8::1/64", &finder), "without a kubelet");
    }

    /// An address that no interface has is that of a router before the node, or an old one.
    #[test]
    fn the_address_that_flanneld_has_found_counts_if_an_interface_has_it() {
        let finder = finder();
        let name = Node::FLANNEL_ADDRESS.of(IpVersion::V4);
        for (annotation, expected) in [
            (json!("127.0.0.1"), Some("127.0.0.1/8")),
            (json!("192.0.2.9"), None),
            (json!("none"), None),
            (json!(null), None),
        ] {
            let found = left_by_flannel(&json!({name: annotation}), IpVersion::V4, &finder);
            assert_eq!(found.as_deref(), expected, "{annotation}");
            assert_eq!(left_by_flannel(&json!({name: annotation}), IpVersion::V6, &finder), None);
        }
    }
}
