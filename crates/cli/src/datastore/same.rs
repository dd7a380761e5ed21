//! Whether two datastores mean the same by an object. Each adds fields of its own, such as identities.

use serde_json::{Map, Value, json};
use tortie_api::Kind;
use tortie_api::kubernetes::Node;
use tortie_controllers::KUBE_LABELS;
use tortie_store::StorageForm;

use super::nodes::own_labels;
use super::{Owner, owner};

/// Calico's and Tortie's annotations of Nodes.
const ANNOTATIONS: &str = "projectcalico.org/";

/// The part of an object that must be equal. `derived` says whether one of the two datastores is the Kubernetes API, which has
/// Nodes of its own, and derives endpoints from Pods.
pub(super) fn comparable(kind: Kind, value: &Value, derived: bool) -> Value {
    let metadata = &value["metadata"];
    match owner(kind) {
        Owner::Node if derived => json!({"annotations": annotations(value), "labels": own_labels(value)}),
        Owner::Endpoint if derived => {
            let spec = &value["spec"];
            let container = spec["containerID"].as_str().unwrap_or_default();
            json!({"pod": spec["pod"], "node": spec["node"], "ipNetworks": spec["ipNetworks"], "container": container})
        }
        // IPAM's records have no metadata.
        _ if metadata.is_null() && value.get("spec").is_none() => {
            let mut record = without_empty(value);
            if let Some(fields) = record.as_object_mut() {
                // Calico's definition requires it, and nobody reads it.
                if kind == Kind::IpamBlock {
                    fields.remove("strictAffinity");
                }
                // Earlier versions of Calico have neither the type nor a boolean.
                if kind == Kind::BlockAffinity {
                    fields.entry("type").or_insert_with(|| json!("host"));
                    let is_deleted = fields.get("deleted").is_some_and(|it| *it == true || *it == "true");
                    fields.insert("deleted".to_owned(), json!(is_deleted));
                }
            }
            record
        }
        _ => {
            // Objects that Calico's client has written have the defaults besides.
            let mut value = value.clone();
            // A tier without an order comes last, and its default is another one.
            if kind != Kind::Tier {
                StorageForm::Calico.fill(kind, &mut value);
            }
            let metadata = &value["metadata"];
            let mut spec = value.get("spec").cloned().unwrap_or_default();
            if let (Kind::ClusterInformation, Some(fields)) = (kind, spec.as_object_mut()) {
                fields.remove("datastoreReady");
                // Programs note there which of them run.
                fields.remove("clusterType");
            }
            // Kubernetes' own kinds keep some things elsewhere.
            let mut rest: Map<String, Value> = value.as_object().cloned().unwrap_or_default();
            rest.retain(|field, _| {
                !["apiVersion", "kind", "metadata", "spec", "status"].contains(&field.as_str())
            });
            // There, an empty mapping switches a controller on.
            if kind != Kind::KubeControllersConfiguration {
                spec = without_empty(&spec);
            }
            let metadata =
                without_empty(&json!({"labels": metadata["labels"], "annotations": metadata["annotations"]}));
            json!({"metadata": metadata, "spec": spec, "rest": without_empty(&Value::Object(rest))})
        }
    }
}

/// Calico's annotations of a Node, without those about labels ([`own_labels`]).
pub(super) fn annotations(value: &Value) -> Map<String, Value> {
    let all = value.pointer("/metadata/annotations").and_then(Value::as_object);
    let is_ours = |name: &str| name.starts_with(ANNOTATIONS) && ![KUBE_LABELS, Node::LABELS].contains(&name);
    let ours = all.into_iter().flatten().filter(|(name, _)| is_ours(name));
    ours.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Without fields that are null or empty mappings, which some datastores add or drop.
fn without_empty(value: &Value) -> Value {
    let Value::Object(fields) = value else { return value.clone() };
    let fields = fields.iter().map(|(name, value)| (name.clone(), without_empty(value)));
    let is_empty = |value: &Value| value.is_null() || value.as_object().is_some_and(Map::is_empty);
    Value::Object(fields.filter(|(_, value)| !is_empty(value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_datastores_add_does_not_count() {
        let policy = json!({"apiVersion": "projectcalico.org/v3", "metadata": {"name": "p", "uid": "a", "labels": {}},
            "spec": {"selector": "all()"}});
        let other = json!({"metadata": {"name": "p", "resourceVersion": "7", "uid": "b"}, "spec": {"selector": "all()", "order": null}});
        let changed = json!({"metadata": {"name": "p"}, "spec": {"selector": "a == 'b'"}});
        let block = json!({"cidr": "10.0.0.0/26", "affinity": null, "allocations": [null], "deleted": false});
        let stored =
            json!({"cidr": "10.0.0.0/26", "allocations": [null], "strictAffinity": false, "deleted": false});
        let given = json!({"cidr": "10.0.0.0/26", "allocations": [0], "deleted": false});
        let node = json!({"metadata": {"annotations": {"projectcalico.org/IPv4Address": "192.0.2.1/24", "other": "x"}}});
        let of_cluster = json!({"metadata": {"labels": {"a": "b"}, "annotations": {
            "projectcalico.org/IPv4Address": "192.0.2.1/24", "projectcalico.org/kube-labels": "{\"a\":\"b\"}"}}});
        let labelled = json!({"metadata": {"annotations": {"projectcalico.org/IPv4Address": "192.0.2.1/24"}, "labels": {"a": "b"}}});
        let affinity = |kind: Value| json!({"state": "confirmed", "deleted": "false", "type": kind});
        let moved = json!({"metadata": {"annotations": {"projectcalico.org/IPv4Address": "192.0.2.2/24"}}});
        let information = |ready: bool| json!({"spec": {"clusterGUID": "x", "datastoreReady": ready, "clusterType": if ready { "k8s" } else { "k8s,bgp" }}});
        for (kind, one, another, equal) in [
            (Kind::NetworkPolicy, &policy, &other, true),
            (Kind::NetworkPolicy, &policy, &changed, false),
            (Kind::IpamBlock, &block, &stored, true),
            (Kind::IpamBlock, &block, &given, false),
            (Kind::Node, &node, &of_cluster, true),
            (Kind::Node, &node, &moved, false),
            (Kind::Node, &node, &labelled, false),
            (
                Kind::BlockAffinity,
                &json!({"state": "confirmed", "deleted": false}),
                &affinity(json!("host")),
                true,
            ),
            (Kind::BlockAffinity, &affinity(json!("virtual")), &affinity(json!("host")), false),
            (Kind::ClusterInformation, &information(true), &information(false), true),
        ] {
            let is_equal = comparable(kind, one, true) == comparable(kind, another, true);
            assert_eq!(is_equal, equal, "{kind}: {one} {another}");
        }
    }
}
