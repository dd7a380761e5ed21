//! The effect of changes of other objects than policies.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_oracle::{Snapshot, Verdict};
use tortie_reach::Change;

/// A pod on a node, and the setting of the node.
fn cluster(to_host: &str) -> Snapshot {
    let mut snapshot = Snapshot::new();
    let mut add = |key: Key, value: Value| snapshot.insert(key, value, None);
    add(Key::global(Kind::Namespace, "a"), json!({"metadata": {"name": "a"}}));
    let pod = json!({
        "metadata": {"name": "pod", "namespace": "a"}, "spec": {"nodeName": "n", "containers": []},
        "status": {"podIP": "10.0.0.1"},
    });
    add(Key::namespaced(Kind::Pod, "a", "pod"), pod);
    let annotations = json!({"projectcalico.org/IPv4Address": "203.0.113.1/24"});
    add(Key::global(Kind::Node, "n"), json!({"metadata": {"name": "n", "annotations": annotations}}));
    let spec = json!({"defaultEndpointToHostAction": to_host});
    let settings = json!({"metadata": {"name": "default"}, "spec": spec});
    add(Key::global(Kind::FelixConfiguration, "default"), settings);
    snapshot
}

/// No policy decides about these packets, and no host endpoint.
#[test]
fn a_node_that_closes_itself_to_its_pods_is_a_difference() {
    for (before, after, verdict) in [
        ("Accept", "Drop", Some(Verdict::Deny)),
        ("Drop", "Return", Some(Verdict::Allow)),
        ("Accept", "Return", None),
    ] {
        let (before, after) = (cluster(before), cluster(after));
        let differences = Change::new(&before, &after).differences();
        let verdicts: Vec<Verdict> = differences.iter().map(|difference| difference.after.verdict).collect();
        assert_eq!(verdicts, verdict.into_iter().collect::<Vec<_>>(), "{differences:?}");
    }
}
