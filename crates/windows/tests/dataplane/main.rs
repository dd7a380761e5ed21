//! The Windows dataplane on one node with an emulated HNS.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod adapter_routes;
mod bridge;
mod bridge_ipv6;
mod builds;
mod cleanup;
mod cost;
mod fault_matrix;
mod firewall;
mod host;
mod host_ports;
mod kube_proxy;
mod limits;
mod load_balancers;
mod network;
mod node;
mod outbound;
mod pods;
mod policy_only;
mod ports_of_sctp;
mod programs;
mod replacement;
mod restarts;
mod saved_report;
mod services;
mod sets;
mod show;
mod subnets;
mod trouble;
mod verdicts;
