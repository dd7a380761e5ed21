//! Connections of pods through the switch of the emulated HNS.

mod connections;
mod fifty_pods;
mod frames;
mod host_ports;
mod outbound;
mod switched;
