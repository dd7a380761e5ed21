//! The subresource `eviction` of pods.

use async_trait::async_trait;
use http::Method;
use serde_json::json;
use tortie_api::Key;

use super::client::{Kubernetes, request};
use super::objects::ObjectError;
use super::resources;
use crate::StoreError;
use crate::evictions::{Eviction, Evictions};

#[async_trait]
impl Evictions for Kubernetes {
    async fn evict(&self, pod: &Key, uid: &str) -> Result<Eviction, StoreError> {
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}/eviction",
            resources::escape(&pod.namespace),
            resources::escape(&pod.name)
        );
        let body = json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        });
        let sent = self.send_once(request(Method::POST, &path, body.to_string().into_bytes())).await;
        answer(pod, sent.map(drop))
    }
}

/// What the answer of the API server means (`pkg/registry/core/pod/storage/eviction.go` of Kubernetes): 429 is a budget without
/// room, and 500 several budgets of one pod, which the API does not support.
fn answer(pod: &Key, sent: Result<(), ObjectError>) -> Result<Eviction, StoreError> {
    match sent {
        Ok(()) | Err(ObjectError::NotFound { .. } | ObjectError::Rejected { code: 409, .. }) => {
            Ok(Eviction::Begun)
        }
        Err(ObjectError::Rejected { code: 429 | 500, message }) => Ok(Eviction::Refused(message)),
        Err(ObjectError::Rejected { code: 401 | 403, message }) => Err(StoreError::Forbidden(format!(
            "{message}; whoever moves pods needs the verb create for pods/eviction"
        ))),
        Err(ObjectError::Rejected { message, .. }) => {
            Err(StoreError::Invalid { key: pod.clone(), problem: message })
        }
        Err(ObjectError::Unavailable(problem)) => Err(StoreError::Unavailable(problem)),
    }
}
