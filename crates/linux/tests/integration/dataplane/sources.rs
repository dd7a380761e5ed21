//! Pods send only from their own addresses, and nobody else does (policy decision 49).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use crate::common::cluster::*;
use crate::dataplane::dual_stack::{add, both_of, dual_nodes, own, pod_v6};
use tortie_api::calico::{EndpointToHostAction, PodSourcesFromOutside};
use tortie_dataplane::{Endpoint, EndpointId, NodeState, PodWiring as _, Reason, Report};
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};
use tortie_kernel::sysctl;

/// A socket that sends from this address, which the namespace gets.
fn sender(namespace: &NetNs, address: impl Into<IpAddr>) -> UdpSocket {
    let address = address.into();
    let open = || {
        // Otherwise, an IPv6 address can be used after a second only.
        sysctl::ensure("net/ipv6/conf/eth0/accept_dad", "0").unwrap();
        let link = interface_index("eth0").unwrap();
        let prefix_length = if address.is_ipv4() { 32 } else { 128 };
        let address = Address { link, address, prefix_length };
        // The pod's own address exists.
        let _ = RouteSocket::open().unwrap().change(&Change::AddAddress(address));
        UdpSocket::bind((address.address, 0)).unwrap()
    };
    namespace.run(open).unwrap()
}

fn receiver(namespace: &NetNs) -> UdpSocket {
    let socket = namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 7000)).unwrap()).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

/// The kernel's own check of sources is strict, loose or off, as other software may set it for all interfaces: the
/// table's check counts in any case.
#[test]
fn packets_from_other_addresses_are_dropped() {
    let (mut nodes, [pod, remote]) = two_nodes();
    let neighbour = Pod::new("neighbour", 1, 3);
    nodes[0].add(&neighbour, open());
    let to_node = EndpointToHostAction::Accept;
    nodes[0].change(|state| Arc::make_mut(&mut state.settings).endpoint_to_host = to_node);
    let node = &nodes[0];
    let receivers = [&neighbour.namespace, &remote.namespace, &node.namespace].map(receiver);
    let to = [neighbour.address, remote.address, node_address(1)];
    // Of nobody, of this node's block, of the block of another node, and of that node.
    let forged = [[192, 0, 2, 1], [10, 65, 1, 9], [10, 65, 2, 9], [172, 31, 0, 2]].map(Ipv4Addr::from);
    let forged = forged.map(|address| sender(&pod.namespace, address));
    let own = sender(&pod.namespace, pod.address);
    let host = node.wiring.host_interface(&pod.id(), &pod.container_id);
    for filter in ["1", "2", "0"] {
        let set = || {
            for link in ["all", &host] {
                sysctl::ensure(&format!("net/ipv4/conf/{link}/rp_filter"), filter).unwrap();
            }
        };
        node.namespace.run(set).unwrap();
        for (receiver, to) in receivers.iter().zip(to) {
            for socket in &forged {
                socket.send_to(b"forged", (to, 7000)).unwrap();
            }
            // When this one has arrived, the others have been dropped or received.
            own.send_to(b"own", (to, 7000)).unwrap();
            let mut buffer = [0; 8];
            let (length, from) = receiver.recv_from(&mut buffer).unwrap();
            assert_eq!(
                (&buffer[..length], from.ip()),
                (&b"own"[..], pod.address.into()),
                "rp_filter {filter}"
            );
        }
    }
}

/// IPv6 has no check of the kernel's own.
#[test]
fn ipv6_packets_from_other_addresses_are_dropped() {
    let (mut nodes, [pod, remote]) = dual_nodes();
    let to_node = EndpointToHostAction::Accept;
    nodes[0].change(|state| Arc::make_mut(&mut state.settings).endpoint_to_host = to_node);
    let receiver = |namespace: &NetNs| {
        let socket = namespace.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 7000)).unwrap()).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket
    };
    // Of nobody, of this node's block, of the block of the other node, and that node.
    let forged = [
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1),
        Ipv6Addr::new(0xfd65, 0, 0, 1, 0, 0, 0, 9),
        Ipv6Addr::new(0xfd65, 0, 0, 2, 0, 0, 0, 9),
        own(2),
    ];
    let forged = forged.map(|address| sender(&pod.namespace, address));
    let from = sender(&pod.namespace, pod_v6(&pod));
    for (namespace, to) in [(&remote.namespace, pod_v6(&remote)), (&nodes[0].namespace, own(1))] {
        let receiver = receiver(namespace);
        for socket in &forged {
            socket.send_to(b"forged", (to, 7000)).unwrap();
        }
        // When this one has arrived, the others have been dropped or received.
        from.send_to(b"own", (to, 7000)).unwrap();
        let mut buffer = [0; 8];
        let (length, source) = receiver.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..length], source.ip()), (&b"own"[..], pod_v6(&pod).into()), "{to}");
    }
}

/// A machine beside the nodes that sends to pods without the overlay.
fn stranger(nodes: &[Node; 2], to: &[IpAddr]) -> NetNs {
    let machine = nodes[0].underlay().connect(9);
    let routes = || {
        sysctl::ensure("net/ipv6/conf/eth0/accept_dad", "0").unwrap();
        let link = interface_index("eth0").unwrap();
        let mut socket = RouteSocket::open().unwrap();
        let own = Address { link, address: own(9).into(), prefix_length: 64 };
        socket.change(&Change::AddAddress(own)).unwrap();
        for destination in to {
            let router: IpAddr =
                if destination.is_ipv4() { node_address(1).into() } else { self::own(1).into() };
            let route = Route::via((*destination).into(), router, link, 4);
            socket.change(&Change::AddRoute(route)).unwrap();
        }
    };
    machine.run(routes).unwrap();
    machine
}

/// The texts that arrive at a receiver until the last one.
fn received(receiver: &UdpSocket) -> Vec<String> {
    let mut texts = Vec::new();
    while texts.last().is_none_or(|last| last != "last") {
        let mut buffer = [0; 32];
        let length = receiver.recv(&mut buffer).unwrap();
        texts.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    texts
}

fn reasons(report: &Report) -> Vec<Reason> {
    report.node.iter().map(|condition| condition.reason).collect()
}

/// The kernel's own check is off, as Debian and others have it.
#[test]
fn packets_from_outside_with_the_address_of_a_local_pod_are_dropped() {
    let (mut nodes, [pod, remote]) = dual_nodes();
    let neighbour = Pod::new("neighbour", 1, 3);
    add(&mut nodes[0], &neighbour, both_of(&neighbour));
    let loose = || {
        for link in ["all", "eth0"] {
            sysctl::ensure(&format!("net/ipv4/conf/{link}/rp_filter"), "0").unwrap();
        }
    };
    nodes[0].namespace.run(loose).unwrap();
    let outside = stranger(&nodes, &[pod.address.into(), pod_v6(&pod).into()]);
    for (to, local, remote_pod, node, stranger) in [
        (
            IpAddr::from(pod.address),
            IpAddr::from(neighbour.address),
            IpAddr::from(remote.address),
            IpAddr::from(node_address(1)),
            IpAddr::from(node_address(9)),
        ),
        (
            pod_v6(&pod).into(),
            pod_v6(&neighbour).into(),
            pod_v6(&remote).into(),
            own(1).into(),
            own(9).into(),
        ),
    ] {
        let receivers = [&pod.namespace, &nodes[0].namespace].map(|namespace| {
            let any: IpAddr =
                if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            let socket = namespace.run(|| UdpSocket::bind((any, 7000)).unwrap()).unwrap();
            socket.set_read_timeout(Some(TIMEOUT)).unwrap();
            socket
        });
        // The address of a remote pod is not known to be false: without encapsulation, its packets come like these.
        let sources = [("local", local), ("remote", remote_pod), ("last", stranger)];
        let sockets = sources.map(|(text, source)| (text, sender(&outside, source)));
        let send = || {
            for (text, socket) in &sockets {
                socket.send_to(text.as_bytes(), (to, 7000)).unwrap();
                socket.send_to(text.as_bytes(), (node, 7000)).unwrap();
            }
            [received(&receivers[0]), received(&receivers[1])]
        };
        let without_local = || [vec!["remote", "last"], vec!["remote", "last"]];
        assert_eq!(nodes[0].resync(), Report::default());
        assert_eq!(send(), without_local(), "to {to} and {node}");
        assert_eq!(reasons(&nodes[0].resync()), [Reason::PodAddressFromOutside]);
        assert_eq!(nodes[0].resync(), Report::default(), "there were no more");
        let allow = |state: &mut NodeState| {
            Arc::make_mut(&mut state.settings).pod_sources_from_outside = PodSourcesFromOutside::Allow;
        };
        nodes[0].change(allow);
        assert_eq!(send()[0], ["local", "remote", "last"], "as FelixConfiguration says");
        nodes[0].change(|state| state.settings = Default::default());
        nodes[0].restart();
        assert_eq!(send(), without_local(), "after a restart");

        // Two endpoints may claim the address for a while.
        let own = nodes[0].state.endpoints[&neighbour.id()].clone();
        let ghost = EndpointId { pod: "ghost".into(), ..neighbour.id() };
        let other = Endpoint { host_interface: "cali-ghost".into(), ..Endpoint::clone(&own) };
        nodes[0].change(|state| drop(state.endpoints.insert(ghost.clone(), other.into())));
        nodes[0].change(|state| drop(state.endpoints.remove(&ghost)));
        assert_eq!(send(), without_local(), "one endpoint is left");
        nodes[0].change(|state| drop(state.endpoints.remove(&neighbour.id())));
        assert_eq!(send()[0], ["local", "remote", "last"], "it is no pod's address any more");
        nodes[0].change(|state| drop(state.endpoints.insert(neighbour.id(), own)));
        assert_eq!(send(), without_local(), "it is a pod's again");
    }
}

/// Another plugin may have connected a pod before, and its packets come by an interface of that plugin.
#[test]
fn packets_of_a_pod_without_an_interface_of_tortie_pass() {
    let ([mut node, outside], [pod, _other]) = node_with_two_pods();
    let address = Ipv4Addr::new(10, 65, 1, 9);
    let id = EndpointId { pod: "earlier".into(), ..pod.id() };
    let endpoint = Endpoint::clone(&node.state.endpoints[&pod.id()]);
    let endpoint =
        Endpoint { host_interface: "cali-none".into(), addresses: vec![address.into()], ..endpoint };
    node.change(|state| drop(state.endpoints.insert(id, endpoint.into())));
    let route = |namespace: &NetNs, to: IpAddr, router: Option<IpAddr>| {
        let add = || {
            sysctl::ensure("net/ipv4/conf/eth0/rp_filter", "0").unwrap();
            let link = interface_index("eth0").unwrap();
            let route = match router {
                Some(router) => Route::via(to.into(), router, link, 4),
                None => Route::on_link(to.into(), link, 4),
            };
            RouteSocket::open().unwrap().change(&Change::AddRoute(route)).unwrap();
        };
        namespace.run(add).unwrap();
    };
    route(&outside.namespace, pod.address.into(), Some(node_address(1).into()));
    // The other plugin's route to its pod.
    route(&node.namespace, address.into(), None);
    let receivers = [&pod.namespace, &node.namespace].map(receiver);
    let socket = sender(&outside.namespace, address);
    for (receiver, to) in receivers.iter().zip([pod.address, node_address(1)]) {
        socket.send_to(b"last", (to, 7000)).unwrap();
        assert_eq!(received(receiver), ["last"], "to {to}");
    }
}
