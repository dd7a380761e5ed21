//! Values in etcd. Calico's resources are JSON without a resourceVersion (`libcalico-go/lib/clientv3/resources.go`). A
//! Node is Calico's in etcd and the one of Kubernetes in Tortie: Calico's fields are its annotations.

use serde_json::{Value, json};
use tortie_api::calico::{from_calico_node, to_calico_node};
use tortie_api::{Key, Kind};

use crate::calico_form::{Origin, complete, is_calico_resource, show};
use crate::stored_json;

/// The text that is stored for an object. An object of Calico has Calico's form, and this identity if it has none.
pub(crate) fn encode(key: &Key, mut value: Value, origin: Origin<'_>) -> Vec<u8> {
    if is_calico_resource(key.kind) {
        if key.kind == Kind::Node {
            to_calico_node(&mut value);
        }
        complete(key.kind, &mut value, origin);
    }
    value.to_string().into_bytes()
}

/// The object of a stored text. A text that cannot be parsed becomes a string.
pub(crate) fn decode(key: &Key, text: &[u8]) -> Value {
    // Old versions of Calico wrote empty affinities (`libcalico-go/lib/backend/model/block_affinity.go`).
    if key.kind == Kind::BlockAffinity && text.is_empty() {
        return json!({});
    }
    let mut value = stored_json::decode(key, text);
    if key.kind == Kind::Node {
        from_calico_node(&mut value);
    }
    show(key.kind, &key.name, &mut value);
    value
}

#[cfg(test)]
mod tests {
    use tortie_api::kubernetes::Node;

    use super::*;

    const ORIGIN: Origin<'static> =
        Origin { uid: "9d6ba87f-0000-4000-8000-000000000000", created: "2026-11-29T00:00:00Z" };

    fn node() -> Key {
        Key::global(Kind::Node, "n")
    }

    #[test]
    fn a_node_of_calico_is_the_one_of_kubernetes() {
        let calico = json!({
            "apiVersion": "projectcalico.org/v3", "kind": "Node",
            "metadata": {"name": "n", "labels": {"kubernetes.io/os": "linux"}, "uid": "u", "creationTimestamp": "t"},
            "spec": {
                "bgp": {"asNumber": 64_512, "ipv4Address": "192.0.2.1/24"},
                "ipv4VXLANTunnelAddr": "10.0.0.1", "orchRefs": [{"nodeName": "n", "orchestrator": "k8s"}],
                "ofTheFuture": 1_800_000_000_000_000_123_u64,
            },
        });
        let kubernetes = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n", "labels": {"kubernetes.io/os": "linux"}, "uid": "u", "creationTimestamp": "t",
                "annotations": {Node::ADDRESS: "192.0.2.1/24", Node::AS_NUMBER: "64512", Node::VXLAN_ADDRESS: "10.0.0.1"}},
            "spec": {
                "orchRefs": [{"nodeName": "n", "orchestrator": "k8s"}],
                "ofTheFuture": 1_800_000_000_000_000_123_u64,
            },
        });
        assert_eq!(decode(&node(), calico.to_string().as_bytes()), kubernetes);
        assert_eq!(encode(&node(), kubernetes, ORIGIN), calico.to_string().into_bytes());
    }

    /// What is written comes back, whatever its shape. An object of Calico gets an identity, and a `spec` unless it is a Node.
    #[test]
    fn values_come_back() {
        let tunnel = json!({Node::VXLAN_ADDRESS: "10.0.0.1"});
        let identified = |mut value: Value| {
            value["metadata"]["uid"] = json!(ORIGIN.uid);
            value["metadata"]["creationTimestamp"] = json!(ORIGIN.created);
            value
        };
        let same = |key: Key, value: Value| (key, value.clone(), value);
        let new = |key: Key, value: Value| (key, value.clone(), identified(value));
        let tier = || Key::global(Kind::Tier, "t");
        let table = [
            same(node(), json!(3)),
            same(node(), json!("text")),
            new(node(), json!({"metadata": {"name": "n", "annotations": tunnel}})),
            new(
                node(),
                json!({"metadata": {"name": "n", "annotations": tunnel}, "spec": {"unschedulable": true}}),
            ),
            new(node(), json!({"metadata": {"name": "n", "annotations": "text"}, "spec": [1]})),
            new(node(), json!({"metadata": {"name": "n"}, "spec": {"a": 1}, "status": {"b": 2}})),
            new(node(), json!({"metadata": {"name": "n", "annotations": tunnel}, "spec": [1]})),
            new(
                node(),
                json!({"metadata": {"name": "n", "annotations": {Node::ADDRESS: "192.0.2.1"}}, "spec": {"bgp": 7}}),
            ),
            new(
                node(),
                json!({"metadata": {"name": "n", "annotations": {Node::AS_NUMBER: "abc"}}, "spec": {"a": 1}}),
            ),
            same(Key::namespaced(Kind::Pod, "n", "p"), json!({"metadata": {"resourceVersion": "1"}})),
            same(Key::global(Kind::IpamBlock, "10.0.0.0/26"), json!({"sequenceNumber": u64::MAX})),
            (
                tier(),
                json!({"metadata": {"name": "t", "resourceVersion": "7"}}),
                identified(
                    json!({"metadata": {"name": "t"}, "spec": {"order": 1_000_000, "defaultAction": "Deny"}, "status": {}}),
                ),
            ),
        ];
        for (key, value, expected) in table {
            assert_eq!(decode(&key, &encode(&key, value, ORIGIN)), expected);
        }
    }

    /// The names of policies by Calico's versions: before 3.30, with the annotation of 3.30 and 3.31, and as given.
    #[test]
    fn policies_have_the_names_that_calico_shows() {
        let stored = |name: &str, tier: &str, annotation: Option<&str>| {
            let mut value = json!({"metadata": {"name": name}, "spec": {"tier": tier}});
            if let Some(text) = annotation {
                value["metadata"]["annotations"] = json!({"projectcalico.org/metadata": text});
            }
            value
        };
        for (name, tier, annotation, shown) in [
            ("default.p", "default", None, "p"),
            ("default.p", "", None, "p"),
            ("default.p", "other", None, "default.p"),
            ("default.", "default", None, "default."),
            ("p", "default", None, "p"),
            ("default.p", "default", Some(r#"{"name":"p"}"#), "p"),
            ("other.p", "other", Some(r#"{"name":"p"}"#), "p"),
            ("default.p", "default", Some(r#"{"name":"default.p"}"#), "default.p"),
            ("default.p", "default", Some(r#"{"name":""}"#), "p"),
        ] {
            let key = Key::global(Kind::GlobalNetworkPolicy, name);
            let text = stored(name, tier, annotation).to_string();
            let value = decode(&key, text.as_bytes());
            assert_eq!(value["metadata"], json!({"name": shown}), "{text}");
            let again = decode(&key, &encode(&key, value.clone(), ORIGIN));
            assert_eq!(again["metadata"]["name"], shown, "written back: {text}");
            let set = Key::global(Kind::GlobalNetworkSet, name);
            assert_eq!(decode(&set, text.as_bytes()), stored(name, tier, annotation), "only policies");
        }
        let damaged = stored("default.p", "default", Some("{"));
        let read =
            decode(&Key::global(Kind::GlobalNetworkPolicy, "default.p"), damaged.to_string().as_bytes());
        assert_eq!(read["metadata"]["annotations"], damaged["metadata"]["annotations"]);
    }

    #[test]
    fn a_damaged_value_is_a_string() {
        assert_eq!(decode(&node(), b"{\"metadata\":"), json!("{\"metadata\":"));
        assert_eq!(decode(&Key::global(Kind::BlockAffinity, "n/10.0.0.0/26"), b""), json!({}));
        assert_eq!(decode(&Key::global(Kind::IpamHandle, "h"), b""), json!(""));
    }
}
