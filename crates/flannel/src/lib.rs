//! flannel's configuration, and its subnet leases in etcd (flanneld without `--kube-subnet-mgr`; `pkg/subnet/etcd` of flannel).
//!
//! `<prefix>/config` has the configuration ([`NetConf`]). Each node writes one key `<prefix>/subnets/10.5.34.0-24` with its address
//! and the way to its pods, and an etcd lease of a day that it renews. [`FlannelEtcd::acquire`] takes subnets, and [`SubnetManager::run`]
//! keeps them and follows the other nodes. What to do is decided by pure functions (`own_lease`) of what etcd has (`view`).

mod config;
mod granted;
mod lease;
mod own_lease;
mod ranges;
mod subnet_manager;
mod view;

use thiserror::Error;
use tortie_store::StoreError;

pub use config::{Backend, FlannelNetwork, NetConf, SubnetRange};
pub use lease::{Attributes, Holder, Subnets, Tunnel};
pub use own_lease::{
    Acquisition, LeaseState, OwnLease, Previous, acquisition, has_ended, lease_state, overlapped, renewal,
};
pub use ranges::Ranges;
pub use subnet_manager::{FlannelEtcd, LeaseSnapshot, SubnetManager};
pub use view::View;

/// Why a node has no subnets.
#[derive(Debug, Error)]
pub enum FlannelError {
    /// etcd does not answer, or refuses.
    #[error("flannel's etcd: {0}")]
    Store(#[from] StoreError),
    /// There is no configuration.
    #[error(
        "flannel's etcd has no key {0}, where flannel's configuration belongs; store it there by the API v3, or correct the prefix"
    )]
    NoConfig(String),
    /// The configuration cannot be used.
    #[error("flannel's configuration (key {key} in etcd): {problem}")]
    Config {
        /// Its key.
        key: String,
        /// The field, the problem and the remedy.
        problem: String,
    },
    /// No subnet is free.
    #[error("flannel's leases (keys {prefix}… in etcd): {problem}")]
    Full {
        /// The prefix of leases.
        prefix: String,
        /// The problem and the remedy.
        problem: String,
    },
}
