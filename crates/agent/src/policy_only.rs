//! Policy for pods that another CNI plugin connects: what does not fit that.

use std::path::PathBuf;

use tortie_store::Endpoints;

use crate::{AgentError, CniIpam, Extras, Platform};

/// How the pods' interfaces are recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyOnly {
    /// The prefixes of the names of pods' interfaces. Interfaces with such a name that belong to no known pod are closed.
    pub prefixes: Vec<String>,
    /// The folder where the container runtime keeps the results of CNI plugins.
    pub results: PathBuf,
}

impl PolicyOnly {
    /// The prefixes of AWS VPC CNI, GKE's plugin, Azure CNI and Calico's plugin.
    pub const PREFIXES: [&str; 4] = ["eni", "gke", "azv", "cali"];
    /// Where libcni keeps results, as containerd and CRI-O use it.
    pub const RESULTS: &str = tortie_cni::results::FOLDER;
}

/// Refuses what has no meaning if another CNI plugin connects the pods.
pub(crate) fn check(
    node: &str,
    extras: &Extras,
    platform: &Platform,
    store: &dyn Endpoints,
) -> Result<(), AgentError> {
    let Some(policy_only) = &extras.policy_only else { return Ok(()) };
    let refuse = |problem: String| Err(AgentError::Node { node: node.to_owned(), problem });
    let others = [
        (extras.bgp, "--bgp (TORTIE_BGP)"),
        (extras.direct_routes, "--direct-routes (TORTIE_DIRECT_ROUTES)"),
        (extras.flannel, "--flannel (TORTIE_FLANNEL)"),
        (
            !extras.default_pools.is_empty(),
            "--default-pool and --default-pool-v6 (TORTIE_DEFAULT_POOL, TORTIE_DEFAULT_POOL_V6)",
        ),
        (extras.cni_conf_dir.is_some(), "--cni-conf-dir (TORTIE_CNI_CONF_DIR)"),
        (!extras.cni_plugins.is_empty(), "--cni-plugins (TORTIE_CNI_PLUGINS)"),
        (extras.cni_ipam != CniIpam::default(), "--cni-ipam (TORTIE_CNI_IPAM)"),
        (
            extras.address_methods.ask_the_machine(),
            "--ip-autodetection-method and --ip6-autodetection-method (TORTIE_IP_AUTODETECTION_METHOD, \
             TORTIE_IP6_AUTODETECTION_METHOD)",
        ),
    ];
    if let Some((_, flag)) = others.into_iter().find(|(is_set, _)| *is_set) {
        return refuse(format!(
            "with --policy-only (TORTIE_POLICY_ONLY), another CNI plugin connects the pods and gives them addresses and routes; remove \
             {flag}, or remove --policy-only"
        ));
    }
    if let Some(prefix) = policy_only.prefixes.iter().find(|prefix| !is_prefix(prefix)) {
        return refuse(format!(
            "\"{prefix}\" in --pod-interface-prefix (TORTIE_POD_INTERFACE_PREFIX) cannot begin the name of an interface of a pod; give 1 to 14 \
             characters without spaces and slashes, such as eni"
        ));
    }
    match platform {
        Platform::Other { .. } => {
            return refuse(
                "only agents of Linux and Windows nodes recognise the pods of other CNI plugins; remove --policy-only \
                 (TORTIE_POLICY_ONLY), and let Tortie's plugin connect the pods of this node"
                    .to_owned(),
            );
        }
        Platform::Windows { host, services, .. } => {
            let others = [
                (host.has_selector(), "--adapter (TORTIE_ADAPTER)"),
                (!services.is_empty(), "--service-cidr (TORTIE_SERVICE_CIDR)"),
                (
                    policy_only.prefixes != PolicyOnly::PREFIXES,
                    "--pod-interface-prefix (TORTIE_POD_INTERFACE_PREFIX), because HNS endpoints have no such names,",
                ),
            ];
            if let Some((_, flag)) = others.into_iter().find(|(is_set, _)| *is_set) {
                return refuse(format!(
                    "with --policy-only (TORTIE_POLICY_ONLY), another CNI plugin makes the network of a Windows node; remove {flag} or \
                     remove --policy-only"
                ));
            }
        }
        #[cfg(target_os = "linux")]
        Platform::Linux => {}
    }
    if !store.derives_from_kubernetes() {
        return refuse(
            "with --policy-only (TORTIE_POLICY_ONLY), the pods and their addresses come from the Kubernetes API; use --store kubernetes:, or \
             remove --policy-only"
                .to_owned(),
        );
    }
    Ok(())
}

fn is_prefix(text: &str) -> bool {
    (1..=14).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
}
