//! The datastore of a command.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use tortie_store::Store;
use tortie_store::rpc::{Remote, TlsIdentity};

/// The datastore.
#[derive(clap::Args)]
pub(crate) struct StoreArguments {
    /// The datastore: unix:PATH, or tls:HOST:PORT with the three files below. By default the lab that runs on this
    /// machine
    #[arg(long, env = "TORTIE_STORE", value_name = "ADDRESS")]
    store: Option<String>,
    /// The certificate of the authority that both sides trust (PEM)
    #[arg(long, value_name = "FILE")]
    tls_authority: Option<PathBuf>,
    /// This side's certificate (PEM)
    #[arg(long, value_name = "FILE")]
    tls_certificate: Option<PathBuf>,
    /// The key of this side's certificate (PEM)
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
}

impl StoreArguments {
    /// Whether it belongs to the lab on this machine.
    pub(crate) fn is_of_lab(&self) -> bool {
        cfg!(feature = "lab") && self.store.is_none()
    }

    /// Opens the datastore; must be called in a runtime.
    pub(crate) fn open(&self) -> anyhow::Result<Arc<dyn Store>> {
        let Some(address) = &self.store else { return default_store() };
        if let Some(path) = address.strip_prefix("unix:") {
            return Ok(Arc::new(Remote::unix(Path::new(path))));
        }
        let Some(address) = address.strip_prefix("tls:") else {
            bail!("--store {address:?} is neither unix:PATH nor tls:HOST:PORT");
        };
        let read = |option: &str, path: &Option<PathBuf>| {
            let path =
                path.as_ref().with_context(|| format!("--store tls:{address} needs --tls-{option}"))?;
            std::fs::read_to_string(path).with_context(|| format!("--tls-{option} {}", path.display()))
        };
        let tls = TlsIdentity {
            authority: read("authority", &self.tls_authority)?,
            certificate: read("certificate", &self.tls_certificate)?,
            key: read("key", &self.tls_key)?,
        };
        Ok(Arc::new(Remote::tls(address, &tls)?))
    }
}

#[cfg(feature = "lab")]
fn default_store() -> anyhow::Result<Arc<dyn Store>> {
    let dir = crate::lab::dir();
    if !dir.in_use() {
        bail!(
            "no lab is running in {}; start one with `tortie lab up`, or say --store",
            dir.path().display()
        );
    }
    Ok(Arc::new(Remote::unix(&dir.store_socket())))
}

#[cfg(not(feature = "lab"))]
fn default_store() -> anyhow::Result<Arc<dyn Store>> {
    bail!("say which datastore with --store or TORTIE_STORE")
}
