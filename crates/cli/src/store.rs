//! The datastore of a command.

mod choice;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use tortie_api::Kind;
use tortie_cni::local;
use tortie_store::etcd::{Etcd, EtcdConfig, Login, refuse_credentials};
use tortie_store::kubernetes::{CalicoGroup, Kubernetes, KubernetesConfig};
use tortie_store::rpc::{Remote, TlsFiles};
use tortie_store::{Endpoints, Store, StoreError, Stored};

use self::choice::{Candidates, Choice, KubectlConfig};
use crate::calicoctl::{self, CalicoStore};
use crate::lab::{Lab, lab};
use crate::output;

/// The use that a command makes of its datastore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Read,
    Change,
}

impl Purpose {
    /// Says on standard error which datastore this is: always before a change, and before an answer if the user may have meant another.
    fn say(self, name: &str, others: &[String]) {
        match (self, others) {
            (Self::Read, []) => {}
            (Self::Change, []) => output::error_line(&format!("datastore: {name}")),
            (_, others) => {
                output::error_line(&format!("datastore: {name}; there is also {}", others.join(", and ")));
            }
        }
    }
}

/// The datastore.
#[derive(clap::Args, Clone, Default)]
pub(crate) struct StoreArguments {
    /// The datastore: unix:PATH, tls:HOST:PORT with the three files below, etcd:URL[,URL…] with them if the URLs are
    /// https, or kubernetes[:KUBECONFIG]. By default the lab that runs on this machine, and without one the cluster that kubectl
    /// would use
    #[arg(long, env = "TORTIE_STORE", value_name = "ADDRESS")]
    store: Option<String>,
    /// The datastore of this configuration file of calicoctl. Without it and --store, DATASTORE_TYPE and calicoctl's other
    /// environment variables count
    #[arg(short, long, value_name = "FILE")]
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

    /// The same options for the Kubernetes API of this file.
    pub(crate) fn with_kubeconfig(&self, file: &Path) -> Self {
        Self { store: Some(format!("kubernetes:{}", file.display())), ..self.clone() }
    }

    /// An option of the command line, for a command that may read files instead. A variable of the environment is none.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let variable = |name: &str| std::env::var(name).ok();
        let group = variable("TORTIE_CALICO_GROUP").and_then(|group| group.parse().ok());
        let options = [
            ("store", self.store.is_some() && self.store != variable("TORTIE_STORE")),
            ("config", self.config.is_some()),
            ("tls-authority", self.tls_authority.is_some()),
            ("tls-certificate", self.tls_certificate.is_some()),
            ("tls-key", self.tls_key.is_some()),
            ("etcd-user", self.etcd_user.is_some()),
            ("calico-group", self.calico_group.is_some() && self.calico_group != group),
        ];
        options.into_iter().find(|(_, is_given)| *is_given).map(|(option, _)| option)
    }

    /// The lab on this machine, if its datastore is the chosen one.
    pub(crate) fn lab(&self) -> Option<&'static dyn Lab> {
        match self.choose() {
            Ok((Choice::Lab(lab, _), _)) => Some(lab),
            _ => None,
        }
    }

    /// Whether it is etcd.
    pub(crate) fn is_etcd(&self) -> bool {
        match self.choose() {
            Ok((Choice::Address(address), _)) => address.starts_with("etcd:"),
            Ok((Choice::Calicoctl(found), _)) => matches!(found, CalicoStore::Etcd(_)),
            _ => false,
        }
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
        matches!(self.choose(), Ok((choice, _)) if kubernetes_of(&choice).is_some())
    }

    /// The datastore, and the others that the user may have meant.
    fn choose(&self) -> anyhow::Result<(Choice, Vec<String>)> {
        let variable = |name: &str| std::env::var(name).ok();
        let candidates = Candidates {
            named: self.named(variable("TORTIE_STORE"))?,
            lab: lab().map(|lab| {
                let (folder, state) = lab.state();
                (lab, folder, state)
            }),
            means_lab: variable("TORTIE_LAB").is_some_and(|value| !value.is_empty()),
            kubectl: KubectlConfig::find(variable, Path::exists),
        };
        candidates.choose()
    }

    /// The datastore that an option or a variable names, and whether it is a variable. `variable` is the value of `TORTIE_STORE`, which
    /// is also in `store` unless the option is given; without text it names none.
    fn named(&self, variable: Option<String>) -> anyhow::Result<Option<(Choice, bool)>> {
        let is_variable = self.store == variable;
        let address = self.store.as_ref().filter(|address| !(is_variable && address.is_empty()));
        match (address, &self.config) {
            (Some(address), _) if address.is_empty() => {
                bail!("--store names no datastore; name one, or remove the option")
            }
            (Some(_), Some(_)) if !is_variable => {
                bail!("--store and --config name a datastore each; remove one of them")
            }
            (_, Some(file)) => {
                let found = calicoctl::of_file(&crate::filenames::read(file)?);
                let found = found.map_err(|problem| anyhow::anyhow!("{}: {problem}", file.display()))?;
                Ok(Some((Choice::Calicoctl(found), false)))
            }
            (Some(address), None) => Ok(Some((Choice::Address(address.clone()), is_variable))),
            (None, None) => {
                let found = calicoctl::of_environment(|name| std::env::var(name).ok());
                let found =
                    found.map_err(|problem| anyhow::anyhow!("the environment of calicoctl: {problem}"))?;
                Ok(found.map(|found| (Choice::Calicoctl(found), true)))
            }
        }
    }

    /// Opens the datastore if it is a Kubernetes API.
    pub(crate) async fn open_kubernetes(&self, purpose: Purpose) -> anyhow::Result<Option<Arc<Kubernetes>>> {
        let (choice, others) = self.choose()?;
        self.refuse_unused(&choice)?;
        let Some(config) = kubernetes_of(&choice) else { return Ok(None) };
        let cluster = self.cluster(&config).await?;
        purpose.say(&format!("{choice} at {}", cluster.server()), &others);
        Ok(Some(cluster))
    }

    async fn cluster(&self, config: &KubernetesConfig) -> anyhow::Result<Arc<Kubernetes>> {
        let cluster = Kubernetes::new(config).await?;
        Ok(Arc::new(match self.calico_group {
            Some(group) => cluster.with_group(group),
            None => cluster,
        }))
    }

    /// Opens the datastore for a command that only reads. It says which one that is if the user may have meant another.
    pub(crate) async fn open(&self) -> anyhow::Result<Arc<dyn Endpoints>> {
        self.open_with(Purpose::Read, Ok).await
    }

    /// Opens the datastore for a command that changes it, which says which one that is.
    pub(crate) async fn open_to_change(&self) -> anyhow::Result<Arc<dyn Endpoints>> {
        self.open_with(Purpose::Change, Ok).await
    }

    /// Opens the datastore for a daemon, whose datastore must be named: one that depends on what else runs on the machine, or on the
    /// home of a user, would change with them.
    #[cfg(unix)]
    pub(crate) async fn open_named(&self) -> anyhow::Result<Arc<dyn Endpoints>> {
        self.ensure_named()?;
        self.open().await
    }

    fn ensure_named(&self) -> anyhow::Result<()> {
        if self.named(std::env::var("TORTIE_STORE").ok())?.is_none() {
            bail!("say which datastore with --store or TORTIE_STORE");
        }
        Ok(())
    }

    /// Opens the datastore for an agent: an embedded one must remain the one that this file names.
    pub(crate) async fn open_remembering(&self, file: &Path) -> anyhow::Result<Arc<dyn Endpoints>> {
        self.ensure_named()?;
        let remember = |remote: Remote| {
            if let Some(folder) = file.parent() {
                local::make_folder(folder).with_context(|| folder.display().to_string())?;
            }
            Ok(remote.remembering(file)?)
        };
        self.open_with(Purpose::Read, remember).await
    }

    async fn open_with(
        &self,
        purpose: Purpose,
        prepare: impl FnOnce(Remote) -> anyhow::Result<Remote>,
    ) -> anyhow::Result<Arc<dyn Endpoints>> {
        let (choice, others) = self.choose()?;
        self.refuse_unused(&choice)?;
        let mut name = choice.to_string();
        let store: Arc<dyn Endpoints> = match (&choice, kubernetes_of(&choice)) {
            (Choice::Lab(lab, _), _) => lab.store(),
            (_, Some(config)) => {
                let cluster = self.cluster(&config).await?;
                name = format!("{choice} at {}", cluster.server());
                cluster
            }
            (Choice::Calicoctl(CalicoStore::Etcd(settings)), None) => {
                Arc::new(Etcd::new(settings.config()?)?)
            }
            (Choice::Address(address), None) => self.open_address(address, prepare)?,
            // Both are Kubernetes APIs.
            (Choice::Calicoctl(CalicoStore::Kubernetes(_)) | Choice::Kubectl(_), None) => {
                bail!("{choice} has no configuration for Kubernetes")
            }
        };
        purpose.say(&name, &others);
        Ok(store)
    }

    fn open_address(
        &self,
        address: &str,
        prepare: impl FnOnce(Remote) -> anyhow::Result<Remote>,
    ) -> anyhow::Result<Arc<dyn Endpoints>> {
        #[cfg(unix)]
        if let Some(path) = address.strip_prefix("unix:") {
            return Ok(Arc::new(prepare(Remote::unix(Path::new(path)))?));
        }
        if let Some(urls) = address.strip_prefix("etcd:") {
            return Ok(Arc::new(Etcd::new(self.etcd(urls)?)?));
        }
        let Some(host) = address.strip_prefix("tls:") else {
            bail!(
                "--store {address:?} is neither unix:PATH nor tls:HOST:PORT nor etcd:URL[,URL…] nor kubernetes[:KUBECONFIG]"
            );
        };
        Ok(Arc::new(prepare(Remote::tls(host, self.tls(address)?)?)?))
    }

    /// Refuses an option that the datastore does not use: its user expects that it has an effect.
    fn refuse_unused(&self, choice: &Choice) -> anyhow::Result<()> {
        // First, because the other errors show the address.
        choice.etcd_members().iter().try_for_each(|url| refuse_credentials(url))?;
        let has_groups = kubernetes_of(choice).is_some();
        let Choice::Address(address) = choice else {
            if self.calico_group.is_some() && !has_groups {
                bail!("--calico-group has no effect with {choice}; remove it");
            }
            let others = self.files().into_iter().chain([("etcd-user", self.etcd_user.is_some())]);
            return match others.into_iter().find(|(_, is_given)| *is_given) {
                Some((option, _)) => {
                    bail!(
                        "--{option} has no effect with {choice}; remove it, or name the datastore with --store"
                    )
                }
                None => Ok(()),
            };
        };
        if self.etcd_user.is_some() && !address.starts_with("etcd:") {
            bail!("--etcd-user has no effect with --store {address}; remove it");
        }
        if self.calico_group.is_some() && !has_groups {
            bail!("--calico-group has no effect with --store {address}; remove it");
        }
        if address.starts_with("etcd:") && address.contains("https:") && address.contains("http:") {
            bail!("--store {address} mixes http and https; use https for all members");
        }
        let is_etcd_with_tls = address.starts_with("etcd:") && address.contains("https:");
        let uses_tls = address.starts_with("tls:") || is_etcd_with_tls;
        match self.files().into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) if has_groups => {
                bail!("--{option} has no effect with --store {address}; name the file in the kubeconfig")
            }
            Some((option, _)) if !uses_tls => {
                bail!("--{option} has no effect with --store {address}, which is not encrypted")
            }
            _ => Ok(()),
        }
    }

    /// The options that name files of TLS, and whether each is given.
    fn files(&self) -> [(&'static str, bool); 3] {
        [
            ("tls-authority", self.tls_authority.is_some()),
            ("tls-certificate", self.tls_certificate.is_some()),
            ("tls-key", self.tls_key.is_some()),
        ]
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

/// The configuration of the client, if the datastore is a Kubernetes API.
fn kubernetes_of(choice: &Choice) -> Option<KubernetesConfig> {
    match choice {
        Choice::Address(address) => kubernetes(address),
        Choice::Calicoctl(CalicoStore::Kubernetes(file)) => Some(calicoctl::kubernetes(file.as_ref())),
        Choice::Calicoctl(CalicoStore::Etcd(_)) => None,
        Choice::Lab(lab, _) => lab.kubeconfig().map(KubernetesConfig::Kubeconfig),
        Choice::Kubectl(_) => Some(KubernetesConfig::Inferred),
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

    #[test]
    fn an_option_comes_before_a_variable_and_an_empty_variable_names_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("calicoctl.cfg");
        let text = "apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nspec:\n  kubeconfig: /c\n";
        std::fs::write(&file, text).unwrap();
        for (store, variable, has_config, expected) in [
            (None, None, true, "kubernetes:/c false"),
            (Some("unix:/s"), None, false, "unix:/s false"),
            (Some("unix:/s"), Some("unix:/v"), false, "unix:/s false"),
            (Some("unix:/v"), Some("unix:/v"), false, "unix:/v true"),
            (Some("unix:/v"), Some("unix:/v"), true, "kubernetes:/c false"),
            (Some("unix:/s"), None, true, "--store and --config name a datastore each; remove one of them"),
            (
                Some("unix:/s"),
                Some("unix:/v"),
                true,
                "--store and --config name a datastore each; remove one of them",
            ),
            (Some(""), Some(""), true, "kubernetes:/c false"),
            (Some(""), Some(""), false, "none"),
            (Some(""), None, false, "--store names no datastore; name one, or remove the option"),
        ] {
            let arguments = StoreArguments {
                store: store.map(str::to_owned),
                config: has_config.then(|| file.clone()),
                ..StoreArguments::default()
            };
            let named = match arguments.named(variable.map(str::to_owned)) {
                Ok(Some((choice, is_variable))) => format!("{choice} {is_variable}"),
                Ok(None) => "none".to_owned(),
                Err(error) => error.to_string(),
            };
            assert_eq!(named, expected, "{store:?} {variable:?} {has_config}");
        }
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
            ("etcd:http://u:p@h:1", file(), None, "endpoint http://h:1 of etcd has a user or a password"),
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
