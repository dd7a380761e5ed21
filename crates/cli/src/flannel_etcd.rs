//! The options of an agent whose cluster has flannel's leases in etcd. They are named as those of flanneld.

use std::path::PathBuf;

use anyhow::{Context, bail};
use tortie_agent::FlannelEtcd;
use tortie_store::etcd::{Etcd, EtcdConfig, Login};
use tortie_store::rpc::TlsFiles;

const PASSWORD: &str = "TORTIE_FLANNEL_ETCD_PASSWORD";

/// Where flannel's daemons without `--kube-subnet-mgr` keep their leases.
#[derive(clap::Args, Default)]
pub(crate) struct FlannelEtcdArguments {
    /// With --flannel: the URLs of flannel's etcd. Pods then have the addresses of a subnet that the agent leases
    /// there, as flanneld without --kube-subnet-mgr, and not those of spec.podCIDRs
    #[arg(
        long,
        env = "TORTIE_FLANNEL_ETCD",
        value_name = "URL",
        value_delimiter = ',',
        requires = "flannel"
    )]
    flannel_etcd: Vec<String>,
    /// With --flannel-etcd: what the keys of flannel begin with, as flanneld's --etcd-prefix [default: /coreos.com/network]
    #[arg(long, env = "TORTIE_FLANNEL_ETCD_PREFIX", value_name = "PREFIX", requires = "flannel_etcd")]
    flannel_etcd_prefix: Option<String>,
    /// With --flannel-etcd and https: the certificate of the authority of etcd (PEM), as flanneld's --etcd-cafile
    #[arg(long, env = "TORTIE_FLANNEL_ETCD_CAFILE", value_name = "FILE", requires = "flannel_etcd")]
    flannel_etcd_cafile: Option<PathBuf>,
    /// With --flannel-etcd and https: the agent's certificate (PEM), as flanneld's --etcd-certfile
    #[arg(long, env = "TORTIE_FLANNEL_ETCD_CERTFILE", value_name = "FILE", requires = "flannel_etcd")]
    flannel_etcd_certfile: Option<PathBuf>,
    /// With --flannel-etcd and https: the key of the agent's certificate (PEM), as flanneld's --etcd-keyfile
    #[arg(long, env = "TORTIE_FLANNEL_ETCD_KEYFILE", value_name = "FILE", requires = "flannel_etcd")]
    flannel_etcd_keyfile: Option<PathBuf>,
    /// With --flannel-etcd: the user of etcd, if it demands one; the password is in TORTIE_FLANNEL_ETCD_PASSWORD
    #[arg(long, env = "TORTIE_FLANNEL_ETCD_USERNAME", value_name = "NAME", requires = "flannel_etcd")]
    flannel_etcd_username: Option<String>,
}

impl FlannelEtcdArguments {
    /// flannel's etcd, if there is one. Connects to nothing.
    pub(crate) fn open(&self) -> anyhow::Result<Option<FlannelEtcd>> {
        let endpoints: Vec<String> =
            self.flannel_etcd.iter().filter(|url| !url.is_empty()).cloned().collect();
        if self.flannel_etcd.is_empty() {
            return Ok(None);
        }
        if endpoints.is_empty() {
            bail!(
                "--flannel-etcd (TORTIE_FLANNEL_ETCD) is empty; give it the URLs of flannel's etcd, or remove it"
            );
        }
        if endpoints.iter().any(|url| url.contains('@')) {
            bail!(
                "a URL of --flannel-etcd has a user; remove it there, and use --flannel-etcd-username and TORTIE_FLANNEL_ETCD_PASSWORD"
            );
        }
        let prefix = self.flannel_etcd_prefix.as_deref().unwrap_or("/coreos.com/network");
        if !prefix.starts_with('/') {
            bail!(
                "--flannel-etcd-prefix {prefix} does not begin with a slash, and Tortie knows only such keys; use /{prefix} in flanneld's --etcd-prefix, too"
            );
        }
        let has_tls = |url: &String| url.starts_with("https:");
        let shown = endpoints.join(",");
        if let Some(odd) = endpoints.iter().find(|url| !has_tls(url) && !url.starts_with("http:")) {
            bail!("--flannel-etcd {odd} begins with neither http: nor https:");
        }
        let uses_tls = endpoints.iter().any(has_tls);
        if uses_tls && !endpoints.iter().all(has_tls) {
            bail!("--flannel-etcd {shown} mixes http and https; use https for all members");
        }
        let files = [
            ("cafile", &self.flannel_etcd_cafile),
            ("certfile", &self.flannel_etcd_certfile),
            ("keyfile", &self.flannel_etcd_keyfile),
        ];
        let tls = if uses_tls {
            let [authority, certificate, key] = files.map(|(option, file)| {
                file.clone().with_context(|| format!("--flannel-etcd {shown} needs --flannel-etcd-{option}"))
            });
            Some(TlsFiles { authority: authority?, certificate: certificate?, key: key? }.into())
        } else {
            if let Some((option, _)) = files.iter().find(|(_, file)| file.is_some()) {
                bail!(
                    "--flannel-etcd-{option} has no effect with --flannel-etcd {shown}, which is not encrypted"
                );
            }
            None
        };
        let login = login(self.flannel_etcd_username.as_deref(), std::env::var(PASSWORD).ok())?;
        let etcd = Etcd::new(EtcdConfig { endpoints, tls, login }).context("--flannel-etcd")?;
        Ok(Some(FlannelEtcd::new(etcd, prefix)))
    }
}

fn login(user: Option<&str>, password: Option<String>) -> anyhow::Result<Option<Login>> {
    match (user, password.filter(|password| !password.is_empty())) {
        (Some(user), Some(password)) => Ok(Some(Login { user: user.to_owned(), password })),
        (Some(user), None) => bail!("--flannel-etcd-username {user} needs {PASSWORD}"),
        (None, Some(_)) => bail!("{PASSWORD} needs --flannel-etcd-username (TORTIE_FLANNEL_ETCD_USERNAME)"),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `open` reads no file and connects to nothing before these errors.
    #[tokio::test]
    async fn options_that_do_not_fit_are_errors() {
        let file = || Some(PathBuf::from("/nonexistent"));
        for (urls, cafile, certfile, expected) in [
            (&[][..], None, None, None),
            (&["http://h:1", "http://h:2"], None, None, None),
            (&[""], None, None, Some("TORTIE_FLANNEL_ETCD) is empty")),
            (&["http://u:secret@h:1"], None, None, Some("use --flannel-etcd-username")),
            (&["h:1"], None, None, Some("neither http: nor https:")),
            (&["http://h:1", "https://h:2"], None, None, Some("mixes http and https")),
            (&["https://h:2"], None, None, Some("needs --flannel-etcd-cafile")),
            (&["https://h:2"], file(), None, Some("needs --flannel-etcd-certfile")),
            (&["https://h:2"], file(), file(), Some("needs --flannel-etcd-keyfile")),
            (&["http://h:1"], None, file(), Some("--flannel-etcd-certfile has no effect")),
        ] {
            let arguments = FlannelEtcdArguments {
                flannel_etcd: urls.iter().map(|url| (*url).to_owned()).collect(),
                flannel_etcd_cafile: cafile,
                flannel_etcd_certfile: certfile,
                ..FlannelEtcdArguments::default()
            };
            let error = arguments.open().err().map(|error| error.to_string());
            let fits = error
                .as_ref()
                .zip(expected)
                .map_or(error.is_none() && expected.is_none(), |(error, expected)| error.contains(expected));
            assert!(fits, "{urls:?}: {error:?}");
            assert!(error.is_none_or(|error| !error.contains("secret")));
        }
        let prefix = Some("coreos.com/network".to_owned());
        let flannel_etcd = vec!["http://h:1".to_owned()];
        let relative = FlannelEtcdArguments {
            flannel_etcd,
            flannel_etcd_prefix: prefix,
            ..FlannelEtcdArguments::default()
        };
        let error = relative.open().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("does not begin with a slash"), "{error}");
    }

    #[test]
    fn user_and_password_belong_together() {
        for (user, password, expected) in [
            (None, None, Ok(false)),
            (Some("u"), Some("p"), Ok(true)),
            (Some("u"), None, Err("--flannel-etcd-username u needs TORTIE_FLANNEL_ETCD_PASSWORD")),
            (Some("u"), Some(""), Err("--flannel-etcd-username u needs TORTIE_FLANNEL_ETCD_PASSWORD")),
            (None, Some("p"), Err("TORTIE_FLANNEL_ETCD_PASSWORD needs --flannel-etcd-username")),
        ] {
            match (login(user, password.map(str::to_owned)), expected) {
                (Ok(login), Ok(expected)) => assert_eq!(login.is_some(), expected),
                (Err(error), Err(expected)) => assert!(error.to_string().starts_with(expected), "{error}"),
                (login, _) => panic!("{user:?} {password:?}: {:?}", login.err()),
            }
        }
    }
}
