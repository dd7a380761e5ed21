//! The datastore as calicoctl finds it: its configuration file, and its environment variables
//! (`libcalico-go/lib/apiconfig`).

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use tortie_store::etcd::{EtcdConfig, Login};
use tortie_store::kubernetes::KubernetesConfig;
use tortie_store::rpc::{Certificates, TlsFiles, TlsIdentity};

/// The datastore that calicoctl would use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CalicoStore {
    Etcd(EtcdSettings),
    /// With this kubeconfig, or as kubectl finds it.
    Kubernetes(Option<PathBuf>),
}

#[derive(Clone, PartialEq, Default)]
pub(crate) struct EtcdSettings {
    endpoints: Vec<String>,
    user: Option<String>,
    password: Option<String>,
    authority: Option<Pem>,
    certificate: Option<Pem>,
    key: Option<Pem>,
}

/// Without the password and the key.
impl fmt::Debug for EtcdSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoints, user, .. } = self;
        f.debug_struct("EtcdSettings")
            .field("endpoints", endpoints)
            .field("user", user)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, PartialEq)]
enum Pem {
    File(PathBuf),
    Inline(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    #[expect(dead_code, reason = "calicoctl allows it, and nobody reads it")]
    metadata: serde_json::Value,
    #[serde(default)]
    spec: Settings,
}

/// The settings of calicoctl, by the names of its file. Those of its environment are in [`VARIABLES`].
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Settings {
    datastore_type: String,
    etcd_endpoints: String,
    etcd_discovery_srv: String,
    etcd_username: String,
    etcd_password: String,
    etcd_key_file: String,
    etcd_cert_file: String,
    #[serde(rename = "etcdCACertFile")]
    etcd_ca_cert_file: String,
    etcd_key: String,
    etcd_cert: String,
    #[serde(rename = "etcdCACert")]
    etcd_ca_cert: String,
    kubeconfig: String,
    kubeconfig_inline: String,
    #[serde(rename = "k8sAPIEndpoint")]
    k8s_api_endpoint: String,
    k8s_key_file: String,
    k8s_cert_file: String,
    #[serde(rename = "k8sCAFile")]
    k8s_ca_file: String,
    #[serde(rename = "k8sAPIToken")]
    k8s_api_token: String,
    #[serde(rename = "k8sInsecureSkipTLSVerify")]
    k8s_insecure_skip_tls_verify: bool,
    #[serde(rename = "k8sDisableNodePoll")]
    k8s_disable_node_poll: bool,
    #[serde(rename = "usePodCIDR", alias = "k8sUsePodCIDR")]
    k8s_use_pod_cidr: bool,
    k8s_current_context: String,
    #[serde(rename = "k8sClientQPS")]
    k8s_client_qps: f32,
    k8s_client_burst: i64,
    #[serde(rename = "calicoAPIGroup")]
    calico_api_group: String,
}

/// The settings that Tortie reads from the environment; each may also begin with `CALICO_`.
type Variable = (&'static str, fn(&mut Settings) -> &mut String);
const VARIABLES: [Variable; 15] = [
    ("DATASTORE_TYPE", |settings| &mut settings.datastore_type),
    ("ETCD_ENDPOINTS", |settings| &mut settings.etcd_endpoints),
    ("ETCD_DISCOVERY_SRV", |settings| &mut settings.etcd_discovery_srv),
    ("ETCD_USERNAME", |settings| &mut settings.etcd_username),
    ("ETCD_PASSWORD", |settings| &mut settings.etcd_password),
    ("ETCD_KEY_FILE", |settings| &mut settings.etcd_key_file),
    ("ETCD_CERT_FILE", |settings| &mut settings.etcd_cert_file),
    ("ETCD_CA_CERT_FILE", |settings| &mut settings.etcd_ca_cert_file),
    ("ETCD_KEY", |settings| &mut settings.etcd_key),
    ("ETCD_CERT", |settings| &mut settings.etcd_cert),
    ("ETCD_CA_CERT", |settings| &mut settings.etcd_ca_cert),
    ("KUBECONFIG", |settings| &mut settings.kubeconfig),
    ("KUBECONFIG_INLINE", |settings| &mut settings.kubeconfig_inline),
    ("K8S_API_ENDPOINT", |settings| &mut settings.k8s_api_endpoint),
    ("K8S_CURRENT_CONTEXT", |settings| &mut settings.k8s_current_context),
];

/// Reads the text of calicoctl's configuration file.
///
/// # Errors
/// It is none, or has settings that Tortie does not support.
pub(crate) fn of_file(text: &str) -> Result<CalicoStore, String> {
    let documents = tortie_api::from_yaml(text).map_err(|error| error.to_string())?;
    let [document] = &documents[..] else { return Err("one document is expected".to_owned()) };
    let file: File = serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
    if (file.api_version.as_str(), file.kind.as_str()) != ("projectcalico.org/v3", "CalicoAPIConfig") {
        return Err(
            "it is no configuration of calicoctl: kind CalicoAPIConfig of projectcalico.org/v3 is expected"
                .to_owned(),
        );
    }
    file.spec.read()
}

/// Reads calicoctl's environment variables. `None` if none says which datastore it is, because others set the rest.
///
/// # Errors
/// They have settings that Tortie does not support.
pub(crate) fn of_environment(
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<CalicoStore>, String> {
    let value = |name: &str| {
        let value = variable(&format!("CALICO_{name}")).or_else(|| variable(name));
        value.filter(|value| !value.is_empty())
    };
    if value("DATASTORE_TYPE").is_none() {
        return Ok(None);
    }
    let mut settings = Settings::default();
    for (name, field) in VARIABLES {
        *field(&mut settings) = value(name).unwrap_or_default();
    }
    settings.read().map(Some)
}

impl Settings {
    fn read(self) -> Result<CalicoStore, String> {
        let Self {
            datastore_type,
            etcd_endpoints,
            etcd_discovery_srv,
            etcd_username,
            etcd_password,
            etcd_key_file,
            etcd_cert_file,
            etcd_ca_cert_file,
            etcd_key,
            etcd_cert,
            etcd_ca_cert,
            kubeconfig,
            kubeconfig_inline,
            k8s_api_endpoint,
            k8s_key_file,
            k8s_cert_file,
            k8s_ca_file,
            k8s_api_token,
            k8s_insecure_skip_tls_verify,
            // They change nothing for a command: how it asks for nodes, pools and how often.
            k8s_disable_node_poll: _,
            k8s_use_pod_cidr: _,
            k8s_client_qps: _,
            k8s_client_burst: _,
            calico_api_group,
            k8s_current_context,
        } = self;
        let unsupported = |fields: &[(&str, &str, &str)]| {
            let found = fields.iter().find(|(_, value, _)| !value.is_empty());
            found.map_or(Ok(()), |(name, _, remedy)| Err(format!("{name} is not supported; {remedy}")))
        };
        // As in calicoctl: a file that names members of etcd means etcd.
        let datastore = match datastore_type.as_str() {
            "" if !etcd_endpoints.is_empty() => "etcdv3",
            datastore => datastore,
        };
        match datastore {
            "etcdv3" => {
                unsupported(&[(
                    "etcdDiscoverySrv",
                    &etcd_discovery_srv,
                    "name the members in etcdEndpoints",
                )])?;
                let endpoints = etcd_endpoints.split(',').map(str::trim).filter(|url| !url.is_empty());
                let endpoints: Vec<String> = endpoints.map(str::to_owned).collect();
                if endpoints.is_empty() {
                    return Err("etcdEndpoints names no member of etcd".to_owned());
                }
                let text = |text: String| Some(text).filter(|text| !text.is_empty());
                // As in calicoctl, an inline value comes before a file.
                let pem = |inline, file| {
                    text(inline).map(Pem::Inline).or_else(|| text(file).map(|file| Pem::File(file.into())))
                };
                Ok(CalicoStore::Etcd(EtcdSettings {
                    endpoints,
                    user: text(etcd_username),
                    password: text(etcd_password),
                    authority: pem(etcd_ca_cert, etcd_ca_cert_file),
                    certificate: pem(etcd_cert, etcd_cert_file),
                    key: pem(etcd_key, etcd_key_file),
                }))
            }
            "kubernetes" | "" => {
                let skips = if k8s_insecure_skip_tls_verify { "true" } else { "" };
                let remedy = "name it in a kubeconfig, and that as kubeconfig";
                unsupported(&[
                    (
                        "kubeconfigInline",
                        &kubeconfig_inline,
                        "write it to a file, and name that as kubeconfig",
                    ),
                    ("k8sAPIEndpoint", &k8s_api_endpoint, remedy),
                    ("k8sKeyFile", &k8s_key_file, remedy),
                    ("k8sCertFile", &k8s_cert_file, remedy),
                    ("k8sCAFile", &k8s_ca_file, remedy),
                    ("k8sAPIToken", &k8s_api_token, remedy),
                    ("k8sInsecureSkipTLSVerify", skips, remedy),
                    ("calicoAPIGroup", &calico_api_group, "name the group with --calico-group"),
                    ("k8sCurrentContext", &k8s_current_context, "set current-context in the kubeconfig"),
                ])?;
                Ok(CalicoStore::Kubernetes(
                    Some(kubeconfig).filter(|file| !file.is_empty()).map(PathBuf::from),
                ))
            }
            other => Err(format!("datastoreType {other:?} is neither kubernetes nor etcdv3")),
        }
    }
}

impl EtcdSettings {
    /// The addresses of the members.
    pub(crate) fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// The configuration of the client.
    ///
    /// # Errors
    /// A file cannot be read, or a part of the certificates or of the login is missing.
    pub(crate) fn config(&self) -> anyhow::Result<EtcdConfig> {
        let Self { endpoints, user, password, authority: _, certificate: _, key: _ } = self;
        let has_tls = endpoints.iter().any(|url| url.starts_with("https:"));
        anyhow::ensure!(
            !has_tls || endpoints.iter().all(|url| url.starts_with("https:")),
            "etcdEndpoints mixes http and https; use https for all members"
        );
        let tls = if has_tls { Some(self.certificates()?) } else { None };
        let login = match (user, password) {
            (None, None) => None,
            (Some(user), Some(password)) => Some(Login { user: user.clone(), password: password.clone() }),
            _ => anyhow::bail!("etcdUsername and etcdPassword are needed together"),
        };
        Ok(EtcdConfig { endpoints: endpoints.clone(), tls, login })
    }

    /// Files are read again for each connection.
    fn certificates(&self) -> anyhow::Result<Certificates> {
        let Self { authority, certificate, key, .. } = self;
        if let (Some(Pem::File(authority)), Some(Pem::File(certificate)), Some(Pem::File(key))) =
            (authority, certificate, key)
        {
            let [authority, certificate, key] = [authority, certificate, key].map(PathBuf::from);
            return Ok(TlsFiles { authority, certificate, key }.into());
        }
        let read = |name: &str, pem: &Option<Pem>| match pem {
            None => anyhow::bail!("etcdEndpoints has https, so {name} is needed"),
            Some(Pem::Inline(text)) => Ok(text.clone()),
            Some(Pem::File(file)) => crate::filenames::read(file),
        };
        let authority = read("etcdCACertFile", authority)?;
        let (certificate, key) = (read("etcdCertFile", certificate)?, read("etcdKeyFile", key)?);
        Ok(TlsIdentity { authority, certificate, key }.into())
    }
}

/// The configuration of the client for `kubeconfig`.
pub(crate) fn kubernetes(kubeconfig: Option<&PathBuf>) -> KubernetesConfig {
    kubeconfig.map_or(KubernetesConfig::Inferred, |file| KubernetesConfig::Kubeconfig(file.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etcd(endpoints: &[&str]) -> EtcdSettings {
        EtcdSettings {
            endpoints: endpoints.iter().map(|url| (*url).to_owned()).collect(),
            ..EtcdSettings::default()
        }
    }

    #[test]
    fn files_of_calicoctl_are_understood() {
        let file = |spec: &str| {
            of_file(&format!(
                "apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nmetadata:\nspec: {{{spec}}}\n"
            ))
        };
        let with_tls = EtcdSettings {
            authority: Some(Pem::File("/ca".into())),
            certificate: Some(Pem::File("/cert".into())),
            key: Some(Pem::Inline("KEY".to_owned())),
            user: Some("root".to_owned()),
            password: Some("secret".to_owned()),
            ..etcd(&["https://a:2379", "https://b:2379"])
        };
        for (spec, expected) in [
            (
                "datastoreType: etcdv3, etcdEndpoints: 'http://a:1'",
                Ok(CalicoStore::Etcd(etcd(&["http://a:1"]))),
            ),
            (
                "datastoreType: etcdv3, etcdEndpoints: 'https://a:2379, https://b:2379', etcdCACertFile: /ca, etcdCertFile: /cert, \
                 etcdKeyFile: /key, etcdKey: KEY, etcdUsername: root, etcdPassword: secret",
                Ok(CalicoStore::Etcd(with_tls)),
            ),
            ("datastoreType: kubernetes, kubeconfig: /k", Ok(CalicoStore::Kubernetes(Some("/k".into())))),
            // calicoctl takes it for etcd. With the Kubernetes API, another datastore would be changed without a word.
            ("etcdEndpoints: 'http://a:1'", Ok(CalicoStore::Etcd(etcd(&["http://a:1"])))),
            ("", Ok(CalicoStore::Kubernetes(None))),
            ("usePodCIDR: true, k8sClientBurst: 9", Ok(CalicoStore::Kubernetes(None))),
            ("calicoAPIGroup: projectcalico.org/v3", Err("--calico-group")),
            ("k8sUsePodCIDR: true", Ok(CalicoStore::Kubernetes(None))),
            ("datastoreType: etcdv3", Err("etcdEndpoints names no member")),
            ("datastoreType: etcdv3, etcdDiscoverySrv: x", Err("etcdDiscoverySrv is not supported")),
            ("datastoreType: consul", Err("neither kubernetes nor etcdv3")),
            ("k8sAPIEndpoint: 'https://a'", Err("k8sAPIEndpoint is not supported")),
            ("k8sInsecureSkipTLSVerify: true", Err("k8sInsecureSkipTLSVerify is not supported")),
            ("k8sCurrentContext: x", Err("set current-context")),
            ("nonsense: x", Err("unknown field")),
        ] {
            match (file(spec), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{spec}"),
                (Err(problem), Err(expected)) => assert!(problem.contains(expected), "{spec}: {problem}"),
                (found, _) => panic!("{spec}: {found:?}"),
            }
        }
        assert!(of_file("apiVersion: v1\nkind: Config\n").unwrap_err().contains("kind CalicoAPIConfig"));
        assert!(of_file("a\n---\nb\n").unwrap_err().contains("one document"));
    }

    #[test]
    fn environments_of_calicoctl_are_understood() {
        for (variables, expected) in [
            (&[("KUBECONFIG", "/k")][..], Ok(None)),
            (&[("ETCD_ENDPOINTS", "http://a:1")], Ok(None)),
            (
                &[("DATASTORE_TYPE", "etcdv3"), ("ETCD_ENDPOINTS", "http://a:1")],
                Ok(Some(CalicoStore::Etcd(etcd(&["http://a:1"])))),
            ),
            (
                &[
                    ("CALICO_DATASTORE_TYPE", "etcdv3"),
                    ("CALICO_ETCD_ENDPOINTS", "http://a:1"),
                    ("ETCD_ENDPOINTS", "http://b:1"),
                ],
                Ok(Some(CalicoStore::Etcd(etcd(&["http://a:1"])))),
            ),
            (
                &[("DATASTORE_TYPE", "kubernetes"), ("KUBECONFIG", "/k")],
                Ok(Some(CalicoStore::Kubernetes(Some("/k".into())))),
            ),
            (&[("DATASTORE_TYPE", "kubernetes"), ("K8S_API_ENDPOINT", "x")], Err("k8sAPIEndpoint")),
        ] {
            let value = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            match (of_environment(value), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{variables:?}"),
                (Err(problem), Err(expected)) => {
                    assert!(problem.contains(expected), "{variables:?}: {problem}")
                }
                (found, _) => panic!("{variables:?}: {found:?}"),
            }
        }
    }

    #[test]
    fn incomplete_settings_of_etcd_are_errors() {
        let settings = etcd(&["https://a:1"]);
        for (settings, expected) in [
            (settings.clone(), "etcdCACertFile is needed"),
            (
                EtcdSettings { authority: Some(Pem::Inline("A".to_owned())), ..settings.clone() },
                "etcdCertFile is needed",
            ),
            (EtcdSettings { authority: Some(Pem::File("/nonexistent".into())), ..settings }, "/nonexistent"),
            (EtcdSettings { user: Some("u".to_owned()), ..etcd(&["http://a:1"]) }, "needed together"),
            (etcd(&["http://a:1", "https://b:1"]), "mixes http and https"),
        ] {
            let error = format!("{:#}", settings.config().err().unwrap());
            assert!(error.contains(expected), "{error}");
        }
        assert!(etcd(&["http://a:1"]).config().is_ok());
    }
}
