//! Who a client is: the role that its certificate names.
//!
//! | organisation (O) | common name (CN) | role |
//! |---|---|---|
//! | `tortie:nodes` | `system:node:NAME` | the agent of the node NAME |
//! | `tortie:components` | `controllers` | a component of the cluster |
//! | `tortie:operators` | a name for logs | an operator |
//!
//! A certificate has exactly one of each. Certificates of other forms authenticate their owner, who may do nothing.

use std::fmt;
use std::time::{Duration, SystemTime};

use tokio_rustls::rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::AttributeTypeAndValue;

use super::revocation::CertificateId;
use crate::StoreError;

const NODES: &str = "tortie:nodes";
const COMPONENTS: &str = "tortie:components";
const OPERATORS: &str = "tortie:operators";
const NODE_PREFIX: &str = "system:node:";

/// The role of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// The agent of this node.
    Node(String),
    /// Tortie's controllers.
    Controllers,
    /// Somebody who may do everything; the name is for logs.
    Operator(String),
    /// None: the subject of the certificate names no role.
    None(String),
}

impl Role {
    /// The organisation and the common name that a certificate of this role has.
    #[must_use]
    pub(crate) fn subject(&self) -> (&'static str, String) {
        match self {
            Self::Node(name) => (NODES, format!("{NODE_PREFIX}{name}")),
            Self::Controllers => (COMPONENTS, "controllers".to_owned()),
            Self::Operator(name) => (OPERATORS, name.clone()),
            Self::None(subject) => ("", subject.clone()),
        }
    }

    /// The role of a subject with these organisations and common names.
    fn of_subject(organisations: &[&str], names: &[&str]) -> Option<Self> {
        let ([organisation], [name]) = (organisations, names) else { return None };
        match (*organisation, *name) {
            (NODES, name) => {
                let node = name.strip_prefix(NODE_PREFIX).filter(|node| !node.is_empty())?;
                Some(Self::Node(node.to_owned()))
            }
            (COMPONENTS, "controllers") => Some(Self::Controllers),
            (OPERATORS, name) if !name.is_empty() => Some(Self::Operator(name.to_owned())),
            _ => None,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "node {name}"),
            Self::Controllers => f.write_str("component controllers"),
            Self::Operator(name) => write!(f, "operator {name}"),
            Self::None(subject) => write!(f, "the client with the certificate {subject:?}"),
        }
    }
}

/// The subject of the certificate of a node's agent: organisation and common name.
#[must_use]
pub fn node_subject(node: &str) -> (&'static str, String) {
    Role::Node(node.to_owned()).subject()
}

/// The subject of the certificate of the controllers: organisation and common name.
#[must_use]
pub fn controllers_subject() -> (&'static str, String) {
    Role::Controllers.subject()
}

/// The subject of the certificate of an operator: organisation and common name.
#[must_use]
pub fn operator_subject(name: &str) -> (&'static str, String) {
    Role::Operator(name.to_owned()).subject()
}

/// A client that has proved who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    pub(crate) role: Role,
    /// The end of its certificate.
    pub(crate) expires: Option<SystemTime>,
    /// Its certificate, and those of the authorities between it and the trusted one.
    pub(crate) chain: Vec<CertificateId>,
}

impl Client {
    /// A peer of the Unix socket.
    #[cfg(any(unix, test))]
    pub(crate) fn on_socket() -> Self {
        Self { role: Role::Operator("on the Unix socket".to_owned()), expires: None, chain: Vec::new() }
    }

    /// The owner of the first certificate (DER). The further ones lead to the trusted authority.
    ///
    /// # Errors
    /// There is none, or one cannot be read.
    pub(crate) fn of_certificates(chain: &[CertificateDer<'_>]) -> Result<Self, StoreError> {
        let unreadable =
            |problem: String| StoreError::Forbidden(format!("the client's certificate {problem}"));
        let read = |der| X509Certificate::from_der(der).map(|(_, certificate)| certificate);
        let chain: Result<Vec<_>, _> = chain.iter().map(|der| read(der)).collect();
        let chain = chain.map_err(|error| unreadable(format!("cannot be read: {error}")))?;
        let certificate = chain.first().ok_or_else(|| unreadable("is missing".to_owned()))?;
        let subject = certificate.subject();
        let organisations: Option<Vec<&str>> = subject.iter_organization().map(text).collect();
        let names: Option<Vec<&str>> = subject.iter_common_name().map(text).collect();
        let role = organisations
            .zip(names)
            .and_then(|(organisations, names)| Role::of_subject(&organisations, &names));
        let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
        Ok(Self {
            role: role.unwrap_or_else(|| Role::None(subject.to_string())),
            expires: SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(end)),
            chain: chain.iter().map(CertificateId::of).collect(),
        })
    }
}

fn text<'a>(attribute: &'a AttributeTypeAndValue<'_>) -> Option<&'a str> {
    attribute.as_str().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_named_by_one_organisation_and_one_name() {
        let node = |name: &str| Some(Role::Node(name.to_owned()));
        let operator = |name: &str| Some(Role::Operator(name.to_owned()));
        let table: [(&[&str], &[&str], Option<Role>); 15] = [
            (&["tortie:nodes"], &["system:node:minion"], node("minion")),
            (&["tortie:nodes"], &["system:node:"], None),
            (&["tortie:nodes"], &["minion"], None),
            (&["tortie:nodes"], &[], None),
            (&["tortie:nodes"], &["system:node:a", "system:node:b"], None),
            (&["tortie:nodes", "tortie:operators"], &["system:node:minion"], None),
            (&["system:nodes"], &["system:node:minion"], None),
            (&[], &["system:node:minion"], None),
            (&[], &["tortie-store"], None),
            (&["tortie:components"], &["controllers"], Some(Role::Controllers)),
            (&["tortie:components"], &["something-new"], None),
            (&["tortie:operators"], &["ann"], operator("ann")),
            (&["tortie:operators"], &["system:node:minion"], operator("system:node:minion")),
            (&["tortie:operators"], &[""], None),
            (&["Tortie:Operators"], &["ann"], None),
        ];
        for (organisations, names, expected) in table {
            assert_eq!(Role::of_subject(organisations, names), expected, "{organisations:?} {names:?}");
        }
        for role in [Role::Node("n".to_owned()), Role::Controllers, Role::Operator("o".to_owned())] {
            let (organisation, name) = role.subject();
            assert_eq!(Role::of_subject(&[organisation], &[&name]), Some(role));
        }
    }
}
