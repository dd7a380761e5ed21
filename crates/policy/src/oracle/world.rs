//! Who is there: pods, nodes, namespaces, service accounts, pools.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::calico::{EncapsulationMode, WorkloadEndpoint};
use tortie_api::kubernetes::Pod;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, Resource};
use tortie_selector::NAMESPACE_LABEL;

use super::snapshot::Snapshot;

pub(super) type Labels = BTreeMap<String, String>;

/// A pod with a network of its own.
#[derive(Debug, Clone)]
pub(super) struct Workload {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) node: String,
    pub(super) addresses: Vec<IpAddr>,
    /// The labels that the pod itself bears: what Kubernetes' selectors see.
    pub(super) own_labels: Labels,
    /// The labels of its namespace.
    pub(super) namespace_labels: Labels,
    /// Its service account; may be empty.
    pub(super) account: String,
    /// The labels of its service account.
    pub(super) account_labels: Labels,
    /// Everything that Calico's selectors see: see [`Workload::seen_labels`].
    pub(super) labels: Labels,
    pub(super) ports: Vec<NamedPort>,
    pub(super) profiles: Vec<String>,
}

/// A port that a pod declares by name.
#[derive(Debug, Clone)]
pub(super) struct NamedPort {
    pub(super) name: String,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
}

/// A node, as far as packets come from it.
#[derive(Debug, Clone)]
pub(super) struct NodeAddresses {
    pub(super) address: Option<IpAddr>,
    pub(super) tunnel: Option<IpAddr>,
}

pub(super) struct World {
    pub(super) workloads: Vec<Workload>,
    /// The nodes of pods that use their node's network, by namespace and name.
    pub(super) on_the_host: BTreeMap<(String, String), String>,
    pub(super) nodes: BTreeMap<String, NodeAddresses>,
    namespaces: BTreeMap<String, Labels>,
    /// The pools that are carried by VXLAN.
    overlaid: Vec<IpNet>,
}

impl World {
    pub(super) fn new(snapshot: &Snapshot) -> Self {
        let mut world = Self {
            workloads: Vec::new(),
            on_the_host: BTreeMap::new(),
            nodes: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            overlaid: Vec::new(),
        };
        for (key, resource) in snapshot.resources() {
            match resource {
                Resource::Namespace(namespace) => {
                    let mut labels = namespace.metadata.labels.clone();
                    // What the API server gives every namespace, and Calico.
                    labels.entry("kubernetes.io/metadata.name".into()).or_insert_with(|| key.name.clone());
                    labels.insert("projectcalico.org/name".into(), key.name.clone());
                    world.namespaces.insert(key.name.clone(), labels);
                }
                Resource::Node(node) => {
                    let address = node.address().map(IpAddr::V4);
                    let tunnel = node.vxlan_address().map(IpAddr::V4);
                    world.nodes.insert(key.name.clone(), NodeAddresses { address, tunnel });
                }
                Resource::IpPool(pool) if pool.spec.vxlan_mode != EncapsulationMode::Never => {
                    world.overlaid.push(pool.spec.cidr);
                }
                _ => {}
            }
        }
        // What the CNI plugin noted of a pod goes before the pod's own text.
        for (key, resource) in snapshot.resources() {
            if let Resource::WorkloadEndpoint(endpoint) = resource {
                world.workloads.push(world.of_endpoint(snapshot, key, endpoint));
            }
        }
        for (key, resource) in snapshot.resources() {
            if let Resource::Pod(pod) = resource {
                world.add_pod(snapshot, key, pod);
            }
        }
        world
    }

    pub(super) fn namespace_exists(&self, name: &str) -> bool {
        self.namespaces.contains_key(name)
    }

    pub(super) fn is_overlaid(&self, address: IpAddr) -> bool {
        self.overlaid.iter().any(|pool| pool.contains(&address))
    }

    fn of_endpoint(&self, snapshot: &Snapshot, key: &Key, endpoint: &WorkloadEndpoint) -> Workload {
        let spec = &endpoint.spec;
        let named = spec.ports.iter().filter(|port| !port.name.is_empty());
        let ports = named.filter_map(|port| {
            let protocol = Protocol::from_name(&port.protocol)?;
            Some(NamedPort { name: port.name.clone(), protocol, port: port.port })
        });
        let workload = Workload {
            namespace: key.namespace.clone(),
            name: spec.pod.clone(),
            node: spec.node.clone(),
            addresses: spec.ip_networks.iter().map(IpNet::addr).collect(),
            own_labels: endpoint.metadata.labels.clone(),
            account: spec.service_account_name.clone(),
            ports: ports.collect(),
            profiles: spec.profiles.clone(),
            namespace_labels: Labels::new(),
            account_labels: Labels::new(),
            labels: Labels::new(),
        };
        self.labelled(snapshot, workload)
    }

    fn add_pod(&mut self, snapshot: &Snapshot, key: &Key, pod: &Pod) {
        let phase = pod.status.phase.as_deref();
        let has_endpoint =
            self.workloads.iter().any(|known| known.namespace == key.namespace && known.name == key.name);
        if has_endpoint || phase == Some("Succeeded") || phase == Some("Failed") {
            return;
        }
        let node = pod.spec.node_name.clone().unwrap_or_default();
        if pod.spec.host_network {
            self.on_the_host.insert((key.namespace.clone(), key.name.clone()), node);
            return;
        }
        let declared = pod.spec.containers.iter().flat_map(|container| &container.ports);
        let ports = declared.filter_map(|port| {
            let protocol = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP"))?;
            Some(NamedPort { name: port.name.clone()?, protocol, port: port.container_port })
        });
        let workload = Workload {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            node,
            addresses: pod.status.pod_ip.into_iter().collect(),
            own_labels: pod.metadata.labels.clone(),
            account: pod.service_account().to_owned(),
            ports: ports.collect(),
            profiles: WorkloadEndpoint::profiles_for(&key.namespace, pod.service_account()),
            namespace_labels: Labels::new(),
            account_labels: Labels::new(),
            labels: Labels::new(),
        };
        self.workloads.push(self.labelled(snapshot, workload));
    }

    /// The workload with the labels of its namespace and service account, as far as those exist.
    fn labelled(&self, snapshot: &Snapshot, mut workload: Workload) -> Workload {
        workload.namespace_labels = self.namespaces.get(&workload.namespace).cloned().unwrap_or_default();
        let account = Key::namespaced(Kind::ServiceAccount, &workload.namespace, &workload.account);
        if let Some(Ok(Resource::ServiceAccount(account))) = snapshot.get(&account).map(|s| &s.resource) {
            workload.account_labels = account.metadata.labels.clone();
            workload.account_labels.insert("projectcalico.org/name".into(), workload.account.clone());
        }
        workload.labels = workload.seen_labels();
        workload
    }
}

impl Workload {
    /// Its own labels, less those by which it would claim to be of another namespace or service account; those of its
    /// namespace as `pcns.…` and of its service account as `pcsa.…`; and what Calico adds (`calico.md` 1.5).
    fn seen_labels(&self) -> Labels {
        let mut seen = Labels::new();
        for (name, value) in &self.own_labels {
            if !name.starts_with("pcns.") && !name.starts_with("pcsa.") {
                seen.insert(name.clone(), value.clone());
            }
        }
        for (name, value) in &self.namespace_labels {
            seen.insert(format!("pcns.{name}"), value.clone());
        }
        for (name, value) in &self.account_labels {
            seen.insert(format!("pcsa.{name}"), value.clone());
        }
        seen.insert(NAMESPACE_LABEL.into(), self.namespace.clone());
        seen.insert("projectcalico.org/orchestrator".into(), "k8s".into());
        if !self.account.is_empty() {
            seen.insert("projectcalico.org/serviceaccount".into(), self.account.clone());
        }
        seen
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
