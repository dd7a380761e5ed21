//! The WorkloadEndpoint of a pod's interface: written by ADD, deleted by DEL.

use ipnet::IpNet;
use serde_json::Value;
use tortie_api::calico::{WorkloadEndpoint, WorkloadEndpointSpec};
use tortie_api::kubernetes::Pod;
use tortie_api::{Metadata, Position};
use tortie_cni::{Code, Failure, Invocation};
use tortie_dataplane::{EndpointId, PodInterface};
use tortie_ipam::Assignment;
use tortie_store::{POD_UID, StoreError, Stored};

use crate::pods::{Pods, store_failure};

impl Pods {
    /// Stores the WorkloadEndpoint: from here on every node knows the pod.
    pub(crate) async fn publish(
        &self,
        call: &Invocation,
        id: &EndpointId,
        (stored, pod): &(Stored, Pod),
        assignment: Assignment,
        interface: &PodInterface,
    ) -> Result<Position, Failure> {
        let key = self.key(id);
        let uid = stored.value["metadata"]["uid"].as_str();
        let endpoint = WorkloadEndpoint {
            api_version: key.kind.api_version().to_owned(),
            kind: key.kind.name().to_owned(),
            metadata: Metadata {
                name: key.name.clone(),
                namespace: id.namespace.to_string(),
                labels: pod.metadata.labels.clone(),
                annotations: uid.map(|uid| (POD_UID.to_owned(), uid.to_owned())).into_iter().collect(),
            },
            spec: WorkloadEndpointSpec {
                orchestrator: "k8s".to_owned(),
                node: self.node.clone(),
                container_id: call.container_id.clone(),
                pod: id.pod.to_string(),
                endpoint: id.interface.to_string(),
                service_account_name: pod.service_account().to_owned(),
                ip_networks: vec![IpNet::from(std::net::IpAddr::V4(assignment.address))],
                profiles: WorkloadEndpoint::profiles_for(&id.namespace, pod.service_account()),
                interface_name: interface.host_interface.clone(),
                mac: interface.mac.to_string(),
                ports: pod.named_ports(),
            },
        };
        let value: Value = serde_json::to_value(endpoint).map_err(|error| {
            Failure::new(Code::DECODING, format!("{key} cannot be written"), error.to_string())
        })?;
        loop {
            let written = match self.store.create(&key, value.clone()).await {
                Err(StoreError::AlreadyExists(_)) => {
                    match self.store.get(&key).await.map_err(store_failure)? {
                        Some(before) => self.store.update(&key, value.clone(), &before.version).await,
                        None => continue,
                    }
                }
                written => written,
            };
            match written {
                Ok(stored) => return Ok(stored.position),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(store_failure(error)),
            }
        }
    }

    /// Deletes the WorkloadEndpoint, unless it belongs to another container, because the pod has been recreated.
    pub(crate) async fn withdraw(
        &self,
        call: &Invocation,
        mut stored: Option<Stored>,
    ) -> Result<(), StoreError> {
        while let Some(endpoint) = stored {
            if endpoint.value["spec"]["containerID"] != call.container_id.as_str() {
                return Ok(());
            }
            match self.store.delete(&endpoint.key, Some(&endpoint.version)).await {
                Ok(_) | Err(StoreError::NotFound(_)) => return Ok(()),
                Err(StoreError::Conflict(_)) => stored = self.store.get(&endpoint.key).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
