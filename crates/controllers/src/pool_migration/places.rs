//! Which nodes can take the pods of another node, as far as a migration must know it: a node is cordoned only if there are some.

use serde_json::Value;

use super::observed::{MigratingCluster, MigratingNode, MigratingPod};

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
    fn tolerates(&self, taint: &Taint) -> bool {
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

impl MigratingPod {
    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|toleration| toleration.tolerates(taint))
    }
}

/// Whether a node other than this one can take all of its pods that the migration moves. Other needs of pods, such as volumes of
/// the node, are not looked at.
pub(super) fn has_others(cluster: &MigratingCluster, name: &str, node: &MigratingNode) -> bool {
    let takes = |other: &MigratingNode| {
        let mut moved = node.pods.iter().filter(|pod| pod.obstacle.is_none());
        other.is_schedulable
            && other.is_ready
            && other.is_windows == node.is_windows
            && moved.all(|pod| other.taints.iter().all(|taint| pod.tolerates(taint)))
    };
    cluster.nodes.iter().any(|(other, node)| other != name && takes(node))
}

impl MigratingCluster {
    /// What helps if pods of this node cannot leave it because the migration has cordoned it.
    #[must_use]
    pub fn way_out(&self, node: &str) -> Option<String> {
        let found = self.nodes.get(node)?;
        let is_ours = !found.is_schedulable && found.record.as_ref().is_some_and(|record| record.cordoned);
        is_ours.then(|| {
            format!(
                "node {node} is cordoned by the migration; if new pods can run only there, uncordon it (`kubectl uncordon {node}`): the \
                 migration goes on without"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;
    use tortie_api::{Key, Kind};

    use super::*;

    fn node(more: Value) -> MigratingNode {
        MigratingNode {
            is_schedulable: true,
            is_ready: is_ready(&more),
            taints: taints(&more),
            ..MigratingNode::default()
        }
    }

    fn pod(tolerations: Value) -> MigratingPod {
        let value = json!({"spec": {"tolerations": tolerations}});
        MigratingPod {
            key: Key::namespaced(Kind::Pod, "n", "p"),
            uid: String::new(),
            is_ending: false,
            tolerations: super::tolerations(&value),
            obstacle: None,
        }
    }

    #[test]
    fn a_node_takes_pods_if_it_is_ready_and_they_tolerate_its_taints() {
        let taint =
            |effect: &str| json!({"spec": {"taints": [{"key": "k", "value": "v", "effect": effect}]}});
        let ready = |status: &str| json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
        let cordoned = json!({"spec": {"taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}});
        for (other, tolerations, expected) in [
            (json!({}), json!(null), true),
            (ready("True"), json!([]), true),
            (ready("False"), json!([]), false),
            (ready("Unknown"), json!([{"operator": "Exists"}]), false),
            (taint("NoSchedule"), json!([]), false),
            (taint("NoExecute"), json!([]), false),
            (taint("PreferNoSchedule"), json!([]), true),
            // It has been uncordoned a moment ago.
            (cordoned, json!([]), true),
            (taint("NoSchedule"), json!([{"operator": "Exists"}]), true),
            (taint("NoSchedule"), json!([{"key": "k", "operator": "Exists"}]), true),
            (taint("NoSchedule"), json!([{"key": "k", "value": "v"}]), true),
            (taint("NoSchedule"), json!([{"key": "k", "value": "v", "effect": "NoSchedule"}]), true),
            (taint("NoSchedule"), json!([{"key": "k", "operator": "Equal", "value": "other"}]), false),
            (taint("NoExecute"), json!([{"key": "k", "value": "v", "effect": "NoSchedule"}]), false),
            (taint("NoSchedule"), json!([{"key": "other", "operator": "Exists"}]), false),
            (taint("NoSchedule"), json!([{"key": "k", "operator": "Lt", "value": "v"}]), false),
        ] {
            let own = MigratingNode { pods: vec![pod(tolerations.clone())], ..node(json!({})) };
            let nodes =
                BTreeMap::from([("one".to_owned(), own.clone()), ("two".to_owned(), node(other.clone()))]);
            let cluster = MigratingCluster { nodes, ..MigratingCluster::default() };
            assert_eq!(has_others(&cluster, "one", &own), expected, "{other} {tolerations}");
        }
    }

    /// One pod that has nowhere to go is enough; one that does not move does not count.
    #[test]
    fn every_pod_that_moves_needs_another_node() {
        let tainted = node(json!({"spec": {"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}}));
        let (tolerant, strict) = (pod(json!([{"operator": "Exists"}])), pod(json!([])));
        let kept = MigratingPod { obstacle: Some("why".to_owned()), ..strict.clone() };
        let windows = MigratingNode { is_windows: true, ..node(json!({})) };
        let closed = MigratingNode { is_schedulable: false, ..node(json!({})) };
        for (pods, other, expected) in [
            (vec![tolerant.clone()], &tainted, true),
            (vec![tolerant.clone(), strict.clone()], &tainted, false),
            (vec![tolerant.clone(), kept], &tainted, true),
            (vec![strict.clone()], &windows, false),
            (vec![strict], &closed, false),
        ] {
            let own = MigratingNode { pods, ..node(json!({})) };
            let nodes = BTreeMap::from([("one".to_owned(), own.clone()), ("two".to_owned(), other.clone())]);
            let cluster = MigratingCluster { nodes, ..MigratingCluster::default() };
            assert_eq!(has_others(&cluster, "one", &own), expected, "{other:?}");
        }
    }
}
