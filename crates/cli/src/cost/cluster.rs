//! The pods whose policy cost is computed, in the state that Windows nodes would have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::kubernetes::{Node, Pod};
use tortie_api::net::{Direction, IpVersion};
use tortie_api::{Key, Kind, Resource};
use tortie_calc::Calc;
use tortie_dataplane::{EndpointId, NodeState};
use tortie_oracle::{Snapshot, Stored};
use tortie_policy::compile;
use tortie_policy::program::PolicyId;

/// The node of all pods for calc: one computation is sufficient, because a pod's policy does not depend on its node.
const EVERYWHERE: &str = "everywhere";

/// The pods, and the state computed from their policies.
pub(crate) struct Cluster {
    /// Every pod, its program, and the objects that it names.
    pub(crate) state: NodeState,
    /// The nodes, with their own addresses.
    pub(crate) nodes: BTreeMap<String, BTreeSet<IpAddr>>,
    /// Which of them are Windows nodes.
    windows: BTreeSet<String>,
    /// The nodes of pods.
    nodes_of_pods: BTreeMap<(String, String), String>,
}

impl Cluster {
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let mut cluster = Self {
            state: NodeState::default(),
            nodes: BTreeMap::new(),
            windows: BTreeSet::new(),
            nodes_of_pods: BTreeMap::new(),
        };
        let mut calc = Calc::new(EVERYWHERE);
        let mut endpoints: BTreeMap<(String, String), Vec<Value>> = BTreeMap::new();
        for (key, stored) in snapshot.iter() {
            match &stored.resource {
                Ok(Resource::Node(node)) => cluster.add_node(&key.name, node),
                Ok(Resource::WorkloadEndpoint(endpoint)) => {
                    let pod = (key.namespace.clone(), endpoint.spec.pod.clone());
                    cluster.nodes_of_pods.insert(pod.clone(), endpoint.spec.node.clone());
                    endpoints.entry(pod).or_default().push(stored.value.clone());
                }
                _ if key.kind != Kind::WorkloadEndpoint => calc.update(key, Some(&stored.value)),
                _ => {}
            }
        }
        for (key, Stored { resource, .. }) in snapshot.iter() {
            let Ok(Resource::Pod(pod)) = resource else { continue };
            let name = (key.namespace.clone(), key.name.clone());
            if !endpoints.contains_key(&name) && is_under_policy(pod) {
                cluster.nodes_of_pods.insert(name.clone(), pod.spec.node_name.clone().unwrap_or_default());
                endpoints.insert(name, vec![endpoint_of(key, pod)]);
            }
        }
        for ((namespace, pod), values) in endpoints {
            for mut value in values {
                let interface = value["spec"]["endpoint"].as_str().unwrap_or("eth0");
                let name = WorkloadEndpoint::name_for(EVERYWHERE, &pod, interface);
                value["metadata"]["name"] = json!(name);
                value["spec"]["node"] = json!(EVERYWHERE);
                calc.update(&Key::namespaced(Kind::WorkloadEndpoint, &*namespace, name), Some(&value));
            }
        }
        calc.flush();
        cluster.state = calc.state().clone();
        cluster
    }

    fn add_node(&mut self, name: &str, node: &Node) {
        let own = IpVersion::ALL.into_iter().filter_map(|version| node.own_address(version));
        let addresses = own.chain(node.vxlan_address(IpVersion::V4)).collect();
        self.nodes.insert(name.to_owned(), addresses);
        if node.is_windows() {
            self.windows.insert(name.to_owned());
        }
    }

    /// The number of Windows nodes.
    pub(crate) fn windows(&self) -> usize {
        self.windows.len()
    }

    /// The node of a pod; empty if it has none yet.
    pub(crate) fn node_of(&self, id: &EndpointId) -> &str {
        self.nodes_of_pods.get(&(id.namespace.to_string(), id.pod.to_string())).map_or("", String::as_str)
    }

    /// Whether the pod counts: it is on a Windows node, or there is none.
    pub(crate) fn counts(&self, id: &EndpointId) -> bool {
        self.windows.is_empty() || self.windows.contains(self.node_of(id))
    }
}

/// Whether the pod has a network of its own, and still runs.
fn is_under_policy(pod: &Pod) -> bool {
    let ended = matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed"));
    !ended && !pod.spec.host_network
}

/// The endpoint as the CNI plugin would store it.
fn endpoint_of(key: &Key, pod: &Pod) -> Value {
    let nets = pod.status.addresses().into_iter().map(ipnet::IpNet::from);
    json!({
        "apiVersion": Kind::WorkloadEndpoint.api_version(), "kind": "WorkloadEndpoint",
        "metadata": {"namespace": key.namespace, "labels": pod.metadata.labels},
        "spec": {
            "orchestrator": "k8s", "pod": key.name, "endpoint": "eth0", "containerID": "none",
            "serviceAccountName": pod.service_account(),
            "ipNetworks": nets.collect::<Vec<_>>(),
            "profiles": WorkloadEndpoint::profiles_for(&key.namespace, pod.service_account()),
            "ports": pod.endpoint_ports(),
        },
    })
}

/// The number of compiled rules for each written rule of a policy: Kubernetes' rules become one for each peer and
/// protocol. `None` for profiles, whose rules are compiled one to one.
pub(crate) fn written(snapshot: &Snapshot, id: &PolicyId, direction: Direction) -> Option<Vec<usize>> {
    let key = key_of(id);
    let value = &snapshot.get(&key)?.value;
    let side = if direction == Direction::Ingress { "ingress" } else { "egress" };
    let rules = value["spec"][side].as_array()?;
    let alone = |rule: &Value| {
        let mut only = value.clone();
        only["spec"][side] = json!([rule]);
        Some(compile(&key, &only)?.rules.direction(direction).len())
    };
    rules.iter().map(alone).collect()
}

/// The object of a policy.
pub(crate) fn key_of(id: &PolicyId) -> Key {
    Key { kind: id.kind.kind(), namespace: id.namespace.to_string(), name: id.name.to_string() }
}
