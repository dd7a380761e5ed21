//! How far a DaemonSet is, and what its pods lack.

use serde_json::Value;
use tortie_deploy::NAMESPACE;
use tortie_store::kubernetes::{Kubernetes, ObjectError};

use super::cluster::{get, list};

/// A DaemonSet of Tortie with its pods.
#[derive(Debug, Default)]
pub(crate) struct Rollout {
    /// Absent if there is none.
    pub(crate) set: Option<Value>,
    pub(crate) pods: Vec<Value>,
}

impl Rollout {
    pub(crate) async fn read(cluster: &Kubernetes, name: &str) -> Result<Self, ObjectError> {
        let set = get(cluster, &format!("/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{name}")).await?;
        let selector = format!("labelSelector=app.kubernetes.io/name%3D{name}");
        let pods = list(cluster, &format!("/api/v1/namespaces/{NAMESPACE}/pods?{selector}")).await?;
        Ok(Self { set, pods })
    }

    fn number(&self, field: &str) -> u64 {
        self.set.as_ref().and_then(|set| set["status"][field].as_u64()).unwrap_or_default()
    }

    /// The number of nodes that must have a pod.
    pub(crate) fn desired(&self) -> u64 {
        self.number("desiredNumberScheduled")
    }

    /// Whether the controller has seen the current version.
    fn is_observed(&self) -> bool {
        let generation = self.set.as_ref().and_then(|set| set["metadata"]["generation"].as_u64());
        generation.is_some_and(|generation| self.number("observedGeneration") >= generation)
    }

    /// Whether each node has a ready pod of the current version. Without nodes, there is nothing to be ready.
    pub(crate) fn is_complete(&self) -> bool {
        let desired = self.desired();
        self.is_observed()
            && desired > 0
            && self.number("updatedNumberScheduled") >= desired
            && self.number("numberReady") >= desired
    }

    /// The state in one line.
    pub(crate) fn progress(&self) -> String {
        match &self.set {
            None => "the DaemonSet does not exist".to_owned(),
            Some(_) if !self.is_observed() => {
                "the DaemonSet controller has not seen the DaemonSet yet".to_owned()
            }
            Some(_) => format!(
                "{} of {} nodes ready, {} up to date",
                self.number("numberReady"),
                self.desired(),
                self.number("updatedNumberScheduled")
            ),
        }
    }

    /// What is missing, for people.
    pub(crate) fn missing(&self) -> Vec<String> {
        if self.is_complete() {
            return Vec::new();
        }
        if !self.is_observed() {
            return vec![format!("{}; is kube-controller-manager running?", self.progress())];
        }
        if self.desired() == 0 {
            return vec!["the cluster has no Linux node".to_owned()];
        }
        let mut missing: Vec<String> = self.pods.iter().filter_map(problem).collect();
        let pods = u64::try_from(self.pods.len()).unwrap_or(u64::MAX);
        if pods < self.desired() {
            missing.push(format!("{} nodes have no pod yet", self.desired() - pods));
        }
        missing
    }
}

/// Why a pod is not ready; `None` if it is.
pub(crate) fn problem(pod: &Value) -> Option<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = text(&pod["metadata"]["name"]);
    let node = text(&pod["spec"]["nodeName"]);
    let at = if node.is_empty() { format!("pod {name}") } else { format!("node {node}: pod {name}") };
    let conditions = || pod["status"]["conditions"].as_array().into_iter().flatten();
    if conditions().any(|one| one["type"] == "Ready" && one["status"] == "True") {
        return None;
    }
    let unscheduled = conditions().find(|one| one["type"] == "PodScheduled" && one["status"] == "False");
    if let Some(condition) = unscheduled {
        return Some(format!("{at}: {}", text(&condition["message"])));
    }
    let containers = ["initContainerStatuses", "containerStatuses"];
    let containers = containers.iter().filter_map(|field| pod["status"][*field].as_array()).flatten();
    for container in containers {
        let container_name = text(&container["name"]);
        let waiting = &container["state"]["waiting"];
        // These reasons only say that an earlier step is not done.
        let is_early = ["PodInitializing", "ContainerCreating"]
            .contains(&waiting["reason"].as_str().unwrap_or_default());
        if !waiting.is_null() && !is_early {
            let (reason, message) = (text(&waiting["reason"]), text(&waiting["message"]));
            return Some(format!("{at}: container {container_name}: {reason}: {message}"));
        }
        if !container["state"]["running"].is_null() && container["ready"] == false {
            return Some(format!(
                "{at}: container {container_name} runs and is not ready: kubectl -n {NAMESPACE} describe pod {name} has \
                 the reason"
            ));
        }
    }
    Some(format!("{at}: {}", text(&pod["status"]["phase"])))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(desired: u64, updated: u64, ready: u64, observed: u64) -> Rollout {
        let set = json!({"metadata": {"generation": 2}, "status": {
            "desiredNumberScheduled": desired, "updatedNumberScheduled": updated, "numberReady": ready,
            "observedGeneration": observed,
        }});
        Rollout { set: Some(set), pods: Vec::new() }
    }

    #[test]
    fn a_rollout_is_complete_when_each_node_has_a_ready_pod_of_this_version() {
        for (rollout, expected) in [
            (Rollout::default(), false),
            (set(2, 2, 2, 2), true),
            (set(2, 2, 2, 1), false),
            (set(2, 1, 2, 2), false),
            (set(2, 2, 1, 2), false),
            (set(0, 0, 0, 2), false),
        ] {
            assert_eq!(rollout.is_complete(), expected, "{rollout:?}");
            assert_eq!(rollout.missing().is_empty(), expected, "{rollout:?}");
        }
    }

    #[test]
    fn the_problem_of_a_pod_is_named() {
        let pod =
            |status: Value| json!({"metadata": {"name": "p"}, "spec": {"nodeName": "one"}, "status": status});
        let unpullable = json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}});
        let early = json!({"waiting": {"reason": "PodInitializing"}});
        for (status, expected) in [
            (json!({"conditions": [{"type": "Ready", "status": "True"}]}), None),
            (
                json!({"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes fit"}]}),
                Some("node one: pod p: 0/1 nodes fit"),
            ),
            (
                json!({"initContainerStatuses": [{"name": "i", "state": unpullable}], "containerStatuses": [{"name": "c", "state": early}]}),
                Some("node one: pod p: container i: ErrImagePull: not found"),
            ),
            (json!({"phase": "Pending"}), Some("node one: pod p: Pending")),
        ] {
            assert_eq!(problem(&pod(status)).as_deref(), expected);
        }
        let running =
            json!({"containerStatuses": [{"name": "agent", "state": {"running": {}}, "ready": false}]});
        assert!(problem(&pod(running)).unwrap().contains("runs and is not ready"));
    }
}
