//! The Kubernetes API as the datastore of a lab: a real API server on its etcd, the controller manager, the scheduler.

use std::path::PathBuf;
use std::sync::Arc;

use tortie_servers::programs::Program;
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{Kubernetes as Store, KubernetesConfig};

use crate::{LabDir, LabError, underlay};

/// The port of the API server.
const PORT: u16 = 6443;

/// The permissions of agents, as in any cluster.
const ROLES: &str = include_str!("../../../../deploy/rbac.yaml");
/// Gives the agents of the lab these permissions. They are no pods, so they have no service account.
const BINDING: &str = "apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: tortie-lab-nodes}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: tortie-node}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: tortie:nodes}]
";
/// The group of the agents' users.
const AGENTS: &str = "tortie:nodes";

/// The servers. They end when it is dropped.
pub(crate) struct Kubernetes {
    api: Arc<KubeApi>,
}

impl Kubernetes {
    /// Starts the servers, and creates the CustomResourceDefinitions and the permissions of agents. Each of these nodes has
    /// a user.
    pub(super) async fn start(dir: &LabDir, nodes: &[String]) -> Result<(Store, Self), LabError> {
        let options = KubeOptions {
            controllers: true,
            scheduler: true,
            listen: Some((underlay::LAB, PORT)),
            users: nodes.iter().map(|node| (node.clone(), vec![AGENTS.to_owned()])).collect(),
            definitions: true,
            ..KubeOptions::default()
        };
        let links = [(dir.kubeconfig(), None), (dir.binary("kube"), Some(Program::Kube.find()?))];
        let start = move || {
            let api = KubeApi::start(&options)?;
            api.apply(&format!("{ROLES}---\n{BINDING}"))?;
            Ok::<_, LabError>(api)
        };
        let started = tokio::task::spawn_blocking(start).await;
        let api = started.map_err(|error| LabError::problem("the Kubernetes API", error.to_string()))??;
        for (link, target) in links {
            let target = target.unwrap_or_else(|| api.kubeconfig());
            std::os::unix::fs::symlink(target, &link).map_err(LabError::file("linking", &link))?;
        }
        let store = Store::new(&KubernetesConfig::Kubeconfig(api.kubeconfig())).await?;
        Ok((store, Self { api: Arc::new(api) }))
    }

    /// The kubeconfig of a node's agent.
    pub(crate) fn kubeconfig_of(&self, node: &str) -> PathBuf {
        self.api.kubeconfig_of(node)
    }

    /// Applies a manifest as the administrator.
    pub(crate) async fn apply(&self, manifest: &str) -> Result<String, LabError> {
        let (api, manifest) = (Arc::clone(&self.api), manifest.to_owned());
        let applied = tokio::task::spawn_blocking(move || api.apply(&manifest)).await;
        Ok(applied.map_err(|error| LabError::problem("kubectl apply", error.to_string()))??)
    }
}
