//! The WorkloadEndpoint of a pod before its addresses are known, so that it can be stored together with their allocation.

use std::sync::Arc;

use ipnet::IpNet;
use tortie_api::Metadata;
use tortie_api::calico::{WorkloadEndpoint, WorkloadEndpointSpec};
use tortie_api::kubernetes::Pod;
use tortie_cni::{Failure, Invocation};
use tortie_dataplane::{BandwidthLimits, EndpointId, PodAddress, PodAttachment, PodInterface, PodWiring};
use tortie_store::{Endpoints, POD_UID, Stored, Write};

use crate::addresses::NETWORK;
use crate::pods::Pods;
use crate::runtime_config;

/// The endpoint of a pod whose link exists, without addresses.
#[derive(Clone)]
pub(crate) struct Publication {
    store: Arc<dyn Endpoints>,
    wiring: Arc<dyn PodWiring>,
    attachment: PodAttachment,
    endpoint: WorkloadEndpoint,
}

impl Publication {
    /// The write that publishes the endpoint with these addresses, if that takes one write.
    pub(crate) fn write(&self, addresses: Vec<PodAddress>) -> Option<Write> {
        let attachment = PodAttachment { addresses, ..self.attachment.clone() };
        let interface = self.wiring.planned(&attachment)?;
        let endpoint = with_interface(self.endpoint.clone(), &attachment.addresses, &interface);
        self.store.publication(&endpoint)
    }
}

impl Pods {
    /// What publishes the pod's endpoint when its addresses are known.
    pub(crate) fn publication(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        limits: BandwidthLimits,
    ) -> Result<Publication, Failure> {
        let mac = runtime_config::wanted_mac(call, &pod.1)?;
        Ok(Publication {
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
        WorkloadEndpoint {
            api_version: key.kind.api_version().to_owned(),
            kind: key.kind.name().to_owned(),
            metadata: Metadata {
                name: key.name.clone(),
                namespace: id.namespace.to_string(),
                labels: pod.metadata.labels.clone(),
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
