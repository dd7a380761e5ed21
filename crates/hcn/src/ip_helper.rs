//! The IP Helper API of Windows (`iphlpapi.dll`), as far as a node needs it: adapters, addresses, routes, and their changes.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;

/// An adapter of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// Its number, which changes with each start of the machine.
    pub index: u32,
    /// Its name for people, such as `Ethernet`.
    pub name: String,
    /// Its MAC address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// The MTU in bytes.
    pub mtu: u32,
    /// Whether it passes packets.
    pub is_up: bool,
    /// Its unicast addresses, with the lengths of their networks' prefixes.
    pub addresses: Vec<IpNet>,
}

/// A route of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpRoute {
    /// The number of its adapter.
    pub interface: u32,
    /// The destination.
    pub destination: IpNet,
    /// The next hop; unspecified: on the link.
    pub next_hop: IpAddr,
    /// Lower is better. The adapter's own metric comes on top.
    pub metric: u32,
    /// Whether the system makes it again: it is of an address of its own, of DHCP, or of a router's advertisement.
    pub is_own: bool,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}: {source}")]
pub struct IpHelperError {
    /// The operation.
    pub operation: &'static str,
    /// The error of the system.
    #[source]
    pub source: io::Error,
}

/// The adapters and routes of a machine. Calls may come from several threads at once.
pub trait IpHelper: Send + Sync {
    /// All adapters.
    ///
    /// # Errors
    /// The system does not tell them.
    fn adapters(&self) -> Result<Vec<Adapter>, IpHelperError>;

    /// All routes.
    ///
    /// # Errors
    /// The system does not tell them.
    fn routes(&self) -> Result<Vec<IpRoute>, IpHelperError>;

    /// Adds a route.
    ///
    /// # Errors
    /// The system refuses it.
    fn add_route(&self, route: &IpRoute) -> Result<(), IpHelperError>;

    /// Deletes a route. One that is gone is no error.
    ///
    /// # Errors
    /// The system refuses it.
    fn delete_route(&self, route: &IpRoute) -> Result<(), IpHelperError>;

    /// Makes the system pass packets of others that arrive at an adapter, of IPv6 or of IPv4, if it does not yet.
    ///
    /// # Errors
    /// The system refuses it.
    fn enable_forwarding(&self, interface: u32, of_ipv6: bool) -> Result<(), IpHelperError>;

    /// Calls `notify` after each change of addresses or routes, if the system tells them, for as long as the process lives.
    fn watch(&self, notify: Box<dyn Fn() + Send + Sync>);
}

/// No adapters are known. For nodes of a lab, whose HNS chooses.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoIpHelper;

impl IpHelper for NoIpHelper {
    fn adapters(&self) -> Result<Vec<Adapter>, IpHelperError> {
        Ok(Vec::new())
    }

    fn routes(&self) -> Result<Vec<IpRoute>, IpHelperError> {
        Ok(Vec::new())
    }

    fn add_route(&self, _: &IpRoute) -> Result<(), IpHelperError> {
        Err(IpHelperError { operation: "add a route", source: io::ErrorKind::Unsupported.into() })
    }

    fn delete_route(&self, _: &IpRoute) -> Result<(), IpHelperError> {
        Err(IpHelperError { operation: "delete a route", source: io::ErrorKind::Unsupported.into() })
    }

    fn enable_forwarding(&self, _: u32, _: bool) -> Result<(), IpHelperError> {
        Err(IpHelperError { operation: "enable forwarding", source: io::ErrorKind::Unsupported.into() })
    }

    fn watch(&self, _: Box<dyn Fn() + Send + Sync>) {}
}
