//! Checks of the names and fields of a manifest. Stored objects may have more fields (a newer Kubernetes adds some);
//! manifests may not, because a misspelt field would be ignored.

use serde_json::{Map, Value};

use crate::fields::{is_label_name, is_label_value};
use crate::kubernetes::{Workload, check_service, pod_of};
use crate::unknown_fields::only;
use crate::{FieldError, Key, Kind, Resource, is_reserved_label, known_fields, support};

const METADATA: &[&str] = &[
    "name",
    "namespace",
    "labels",
    "annotations",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "generateName",
    "finalizers",
    "ownerReferences",
    "managedFields",
    "selfLink",
];

/// `v1` PodSpec of Kubernetes 1.36.
const POD_SPEC: &[&str] = &[
    "activeDeadlineSeconds",
    "affinity",
    "automountServiceAccountToken",
    "containers",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "ephemeralContainers",
    "hostAliases",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "hostUsers",
    "hostname",
    "hostnameOverride",
    "imagePullSecrets",
    "initContainers",
    "nodeName",
    "nodeSelector",
    "os",
    "overhead",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "readinessGates",
    "resourceClaims",
    "resources",
    "restartPolicy",
    "runtimeClassName",
    "schedulerName",
    "schedulingGates",
    "securityContext",
    "serviceAccount",
    "serviceAccountName",
    "setHostnameAsFQDN",
    "shareProcessNamespace",
    "subdomain",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
    "workloadRef",
];

/// `v1` Container of Kubernetes 1.36.
const CONTAINER: &[&str] = &[
    "args",
    "command",
    "env",
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "name",
    "ports",
    "readinessProbe",
    "resizePolicy",
    "resources",
    "restartPolicy",
    "restartPolicyRules",
    "securityContext",
    "startupProbe",
    "stdin",
    "stdinOnce",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "tty",
    "volumeDevices",
    "volumeMounts",
    "workingDir",
];

const CONTAINER_PORT: &[&str] = &["containerPort", "hostIP", "hostPort", "name", "protocol"];

/// Every problem with the object's names and fields.
pub(crate) fn check(key: &Key, value: &Value) -> Vec<FieldError> {
    let mut problems = Vec::new();
    let top: &[&str] = match key.kind {
        Kind::ServiceAccount => {
            &["apiVersion", "kind", "metadata", "secrets", "imagePullSecrets", "automountServiceAccountToken"]
        }
        Kind::EndpointSlice => &["apiVersion", "kind", "metadata", "addressType", "endpoints", "ports"],
        _ => &["apiVersion", "kind", "metadata", "spec", "status"],
    };
    only(value, "", top, &mut problems);
    if let Some(metadata) = value.get("metadata") {
        only(metadata, "metadata", METADATA, &mut problems);
        labels(metadata, &mut problems);
    }
    name(key, &mut problems);
    known_fields::check(key.kind, value, &mut problems);
    if key.kind == Kind::Pod {
        pod(value, &mut problems);
    }
    if key.kind.is_workload() {
        workload(key, value, &mut problems);
    }
    if key.kind == Kind::Service {
        problems.extend(check_service(value));
    }
    problems.extend(support::check(key, value));
    if matches!(
        key.kind,
        Kind::ClusterNetworkPolicy | Kind::AdminNetworkPolicy | Kind::BaselineAdminNetworkPolicy
    ) {
        closed_rules(key, value, &mut problems);
    }
    let given_labels = match key.kind {
        Kind::NetworkSet | Kind::GlobalNetworkSet | Kind::HostEndpoint => Some("metadata.labels"),
        Kind::Profile => Some("spec.labelsToApply"),
        _ => None,
    };
    if let Some(path) = given_labels {
        reserved(value, path, &mut problems);
    }
    problems
}

/// Checks the template of a workload as a pod.
fn workload(key: &Key, value: &Value, problems: &mut Vec<FieldError>) {
    let known: Vec<FieldError> = known_fields::check_workload(key.kind.name(), value);
    let new: Vec<FieldError> = known.into_iter().filter(|error| !problems.contains(error)).collect();
    problems.extend(new);
    let path = Workload::template_path(key.kind);
    let Some(template) = value.pointer(&format!("/{}", path.replace('.', "/"))) else {
        problems.push(FieldError::new(path, "is missing"));
        return;
    };
    only(template, path, &["metadata", "spec"], problems);
    let mut of_pod = Vec::new();
    let value = pod_of(key, template);
    labels(&value["metadata"], &mut of_pod);
    pod(&value, &mut of_pod);
    problems.extend(
        of_pod.into_iter().map(|error| FieldError::new(format!("{path}.{}", error.path), error.problem)),
    );
}

fn pod(value: &Value, problems: &mut Vec<FieldError>) {
    let Some(spec) = value.get("spec") else {
        problems.push(FieldError::new("spec", "is missing"));
        return;
    };
    only(spec, "spec", POD_SPEC, problems);
    let of = |field: &str| spec.get(field).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    if of("containers").is_empty() {
        problems.push(FieldError::new("spec.containers", "needs at least one container"));
    }
    let all = ["initContainers", "containers"].into_iter().flat_map(|field| {
        of(field).iter().enumerate().map(move |(index, container)| (field, index, container))
    });
    for (field, index, container) in all {
        let path = format!("spec.{field}[{index}]");
        only(container, &path, CONTAINER, problems);
        let ports = container.get("ports").and_then(Value::as_array).into_iter().flatten();
        for (index, port) in ports.enumerate() {
            only(port, &format!("{path}.ports[{index}]"), CONTAINER_PORT, problems);
        }
    }
}

fn name(key: &Key, problems: &mut Vec<FieldError>) {
    let subdomain = |text: &str| text.len() <= 253 && text.split('.').all(dns_label);
    if !subdomain(&key.name) {
        let rule = "must be lower-case letters, digits, dashes and dots, at most 253, beginning and ending with a letter or digit";
        problems.push(FieldError::new("metadata.name", format!("{:?} {rule}", key.name)));
    }
    if key.kind.namespaced() && !(key.namespace.len() <= 63 && dns_label(&key.namespace)) {
        let rule = "must be lower-case letters, digits and dashes, at most 63";
        problems.push(FieldError::new("metadata.namespace", format!("{:?} {rule}", key.namespace)));
    }
}

/// Reports rules that would fail closed because a part of them is not understood (policy decision 9), so that the
/// author learns it now.
fn closed_rules(key: &Key, value: &Value, problems: &mut Vec<FieldError>) {
    let Ok(Resource::ClusterPolicy(policy)) = Resource::read(key, value) else { return };
    for (rules, direction) in [(&policy.ingress, "ingress"), (&policy.egress, "egress")] {
        for (index, rule) in rules.iter().enumerate() {
            if let Some(problem) = rule.not_understood() {
                problems.push(FieldError::new(format!("spec.{direction}[{index}]"), problem));
            }
        }
    }
}

/// Reports labels that only the cluster sets: an object would claim another namespace or service account by them.
fn reserved(value: &Value, path: &str, problems: &mut Vec<FieldError>) {
    let labels = value.pointer(&format!("/{}", path.replace('.', "/"))).and_then(Value::as_object);
    for label in labels.into_iter().flat_map(Map::keys).filter(|label| is_reserved_label(label)) {
        problems.push(FieldError::new(format!("{path}.{label}"), "is set by the cluster; leave it out"));
    }
}

fn dns_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Checks label names and values as Kubernetes does: `[prefix/]name`, values of at most 63 characters.
fn labels(metadata: &Value, problems: &mut Vec<FieldError>) {
    let none = Map::new();
    let labels = metadata.get("labels").and_then(Value::as_object).unwrap_or(&none);
    for (name, value) in labels {
        let path = format!("metadata.labels.{name}");
        if !is_label_name(name) {
            problems.push(FieldError::new(&path, format!("{name:?} is no label name")));
        }
        match value.as_str() {
            Some(value) if is_label_value(value) => {}
            Some(value) => problems.push(FieldError::new(&path, format!("{value:?} is no label value"))),
            None => problems.push(FieldError::new(&path, "must be text; put the value in quotes")),
        }
    }
}
