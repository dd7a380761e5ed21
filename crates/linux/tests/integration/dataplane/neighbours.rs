//! Neighbour discovery from pods (policy decision 22).

use std::net::Ipv6Addr;
use std::process::Command;
use std::time::{Duration, Instant};

use tortie_kernel::interface_index;
use tortie_kernel::packet::PacketSocket;
use tortie_linux::wire::{GATEWAY_V6, HOST_MAC};

use crate::common::checksum;
use crate::common::cluster::*;
use crate::dataplane::dual_stack::{add, both_of, dual_nodes, pod_v6};

/// The hardware address in the forged packets.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// A frame with a solicitation for the gateway (RFC 4861). One from no address goes to the multicast group of the address.
fn solicitation(icmp_type: u8, source: Ipv6Addr) -> Vec<u8> {
    let [.., a, b, c] = GATEWAY_V6.octets();
    let (mac, destination) = match source.is_unspecified() {
        true => {
            let group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c];
            ([0x33, 0x33, 0xff, a, b, c], group)
        }
        false => (HOST_MAC.0, GATEWAY_V6.octets()),
    };
    let mut message = vec![icmp_type, 0, 0, 0, 0, 0, 0, 0];
    if icmp_type == NEIGHBOUR_SOLICITATION {
        message.extend(GATEWAY_V6.octets());
    }
    if !source.is_unspecified() {
        // The source's hardware address.
        message.extend([&[1, 1][..], &MAC].concat());
    }
    let addresses = [source.octets(), destination].concat();
    let length = (message.len() as u16).to_be_bytes();
    let sum = checksum(&[&addresses[..], &[0, 0], &length, &[0, 0, 0, 58], &message].concat());
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let header = [&[0x60, 0, 0, 0][..], &length, &[58, 255], &addresses].concat();
    [&mac[..], &MAC, &[0x86, 0xdd], &header, &message].concat()
}

/// Whether the gateway answers a solicitation, each of which the kernel answers at once.
fn is_answered(socket: &PacketSocket, source: Ipv6Addr) -> bool {
    let mut frame = [0; 2048];
    while socket.receive(&mut frame).unwrap().is_some() {}
    assert!(socket.send(&solicitation(NEIGHBOUR_SOLICITATION, source)).unwrap());
    let deadline = Instant::now() + Duration::from_millis(500);
    while Instant::now() < deadline {
        while let Some(length) = socket.receive(&mut frame).unwrap() {
            if length > 54 && frame[12..14] == [0x86, 0xdd] && frame[54] == NEIGHBOUR_ADVERTISEMENT {
                return true;
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// The node's neighbours that pods told it of. The entries of the agent are permanent.
fn learned(node: &Node, interface: &str) -> Vec<String> {
    let list = || Command::new("ip").args(["-6", "neigh", "show", "dev", interface]).output().unwrap();
    let output = node.namespace.run(list).unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let is_learned = |line: &&str| line.contains("lladdr") && !line.contains("PERMANENT");
    lines.lines().filter(is_learned).map(str::to_owned).collect()
}

#[test]
fn a_pod_adds_no_neighbours_by_solicitations() {
    let (mut nodes, _pods) = dual_nodes();
    let pod = Pod::new("prober", 1, 3);
    let interface = add(&mut nodes[0], &pod, both_of(&pod)).host_interface;
    let open = || PacketSocket::open(interface_index("eth0").unwrap()).unwrap();
    let socket = pod.namespace.run(open).unwrap();

    // The pod finds its gateway, once that has looked whether its own address is in use, and may look itself.
    let deadline = Instant::now() + TIMEOUT;
    while !is_answered(&socket, pod_v6(&pod)) {
        assert!(Instant::now() < deadline, "the gateway does not answer");
    }
    assert!(is_answered(&socket, Ipv6Addr::UNSPECIFIED));
    assert_eq!(learned(&nodes[0], &interface), Vec::<String>::new());

    let beside = Ipv6Addr::from_bits(pod_v6(&pod).to_bits() + 1);
    let of_link = |number: u16| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 1, number);
    let elsewhere = |number: u16| Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 1, number);
    for forged in (0..100).flat_map(|number| [of_link(number), elsewhere(number)]).chain([beside]) {
        for icmp_type in [ROUTER_SOLICITATION, NEIGHBOUR_SOLICITATION] {
            assert!(socket.send(&solicitation(icmp_type, forged)).unwrap());
        }
    }
    assert!(!is_answered(&socket, of_link(7)));
    assert!(!is_answered(&socket, beside));
    assert!(is_answered(&socket, pod_v6(&pod)), "the pod's own packets still arrive");
    assert_eq!(learned(&nodes[0], &interface), Vec::<String>::new());
}
