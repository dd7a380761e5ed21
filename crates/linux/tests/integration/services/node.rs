//! A node in a network namespace, with a link to its pods and one to everything else. Nobody at the other ends answers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};
use testkit::frames;
use testkit::links::{OTHERS, end, keep_to_one_processor, node_parameters};
use testkit::services::OF_NODE;
use tortie_api::net::Protocol;
use tortie_dataplane::MacAddress;
use tortie_kernel::conntrack::{Connection, Conntrack};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Neighbour, Route, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_policy::program::Flow;
use tortie_services::Sender;

/// The pods of the node. The others are elsewhere.
pub(super) const PODS: [&str; 6] = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", "fd00::2", "fd00::3"];
const GATEWAYS: [&str; 2] = ["100.64.0.1", "fd98::1"];
const MAC: MacAddress = MacAddress([2, 0, 0, 0, 1, 1]);
const ROUTE_PROTOCOL: u8 = 4;
/// `IPPROTO_RAW`: sockets that send packets with their own headers.
const HEADER_INCLUDED: u8 = 255;
const ETHERNET_HEADER: usize = 14;
/// The source port of the first packet of a batch.
const FIRST_PORT: u16 = 20_000;

pub(super) struct Node {
    pub(super) namespace: NetNs,
    _outside: NetNs,
    pods: Arc<PacketSocket>,
    world: Arc<PacketSocket>,
    loopback: PacketSocket,
    conntrack: Conntrack,
    senders: [OwnedFd; 2],
    next_tag: u32,
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fate {
    /// It arrived there, from that source.
    Arrived { source: IpAddr, destination: IpAddr, port: u16 },
    /// Its sender got an answer.
    Refused,
}

/// A packet that begins a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Begin {
    pub(super) sender: Sender,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
}

impl Node {
    pub(super) fn new() -> Self {
        keep_to_one_processor().unwrap();
        let (namespace, outside) = (NetNs::create().unwrap(), NetNs::create().unwrap());
        outside.run(|| sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1").unwrap()).unwrap();
        namespace
            .run(|| {
                node_parameters().unwrap();
                // Each packet is answered.
                for (name, value) in [
                    ("net/ipv4/ip_forward", "1"),
                    ("net/ipv4/icmp_ratemask", "0"),
                    ("net/ipv6/icmp/ratelimit", "0"),
                    ("net/ipv6/icmp/ratemask", "255"),
                ] {
                    sysctl::ensure(name, value).unwrap();
                }
            })
            .unwrap();
        let world = end(&namespace, ("world", MAC), &outside, "world").unwrap();
        let pods = end(&namespace, ("pods", MAC), &outside, "pods").unwrap();
        let configured = || {
            configure();
            let sender = |family| {
                let protocol = net::Protocol::from_raw(u32::from(HEADER_INCLUDED).try_into().unwrap());
                net::socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, Some(protocol)).unwrap()
            };
            let senders = [sender(AddressFamily::INET), sender(AddressFamily::INET6)];
            let loopback = PacketSocket::open(interface_index("lo").unwrap()).unwrap();
            (senders, loopback, Conntrack::open().unwrap())
        };
        let (senders, loopback, conntrack) = namespace.run(configured).unwrap();
        Self { namespace, _outside: outside, pods, world, loopback, conntrack, senders, next_tag: 1 }
    }

    /// Sends one packet each, and returns what became of them; nothing of those that nobody has seen again.
    pub(super) fn fates(&mut self, packets: &[Begin]) -> Vec<Option<Fate>> {
        self.conntrack.flush().unwrap();
        self.fates_of_known(packets)
    }

    /// As [`fates`](Self::fates), but the packets belong to connections of the packets before with these ports.
    pub(super) fn fates_of_known(&mut self, packets: &[Begin]) -> Vec<Option<Fate>> {
        let first = self.next_tag;
        self.next_tag += packets.len() as u32 + 1;
        for (number, packet) in (0u16..).zip(packets) {
            let flow = Flow {
                source: packet.source,
                destination: packet.destination,
                protocol: packet.protocol,
                source_port: FIRST_PORT + number,
                destination_port: packet.port,
                icmp: [Protocol::ICMP, Protocol::ICMPV6]
                    .contains(&packet.protocol)
                    .then(|| (if packet.source.is_ipv4() { 8 } else { 128 }, 0)),
            };
            self.send(packet.sender, &frames::frame(&flow, MAC.0, first + u32::from(number)));
        }
        let last = first + packets.len() as u32;
        self.wait(first, last).into_iter().fold(vec![None; packets.len()], |mut fates, (tag, fate)| {
            if let Some(place) = tag.checked_sub(first).and_then(|number| fates.get_mut(number as usize)) {
                // A packet of the node to itself may arrive and be refused.
                *place = Some(place.map_or(fate, |before: Fate| before.max(fate)));
            }
            fates
        })
    }

    /// The connections that are tracked, as what the client asked for and who answers.
    pub(super) fn tracked(&mut self) -> BTreeSet<(SocketAddr, SocketAddr)> {
        let all = std::cell::RefCell::new(BTreeSet::new());
        let list = |connection: &Connection| {
            all.borrow_mut().insert((connection.requested, connection.replier));
            false
        };
        assert_eq!(self.conntrack.forget_connections(list).unwrap(), 0);
        all.into_inner()
    }

    fn send(&self, sender: Sender, frame: &[u8]) {
        let socket = match sender {
            Sender::Pod => &self.pods,
            Sender::Other => &self.world,
            Sender::Node => return self.send_own(&frame[ETHERNET_HEADER..]),
        };
        assert!(socket.send(frame).unwrap(), "there is no room for a packet");
    }

    fn send_own(&self, packet: &[u8]) {
        let (socket, to) = match packet[0] >> 4 {
            4 => (&self.senders[0], IpAddr::from(<[u8; 4]>::try_from(&packet[16..20]).unwrap())),
            _ => (&self.senders[1], IpAddr::from(<[u8; 16]>::try_from(&packet[24..40]).unwrap())),
        };
        match net::sendto(socket, packet, SendFlags::empty(), &SocketAddr::from((to, 0))) {
            Ok(_) | Err(Errno::PERM | Errno::CONNREFUSED) => {}
            Err(error) => panic!("a packet of the node to {to}: {error}"),
        }
    }

    /// What has been seen until a packet that passes by has arrived, which takes as many hops as any other. A reset has no tag, but the port
    /// of the packet.
    fn wait(&self, first: u32, last: u32) -> BTreeMap<u32, Fate> {
        let flow = Flow {
            source: "198.51.100.250".parse().unwrap(),
            destination: "198.51.100.251".parse().unwrap(),
            protocol: Protocol::UDP,
            source_port: 7,
            destination_port: 7,
            icmp: None,
        };
        self.send(Sender::Pod, &frames::frame(&flow, MAC.0, last));
        let deadline = Instant::now() + Duration::from_secs(10);
        let (mut seen, mut ports) = (BTreeMap::new(), Vec::new());
        while !seen.contains_key(&last) {
            assert!(Instant::now() < deadline, "the last packet did not arrive");
            std::thread::yield_now();
            read(&self.world, &mut seen, &mut ports);
        }
        read(&self.pods, &mut seen, &mut ports);
        read(&self.loopback, &mut seen, &mut ports);
        for port in ports.into_iter().filter_map(|port: u16| port.checked_sub(FIRST_PORT)) {
            seen.insert(first + u32::from(port), Fate::Refused);
        }
        seen
    }
}

fn configure() {
    let mut routes = RouteSocket::open().unwrap();
    let (world, pods) = (interface_index("world").unwrap(), interface_index("pods").unwrap());
    let loopback = interface_index("lo").unwrap();
    let up = Change::SetLink(loopback, vec![tortie_kernel::route::LinkSetting::Up(true)]);
    routes.change(&up).unwrap();
    for address in OF_NODE {
        let address: IpAddr = address.parse().unwrap();
        if !address.is_loopback() {
            let prefix_length = if address.is_ipv4() { 32 } else { 128 };
            routes.change(&Change::AddAddress(Address { link: world, address, prefix_length })).unwrap();
        }
    }
    let mut via = |net: &str, link| {
        let net: ipnet::IpNet = net.parse().unwrap();
        let gateway: IpAddr = GATEWAYS[usize::from(net.addr().is_ipv6())].parse().unwrap();
        routes.change(&Change::SetNeighbour(Neighbour { link, address: gateway, mac: OTHERS })).unwrap();
        routes.change(&Change::AddRoute(Route::via(net, gateway, link, ROUTE_PROTOCOL))).unwrap();
    };
    ["0.0.0.0/0", "::/0"].into_iter().for_each(|all| via(all, world));
    let of_pod = |pod: &str| ipnet::IpNet::from(pod.parse::<IpAddr>().unwrap()).to_string();
    PODS.into_iter().for_each(|pod| via(&of_pod(pod), pods));
}

/// Reads what has arrived: tagged packets, ICMP errors about them, and the ports to which resets go.
fn read(socket: &PacketSocket, seen: &mut BTreeMap<u32, Fate>, resets: &mut Vec<u16>) {
    let mut buffer = [0; 2048];
    while let Some(length) = socket.receive(&mut buffer).unwrap() {
        let frame = &buffer[..length];
        let Some(packet) = frame.get(ETHERNET_HEADER..) else { continue };
        let Some((protocol, source, destination, transport)) = parse(packet) else { continue };
        let port =
            |at: usize| transport.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        let (Some(to), Some(first)) = (port(2), transport.first()) else { continue };
        if protocol == 6 && transport.get(13).is_some_and(|flags| flags & 4 != 0) {
            resets.push(to);
            continue;
        }
        let is_error = (protocol, *first) == (1, 3) || (protocol, *first) == (58, 1);
        let has_ports = [6, 17, 132].contains(&protocol);
        let fate = match is_error {
            true => Fate::Refused,
            false => Fate::Arrived { source, destination, port: if has_ports { to } else { 0 } },
        };
        let tag = frames::tag(frame);
        let before = seen.get(&tag).copied();
        seen.insert(tag, before.map_or(fate, |before| before.max(fate)));
    }
}

/// The protocol, the addresses, and what follows the header.
fn parse(packet: &[u8]) -> Option<(u8, IpAddr, IpAddr, &[u8])> {
    let four = |at: usize| Some(IpAddr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?));
    let sixteen = |at: usize| Some(IpAddr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?));
    match packet.first()? >> 4 {
        4 => Some((*packet.get(9)?, four(12)?, four(16)?, packet.get(20..)?)),
        6 => Some((*packet.get(6)?, sixteen(8)?, sixteen(24)?, packet.get(40..)?)),
        _ => None,
    }
}
