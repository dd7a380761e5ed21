//! Requests of pods, and the allocators of nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use tortie_ipam::{Ipam, Request};
use tortie_store::Store;

/// A request for a pod that is named as its handle.
pub(crate) fn request(node: &str, handle: &str) -> Request {
    let owner =
        [("namespace", "n"), ("pod", handle), ("node", node), ("timestamp", "2026-01-01 00:00:00 +0000 UTC")];
    Request {
        handle: handle.to_owned(),
        owner: owner.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        ..Request::default()
    }
}

/// An allocator of a node with this operating system.
pub(crate) fn ipam(store: Arc<dyn Store>, (node, os): (&str, &str)) -> Ipam {
    Ipam::new(store, node, BTreeMap::from([("kubernetes.io/os".to_owned(), os.to_owned())]))
}
