//! Secrets of the agents' namespace, such as passwords of BGP peers. They are no kind of [`Store`](crate::Store), so no
//! command lists or exports them.

use std::collections::BTreeMap;
use std::fmt;

use futures::stream::BoxStream;

/// What is known of a Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretState {
    /// It exists, with this data.
    Present(SecretData),
    /// It does not exist.
    Absent,
    /// This client may not read it: the answer, and the permission that is missing.
    Forbidden(String),
    /// The API server does not answer. The next state follows when it does.
    Unavailable(String),
}

/// The data of a Secret, by key. It does not appear in logs.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct SecretData(pub BTreeMap<String, Vec<u8>>);

impl fmt::Debug for SecretData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Reads the Secrets of one namespace.
pub trait Secrets: Send + Sync {
    /// The namespace.
    fn namespace(&self) -> &str;

    /// What is known of a Secret: first its present state, then each change, for ever. The same state may come twice.
    fn follow_secret(&self, name: &str) -> BoxStream<'static, SecretState>;
}
