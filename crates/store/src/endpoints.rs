//! The WorkloadEndpoints of pods, as agents write them.

use async_trait::async_trait;
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Position};

use crate::{Store, StoreError, Stored};

/// A datastore to which agents can publish the endpoints of their pods. By default, an endpoint is a stored object.
#[async_trait]
pub trait Endpoints: Store {
    /// Publishes an endpoint: from here on every node knows the pod. Replaces an endpoint of the same name. The annotation
    /// [`POD_UID`](crate::POD_UID) names the pod: another one of the same name gets no endpoint.
    async fn publish(&self, endpoint: &WorkloadEndpoint) -> Result<Position, StoreError> {
        let WorkloadEndpoint { metadata, .. } = endpoint;
        let key = Key::namespaced(Kind::WorkloadEndpoint, &metadata.namespace, &metadata.name);
        let value = serde_json::to_value(endpoint).map_err(|error| {
            let problem = format!("it cannot be written: {error}");
            StoreError::Invalid { key: key.clone(), problem }
        })?;
        loop {
            let written = match self.create(&key, value.clone()).await {
                Err(StoreError::AlreadyExists(_)) => match self.get(&key).await? {
                    Some(before) => self.update(&key, value.clone(), &before.version).await,
                    None => continue,
                },
                written => written,
            };
            match written {
                Ok(stored) => return Ok(stored.position),
                Err(StoreError::Conflict(_) | StoreError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Withdraws an endpoint that was read, unless it belongs to another container, because the pod has been recreated.
    async fn withdraw(&self, mut read: Option<Stored>, container_id: &str) -> Result<(), StoreError> {
        while let Some(endpoint) = read {
            if endpoint.value["spec"]["containerID"] != container_id {
                return Ok(());
            }
            match self.remove(&endpoint).await {
                Ok(()) | Err(StoreError::NotFound(_)) => return Ok(()),
                Err(StoreError::Conflict(_)) => read = self.get(&endpoint.key).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes this version of an endpoint.
    async fn remove(&self, endpoint: &Stored) -> Result<(), StoreError> {
        self.delete(&endpoint.key, Some(&endpoint.version)).await.map(drop)
    }

    /// Whether endpoints are derived from Pods, and profiles from Namespaces and ServiceAccounts. Otherwise somebody must
    /// copy the pods' labels, and there may be other profiles.
    fn derives_from_kubernetes(&self) -> bool {
        false
    }
}
