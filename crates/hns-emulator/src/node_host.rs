//! The machine under an emulated HNS whose switch forwards frames: the interfaces and routes of this process's network namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use tortie_hcn::{Adapter, IpHelper, IpHelperError, IpRoute};
use tortie_kernel::route::{Change, Route, RouteKind, RouteSocket, RouteWatch};
use tortie_kernel::sysctl;
use tracing::warn;

/// The protocol of routes that the machine adds: "boot", as for those that are added by hand.
const PROTOCOL: u8 = 3;
/// The protocol of routes that the kernel makes for its own addresses.
const KERNEL: u8 = 2;

/// The machine, as Windows would show it. A route to one destination with one metric has one next hop, as in Linux.
#[derive(Debug, Clone, Copy, Default)]
pub struct NodeHost;

fn with<T>(
    operation: &'static str,
    work: impl FnOnce(&mut RouteSocket) -> io::Result<T>,
) -> Result<T, IpHelperError> {
    let result = RouteSocket::open().map_err(io::Error::other).and_then(|mut socket| work(&mut socket));
    result.map_err(|source| IpHelperError { operation, source })
}

impl IpHelper for NodeHost {
    fn adapters(&self) -> Result<Vec<Adapter>, IpHelperError> {
        with("read the adapters", |socket| {
            let links = socket.links().map_err(io::Error::other)?;
            let addresses = socket.addresses().map_err(io::Error::other)?;
            let adapter = |link: tortie_kernel::route::Link| Adapter {
                index: link.index,
                mac: link.mac.map(|mac| mac.0),
                mtu: link.mtu,
                is_up: link.up,
                addresses: addresses
                    .iter()
                    .filter(|address| address.link == link.index)
                    .filter_map(|address| IpNet::new(address.address, address.prefix_length).ok())
                    .collect(),
                name: link.name,
            };
            Ok(links.into_iter().map(adapter).collect())
        })
    }

    fn routes(&self) -> Result<Vec<IpRoute>, IpHelperError> {
        with("read the routes", |socket| {
            let routes = socket.routes().map_err(io::Error::other)?;
            let unicast = routes.into_iter().filter(|route| route.kind == RouteKind::Unicast);
            Ok(unicast.filter_map(|route| shown(&route)).collect())
        })
    }

    fn add_route(&self, route: &IpRoute) -> Result<(), IpHelperError> {
        with("add a route", |socket| {
            socket.change(&Change::ReplaceRoute(of_kernel(route))).map_err(io::Error::other)
        })
    }

    fn delete_route(&self, route: &IpRoute) -> Result<(), IpHelperError> {
        with("delete a route", |socket| {
            // The kernel would delete a route by way of another next hop.
            let routes = socket.routes().map_err(io::Error::other)?;
            if !routes.iter().filter_map(shown).any(|known| known == *route) {
                return Ok(());
            }
            socket.change(&Change::DeleteRoute(of_kernel(route))).map_err(io::Error::other)
        })
    }

    fn enable_forwarding(&self, interface: u32, of_ipv6: bool) -> Result<(), IpHelperError> {
        with("enable forwarding", |socket| {
            let links = socket.links().map_err(io::Error::other)?;
            let link =
                links.into_iter().find(|link| link.index == interface).ok_or(io::ErrorKind::NotFound)?;
            let file = match of_ipv6 {
                // Linux forwards IPv6 between all interfaces, or none.
                true => "net/ipv6/conf/all/forwarding".to_owned(),
                false => format!("net/ipv4/conf/{}/forwarding", link.name),
            };
            sysctl::ensure(&file, "1").map(drop).map_err(io::Error::other)
        })
    }

    fn watch(&self, notify: Box<dyn Fn() + Send + Sync>) {
        match RouteWatch::start(notify) {
            // It lives as long as the process, as those of Windows.
            Ok(watch) => std::mem::forget(watch),
            Err(error) => warn!(%error, "changes of routes are found at intervals"),
        }
    }
}

fn shown(route: &Route) -> Option<IpRoute> {
    let on_link = match route.destination {
        IpNet::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpNet::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    Some(IpRoute {
        interface: route.link?,
        destination: route.destination,
        next_hop: route.gateway.unwrap_or(on_link),
        metric: route.metric,
        is_own: route.protocol == KERNEL,
    })
}

fn of_kernel(route: &IpRoute) -> Route {
    let bare = if route.next_hop.is_unspecified() {
        Route::on_link(route.destination, route.interface, PROTOCOL)
    } else {
        Route::via(route.destination, route.next_hop, route.interface, PROTOCOL)
    };
    Route { metric: route.metric, ..bare }
}
