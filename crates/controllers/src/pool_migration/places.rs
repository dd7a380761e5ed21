//! Which nodes can take the pods of another node, as far as a migration must know it: a node is cordoned only if there are some.

use super::observed::{MigratingCluster, MigratingNode, MigratingPod};
use super::taints::Taint;

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

    use serde_json::{Value, json};
    use tortie_api::{Key, Kind};

    use super::super::taints::{is_ready, taints, tolerations};
    use super::*;

    fn node(more: Value) -> MigratingNode {
        MigratingNode {
            is_schedulable: true,
            is_ready: is_ready(&more),
            taints: taints(&more),
            ..MigratingNode::default()
        }
    }

    fn pod(given: Value) -> MigratingPod {
        let value = json!({"spec": {"tolerations": given}});
        MigratingPod {
            key: Key::namespaced(Kind::Pod, "n", "p"),
            uid: String::new(),
            is_ending: false,
            tolerations: tolerations(&value),
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
