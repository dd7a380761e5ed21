//! The parser of certificates, for `judges/fuzz`.

use super::client_identity::Client;
use crate::StoreError;

/// Reads a certificate (DER) as the service reads those of its clients.
///
/// # Errors
/// It cannot be read.
pub fn certificate(der: &[u8]) -> Result<(), StoreError> {
    Client::of_certificates(&[der.into()]).map(drop)
}
