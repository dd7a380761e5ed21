//! The interfaces of the Linux kernel that Tortie uses: netlink, nftables, routes, the table of connections, network
//! namespaces, raw sockets, sysctl and ethtool. The dataplane is made of them, and so are lab and emulator.
//!
//! Everything is done by system calls of this process. No `ip`, `nft`, `bridge` or `sysctl` program is needed or run.
//! On other systems the crate is empty, so that the workspace builds everywhere.
#![cfg(target_os = "linux")]

pub mod conntrack;
pub mod ethtool;
pub mod namespace;
pub mod netlink;
pub mod nftables;
pub mod packet;
pub mod route;
pub mod sysctl;

mod error;
mod sys;

pub use error::Error;
pub use sys::{InterfaceIndex, MAX_INTERFACE_NAME, interface_index};

/// What the functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
