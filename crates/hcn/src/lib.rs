//! The Host Compute Network API (HCN v2), the way in to Windows' container networking service HNS.
//!
//! [`Hcn`] is that API as a trait: JSON documents in, JSON documents out, as `computenetwork.dll` has it. [`HcnExt`]
//! gives the same calls with the typed documents of [`schema`]. [`Failure`] carries what a call fails with, and its
//! [`Class`] says what a caller may conclude: only `NotFound` means that an object is absent.
//!
//! Who answers a call:
//! - [`RemoteHcn`] carries it over a socket to a process that runs [`serve`] (the emulated HNS of a lab node);
//! - an emulator in the same process, in unit tests;
//! - on Windows, `computenetwork.dll`. **That binding is not written yet**: until it is, this crate cannot drive a real
//!   Windows node.
//!
//! `docs/hns.md` collects what is known about HNS, with sources.

mod api;
mod client;
mod error;
mod features;
mod guid;
mod hresult;
pub mod schema;
mod server;
mod wire;

pub use api::{Call, Hcn, HcnExt, Kind};
pub use client::{Address, RemoteHcn};
pub use error::Error;
pub use features::{Feature, Version};
pub use guid::Guid;
pub use hresult::{Class, ErrorRecord, Failure, HResult};
pub use server::{serve_tcp, spawn_tcp};
#[cfg(unix)]
pub use server::{serve_unix, spawn_unix};
