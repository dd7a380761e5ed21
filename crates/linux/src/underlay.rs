//! The node's own addresses on the underlay.

use std::net::IpAddr;

use tortie_kernel::route::RouteSocket;

use crate::Result;

/// The length of the prefix with which an interface of the calling thread's network namespace has the address; `None` if none
/// has it.
///
/// # Errors
/// The kernel refused to list addresses.
pub fn prefix_length(address: IpAddr) -> Result<Option<u8>> {
    let addresses = RouteSocket::open()?.addresses()?;
    Ok(addresses.into_iter().find(|at| at.address == address).map(|at| at.prefix_length))
}
