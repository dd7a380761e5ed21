//! The Kubernetes API as the datastore of a lab: a real API server on its etcd, the controller manager, the scheduler.

use std::sync::Arc;

use tortie_servers::programs::Program;
use tortie_servers::{KubeApi, KubeOptions};
use tortie_store::kubernetes::{Kubernetes as Store, KubernetesConfig};

use crate::{LabDir, LabError, underlay};

/// The port of the API server.
const PORT: u16 = 6443;

/// The servers. They end when it is dropped.
pub(crate) struct Kubernetes {
    api: Arc<KubeApi>,
}

impl Kubernetes {
    /// Starts the servers, and creates the CustomResourceDefinitions.
    pub(super) async fn start(dir: &LabDir) -> Result<(Store, Self), LabError> {
        let options = KubeOptions {
            controllers: true,
            scheduler: true,
            listen: Some((underlay::LAB, PORT)),
            ..KubeOptions::default()
        };
        let links = [(dir.kubeconfig(), None), (dir.binary("kube"), Some(Program::Kube.find()?))];
        let start = move || {
            let api = KubeApi::start(&options)?;
            api.create_definitions()?;
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

    /// Applies a manifest as the administrator.
    pub(crate) async fn apply(&self, manifest: &str) -> Result<String, LabError> {
        let (api, manifest) = (Arc::clone(&self.api), manifest.to_owned());
        let applied = tokio::task::spawn_blocking(move || api.apply(&manifest)).await;
        Ok(applied.map_err(|error| LabError::problem("kubectl apply", error.to_string()))??)
    }
}
