//! `tortie store`: the embedded datastore for machines without Kubernetes and etcd.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use tortie_store::Embedded;
use tortie_store::rpc::{Limits, ServerIdentity, TlsFiles, serve_tls, serve_unix};

use crate::store_files::{Backup, CheckFile, DataFile, Identity, Init, Repair, Restore, make_folder};

/// How long the service waits at its end for those who still use the file.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// Make an embedded datastore in a new file, once
    Init(Init),
    /// Serve the embedded datastore, until the process is ended
    Serve(Serve),
    /// Show or replace the identity of an embedded datastore that no process serves
    Identity(Identity),
    /// Look for damage in the file of an embedded datastore that no process serves
    Check(CheckFile),
    /// Copy an embedded datastore, which may be served meanwhile, to a new file
    Backup(Backup),
    /// Copy a backup to a new file with the data
    Restore(Restore),
    /// Save what can be read of a damaged file in a new one
    Repair(Repair),
}

#[derive(clap::Args)]
pub(crate) struct Serve {
    #[command(flatten)]
    file: DataFile,
    /// The maximum size of all objects in MiB; nodes may fill 80 % of it, controllers 90 %
    #[arg(long, value_name = "MIB", default_value_t = 2048, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    quota: u64,
    /// The socket for operators on this machine
    #[arg(long, value_name = "PATH", default_value = "/run/tortie/store.sock")]
    socket: PathBuf,
    /// Where to serve other machines, such as 0.0.0.0:6666; they need certificates (tortie certs)
    #[arg(long, value_name = "ADDRESS", requires_all = ["tls_authority", "tls_certificate", "tls_key"])]
    listen: Option<SocketAddr>,
    /// The certificate of the authority that both sides trust (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_authority: Option<PathBuf>,
    /// The certificate of the service (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_certificate: Option<PathBuf>,
    /// The key of the service's certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_key: Option<PathBuf>,
    /// The authority's list of revoked certificates (PEM, tortie certs revoke); it is read again while the service runs
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_revoked: Option<PathBuf>,
}

impl StoreCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Init(init) => init.run(),
            Self::Serve(serve) => serve.run(),
            Self::Identity(identity) => identity.run(),
            Self::Check(check) => check.run(),
            Self::Backup(backup) => backup.run(),
            Self::Restore(restore) => restore.run(),
            Self::Repair(repair) => repair.run(),
        }
    }
}

impl Serve {
    fn run(self) -> anyhow::Result<ExitCode> {
        crate::log("info");
        make_folder(&self.socket)?;
        let store = Embedded::open_with_quota(&self.file.data, self.quota << 20)?;
        let closing = store.closing();
        crate::runtime()?.block_on(self.serve(Arc::new(store)))?;
        if !closing.wait(CLOSE_TIMEOUT) {
            tracing::warn!("the file is still in use; its next start repairs it");
        }
        Ok(ExitCode::SUCCESS)
    }

    async fn serve(self, store: Arc<Embedded>) -> anyhow::Result<()> {
        let on_socket = async {
            tracing::info!(socket = %self.socket.display(), data = %self.file.data.display(), "serving operators of this machine");
            serve_unix(store.clone(), &self.socket).await
        };
        let on_network = async {
            match (self.listen, self.tls_authority, self.tls_certificate, self.tls_key) {
                (Some(address), Some(authority), Some(certificate), Some(key)) => {
                    let files = TlsFiles { authority, certificate, key };
                    tracing::info!(%address, "serving machines with certificates of the authority");
                    let identity = ServerIdentity::from(files).with_revoked(self.tls_revoked);
                    serve_tls(store.clone(), address, identity, Limits::default()).await
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = on_socket => ended?,
            ended = on_network => ended?,
            ended = crate::end_of_process() => ended?,
            // Without it, all writes would be refused for ever.
            error = store.writer_ended() => return Err(error.into()),
        }
        // Nobody else removes it, and a client would wait for an answer.
        let _ = std::fs::remove_file(&self.socket);
        tracing::info!("stopping; nodes keep what is in force");
        Ok(())
    }
}
