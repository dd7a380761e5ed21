//! `tortie controllers`: what runs once in a cluster.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tortie_controllers::Config;
use tortie_store::Endpoints;
use tortie_store::backoff::random_seed;
use tortie_store::kubernetes::{Kubernetes, KubernetesConfig};

use crate::store::StoreArguments;

/// Copies objects to etcd, cleans up after vanished nodes, and creates automatic host endpoints. Several may run: a Lease
/// decides which one works.
#[derive(clap::Args)]
pub(crate) struct Controllers {
    #[command(flatten)]
    store: StoreArguments,
    /// With --store etcd: copy namespaces, service accounts, nodes, policies, pods and Services from this Kubernetes API;
    /// without a file, from the one that kubectl would use, or that this pod runs in
    #[arg(long, value_name = "KUBECONFIG")]
    kubernetes: Option<Option<PathBuf>>,
    /// How many seconds a Node must be missing before its addresses, blocks, report and automatic host endpoint are removed
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = clap::value_parser!(u64).range(1..))]
    node_grace: u64,
    /// Do also the work of Calico's kube-controllers while these are ready. Without it, what both do is left to them
    #[arg(long)]
    ignore_calico_controllers: bool,
    /// The namespace of the Lease tortie-controllers
    #[arg(long, value_name = "NAMESPACE", default_value = "tortie-system")]
    namespace: String,
}

impl Controllers {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("info");
        crate::runtime()?.block_on(async {
            if self.kubernetes.is_some() && !self.store.is_etcd() {
                bail!(
                    "--kubernetes copies objects to etcd, and has no effect with another --store; remove it"
                );
            }
            let kubernetes: Option<Arc<dyn Endpoints>> = match &self.kubernetes {
                None => None,
                Some(file) => Some(Arc::new(Kubernetes::new(&config(file.as_deref())).await?)),
            };
            let host =
                std::fs::read_to_string("/proc/sys/kernel/hostname").context("the name of this machine")?;
            let config = Config {
                store: self.store.open_named().await?,
                kubernetes,
                identity: format!("{}_{:016x}", host.trim(), random_seed()),
                namespace: self.namespace,
                node_grace: Duration::from_secs(self.node_grace),
                heeds_calico: !self.ignore_calico_controllers,
            };
            tokio::select! {
                () = tortie_controllers::run(config) => {}
                ended = crate::signals::end() => {
                    ended?;
                    tracing::info!("stopping");
                }
            }
            Ok(ExitCode::SUCCESS)
        })
    }
}

fn config(file: Option<&Path>) -> KubernetesConfig {
    file.map_or(KubernetesConfig::Inferred, |file| KubernetesConfig::Kubeconfig(file.to_owned()))
}
