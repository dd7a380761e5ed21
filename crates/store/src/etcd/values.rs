//! Values in etcd. Calico's resources are JSON without a resourceVersion (`libcalico-go/lib/clientv3/resources.go`). A
//! Node is Calico's in etcd and the one of Kubernetes in Tortie: Calico's fields are its annotations
//! (`libcalico-go/lib/backend/k8s/resources/node.go`).

use serde_json::{Map, Value, json};
use tortie_api::kubernetes::Node;
use tortie_api::{Key, Kind};

use super::keys;
use crate::calico_form::{Origin, complete, show};
use crate::stored_json;

/// Annotations of the Kubernetes node, and the fields of Calico's node: parent and name below `spec`.
const NODE_FIELDS: [(&str, Option<&str>, &str); 10] = [
    (Node::ADDRESS, Some("bgp"), "ipv4Address"),
    (Node::ADDRESS_V6, Some("bgp"), "ipv6Address"),
    (Node::IPIP_ADDRESS, Some("bgp"), "ipv4IPIPTunnelAddr"),
    ("projectcalico.org/RouteReflectorClusterID", Some("bgp"), "routeReflectorClusterID"),
    (Node::VXLAN_ADDRESS, None, "ipv4VXLANTunnelAddr"),
    (Node::VXLAN_MAC, None, "vxlanTunnelMACAddr"),
    (Node::VXLAN_ADDRESS_V6, None, "ipv6VXLANTunnelAddr"),
    (Node::VXLAN_MAC_V6, None, "vxlanTunnelMACAddrV6"),
    ("projectcalico.org/IPv4WireguardInterfaceAddr", Some("wireguard"), "interfaceIPv4Address"),
    ("projectcalico.org/IPv6WireguardInterfaceAddr", Some("wireguard"), "interfaceIPv6Address"),
];
const CALICO_VERSION: &str = "projectcalico.org/v3";

/// The text that is stored for an object. An object of Calico has Calico's form, and this identity if it has none.
pub(crate) fn encode(key: &Key, mut value: Value, origin: Origin<'_>) -> Vec<u8> {
    if keys::is_calico_resource(key.kind) {
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
        of_calico_node(&mut value);
    }
    show(key.kind, &mut value);
    value
}

fn to_calico_node(value: &mut Value) {
    let Some(fields) = value.as_object_mut() else { return };
    let annotations = fields.get_mut("metadata").and_then(|metadata| metadata.get_mut("annotations"));
    let Some(annotations) = annotations.and_then(Value::as_object_mut) else { return };
    let mut moved = Vec::new();
    for (annotation, parent, field) in NODE_FIELDS {
        if let Some(text) = annotations.remove(annotation) {
            moved.push((parent, field, text));
        }
    }
    if annotations.is_empty()
        && !moved.is_empty()
        && let Some(metadata) = fields.get_mut("metadata").and_then(Value::as_object_mut)
    {
        metadata.remove("annotations");
    }
    if fields.get("apiVersion").is_some_and(|version| version == Kind::Node.api_version()) {
        fields.insert("apiVersion".to_owned(), json!(CALICO_VERSION));
    }
    let Some(spec) = object_at(fields, "spec") else { return };
    for (parent, field, text) in moved {
        let section = match parent {
            Some(parent) => object_at(spec, parent),
            None => Some(&mut *spec),
        };
        if let Some(section) = section {
            section.insert(field.to_owned(), text);
        }
    }
    if spec.is_empty() {
        fields.remove("spec");
    }
}

fn of_calico_node(value: &mut Value) {
    let Some(fields) = value.as_object_mut() else { return };
    if fields.get("apiVersion").is_some_and(|version| version == CALICO_VERSION) {
        fields.insert("apiVersion".to_owned(), json!(Kind::Node.api_version()));
    }
    let Some(spec) = fields.get_mut("spec").and_then(Value::as_object_mut) else { return };
    let mut found = Vec::new();
    for (annotation, parent, field) in NODE_FIELDS {
        let section = match parent {
            Some(parent) => spec.get_mut(parent).and_then(Value::as_object_mut),
            None => Some(&mut *spec),
        };
        if let Some(text) = section.and_then(|section| section.remove(field)) {
            found.push((annotation, text));
        }
        // An empty section would be invalid when it is written back.
        if let Some(parent) = parent
            && spec.get(parent).and_then(Value::as_object).is_some_and(Map::is_empty)
        {
            spec.remove(parent);
        }
    }
    if spec.is_empty() {
        fields.remove("spec");
    }
    if found.is_empty() {
        return;
    }
    let Some(metadata) = object_at(fields, "metadata") else { return };
    let Some(annotations) = object_at(metadata, "annotations") else { return };
    annotations.extend(found.into_iter().map(|(annotation, text)| (annotation.to_owned(), text)));
}

/// The object of a field, which is created if it is absent or null; `None` if the field has another type.
fn object_at<'a>(fields: &'a mut Map<String, Value>, field: &str) -> Option<&'a mut Map<String, Value>> {
    let value = fields.entry(field).or_insert(Value::Null);
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}

#[cfg(test)]
mod tests {
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
                "annotations": {Node::ADDRESS: "192.0.2.1/24", Node::VXLAN_ADDRESS: "10.0.0.1"}},
            "spec": {
                "bgp": {"asNumber": 64_512}, "orchRefs": [{"nodeName": "n", "orchestrator": "k8s"}],
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
            same(node(), json!({"metadata": {"name": "n", "annotations": "text"}, "spec": [1]})),
            new(node(), json!({"metadata": {"name": "n"}, "spec": {"a": 1}, "status": {"b": 2}})),
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
