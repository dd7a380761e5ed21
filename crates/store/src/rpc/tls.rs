//! The certificates of a service or client. Files are read again for each connection, so a renewed certificate is used
//! without a restart.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, ToSocketAddrs};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::StoreError;

/// The protocol that gRPC needs.
const ALPN: &[u8] = b"h2";

/// With this, errors begin that say that nothing was sent. hyper's connector without TLS begins them with it, too.
pub(crate) const CONNECT_ERROR: &str = "tcp connect error";

/// The certificates and the key for mutual TLS, in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// The certificate of the authority that both sides trust.
    pub authority: String,
    /// This side's certificate.
    pub certificate: String,
    /// The key of this side's certificate.
    pub key: String,
}

/// The files of a [`TlsIdentity`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of the authority that both sides trust.
    pub authority: PathBuf,
    /// This side's certificate.
    pub certificate: PathBuf,
    /// The key of this side's certificate.
    pub key: PathBuf,
}

impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(&self) -> Result<TlsIdentity, StoreError> {
        let read = |path: &Path| {
            std::fs::read_to_string(path)
                .map_err(|error| StoreError::Unavailable(format!("{}: {error}", path.display())))
        };
        Ok(TlsIdentity {
            authority: read(&self.authority)?,
            certificate: read(&self.certificate)?,
            key: read(&self.key)?,
        })
    }
}

/// Where the certificates of a service or client come from.
#[derive(Clone)]
pub enum Certificates {
    /// They never change.
    Fixed(TlsIdentity),
    /// Files, which may change.
    Files(TlsFiles),
}

impl From<TlsIdentity> for Certificates {
    fn from(identity: TlsIdentity) -> Self {
        Self::Fixed(identity)
    }
}

impl From<TlsFiles> for Certificates {
    fn from(files: TlsFiles) -> Self {
        Self::Files(files)
    }
}

/// A configuration that follows the files of its certificates.
pub(crate) struct Reloaded<C> {
    certificates: Certificates,
    build: fn(&TlsIdentity) -> Result<C, StoreError>,
    current: Mutex<(TlsIdentity, Arc<C>)>,
}

impl<C> Reloaded<C> {
    /// # Errors
    /// The certificates cannot be read or used.
    pub(crate) fn new(
        certificates: Certificates,
        build: fn(&TlsIdentity) -> Result<C, StoreError>,
    ) -> Result<Self, StoreError> {
        let identity = match &certificates {
            Certificates::Fixed(identity) => identity.clone(),
            Certificates::Files(files) => files.read()?,
        };
        let config = Arc::new(build(&identity)?);
        Ok(Self { certificates, build, current: Mutex::new((identity, config)) })
    }

    /// The configuration for a new connection. Files that are missing or do not fit together, for instance because they
    /// are being replaced one after another, leave the previous configuration in use.
    pub(crate) fn get(&self) -> Arc<C> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let Certificates::Files(files) = &self.certificates else { return current.1.clone() };
        let changed = files.read().and_then(|identity| match identity == current.0 {
            true => Ok(None),
            false => (self.build)(&identity).map(|config| Some((identity, Arc::new(config)))),
        });
        match changed {
            Ok(None) => {}
            Ok(Some(changed)) => {
                tracing::info!(certificate = %files.certificate.display(), "the TLS certificates have changed");
                *current = changed;
            }
            Err(error) => {
                tracing::warn!(%error, "the TLS certificates cannot be used; Tortie continues with the previous ones");
            }
        }
        current.1.clone()
    }
}

impl Reloaded<ClientConfig> {
    /// A new connection to a service that has this name in its certificate.
    ///
    /// # Errors
    /// The service does not accept the connection, or its certificate is of another authority.
    pub(crate) async fn connect(
        &self,
        address: impl ToSocketAddrs,
        name: ServerName<'static>,
    ) -> io::Result<TokioIo<TlsStream<TcpStream>>> {
        let stream = TcpStream::connect(address).await;
        let stream =
            stream.map_err(|error| io::Error::new(error.kind(), format!("{CONNECT_ERROR}: {error}")))?;
        stream.set_nodelay(true)?;
        Ok(TokioIo::new(TlsConnector::from(self.get()).connect(name, stream).await?))
    }
}

/// The configuration of a service: clients need a certificate of the authority.
pub(crate) fn for_server(identity: &TlsIdentity) -> Result<ServerConfig, StoreError> {
    let provider = provider();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(identity)?), provider.clone());
    let verifier = verifier.build().map_err(unusable("the authority's certificate"))?;
    let (certificates, key) = own(identity)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable("TLS"))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates, key)
        .map_err(unusable("the certificate and its key"))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

/// The configuration of a client.
pub(crate) fn for_client(identity: &TlsIdentity) -> Result<ClientConfig, StoreError> {
    let (certificates, key) = own(identity)?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(unusable("TLS"))?
        .with_root_certificates(roots(identity)?)
        .with_client_auth_cert(certificates, key)
        .map_err(unusable("the certificate and its key"))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn roots(identity: &TlsIdentity) -> Result<RootCertStore, StoreError> {
    let what = "the authority's certificate";
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(identity.authority.as_bytes()) {
        roots.add(certificate.map_err(unusable(what))?).map_err(unusable(what))?;
    }
    match roots.is_empty() {
        true => Err(unusable(what)("it contains no certificate in PEM form")),
        false => Ok(roots),
    }
}

fn own(identity: &TlsIdentity) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), StoreError> {
    let certificates: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).collect();
    let certificates = certificates.map_err(unusable("the certificate"))?;
    if certificates.is_empty() {
        return Err(unusable("the certificate")("it is not in PEM form"));
    }
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).map_err(unusable("the key"))?;
    Ok((certificates, key))
}

fn unusable<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> StoreError {
    move |error| StoreError::Unavailable(format!("{what} cannot be used for TLS: {error}"))
}
