//! The subresource `eviction` of pods.

use async_trait::async_trait;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http::Method;
use serde_json::{Value, json};
use tortie_api::Key;

use super::client::{Kubernetes, request};
use super::group::CalicoGroup;
use super::objects::ObjectError;
use super::resources;
use crate::StoreError;
use crate::evictions::{Eviction, Evictions, Permission};

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

    async fn missing_permissions(&self, needed: &[Permission]) -> Result<Vec<Permission>, StoreError> {
        let questions: Vec<_> = needed.iter().map(|needed| self.may(*needed)).collect();
        let answers: Vec<bool> = stream::iter(questions).buffered(REVIEWS_AT_ONCE).try_collect().await?;
        let missing = needed.iter().zip(answers).filter(|(_, may)| !may);
        Ok(missing.map(|(permission, _)| *permission).collect())
    }
}

/// How many questions about permissions are asked at a time.
const REVIEWS_AT_ONCE: usize = 8;

impl Kubernetes {
    /// Whether the caller has a permission.
    async fn may(&self, permission: Permission) -> Result<bool, StoreError> {
        let group = self.group_of(permission.kind).await?;
        let review = review(group, &permission).ok_or(StoreError::KindAbsent(permission.kind))?;
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        match self.send_once(request(Method::POST, path, review.to_string().into_bytes())).await {
            Ok(review) => Ok(review["status"]["allowed"] != false),
            Err(ObjectError::Unavailable(problem)) => Err(StoreError::Unavailable(problem)),
            // Whoever must not ask finds out by the first attempt.
            Err(ObjectError::NotFound { .. } | ObjectError::Rejected { .. }) => Ok(true),
        }
    }
}

/// The question whether the caller has a permission; `None` for kinds that the API does not have.
fn review(group: CalicoGroup, permission: &Permission) -> Option<Value> {
    let Permission { kind, subresource, verb } = permission;
    let (api_group, _) = resources::api_version(group, *kind)?.split_once('/').unwrap_or_default();
    let mut attributes =
        json!({"verb": verb, "group": api_group, "resource": resources::plural(group, *kind)});
    if let Some(subresource) = subresource {
        attributes["subresource"] = json!(subresource);
    }
    Some(json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }))
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
    fn a_question_about_a_permission_names_group_and_resource() {
        let asked = |group, kind, subresource, verb| {
            let review = review(group, &Permission { kind, subresource, verb }).unwrap();
            review["spec"]["resourceAttributes"].clone()
        };
        let (crd, native) = (CalicoGroup::Crd, CalicoGroup::Native);
        for (found, expected) in [
            (
                asked(crd, Kind::Pod, Some("eviction"), "create"),
                json!({"verb": "create", "group": "", "resource": "pods", "subresource": "eviction"}),
            ),
            (
                asked(native, Kind::Node, None, "update"),
                json!({"verb": "update", "group": "", "resource": "nodes"}),
            ),
            (
                asked(crd, Kind::IpamBlock, None, "delete"),
                json!({"verb": "delete", "group": "crd.projectcalico.org", "resource": "ipamblocks"}),
            ),
            (
                asked(crd, Kind::IpamConfig, None, "get"),
                json!({"verb": "get", "group": "crd.projectcalico.org", "resource": "ipamconfigs"}),
            ),
            (
                asked(native, Kind::IpamConfig, None, "get"),
                json!({"verb": "get", "group": "projectcalico.org", "resource": "ipamconfigurations"}),
            ),
        ] {
            assert_eq!(found, expected);
        }
        assert!(review(crd, &Permission { kind: Kind::Profile, subresource: None, verb: "get" }).is_none());
    }

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
