//! The Linux network namespaces of the containers in HCN namespaces.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tortie_hcn::{Call, Failure, Guid, Hcn};

/// The name of the call by [`bind_compartment`].
pub(crate) const BIND_COMPARTMENT: &str = "bind-compartment";

/// Its document.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
pub(crate) struct BindCompartment {
    pub(crate) namespace: Guid,
    pub(crate) path: Option<PathBuf>,
}

/// Tells an emulated HNS the Linux network namespace of the container of an HCN namespace, as a container runtime
/// tells Windows by creating the compartment. Endpoints that are attached there, now or later, get their interface in
/// it. `None` removes the binding and the interfaces.
///
/// # Errors
/// The namespace does not exist, the path is not a network namespace, or this is not an emulator with a switch.
pub fn bind_compartment(hcn: &dyn Hcn, namespace: Guid, path: Option<&Path>) -> Result<(), Failure> {
    let document = BindCompartment { namespace, path: path.map(Path::to_owned) };
    // Paths of network namespaces are text. Other paths give an empty document, which is rejected.
    let settings = serde_json::to_string(&document).unwrap_or_default();
    hcn.call(&Call::Emulator { name: BIND_COMPARTMENT.to_owned(), settings }).map(drop)
}
