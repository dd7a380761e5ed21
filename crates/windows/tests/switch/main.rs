//! Connections of pods through the switch of the emulated HNS.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod connections;
mod fifty_pods;
mod frames;
mod host_ports;
mod outbound;
mod switched;
