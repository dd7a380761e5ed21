//! Linux as Tortie uses it: network namespaces, packets, netlink, routes, nftables, and the dataplane on top of them.
//!
//! Everything is done by system calls of this process. It neither needs nor runs `ip`, `nft`, `bridge` or `sysctl`.
//! On other systems the crate is empty, so that the workspace builds everywhere.
#![cfg(target_os = "linux")]

pub mod dataplane;
pub mod wire;

mod error;

pub use dataplane::Dataplane;
pub use error::Error;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
