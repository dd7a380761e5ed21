//! Clusters as they are before their nodes publish anything: pods instead of their endpoints.

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Resource};

use super::Objects;

/// The cluster with two of three endpoints written as their pods. All ports of one of these are a sidecar's; of the other,
/// the first is, and the others are an ordinary container's.
#[must_use]
pub fn as_pods(objects: &Objects) -> Objects {
    let mut endpoints = 0;
    let one = |(key, value): &(Key, Value)| {
        // A pod always has a service account.
        if key.kind != Kind::WorkloadEndpoint || value["spec"]["serviceAccountName"] == "" {
            return (key.clone(), value.clone());
        }
        endpoints += 1;
        match endpoints % 3 {
            0 => (key.clone(), value.clone()),
            1 => pod(key, value, 1),
            _ => pod(key, value, usize::MAX),
        }
    };
    objects.iter().map(one).collect()
}

/// The endpoint's pod, with so many of its ports at a sidecar.
fn pod(endpoint: &Key, value: &Value, at_sidecar: usize) -> (Key, Value) {
    let spec = &value["spec"];
    let list = |field: &str| spec[field].as_array().cloned().unwrap_or_default();
    let port = |port: &Value| json!({"name": port["name"], "protocol": port["protocol"], "containerPort": port["port"]});
    let ports: Vec<Value> = list("ports").iter().map(port).collect();
    let (sidecars, others) = ports.split_at(ports.len().min(at_sidecar));
    let address = |net: &Value| json!({"ip": net.as_str().and_then(|net| net.split('/').next())});
    let name = spec["pod"].as_str().unwrap_or_default();
    let value = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": endpoint.namespace, "labels": value["metadata"]["labels"]},
        "spec": {
            "nodeName": spec["node"], "serviceAccountName": spec["serviceAccountName"],
            "initContainers": [{"name": "sidecar", "restartPolicy": "Always", "ports": sidecars}],
            "containers": [{"name": "main", "ports": others}],
        },
        "status": {"podIPs": list("ipNetworks").iter().map(address).collect::<Vec<_>>()},
    });
    (Key::namespaced(Kind::Pod, endpoint.namespace.as_str(), name), value)
}

/// The cluster with the endpoints that nodes publish of its pods.
#[must_use]
pub fn published(objects: &Objects) -> Objects {
    objects
        .iter()
        .map(|(key, value)| endpoint(key, value).unwrap_or_else(|| (key.clone(), value.clone())))
        .collect()
}

fn endpoint(key: &Key, value: &Value) -> Option<(Key, Value)> {
    let Ok(Resource::Pod(pod)) = Resource::read(key, value) else { return None };
    let node = pod.spec.node_name.as_deref().unwrap_or_default();
    let nets: Vec<String> =
        pod.status.addresses().into_iter().map(|address| ipnet::IpNet::from(address).to_string()).collect();
    let name = WorkloadEndpoint::name_for(node, &key.name, "eth0");
    let account = pod.service_account();
    let value = json!({
        "apiVersion": "projectcalico.org/v3", "kind": "WorkloadEndpoint",
        "metadata": {"name": name, "namespace": key.namespace, "labels": pod.metadata.labels},
        "spec": {
            "node": node, "pod": key.name, "endpoint": "eth0", "serviceAccountName": account,
            "ipNetworks": nets, "profiles": WorkloadEndpoint::profiles_for(&key.namespace, account),
            "ports": pod.endpoint_ports(),
            "interfaceName": format!("cali-{}-{}", key.namespace, key.name),
        },
    });
    Some((Key::namespaced(Kind::WorkloadEndpoint, key.namespace.as_str(), name), value))
}
