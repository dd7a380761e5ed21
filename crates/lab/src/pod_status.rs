//! The status of a pod.

use serde_json::{Value, json};

/// How the program of a pod ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) code: i32,
    /// The end of its output, if it failed.
    pub(crate) message: String,
}

impl End {
    fn phase(&self) -> &'static str {
        if self.code == 0 { "Succeeded" } else { "Failed" }
    }

    fn state(&self) -> Value {
        let reason = if self.code == 0 { "Completed" } else { "Error" };
        json!({"terminated": {"exitCode": self.code, "reason": reason, "message": self.message}})
    }
}

/// The state of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PodStatus {
    /// It does not run, for this reason.
    Waiting(String),
    Running {
        /// One of each family at most.
        addresses: Vec<String>,
        /// The address of its node.
        node: String,
    },
    /// Its program has ended, and nobody starts it again.
    Ended {
        addresses: Vec<String>,
        /// The address of its node.
        node: String,
        end: End,
    },
}

impl PodStatus {
    /// The status in a datastore without a Kubernetes API.
    pub(crate) fn stored(&self) -> Value {
        match self {
            Self::Waiting(message) => json!({"phase": "Pending", "message": message}),
            Self::Running { addresses, node } => json!({
                "phase": "Running", "podIP": addresses.first(), "podIPs": pod_ips(addresses), "hostIP": node,
                "conditions": [{"type": "Ready", "status": "True"}],
            }),
            Self::Ended { addresses, node, end } => json!({
                "phase": end.phase(), "podIP": addresses.first(), "podIPs": pod_ips(addresses), "hostIP": node,
                "conditions": [{"type": "Ready", "status": "False", "reason": "PodCompleted"}],
                "containerStatuses": [{"state": end.state(), "ready": false}],
            }),
        }
    }

    /// The status of a pod as kubectl and controllers expect it.
    pub(crate) fn in_api(&self, containers: &[Value]) -> Value {
        let container = |container: &Value, state: Value, is_ready: bool| {
            json!({
                "name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0,
                "ready": is_ready, "started": is_ready, "state": state,
            })
        };
        match self {
            Self::Waiting(message) => {
                let waiting = json!({"waiting": {"reason": "ContainerCreating", "message": message}});
                let statuses: Vec<Value> =
                    containers.iter().map(|it| container(it, waiting.clone(), false)).collect();
                json!({"phase": "Pending", "message": message, "containerStatuses": statuses})
            }
            Self::Running { addresses, node } => {
                let now = timestamp();
                let running = json!({"running": {"startedAt": now}});
                let statuses: Vec<Value> =
                    containers.iter().map(|it| container(it, running.clone(), true)).collect();
                let conditions = ["PodScheduled", "Initialized", "ContainersReady", "Ready"];
                json!({
                    "phase": "Running", "message": null, "podIP": addresses.first(), "podIPs": pod_ips(addresses),
                    "hostIP": node, "hostIPs": [{"ip": node}], "startTime": now,
                    "conditions": conditions.map(|name| condition(name, "")), "containerStatuses": statuses,
                })
            }
            Self::Ended { end, .. } => {
                let statuses: Vec<Value> =
                    containers.iter().map(|it| container(it, end.state(), false)).collect();
                let conditions = ["ContainersReady", "Ready"].map(|name| {
                    let mut condition = condition(name, "");
                    condition["status"] = json!("False");
                    condition["reason"] = json!("PodCompleted");
                    condition
                });
                json!({"phase": end.phase(), "conditions": conditions, "containerStatuses": statuses})
            }
        }
    }
}

fn pod_ips(addresses: &[String]) -> Vec<Value> {
    addresses.iter().map(|address| json!({"ip": address})).collect()
}

/// A condition that holds since now.
pub(crate) fn condition(name: &str, reason: &str) -> Value {
    let now = timestamp();
    let mut condition = json!({"type": name, "status": "True", "lastTransitionTime": now});
    if name == "Ready" && !reason.is_empty() {
        condition["reason"] = json!(reason);
        condition["lastHeartbeatTime"] = json!(now);
    }
    condition
}

/// The current time in RFC 3339, to the second.
pub(crate) fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
