//! Objects that Tortie does not enforce, although they may be stored.

use std::collections::{BTreeMap, BTreeSet};

use tortie_api::Resource;
use tortie_api::kubernetes::Node;

use crate::Snapshot;

/// The host endpoints that are not enforced because their node is a Windows node, each with its node.
#[must_use]
pub fn not_enforced(snapshot: &Snapshot) -> BTreeMap<String, String> {
    let windows: BTreeSet<&str> = snapshot
        .iter()
        .filter(|(_, stored)| match &stored.resource {
            Ok(Resource::Node(node)) => node.metadata.labels.get(Node::OS).is_some_and(|os| os == "windows"),
            _ => false,
        })
        .map(|(key, _)| key.name.as_str())
        .collect();
    let of_windows = snapshot.iter().filter_map(|(key, stored)| match &stored.resource {
        Ok(Resource::HostEndpoint(host)) if windows.contains(host.spec.node.as_str()) => {
            Some((key.name.clone(), host.spec.node.clone()))
        }
        _ => None,
    });
    of_windows.collect()
}
