//! Certificates of servers and their clients.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};

use crate::Error;
use crate::error::write;

/// A certificate authority. Its key stays in this process.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
}

/// A certificate and its key, in PEM files.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Authority {
    /// Creates an authority that keeps its files in this folder.
    ///
    /// # Errors
    ///
    /// The certificate or its file cannot be created.
    pub fn new(folder: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Certificate { subject: "the authority".to_owned(), source };
        let mut params = CertificateParams::new([]).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, "tortie test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().map_err(failed)?;
        let issuer = CertifiedIssuer::self_signed(params, key).map_err(failed)?;
        let authority = Self { issuer, folder: folder.to_owned() };
        write(&authority.certificate(), &authority.issuer.pem())?;
        Ok(authority)
    }

    /// The file with the authority's certificate.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        self.folder.join("ca.crt")
    }

    /// Issues a certificate for servers on 127.0.0.1, which may also be used by clients.
    ///
    /// # Errors
    ///
    /// The certificate or its files cannot be created.
    pub fn server(&self, name: &str) -> Result<Identity, Error> {
        self.issue(name, &["127.0.0.1", "localhost"], &[], false)
    }

    /// Issues a certificate for a server of that name, on whatever host.
    ///
    /// # Errors
    ///
    /// The certificate or its files cannot be created.
    pub fn server_named(&self, name: &str) -> Result<Identity, Error> {
        self.issue(name, &[name], &[], false)
    }

    /// Issues a certificate for a server at these addresses and on 127.0.0.1.
    pub(crate) fn server_at(&self, name: &str, addresses: &[Ipv4Addr]) -> Result<Identity, Error> {
        let addresses: Vec<String> = addresses.iter().map(Ipv4Addr::to_string).collect();
        let mut hosts = vec!["127.0.0.1", "localhost"];
        hosts.extend(addresses.iter().map(String::as_str));
        self.issue(name, &hosts, &[], false)
    }

    /// Issues a client's certificate: the user is its common name, the groups are its organizations.
    ///
    /// # Errors
    ///
    /// The certificate or its files cannot be created.
    pub fn client(&self, user: &str, groups: &[&str]) -> Result<Identity, Error> {
        self.issue(user, &[], groups, false)
    }

    /// Issues a client's certificate that has expired.
    ///
    /// # Errors
    ///
    /// The certificate or its files cannot be created.
    pub fn expired_client(&self, user: &str, groups: &[&str]) -> Result<Identity, Error> {
        self.issue(user, &[], groups, true)
    }

    fn issue(&self, name: &str, hosts: &[&str], groups: &[&str], expired: bool) -> Result<Identity, Error> {
        let failed = |source| Error::Certificate { subject: name.to_owned(), source };
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut params = CertificateParams::new(hosts).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, name);
        for group in groups {
            params.distinguished_name.push(DnType::OrganizationName, *group);
        }
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if expired {
            params.not_before = rcgen::date_time_ymd(2001, 1, 1);
            params.not_after = rcgen::date_time_ymd(2001, 1, 2);
        }
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let stem = format!("{}{}", file_name(name), if expired { "-expired" } else { "" });
        let identity = Identity {
            certificate: self.folder.join(format!("{stem}.crt")),
            key: self.folder.join(format!("{stem}.key")),
        };
        write(&identity.certificate, &certificate.pem())?;
        write(&identity.key, &key.serialize_pem())?;
        Ok(identity)
    }
}

/// A name as part of a file's name: `system:admin` becomes `system_admin`.
pub(crate) fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' }).collect()
}
