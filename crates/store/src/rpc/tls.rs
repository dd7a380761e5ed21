//! The certificates of a service or client. Files are read again for each connection, so a renewed certificate is used
//! without a restart.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tonic::transport::Uri;
use tower::{BoxError, ServiceExt};

use crate::StoreError;

/// The protocol that gRPC needs.
const ALPN: &[u8] = b"h2";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

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

/// The certificates of a service, and those that it does not accept any more.
pub struct ServerIdentity {
    pub(crate) certificates: Certificates,
    /// The file with the authority's list of revoked certificates (CRL, PEM).
    pub(crate) revoked: Option<PathBuf>,
}

impl<C: Into<Certificates>> From<C> for ServerIdentity {
    fn from(certificates: C) -> Self {
        Self { certificates: certificates.into(), revoked: None }
    }
}

impl ServerIdentity {
    /// Refuses the certificates of clients that the authority's list in a file (CRL, PEM) names.
    #[must_use]
    pub fn with_revoked(self, revoked: Option<PathBuf>) -> Self {
        Self { revoked, ..self }
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

    /// The certificates of the authorities in use (PEM).
    pub(crate) fn authorities(&self) -> String {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).0.authority.clone()
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
    /// A new connection to the host and port of a URI, whose service has this name in its certificate. All addresses of the host are
    /// tried.
    ///
    /// # Errors
    /// The host does not accept the connection in time, or its certificate is of another authority, or it does not speak HTTP/2.
    pub(crate) async fn connect(
        &self,
        uri: Uri,
        name: ServerName<'static>,
    ) -> Result<TokioIo<TlsStream<TcpStream>>, BoxError> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let stream = tcp.oneshot(uri).await?.into_inner();
        let handshake = TlsConnector::from(self.get()).connect(name, stream);
        let late = |_| format!("the TLS handshake has taken longer than {} s", HANDSHAKE_TIMEOUT.as_secs());
        let stream = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await.map_err(late)??;
        if stream.get_ref().1.alpn_protocol() != Some(ALPN) {
            return Err("the service does not speak HTTP/2 over TLS".into());
        }
        Ok(TokioIo::new(stream))
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
        if let Err(error) = roots.add(certificate.map_err(unusable(what))?) {
            tracing::warn!(%error, "a certificate in the file of authorities cannot be used; Tortie does not trust it");
        }
    }
    match roots.is_empty() {
        true => Err(unusable(what)("the file contains no certificate of an authority in PEM form")),
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
