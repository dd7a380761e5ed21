//! Linux as Tortie needs it: network namespaces, packets, netlink, routes, nftables, and the dataplane made of them.
//!
//! Everything is done by system calls of this process. No `ip`, `nft`, `bridge` or `sysctl` program is needed or run.
//! On other systems the crate is empty, so that the workspace builds everywhere.
#![cfg(target_os = "linux")]

pub mod conntrack;
pub mod dataplane;
pub mod ethtool;
pub mod namespace;
pub mod netlink;
pub mod nftables;
pub mod packet;
pub mod route;
pub mod sysctl;
pub mod wire;

mod error;
mod sys;

pub use dataplane::Dataplane;
pub use error::Error;
pub use sys::interface_index;

/// What the functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
