//! Detects changes of links and routes, or of addresses.

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use crate::Result;
use crate::netlink::{Family, Socket};

/// `RTNLGRP_LINK`, `RTNLGRP_IPV4_ROUTE` and `RTNLGRP_IPV6_ROUTE` (`linux/rtnetlink.h`).
const GROUPS: [u32; 3] = [1, 7, 11];
/// `RTNLGRP_IPV4_IFADDR` and `RTNLGRP_IPV6_IFADDR`.
const ADDRESS_GROUPS: [u32; 2] = [5, 9];

/// How soon the thread notices that nobody listens any more.
const TIMEOUT: Duration = Duration::from_millis(500);

/// A thread that reports changes of links and routes, or of addresses, while this value lives.
pub struct RouteWatch {
    _alive: Arc<()>,
}

impl fmt::Debug for RouteWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RouteWatch")
    }
}

impl RouteWatch {
    /// Watches the network namespace of the calling thread. Calls `on_change` for each burst of changes, whoever made them,
    /// and if the kernel had to drop notifications.
    ///
    /// # Errors
    /// The connection or thread that could not be created.
    pub fn start(on_change: impl Fn() + Send + 'static) -> Result<Self> {
        Self::subscribed(&GROUPS, on_change)
    }

    /// As [`start`](Self::start), for changes of addresses of interfaces only.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_on_addresses(on_change: impl Fn() + Send + 'static) -> Result<Self> {
        Self::subscribed(&ADDRESS_GROUPS, on_change)
    }

    fn subscribed(groups: &[u32], on_change: impl Fn() + Send + 'static) -> Result<Self> {
        let mut socket = Socket::open(Family::Route)?;
        socket.subscribe(groups)?;
        let alive = Arc::new(());
        let weak = Arc::downgrade(&alive);
        let watch = move || watch(&mut socket, &on_change, &weak);
        let failed = crate::Error::system("start it", "the thread that watches links and routes");
        thread::Builder::new().name("route-watch".to_owned()).spawn(watch).map_err(failed)?;
        Ok(Self { _alive: alive })
    }
}

fn watch(socket: &mut Socket, on_change: &(impl Fn() + Send), alive: &Weak<()>) {
    while alive.strong_count() > 0 {
        match socket.next_notifications(TIMEOUT) {
            Ok(changes) if changes.is_empty() => {}
            Ok(_) => on_change(),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => on_change(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::error!(%error, "cannot watch links, routes or addresses; Tortie notices changes when it looks again");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::interface_index;
    use crate::namespace::NetNs;
    use crate::route::{Address, Change, NewLink, NewLinkKind, Route, RouteSocket};
    use crate::sysctl;

    /// Creates the link `br0`. The kernel would give it an IPv6 address, and report that a second later.
    fn create_bridge(namespace: &NetNs) {
        let create = || {
            sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1").unwrap();
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new("br0", NewLinkKind::Bridge) }).unwrap();
        };
        namespace.run(create).unwrap();
    }

    /// A new link, and a new route, are reported; without a change, nothing is.
    #[test]
    fn changes_of_links_and_routes_are_reported() {
        let namespace = NetNs::create().unwrap();
        let (send, changes) = mpsc::channel();
        let _watch = namespace
            .run(move || RouteWatch::start(move || send.send(()).unwrap_or_default()))
            .unwrap()
            .unwrap();
        let is_reported = || {
            changes.recv_timeout(Duration::from_secs(10)).unwrap();
            while changes.recv_timeout(2 * TIMEOUT).is_ok() {}
        };
        create_bridge(&namespace);
        is_reported();
        namespace
            .run(|| {
                let link = interface_index("br0").unwrap();
                let route = Route::on_link("10.1.1.1/32".parse().unwrap(), link, 4);
                RouteSocket::open().unwrap().change(&Change::AddRoute(route)).unwrap();
            })
            .unwrap();
        is_reported();
        assert!(changes.recv_timeout(2 * TIMEOUT).is_err(), "nothing changes");
    }

    /// Addresses come and go; a link without any is not reported.
    #[test]
    fn changes_of_addresses_are_reported() {
        let namespace = NetNs::create().unwrap();
        let (send, changes) = mpsc::channel();
        let _watch = namespace
            .run(move || RouteWatch::start_on_addresses(move || send.send(()).unwrap_or_default()))
            .unwrap()
            .unwrap();
        create_bridge(&namespace);
        assert!(changes.recv_timeout(2 * TIMEOUT).is_err(), "a link alone");
        for is_added in [true, false] {
            namespace
                .run(|| {
                    let link = interface_index("br0").unwrap();
                    let address = Address { link, address: [192, 0, 2, 1].into(), prefix_length: 24 };
                    let change =
                        if is_added { Change::AddAddress(address) } else { Change::DeleteAddress(address) };
                    RouteSocket::open().unwrap().change(&change).unwrap();
                })
                .unwrap();
            changes.recv_timeout(Duration::from_secs(10)).unwrap();
            while changes.recv_timeout(2 * TIMEOUT).is_ok() {}
        }
    }
}
