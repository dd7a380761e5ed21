//! What an installation can choose.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use thiserror::Error;

use crate::ChainedPlugins;

/// The image of this version, as `cargo xtask image` names it.
pub const DEFAULT_IMAGE: &str = concat!("tortie.io/tortie:", env!("CARGO_PKG_VERSION"));
/// The pool of addresses in `deploy/tortie.yaml`.
pub const DEFAULT_POOL: &str = "10.244.0.0/16";
/// The size of the blocks that nodes take from the pool, as in Calico.
const BLOCK_SIZE: u8 = 26;
/// The size of IPv6 blocks.
const BLOCK_SIZE_V6: u8 = 122;

/// The choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Values {
    /// The image of agent and plugin.
    pub image: String,
    /// When kubelets pull it.
    pub pull_policy: String,
    /// The pool that is created if the cluster has none.
    pub pool: Ipv4Net,
    /// The IPv6 pool that is created if the cluster has none; `None` for pods without IPv6 addresses.
    pub pool_v6: Option<Ipv6Net>,
    /// Whether the node's address replaces that of pods when they talk to addresses outside of all pools.
    pub nat_outgoing: bool,
    /// How packets of that pool travel between nodes.
    pub encapsulation: Encapsulation,
    /// Whether agents run a BGP speaker.
    pub bgp: bool,
    /// Whether pools without encapsulation get routes by way of the nodes themselves.
    pub direct_routes: bool,
    /// Whether another CNI plugin connects the pods, so that agents only enforce policy.
    pub policy_only: bool,
    /// Whether nodes move from flannel to Tortie one by one, so that agents run on those with the label [`NETWORK_LABEL`](crate::NETWORK_LABEL) only.
    pub flannel: bool,
    /// With `policy_only`, the prefixes of the names of pods' interfaces, separated by commas; `None` for those that agents know.
    pub pod_interface_prefix: Option<String>,
    /// How agents find the own IPv4 address of a Linux node; `None` for what its kubelet reports.
    pub ip_autodetection_method: Option<String>,
    /// The same for its IPv6 address.
    pub ip6_autodetection_method: Option<String>,
    /// The Secrets in Tortie's namespace that agents may read: passwords of BGP peers.
    pub bgp_secrets: Vec<String>,
    /// What the agents log.
    pub log_level: String,
    /// Where agents serve metrics to other machines.
    pub metrics_address: Option<SocketAddr>,
    /// Whether agents serve Services in the place of kube-proxy. Needs `api_server`.
    pub services: bool,
    /// The API server's host and port, if nodes cannot reach the Service `kubernetes` before Tortie runs.
    pub api_server: Option<(String, u16)>,
    /// Where the container runtime looks for plugins.
    pub cni_bin_dir: String,
    /// Where the container runtime looks for network configurations.
    pub cni_conf_dir: String,
    /// The plugins that the runtime calls after Tortie's.
    pub cni_plugins: ChainedPlugins,
}

/// How packets of a pool travel between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encapsulation {
    /// In VXLAN.
    Vxlan,
    /// In VXLAN between nodes of different networks only.
    VxlanCrossSubnet,
    /// As they are: the nodes' network needs routes to the pods.
    None,
}

impl Encapsulation {
    /// Its name in options.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan",
            Self::VxlanCrossSubnet => "vxlan-cross-subnet",
            Self::None => "none",
        }
    }

    /// The `vxlanMode` of an IPPool.
    #[must_use]
    pub fn vxlan_mode(self) -> &'static str {
        match self {
            Self::Vxlan => "Always",
            Self::VxlanCrossSubnet => "CrossSubnet",
            Self::None => "Never",
        }
    }
}

impl Default for Values {
    fn default() -> Self {
        Self {
            image: DEFAULT_IMAGE.to_owned(),
            pull_policy: "IfNotPresent".to_owned(),
            pool: DEFAULT_POOL.parse().unwrap_or_default(),
            pool_v6: None,
            nat_outgoing: true,
            encapsulation: Encapsulation::Vxlan,
            bgp: false,
            direct_routes: false,
            policy_only: false,
            flannel: false,
            pod_interface_prefix: None,
            ip_autodetection_method: None,
            ip6_autodetection_method: None,
            bgp_secrets: Vec::new(),
            log_level: "info".to_owned(),
            metrics_address: None,
            services: false,
            api_server: None,
            cni_bin_dir: "/opt/cni/bin".to_owned(),
            cni_conf_dir: "/etc/cni/net.d".to_owned(),
            cni_plugins: ChainedPlugins::default(),
        }
    }
}

impl Values {
    /// The agent's environment variables, which are the content of the ConfigMap.
    pub(crate) fn environment(&self) -> BTreeMap<String, String> {
        let mut environment = BTreeMap::from([
            ("TORTIE_STORE".to_owned(), "kubernetes".to_owned()),
            ("RUST_LOG".to_owned(), self.log_level.clone()),
        ]);
        if self.policy_only {
            environment.insert("TORTIE_POLICY_ONLY".to_owned(), "true".to_owned());
            let prefix = self.pod_interface_prefix.clone();
            environment.extend(prefix.map(|prefix| ("TORTIE_POD_INTERFACE_PREFIX".to_owned(), prefix)));
        } else if self.flannel {
            environment.insert("TORTIE_FLANNEL".to_owned(), "true".to_owned());
            environment.extend(self.of_nodes());
        } else {
            environment.extend(self.network());
        }
        if let Some(address) = self.metrics_address {
            environment.insert("TORTIE_METRICS_ADDRESS".to_owned(), address.to_string());
        }
        if self.services {
            environment.insert("TORTIE_SERVICES".to_owned(), "true".to_owned());
        }
        if let Some((host, port)) = &self.api_server {
            environment.insert("KUBERNETES_SERVICE_HOST".to_owned(), host.clone());
            environment.insert("KUBERNETES_SERVICE_PORT".to_owned(), port.to_string());
        }
        environment
    }
}

impl Values {
    /// The environment variables of agents that connect pods.
    fn network(&self) -> BTreeMap<String, String> {
        let mut environment = BTreeMap::from([
            ("TORTIE_DEFAULT_POOL".to_owned(), self.pool.to_string()),
            ("TORTIE_DEFAULT_POOL_NAT".to_owned(), self.nat_outgoing.to_string()),
        ]);
        if let Some(pool) = self.pool_v6 {
            environment.insert("TORTIE_DEFAULT_POOL_V6".to_owned(), pool.to_string());
        }
        if self.encapsulation != Encapsulation::Vxlan {
            environment
                .insert("TORTIE_DEFAULT_POOL_ENCAPSULATION".to_owned(), self.encapsulation.name().to_owned());
        }
        if self.bgp {
            environment.insert("TORTIE_BGP".to_owned(), "true".to_owned());
        }
        if self.direct_routes {
            environment.insert("TORTIE_DIRECT_ROUTES".to_owned(), "true".to_owned());
        }
        environment.extend(self.of_nodes());
        environment
    }

    /// The environment variables that do not depend on the source of pods' addresses.
    fn of_nodes(&self) -> BTreeMap<String, String> {
        let mut environment = BTreeMap::new();
        for (name, method) in [
            ("TORTIE_IP_AUTODETECTION_METHOD", &self.ip_autodetection_method),
            ("TORTIE_IP6_AUTODETECTION_METHOD", &self.ip6_autodetection_method),
        ] {
            environment.extend(method.iter().map(|method| (name.to_owned(), method.clone())));
        }
        if !self.cni_plugins.is_empty() {
            environment.insert("TORTIE_CNI_PLUGINS".to_owned(), self.cni_plugins.to_string());
        }
        environment
    }
}

/// Why a network cannot be the pool.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PoolError {
    /// Nodes take blocks of a fixed size.
    #[error("the pool {0} is smaller than one block of a node (/{1}); use a larger network")]
    TooSmall(IpNet, u8),
    /// Bits behind the prefix are set.
    #[error("the pool {0} has bits behind its prefix; use {1}")]
    NotTruncated(IpNet, IpNet),
    /// No host may have these addresses.
    #[error(
        "the pool {0} has addresses that no pod can have (loopback, link-local, multicast or unspecified)"
    )]
    Reserved(IpNet),
}

/// Checks that a network can be the pool.
///
/// # Errors
/// It cannot.
pub fn check_pool(pool: impl Into<IpNet>) -> Result<(), PoolError> {
    let pool = pool.into();
    if pool.trunc() != pool {
        return Err(PoolError::NotTruncated(pool, pool.trunc()));
    }
    let block_size = if pool.addr().is_ipv4() { BLOCK_SIZE } else { BLOCK_SIZE_V6 };
    if pool.prefix_len() > block_size {
        return Err(PoolError::TooSmall(pool, block_size));
    }
    let reserved = RESERVED.iter().filter_map(|network| network.parse::<IpNet>().ok());
    for network in reserved {
        if network.contains(&pool) || pool.contains(&network) {
            return Err(PoolError::Reserved(pool));
        }
    }
    Ok(())
}

/// Networks whose addresses no host may have.
const RESERVED: [&str; 8] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "::/128",
    "::1/128",
    "fe80::/10",
    "ff00::/8",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_that_cannot_work_are_rejected() {
        for (pool, expected) in [
            ("10.244.0.0/16", ""),
            ("10.0.0.0/26", ""),
            ("10.0.0.0/27", "smaller than one block"),
            ("10.0.0.1/16", "use 10.0.0.0/16"),
            ("127.0.0.0/16", "no pod can have"),
            ("fd00:10::/56", ""),
            ("fd00:10::/122", ""),
            ("fd00:10::/123", "smaller than one block of a node (/122)"),
            ("fd00:10::1/56", "use fd00:10::/56"),
            ("fe80::/64", "no pod can have"),
            ("::/96", "no pod can have"),
            ("169.254.0.0/16", "no pod can have"),
            ("0.0.0.0/0", "no pod can have"),
            ("239.0.0.0/16", "no pod can have"),
        ] {
            let problem = check_pool(pool.parse::<IpNet>().unwrap()).err().map(|error| error.to_string());
            match expected {
                "" => assert_eq!(problem, None, "{pool}"),
                expected => {
                    assert!(problem.clone().unwrap_or_default().contains(expected), "{pool}: {problem:?}")
                }
            }
        }
    }

    #[test]
    fn the_defaults_are_valid() {
        let values = Values::default();
        assert_eq!(values.pool.to_string(), DEFAULT_POOL);
        assert_eq!(check_pool(values.pool), Ok(()));
    }
}
