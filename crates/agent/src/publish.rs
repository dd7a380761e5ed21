//! The WorkloadEndpoint of a pod's interface, which ADD publishes.

use ipnet::IpNet;
use tortie_api::calico::{WorkloadEndpoint, WorkloadEndpointSpec};
use tortie_api::kubernetes::Pod;
use tortie_api::{Metadata, Position};
use tortie_cni::{Failure, Invocation};
use tortie_dataplane::{EndpointId, PodInterface};
use tortie_store::{POD_UID, Stored};

use crate::addresses::NETWORK;
use crate::obtain::Obtained;
use crate::pods::{Pods, store_failure};

impl Pods {
    /// Publishes the WorkloadEndpoint: from here on every node knows the pod.
    pub(crate) async fn publish(
        &self,
        call: &Invocation,
        id: &EndpointId,
        (stored, pod): &(Stored, Pod),
        obtained: &Obtained,
        interface: &PodInterface,
    ) -> Result<Position, Failure> {
        let key = self.key(id);
        let uid = stored.value["metadata"]["uid"].as_str();
        let network = obtained.outside.then(|| (NETWORK.to_owned(), call.config.name.clone()));
        let uid = uid.map(|uid| (POD_UID.to_owned(), uid.to_owned()));
        let endpoint = WorkloadEndpoint {
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
                ip_networks: vec![IpNet::from(std::net::IpAddr::V4(obtained.address.address))],
                profiles: WorkloadEndpoint::profiles_for(&id.namespace, pod.service_account()),
                interface_name: interface.host_interface.clone(),
                mac: interface.mac.to_string(),
                ports: pod.endpoint_ports(),
            },
        };
        self.store.publish(&endpoint).await.map_err(store_failure)
    }
}
