//! WorkloadEndpoints, which Calico derives from Pods (`libcalico-go/lib/backend/k8s/conversion/conversion.go` and
//! `workload_endpoint_default.go`). A pod without addresses has none: Calico keeps such endpoints in its API, and filters
//! them out before they reach a node.

use std::fmt::Write as _;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};
use sha1::{Digest, Sha1};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind};

/// The annotation with the pod's address; empty when the CNI plugin has released it.
pub(crate) const POD_IP: &str = "cni.projectcalico.org/podIP";
/// The annotation with all addresses, separated by commas.
pub(crate) const POD_IPS: &str = "cni.projectcalico.org/podIPs";
/// The annotation with the addresses from AWS VPC CNI (`ANNOTATE_POD_IP`), which precedes the kubelet's report.
pub(crate) const AWS_POD_IPS: &str = "vpc.amazonaws.com/pod-ips";
/// The annotation with the container id of the pod's sandbox.
pub(crate) const CONTAINER_ID: &str = "cni.projectcalico.org/containerID";
/// The only interface of a pod that has an endpoint.
pub(crate) const INTERFACE: &str = "eth0";

const ORCHESTRATOR: &str = "k8s";
/// A longer name of a service account is no valid label.
const MAX_LABEL: usize = 63;

/// The endpoint of a pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Derived {
    Endpoint(Key, Value),
    /// It has none now: it has no address, or not any more.
    Without(Key),
    /// It never has one: it uses its node's network, or no node runs it yet.
    Never,
}

/// The endpoint of a Pod.
pub(crate) fn derive(pod: &Map<String, Value>) -> Derived {
    let field = |object: &str, field: &str| pod.get(object).map(|object| object[field].clone());
    let text = |object: &str, name: &str| match field(object, name) {
        Some(Value::String(text)) => text,
        _ => String::new(),
    };
    let (namespace, name) = (text("metadata", "namespace"), text("metadata", "name"));
    let node = text("spec", "nodeName");
    if node.is_empty() || field("spec", "hostNetwork") == Some(json!(true)) {
        return Derived::Never;
    }
    let endpoint = WorkloadEndpoint::name_for(&node, &name, INTERFACE);
    let key = Key::namespaced(Kind::WorkloadEndpoint, &namespace, endpoint);
    let (addresses, reported) = match addresses(pod) {
        Ok((addresses, reported)) if !addresses.is_empty() && !is_finished(pod) => (addresses, reported),
        Ok(_) => return Derived::Without(key),
        Err(invalid) => {
            tracing::warn!(
                pod = format!("{namespace}/{name}"),
                invalid,
                "the pod has an invalid address; it has no endpoint"
            );
            return Derived::Without(key);
        }
    };
    let account = match text("spec", "serviceAccountName") {
        account if account.is_empty() => "default".to_owned(),
        account => account,
    };
    let mut labels = match field("metadata", "labels") {
        Some(Value::Object(labels)) => labels,
        _ => Map::new(),
    };
    labels.insert("projectcalico.org/namespace".to_owned(), json!(namespace));
    labels.insert("projectcalico.org/orchestrator".to_owned(), json!(ORCHESTRATOR));
    if account.len() < MAX_LABEL {
        labels.insert("projectcalico.org/serviceaccount".to_owned(), json!(account));
    }
    let mut metadata = Map::new();
    metadata.insert("name".to_owned(), json!(key.name));
    metadata.insert("namespace".to_owned(), json!(namespace));
    metadata.insert("labels".to_owned(), Value::Object(labels));
    if !reported {
        metadata.insert("annotations".to_owned(), json!({(WorkloadEndpoint::UNREPORTED): "true"}));
    }
    // The uid of a derived endpoint is the pod's.
    for same in ["uid", "generateName", "creationTimestamp", "ownerReferences"] {
        if let Some(value) = field("metadata", same).filter(|value| !value.is_null()) {
            metadata.insert(same.to_owned(), value);
        }
    }
    let mut spec = json!({
        "orchestrator": ORCHESTRATOR,
        "node": node,
        "containerID": annotation(pod, CONTAINER_ID).unwrap_or_default(),
        "pod": name,
        "endpoint": INTERFACE,
        "serviceAccountName": account,
        "ipNetworks": addresses,
        "profiles": WorkloadEndpoint::profiles_for(&namespace, &account),
        "interfaceName": interface_name(&namespace, &name),
    });
    let ports = ports(pod);
    if !ports.is_empty() {
        spec["ports"] = Value::Array(ports);
    }
    let value = json!({
        "apiVersion": Kind::WorkloadEndpoint.api_version(),
        "kind": Kind::WorkloadEndpoint.name(),
        "metadata": metadata,
        "spec": spec,
    });
    Derived::Endpoint(key, value)
}

/// The name of the pod of an endpoint, from the endpoint's name; `None` if no pod has such an endpoint.
pub(crate) fn pod_name(endpoint: &str) -> Option<String> {
    let mut parts = vec![String::new()];
    let mut rest = endpoint.chars().peekable();
    while let Some(next) = rest.next() {
        if next == '-' && rest.next_if_eq(&'-').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(next);
        }
    }
    match <[String; 4]>::try_from(parts) {
        Ok([_, orchestrator, pod, interface]) if orchestrator == ORCHESTRATOR && interface == INTERFACE => {
            Some(pod)
        }
        _ => None,
    }
}

/// The addresses, and whether the kubelet reports them. Until it does, they are what the CNI plugin has stored.
fn addresses(pod: &Map<String, Value>) -> Result<(Vec<IpNet>, bool), String> {
    let status = pod.get("status").unwrap_or(&Value::Null);
    let reported = status["podIPs"].as_array().into_iter().flatten();
    let mut found: Vec<&str> = reported.filter_map(|one| one["ip"].as_str()).collect();
    if found.is_empty() {
        found.extend(status["podIP"].as_str().filter(|text| !text.is_empty()));
    }
    let reported = !found.is_empty();
    if !reported {
        let others = [annotation(pod, POD_IPS), annotation(pod, POD_IP), annotation(pod, AWS_POD_IPS)];
        let first = others.into_iter().flatten().find(|text| !text.is_empty());
        found = first.into_iter().flat_map(|text| text.split(',')).collect();
    }
    let read: Result<Vec<IpNet>, String> =
        found.into_iter().map(|text| address(text).ok_or_else(|| text.to_owned())).collect();
    let read = read?;
    // Each plugin gives one address of each family. Whoever writes more has something else in mind.
    let is_plain = |is_ipv4: bool| read.iter().filter(|net| net.addr().is_ipv4() == is_ipv4).count() <= 1;
    match reported || is_plain(true) && is_plain(false) {
        true => Ok((read, reported)),
        false => Err(format!("{} addresses in an annotation, of one family more than one", read.len())),
    }
}

/// An address, with or without its full length.
fn address(text: &str) -> Option<IpNet> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address.into());
    }
    text.parse::<IpNet>().ok().filter(|net| net.prefix_len() == net.max_prefix_len())
}

/// Whether its address belongs to the pod no longer.
fn is_finished(pod: &Map<String, Value>) -> bool {
    let is_deleted = pod.get("metadata").is_some_and(|metadata| metadata["deletionTimestamp"].is_string());
    let phase = pod.get("status").and_then(|status| status["phase"].as_str()).unwrap_or_default();
    (is_deleted && annotation(pod, POD_IP) == Some("")) || ["Succeeded", "Failed"].contains(&phase)
}

/// The ports of containers that have a name or a port of the node.
fn ports(pod: &Map<String, Value>) -> Vec<Value> {
    let spec = pod.get("spec").unwrap_or(&Value::Null);
    let containers = ["containers", "initContainers"].map(|list| spec[list].as_array());
    let ports = containers.into_iter().flatten().flatten();
    let ports = ports.filter_map(|container| container["ports"].as_array()).flatten();
    let on_node = |port: &Value| port["hostPort"].as_u64().filter(|number| *number > 0);
    let named = |port: &Value| port["name"].as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    let found = ports.filter_map(|port| {
        let protocol = port["protocol"].as_str().unwrap_or("TCP");
        let is_relevant = named(port).is_some() || on_node(port).is_some();
        if !is_relevant || !["TCP", "UDP", "SCTP"].contains(&protocol) {
            return None;
        }
        let mut found = json!({"protocol": protocol, "port": port["containerPort"].as_u64()?});
        if let Some(name) = named(port) {
            found["name"] = json!(name);
        }
        if let Some(number) = on_node(port) {
            found["hostPort"] = json!(number);
        }
        if let Some(address) = port["hostIP"].as_str().filter(|address| !address.is_empty()) {
            found["hostIP"] = json!(address);
        }
        Some(found)
    });
    found.collect()
}

/// The interface on the host, as Calico's CNI plugin names it.
fn interface_name(namespace: &str, pod: &str) -> String {
    /// `cali` and this many digits.
    const DIGITS: usize = 11;
    let mut digest = String::new();
    for byte in Sha1::digest(format!("{namespace}.{pod}")) {
        let _ = write!(digest, "{byte:02x}");
    }
    digest.truncate(DIGITS);
    format!("cali{digest}")
}

fn annotation<'a>(pod: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    pod.get("metadata")?.get("annotations")?.get(name)?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::trim;

    /// A running pod with these changes: the path and the new value.
    fn pod(changes: &[(&str, Value)]) -> Map<String, Value> {
        let mut pod = json!({
            "metadata": {"name": "my-pod", "namespace": "default", "uid": "u", "labels": {"app": "a"}},
            "spec": {"nodeName": "node-a", "serviceAccountName": "sa",
                "containers": [{"name": "c"}], "initContainers": []},
            "status": {"phase": "Running"},
        });
        for (path, value) in changes {
            let (parent, name) = path.rsplit_once('/').unwrap_or_default();
            // The names of annotations have slashes.
            let (parent, name) = match path.split_once("annotations/") {
                Some((parent, name)) => (format!("{parent}annotations"), name),
                None => (parent.to_owned(), name),
            };
            if pod.pointer(&parent).is_none() {
                pod["metadata"]["annotations"] = json!({});
            }
            pod.pointer_mut(&parent).unwrap_or(&mut Value::Null)[name] = value.clone();
        }
        // What is not read must not be needed.
        pod["spec"]["containers"][0]["env"] = json!([{"name": "A", "value": "B"}]);
        let list = json!({"items": [pod]}).to_string();
        let mut list = trim::read(trim::of_list(Kind::WorkloadEndpoint), list.as_bytes()).unwrap_or_default();
        match list["items"][0].take() {
            Value::Object(pod) => pod,
            other => panic!("{other}"),
        }
    }

    fn derived(changes: &[(&str, Value)]) -> Value {
        match derive(&pod(changes)) {
            Derived::Endpoint(key, value) => {
                assert_eq!(
                    key,
                    Key::namespaced(Kind::WorkloadEndpoint, "default", "node--a-k8s-my--pod-eth0")
                );
                value
            }
            other => panic!("{other:?}"),
        }
    }

    const IP: &str = "/metadata/annotations/cni.projectcalico.org/podIP";
    const AWS: &str = "/metadata/annotations/vpc.amazonaws.com/pod-ips";
    const IPS: &str = "/metadata/annotations/cni.projectcalico.org/podIPs";

    #[test]
    fn an_endpoint_is_as_calico_derives_it() {
        let ports = json!([
            {"name": "http", "containerPort": 80},
            {"containerPort": 81},
            {"name": "dns", "containerPort": 53, "protocol": "UDP"},
            {"name": "new", "containerPort": 54, "protocol": "NEW"},
        ]);
        let of_init =
            json!([{"name": "i", "ports": [{"containerPort": 82, "hostPort": 83, "hostIP": "192.0.2.1"}]}]);
        let changes = [
            ("/spec/containers/0/ports", ports),
            ("/spec/initContainers", of_init),
            (IP, json!("10.0.0.1/32")),
            ("/metadata/annotations/cni.projectcalico.org/containerID", json!("c1")),
            ("/metadata/generateName", json!("my-")),
        ];
        let expected = json!({
            "apiVersion": "projectcalico.org/v3",
            "kind": "WorkloadEndpoint",
            "metadata": {
                "name": "node--a-k8s-my--pod-eth0", "namespace": "default", "uid": "u", "generateName": "my-",
                "annotations": {(WorkloadEndpoint::UNREPORTED): "true"},
                "labels": {
                    "app": "a",
                    "projectcalico.org/namespace": "default",
                    "projectcalico.org/orchestrator": "k8s",
                    "projectcalico.org/serviceaccount": "sa",
                },
            },
            "spec": {
                "orchestrator": "k8s", "node": "node-a", "containerID": "c1", "pod": "my-pod", "endpoint": "eth0",
                "serviceAccountName": "sa", "ipNetworks": ["10.0.0.1/32"],
                "profiles": ["kns.default", "ksa.default.sa"],
                "interfaceName": "cali5e30f018633",
                "ports": [
                    {"name": "http", "protocol": "TCP", "port": 80},
                    {"name": "dns", "protocol": "UDP", "port": 53},
                    {"protocol": "TCP", "port": 82, "hostPort": 83, "hostIP": "192.0.2.1"},
                ],
            },
        });
        assert_eq!(derived(&changes), expected);
        // Calico's own example.
        assert_eq!(interface_name("default", "mypod"), "cali4e199eba087");
    }

    /// What the kubelet reports comes first.
    #[test]
    fn addresses_come_from_the_status_or_the_annotations() {
        let status = |ips: &[&str]| {
            let all: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
            ("/status/podIPs", json!(all))
        };
        let table = [
            (
                vec![status(&["10.0.0.1", "fd00::1"]), (IPS, json!("10.0.0.2"))],
                vec!["10.0.0.1/32", "fd00::1/128"],
            ),
            (vec![("/status/podIP", json!("10.0.0.1")), (IPS, json!("10.0.0.2"))], vec!["10.0.0.1/32"]),
            (
                vec![(IPS, json!("10.0.0.1/32,fd00::1/128")), (IP, json!("10.0.0.2"))],
                vec!["10.0.0.1/32", "fd00::1/128"],
            ),
            (vec![(IPS, json!("")), (IP, json!("10.0.0.2/32"))], vec!["10.0.0.2/32"]),
            (vec![("/status/podIP", json!("10.0.0.1")), (IP, json!(""))], vec!["10.0.0.1/32"]),
            (vec![(AWS, json!("10.0.0.3"))], vec!["10.0.0.3/32"]),
            (vec![(IP, json!("10.0.0.2/32")), (AWS, json!("10.0.0.3"))], vec!["10.0.0.2/32"]),
        ];
        for (changes, expected) in table {
            let endpoint = derived(&changes);
            assert_eq!(endpoint["spec"]["ipNetworks"], json!(expected), "{changes:?}");
            // Whoever may change the pod can write an annotation, and only the kubelet the status.
            let is_reported = changes.iter().any(|(path, _)| path.starts_with("/status"));
            let marked = endpoint["metadata"]["annotations"].get(WorkloadEndpoint::UNREPORTED).is_some();
            assert_eq!(marked, !is_reported, "{changes:?}");
        }
    }

    #[test]
    fn some_pods_have_no_endpoint() {
        let address = ("/status/podIP", json!("10.0.0.1"));
        let deleted = ("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"));
        let with = |more: &[(&'static str, Value)]| {
            let mut all = vec![address.clone()];
            all.extend_from_slice(more);
            derive(&pod(&all))
        };
        for never in [("/spec/hostNetwork", json!(true)), ("/spec/nodeName", json!(""))] {
            assert_eq!(with(&[never]), Derived::Never);
        }
        let table = [
            derive(&pod(&[])),
            with(&[("/status/phase", json!("Succeeded"))]),
            with(&[("/status/phase", json!("Failed"))]),
            with(&[deleted.clone(), (IP, json!(""))]),
            with(&[("/status/podIP", json!("10.0.0.1/24"))]),
            with(&[("/status/podIP", json!("x"))]),
        ];
        for derived in table {
            assert!(matches!(derived, Derived::Without(_)), "{derived:?}");
        }
        assert!(matches!(with(&[deleted]), Derived::Endpoint(..)), "it may still run");
    }

    #[test]
    fn a_long_name_of_a_service_account_is_no_label() {
        let long = "a".repeat(63);
        let value = derived(&[("/spec/serviceAccountName", json!(long)), (IP, json!("10.0.0.1"))]);
        assert_eq!(value["metadata"]["labels"]["projectcalico.org/serviceaccount"], Value::Null);
        assert_eq!(value["spec"]["serviceAccountName"], json!(long));
    }

    #[test]
    fn the_name_of_an_endpoint_tells_its_pod() {
        let table = [
            ("node--a-k8s-my--pod-eth0", Some("my-pod")),
            ("n-k8s-p-eth0", Some("p")),
            ("n-k8s-p-net1", None),
            ("n-cni-p-eth0", None),
            ("n-k8s-p", None),
            ("n-k8s-p-eth0-x", None),
            ("", None),
        ];
        for (name, expected) in table {
            assert_eq!(pod_name(name).as_deref(), expected, "{name}");
        }
    }
}
