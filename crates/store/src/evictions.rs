//! Evictions of pods, which respect PodDisruptionBudgets. They are no write of an object, so they are no part of
//! [`Store`](crate::Store): only a Kubernetes API has them.

use async_trait::async_trait;
use tortie_api::{Key, Kind};

use crate::StoreError;

/// The answer to an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eviction {
    /// The pod ends, or is gone already, also if another pod has its name now.
    Begun,
    /// Not now: what a PodDisruptionBudget, or an admission webhook, says. A later attempt may succeed.
    Refused(String),
}

/// What somebody may do with all objects of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    /// The kind.
    pub kind: Kind,
    /// A subresource of its objects, such as `eviction`.
    pub subresource: Option<&'static str>,
    /// The verb of the API, such as `update`.
    pub verb: &'static str,
}

/// Evicts pods.
#[async_trait]
pub trait Evictions: Send + Sync {
    /// Evicts the pod with this name and uid.
    async fn evict(&self, pod: &Key, uid: &str) -> Result<Eviction, StoreError>;

    /// Which of these permissions the caller does not have. One about which the caller must not ask is not among them.
    async fn missing_permissions(&self, needed: &[Permission]) -> Result<Vec<Permission>, StoreError>;
}
