//! The datastore of a command.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use tortie_api::Kind;
use tortie_cni::local;
use tortie_store::etcd::{Etcd, EtcdConfig, Login};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes, KubernetesConfig};
use tortie_store::rpc::{Remote, TlsFiles};
use tortie_store::{Endpoints, Store, StoreError, Stored};

use crate::calicoctl::{self, CalicoStore};
use crate::lab::{Lab, lab};

/// The datastore.
#[derive(clap::Args, Default)]
pub(crate) struct StoreArguments {
    /// The datastore: unix:PATH, tls:HOST:PORT with the three files below, etcd:URL[,URL…] with them if the URLs are
    /// https, or kubernetes[:KUBECONFIG]. By default the lab that runs on this machine
    #[arg(long, env = "TORTIE_STORE", value_name = "ADDRESS")]
    store: Option<String>,
    /// The datastore of this configuration file of calicoctl. Without it and --store, DATASTORE_TYPE and calicoctl's other
    /// environment variables count
    #[arg(short, long, value_name = "FILE", conflicts_with = "store")]
    config: Option<PathBuf>,
    /// An option of calicoctl; Tortie reads objects of all known versions
    #[arg(long, hide = true)]
    allow_version_mismatch: bool,
    /// The certificate of the authority that both sides trust (PEM)
    #[arg(long, value_name = "FILE")]
    tls_authority: Option<PathBuf>,
    /// This side's certificate (PEM)
    #[arg(long, value_name = "FILE")]
    tls_certificate: Option<PathBuf>,
    /// The key of this side's certificate (PEM)
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// The user of etcd, if it demands one; the password is in TORTIE_ETCD_PASSWORD
    #[arg(long, value_name = "NAME")]
    etcd_user: Option<String>,
    /// The API group of Calico's kinds: crd.projectcalico.org/v1 or projectcalico.org/v3. By default, the one that Calico
    /// would use
    #[arg(long, env = "TORTIE_CALICO_GROUP", value_name = "GROUP")]
    calico_group: Option<CalicoGroup>,
}

impl StoreArguments {
    /// The datastore of a configuration file of calicoctl.
    pub(crate) fn of_config(file: &Path) -> Self {
        Self { config: Some(file.to_owned()), ..Self::default() }
    }

    /// An option of the command line, for a command that may read files instead. A variable of the environment is none.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let is_set = |variable: &str| std::env::var_os(variable).is_some();
        let options = [
            ("store", self.store.is_some() && !is_set("TORTIE_STORE")),
            ("config", self.config.is_some()),
            ("tls-authority", self.tls_authority.is_some()),
            ("tls-certificate", self.tls_certificate.is_some()),
            ("tls-key", self.tls_key.is_some()),
            ("etcd-user", self.etcd_user.is_some()),
            ("calico-group", self.calico_group.is_some() && !is_set("TORTIE_CALICO_GROUP")),
        ];
        options.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }

    /// The lab on this machine, if the datastore belongs to it.
    pub(crate) fn lab(&self) -> Option<&'static dyn Lab> {
        lab().filter(|_| self.store.is_none() && matches!(self.calicoctl(), Ok(None)))
    }

    /// Whether it is etcd.
    pub(crate) fn is_etcd(&self) -> bool {
        self.store.as_ref().is_some_and(|address| address.starts_with("etcd:"))
            || matches!(self.calicoctl(), Ok(Some(CalicoStore::Etcd(_))))
    }

    /// Refuses etcd for a command that changes Nodes and deletes pods: a copy that is changed changes nothing in the cluster.
    #[cfg(any(windows, test))]
    pub(crate) fn refuse_copies(&self) -> anyhow::Result<()> {
        if self.is_etcd() {
            bail!(
                "etcd has copies of Nodes and pods only, and this command changes them; use --store kubernetes[:KUBECONFIG]"
            );
        }
        Ok(())
    }

    /// Whether it is the Kubernetes API, whose pods run.
    pub(crate) fn is_kubernetes(&self) -> bool {
        self.store.as_ref().is_some_and(|address| kubernetes(address).is_some())
            || matches!(self.calicoctl(), Ok(Some(CalicoStore::Kubernetes(_))))
    }

    /// The datastore as calicoctl finds it, if --store does not name it.
    fn calicoctl(&self) -> anyhow::Result<Option<CalicoStore>> {
        if self.store.is_some() {
            return Ok(None);
        }
        let Some(file) = &self.config else {
            let found = calicoctl::of_environment(|name| std::env::var(name).ok());
            return found.map_err(|problem| anyhow::anyhow!("the environment of calicoctl: {problem}"));
        };
        let found = calicoctl::of_file(&crate::filenames::read(file)?);
        found.map(Some).map_err(|problem| anyhow::anyhow!("{}: {problem}", file.display()))
    }

    async fn open_as_calicoctl(&self, found: &CalicoStore) -> anyhow::Result<Arc<dyn Endpoints>> {
        let unused = [
            ("tls-authority", self.tls_authority.is_some()),
            ("tls-certificate", self.tls_certificate.is_some()),
            ("tls-key", self.tls_key.is_some()),
            ("etcd-user", self.etcd_user.is_some()),
        ];
        if let Some((option, _)) = unused.iter().find(|(_, is_given)| *is_given) {
            bail!("--{option} has no effect with the settings of calicoctl; remove it, or use --store");
        }
        Ok(match (found, self.calico_group) {
            (CalicoStore::Etcd(_), Some(_)) => bail!("--calico-group has no effect with etcd; remove it"),
            (CalicoStore::Etcd(settings), None) => Arc::new(Etcd::new(settings.config()?)?),
            (CalicoStore::Kubernetes(file), _) => self.cluster(&calicoctl::kubernetes(file.as_ref())).await?,
        })
    }

    /// Opens the datastore if it is a Kubernetes API.
    pub(crate) async fn open_kubernetes(&self) -> anyhow::Result<Option<Arc<Kubernetes>>> {
        let config = match (self.calicoctl()?, &self.store) {
            (Some(CalicoStore::Kubernetes(file)), _) => calicoctl::kubernetes(file.as_ref()),
            (None, Some(address)) => match kubernetes(address) {
                Some(config) => {
                    self.refuse_unused(address)?;
                    config
                }
                None => return Ok(None),
            },
            (Some(CalicoStore::Etcd(_)), _) | (None, None) => return Ok(None),
        };
        Ok(Some(self.cluster(&config).await?))
    }

    async fn cluster(&self, config: &KubernetesConfig) -> anyhow::Result<Arc<Kubernetes>> {
        let cluster = Kubernetes::new(config).await?;
        Ok(Arc::new(match self.calico_group {
            Some(group) => cluster.with_group(group),
            None => cluster,
        }))
    }

    /// Opens the datastore.
    pub(crate) async fn open(&self) -> anyhow::Result<Arc<dyn Endpoints>> {
        self.open_with(Ok).await
    }

    /// Opens the datastore for an agent: an embedded one must remain the one that this file names.
    pub(crate) async fn open_remembering(&self, file: &Path) -> anyhow::Result<Arc<dyn Endpoints>> {
        let remember = |remote: Remote| {
            if let Some(folder) = file.parent() {
                local::make_folder(folder).with_context(|| folder.display().to_string())?;
            }
            Ok(remote.remembering(file)?)
        };
        self.open_with(remember).await
    }

    async fn open_with(
        &self,
        prepare: impl FnOnce(Remote) -> anyhow::Result<Remote>,
    ) -> anyhow::Result<Arc<dyn Endpoints>> {
        if let Some(found) = self.calicoctl()? {
            return self.open_as_calicoctl(&found).await;
        }
        let Some(address) = &self.store else {
            if self.calico_group.is_some() {
                bail!("--calico-group has no effect without --store kubernetes; remove it");
            }
            return lab().context("say which datastore with --store or TORTIE_STORE")?.store();
        };
        self.refuse_unused(address)?;
        #[cfg(unix)]
        if let Some(path) = address.strip_prefix("unix:") {
            return Ok(Arc::new(prepare(Remote::unix(Path::new(path)))?));
        }
        if let Some(urls) = address.strip_prefix("etcd:") {
            return Ok(Arc::new(Etcd::new(self.etcd(urls)?)?));
        }
        if let Some(config) = kubernetes(address) {
            return Ok(self.cluster(&config).await?);
        }
        let Some(host) = address.strip_prefix("tls:") else {
            bail!(
                "--store {address:?} is neither unix:PATH nor tls:HOST:PORT nor etcd:URL[,URL…] nor kubernetes[:KUBECONFIG]"
            );
        };
        Ok(Arc::new(prepare(Remote::tls(host, self.tls(address)?)?)?))
    }

    /// An option that the datastore does not use is an error: its user expects that it has an effect.
    fn refuse_unused(&self, address: &str) -> anyhow::Result<()> {
        if self.etcd_user.is_some() && !address.starts_with("etcd:") {
            bail!("--etcd-user has no effect with --store {address}; remove it");
        }
        if self.calico_group.is_some() && kubernetes(address).is_none() {
            bail!("--calico-group has no effect with --store {address}; remove it");
        }
        if address.starts_with("etcd:") && address.contains("https:") && address.contains("http:") {
            bail!("--store {address} mixes http and https; use https for all members");
        }
        let files = [
            ("authority", &self.tls_authority),
            ("certificate", &self.tls_certificate),
            ("key", &self.tls_key),
        ];
        let is_etcd_with_tls = address.starts_with("etcd:") && address.contains("https:");
        let uses_tls = address.starts_with("tls:") || is_etcd_with_tls;
        match files.iter().find(|(_, file)| file.is_some()) {
            Some((name, _)) if kubernetes(address).is_some() => {
                bail!("--tls-{name} has no effect with --store {address}; name the file in the kubeconfig")
            }
            Some((name, _)) if !uses_tls => {
                bail!("--tls-{name} has no effect with --store {address}, which is not encrypted")
            }
            _ => Ok(()),
        }
    }

    fn etcd(&self, urls: &str) -> anyhow::Result<EtcdConfig> {
        let tls = match urls.contains("https:") {
            true => Some(self.tls(&format!("etcd:{urls}"))?.into()),
            false => None,
        };
        let login = match &self.etcd_user {
            Some(user) => {
                let password = std::env::var("TORTIE_ETCD_PASSWORD")
                    .with_context(|| format!("--etcd-user {user} needs TORTIE_ETCD_PASSWORD"))?;
                Some(Login { user: user.clone(), password })
            }
            None => None,
        };
        Ok(EtcdConfig { endpoints: urls.split(',').map(str::to_owned).collect(), tls, login })
    }

    fn tls(&self, address: &str) -> anyhow::Result<TlsFiles> {
        let file = |option: &str, path: &Option<PathBuf>| {
            path.clone().with_context(|| format!("--store {address} needs --tls-{option}"))
        };
        Ok(TlsFiles {
            authority: file("authority", &self.tls_authority)?,
            certificate: file("certificate", &self.tls_certificate)?,
            key: file("key", &self.tls_key)?,
        })
    }
}

/// The configuration of `kubernetes` (what kubectl would use, or the service account of this pod) and
/// `kubernetes:KUBECONFIG`.
fn kubernetes(address: &str) -> Option<KubernetesConfig> {
    match address.strip_prefix("kubernetes")? {
        "" => Some(KubernetesConfig::Inferred),
        path => path.strip_prefix(':').map(|path| KubernetesConfig::Kubeconfig(path.into())),
    }
}

/// Warns that a change may be lost: somebody copies the datastore at the moment.
pub(crate) async fn warn_of_lock(store: &dyn Store) {
    // Who may not read the lock, or cannot reach the datastore, learns that by the change itself.
    if tortie_store::is_locked(store).await.unwrap_or(false) {
        crate::output::error_line(
            "warning: the datastore is locked, so nodes do not apply the change; if somebody copies it, the change may be lost",
        );
    }
}

/// The objects of a kind; none if the datastore does not have the kind.
pub(crate) async fn list(store: &dyn Store, kind: Kind) -> Result<Vec<Stored>, StoreError> {
    match store.list(kind).await {
        Ok(listing) => Ok(listing.items),
        Err(StoreError::KindAbsent(_)) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_is_refused_where_a_copy_must_not_be_changed() {
        let of = |store: &str| StoreArguments { store: Some(store.to_owned()), ..StoreArguments::default() };
        let error = of("etcd:http://127.0.0.1:1").refuse_copies().unwrap_err().to_string();
        assert!(error.contains("use --store kubernetes"), "{error}");
        of("kubernetes:/k").refuse_copies().unwrap();
    }

    /// `open` reads no file and connects to nothing before these errors.
    #[tokio::test]
    async fn options_without_effect_are_errors() {
        let file = || Some(PathBuf::from("/nonexistent"));
        let table = [
            ("unix:/s", None, Some("root"), "--etcd-user has no effect"),
            ("tls:h:1", file(), Some("root"), "--etcd-user has no effect"),
            ("unix:/s", file(), None, "--tls-key has no effect"),
            ("etcd:http://h:1", file(), None, "--tls-key has no effect"),
            ("etcd:http://h:1,https://h:2", file(), None, "mixes http and https"),
            ("etcd:https://h:2", None, None, "needs --tls-authority"),
            ("tls:h:1", None, None, "needs --tls-authority"),
            ("redis:h:1", None, None, "neither unix:PATH nor"),
            ("kubernetesx", None, None, "neither unix:PATH nor"),
            ("kubernetes", file(), None, "--tls-key has no effect"),
            ("kubernetes:/https:/k", file(), None, "--tls-key has no effect"),
            ("kubernetes:/k", None, Some("root"), "--etcd-user has no effect"),
            ("kubernetes:/nonexistent", None, None, "the kubeconfig /nonexistent: "),
        ];
        for (address, tls_key, user, expected) in table {
            let arguments = StoreArguments {
                store: Some(address.to_owned()),
                config: None,
                allow_version_mismatch: false,
                tls_authority: None,
                tls_certificate: None,
                tls_key,
                etcd_user: user.map(str::to_owned),
                calico_group: None,
            };
            let error = arguments.open().await.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(expected), "{address}: {error:?}");
        }
        let with_group = StoreArguments {
            store: Some("unix:/s".to_owned()),
            config: None,
            allow_version_mismatch: false,
            tls_authority: None,
            tls_certificate: None,
            tls_key: None,
            etcd_user: None,
            calico_group: Some(CalicoGroup::Crd),
        };
        let error = with_group.open().await.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("--calico-group has no effect"), "{error}");
    }
}
