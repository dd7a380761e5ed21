//! Handles CNI calls.
//!
//! ADD: allocates an address, connects a closed interface, and stores a WorkloadEndpoint; then waits until the
//! dataplane has the endpoint's policy in force. DEL: removes the interface first and the address last, so that no
//! address is reused while a pod still has it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::timeout;
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::kubernetes::Pod;
use tortie_api::{Key, Kind, Metadata, Positions, Resource};
use tortie_cni::transport::Answer;
use tortie_cni::{
    Address, Attachment, Code, Command, Failure, Interface, Invocation, NetworkConfig, PrevResult, Route,
    Success,
};
use tortie_dataplane::{
    BandwidthLimits, EndpointId, MacAddress, PodAddress, PodAttachment, PodInterface, PodLink, PodWiring,
    PreparedLink, Reason, WiringError,
};
use tortie_ipam::{Assignment, Ipam, IpamError};
use tortie_store::{Endpoints, StoreError, Stored};

use crate::addresses::{self, NETWORK, USUAL_INTERFACE, attachment_of, handle, handle_of};
use crate::assigned::AssignedPods;
use crate::barrier::Barrier;
use crate::dns;
use crate::feed::Leases;
use crate::locks::Locks;
use crate::metrics::Metrics;
use crate::plane::InForce;
use crate::runtime_config;
use crate::unsupported::Unsupported;

/// How long an ADD waits for policy before it undoes everything.
const POLICY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long to wait until a link forwards packets.
const LINK_TIMEOUT: Duration = Duration::from_secs(5);

/// Resolves when nobody waits for the answer any more.
type HungUp<'a> = Pin<&'a mut (dyn Future<Output = ()> + Send)>;

/// Handles CNI's commands for one node.
pub(crate) struct Pods {
    /// One call at a time for each interface of a pod: a runtime may give up on a sandbox, delete it and create
    /// another one, while the ADD of the first continues.
    pub(crate) busy: Locks<EndpointId>,
    /// One call at a time for each address of another IPAM plugin.
    pub(crate) addressing: Locks<IpAddr>,
    pub(crate) store: Arc<dyn Endpoints>,
    pub(crate) ipam: Arc<Ipam>,
    pub(crate) wiring: Arc<dyn PodWiring>,
    pub(crate) node: String,
    /// Whether the runtime calls a plugin that limits bandwidth after Tortie's.
    pub(crate) has_bandwidth_plugin: bool,
    pub(crate) in_force: watch::Receiver<Arc<InForce>>,
    pub(crate) barrier: Barrier,
    pub(crate) assigned_pods: AssignedPods,
    /// flannel's leases in etcd, which decide about the pods' addresses.
    pub(crate) leases: Leases,
    pub(crate) metrics: Arc<Metrics>,
}

impl Pods {
    /// Handles a call. An ADD whose plugin has `hung_up` is undone: a runtime that gives up kills its plugin.
    pub(crate) async fn carry_out(
        &self,
        call: &Invocation,
        hung_up: impl Future<Output = ()> + Send,
    ) -> Answer {
        let started = Instant::now();
        let answer = match call.command {
            Command::Add => self.add(call, pin!(hung_up)).await.map(Some),
            Command::Del => self.del(call).await.map(|()| None),
            Command::Check => self.check(call).await.map(|()| None),
            Command::Gc => self.collect_garbage(call).await.map(|()| None),
            Command::Status => self.status().map(|()| None),
            Command::Version => Ok(None),
            Command::PodCidrs => self.pod_cidrs().await.map(Some),
        };
        self.metrics.call(call.command, &answer, started.elapsed());
        answer
    }

    /// CNI STATUS: whether an ADD could succeed.
    fn status(&self) -> Result<(), Failure> {
        let now = self.in_force.borrow();
        if !now.positions.is_empty() {
            return Ok(());
        }
        let mut why = now.blocking();
        why.extend(now.report.node_failures().map(ToString::to_string));
        Err(Failure::new(Code::NOT_AVAILABLE, "no policy is in force on the node yet", why.join("; ")))
    }

    /// CNI ADD. If a step fails, nothing of the attempt remains.
    async fn add(&self, call: &Invocation, mut hung_up: HungUp<'_>) -> Result<Success, Failure> {
        let id = endpoint_id(call)?;
        let _turn = self.busy.lock(&id).await;
        if hung_up.as_mut().now_or_never().is_some() {
            return Err(nobody_waits(&id));
        }
        let result = self.try_add(call, &id, hung_up).await;
        if let Err(failure) = &result {
            tracing::warn!(pod = %id, container = call.container_id, %failure, "cannot add a pod; Tortie undoes the attempt and the runtime retries");
            if let Err(undone) = self.remove(call, &id).await {
                tracing::error!(pod = %id, %undone, "cannot undo the attempt; the runtime's DEL retries");
            }
        }
        result
    }

    async fn try_add(
        &self,
        call: &Invocation,
        id: &EndpointId,
        hung_up: HungUp<'_>,
    ) -> Result<Success, Failure> {
        self.refuse_blocked(id)?;
        self.refuse_other_network(id)?;
        self.refuse_lost_subnet(id)?;
        let dns = dns::of(&call.config)?;
        let read = async {
            tokio::try_join!(
                async { self.barrier.positions().await.map_err(store_failure) },
                self.pod(call, id),
                self.namespace(&id.namespace),
                self.refuse_replaced(call, id)
            )
        };
        // Both until they have ended: a link that appears after a failure would stay.
        let (prepared, read) = tokio::join!(self.prepare(call, id), read);
        let prepared = prepared.inspect_err(|_| {
            if let Err(other) = &read {
                tracing::warn!(pod = %id, failure = %other, "the pod cannot be read either");
            }
        })?;
        let obtained = async {
            let (positions, pod, namespace, ()) = read?;
            let obtained = self.check_and_obtain(call, id, &pod, namespace, prepared.clone()).await?;
            Ok((positions, pod, obtained))
        };
        let (mut positions, pod, obtained) = match obtained.await {
            Ok(obtained) => obtained,
            Err(failure) => {
                self.abandon(id, prepared).await;
                return Err(failure);
            }
        };
        let (interface, published) = self.connect_and_publish(call, id, &pod, obtained, prepared).await?;
        positions.advance(Kind::WorkloadEndpoint, published);
        tokio::try_join!(
            self.wait_for_policy(id, &positions, hung_up),
            self.wait_until_live(id, &interface)
        )?;
        Ok(Success { dns, ..Self::success(call, &interface) })
    }

    /// The policy of a pod is not known while the agent has never read a kind, or applies no changes.
    pub(crate) fn refuse_blocked(&self, id: &EndpointId) -> Result<(), Failure> {
        let blocking = self.in_force.borrow().blocking();
        if blocking.is_empty() {
            return Ok(());
        }
        let msg = format!("the policy of pod {}/{} is not known", id.namespace, id.pod);
        Err(Failure::new(Code::TRY_AGAIN_LATER, msg, blocking.join("; ")))
    }

    /// No policy comes into force while the network differs, and each attempt of a pod would keep the network in use: pods of
    /// DaemonSets come back at once, and it would never be replaced.
    fn refuse_other_network(&self, id: &EndpointId) -> Result<(), Failure> {
        let now = self.in_force.borrow();
        let differs = now.report.node_failures().find(|it| it.reason == Reason::NetworkDiffers);
        differs.map_or(Ok(()), |condition| {
            let msg = format!("pod {}/{} waits until the node's network is replaced", id.namespace, id.pod);
            Err(Failure::new(Code::TRY_AGAIN_LATER, msg, condition.message.clone()))
        })
    }

    /// Another node may give the same addresses to its pods.
    fn refuse_lost_subnet(&self, id: &EndpointId) -> Result<(), Failure> {
        let lost = self.leases.as_ref().and_then(|leases| leases.borrow().lost.clone());
        lost.map_or(Ok(()), |lost| {
            let msg = format!("pod {}/{} gets no address", id.namespace, id.pod);
            Err(Failure::new(Code::TRY_AGAIN_LATER, msg, lost))
        })
    }

    /// CNI DEL.
    async fn del(&self, call: &Invocation) -> Result<(), Failure> {
        let id = endpoint_id(call)?;
        let _turn = self.busy.lock(&id).await;
        self.refuse_locked()?;
        self.remove(call, &id).await
    }

    /// What is written to a datastore that is migrated may be lost: then a pod's address would never be released.
    fn refuse_locked(&self) -> Result<(), Failure> {
        self.in_force.borrow().lock.as_ref().map_or(Ok(()), |lock| Err(locked(lock)))
    }

    /// Removes everything of the container, for a DEL or after a failed ADD.
    async fn remove(&self, call: &Invocation, id: &EndpointId) -> Result<(), Failure> {
        let wiring = self.wiring.clone();
        let (endpoint, container) = (id.clone(), call.container_id.clone());
        let key = self.key(id);
        // Meanwhile the endpoint is read; nothing is written before the interface is gone.
        let disconnect = blocking(move || wiring.disconnect(&endpoint, &container));
        let (disconnected, stored) = tokio::join!(disconnect, self.store.get(&key));
        disconnected.map_err(wiring_failure)?;
        self.assigned_pods.remove(&key, &call.container_id);
        let stored = stored.map_err(store_failure)?;
        let addresses = stored.as_ref().map(|stored| addresses::of_endpoint(stored, &call.container_id));
        let withdrawn = self.store.withdraw(stored, &call.container_id).await;
        withdrawn.map_err(store_failure)?;
        let released = self.ipam.release_with(&handle(call), &addresses.unwrap_or_default()).await;
        released.map_err(|error| {
            Failure::new(Code::IPAM, "the pod's address could not be released", error.to_string())
        })?;
        Ok(())
    }

    /// CNI CHECK: the endpoint is stored for this container, its interface is unchanged, and its policy is in force.
    async fn check(&self, call: &Invocation) -> Result<(), Failure> {
        let id = endpoint_id(call)?;
        let _turn = self.busy.lock(&id).await;
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
        let networks = &endpoint.spec.ip_networks;
        let mut known: Vec<PodAddress> =
            self.assigned(call).await?.iter().map(addresses::of_assignment).collect();
        if known.is_empty() && has_outside(&call.config)? {
            known = networks.iter().map(addresses::alone).collect();
        }
        if known.is_empty() {
            return Err(differs("it has no address".to_owned()));
        }
        let before = PrevResult::read(&call.config.extra)?;
        for PodAddress { address, .. } in &known {
            if !networks.iter().any(|net| net.addr() == *address) {
                return Err(differs(format!("its address {address} is not the endpoint's")));
            }
            if before.as_ref().is_some_and(|before| !before.has_address(&address.to_string())) {
                return Err(differs(format!("prevResult does not have its address {address}")));
            }
        }
        if let Some(other) = networks.iter().find(|net| !known.iter().any(|own| own.address == net.addr())) {
            return Err(differs(format!(
                "the endpoint has the address {}, which IPAM gave to nobody",
                other.addr()
            )));
        }
        let (wiring, attachment) = (
            self.wiring.clone(),
            self.attachment(
                call,
                &id,
                &known,
                runtime_config::mac(call)?,
                Self::passed_limits(&call.config)?,
            )?,
        );
        blocking(move || wiring.check(&attachment)).await.map_err(|error| differs(error.to_string()))?;
        self.in_force.borrow().problem_of(&id).map_or(Ok(()), |problem| Err(differs(problem)))
    }

    /// CNI GC: removes what this node has for this network beyond the attachments that the runtime knows.
    async fn collect_garbage(&self, call: &Invocation) -> Result<(), Failure> {
        let Some(valid) = &call.config.valid_attachments else {
            return Err(Failure::new(Code::INVALID_CONFIG, "GC needs cni.dev/valid-attachments", ""));
        };
        self.refuse_locked()?;
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
            if !self.is_of_network(&gone, &endpoint.metadata).await? {
                continue;
            }
            tracing::info!(pod = %stored.key, container = spec.container_id, "the runtime no longer knows this pod; Tortie removes it");
            failures.extend(self.del(&gone).await.err());
        }
        failures.extend(self.release_forgotten(&call.config.name, valid).await);
        failures.into_iter().next().map_or(Ok(()), Err)
    }

    /// Whether a pod belongs to the network of this call: it has a handle with the network's name, or its endpoint names the
    /// network. In the Kubernetes API, an endpoint cannot name it; there a pod has one interface, and so one network.
    async fn is_of_network(&self, gone: &Invocation, metadata: &Metadata) -> Result<bool, Failure> {
        if !self.assigned(gone).await?.is_empty() {
            return Ok(true);
        }
        if !has_outside(&gone.config)? {
            return Ok(false);
        }
        if !self.store.derives_from_kubernetes() {
            return Ok(metadata.annotations.get(NETWORK) == Some(&gone.config.name));
        }
        let handles = self.ipam.handles().await.map_err(|error| not_checked(&error))?;
        let is_part = |handle: &String| handle.split('.').any(|part| part == gone.container_id);
        Ok(!handles.keys().any(is_part))
    }

    /// Releases the addresses of this node's pods in a network that belong neither to an attachment that the runtime
    /// knows nor to an endpoint. Returns the failures.
    async fn release_forgotten(&self, network: &str, valid: &[Attachment]) -> Vec<Failure> {
        let handles = match self.ipam.handles().await {
            Ok(handles) => handles,
            Err(error) => return vec![not_checked(&error)],
        };
        let mut failures = Vec::new();
        for (handle, (block, owner)) in handles {
            let known =
                valid.iter().any(|each| handle_of(network, &each.container_id, &each.ifname) == handle);
            let attachment = handle.strip_prefix(network).and_then(|rest| rest.strip_prefix('.'));
            let interface = attachment_of(network, &handle).map(|(_, interface)| interface.to_owned());
            // Without a pod's name it is the address of something else.
            if let (Some(attachment), Some(interface), Some(namespace), Some(pod), false) =
                (attachment, interface, owner.get("namespace"), owner.get("pod"), known)
            {
                let id = |interface: &str| EndpointId {
                    namespace: namespace.as_str().into(),
                    pod: pod.as_str().into(),
                    interface: interface.into(),
                };
                let released = self.release_if_forgotten(
                    &handle,
                    attachment,
                    block,
                    [id(&interface), id(USUAL_INTERFACE)],
                );
                failures.extend(released.await.err());
            }
        }
        failures
    }

    /// Releases the addresses of a handle, unless an endpoint of its pod has its container.
    async fn release_if_forgotten(
        &self,
        handle: &str,
        attachment: &str,
        block: IpNet,
        [id, usual]: [EndpointId; 2],
    ) -> Result<(), Failure> {
        // An ADD of this container may be about to store the endpoint.
        let _turn = self.busy.lock(&id).await;
        for id in [&id, &usual] {
            let stored = self.store.get(&self.key(id)).await.map_err(store_failure)?;
            let container =
                stored.as_ref().and_then(|endpoint| endpoint.value["spec"]["containerID"].as_str());
            // The name of another network may begin with this one's and a dot, so the container may be any part.
            if container.is_some_and(|container| attachment.split('.').any(|part| part == container)) {
                return Ok(());
            }
        }
        tracing::info!(pod = %id, handle, "the runtime does not know this container, and it has no endpoint; Tortie releases its address");
        let released = self.ipam.release(handle).await.map_err(|error| not_checked(&error))?;
        if released.is_empty() {
            self.ipam.release_in(handle, block).await.map_err(|error| not_checked(&error))?;
        }
        Ok(())
    }

    /// The Pod, which must be on this node, and be the one for which the sandbox was created.
    async fn pod(&self, call: &Invocation, id: &EndpointId) -> Result<(Stored, Pod), Failure> {
        let key = Key::namespaced(Kind::Pod, &*id.namespace, &*id.pod);
        let again = "the agent retries when the runtime does";
        let later = |msg: String| Failure::new(Code::TRY_AGAIN_LATER, msg, again);
        let stored = self.store.get(&key).await.map_err(store_failure)?;
        let stored = stored.ok_or_else(|| later(format!("{key} is not known")))?;
        let Ok(Resource::Pod(pod)) = Resource::read(&key, &stored.value) else {
            return Err(Failure::new(Code::DECODING, format!("{key} cannot be read"), ""));
        };
        let uid = stored.value["metadata"]["uid"].as_str().unwrap_or_default();
        // The sandbox of a static pod has the uid of its manifest. Its Pod in the API, a mirror, has its own.
        let hash = pod.metadata.annotations.get("kubernetes.io/config.hash");
        let is_meant = |made_for: &&String| *made_for == uid || hash == Some(made_for);
        if let Some(made_for) = call.args.get("K8S_POD_UID").filter(|made_for| !is_meant(made_for)) {
            let msg = format!(
                "the sandbox is for {key} with the uid {made_for}, and the one that is known has {uid}"
            );
            return Err(later(msg));
        }
        if let Some(other) = pod.spec.node_name.as_ref().filter(|node| **node != self.node) {
            let msg = format!("{key} belongs to node {other}");
            return Err(Failure::new(Code::INVALID_ENVIRONMENT, msg, format!("this is node {}", self.node)));
        }
        Ok((stored, pod))
    }

    /// A container that has an address while the endpoint belongs to another one was added earlier: its sandbox has
    /// been replaced, and must not take the endpoint back.
    async fn refuse_replaced(&self, call: &Invocation, id: &EndpointId) -> Result<(), Failure> {
        let stored = self.store.get(&self.key(id)).await.map_err(store_failure)?;
        let holder = stored.as_ref().and_then(|stored| stored.value["spec"]["containerID"].as_str());
        match holder {
            Some(holder) if holder != call.container_id && !self.assigned(call).await?.is_empty() => {
                let msg = format!(
                    "container {} of {id} has been replaced by container {holder}",
                    call.container_id
                );
                Err(Failure::new(Code::INVALID_ENVIRONMENT, msg, "delete it"))
            }
            _ => Ok(()),
        }
    }

    async fn namespace(&self, name: &str) -> Result<Metadata, Failure> {
        let key = Key::global(Kind::Namespace, name);
        // Without it, nobody can tell which pools and policies its labels select.
        let stored = self.store.get(&key).await.map_err(store_failure)?.ok_or_else(|| {
            let msg = format!("{key} does not exist");
            Failure::new(Code::TRY_AGAIN_LATER, msg, "create it; the pod is connected when it is there")
        })?;
        match Resource::read(&key, &stored.value) {
            Ok(Resource::Namespace(namespace)) => Ok(namespace.metadata),
            _ => Err(Failure::new(Code::DECODING, format!("{key} cannot be read"), "")),
        }
    }

    /// All addresses that the container already has.
    async fn assigned(&self, call: &Invocation) -> Result<Vec<Assignment>, Failure> {
        let found = self.ipam.find(&handle(call)).await;
        found.map_err(|error| {
            Failure::new(Code::IPAM, "the pod's address cannot be looked up", error.to_string())
        })
    }

    pub(crate) async fn connect(
        &self,
        attachment: PodAttachment,
        prepared: Option<PreparedLink>,
    ) -> Result<PodInterface, Failure> {
        let wiring = self.wiring.clone();
        let connect = move || match prepared {
            Some(link) => wiring.finish(link, &attachment),
            None => wiring.connect(&attachment),
        };
        blocking(connect).await.map_err(wiring_failure)
    }

    /// Makes the pod's link while the pod is read.
    async fn prepare(&self, call: &Invocation, id: &EndpointId) -> Result<Option<PreparedLink>, Failure> {
        let link = PodLink {
            endpoint: id.clone(),
            container_id: call.container_id.clone(),
            netns: call.netns.clone(),
            mtu: runtime_config::mtu(&call.config)?,
        };
        let wiring = self.wiring.clone();
        blocking(move || wiring.prepare(&link)).await.map_err(wiring_failure)
    }

    /// Deletes a link that was prepared for nothing.
    pub(crate) async fn abandon(&self, id: &EndpointId, prepared: Option<PreparedLink>) {
        let Some(prepared) = prepared else { return };
        let wiring = self.wiring.clone();
        if let Err(failure) = blocking(move || wiring.abandon(prepared)).await {
            tracing::warn!(pod = %id, %failure, "the link that was prepared for the pod cannot be deleted at once; it is removed as that of a deleted pod");
        }
    }

    async fn wait_for_policy(
        &self,
        id: &EndpointId,
        positions: &Positions,
        hung_up: HungUp<'_>,
    ) -> Result<(), Failure> {
        let mut in_force = self.in_force.clone();
        // While the datastore is locked, nothing comes into force.
        let covered = in_force.wait_for(|now| now.covers(id, positions) || now.lock.is_some());
        let waited = tokio::select! {
            waited = timeout(POLICY_TIMEOUT, covered) => waited,
            () = hung_up => return Err(nobody_waits(id)),
        };
        match waited {
            // The state that ended the wait decides: the lock may be gone by now, and the policy not yet in force.
            Ok(Ok(now)) => match &now.lock {
                Some(lock) if !now.covers(id, positions) => Err(locked(lock)),
                _ => Ok(()),
            },
            Ok(Err(_)) => Err(Failure::new(Code::TRY_AGAIN_LATER, "the agent is going down", "")),
            Err(_) => {
                let now = self.in_force.borrow();
                let why: Vec<String> = now.report.failures_of(id).map(ToString::to_string).collect();
                let msg = format!("the policy of pod {}/{} is not in force", id.namespace, id.pod);
                Err(Failure::new(Code::TRY_AGAIN_LATER, msg, why.join("; ")))
            }
        }
    }

    /// A pod's first packets must not be lost on a link that is not ready.
    async fn wait_until_live(&self, id: &EndpointId, interface: &PodInterface) -> Result<(), Failure> {
        let (wiring, waited_for) = (self.wiring.clone(), interface.clone());
        let live = blocking(move || Ok(wiring.wait_until_live(&waited_for, LINK_TIMEOUT))).await;
        if live.map_err(wiring_failure)? {
            return Ok(());
        }
        let msg = format!("the interface of pod {}/{} does not come up", id.namespace, id.pod);
        Err(Failure::new(Code::TRY_AGAIN_LATER, msg, format!("{} on the host", interface.host_interface)))
    }

    fn success(call: &Invocation, interface: &PodInterface) -> Success {
        let host_end = interface.host_mac.map(|mac| Interface {
            name: interface.host_interface.clone(),
            mac: mac.to_string(),
            sandbox: String::new(),
        });
        let in_pod = Interface {
            name: call.interface.clone(),
            mac: interface.mac.to_string(),
            sandbox: call.netns.clone(),
        };
        let interfaces: Vec<_> = host_end.into_iter().chain([in_pod]).collect();
        let last = interfaces.len() - 1;
        let addresses = interface.addresses.iter();
        let ips = addresses.clone().map(|own| Address { address: own.address.to_string(), interface: last });
        let routes = addresses.map(|own| {
            let everything = match own.gateway {
                IpAddr::V4(_) => IpNet::V4(Ipv4Net::default()),
                IpAddr::V6(_) => IpNet::V6(Ipv6Net::default()),
            };
            Route { dst: everything.to_string(), gw: Some(own.gateway) }
        });
        Success { ips: ips.collect(), routes: routes.collect(), interfaces, ..Success::default() }
    }

    pub(crate) fn attachment(
        &self,
        call: &Invocation,
        id: &EndpointId,
        addresses: &[PodAddress],
        mac: Option<MacAddress>,
        limits: BandwidthLimits,
    ) -> Result<PodAttachment, Failure> {
        Ok(PodAttachment {
            endpoint: id.clone(),
            container_id: call.container_id.clone(),
            netns: call.netns.clone(),
            addresses: addresses.to_vec(),
            mtu: runtime_config::mtu(&call.config)?,
            mac,
            limits,
            dns: dns::of_pod(&call.config)?,
        })
    }

    pub(crate) fn key(&self, id: &EndpointId) -> Key {
        let name = WorkloadEndpoint::name_for(&self.node, &id.pod, &id.interface);
        Key::namespaced(Kind::WorkloadEndpoint, &*id.namespace, name)
    }

    /// The attributes that the block stores with the address (`cni-plugin/pkg/ipamplugin` of Calico); the time is in
    /// Go's text form.
    pub(crate) fn owner(&self, id: &EndpointId) -> BTreeMap<String, String> {
        let now = Timestamp::now().strftime("%Y-%m-%d %H:%M:%S%.f +0000 UTC").to_string();
        let pairs = [
            ("node", self.node.clone()),
            ("namespace", id.namespace.to_string()),
            ("pod", id.pod.to_string()),
            ("timestamp", now),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// Whether pods of the network may have addresses that the agent's IPAM does not know.
fn has_outside(config: &NetworkConfig) -> Result<bool, Failure> {
    Ok(config.address_source()?.is_delegated() || addresses::allows_outside(config))
}

fn not_checked(error: &IpamError) -> Failure {
    Failure::new(Code::IPAM, "the addresses of the node's pods cannot be checked", error.to_string())
}

fn endpoint_id(call: &Invocation) -> Result<EndpointId, Failure> {
    let arg = |name: &str| {
        let value = call.args.get(name).filter(|value| !value.is_empty()).cloned();
        value.ok_or_else(|| Failure::new(Code::INVALID_ENVIRONMENT, format!("CNI_ARGS has no {name}"), ""))
    };
    Ok(EndpointId {
        namespace: arg("K8S_POD_NAMESPACE")?.into(),
        pod: arg("K8S_POD_NAME")?.into(),
        interface: call.interface.as_str().into(),
    })
}

fn nobody_waits(id: &EndpointId) -> Failure {
    Failure::new(Code::TRY_AGAIN_LATER, format!("the runtime no longer waits for the ADD of {id}"), "")
}

/// Why nothing is written to a locked datastore.
fn locked(lock: &Unsupported) -> Failure {
    Failure::new(Code::TRY_AGAIN_LATER, "the datastore is locked", &lock.message)
}

pub(crate) async fn blocking<T: Send + 'static>(
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

pub(crate) fn wiring_failure(error: WiringError) -> Failure {
    Failure::new(Code::WIRING, "the pod's interface could not be made or removed", error.to_string())
}

pub(crate) fn store_failure(error: StoreError) -> Failure {
    Failure::new(Code::TRY_AGAIN_LATER, "the datastore did not carry out the request", error.to_string())
}
