//! The datastore of a lab: the embedded one in the lab's own process, etcd, or the Kubernetes API.

pub(crate) mod etcd;
mod kubernetes;

use std::sync::Arc;

use tortie_store::rpc::Remote;
use tortie_store::{Embedded, Source};

pub(crate) use kubernetes::Kubernetes;

use crate::pki::Authority;
use crate::process::Process;
use crate::{LabDir, LabError};

/// A kind of datastore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Datastore {
    /// A file of the lab's own process, served by gRPC.
    #[default]
    Embedded,
    /// etcd, from Debian's package `etcd-server`, with TLS.
    Etcd,
    /// A real API server with its controllers and scheduler, from the binary of `cargo xtask kube build`.
    Kubernetes,
}

impl Datastore {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Etcd => "etcd",
            Self::Kubernetes => "kubernetes",
        }
    }
}

/// The processes of a datastore; they end when it is dropped.
pub(crate) enum Servers {
    /// The datastore is in the lab's process.
    None,
    Etcd(Box<Process>),
    Kubernetes(Arc<Kubernetes>),
}

/// A client for the datastore of a running lab, for a process outside of the lab's network.
#[must_use]
pub fn client(dir: &LabDir) -> Remote {
    let remote = Remote::unix(&dir.store_socket());
    match dir.etcd().exists() || dir.kubeconfig().exists() {
        true => remote.with_watches_by_kind(),
        false => remote,
    }
}

/// Opens or starts the datastore of these nodes.
pub(crate) async fn open(
    datastore: Datastore,
    dir: &LabDir,
    authority: &Authority,
    nodes: &[String],
) -> Result<(Arc<dyn Source>, Servers), LabError> {
    match datastore {
        Datastore::Embedded => {
            let file = dir.store_file();
            if !file.exists() {
                Embedded::init(&file, None)?;
            }
            Ok((Arc::new(Embedded::open(&file)?), Servers::None))
        }
        Datastore::Etcd => {
            let (etcd, process) = etcd::start(dir, authority).await?;
            Ok((Arc::new(etcd), Servers::Etcd(Box::new(process))))
        }
        Datastore::Kubernetes => {
            let (store, servers) = Kubernetes::start(dir, nodes).await?;
            Ok((Arc::new(store), Servers::Kubernetes(Arc::new(servers))))
        }
    }
}
