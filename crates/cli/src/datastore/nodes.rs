//! Nodes in exports have the form of etcd: that of Calico's kube-controllers, where an annotation tells the labels of Kubernetes from those that
//! only Calico's programs and Tortie see. A Kubernetes API has the latter in another annotation.

use serde_json::{Map, Value, json};
use tortie_api::kubernetes::Node;
use tortie_controllers::KUBE_LABELS;
use tortie_store::Stored;

/// Fields of a Kubernetes Node's `spec` that agents read.
const KEPT: [&str; 3] = ["podCIDR", "podCIDRs", "unschedulable"];

/// The Node of a Kubernetes API in the form of etcd.
pub(super) fn from_kubernetes(stored: &Stored) -> Value {
    let mut node = tortie_controllers::node_copy(stored);
    let of = |field: &str| stored.value["metadata"][field].as_object().cloned().unwrap_or_default();
    let mut annotations = of("annotations");
    let own = annotations.remove(Node::LABELS).and_then(|text| mapping(&text)).unwrap_or_default();
    if let Some(all) = node["metadata"]["annotations"].as_object_mut() {
        all.extend(annotations);
    }
    if let Some(labels) = node["metadata"]["labels"].as_object_mut() {
        for (name, value) in own {
            labels.entry(name).or_insert(value);
        }
    }
    for field in KEPT {
        if let Some(value) = stored.value["spec"].get(field) {
            node["spec"][field] = value.clone();
        }
    }
    // Calico's client writes no empty lists.
    if let Some(spec) = node["spec"].as_object_mut() {
        spec.retain(|_, value| !value.as_array().is_some_and(Vec::is_empty));
    }
    node
}

/// The labels of an exported Node that its Kubernetes Node does not have.
pub(super) fn own_labels(node: &Value) -> Map<String, Value> {
    let metadata = &node["metadata"];
    let of_kubernetes = mapping(&metadata["annotations"][KUBE_LABELS]).unwrap_or_default();
    let mut labels = metadata["labels"].as_object().cloned().unwrap_or_default();
    labels.retain(|name, _| !of_kubernetes.contains_key(name));
    labels
}

/// The mapping that an annotation has as JSON.
fn mapping(text: &Value) -> Option<Map<String, Value>> {
    serde_json::from_str(text.as_str()?).ok()
}

/// The text of the annotation with these labels; `None` without labels.
pub(super) fn labels_annotation(labels: Map<String, Value>) -> Option<String> {
    (!labels.is_empty()).then(|| json!(labels).to_string())
}

#[cfg(test)]
mod tests {
    use tortie_api::{Key, Kind};
    use tortie_store::Written;

    use super::*;

    #[test]
    fn a_node_of_kubernetes_has_calicos_form_and_its_own_labels_come_back() {
        let value = json!({
            "metadata": {"name": "n", "labels": {"zone": "a"}, "annotations": {
                Node::LABELS: r#"{"rack":"1","zone":"b"}"#, Node::ADDRESS: "192.0.2.1/24", "x": "y"}},
            "spec": {"podCIDR": "10.0.0.0/24", "taints": []},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}], "conditions": [{}]},
        });
        let stored = Stored::new(Key::global(Kind::Node, "n"), value, Written::at(1));
        let node = from_kubernetes(&stored);
        assert_eq!(node["metadata"]["labels"], json!({"zone": "a", "rack": "1"}));
        let annotations = &node["metadata"]["annotations"];
        assert_eq!((&annotations[Node::ADDRESS], &annotations["x"]), (&json!("192.0.2.1/24"), &json!("y")));
        assert_eq!(annotations.get(Node::LABELS), None);
        assert_eq!(
            node["spec"],
            json!({"orchRefs": [{"nodeName": "n", "orchestrator": "k8s"}], "podCIDR": "10.0.0.0/24",
                "addresses": [{"address": "192.0.2.1", "type": "InternalIP"}]})
        );
        assert_eq!(node.get("status"), None);
        assert_eq!(labels_annotation(own_labels(&node)).as_deref(), Some(r#"{"rack":"1"}"#));
        assert_eq!(labels_annotation(own_labels(&json!({"metadata": {}}))), None);
    }
}
