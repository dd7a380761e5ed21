//! IPv6 beside IPv4: pings, datagrams, and what ACLs block.

use std::net::{SocketAddrV6, UdpSocket};
use std::time::Duration;

use ipnet::IpNet;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketType, bind, ipproto, recv, sendto, socket, sockopt,
};
use serde_json::json;
use tortie_hcn::HcnExt;
use tortie_hcn::schema::{Modify, Policy, RequestType};
use tortie_kernel::route::{Change, Route};

use super::*;

/// Long enough for a packet that passes, on a machine that does little else. Nobody reports a drop.
const BRIEF: Duration = Duration::from_millis(700);

/// The places of a test with their IPv6 addresses: two pods of a node, the node, a pod of another node, and a Linux node.
fn places(cluster: &Cluster) -> [Location; 5] {
    let [one, other] = &cluster.windows[..] else { panic!() };
    [one.pod(0), one.pod(1), one.node(), other.pod(0), cluster.linux()].map(|place| place.by_ipv6())
}

#[test]
fn pings_pass_between_all_places() {
    let cluster = Cluster::bridged();
    let places = places(&cluster);
    for from in &places {
        for to in &places {
            assert!(answers_ping(from, to, PATIENCE), "{} to {}", from.address, to.address);
        }
    }
}

#[test]
fn datagrams_pass_between_all_places() {
    let cluster = Cluster::bridged();
    let places = places(&cluster);
    for from in &places {
        for to in &places {
            // The second one needs fragments.
            for size in [600, 5000] {
                assert!(
                    answers_datagram(from, to, size, PATIENCE),
                    "{} to {}: {size}",
                    from.address,
                    to.address
                );
            }
        }
    }
}

/// A pod that has its subnet on the link asks for its neighbours' MAC addresses.
#[test]
fn the_switch_answers_the_neighbour_solicitations_of_linux() {
    let cluster = Cluster::bridged();
    let [pod, neighbour, end, ..] = places(&cluster);
    let subnet = IpNet::new(pod.address, 64).unwrap().trunc();
    let add = || {
        let link = interface_index("eth0").unwrap();
        RouteSocket::open().unwrap().change(&Change::AddRoute(Route::on_link(subnet, link, 3))).unwrap();
    };
    pod.run(add);
    for to in [&neighbour, &end] {
        assert!(answers_ping(&pod, to, PATIENCE), "{}", to.address);
    }
}

/// An ACL with an IPv6 address blocks TCP, UDP and pings from there, and nothing of IPv4. Established flows continue.
#[test]
fn acls_close_pods_for_ipv6() {
    let cluster = Cluster::bridged();
    let node = &cluster.windows[0];
    let [pod, neighbour, end, far, linux] = places(&cluster);
    let kept = Connection::open(&linux, &pod);
    let allow = json!({"Action": "Allow", "Direction": "In", "RuleType": "Switch", "Priority": 2000});
    let open = Policy { r#type: "ACL".into(), settings: allow, extra: Default::default() };
    for closed in [&linux, &far, &neighbour, &end] {
        let acls = vec![Policy::of(&acl_block_in(1000, &closed.address.to_string())), open.clone()];
        let change = |request| Modify::policies(request, acls.clone());
        node.hns.modify_endpoint(pod.endpoint, &change(RequestType::Add)).unwrap();
        for from in [&linux, &far, &neighbour, &end] {
            let passes = from.address != closed.address;
            let patience = if passes { PATIENCE } else { BRIEF };
            let seen = [
                if passes { connects(from, &pod) } else { !is_cut_off(from, &pod) },
                answers_datagram(from, &pod, 600, patience),
                answers_ping(from, &pod, patience),
            ];
            assert_eq!(seen, [passes; 3], "{} with {} closed", from.address, closed.address);
        }
        for from in [&cluster.linux(), &node.pod(1), &node.node()] {
            assert!(connects(from, &node.pod(0)), "{}", from.address);
        }
        assert!(answers_ping(&pod, closed, PATIENCE), "what the pod begins is answered");
        kept.exchange();
        node.hns.modify_endpoint(pod.endpoint, &change(RequestType::Remove)).unwrap();
        assert!(connects(closed, &pod), "{}", closed.address);
    }
}

fn ipv6_of(place: &Location, port: u16) -> SocketAddrV6 {
    let IpAddr::V6(address) = place.address else { panic!("{}", place.address) };
    SocketAddrV6::new(address, port, 0, 0)
}

/// Whether an echo request is answered.
fn answers_ping(from: &Location, to: &Location, patience: Duration) -> bool {
    const REPLY: u8 = 129;
    let own = from.run(|| socket(AddressFamily::INET6, SocketType::RAW, Some(ipproto::ICMPV6)).unwrap());
    bind(&own, &ipv6_of(from, 0)).unwrap();
    sockopt::set_socket_timeout(&own, sockopt::Timeout::Recv, Some(patience)).unwrap();
    // The system adds the checksum.
    let identifier = rand::random::<[u8; 2]>();
    let request = [&[128, 0, 0, 0][..], &identifier, &[0, 1], b"tortie"].concat();
    sendto(&own, &request, SendFlags::empty(), &ipv6_of(to, 0)).unwrap();
    let end = Instant::now() + patience;
    let mut message = [0; 128];
    while Instant::now() < end {
        // An error is the end of the patience.
        let Ok((_, length)) = recv(&own, &mut message[..], RecvFlags::empty()) else { return false };
        let message = &message[..length];
        if message[0] == REPLY && message[4..6] == identifier {
            assert_eq!(message[6..], request[6..]);
            return true;
        }
    }
    false
}

/// Whether a datagram is sent back. It is repeated: the first ones tell the sender the MTU of the path.
fn answers_datagram(from: &Location, to: &Location, size: usize, patience: Duration) -> bool {
    let open = |place: &Location| {
        let socket = place.run(|| UdpSocket::bind((place.address, 0)).unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    };
    let (client, server) = (open(from), open(to));
    let sent: Vec<u8> = (0..size).map(|i| i as u8).collect();
    let (end, mut buffer) = (Instant::now() + patience, vec![0; 1 << 16]);
    while Instant::now() < end {
        client.send_to(&sent, server.local_addr().unwrap()).unwrap();
        let Ok((length, sender)) = server.recv_from(&mut buffer) else { continue };
        assert_eq!((&buffer[..length], sender.ip()), (&sent[..], from.address));
        server.send_to(&sent, sender).unwrap();
        let Ok(length) = client.recv(&mut buffer) else { continue };
        assert_eq!(buffer[..length], sent);
        return true;
    }
    false
}
