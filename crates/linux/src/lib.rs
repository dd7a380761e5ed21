//! The Linux dataplane: policy as nftables, routes and VXLAN, and the cables of pods, on the interfaces of the kernel that
//! `tortie-kernel` has.
//!
//! On other systems the crate is empty, so that the workspace builds everywhere.
#![cfg(target_os = "linux")]

pub mod dataplane;
pub mod wire;

mod error;

pub use dataplane::Dataplane;
pub use error::Error;

/// What the functions of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
