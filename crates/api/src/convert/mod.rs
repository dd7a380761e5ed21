//! Policies in another form with the same meaning: Kubernetes' as Calico's and back, and the resources of Calico's API v1 as
//! those of v3.

mod from_v1;
mod to_calico;
mod to_kubernetes;

pub use from_v1::from_v1;
pub use to_calico::{calico_spec, closed_calico_spec};
pub use to_kubernetes::{Converted, kubernetes_policy};

/// The criterion that Calico adds to selectors for pods. Network sets and host endpoints do not have the label.
const PODS: &str = "projectcalico.org/orchestrator == 'k8s'";
