//! Addresses of Services of type LoadBalancer, as Calico stores them
//! (`kube-controllers/pkg/controllers/loadbalancer/loadbalancer_controller.go`).

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use sha2::{Digest, Sha256};

/// The attribute with the name of the Service; `namespace` has its namespace.
pub(crate) const SERVICE: &str = "service";
/// The type of Services with such addresses.
pub(crate) const LOAD_BALANCER: &str = "LoadBalancer";

/// The handle of a Service's addresses. A Service of the same name that is created later has another one.
#[must_use]
pub fn service_handle(namespace: &str, name: &str, uid: &str) -> String {
    let text = format!("{name}-{namespace}-{uid}").to_lowercase();
    let mut hash = URL_SAFE_NO_PAD.encode(Sha256::digest(text));
    hash.retain(|letter| !['-', '_', '.'].contains(&letter));
    format!("lb-{hash}")
}

/// The attributes of a Service's addresses.
#[must_use]
pub fn service_owner(namespace: &str, name: &str, timestamp: String) -> BTreeMap<String, String> {
    let attributes =
        [(SERVICE, name), ("namespace", namespace), ("type", LOAD_BALANCER), ("timestamp", &timestamp)];
    attributes.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `basic-lb-default-6a7e3f0c-0000-4000-8000-0123456789ab`, encoded by Python's `urlsafe_b64encode`.
    #[test]
    fn the_handle_is_that_of_calico() {
        let uid = "6A7E3F0C-0000-4000-8000-0123456789AB";
        assert_eq!(
            service_handle("default", "basic-lb", uid),
            "lb-nyLw4v1K4cTZOhfELDCo6pGqnKctLEs1pOBe0vaGjtQ"
        );
    }
}
