//! The WorkloadEndpoint of a pod before its addresses are known, so that it can be stored together with their allocation.

use std::pin::pin;
use std::sync::Arc;

use ipnet::IpNet;
use tokio::sync::mpsc;
use tokio::{join, select};
use tortie_api::calico::{WorkloadEndpoint, WorkloadEndpointSpec};
use tortie_api::kubernetes::Pod;
use tortie_api::{Metadata, Position};
use tortie_cni::{Failure, Invocation};
use tortie_dataplane::{
    BandwidthLimits, EndpointId, PodAddress, PodAttachment, PodInterface, PodWiring, PreparedLink,
};
use tortie_ipam::{FollowUp, Request};
use tortie_store::{Endpoints, POD_UID, Stored, Write, endpoint_labels};

use crate::addresses::{self, NETWORK};
use crate::pods::Pods;
use crate::runtime_config;

/// The endpoint of a pod whose link exists, without addresses.
#[derive(Clone)]
pub(crate) struct Publication {
    prepared: PreparedLink,
    store: Arc<dyn Endpoints>,
    wiring: Arc<dyn PodWiring>,
    attachment: PodAttachment,
    endpoint: WorkloadEndpoint,
}

impl Publication {
    fn attachment(&self, addresses: Vec<PodAddress>) -> PodAttachment {
        PodAttachment { addresses, ..self.attachment.clone() }
    }

    /// The write that publishes the endpoint with these addresses, if that takes one write.
    fn write(&self, addresses: Vec<PodAddress>) -> Option<Write> {
        let attachment = self.attachment(addresses);
        let interface = self.wiring.planned(&attachment)?;
        let endpoint = with_interface(self.endpoint.clone(), &attachment.addresses, &interface);
        self.store.publication(&endpoint)
    }
}

/// What allocation has made of a pod's link.
pub(crate) enum Link {
    /// It is as it was.
    Unchanged,
    /// It has the pod's address.
    Connected(PodInterface),
    /// It got an address that the pod did not get, so it is deleted.
    Deleted,
}

/// The only address of a pod.
pub(crate) struct OnlyAddress {
    pub(crate) address: PodAddress,
    /// The position of the pod's endpoint, if it was published with the allocation.
    pub(crate) published: Option<Position>,
    pub(crate) link: Link,
}

impl Pods {
    /// Allocates the only address of a pod, and publishes the pod's endpoint with it if that takes one write. While both are
    /// written, the link gets the address: it is closed until policy of the endpoint opens it.
    pub(crate) async fn assign_only_address(
        &self,
        request: &Request,
        publication: &Publication,
    ) -> Result<OnlyAddress, Failure> {
        let (choose, mut chosen) = mpsc::unbounded_channel();
        let to_write = publication.clone();
        let follow_up: FollowUp = Arc::new(move |one| {
            let address = addresses::of_assignment(&one);
            let _ = choose.send(address); // only the first one is awaited
            to_write.write(vec![address])
        });
        let mut assign = pin!(self.ipam.assign_and_write(request, Some(follow_up)));
        let (assigned, finished) = select! {
            biased;
            assigned = &mut assign => (assigned, None),
            Some(address) = chosen.recv() => {
                let attachment = publication.attachment(vec![address]);
                let finish = self.connect(attachment, Some(publication.prepared.clone()));
                let (assigned, finished) = join!(assign, finish);
                (assigned, Some((address, finished)))
            }
        };
        // After a failure, the caller deletes the link.
        let (one, published) = assigned.map_err(|error| addresses::no_address(&error))?;
        let address = addresses::of_assignment(&one);
        let link = match finished {
            None => Link::Unchanged,
            Some((chosen, finished)) if chosen == address => Link::Connected(finished?),
            // Somebody else has written the block meanwhile.
            Some((_, finished)) => {
                if finished.is_ok() {
                    self.abandon(&publication.attachment.endpoint, Some(publication.prepared.clone())).await;
                }
                Link::Deleted
            }
        };
        Ok(OnlyAddress { address, published, link })
    }

    /// What publishes the pod's endpoint when its addresses are known.
    pub(crate) fn publication(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        limits: BandwidthLimits,
        prepared: PreparedLink,
    ) -> Result<Publication, Failure> {
        let mac = runtime_config::wanted_mac(call, &pod.1)?;
        Ok(Publication {
            prepared,
            store: self.store.clone(),
            wiring: self.wiring.clone(),
            attachment: self.attachment(call, id, &[], mac, limits)?,
            endpoint: self.endpoint(call, id, pod, false),
        })
    }

    /// The WorkloadEndpoint without addresses and interface. `outside`: the agent's IPAM does not know its addresses.
    pub(crate) fn endpoint(
        &self,
        call: &Invocation,
        id: &EndpointId,
        (stored, pod): &(Stored, Pod),
        outside: bool,
    ) -> WorkloadEndpoint {
        let key = self.key(id);
        let uid = stored.value["metadata"]["uid"].as_str();
        let network = outside.then(|| (NETWORK.to_owned(), call.config.name.clone()));
        let uid = uid.map(|uid| (POD_UID.to_owned(), uid.to_owned()));
        let account = pod.spec.service_account_name.as_deref().unwrap_or_default();
        WorkloadEndpoint {
            api_version: key.kind.api_version().to_owned(),
            kind: key.kind.name().to_owned(),
            metadata: Metadata {
                name: key.name.clone(),
                namespace: id.namespace.to_string(),
                labels: endpoint_labels(pod.metadata.labels.clone(), &id.namespace, account),
                annotations: uid.into_iter().chain(network).collect(),
            },
            spec: WorkloadEndpointSpec {
                orchestrator: "k8s".to_owned(),
                node: self.node.clone(),
                container_id: call.container_id.clone(),
                pod: id.pod.to_string(),
                endpoint: id.interface.to_string(),
                service_account_name: pod.service_account().to_owned(),
                ip_networks: Vec::new(),
                profiles: WorkloadEndpoint::profiles_for(&id.namespace, pod.service_account()),
                interface_name: String::new(),
                mac: String::new(),
                ports: pod.endpoint_ports(),
            },
        }
    }
}

/// The endpoint with its addresses and its interface.
pub(crate) fn with_interface(
    mut endpoint: WorkloadEndpoint,
    addresses: &[PodAddress],
    interface: &PodInterface,
) -> WorkloadEndpoint {
    endpoint.spec.ip_networks = addresses.iter().map(|own| IpNet::from(own.address)).collect();
    endpoint.spec.interface_name.clone_from(&interface.host_interface);
    endpoint.spec.mac = interface.mac.to_string();
    endpoint
}
