//! What all pods of an installation have in common.

use crate::Values;

/// The ConfigMap with the agents' environment variables.
pub const CONFIG_MAP: &str = "tortie-config";
/// The label of Tortie's pods.
pub(crate) const LABEL: &str = "app.kubernetes.io/name";

/// What the DaemonSet and the Deployment have from [`Values`]: text, or placeholders of a chart.
pub(crate) struct Template {
    pub(crate) image: String,
    pub(crate) pull_policy: String,
    pub(crate) cni_bin_dir: String,
    pub(crate) cni_conf_dir: String,
    /// Changes when the ConfigMap does, so that the pods are replaced.
    pub(crate) config_digest: String,
}

impl Template {
    pub(crate) fn of(values: &Values, digest: &str) -> Self {
        Self {
            image: values.image.clone(),
            pull_policy: values.pull_policy.clone(),
            cni_bin_dir: values.cni_bin_dir.clone(),
            cni_conf_dir: values.cni_conf_dir.clone(),
            config_digest: digest.to_owned(),
        }
    }
}
