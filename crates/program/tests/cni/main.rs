//! The CNI plugin as container runtimes call it: a real agent on a node made of a network namespace, the plugin's process,
//! and other people's plugins and drivers. The tests make mounts, which tests of `lab` would see, so they have a binary of their
//! own.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod calico;
mod calls;
mod chained;
mod cnitool;
mod families;
mod flannel;
mod flannel_etcd;
mod flannel_leftovers;
mod foreign_plugin;
mod ipam;
mod killed;
mod log_level;
mod musts;
mod node;
mod policy_only;
mod secrets;
mod without_table;
