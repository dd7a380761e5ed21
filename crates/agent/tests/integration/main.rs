//! The agent over an in-memory datastore, or a real Kubernetes API, and a fake operating system.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod addresses;
mod blocked;
#[path = "../common/mod.rs"]
mod common;
mod control;
mod kubernetes;
mod lock;
mod node_restriction;
mod permissions;
mod plane;
mod pods;
mod reconfigure;
mod server;
mod unsupported;
mod upgrade;
mod windows;
mod windows_bgp;
mod windows_flannel_etcd;
mod windows_policy_only;
