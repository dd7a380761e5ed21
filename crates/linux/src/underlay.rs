//! The node's own addresses on the underlay.

use std::net::IpAddr;

use ipnet::IpNet;
use tortie_kernel::route::{RouteSocket, RouteWatch};

use crate::Result;

/// The interfaces of the calling thread's network namespace, by name, with their addresses and the lengths of their prefixes, in
/// the kernel's order.
///
/// # Errors
/// The kernel refused to list links or addresses.
pub fn interfaces() -> Result<Vec<(String, Vec<IpNet>)>> {
    let mut routes = RouteSocket::open()?;
    let (links, addresses) = (routes.links()?, routes.addresses()?);
    let of = |index| {
        let its = addresses.iter().filter(move |at| at.link == index);
        its.filter_map(|at| IpNet::new(at.address, at.prefix_length).ok()).collect()
    };
    Ok(links.into_iter().map(|link| (link.name, of(link.index))).collect())
}

/// The length of the prefix with which an interface of the calling thread's network namespace has the address; `None` if none
/// has it.
///
/// # Errors
/// The kernel refused to list addresses.
pub fn prefix_length(address: IpAddr) -> Result<Option<u8>> {
    let addresses = RouteSocket::open()?.addresses()?;
    Ok(addresses.into_iter().find(|at| at.address == address).map(|at| at.prefix_length))
}

/// Reports changes of addresses while it lives.
#[derive(Debug)]
pub struct AddressWatch {
    _watch: RouteWatch,
}

/// Calls `on_change` for each burst of changes of the addresses of the calling thread's network namespace, from a thread of its own.
///
/// # Errors
/// The connection or thread that could not be created.
pub fn watch_addresses(on_change: impl Fn() + Send + 'static) -> Result<AddressWatch> {
    Ok(AddressWatch { _watch: RouteWatch::start_on_addresses(on_change)? })
}
