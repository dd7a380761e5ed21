//! Evictions of pods, which respect PodDisruptionBudgets. They are no write of an object, so they are no part of
//! [`Store`](crate::Store): only a Kubernetes API has them.

use async_trait::async_trait;
use tortie_api::Key;

use crate::StoreError;

/// The answer to an eviction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Eviction {
    /// The pod ends, or is gone already, also if another pod has its name now.
    Begun,
    /// Not now: what a PodDisruptionBudget, or an admission webhook, says. A later attempt may succeed.
    Refused(String),
}

/// Evicts pods.
#[async_trait]
pub trait Evictions: Send + Sync {
    /// Evicts the pod with this name and uid.
    async fn evict(&self, pod: &Key, uid: &str) -> Result<Eviction, StoreError>;

    /// An error of kind [`StoreError::Forbidden`] if the caller must not evict pods of all namespaces.
    async fn expect_permission(&self) -> Result<(), StoreError>;
}
