//! The part of a kubelet that the Kubernetes API sees: it registers nodes, keeps their leases, writes the status of pods,
//! and ends their deletion.

use std::path::Path;
use std::time::Duration;

use http::{Method, Request, header};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tortie_api::Key;

use crate::LabError;
use crate::pod_status::{PodStatus, condition, timestamp};

/// The version that nodes report: that of the API server.
const VERSION: &str = "v1.36.1";
/// How often a lease is renewed. The controller manager regards a node as lost after 40 s.
const RENEWAL: Duration = Duration::from_secs(10);
/// The time for which a request of a pod is repeated while the API server is too busy for it.
const PATIENCE: Duration = Duration::from_secs(120);
/// The delay before it is repeated.
const REPEAT_DELAY: Duration = Duration::from_millis(500);
/// The namespace of the leases of nodes.
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

/// A client of the API server.
#[derive(Clone)]
pub(crate) struct Kubelet {
    client: kube::Client,
}

impl Kubelet {
    pub(crate) async fn new(kubeconfig: &Path) -> Result<Self, LabError> {
        let problem =
            |error: kube::config::KubeconfigError| LabError::problem(kubeconfig.display(), error.to_string());
        let file = Kubeconfig::read_from(kubeconfig).map_err(problem)?;
        let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
        let client = kube::Client::try_from(config.map_err(problem)?);
        Ok(Self {
            client: client.map_err(|error| LabError::problem("the Kubernetes API", error.to_string()))?,
        })
    }

    /// Registers a node, or completes its registration: it is ready and has room for pods.
    pub(crate) async fn register(&self, node: &Value, os: &str, address: &str) -> Result<(), LabError> {
        match self.call(Method::POST, "/api/v1/nodes", Some(node)).await {
            Ok(_) | Err(ApiError::Status(409, _)) => {}
            Err(error) => return Err(error.of("nodes")),
        }
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let room = json!({"cpu": "64", "memory": "256Gi", "pods": "250", "ephemeral-storage": "1Ti"});
        let status = json!({"status": {
            "capacity": room, "allocatable": room,
            "addresses": [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": name}],
            "conditions": [condition("Ready", "KubeletReady")],
            "nodeInfo": {
                "architecture": "amd64", "operatingSystem": os, "kubeletVersion": VERSION, "kubeProxyVersion": VERSION,
                "osImage": "tortie lab", "kernelVersion": "", "containerRuntimeVersion": "tortie-lab://1",
                "machineID": "", "systemUUID": "", "bootID": "",
            },
        }});
        let path = format!("/api/v1/nodes/{name}/status");
        self.call(Method::PATCH, &path, Some(&status)).await.map_err(|error| error.of(name))?;
        self.renew(name).await
    }

    /// Renews the leases of nodes until the task is aborted.
    pub(crate) fn keep_leases(&self, nodes: Vec<String>) -> JoinHandle<()> {
        let kubelet = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(RENEWAL).await;
                for node in &nodes {
                    if let Err(error) = kubelet.renew(node).await {
                        tracing::error!(node, %error, "cannot renew the node's lease; the lab retries");
                    }
                }
            }
        })
    }

    async fn renew(&self, node: &str) -> Result<(), LabError> {
        let now = timestamp();
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now.replace('Z', ".000000Z")},
        });
        let spec = json!({"spec": lease["spec"]});
        let path = format!("{LEASES}/{node}");
        let written = match self.call(Method::PATCH, &path, Some(&spec)).await {
            Err(ApiError::Status(404, _)) => self.call(Method::POST, LEASES, Some(&lease)).await,
            result => result,
        };
        written.map(drop).map_err(|error| error.of(node))
    }

    /// Writes a pod's status, unless the pod is gone or another one has its name.
    pub(crate) async fn set_status(&self, key: &Key, uid: &str, status: &PodStatus, containers: &[Value]) {
        let value = status.in_api(containers);
        let patch = json!({"metadata": {"uid": uid}, "status": value});
        match self.insist(Method::PATCH, &format!("{}/status", pod_path(key)), &patch).await {
            Ok(_) | Err(ApiError::Status(404 | 409, _)) => {}
            Err(error) => {
                tracing::error!(pod = %key, error = %error.of(key), "cannot write the pod's status")
            }
        }
    }

    /// Removes a pod that has ended from the API.
    pub(crate) async fn end_deletion(&self, key: &Key, uid: &str) {
        let options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": {"uid": uid},
        });
        match self.insist(Method::DELETE, &pod_path(key), &options).await {
            Ok(_) | Err(ApiError::Status(404 | 409, _)) => {}
            Err(error) => {
                tracing::error!(pod = %key, error = %error.of(key), "cannot end the pod's deletion")
            }
        }
    }

    /// Sends a request, and repeats it while the API server is too busy for it or out of reach: nobody else would end the deletion of a
    /// pod, or write its status.
    async fn insist(&self, method: Method, path: &str, body: &Value) -> Result<Value, ApiError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.call(method.clone(), path, Some(body)).await {
                Err(ApiError::Status(429 | 500.., _) | ApiError::Other(_)) if Instant::now() < deadline => {
                    tokio::time::sleep(REPEAT_DELAY).await;
                }
                result => return result,
            }
        }
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, ApiError> {
        let content = match method {
            Method::PATCH => "application/merge-patch+json",
            _ => "application/json",
        };
        let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, content);
        let body = body.map(Value::to_string).unwrap_or_default().into_bytes();
        let request = request.body(body).map_err(|error| ApiError::Other(error.to_string()))?;
        self.client.request::<Value>(request).await.map_err(|error| match error {
            kube::Error::Api(status) => ApiError::Status(status.code, status.message),
            error => ApiError::Other(error.to_string()),
        })
    }
}

/// Why a request failed.
enum ApiError {
    /// The code of the answer, and its message.
    Status(u16, String),
    /// There was no answer.
    Other(String),
}

impl ApiError {
    fn of(self, object: impl ToString) -> LabError {
        let (Self::Status(_, problem) | Self::Other(problem)) = self;
        LabError::problem(object, format!("the Kubernetes API: {problem}"))
    }
}

fn pod_path(key: &Key) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", key.namespace, key.name)
}
