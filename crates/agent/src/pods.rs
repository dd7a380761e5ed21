//! Pods come and go: what CNI asks for.
//!
//! ADD: address, interface (closed), WorkloadEndpoint; then wait until the dataplane has the endpoint's policy in
//! force. DEL: interface first, address last, so that no address is given again while a pod still has it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::timeout;
use tortie_api::calico::{EndpointPort, WorkloadEndpoint, WorkloadEndpointSpec};
use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind, Metadata, Resource};
use tortie_cni::{Address, Code, Failure, Interface, Invocation, Route, Success};
use tortie_dataplane::{EndpointId, PodAttachment, PodInterface, PodWiring, WiringError};
use tortie_ipam::{Assignment, Ipam, Request, Use};
use tortie_store::{Revision, Store, StoreError, Stored};

use crate::plane::InForce;

/// How long an ADD waits for policy before it gives everything back.
const POLICY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a link may take until it passes packets.
const LINK_PATIENCE: Duration = Duration::from_secs(5);

/// Serves CNI's commands for one node.
pub(crate) struct Pods {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) ipam: Ipam,
    pub(crate) wiring: Arc<dyn PodWiring>,
    pub(crate) node: String,
    pub(crate) os: &'static str,
    pub(crate) mtu: u32,
    pub(crate) in_force: watch::Receiver<Arc<InForce>>,
}

impl Pods {
    /// CNI ADD. Whatever fails, nothing of the attempt stays.
    pub(crate) async fn add(&self, call: &Invocation) -> Result<Success, Failure> {
        let id = endpoint_id(call)?;
        let result = self.try_add(call, &id).await;
        if let Err(failure) = &result {
            tracing::warn!(pod = %id, container = call.container_id, %failure, "a pod could not be added; the attempt is undone");
            if let Err(undone) = self.remove(call, &id).await {
                tracing::error!(pod = %id, %undone, "the attempt could not be undone; the runtime's DEL will try again");
            }
        }
        result
    }

    async fn try_add(&self, call: &Invocation, id: &EndpointId) -> Result<Success, Failure> {
        let (pod, namespace_labels) = tokio::try_join!(self.pod(id), self.namespace_labels(&id.namespace))?;
        if pod.spec.node_name.as_deref().is_some_and(|node| node != self.node) {
            let msg = format!(
                "pod {}/{} belongs to node {}",
                id.namespace,
                id.pod,
                pod.spec.node_name.unwrap_or_default()
            );
            return Err(Failure::new(Code::INVALID_ENVIRONMENT, msg, format!("this is node {}", self.node)));
        }
        let request = Request {
            handle: handle(call),
            owner: self.owner(id),
            intended_use: Use::Workload,
            namespace_labels,
        };
        let assignment = self.ipam.assign(&request).await;
        let assignment = assignment
            .map_err(|error| Failure::new(Code::IPAM, "no address for the pod", error.to_string()))?;
        let interface = self.connect(call, id, assignment).await?;
        let revision = self.publish(call, id, &pod, assignment, &interface).await?;
        self.wait_for_policy(id, revision).await?;
        self.wait_until_live(id, &interface).await?;
        Ok(self.success(call, assignment, &interface))
    }

    /// CNI DEL, which is also how a failed ADD is undone.
    pub(crate) async fn del(&self, call: &Invocation) -> Result<(), Failure> {
        self.remove(call, &endpoint_id(call)?).await
    }

    async fn remove(&self, call: &Invocation, id: &EndpointId) -> Result<(), Failure> {
        let wiring = self.wiring.clone();
        let (endpoint, container) = (id.clone(), call.container_id.clone());
        let key = self.key(id);
        // Meanwhile the endpoint is read; nothing is written before the interface is gone.
        let disconnect = blocking(move || wiring.disconnect(&endpoint, &container));
        let (disconnected, stored) = tokio::join!(disconnect, self.store.get(&key));
        disconnected.map_err(wiring_failure)?;
        self.withdraw(call, stored.map_err(store_failure)?).await.map_err(store_failure)?;
        let released = self.ipam.release(&handle(call)).await;
        released.map_err(|error| {
            Failure::new(Code::IPAM, "the pod's address could not be released", error.to_string())
        })?;
        Ok(())
    }

    /// CNI CHECK: the endpoint is stored for this container, and its interface is as it was made.
    pub(crate) async fn check(&self, call: &Invocation) -> Result<(), Failure> {
        let id = endpoint_id(call)?;
        let differs = |what: String| {
            Failure::new(Code::DIFFERS, format!("pod {}/{}: {what}", id.namespace, id.pod), "")
        };
        let key = self.key(&id);
        let stored = self.store.get(&key).await.map_err(store_failure)?;
        let stored = stored
            .ok_or_else(|| Failure::new(Code::UNKNOWN_CONTAINER, format!("{key} does not exist"), ""))?;
        let Ok(Resource::WorkloadEndpoint(endpoint)) = Resource::read(&key, &stored.value) else {
            return Err(differs(format!("{key} cannot be read")));
        };
        if endpoint.spec.container_id != call.container_id {
            return Err(differs(format!("it belongs to container {}", endpoint.spec.container_id)));
        }
        let Some(assignment) = self.find(call).await? else {
            return Err(differs("it has no address".to_owned()));
        };
        let has = endpoint.spec.ip_networks.iter().any(|net| net.addr() == assignment.address);
        if !has {
            return Err(differs(format!("its address {} is not the endpoint's", assignment.address)));
        }
        let (wiring, attachment) = (self.wiring.clone(), self.attachment(call, &id, assignment));
        blocking(move || wiring.check(&attachment)).await.map_err(|error| differs(error.to_string()))
    }

    /// CNI GC: removes what this node has for this network beyond the attachments that the runtime knows.
    pub(crate) async fn collect_garbage(&self, call: &Invocation) -> Result<(), Failure> {
        let Some(valid) = &call.config.valid_attachments else {
            return Err(Failure::new(Code::INVALID_CONFIG, "GC needs cni.dev/valid-attachments", ""));
        };
        let listing = self.store.list(Kind::WorkloadEndpoint).await.map_err(store_failure)?;
        let mut failures = Vec::new();
        for stored in listing.items {
            let Ok(Resource::WorkloadEndpoint(endpoint)) = Resource::read(&stored.key, &stored.value) else {
                continue;
            };
            let spec = endpoint.spec;
            let known = valid
                .iter()
                .any(|each| each.container_id == spec.container_id && each.ifname == spec.endpoint);
            if spec.node != self.node || known {
                continue;
            }
            let gone = Invocation {
                container_id: spec.container_id.clone(),
                interface: spec.endpoint.clone(),
                args: BTreeMap::from([
                    ("K8S_POD_NAMESPACE".to_owned(), stored.key.namespace.clone()),
                    ("K8S_POD_NAME".to_owned(), spec.pod.clone()),
                ]),
                ..call.clone()
            };
            // Without a handle under this network's name the pod is another network's.
            if self.find(&gone).await?.is_none() {
                continue;
            }
            tracing::info!(pod = %stored.key, container = spec.container_id, "the runtime does not know this pod any more; it is removed");
            failures.extend(self.del(&gone).await.err());
        }
        failures.into_iter().next().map_or(Ok(()), Err)
    }

    async fn pod(&self, id: &EndpointId) -> Result<Pod, Failure> {
        let key = Key::namespaced(Kind::Pod, &id.namespace, &id.pod);
        let stored = self.store.get(&key).await.map_err(store_failure)?;
        let unknown = || {
            Failure::new(
                Code::TRY_AGAIN_LATER,
                format!("{key} is not known"),
                "it is asked for again when the runtime tries again",
            )
        };
        match Resource::read(&key, &stored.ok_or_else(unknown)?.value) {
            Ok(Resource::Pod(pod)) => Ok(pod),
            _ => Err(Failure::new(Code::DECODING, format!("{key} cannot be read"), "")),
        }
    }

    async fn namespace_labels(&self, name: &str) -> Result<BTreeMap<String, String>, Failure> {
        let key = Key::global(Kind::Namespace, name);
        let Some(stored) = self.store.get(&key).await.map_err(store_failure)? else {
            return Ok(BTreeMap::new());
        };
        match Resource::read(&key, &stored.value) {
            Ok(Resource::Namespace(namespace)) => Ok(namespace.metadata.labels),
            _ => Err(Failure::new(Code::DECODING, format!("{key} cannot be read"), "")),
        }
    }

    /// The address that the container has already.
    async fn find(&self, call: &Invocation) -> Result<Option<Assignment>, Failure> {
        let found = self.ipam.find(&handle(call)).await;
        found.map_err(|error| {
            Failure::new(Code::IPAM, "the pod's address cannot be looked up", error.to_string())
        })
    }

    async fn connect(
        &self,
        call: &Invocation,
        id: &EndpointId,
        assignment: Assignment,
    ) -> Result<PodInterface, Failure> {
        let (wiring, attachment) = (self.wiring.clone(), self.attachment(call, id, assignment));
        blocking(move || wiring.connect(&attachment)).await.map_err(wiring_failure)
    }

    /// Stores the WorkloadEndpoint: from here on every node knows the pod.
    async fn publish(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &Pod,
        assignment: Assignment,
        interface: &PodInterface,
    ) -> Result<Revision, Failure> {
        let key = self.key(id);
        let endpoint = WorkloadEndpoint {
            api_version: key.kind.api_version().to_owned(),
            kind: key.kind.name().to_owned(),
            metadata: Metadata {
                name: key.name.clone(),
                namespace: id.namespace.clone(),
                labels: pod.metadata.labels.clone(),
                annotations: BTreeMap::new(),
            },
            spec: WorkloadEndpointSpec {
                orchestrator: "k8s".to_owned(),
                node: self.node.clone(),
                container_id: call.container_id.clone(),
                pod: id.pod.clone(),
                endpoint: id.interface.clone(),
                service_account_name: pod.service_account().to_owned(),
                ip_networks: vec![IpNet::from(std::net::IpAddr::V4(assignment.address))],
                profiles: WorkloadEndpoint::profiles_for(&id.namespace, pod.service_account()),
                interface_name: interface.host_interface.clone(),
                mac: interface.mac.to_string(),
                ports: named_ports(pod),
            },
        };
        let value: Value = serde_json::to_value(endpoint).map_err(|error| {
            Failure::new(Code::DECODING, format!("{key} cannot be written"), error.to_string())
        })?;
        loop {
            let written = match self.store.create(&key, value.clone()).await {
                Err(StoreError::AlreadyExists(_)) => {
                    match self.store.get(&key).await.map_err(store_failure)? {
                        Some(before) => self.store.update(&key, value.clone(), before.revision).await,
                        None => continue,
                    }
                }
                written => written,
            };
            match written {
                Ok(stored) => return Ok(stored.revision),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(store_failure(error)),
            }
        }
    }

    /// Deletes the WorkloadEndpoint, unless the pod has been made again since: then it is another container's.
    async fn withdraw(&self, call: &Invocation, mut stored: Option<Stored>) -> Result<(), StoreError> {
        while let Some(endpoint) = stored {
            if endpoint.value["spec"]["containerID"] != call.container_id.as_str() {
                return Ok(());
            }
            match self.store.delete(&endpoint.key, Some(endpoint.revision)).await {
                Ok(_) | Err(StoreError::NotFound(_)) => return Ok(()),
                Err(StoreError::Conflict(_)) => stored = self.store.get(&endpoint.key).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn wait_for_policy(&self, id: &EndpointId, revision: Revision) -> Result<(), Failure> {
        let mut in_force = self.in_force.clone();
        let waited = timeout(POLICY_TIMEOUT, in_force.wait_for(|now| now.covers(id, revision))).await;
        match waited {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Failure::new(Code::TRY_AGAIN_LATER, "the agent is going down", "")),
            Err(_) => {
                let now = self.in_force.borrow();
                let why: Vec<String> = now
                    .report
                    .node
                    .iter()
                    .chain(now.report.endpoints.get(id).into_iter().flatten())
                    .map(|c| c.message.clone())
                    .collect();
                let msg = format!("the policy of pod {}/{} is not in force", id.namespace, id.pod);
                Err(Failure::new(Code::TRY_AGAIN_LATER, msg, why.join("; ")))
            }
        }
    }

    /// A pod's first packets must not be lost to a link that is not ready.
    async fn wait_until_live(&self, id: &EndpointId, interface: &PodInterface) -> Result<(), Failure> {
        let (wiring, waited_for) = (self.wiring.clone(), interface.clone());
        let live = blocking(move || Ok(wiring.wait_until_live(&waited_for, LINK_PATIENCE))).await;
        if live.map_err(wiring_failure)? {
            return Ok(());
        }
        let msg = format!("the interface of pod {}/{} does not come up", id.namespace, id.pod);
        Err(Failure::new(Code::TRY_AGAIN_LATER, msg, format!("{} on the host", interface.host_interface)))
    }

    fn success(&self, call: &Invocation, assignment: Assignment, interface: &PodInterface) -> Success {
        let (prefix, gateway) = if self.os == "windows" {
            (
                assignment.block.prefix_len(),
                std::net::Ipv4Addr::from_bits(assignment.block.network().to_bits() + 1),
            )
        } else {
            (32, tortie_linux::wire::GATEWAY)
        };
        Success {
            interfaces: vec![Interface {
                name: call.interface.clone(),
                mac: interface.mac.to_string(),
                sandbox: call.netns.clone(),
            }],
            ips: vec![Address { address: format!("{}/{prefix}", assignment.address), interface: 0 }],
            routes: vec![Route { dst: Ipv4Net::default().to_string(), gw: Some(gateway.into()) }],
        }
    }

    fn attachment(&self, call: &Invocation, id: &EndpointId, assignment: Assignment) -> PodAttachment {
        PodAttachment {
            endpoint: id.clone(),
            container_id: call.container_id.clone(),
            netns: call.netns.clone(),
            address: assignment.address,
            block: assignment.block,
            mtu: self.mtu,
        }
    }

    fn key(&self, id: &EndpointId) -> Key {
        let name = WorkloadEndpoint::name_for(&self.node, &id.pod, &id.interface);
        Key::namespaced(Kind::WorkloadEndpoint, &id.namespace, name)
    }

    /// What stands beside the address in its block (`calico.md` 5.2); the time in Go's text form.
    fn owner(&self, id: &EndpointId) -> BTreeMap<String, String> {
        let now = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC").to_string();
        let pairs = [
            ("node", self.node.clone()),
            ("namespace", id.namespace.clone()),
            ("pod", id.pod.clone()),
            ("timestamp", now),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

fn named_ports(pod: &Pod) -> Vec<EndpointPort> {
    let ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let named = ports.filter_map(|port| {
        let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
        Some(EndpointPort { name: port.name.clone()?, protocol, port: port.container_port })
    });
    named.collect()
}

/// `<network>.<container>`, as Calico names handles.
fn handle(call: &Invocation) -> String {
    format!("{}.{}", call.config.name, call.container_id)
}

fn endpoint_id(call: &Invocation) -> Result<EndpointId, Failure> {
    let arg = |name: &str| {
        let value = call.args.get(name).filter(|value| !value.is_empty()).cloned();
        value.ok_or_else(|| Failure::new(Code::INVALID_ENVIRONMENT, format!("CNI_ARGS has no {name}"), ""))
    };
    Ok(EndpointId {
        namespace: arg("K8S_POD_NAMESPACE")?,
        pod: arg("K8S_POD_NAME")?,
        interface: call.interface.clone(),
    })
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, WiringError> + Send + 'static,
) -> Result<T, WiringError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|panic| {
        Err(WiringError::System {
            operation: "connecting pods",
            object: "the agent".to_owned(),
            source: Box::new(panic),
        })
    })
}

fn wiring_failure(error: WiringError) -> Failure {
    Failure::new(Code::WIRING, "the pod's interface could not be made or removed", error.to_string())
}

fn store_failure(error: StoreError) -> Failure {
    Failure::new(Code::TRY_AGAIN_LATER, "the datastore did not do what was asked", error.to_string())
}
