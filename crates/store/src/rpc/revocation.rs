//! Certificates that their authority has revoked. A file has the authority's list (RFC 5280, a certificate revocation list), and is
//! read again for each connection and regularly, because connections last.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tokio::sync::watch;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::revocation_list::CertificateRevocationList;

use crate::StoreError;

/// Why a certificate or a list of revoked certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct RevocationError(String);

/// Identifies a certificate: its authority and its number there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CertificateId {
    /// The authority's name (DER).
    issuer: Vec<u8>,
    serial: Vec<u8>,
}

impl CertificateId {
    /// That of the first certificate in a text (PEM), if one of these authorities (PEM) has issued it.
    ///
    /// # Errors
    /// There is no certificate, or another authority has issued it.
    pub fn of_pem(certificate: &str, authorities: &str) -> Result<Self, RevocationError> {
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(unusable("it has no certificate in PEM form"))?;
        let certificate = parsed(&der)?;
        let has_issued = |authority: &X509Certificate<'_>| {
            certificate.verify_signature(Some(authority.public_key())).is_ok()
        };
        match any_authority(authorities, has_issued) {
            true => Ok(Self::of(&certificate)),
            false => Err(RevocationError("another authority has issued the certificate".to_owned())),
        }
    }

    pub(crate) fn of(certificate: &X509Certificate<'_>) -> Self {
        let (issuer, serial) = (certificate.issuer().as_raw().to_vec(), certificate.serial.to_bytes_be());
        Self { issuer, serial }
    }

    /// The certificate's number, as a positive number in network byte order.
    #[must_use]
    pub fn serial(&self) -> &[u8] {
        &self.serial
    }
}

/// Revoked certificates, each with the time of its revocation in seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RevocationList(pub BTreeMap<CertificateId, i64>);

impl RevocationList {
    /// Reads the lists in a text (PEM). One of the authorities (PEM) must have signed each.
    ///
    /// # Errors
    /// There is no list, or one cannot be read, or nobody of these has signed it.
    pub fn parse(lists: &str, authorities: &str) -> Result<Self, RevocationError> {
        let mut all = BTreeMap::new();
        let mut count = 0;
        for der in CertificateRevocationListDer::pem_slice_iter(lists.as_bytes()) {
            let der = der.map_err(unusable("the list of revoked certificates"))?;
            let (_, list) = CertificateRevocationList::from_der(&der)
                .map_err(unusable("the list of revoked certificates"))?;
            // A list of the changes since another one, or one of several authorities, means something else.
            if let Some(extension) = list.extensions().iter().find(|extension| extension.critical) {
                let problem = format!(
                    "the list of revoked certificates has the extension {}, which is not supported",
                    extension.oid
                );
                return Err(RevocationError(problem));
            }
            let has_signed =
                |authority: &X509Certificate<'_>| list.verify_signature(authority.public_key()).is_ok();
            if !any_authority(authorities, has_signed) {
                let message = "the authority has not signed the list of revoked certificates";
                return Err(RevocationError(message.to_owned()));
            }
            all.extend(list.iter_revoked_certificates().map(|revoked| {
                let issuer = list.issuer().as_raw().to_vec();
                let id = CertificateId { issuer, serial: revoked.user_certificate.to_bytes_be() };
                (id, revoked.revocation_date.timestamp())
            }));
            count += 1;
        }
        match count {
            0 => Err(RevocationError("the file has no list of revoked certificates (X509 CRL)".to_owned())),
            _ => Ok(Self(all)),
        }
    }
}

impl RevocationList {
    fn has_any(&self, chain: &[CertificateId]) -> bool {
        chain.iter().any(|id| self.0.contains_key(id))
    }
}

fn any_authority(authorities: &str, is_it: impl Fn(&X509Certificate<'_>) -> bool) -> bool {
    // TLS does not use one that cannot be read either.
    let mut authorities = CertificateDer::pem_slice_iter(authorities.as_bytes()).filter_map(Result::ok);
    authorities.any(|der| parsed(&der).is_ok_and(|authority| is_it(&authority)))
}

fn parsed(der: &[u8]) -> Result<X509Certificate<'_>, RevocationError> {
    X509Certificate::from_der(der).map(|(_, certificate)| certificate).map_err(unusable("the certificate"))
}

fn unusable<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> RevocationError {
    move |error| RevocationError(format!("{what}: {error}"))
}

/// The list that a service follows.
pub(crate) struct Revocations {
    /// `None` if the operator gives no list.
    file: Option<PathBuf>,
    /// The file and the authorities that the list is from.
    read: (String, String),
    list: watch::Sender<RevocationList>,
    failed: bool,
}

impl Revocations {
    /// # Errors
    /// The file cannot be read or used.
    pub(crate) fn new(file: Option<PathBuf>, authorities: &str) -> Result<Self, StoreError> {
        let list = watch::Sender::new(RevocationList::default());
        let mut new = Self { file, read: Default::default(), list, failed: false };
        new.read(authorities)?;
        Ok(new)
    }

    /// Reads the file again. A list that cannot be used leaves the previous one in use: a certificate that was revoked stays so.
    pub(crate) fn refresh(&mut self, authorities: &str) {
        let read = self.read(authorities);
        match &read {
            Err(error) if !self.failed => tracing::warn!(
                %error,
                "the list of revoked certificates cannot be used; Tortie continues with the previous one, and retries"
            ),
            _ => {}
        }
        self.failed = read.is_err();
    }

    fn read(&mut self, authorities: &str) -> Result<(), StoreError> {
        let Some(file) = &self.file else { return Ok(()) };
        let failed = |error: String| StoreError::Unavailable(format!("{}: {error}", file.display()));
        let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
        if self.read.0 == text && self.read.1 == authorities {
            return Ok(());
        }
        let list = RevocationList::parse(&text, authorities).map_err(|error| failed(error.to_string()))?;
        tracing::info!(file = %file.display(), revoked = list.0.len(), "read the list of revoked certificates");
        self.list.send_replace(list);
        self.read = (text, authorities.to_owned());
        Ok(())
    }

    /// Whether one of these certificates is revoked.
    pub(crate) fn has_any(&self, chain: &[CertificateId]) -> bool {
        self.list.borrow().has_any(chain)
    }

    /// Resolves when one of these certificates is revoked.
    pub(crate) fn revocation(&self, chain: Vec<CertificateId>) -> impl Future<Output = ()> + Send + 'static {
        let mut list = self.list.subscribe();
        async move {
            let revoked = list.wait_for(|list| list.has_any(&chain)).await.is_ok();
            if !revoked {
                std::future::pending::<()>().await;
            }
        }
    }
}
