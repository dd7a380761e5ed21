//! Certificates of the lab: an authority, one for the datastore, and one for each node.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tortie_store::rpc::{TlsIdentity, node_subject};

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

    /// Issues a certificate for this name, for a server or for a client whose role does not matter.
    pub(crate) fn issue(&self, name: &str) -> Result<TlsIdentity, LabError> {
        self.issue_as(name, None, name)
    }

    /// Issues the certificate of a node's agent.
    pub(crate) fn issue_for_node(&self, node: &str) -> Result<TlsIdentity, LabError> {
        let (organisation, common_name) = node_subject(node);
        self.issue_as(node, Some(organisation), &common_name)
    }

    fn issue_as(
        &self,
        name: &str,
        organisation: Option<&str>,
        common_name: &str,
    ) -> Result<TlsIdentity, LabError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new([name.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, common_name);
        if let Some(organisation) = organisation {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
        }
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(TlsIdentity {
            authority: self.issuer.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }
}
