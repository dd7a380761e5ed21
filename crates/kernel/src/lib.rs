//! The interfaces of the Linux kernel that Tortie uses: netlink, nftables, routes, connection tracking, network
//! namespaces, raw sockets, sysctl, ethtool and legacy tables of `iptables`. The Linux dataplane, the lab and the emulator use this crate.
//!
//! Everything is done by system calls of this process. It neither needs nor runs `ip`, `nft`, `bridge` or `sysctl`.
//! On other systems the crate is empty, so that the workspace builds everywhere.
#![cfg(target_os = "linux")]

pub mod conntrack;
pub mod ethtool;
pub mod ipset;
pub mod memory;
pub mod namespace;
pub mod netlink;
pub mod nftables;
pub mod packet;
#[doc(hidden)]
pub mod parsers;
pub mod route;
pub mod sysctl;
pub mod tcp;
pub mod tun;
pub mod xtables;

mod error;
mod sys;

pub use error::Error;
pub use sys::{InterfaceIndex, MAX_INTERFACE_NAME, interface_index};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
