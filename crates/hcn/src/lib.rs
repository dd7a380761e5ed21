//! The Host Compute Network API (HCN v2), the API of Windows' container networking service HNS.
//!
//! [`Hcn`] is that API as a trait: JSON documents in, JSON documents out, as in `computenetwork.dll`. [`HcnExt`] has
//! the same calls with the typed documents of [`schema`]. [`Failure`] is the error of a call, and its [`Class`] says
//! what a caller may conclude: only `NotFound` means that an object is absent.
//!
//! Implementations:
//! - [`RemoteHcn`] sends calls over a socket to a process that runs [`serve`] (the emulated HNS of a lab node).
//! - In unit tests, an emulator in the same process.
//! - On Windows, `native::NativeHcn` calls `computenetwork.dll`.
//!
//! [`selftest`] asks a build of HNS what its documentation leaves open.
//!
//! [`IpHelper`] is the part of the IP Helper API that a node needs: adapters, addresses and routes.
//!
//! `docs/hns.md` collects what is known about HNS, with sources.

mod api;
mod client;
mod error;
mod features;
mod firewall;
mod guid;
mod hresult;
mod ip_helper;
pub mod native;
#[doc(hidden)]
pub mod parsers;
pub mod schema;
pub mod selftest;
mod server;
mod wire;

pub use api::{Call, Hcn, HcnExt, Kind};
pub use client::{Address, RemoteHcn};
pub use error::Error;
pub use features::{Feature, Version};
pub use firewall::{Firewall, FirewallError, FirewallRule, LocalRules};
pub use guid::Guid;
pub use hresult::{Class, ErrorRecord, Failure, HResult};
pub use ip_helper::{Adapter, IpHelper, IpHelperError, IpRoute, NoIpHelper};
pub use server::{serve_tcp, spawn_tcp};
#[cfg(unix)]
pub use server::{serve_unix, spawn_unix};
