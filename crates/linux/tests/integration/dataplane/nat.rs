//! Packets that leave the pools get the node's address (`natOutgoing`), with real connections.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use crate::common::cluster::*;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};

/// An external address inside a pool, and one outside all pools.
const POOLED: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 9);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(172, 31, 0, 9);

#[test]
fn packets_that_leave_the_pools_have_the_nodes_address() {
    let ([mut node, outside], [pod, other]) = node_with_two_pods();
    // The second pool is behind the same switch, and has a route back to pods.
    let wire = |route: Route, address: Option<Ipv4Addr>| {
        move || {
            let mut socket = RouteSocket::open().unwrap();
            let link = interface_index("eth0").unwrap();
            if let Some(address) = address {
                let address = Address { link, address: address.into(), prefix_length: 32 };
                socket.change(&Change::AddAddress(address)).unwrap();
            }
            socket.change(&Change::AddRoute(Route { link: Some(link), ..route })).unwrap();
        }
    };
    let to_pods = Route::via(block(1).into(), node_address(1).into(), 0, 4);
    outside.namespace.run(wire(to_pods, Some(POOLED))).unwrap();
    let to_pool = Route::on_link("10.66.0.0/24".parse().unwrap(), 0, 4);
    node.namespace.run(wire(to_pool, None)).unwrap();
    let listen = || TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 80))).unwrap();
    let server = outside.namespace.run(listen).unwrap();
    let neighbour = other.namespace.run(listen).unwrap();

    let own = Some(IpAddr::from(pod.address));
    let pools = |outgoing| -> BTreeMap<_, _> {
        [("10.65.0.0/16".parse().unwrap(), outgoing), ("10.66.0.0/16".parse().unwrap(), false)].into()
    };
    for (outgoing, expected) in [(false, own), (true, Some(node_address(1).into())), (false, own)] {
        let report = node.change(|state| Arc::make_mut(&mut state.settings).pools = pools(outgoing));
        assert_eq!(report, Report::default());
        assert_eq!(seen(pod.connect(OUTSIDE, 80), &server), expected, "natOutgoing: {outgoing}");
        assert_eq!(seen(pod.connect(POOLED, 80), &server), own, "another pool");
        assert_eq!(seen(pod.connect(other.address, 80), &neighbour), own, "another pod");
    }

    // An operator excludes the addresses of nodes, and only those.
    for (exceptions, expected) in [
        (vec![OUTSIDE.into()], own),
        (vec![POOLED.into()], Some(node_address(1).into())),
        (vec![], Some(node_address(1).into())),
    ] {
        let report = node.change(|state| {
            let settings = Arc::make_mut(&mut state.settings);
            (settings.pools, settings.nat_exceptions) = (pools(true), exceptions.iter().copied().collect());
        });
        assert_eq!(report, Report::default());
        assert_eq!(
            seen(pod.connect(OUTSIDE, 80), &server),
            expected,
            "natOutgoingExclusions: {exceptions:?}"
        );
        assert_eq!(seen(pod.connect(POOLED, 80), &server), own, "another pool");
    }

    // A pod outside all pools is still a pod of this node; the node's own packets keep their address.
    let tunnel = Ipv4Addr::new(10, 65, 1, 1);
    let none: BTreeMap<_, _> =
        [("10.65.1.0/31".parse().unwrap(), true), ("10.65.1.2/32".parse().unwrap(), true)].into();
    node.change(|state| Arc::make_mut(&mut state.settings).pools = none);
    assert_eq!(seen(pod.connect(other.address, 80), &neighbour), own, "a pod outside of the pools");
    let from_tunnel = || {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: tunnel.into(), prefix_length: 32 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
                .unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((tunnel, 0))).unwrap();
        rustix::net::connect(&socket, &SocketAddr::from((OUTSIDE, 80))).unwrap();
        Some(TcpStream::from(socket))
    };
    assert_eq!(
        node.namespace.run(|| seen(from_tunnel(), &server)).unwrap(),
        Some(tunnel.into()),
        "the node's own"
    );
    assert_eq!(seen(pod.connect(OUTSIDE, 80), &server), Some(node_address(1).into()));
    assert_eq!(node.resync(), Report::default());
}
