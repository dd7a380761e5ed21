//! What several test binaries share.
#![allow(dead_code, reason = "not every binary uses everything")]

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType, IsCa,
    KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber,
};
use tokio_rustls::rustls::client::WantsClientCert;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, ConfigBuilder, RootCertStore};
use tortie_api::Kind;
use tortie_store::rpc::{CertificateId, Limits, Remote, TlsIdentity, operator_subject, serve_tls};
use tortie_store::{Embedded, Source, Store};

/// A port of a loopback address that no other test of this process uses.
pub(crate) fn free_address() -> SocketAddr {
    static NUMBER: AtomicU8 = AtomicU8::new(2);
    let loopback = Ipv4Addr::new(127, 0, 0, NUMBER.fetch_add(1, Ordering::Relaxed));
    std::net::TcpListener::bind((loopback, 0)).unwrap().local_addr().unwrap()
}

/// An authority that issues certificates.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// An authority that this one has made, and its certificate.
    pub(crate) fn intermediate(&self) -> (Self, TlsIdentity) {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "intermediate");
        let issuer = CertifiedIssuer::signed_by(params, KeyPair::generate().unwrap(), &self.0).unwrap();
        let (authority, certificate) = (self.0.pem(), issuer.pem());
        (Self(issuer), TlsIdentity { authority, certificate, key: String::new() })
    }

    /// The certificate of an operator.
    pub(crate) fn operator(&self) -> TlsIdentity {
        self.issue(operator_subject("ann"))
    }

    /// The certificate of the service.
    pub(crate) fn server(&self) -> TlsIdentity {
        self.issue(("", "tortie-store".to_owned()))
    }

    /// A certificate for a subject: organisation (none, if it is empty) and common name.
    pub(crate) fn issue(&self, subject: (&str, String)) -> TlsIdentity {
        self.issue_with(subject, |_| {})
    }

    pub(crate) fn issue_with(
        &self,
        (organisation, name): (&str, String),
        change: impl FnOnce(&mut CertificateParams),
    ) -> TlsIdentity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new([name.replace(':', "-")]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        if !organisation.is_empty() {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
        }
        change(&mut params);
        let certificate = params.signed_by(&key, &self.0).unwrap();
        TlsIdentity { authority: self.0.pem(), certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// A list (PEM) of these revoked certificates.
pub(crate) fn revocation_list(authority: &Authority, revoked: &[&TlsIdentity]) -> String {
    let revoked = revoked.iter().map(|identity| {
        let id = CertificateId::of_pem(&identity.certificate, &identity.authority).unwrap();
        RevokedCertParams {
            serial_number: SerialNumber::from_slice(id.serial()),
            revocation_time: rcgen::date_time_ymd(2026, 1, 1),
            reason_code: None,
            invalidity_date: None,
        }
    });
    let params = CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2026, 1, 1),
        next_update: rcgen::date_time_ymd(2026, 1, 2),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: revoked.collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    params.signed_by(&authority.0).unwrap().pem().unwrap()
}

/// The configuration of a client for TLS, with the certificate of an identity.
pub(crate) fn tls_client(identity: &TlsIdentity) -> ClientConfig {
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
    let certificate = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap();
    tls_trusting(identity).with_client_auth_cert(vec![certificate], key).map(for_grpc).unwrap()
}

/// The same without a certificate.
pub(crate) fn tls_client_without_certificate(identity: &TlsIdentity) -> ClientConfig {
    for_grpc(tls_trusting(identity).with_no_client_auth())
}

fn tls_trusting(identity: &TlsIdentity) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(identity.authority.as_bytes()).unwrap()).unwrap();
    ClientConfig::builder_with_provider(ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
}

fn for_grpc(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

/// Waits until the service answers an operator.
///
/// The deadline is several times the client's timeout of a call (15 s), because one call can wait that long: the client's
/// HTTP library hands a request to its connection through a channel of tokio, and a channel whose receiver is dropped at
/// that moment can keep a message that nobody receives. On busy machines, one in some 10,000 connections that the
/// service closes at once shows it.
pub(crate) async fn answering(remote: Remote) -> Arc<dyn Store> {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = remote.list(Kind::Pod).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Arc::new(remote)
}

/// A store that is served with mutual TLS.
pub(crate) struct Served {
    pub(crate) store: Arc<Embedded>,
    pub(crate) authority: Authority,
    pub(crate) address: SocketAddr,
    server: tokio::task::JoinHandle<()>,
}

impl Served {
    pub(crate) async fn new(limits: Limits) -> Self {
        let (store, authority) = (Arc::new(Embedded::in_memory().unwrap()), Authority::new());
        let (address, certificates) = (free_address(), authority.server().into());
        let served: Arc<dyn Source> = store.clone();
        let server = tokio::spawn(async move {
            serve_tls(served, address, certificates, limits).await.unwrap();
        });
        while tokio::net::TcpStream::connect(address).await.is_err() {
            assert!(!server.is_finished(), "the service listens");
            tokio::task::yield_now().await;
        }
        Self { store, authority, address, server }
    }

    pub(crate) fn client(&self, identity: TlsIdentity) -> Remote {
        Remote::tls(&self.address.to_string(), identity).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.abort();
    }
}
