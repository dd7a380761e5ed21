//! Publishes an endpoint as Calico's CNI plugin does (`libcalico-go/lib/backend/k8s/resources/workloadendpoint.go`): by
//! annotations of the Pod.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use http::Method;
use http::header::{CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Position};

use super::client::request;
use super::endpoints::{CONTAINER_ID, INTERFACE, POD_IP, POD_IPS};
use super::{Kubernetes, apply_request, of_object, values};
use crate::{Endpoints, POD_UID, Secrets, Store, StoreError, Stored, Write, pod_of};

pub(super) const MERGE_PATCH: HeaderValue = HeaderValue::from_static("application/merge-patch+json");

#[async_trait]
impl Endpoints for Kubernetes {
    fn api_server(&self) -> Option<&str> {
        Some(self.server())
    }

    /// An endpoint is annotations of its Pod, which are merged into it.
    fn publication(&self, _: &WorkloadEndpoint) -> Option<Write> {
        None
    }

    async fn publish(&self, endpoint: &WorkloadEndpoint) -> Result<Position, StoreError> {
        let WorkloadEndpoint { metadata, spec, .. } = endpoint;
        let invalid = |problem: String| {
            let key = Key::namespaced(Kind::WorkloadEndpoint, &metadata.namespace, &metadata.name);
            StoreError::Invalid { key, problem }
        };
        if spec.endpoint != INTERFACE {
            let interface = &spec.endpoint;
            return Err(invalid(format!(
                "in the Kubernetes API, only {INTERFACE} of a pod has an endpoint; name the interface so, instead of {interface}"
            )));
        }
        let uid = metadata.annotations.get(POD_UID);
        let uid = uid.ok_or_else(|| invalid(format!("it has no annotation {POD_UID}")))?;
        let addresses: Vec<String> = spec.ip_networks.iter().map(ToString::to_string).collect();
        let annotations = json!({
            POD_IP: addresses.first(),
            POD_IPS: addresses.join(","),
            CONTAINER_ID: spec.container_id,
        });
        let pod = Key::namespaced(Kind::Pod, &metadata.namespace, &spec.pod);
        let before = self.get(&pod).await?.ok_or_else(|| StoreError::NotFound(pod.clone()))?;
        let metadata = json!({"uid": uid, "annotations": annotations});
        let position = self.patch_status(&pod, &json!({"metadata": metadata})).await?;
        if position > before.position {
            return Ok(position);
        }
        // Nothing has changed, so the position is an old one.
        Ok(self.newest(Kind::WorkloadEndpoint).await?.map_or(position, |newest| newest.max(position)))
    }

    /// Server-side apply names the object, so that a role can allow one name. A plain creation has no name for RBAC.
    async fn provide(&self, key: &Key, value: Value) -> Result<(), StoreError> {
        let (group, path) = self.object_path(key).await?;
        let value = values::encode(group, key, value, None)?;
        let path = format!("{path}?fieldManager=tortie");
        self.call(&of_object("create", key, group), apply_request(&path, &value)).await.map(drop)
    }

    /// The annotations of addresses become empty, and that of the container stays.
    async fn remove(&self, endpoint: &Stored) -> Result<(), StoreError> {
        let metadata = json!({
            "uid": endpoint.value["metadata"]["uid"],
            "resourceVersion": endpoint.version.as_str(),
            "annotations": {POD_IP: "", POD_IPS: ""},
        });
        self.patch_status(&pod_of(endpoint), &json!({"metadata": metadata})).await.map(drop)
    }

    async fn set_service_status(&self, service: &Stored, status: Value) -> Result<(), StoreError> {
        let metadata = json!({"resourceVersion": service.version.as_str()});
        let patch = json!({"metadata": metadata, "status": status});
        self.patch_status(&service.key, &patch).await.map(drop)
    }

    async fn annotate_node(
        &self,
        node: &str,
        annotations: &BTreeMap<&str, Option<String>>,
    ) -> Result<(), StoreError> {
        let patch = json!({"metadata": {"annotations": annotations}});
        self.patch_status(&Key::global(Kind::Node, node), &patch).await.map(drop)
    }

    fn derives_from_kubernetes(&self) -> bool {
        true
    }

    fn secrets(&self) -> Option<Arc<dyn Secrets>> {
        Some(Arc::new(self.clone()))
    }
}

impl Kubernetes {
    /// Changes an object by its status, also the metadata of a Pod or Node, as Calico does: nodes need no permission to
    /// change what a pod runs, or the taints of a node.
    async fn patch_status(&self, key: &Key, patch: &Value) -> Result<Position, StoreError> {
        let (group, path) = self.object_path(key).await?;
        let body = patch.to_string().into_bytes();
        let mut request = request(Method::PATCH, &format!("{path}/status"), body);
        request.headers_mut().insert(CONTENT_TYPE, MERGE_PATCH);
        let patched = self.call(&of_object("patch", key, group), request).await?;
        values::position(patched.get("metadata"))
    }
}
