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

    async fn expect_permission(&self) -> Result<(), StoreError> {
        let attributes =
            json!({"verb": "create", "group": "", "resource": "pods", "subresource": "eviction"});
        let body = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        });
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        match self.send_once(request(Method::POST, path, body.to_string().into_bytes())).await {
            Ok(review) if review["status"]["allowed"] == false => {
                Err(StoreError::Forbidden(format!("pods of all namespaces cannot be evicted; {REMEDY}")))
            }
            Err(ObjectError::Unavailable(problem)) => Err(StoreError::Unavailable(problem)),
            // Whoever must not ask finds out by the first eviction.
            Ok(_) | Err(ObjectError::NotFound { .. } | ObjectError::Rejected { .. }) => Ok(()),
        }
    }
}

/// What the refusal of RBAC and other authorizers says (`staging/src/k8s.io/apiserver/pkg/endpoints/handlers/responsewriters/errors.go`
/// of Kubernetes). A 403 without it is that of an admission webhook, for one pod.
const UNAUTHORIZED: &str = r#"cannot create resource "pods/eviction""#;
const REMEDY: &str = "whoever moves pods needs the verb create for pods/eviction";

/// What the answer of the API server means (`pkg/registry/core/pod/storage/eviction.go` of Kubernetes): 429 is a budget without
/// room, and 500 several budgets of one pod, which the API does not support. Other codes from 400 on concern this pod.
fn answer(pod: &Key, sent: Result<(), ObjectError>) -> Result<Eviction, StoreError> {
    match sent {
        Ok(()) | Err(ObjectError::NotFound { .. } | ObjectError::Rejected { code: 409, .. }) => {
            Ok(Eviction::Begun)
        }
        Err(ObjectError::Rejected { code, message })
            if code == 401 || (code == 403 && message.contains(UNAUTHORIZED)) =>
        {
            Err(StoreError::Forbidden(format!("{message}; {REMEDY}")))
        }
        Err(ObjectError::Rejected { code: 400..=500, message }) => Ok(Eviction::Refused(message)),
        Err(ObjectError::Rejected { message, .. }) => {
            Err(StoreError::Invalid { key: pod.clone(), problem: message })
        }
        Err(ObjectError::Unavailable(problem)) => Err(StoreError::Unavailable(problem)),
    }
}

#[cfg(test)]
mod tests {
    use tortie_api::Kind;

    use super::*;

    #[test]
    fn an_answer_for_one_pod_does_not_stop_the_others() {
        let pod = Key::namespaced(Kind::Pod, "n", "p");
        let answer = |code, message: &str| {
            answer(&pod, Err(ObjectError::Rejected { code, message: message.to_owned() }))
        };
        let rbac = r#"pods "p" is forbidden: User "u" cannot create resource "pods/eviction" in API group "" in the namespace "n""#;
        for (code, message) in [(403, rbac), (401, "Unauthorized")] {
            assert!(matches!(answer(code, message), Err(StoreError::Forbidden(_))), "{code}");
        }
        let webhook = r#"admission webhook "w" denied the request: not now"#;
        for (code, message) in
            [(403, webhook), (400, "bad"), (422, "invalid"), (429, "budget"), (500, "budgets")]
        {
            assert_eq!(answer(code, message).unwrap(), Eviction::Refused(message.to_owned()), "{code}");
        }
        assert_eq!(answer(409, "another uid").unwrap(), Eviction::Begun);
        assert!(answer(503, "later").is_err());
    }
}
