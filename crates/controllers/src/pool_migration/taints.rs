//! Taints and readiness of Nodes, and what Pods tolerate (`k8s.io/api/core/v1`).

use serde_json::Value;

/// The taint of a cordoned node. It comes and goes a moment after `spec.unschedulable`, which counts instead.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// A taint with which the scheduler places no pod on a node, unless the pod tolerates it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Taint {
    /// Its key.
    pub key: String,
    /// Its value; empty if it has none.
    pub value: String,
    /// `NoSchedule` or `NoExecute`.
    pub effect: String,
}

/// What a pod tolerates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Toleration {
    /// The key of taints; empty for all.
    pub key: String,
    /// `Exists`, or `Equal`, which is the default.
    pub operator: String,
    /// The value that the taint must have, if the operator is `Equal`.
    pub value: String,
    /// The effect of taints; empty for all.
    pub effect: String,
}

fn text(object: &Value, field: &str) -> String {
    object[field].as_str().unwrap_or_default().to_owned()
}

/// The taints of a Node that keep pods away.
pub(super) fn taints(node: &Value) -> Vec<Taint> {
    let taints = node["spec"]["taints"].as_array().into_iter().flatten();
    let taints = taints.map(|taint| Taint {
        key: text(taint, "key"),
        value: text(taint, "value"),
        effect: text(taint, "effect"),
    });
    let keeps_away = |taint: &Taint| {
        ["NoSchedule", "NoExecute"].contains(&taint.effect.as_str()) && taint.key != UNSCHEDULABLE
    };
    taints.filter(keeps_away).collect()
}

/// What a Pod tolerates.
pub(super) fn tolerations(pod: &Value) -> Vec<Toleration> {
    let tolerations = pod["spec"]["tolerations"].as_array().into_iter().flatten();
    let read = |toleration: &Value| Toleration {
        key: text(toleration, "key"),
        operator: text(toleration, "operator"),
        value: text(toleration, "value"),
        effect: text(toleration, "effect"),
    };
    tolerations.map(read).collect()
}

/// Whether a Node is ready. Nodes of datastores without kubelets say nothing of it.
pub(super) fn is_ready(node: &Value) -> bool {
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    conditions.find(|condition| condition["type"] == "Ready").is_none_or(|ready| ready["status"] == "True")
}

impl Toleration {
    pub(super) fn tolerates(&self, taint: &Taint) -> bool {
        let has_key = self.key == taint.key || self.key.is_empty() && self.operator == "Exists";
        let has_value = match self.operator.as_str() {
            "Exists" => true,
            "" | "Equal" => self.value == taint.value,
            // An operator of a newer Kubernetes.
            _ => false,
        };
        has_key && has_value && (self.effect.is_empty() || self.effect == taint.effect)
    }
}
