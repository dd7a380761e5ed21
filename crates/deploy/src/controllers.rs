//! The Deployment of the controllers.

use serde_json::{Value, json};

use crate::NAMESPACE;
use crate::template::{CONFIG_MAP, LABEL, Template};

/// The Deployment of the controllers, their service account, their Lease and their label.
pub const CONTROLLERS: &str = "tortie-controllers";

/// The Deployment. Its pod is in the network of its node, so that it neither needs the pods' network nor holds up the
/// removal of Tortie.
pub(crate) fn deployment(template: &Template) -> Value {
    let labels = json!({LABEL: CONTROLLERS});
    let container = json!({
        "name": "controllers", "image": template.image, "imagePullPolicy": template.pull_policy,
        "args": ["controllers", "--store", "kubernetes", "--namespace", NAMESPACE],
        // The address of the API server, if operators set one.
        "envFrom": [{"configMapRef": {"name": CONFIG_MAP}}],
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 65_534, "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
    });
    let tolerations = json!([
        {"key": "CriticalAddonsOnly", "operator": "Exists"},
        {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"},
    ]);
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": CONTROLLERS, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {"tortie.io/config-digest": template.config_digest}},
                "spec": {
                    "hostNetwork": true,
                    "nodeSelector": {"kubernetes.io/os": "linux"},
                    "priorityClassName": "system-cluster-critical",
                    "serviceAccountName": CONTROLLERS,
                    "tolerations": tolerations,
                    "containers": [container],
                },
            },
        },
    })
}
