//! What agents publish for other nodes: the WorkloadEndpoints of their pods, and annotations of their Nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Position};

use crate::{Secrets, Store, StoreError, Stored, Write};

/// A datastore to which agents can publish the endpoints of their pods. By default, an endpoint is a stored object.
#[async_trait]
pub trait Endpoints: Store {
    /// The URL of the Kubernetes API server, if this is one.
    fn api_server(&self) -> Option<&str> {
        None
    }

    /// Publishes an endpoint: from here on every node knows the pod. Replaces an endpoint of the same name. The annotation
    /// [`POD_UID`](crate::POD_UID) names the pod: another one of the same name gets no endpoint. Whoever reaches the
    /// returned position knows all endpoints that were published before this call.
    async fn publish(&self, endpoint: &WorkloadEndpoint) -> Result<Position, StoreError> {
        let (key, value) = stored_object(endpoint)?;
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

    /// The write by which an endpoint without predecessor is published as by [`publish`](Self::publish), so that it can be
    /// executed together with other writes. It is rejected if there is a predecessor. `None` if an endpoint is more than
    /// one object.
    fn publication(&self, endpoint: &WorkloadEndpoint) -> Option<Write> {
        let (key, value) = stored_object(endpoint).ok()?;
        Some(Write::Create(key, value))
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

    /// Replaces the status of a Service that was read, if it has not changed since.
    async fn set_service_status(&self, service: &Stored, status: Value) -> Result<(), StoreError> {
        let mut value = service.value.clone();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("status".to_owned(), status);
        }
        self.update(&service.key, value, &service.version).await.map(drop)
    }

    /// Removes this version of an endpoint.
    async fn remove(&self, endpoint: &Stored) -> Result<(), StoreError> {
        self.delete(&endpoint.key, Some(&endpoint.version)).await.map(drop)
    }

    /// Creates an object unless it exists. Several agents may do this at once.
    async fn provide(&self, key: &Key, value: Value) -> Result<(), StoreError> {
        match self.create(key, value).await {
            Ok(_) | Err(StoreError::AlreadyExists(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Changes annotations of a Node: `None` removes one.
    async fn annotate_node(
        &self,
        node: &str,
        annotations: &BTreeMap<&str, Option<String>>,
    ) -> Result<(), StoreError> {
        let key = Key::global(Kind::Node, node);
        loop {
            let stored = self.get(&key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
            let mut value = stored.value.clone();
            annotate(&mut value, annotations)
                .map_err(|problem| StoreError::Invalid { key: key.clone(), problem })?;
            if value == stored.value {
                return Ok(());
            }
            match self.update(&key, value, &stored.version).await {
                Err(StoreError::Conflict(_)) => {}
                written => return written.map(drop),
            }
        }
    }

    /// Whether endpoints are derived from Pods, and profiles from Namespaces and ServiceAccounts. Otherwise somebody must
    /// copy the pods' labels, and there may be other profiles.
    fn derives_from_kubernetes(&self) -> bool {
        false
    }

    /// The Secrets of the agent's namespace, if it can read some.
    fn secrets(&self) -> Option<Arc<dyn Secrets>> {
        None
    }
}

/// An endpoint as a stored object.
fn stored_object(endpoint: &WorkloadEndpoint) -> Result<(Key, Value), StoreError> {
    let WorkloadEndpoint { metadata, .. } = endpoint;
    let key = Key::namespaced(Kind::WorkloadEndpoint, &metadata.namespace, &metadata.name);
    match serde_json::to_value(endpoint) {
        Ok(value) => Ok((key, value)),
        Err(error) => Err(StoreError::Invalid { key, problem: format!("it cannot be written: {error}") }),
    }
}

fn annotate(node: &mut Value, annotations: &BTreeMap<&str, Option<String>>) -> Result<(), String> {
    let metadata = node.get_mut("metadata").and_then(Value::as_object_mut);
    let all = metadata.ok_or("it has no metadata")?.entry("annotations").or_insert(Value::Null);
    if all.is_null() {
        *all = json!({});
    }
    let all = all.as_object_mut().ok_or("its annotations are no mapping")?;
    for (name, value) in annotations {
        match value {
            Some(value) => drop(all.insert((*name).to_owned(), json!(value))),
            None => drop(all.remove(*name)),
        }
    }
    Ok(())
}
