//! The network configuration that the agent writes for the container runtime.

use serde_json::{Value, json};

/// The name of the file. Runtimes use the first file in the order of names, and packages of runtimes bring files that begin
/// with 10. A pod that another plugin connects has no policy.
pub const CNI_CONFIG_FILE: &str = "00-tortie.conflist";
/// The plugin's name in the runtime's folder.
pub const CNI_PLUGIN: &str = "tortie-cni";
/// The network's name, which begins the names of IPAM handles, as in Calico.
pub const CNI_NETWORK: &str = "k8s-pod-network";

/// The configuration. Runtimes of CNI 1.1 choose the highest of `cniVersions`; older ones use `cniVersion`.
#[must_use]
pub fn cni_config() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "cniVersions": ["1.0.0", "1.1.0"],
        "name": CNI_NETWORK,
        "plugins": [{"type": CNI_PLUGIN}],
    })
}
