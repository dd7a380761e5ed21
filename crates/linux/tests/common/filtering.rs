//! Helpers for tests of single packets.

use std::net::IpAddr;

use tortie_dataplane::MacAddress;
use tortie_kernel::route::*;
use tortie_kernel::{interface_index, sysctl};

pub(crate) const UPLINK: &str = "uplink";
/// The node's own addresses on the uplink. [`GATEWAYS`] are the routers to everything else.
pub(crate) const NODE: [&str; 2] = ["10.99.0.2", "fd99::2"];
const GATEWAYS: [&str; 2] = ["10.99.0.1", "fd99::1"];
/// The hardware address of the other ends of the node's links.
pub(crate) const OTHERS_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

/// Configures forwarding, routes, and neighbour entries for addresses that nobody has.
pub(crate) fn configure(pods: &[(&str, [&str; 2])]) {
    let mut socket = RouteSocket::open().unwrap();
    for name in ["net/ipv6/conf/all/forwarding", "net/ipv4/ip_forward"] {
        sysctl::ensure(name, "1").unwrap();
    }
    sysctl::ensure("net/ipv4/conf/all/rp_filter", "0").unwrap();
    let uplink = interface_index(UPLINK).unwrap();
    sysctl::ensure("net/ipv4/conf/uplink/rp_filter", "0").unwrap();
    // Redirects repeat the packet with its tag.
    for name in ["all", "uplink"] {
        sysctl::ensure(&format!("net/ipv4/conf/{name}/send_redirects"), "0").unwrap();
    }
    // Nobody else has its address.
    for name in ["all", "uplink"] {
        sysctl::ensure(&format!("net/ipv6/conf/{name}/accept_dad"), "0").unwrap();
    }
    for ((gateway, own), all) in GATEWAYS.into_iter().zip(NODE).zip(["0.0.0.0/0", "::/0"]) {
        let gateway: IpAddr = gateway.parse().unwrap();
        // The node needs an address of its own to forward.
        let own = Address {
            link: uplink,
            address: own.parse().unwrap(),
            prefix_length: if gateway.is_ipv4() { 24 } else { 64 },
        };
        socket.change(&Change::AddAddress(own)).unwrap();
        socket.change(&Change::AddRoute(Route::via(all.parse().unwrap(), gateway, uplink, 4))).unwrap();
        neighbour(&mut socket, uplink, gateway);
    }
    for (link, addresses) in pods {
        let link = interface_index(link).unwrap();
        for address in addresses {
            neighbour(&mut socket, link, address.parse().unwrap());
        }
    }
}

fn neighbour(socket: &mut RouteSocket, link: u32, address: IpAddr) {
    socket.change(&Change::SetNeighbour(Neighbour { link, address, mac: OTHERS_MAC })).unwrap();
}

/// Runs a function after each nftables transaction, before the next one begins. If the kernel refuses a change, so
/// that everything is compared instead, the test fails.
pub(crate) struct AfterEachTransaction<F>(pub F);

impl<F: Fn() + 'static> tracing::Subscriber for AfterEachTransaction<F> {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        let target = metadata.target();
        metadata.is_event() && (target.starts_with("tortie_linux") || target.starts_with("tortie_kernel"))
    }

    fn event(&self, event: &tracing::Event<'_>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        for refusal in ["the kernel refused the change", "cannot remove unused objects"] {
            assert!(!message.0.starts_with(refusal), "{}", message.0);
        }
        if message.0 == "an nftables transaction is in force" {
            (self.0)();
        }
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}
