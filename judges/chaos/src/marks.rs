//! Objects that mean nothing. Whoever has a later state of one has all that was deleted of its kind before it was written: the positions
//! that etcd and Kubernetes tell are those of objects, and do not contain deletions.

use serde_json::{Value, json};
use tortie_api::Kind;

use crate::fault::Datastore;
use crate::known::Moment;
use crate::rules::NAMESPACE;

/// The object of a kind, written at a moment. `None`: nothing is deleted of the kind, or its positions contain deletions.
pub(crate) fn mark(datastore: Datastore, kind: Kind, now: Moment) -> Option<Value> {
    if datastore == Datastore::Embedded {
        return None;
    }
    let metadata = |name: &str| json!({"name": name, "namespace": NAMESPACE, "labels": {"at": now.as_millis().to_string()}});
    let calicos = json!({"selector": "color == 'none'", "types": ["Ingress"]});
    match kind {
        Kind::KubernetesNetworkPolicy => Some(json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata("mark"),
            "spec": {"podSelector": {"matchLabels": {"color": "none"}}, "policyTypes": ["Ingress"]},
        })),
        Kind::NetworkPolicy => Some(json!({
            "apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy", "metadata": metadata("mark"), "spec": calicos,
        })),
        Kind::GlobalNetworkPolicy => {
            let mut metadata = metadata("mark");
            metadata.as_object_mut()?.remove("namespace");
            Some(json!({
                "apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkPolicy", "metadata": metadata, "spec": calicos,
            }))
        }
        // In etcd, agents read the endpoints that agents write. A Kubernetes API has no endpoints, but Pods.
        Kind::WorkloadEndpoint if datastore == Datastore::Etcd => Some(json!({
            "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint", "metadata": metadata("judge-k8s-mark-eth0"),
            "spec": {
                "node": "judge", "orchestrator": "k8s", "pod": "mark", "endpoint": "eth0", "interfaceName": "cali0",
                "containerID": "mark", "ipNetworks": ["203.0.113.1/32"],
            },
        })),
        Kind::Pod if datastore == Datastore::Kubernetes => Some(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata("mark"),
            "spec": {"schedulerName": "nobody", "automountServiceAccountToken": false, "containers": [{"name": "judge", "image": "none"}]},
        })),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_can_be_applied_and_is_of_its_kind() {
        let mut marks = 0;
        for datastore in Datastore::ALL {
            for kind in Kind::all() {
                let Some(mark) = mark(datastore, kind, Moment::from_secs(1)) else { continue };
                let objects = tortie_api::manifest::read("mark", &mark.to_string()).unwrap();
                assert_eq!(objects[0].key.kind, kind);
                marks += 1;
            }
        }
        assert_eq!(marks, 8);
    }
}
