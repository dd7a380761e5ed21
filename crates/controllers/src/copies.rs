//! The objects that the controllers write for an object of the Kubernetes API: those of Calico's kube-controllers
//! (`kube-controllers/pkg/converter`), and those that Tortie's agents read besides.

use serde_json::{Map, Value, json};
use tortie_api::kubernetes::Node;
use tortie_api::manifest::LAST_APPLIED;
use tortie_api::{Key, Kind};
use tortie_store::kubernetes::profile_of;
use tortie_store::{COPIED_FROM, POD_UID, Stored, endpoint_labels_of, pod_of};

use crate::calico_controllers::CalicoController;
use crate::decision::{Decision, annotation, labels, update};
use crate::policies;

/// The kinds that are copied from the Kubernetes API.
pub(crate) const SOURCES: [Kind; 10] = [
    Kind::Namespace,
    Kind::Node,
    Kind::ServiceAccount,
    Kind::Pod,
    Kind::Service,
    Kind::EndpointSlice,
    Kind::KubernetesNetworkPolicy,
    Kind::ClusterNetworkPolicy,
    Kind::AdminNetworkPolicy,
    Kind::BaselineAdminNetworkPolicy,
];

/// The kinds that are written.
pub(crate) const TARGETS: [Kind; 12] = [
    Kind::Namespace,
    Kind::Node,
    Kind::ServiceAccount,
    Kind::Pod,
    Kind::Service,
    Kind::EndpointSlice,
    Kind::Profile,
    Kind::NetworkPolicy,
    Kind::ClusterNetworkPolicy,
    Kind::AdminNetworkPolicy,
    Kind::BaselineAdminNetworkPolicy,
    Kind::WorkloadEndpoint,
];

/// The annotation of Calico's Node with the labels that came from Kubernetes
/// (`kube-controllers/pkg/controllers/node/labels.go`).
pub const KUBE_LABELS: &str = "projectcalico.org/kube-labels";

/// The copies of an object, each with its key. A Node's is a draft: [`node`] completes it.
pub(crate) fn copies(source: &Stored) -> Vec<(Key, Value)> {
    let Stored { key, value, .. } = source;
    let same = |fields: &[&str]| (key.clone(), trimmed(key, value, fields));
    match key.kind {
        Kind::Namespace | Kind::ServiceAccount => vec![same(&[]), profile(source)],
        Kind::Pod => vec![(key.clone(), pod(key, value))],
        Kind::Service => vec![same(&["spec", "status"])],
        Kind::EndpointSlice => vec![same(&["addressType", "endpoints", "ports"])],
        Kind::KubernetesNetworkPolicy => vec![policy(key, value)],
        Kind::Node => vec![(key.clone(), new_node(key, value))],
        _ => vec![same(&["spec"])],
    }
}

/// The value of the annotation [`COPIED_FROM`].
fn origin(key: &Key) -> String {
    let parts = [key.kind.plural(), &key.namespace, &key.name];
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join("/")
}

/// The key in that annotation.
pub(crate) fn source_of(copy: &Value) -> Option<Key> {
    let parts: Vec<&str> = annotation(copy, COPIED_FROM)?.split('/').collect();
    let kind = SOURCES.into_iter().find(|kind| Some(&kind.plural()) == parts.first())?;
    match (kind.namespaced(), parts.as_slice()) {
        (true, [_, namespace, name]) => Some(Key::namespaced(kind, *namespace, *name)),
        (false, [_, name]) => Some(Key::global(kind, *name)),
        _ => None,
    }
}

/// An object with some of its fields.
fn trimmed(key: &Key, value: &Value, fields: &[&str]) -> Value {
    let given = |name: &str| value["metadata"].get(name).cloned();
    let mut annotations = given("annotations").and_then(|all| all.as_object().cloned()).unwrap_or_default();
    // The record of `apply` may be as long as the object.
    annotations.remove(LAST_APPLIED);
    annotations.insert(COPIED_FROM.to_owned(), json!(origin(key)));
    let mut metadata = json!({"name": key.name, "labels": labels(value), "annotations": annotations});
    if key.kind.namespaced() {
        metadata["namespace"] = json!(key.namespace);
    }
    if let Some(uid) = given("uid") {
        metadata["uid"] = uid;
    }
    let mut copy =
        json!({"apiVersion": key.kind.api_version(), "kind": key.kind.name(), "metadata": metadata});
    for field in fields {
        if let Some(content) = value.get(*field) {
            copy[*field] = content.clone();
        }
    }
    copy
}

/// What agents and commands read of a Pod.
fn pod(key: &Key, value: &Value) -> Value {
    let mut copy = trimmed(key, value, &[]);
    let some = |value: &Value, fields: &[&str]| -> Value {
        let given = fields.iter().filter_map(|field| Some(((*field).to_owned(), value.get(field)?.clone())));
        Value::Object(given.collect())
    };
    copy["spec"] = some(&value["spec"], &["nodeName", "nodeSelector", "hostNetwork", "serviceAccountName"]);
    for field in ["containers", "initContainers"] {
        if let Some(containers) = value["spec"][field].as_array() {
            let containers: Vec<Value> =
                containers.iter().map(|container| some(container, &["name", "ports"])).collect();
            copy["spec"][field] = json!(containers);
        }
    }
    copy["status"] = some(&value["status"], &["phase", "podIP", "podIPs"]);
    copy
}

/// Nothing marks it as Tortie's: Calico's kube-controllers write the same under this name, and neither must change what the other has written.
fn profile(source: &Stored) -> (Key, Value) {
    let Stored { key, mut value, .. } = profile_of(source.clone());
    value["metadata"] = json!({"name": key.name});
    (key, value)
}

/// Without a mark, too.
fn policy(key: &Key, value: &Value) -> (Key, Value) {
    let copy = policies::copy_of(key);
    let metadata = json!({"name": copy.name, "namespace": copy.namespace});
    let value = json!({
        "apiVersion": copy.kind.api_version(), "kind": copy.kind.name(), "metadata": metadata,
        "spec": policies::spec(key, value),
    });
    (copy, value)
}

/// The copy of a Node that does not exist in the datastore yet.
#[must_use]
pub fn node_copy(node: &Stored) -> Value {
    new_node(&node.key, &node.value)
}

/// A new Node. Its agent adds the addresses of tunnels.
fn new_node(key: &Key, value: &Value) -> Value {
    let labels = labels(value);
    let mut annotations =
        json!({COPIED_FROM: origin(key), KUBE_LABELS: Value::Object(labels.clone()).to_string()});
    let addresses: Vec<Value> = listed(&value["status"]).collect();
    let internal = addresses.iter().filter(|address| address["type"] == "InternalIP");
    let mut internal = internal.filter_map(|address| address["address"].as_str()?.parse().ok());
    if let Some(address) = internal.find(std::net::IpAddr::is_ipv4) {
        // Its agent may follow the kubelet.
        for name in [Node::ADDRESS, Node::ANNOUNCED] {
            annotations[name] = json!(address.to_string());
        }
    }
    json!({
        "apiVersion": key.kind.api_version(), "kind": key.kind.name(),
        "metadata": {"name": key.name, "labels": labels, "annotations": annotations},
        "spec": {"orchRefs": [{"nodeName": key.name, "orchestrator": "k8s"}], "addresses": addresses},
    })
}

/// The IP addresses of a Node's status, or of the `spec` of Calico's Node, of the types of the Kubernetes API. Policies select
/// them by peers `nodes`. What somebody else writes under these types into the copy of a Node is replaced.
fn listed(of: &Value) -> impl Iterator<Item = Value> {
    let all = of["addresses"].as_array().map_or(&[][..], Vec::as_slice);
    let kept = all.iter().filter(|address| is_from_kubernetes(address));
    kept.map(|address| json!({"address": address["address"], "type": address["type"]}))
}

fn is_from_kubernetes(address: &Value) -> bool {
    let types = ["InternalIP", "ExternalIP", "Hostname", "InternalDNS", "ExternalDNS"];
    let is_ip = || address["address"].as_str().is_some_and(|text| text.parse::<std::net::IpAddr>().is_ok());
    address["type"].as_str().is_some_and(|kind| types.contains(&kind)) && is_ip()
}

/// Brings a Node to its desired state. Of an existing one, only the labels and addresses that came from Kubernetes change.
pub(crate) fn node(desired: Option<&Value>, actual: Option<&Stored>, copies_labels: bool) -> Decision {
    let Some(desired) = desired else { return Decision::Nothing };
    let Some(actual) = actual else { return Decision::Create(desired.clone()) };
    let refs = actual.value["spec"]["orchRefs"].as_array().map_or(&[][..], Vec::as_slice);
    let is_same = |of: &Value| of["orchestrator"] == "k8s" && of["nodeName"] == actual.key.name.as_str();
    if source_of(&actual.value).is_none() && !refs.iter().any(is_same) {
        return Decision::Foreign("copies the labels and addresses of Kubernetes' node to it");
    }
    let mut value = actual.value.clone();
    let mut changed = copies_labels && copy_labels(desired, &mut value);
    changed |= copy_addresses(desired, &mut value);
    if changed { Decision::Update(value, actual.version.clone()) } else { Decision::Nothing }
}

/// Returns whether labels have changed.
fn copy_labels(desired: &Value, value: &mut Value) -> bool {
    let before = annotation(value, KUBE_LABELS);
    let before: Map<String, Value> =
        before.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let wanted = labels(desired);
    let mut merged = labels(value);
    merged.retain(|name, _| !before.contains_key(name));
    merged.extend(wanted.clone());
    if merged == labels(value) && before == wanted {
        return false;
    }
    let mut annotations = value["metadata"]["annotations"].as_object().cloned().unwrap_or_default();
    annotations.insert(KUBE_LABELS.to_owned(), json!(Value::Object(wanted).to_string()));
    value["metadata"]["labels"] = Value::Object(merged);
    value["metadata"]["annotations"] = Value::Object(annotations);
    true
}

/// Returns whether addresses have changed. Those that a Node of Calico has besides stay.
fn copy_addresses(desired: &Value, value: &mut Value) -> bool {
    let wanted: Vec<Value> = listed(&desired["spec"]).collect();
    if wanted == listed(&value["spec"]).collect::<Vec<_>>() {
        return false;
    }
    let all = value["spec"]["addresses"].as_array().map_or(&[][..], Vec::as_slice);
    let others = all.iter().filter(|address| !is_from_kubernetes(address)).cloned();
    let merged: Vec<Value> = wanted.into_iter().chain(others).collect();
    value["spec"]["addresses"] = json!(merged);
    true
}

/// Brings the labels of an endpoint to those of its pod, with the labels that Calico adds. `pod` is the copy of its pod.
pub(crate) fn endpoint(actual: &Stored, pod: Option<&Value>) -> Decision {
    let Some(pod) = pod.filter(|pod| is_of(actual, pod)) else { return Decision::Nothing };
    let wanted = endpoint_labels_of(pod, &actual.key.namespace);
    if wanted == labels(&actual.value) || !actual.value["metadata"].is_object() {
        return Decision::Nothing;
    }
    let mut value = actual.value.clone();
    value["metadata"]["labels"] = Value::Object(wanted);
    Decision::Update(value, actual.version.clone())
}

/// Whether the endpoint belongs to this pod. Calico's endpoints name only the pod and the node.
fn is_of(endpoint: &Stored, pod: &Value) -> bool {
    match annotation(&endpoint.value, POD_UID) {
        Some(uid) => pod["metadata"]["uid"] == uid,
        None => endpoint.value["spec"]["node"] == pod["spec"]["nodeName"],
    }
}

/// The key of the endpoint's pod, if it is one of Kubernetes.
pub(crate) fn pod_of_endpoint(endpoint: &Stored) -> Option<Key> {
    let spec = &endpoint.value["spec"];
    let is_pod = spec["orchestrator"] == "k8s" && !pod_of(endpoint).name.is_empty();
    is_pod.then(|| pod_of(endpoint))
}

/// Whether the controllers could have created an object with this key.
pub(crate) fn concerns(key: &Key) -> bool {
    match key.kind {
        Kind::Profile => ["kns.", "ksa."].iter().any(|prefix| key.name.starts_with(prefix)),
        Kind::NetworkPolicy => key.name.starts_with(policies::PREFIX),
        _ => true,
    }
}

/// The controller of Calico that writes an object with this key. Nodes are left out: Calico copies only their labels, by the same rule.
pub(crate) fn calico_controller(key: &Key) -> Option<CalicoController> {
    match key.kind {
        Kind::Profile if key.name.starts_with("kns.") => Some(CalicoController::Namespace),
        Kind::Profile => Some(CalicoController::ServiceAccount),
        Kind::NetworkPolicy => Some(CalicoController::Policy),
        Kind::WorkloadEndpoint => Some(CalicoController::WorkloadEndpoint),
        _ => None,
    }
}

/// Brings a copy to its desired content. Only what the controllers have created is changed, and what has a name that Calico's
/// kube-controllers reserve: these write and delete such objects in the same way, so either continues the other's work.
pub(crate) fn copy(desired: Option<&Value>, actual: Option<&Stored>) -> Decision {
    let source = actual.and_then(|actual| source_of(&actual.value).or_else(|| source_by_name(&actual.key)));
    match (desired, actual, source) {
        (None, None, _) | (None, Some(_), None) => Decision::Nothing,
        (Some(desired), None, _) => Decision::Create(desired.clone()),
        (Some(desired), Some(actual), Some(_)) => update(actual, desired),
        (Some(desired), Some(actual), None) if is_alike(&actual.value, desired) => Decision::Nothing,
        (Some(_), Some(_), None) => {
            Decision::Foreign("writes the copy of an object of the Kubernetes API under this name")
        }
        (None, Some(actual), Some(source)) => Decision::Delete(actual.version.clone(), Some(source)),
    }
}

/// The object of the Kubernetes API whose copy has this name in etcd, for Tortie and for Calico's kube-controllers alike
/// (`kube-controllers/pkg/converter`).
fn source_by_name(copy: &Key) -> Option<Key> {
    let name = copy.name.as_str();
    match copy.kind {
        Kind::Profile => match name.strip_prefix("ksa.") {
            Some(account) => {
                let (namespace, name) = account.split_once('.')?;
                Some(Key::namespaced(Kind::ServiceAccount, namespace, name))
            }
            None => name.strip_prefix("kns.").map(|namespace| Key::global(Kind::Namespace, namespace)),
        },
        Kind::NetworkPolicy => {
            let name = name.strip_prefix(policies::PREFIX)?;
            Some(Key::namespaced(Kind::KubernetesNetworkPolicy, &copy.namespace, name))
        }
        _ => None,
    }
}

/// Whether somebody else has written the same content.
fn is_alike(actual: &Value, desired: &Value) -> bool {
    actual["spec"] == desired["spec"] && labels(actual) == labels(desired)
}
