//! The Linux dataplane on top of `tortie-kernel`: policy as nftables, routes and VXLAN, and the links of pods.
//!
//! On other systems the crate is empty, so that the workspace builds everywhere.
#![cfg(target_os = "linux")]

pub mod calico;
pub mod dataplane;
mod diagnostics;
pub mod flannel;
mod foreign_chains;
mod learned_routes;
mod pod_mtu;
mod quiescence;
mod removal;
pub mod services;
mod underlay;
pub mod wire;

mod error;

pub use dataplane::Dataplane;
pub use diagnostics::diagnostics;
pub use error::Error;
pub use learned_routes::LearnedRoutes;
pub use pod_mtu::PodMtu;
pub use removal::{hand_over_to_calico, remove_all};
pub use services::{ServiceTable, ServicesConfig};
pub use underlay::{AddressWatch, interfaces, prefix_length, watch_addresses};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
