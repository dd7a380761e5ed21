//! ICMP errors that pods send (policy decision 22).

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};
use tortie_kernel::namespace::NetNs;
use tortie_policy::program::{EndOfTier, EndpointProgram, TierProgram};

use crate::common::cluster::*;
use crate::dataplane::dual_stack::{add, both_of, dual_nodes, pod_v6};

const PORT: u16 = 7000;
const CLOSED_PORT: u16 = 7001;
/// The client's port.
const CLIENT: u16 = 7002;
/// Long enough for a packet between namespaces, which must not arrive.
const SILENCE: Duration = Duration::from_millis(700);

/// The program of a pod that may send nothing.
fn silent() -> EndpointProgram {
    let tier = TierProgram { name: "default".into(), policies: vec![], end: EndOfTier::Deny };
    EndpointProgram { egress: vec![tier], ..open() }
}

/// A socket that has sent a datagram, and learns of errors.
fn client(namespace: &NetNs, own: IpAddr, to: SocketAddr) -> UdpSocket {
    let socket = namespace.run(|| UdpSocket::bind((own, CLIENT)).unwrap()).unwrap();
    socket.connect(to).unwrap();
    socket.send(b"meow").unwrap();
    socket
}

/// Whether the peer's port counts as closed.
fn is_refused(socket: &UdpSocket, within: Duration) -> bool {
    socket.set_read_timeout(Some(within)).unwrap();
    let mut buffer = [0; 8];
    match socket.recv(&mut buffer) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => true,
        Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => false,
        other => panic!("{other:?}"),
    }
}

fn raw(namespace: &NetNs, family: AddressFamily, protocol: u32) -> OwnedFd {
    let protocol = Some(net::Protocol::from_raw(protocol.try_into().unwrap()));
    let open = || net::socket_with(family, SocketType::RAW, SocketFlags::empty(), protocol).unwrap();
    namespace.run(open).unwrap()
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let pairs = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = pairs.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// A forged "port unreachable" about the client's datagram, sent to the client.
fn forge(from: &NetNs, client: IpAddr, server: IpAddr) {
    let udp = [&CLIENT.to_be_bytes()[..], &PORT.to_be_bytes(), &[0, 12, 0, 0], b"meow"].concat();
    match (client, server) {
        (IpAddr::V4(client), IpAddr::V4(server)) => {
            let mut quoted =
                [&[0x45, 0, 0, 32, 0, 1, 0, 0, 64, 17, 0, 0][..], &client.octets(), &server.octets()]
                    .concat();
            let sum = checksum(&quoted);
            quoted[10..12].copy_from_slice(&sum);
            let mut icmp = [&[3, 3, 0, 0, 0, 0, 0, 0][..], &quoted, &udp].concat();
            let sum = checksum(&icmp);
            icmp[2..4].copy_from_slice(&sum);
            let socket = raw(from, AddressFamily::INET, 1);
            net::sendto(&socket, &icmp, SendFlags::empty(), &SocketAddr::from((client, 0))).unwrap();
        }
        (IpAddr::V6(client), IpAddr::V6(server)) => {
            let quoted = [&[0x60, 0, 0, 0, 0, 12, 17, 64][..], &client.octets(), &server.octets()].concat();
            // The kernel fills in the checksum.
            let icmp = [&[1, 4, 0, 0, 0, 0, 0, 0][..], &quoted, &udp].concat();
            let socket = raw(from, AddressFamily::INET6, 58);
            net::sendto(&socket, &icmp, SendFlags::empty(), &SocketAddr::from((client, 0))).unwrap();
        }
        families => panic!("{families:?}"),
    }
}

#[test]
fn errors_of_a_pod_about_flows_of_others_are_judged() {
    let (mut nodes, [pod, remote]) = dual_nodes();
    let neighbour = Pod::new("neighbour", 1, 3);
    add(&mut nodes[0], &neighbour, both_of(&neighbour));
    let pairs: [[IpAddr; 3]; 2] = [
        [pod.address.into(), remote.address.into(), neighbour.address.into()],
        [pod_v6(&pod).into(), pod_v6(&remote).into(), pod_v6(&neighbour).into()],
    ];
    for [own, server, own_of_neighbour] in pairs {
        nodes[0].program(&neighbour, open());
        let listening = remote.namespace.run(|| UdpSocket::bind((server, PORT)).unwrap()).unwrap();
        let flow = client(&pod.namespace, own, (server, PORT).into());
        listening.recv(&mut [0; 8]).unwrap();
        // The test's own error is one that the client believes, where policy lets it pass.
        forge(&neighbour.namespace, own, server);
        assert!(is_refused(&flow, TIMEOUT), "{own}: policy allows everything");
        nodes[0].program(&neighbour, silent());
        forge(&neighbour.namespace, own, server);
        assert!(!is_refused(&flow, SILENCE), "{own}: an error about a flow of others");

        // The neighbour has no such port, and may say so, although it may send nothing else.
        drop(flow);
        let answered = client(&pod.namespace, own, (own_of_neighbour, CLOSED_PORT).into());
        assert!(is_refused(&answered, TIMEOUT), "{own}: an error about a packet to the pod");
    }
}
