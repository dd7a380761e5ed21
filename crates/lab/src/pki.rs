//! Certificates of the lab: an authority, one for the datastore, and one for each node.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tortie_store::rpc::TlsIdentity;

use crate::LabError;

/// The lab's authority; its key stays in this process.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Result<Self, LabError> {
        let mut params = CertificateParams::new([])?;
        params.distinguished_name.push(DnType::CommonName, "tortie lab");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate()?)? })
    }

    /// Issues a certificate for this name.
    pub(crate) fn issue(&self, name: &str) -> Result<TlsIdentity, LabError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new([name.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(TlsIdentity {
            authority: self.issuer.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}
