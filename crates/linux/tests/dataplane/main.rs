//! The Linux dataplane on nodes that are network namespaces.
#![cfg(target_os = "linux")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod bandwidth;
#[path = "../common/mod.rs"]
mod common;
mod complete_changes;
mod connections;
mod dual_stack;
mod foreign;
mod foreign_tables;
mod host_flows;
mod host_ports;
mod hosts;
mod ipip;
mod learned;
mod legacy_tables;
mod logged;
mod mtu;
mod nat;
mod nodes;
mod overlay;
mod peers;
mod policy_only;
mod random_hosts;
mod random_states;
mod removal;
mod show;
mod sources;
mod table;
mod takeover;
mod untracked;
mod verdicts;
mod wiring;
