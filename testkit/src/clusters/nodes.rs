//! Nodes that peers `nodes` of policies select.

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use tortie_api::{Key, Kind};

use super::{Objects, labels};

/// Up to three nodes without pods. Their addresses are among those of packets to the outside; two may share one.
pub(super) fn far_nodes() -> BoxedStrategy<Objects> {
    let node = (labels(), listed(), any::<bool>());
    let nodes = prop::collection::vec(node, 0..4).prop_map(|nodes| {
        let one = |(index, (labels, listed, of_calico))| {
            let name = format!("far{index}");
            // A node of Calico, which etcd has, and one of Kubernetes.
            let of = if of_calico { "spec" } else { "status" };
            let value = json!({"metadata": {"name": name, "labels": labels}, of: {"addresses": listed}});
            (Key::global(Kind::Node, name), value)
        };
        nodes.into_iter().enumerate().map(one).collect()
    });
    nodes.boxed()
}

/// Addresses of a node besides its own, a name, and now and then one that cannot be read.
pub(super) fn listed() -> impl Strategy<Value = Vec<Value>> {
    let all =
        vec!["10.0.0.8", "203.0.113.9", "192.0.2.2", "10.0.1.0", "fd00::9", "2001:db8::1", "10.0.0.256"];
    (subsequence(all, 0..4), select(vec!["InternalIP", "ExternalIP"])).prop_map(|(addresses, kind)| {
        let name = json!({"type": "Hostname", "address": "far"});
        let listed = addresses.iter().map(|address| json!({"type": kind, "address": address}));
        listed.chain([name]).collect()
    })
}
