//! The rule by which all commands choose their datastore.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::calicoctl::CalicoStore;
use crate::lab::{Lab, LabState};

/// The token of a pod's service account. kubectl uses it if there is no kubeconfig.
const POD_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// The datastore of a command.
#[derive(Debug, Clone)]
pub(super) enum Choice<L = &'static dyn Lab> {
    /// The value of --store or `TORTIE_STORE`.
    Address(String),
    /// The datastore of --config, or of calicoctl's environment variables.
    Calicoctl(CalicoStore),
    /// The lab that runs on this machine.
    Lab(L, PathBuf),
    /// The Kubernetes API that kubectl would use.
    Kubectl(KubectlConfig),
}

/// The place where kubectl finds its configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KubectlConfig {
    /// The value of `KUBECONFIG`.
    Variable(String),
    /// The file in the user's home.
    Home(PathBuf),
    /// The service account of the pod in which this program runs.
    Pod,
}

/// The datastores that a command could use. An option of the command line comes first, and leaves no doubt.
#[derive(Debug)]
pub(super) struct Candidates<L = &'static dyn Lab> {
    /// The datastore that an option or a variable names, and whether it was a variable.
    pub(super) named: Option<(Choice<L>, bool)>,
    pub(super) lab: Option<(L, PathBuf, LabState)>,
    /// `TORTIE_LAB` is set: the user means a lab.
    pub(super) means_lab: bool,
    pub(super) kubectl: Option<KubectlConfig>,
}

impl<L> Candidates<L> {
    /// Returns the datastore, and the others that the user may have meant: none if an option names the datastore.
    ///
    /// # Errors
    /// There is none, or a lab has ended whose user may believe that it runs.
    pub(super) fn choose(self) -> anyhow::Result<(Choice<L>, Vec<String>)> {
        let Self { named, lab, means_lab, kubectl } = self;
        let mut others = Vec::new();
        let kubectl_other = |others: &mut Vec<String>| {
            others.extend(kubectl.iter().map(|config| format!("--store kubernetes ({config})")));
        };
        if let Some((choice, is_variable)) = named {
            if is_variable {
                if let Some((_, folder, LabState::Running)) = &lab {
                    others.push(format!("the lab in {}", folder.display()));
                }
                if !kubectl.as_ref().is_some_and(|config| choice.is_of(config)) {
                    kubectl_other(&mut others);
                }
            }
            return Ok((choice, others));
        }
        match lab {
            Some((lab, folder, LabState::Running)) => {
                kubectl_other(&mut others);
                return Ok((Choice::Lab(lab, folder), others));
            }
            Some((_, folder, LabState::Ended)) => bail!(
                "the lab in {} has ended without `tortie lab down`; start it again with `tortie lab up`, remove it with `tortie lab down`, or name the datastore with --store",
                folder.display()
            ),
            Some((_, folder, LabState::Foreign)) if means_lab => bail!(
                "the lab in {} belongs to another user; run the command as that user, or name the datastore with --store",
                folder.display()
            ),
            Some((_, folder, LabState::Absent)) if means_lab || kubectl.is_none() => bail!(
                "no lab is running in {}; start one with `tortie lab up`, or name the datastore with --store, such as --store kubernetes",
                folder.display()
            ),
            Some((_, _, LabState::Absent | LabState::Foreign)) | None => {}
        }
        match kubectl {
            Some(config) => Ok((Choice::Kubectl(config), others)),
            None => bail!(
                "name the datastore with --store or TORTIE_STORE: there is no kubeconfig (KUBECONFIG, ~/.kube/config) either"
            ),
        }
    }
}

impl<L> Choice<L> {
    /// The addresses of the members, if it is etcd.
    pub(super) fn etcd_members(&self) -> Vec<&str> {
        match self {
            Self::Address(address) => {
                address.strip_prefix("etcd:").map_or_else(Vec::new, |urls| urls.split(',').collect())
            }
            Self::Calicoctl(CalicoStore::Etcd(settings)) => {
                settings.endpoints().iter().map(String::as_str).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether it is certainly the Kubernetes API that kubectl would use.
    fn is_of(&self, kubectl: &KubectlConfig) -> bool {
        let file = match self {
            Self::Address(address) => match address.strip_prefix("kubernetes") {
                Some("") => return true,
                Some(file) => file.strip_prefix(':').map(Path::new),
                None => None,
            },
            Self::Calicoctl(CalicoStore::Kubernetes(None)) | Self::Kubectl(_) => return true,
            Self::Calicoctl(CalicoStore::Kubernetes(Some(file))) => Some(file.as_path()),
            Self::Calicoctl(CalicoStore::Etcd(_)) | Self::Lab(..) => None,
        };
        match kubectl {
            KubectlConfig::Variable(files) => file == Some(Path::new(files)),
            KubectlConfig::Home(home) => file == Some(home.as_path()),
            KubectlConfig::Pod => false,
        }
    }
}

impl KubectlConfig {
    /// Finds the configuration in the order of kubectl (`client-go/tools/clientcmd`).
    pub(super) fn find(
        variable: impl Fn(&str) -> Option<String>,
        exists: impl Fn(&Path) -> bool,
    ) -> Option<Self> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let Some(files) = variable("KUBECONFIG") {
            return Some(Self::Variable(files));
        }
        let home = variable(if cfg!(windows) { "USERPROFILE" } else { "HOME" });
        let file = home.map(|home| Path::new(&home).join(".kube").join("config"));
        if let Some(file) = file.filter(|file| exists(file)) {
            return Some(Self::Home(file));
        }
        let is_pod = variable("KUBERNETES_SERVICE_HOST").is_some() && exists(Path::new(POD_TOKEN));
        is_pod.then_some(Self::Pod)
    }
}

impl fmt::Display for KubectlConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(files) => write!(f, "KUBECONFIG={files}"),
            Self::Home(file) => write!(f, "{}", file.display()),
            Self::Pod => f.write_str("the service account of this pod"),
        }
    }
}

impl<L> fmt::Display for Choice<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => f.write_str(address),
            Self::Calicoctl(CalicoStore::Etcd(settings)) => {
                write!(f, "etcd:{}", settings.endpoints().join(","))
            }
            Self::Calicoctl(CalicoStore::Kubernetes(Some(file))) => {
                write!(f, "kubernetes:{}", file.display())
            }
            Self::Calicoctl(CalicoStore::Kubernetes(None)) => f.write_str("kubernetes"),
            Self::Lab(_, folder) => write!(f, "the lab in {}", folder.display()),
            Self::Kubectl(config) => write!(f, "kubernetes ({config})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(named: Option<&str>, variable: bool, lab: LabState, kubectl: bool) -> Candidates<()> {
        Candidates {
            named: named.map(|address| (Choice::Address(address.to_owned()), variable)),
            lab: Some(((), PathBuf::from("/tmp/lab"), lab)),
            means_lab: false,
            kubectl: kubectl.then(|| KubectlConfig::Home(PathBuf::from("/root/.kube/config"))),
        }
    }

    #[test]
    fn one_rule_chooses_the_datastore() {
        const CLUSTER: &str = "--store kubernetes (/root/.kube/config)";
        let kubernetes = "kubernetes (/root/.kube/config)";
        let lab = "the lab in /tmp/lab";
        for (named, variable, state, kubectl, expected, others) in [
            // An option leaves no doubt.
            (Some("unix:/s"), false, LabState::Running, true, "unix:/s", &[][..]),
            (Some("unix:/s"), true, LabState::Running, true, "unix:/s", &[lab, CLUSTER][..]),
            (Some("kubernetes:/k"), true, LabState::Running, true, "kubernetes:/k", &[lab, CLUSTER]),
            (
                Some("kubernetes:/root/.kube/config"),
                true,
                LabState::Absent,
                true,
                "kubernetes:/root/.kube/config",
                &[],
            ),
            (Some("kubernetes"), true, LabState::Absent, true, "kubernetes", &[]),
            (Some("unix:/s"), true, LabState::Ended, false, "unix:/s", &[]),
            (None, false, LabState::Running, true, lab, &[CLUSTER]),
            (None, false, LabState::Running, false, lab, &[]),
            (None, false, LabState::Absent, true, kubernetes, &[]),
            (None, false, LabState::Absent, false, "no lab is running in /tmp/lab", &[]),
            // A command for a lab that was killed must not change a cluster.
            (None, false, LabState::Ended, true, "the lab in /tmp/lab has ended without", &[]),
            (None, false, LabState::Ended, false, "the lab in /tmp/lab has ended without", &[]),
        ] {
            let case = format!("{named:?} {variable} {state:?} {kubectl}");
            match candidates(named, variable, state, kubectl).choose() {
                Ok((choice, found)) => {
                    assert_eq!(choice.to_string(), expected, "{case}");
                    assert_eq!(found, others, "{case}");
                }
                Err(error) => assert!(error.to_string().starts_with(expected), "{case}: {error}"),
            }
        }
    }

    #[test]
    fn a_chosen_lab_that_does_not_run_is_no_cluster() {
        for (state, expected) in [
            (LabState::Absent, "no lab is running in /tmp/lab"),
            (LabState::Foreign, "the lab in /tmp/lab belongs to another user"),
        ] {
            let candidates = Candidates { means_lab: true, ..candidates(None, false, state, true) };
            let error = candidates.choose().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_program_without_a_lab_uses_the_cluster() {
        let without =
            |kubectl| Candidates { lab: None, ..candidates(None, false, LabState::Absent, kubectl) };
        assert_eq!(without(true).choose().unwrap().0.to_string(), "kubernetes (/root/.kube/config)");
        let error = without(false).choose().unwrap_err().to_string();
        assert!(error.contains("--store or TORTIE_STORE"), "{error}");
    }

    #[test]
    fn the_configuration_of_kubectl_is_found_in_its_order() {
        const HOME: &str = if cfg!(windows) { "USERPROFILE" } else { "HOME" };
        let all = [("KUBECONFIG", "/a:/b"), (HOME, "/h"), ("KUBERNETES_SERVICE_HOST", "10.96.0.1")];
        let find = |variables: &[(&str, &str)], exists: bool| {
            let value = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            KubectlConfig::find(value, |_| exists)
        };
        assert_eq!(find(&all, true), Some(KubectlConfig::Variable("/a:/b".to_owned())));
        let home = Path::new("/h").join(".kube").join("config");
        assert_eq!(find(&all[1..], true), Some(KubectlConfig::Home(home)));
        assert_eq!(find(&all[2..], true), Some(KubectlConfig::Pod));
        assert_eq!(find(&all[2..], false), None);
        assert_eq!(find(&[("KUBECONFIG", "")], true), None);
    }
}
