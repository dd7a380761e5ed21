//! The Linux dataplane on the real kernel.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod clusters;
#[path = "../common/mod.rs"]
mod common;
mod dataplane;
mod services;
mod transitions;
