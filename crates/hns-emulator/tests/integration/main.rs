//! Tests of the emulated HNS.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[cfg(target_os = "linux")]
mod cluster;
mod documents;
#[cfg(target_os = "linux")]
mod frames;
#[cfg(target_os = "linux")]
mod l2bridge;
#[cfg(target_os = "linux")]
mod node_ports;
mod selftest;
#[cfg(target_os = "linux")]
mod service;
