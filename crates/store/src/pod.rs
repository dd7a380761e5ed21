//! The pod of a WorkloadEndpoint. The name alone could also refer to a later pod of the same name.

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
    let uid = metadata["annotations"].get(POD_UID).unwrap_or(&metadata["uid"]);
    metadata.is_object() && pod_of(endpoint) == pod.key && *uid == pod.value["metadata"]["uid"]
}
