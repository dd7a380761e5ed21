//! Pods send only from their own addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use crate::common::cluster::*;
use crate::dataplane::dual_stack::{dual_nodes, own, pod_v6};
use tortie_api::calico::EndpointToHostAction;
use tortie_dataplane::PodWiring as _;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, RouteSocket};
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
