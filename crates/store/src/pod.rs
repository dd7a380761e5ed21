//! The pod of a WorkloadEndpoint. The name alone could also refer to a later pod of the same name.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use tortie_api::{Key, Kind};

use crate::Stored;

/// The annotation of a WorkloadEndpoint with the uid of its pod. It is Tortie's own: Calico's stored endpoints have
/// uids of their own, and endpoints that Calico derives from pods need none
/// (`libcalico-go/lib/backend/k8s/conversion`).
pub const POD_UID: &str = "tortie.io/pod-uid";

/// The annotation of an object that the controllers have copied from the Kubernetes API: the plural of its kind there, its
/// namespace and its name (`pods/default/web`). They copy the labels of such a pod to its endpoints, too.
pub const COPIED_FROM: &str = "tortie.io/copied-from";

/// The key of the endpoint's pod.
#[must_use]
pub fn pod_of(endpoint: &Stored) -> Key {
    let name = endpoint.value["spec"]["pod"].as_str().unwrap_or_default();
    Key::namespaced(Kind::Pod, &endpoint.key.namespace, name)
}

/// Whether the endpoint belongs to this pod, and not to another one of the same name. A derived endpoint has the pod's uid.
#[must_use]
pub fn is_of(endpoint: &Stored, pod: &Stored) -> bool {
    let metadata = &endpoint.value["metadata"];
    let of_pod = &pod.value["metadata"]["uid"];
    let is_same = match metadata["annotations"].get(POD_UID) {
        Some(uid) => uid == of_pod,
        // In etcd, each endpoint has a uid of its own.
        None => of_pod.is_null() || metadata["uid"] == *of_pod,
    };
    metadata.is_object() && pod_of(endpoint) == pod.key && is_same
}

/// The labels of a pod's WorkloadEndpoint: those of the pod, and Calico's own, by which Felix applies the policies of the namespace
/// (`libcalico-go/lib/backend/k8s/conversion/workload_endpoint_default.go`). Labels of the pod under Calico's names do not count.
#[must_use]
pub fn endpoint_labels(
    of_pod: impl IntoIterator<Item = (String, String)>,
    namespace: &str,
    service_account: &str,
) -> BTreeMap<String, String> {
    const SERVICE_ACCOUNT: &str = "projectcalico.org/serviceaccount";
    let mut labels: BTreeMap<String, String> = of_pod.into_iter().collect();
    labels.remove(SERVICE_ACCOUNT);
    // A longer name is no value of a label.
    let is_value = !service_account.is_empty() && service_account.len() < 63;
    let account = is_value.then_some((SERVICE_ACCOUNT, service_account));
    let own = [("projectcalico.org/namespace", namespace), ("projectcalico.org/orchestrator", "k8s")];
    labels.extend(own.into_iter().chain(account).map(|(name, value)| (name.to_owned(), value.to_owned())));
    labels
}

/// Like [`endpoint_labels`], of a stored pod.
#[must_use]
pub fn endpoint_labels_of(pod: &Value, namespace: &str) -> Map<String, Value> {
    let labels = pod["metadata"]["labels"].as_object().into_iter().flatten();
    let labels = labels.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
    let account = pod["spec"]["serviceAccountName"].as_str().unwrap_or_default();
    let labels = endpoint_labels(labels, namespace, account);
    labels.into_iter().map(|(name, value)| (name, json!(value))).collect()
}
