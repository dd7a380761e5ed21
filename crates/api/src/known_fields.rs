//! The fields in Kubernetes 1.36 of the kinds that Tortie reads in part, so that a misspelt field is not ignored.

use serde_json::Value;

use crate::unknown_fields::only;
use crate::{FieldError, Kind};

const SERVICE: &[&str] = &[
    "allocateLoadBalancerNodePorts",
    "clusterIP",
    "clusterIPs",
    "externalIPs",
    "externalName",
    "externalTrafficPolicy",
    "healthCheckNodePort",
    "internalTrafficPolicy",
    "ipFamilies",
    "ipFamilyPolicy",
    "loadBalancerClass",
    "loadBalancerIP",
    "loadBalancerSourceRanges",
    "ports",
    "publishNotReadyAddresses",
    "selector",
    "sessionAffinity",
    "sessionAffinityConfig",
    "trafficDistribution",
    "type",
];
const SERVICE_PORT: &[&str] = &["appProtocol", "name", "nodePort", "port", "protocol", "targetPort"];
const SLICE_ENDPOINT: &[&str] =
    &["addresses", "conditions", "deprecatedTopology", "hints", "hostname", "nodeName", "targetRef", "zone"];
const SLICE_PORT: &[&str] = &["appProtocol", "name", "port", "protocol"];
/// The fields of Kubernetes, and those of [`crate::calico::node::KEPT`].
const NODE: &[&str] = &[
    "addresses",
    "configSource",
    "externalID",
    "interfaces",
    "orchRefs",
    "podCIDR",
    "podCIDRs",
    "providerID",
    "taints",
    "unschedulable",
];

/// The `spec` of each kind of workload.
const WORKLOADS: &[(&str, &[&str])] = &[
    (
        "Deployment",
        &[
            "minReadySeconds",
            "paused",
            "progressDeadlineSeconds",
            "replicas",
            "revisionHistoryLimit",
            "selector",
            "strategy",
            "template",
        ],
    ),
    (
        "StatefulSet",
        &[
            "minReadySeconds",
            "ordinals",
            "persistentVolumeClaimRetentionPolicy",
            "podManagementPolicy",
            "replicas",
            "revisionHistoryLimit",
            "selector",
            "serviceName",
            "template",
            "updateStrategy",
            "volumeClaimTemplates",
        ],
    ),
    ("DaemonSet", &["minReadySeconds", "revisionHistoryLimit", "selector", "template", "updateStrategy"]),
    ("ReplicaSet", &["minReadySeconds", "replicas", "selector", "template"]),
    ("ReplicationController", &["minReadySeconds", "replicas", "selector", "template"]),
    ("Job", JOB),
    (
        "CronJob",
        &[
            "concurrencyPolicy",
            "failedJobsHistoryLimit",
            "jobTemplate",
            "schedule",
            "startingDeadlineSeconds",
            "successfulJobsHistoryLimit",
            "suspend",
            "timeZone",
        ],
    ),
];
const JOB: &[&str] = &[
    "activeDeadlineSeconds",
    "backoffLimit",
    "backoffLimitPerIndex",
    "completionMode",
    "completions",
    "managedBy",
    "manualSelector",
    "maxFailedIndexes",
    "parallelism",
    "podFailurePolicy",
    "podReplacementPolicy",
    "selector",
    "successPolicy",
    "suspend",
    "template",
    "ttlSecondsAfterFinished",
];

/// Reports every field of an object that its kind does not have.
pub(crate) fn check(kind: Kind, value: &Value, problems: &mut Vec<FieldError>) {
    let mut of = |path: &str, known: &[&str]| check_at(value, path, known, problems);
    match kind {
        Kind::Namespace => of("spec", &["finalizers"]),
        Kind::Node => of("spec", NODE),
        Kind::Service => {
            of("spec", SERVICE);
            of("spec.ports[]", SERVICE_PORT);
        }
        Kind::ServiceCidr => of("spec", &["cidrs"]),
        Kind::EndpointSlice => {
            of("endpoints[]", SLICE_ENDPOINT);
            of("ports[]", SLICE_PORT);
        }
        _ => {}
    }
}

/// Reports every field of the workload that its kind does not have; the template of its pods is checked as a pod.
pub(crate) fn check_workload(kind: &str, value: &Value) -> Vec<FieldError> {
    let mut problems = Vec::new();
    only(value, "", &["apiVersion", "kind", "metadata", "spec", "status"], &mut problems);
    if let Some((_, known)) = WORKLOADS.iter().find(|(known, _)| *known == kind) {
        check_at(value, "spec", known, &mut problems);
    }
    if kind == "CronJob" {
        check_at(value, "spec.jobTemplate", &["metadata", "spec"], &mut problems);
        check_at(value, "spec.jobTemplate.spec", JOB, &mut problems);
    }
    problems
}

/// Checks the mapping at a path; if the path ends with `[]`, every item of that list.
fn check_at(value: &Value, path: &str, known: &[&str], problems: &mut Vec<FieldError>) {
    let (field, items) = path.strip_suffix("[]").map_or((path, false), |field| (field, true));
    let Some(found) = value.pointer(&format!("/{}", field.replace('.', "/"))) else { return };
    match found {
        Value::Array(list) if items => {
            for (index, item) in list.iter().enumerate() {
                only(item, &format!("{field}[{index}]"), known, problems);
            }
        }
        _ if items => {}
        found => only(found, field, known, problems),
    }
}
