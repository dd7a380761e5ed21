//! The WorkloadEndpoint of a pod's interface, which ADD publishes.

use ipnet::IpNet;
use tortie_api::calico::{WorkloadEndpoint, WorkloadEndpointSpec};
use tortie_api::kubernetes::Pod;
use tortie_api::{Metadata, Position};
use tortie_cni::{Failure, Invocation};
use tortie_dataplane::{EndpointId, PodInterface, PreparedLink};
use tortie_store::{POD_UID, Stored};

use crate::addresses::NETWORK;
use crate::obtain::Obtained;
use crate::pods::{Pods, store_failure};
use crate::runtime_config;

impl Pods {
    /// Connects the pod, and stores its endpoint. If the link exists already, it exists closed, and nothing but policy opens it;
    /// so the endpoint is stored while the link gets the pod's address.
    pub(crate) async fn connect_and_publish(
        &self,
        call: &Invocation,
        id: &EndpointId,
        pod: &(Stored, Pod),
        obtained: &Obtained,
        prepared: Option<PreparedLink>,
    ) -> Result<(PodInterface, Position), Failure> {
        let mac = runtime_config::wanted_mac(call, &pod.1)?;
        let attachment = self.attachment(call, id, &obtained.addresses, mac, self.limits(call, pod)?)?;
        let planned = prepared.as_ref().and_then(|_| self.wiring.planned(&attachment));
        let connect = self.connect(attachment, prepared);
        let Some(planned) = planned else {
            let interface = connect.await?;
            self.refuse_blocked(id)?;
            let published = self.publish(call, id, pod, obtained, &interface).await?;
            return Ok((interface, published));
        };
        self.refuse_blocked(id)?;
        // Both until they have ended: what appears after a failure would stay.
        let (connected, published) = tokio::join!(connect, self.publish(call, id, pod, obtained, &planned));
        let (interface, published) = (connected?, published?);
        self.refuse_blocked(id)?;
        Ok((interface, published))
    }

    /// Publishes the WorkloadEndpoint: from here on every node knows the pod.
    async fn publish(
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
                ip_networks: obtained.addresses.iter().map(|own| IpNet::from(own.address)).collect(),
                profiles: WorkloadEndpoint::profiles_for(&id.namespace, pod.service_account()),
                interface_name: interface.host_interface.clone(),
                mac: interface.mac.to_string(),
                ports: pod.endpoint_ports(),
            },
        };
        self.store.publish(&endpoint).await.map_err(store_failure)
    }
}
