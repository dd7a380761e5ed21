//! Addresses of 240.0.0.0/4, which nobody uses, for objects that manifests give without an address.

use std::net::{IpAddr, Ipv4Addr};

/// The first address of pods and nodes: 240.0.0.0/5 is theirs.
const FIRST: u32 = 0xf000_0000;
/// The first address of Services: 248.0.0.0/5 is theirs.
const FIRST_OF_SERVICES: u32 = 0xf800_0000;

/// The address of the pod or node with this number, from 1.
#[must_use]
pub fn of_end(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(FIRST + number)
}

/// The address of the Service with this number, from 1.
#[must_use]
pub fn of_service(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(FIRST_OF_SERVICES + number)
}

/// Returns whether an address stands for one that manifests do not give.
#[must_use]
pub fn is_stand_in(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V4(address) if u32::from(*address) >= FIRST)
}

/// Returns whether an address stands for that of a Service.
#[must_use]
pub fn is_of_service(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V4(address) if u32::from(*address) >= FIRST_OF_SERVICES)
}
