//! Policies in another form with the same meaning: Kubernetes' as Calico's and back.

mod to_calico;
mod to_kubernetes;

pub use to_calico::{calico_spec, closed_calico_spec};
pub use to_kubernetes::{Converted, kubernetes_policy};

/// The criterion that Calico adds to selectors for pods. Network sets and host endpoints do not have the label.
const PODS: &str = "projectcalico.org/orchestrator == 'k8s'";
