//! L2Bridge networks: pods of two emulated Windows nodes and of a Linux node, with routes between the nodes.

mod ipv6;

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tortie_hcn::schema::{Endpoint, LoadBalancer, Modify, Policy, RequestType, lenient};
use tortie_hcn::{Guid, HcnExt};
use tortie_kernel::interface_index;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::RouteSocket;

use crate::cluster::{
    Cluster, Connection, Location, WindowsNode, acl_block_in, connects, is_cut_off, provider, transfer,
};

const VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 100);
const PORT: u16 = 80;
const NODE_PORT: u16 = 30_080;
const PATIENCE: Duration = Duration::from_secs(20);
/// Enough connections to meet two backends.
const MANY: usize = 24;

/// Every connection sees the addresses of its two ends.
#[test]
fn pods_nodes_and_other_nodes_reach_each_other() {
    let cluster = Cluster::bridged();
    let [one, other] = &cluster.windows[..] else { panic!() };
    // The node has its endpoint's address towards its own pods, and that of its adapter towards others.
    let own = Location { address: provider(2).into(), ..one.node() };
    let places = [one.pod(0), one.pod(1), other.pod(0), cluster.linux(), one.node(), own];
    let by_ipv6 = places.each_ref().map(Location::by_ipv6);
    for [pod, neighbour, far, linux, end, own] in [places, by_ipv6] {
        for from in [&pod, &neighbour, &far, &linux] {
            for to in [&pod, &neighbour, &far, &linux] {
                if from.address != to.address {
                    transfer(from, to, 500_000);
                }
            }
        }
        for (from, to) in [(&end, &pod), (&pod, &end), (&pod, &own)] {
            transfer(from, to, 500_000);
        }
        for other in [&far, &linux] {
            transfer(&own, other, 500_000);
            transfer(other, &end, 500_000);
        }
        transfer(&far, &own, 500_000);
    }
}

/// On the way to another node, frames have the MAC address of the node's adapter, and no encapsulation.
#[test]
fn frames_have_the_address_of_the_adapter() {
    let cluster = Cluster::bridged();
    let node = &cluster.windows[0];
    let (pod, linux) = (node.pod(0), cluster.linux());
    let adapter =
        node.node().run(|| RouteSocket::open().unwrap().link("eth0").unwrap().unwrap().mac.unwrap());
    let socket = linux.run(|| PacketSocket::open(interface_index("eth0").unwrap()).unwrap());
    for (pod, linux) in [(pod.by_ipv6(), linux.by_ipv6()), (pod, linux)] {
        Connection::open(&pod, &linux).exchange();
        let (mut buffer, mut seen) = ([0; 2048], 0);
        while let Some(length) = socket.receive(&mut buffer).unwrap() {
            let frame = &buffer[..length];
            let (source, protocol) = match (pod.address, [frame[12], frame[13]]) {
                (IpAddr::V4(address), [8, 0]) => (frame[26..30] == address.octets(), frame[23]),
                (IpAddr::V6(address), [0x86, 0xdd]) => (frame[22..38] == address.octets(), frame[20]),
                _ => continue,
            };
            if source {
                assert_eq!(frame[6..12], adapter.0);
                assert_eq!(protocol, 6, "TCP");
                seen += 1;
            }
        }
        assert!(seen >= 3, "{seen} frames from {}", pod.address);
    }
}

#[test]
fn acls_close_pods_and_established_flows_continue() {
    let cluster = Cluster::bridged();
    let node = &cluster.windows[0];
    let (pod, neighbour, linux) = (node.pod(0), node.pod(1), cluster.linux());
    let kept = Connection::open(&linux, &pod);
    let blocked = vec![Policy::of(&acl_block_in(1000, &linux.address.to_string()))];
    node.hns.modify_endpoint(pod.endpoint, &Modify::policies(RequestType::Add, blocked.clone())).unwrap();
    for from in [&linux, &neighbour, &node.node()] {
        assert!(is_cut_off(from, &pod), "{}", from.address);
    }
    kept.exchange();
    node.hns.modify_endpoint(pod.endpoint, &Modify::policies(RequestType::Remove, blocked)).unwrap();
    for from in [&linux, &neighbour, &node.node()] {
        assert!(connects(from, &pod), "{}", from.address);
    }
}

/// A pod has the node's address outside, but not towards the exceptions.
#[test]
fn outbound_nat_spares_its_exceptions() {
    let cluster = Cluster::bridged();
    let node = &cluster.windows[0];
    let (pod, linux) = (node.pod(0), cluster.linux());
    let outside = Location { address: provider(1).into(), ..cluster.linux() };
    let settings = json!({"Exceptions": ["10.244.0.0/16"]});
    let nat = Policy { r#type: "OutBoundNAT".into(), settings, extra: Default::default() };
    node.hns.modify_endpoint(pod.endpoint, &Modify::policies(RequestType::Add, vec![nat])).unwrap();
    assert_eq!(source(&pod, &outside), provider(2));
    assert_eq!(source(&pod, &linux), pod.address);
    assert_eq!(source(&pod, &node.pod(1)), pod.address);
}

/// The client's address that a server sees.
fn source(from: &Location, server: &Location) -> IpAddr {
    let listener = server.run(|| TcpListener::bind((server.address, 81)).unwrap());
    let to = (server.address, 81).into();
    let _client = from.run(|| TcpStream::connect_timeout(&to, PATIENCE)).unwrap();
    listener.accept().unwrap().1.ip()
}

/// By load balancers as kube-proxy makes them on such a network: its own pod and one of another node are the backends.
#[test]
fn services_lead_to_pods_of_every_node_for_every_client() {
    let cluster = Cluster::bridged();
    let node = &cluster.windows[0];
    let (pod, client, linux) = (node.pod(0), node.pod(1), cluster.linux());
    let outside = Location { address: provider(1).into(), ..cluster.linux() };
    let own = Location { address: provider(2).into(), ..node.node() };
    let far = remote(node, linux.address);
    let (backends, both) = ([pod.endpoint, far], BTreeSet::from([pod.address, linux.address]));
    let hidden: IpAddr = provider(2).into();
    for direct in [true, false] {
        let made = balance(node, &backends, PORT, json!({"FrontendVIPs": [VIP], "Flags": u8::from(direct)}));
        for (from, sees) in [(&client, if direct { client.address } else { hidden }), (&own, hidden)] {
            let served = served(from, (VIP, PORT), [&pod, &linux]);
            assert_eq!(served, (both.clone(), BTreeSet::from([sees])), "{} {direct}", from.address);
        }
        node.hns.delete_load_balancer(made).unwrap();
    }
    let made = balance(node, &backends, NODE_PORT, json!({}));
    for from in [&client, &own, &outside] {
        let served = served(from, (provider(2), NODE_PORT), [&pod, &linux]);
        assert_eq!(served, (both.clone(), BTreeSet::from([hidden])), "{}", from.address);
    }
    node.hns.delete_load_balancer(made).unwrap();
    // `externalTrafficPolicy: Local`.
    balance(node, &[pod.endpoint], NODE_PORT, json!({"Flags": 1}));
    let served = served(&outside, (provider(2), NODE_PORT), [&pod, &linux]);
    assert_eq!(served, (BTreeSet::from([pod.address]), BTreeSet::from([outside.address])));
}

fn remote(node: &WindowsNode, address: IpAddr) -> Guid {
    let document = json!({"HostComputeNetwork": node.network, "Flags": 1, "MacAddress": "02-11-0a-f4-01-05",
        "IpConfigurations": [{"IpAddress": address}]});
    node.hns.create_endpoint(&lenient::<Endpoint>(&document.to_string()).unwrap()).unwrap()
}

fn balance(node: &WindowsNode, backends: &[Guid], port: u16, more: Value) -> Guid {
    let port = json!({"Protocol": 6, "InternalPort": 81, "ExternalPort": port, "Flags": 18});
    let mut document = json!({"HostComputeEndpoints": backends, "PortMappings": [port]});
    document.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    node.hns.create_load_balancer(&lenient::<LoadBalancer>(&document.to_string()).unwrap()).unwrap()
}

/// The servers of many connections to a Service, and the clients' addresses that they see.
fn served(
    from: &Location,
    to: (Ipv4Addr, u16),
    servers: [&Location; 2],
) -> (BTreeSet<IpAddr>, BTreeSet<IpAddr>) {
    let listen = |server: &Location| {
        let listener = server.run(|| TcpListener::bind((server.address, 81)).unwrap());
        listener.set_nonblocking(true).unwrap();
        (server.address, listener)
    };
    let listeners = servers.map(listen);
    let (mut met, mut sources) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..MANY {
        let client = from.run(|| TcpStream::connect_timeout(&SocketAddr::from(to), PATIENCE));
        let mut client = client.unwrap_or_else(|error| panic!("{} to {to:?}: {error}", from.address));
        let (server, mut accepted, peer) = accept(&listeners);
        accepted.set_nonblocking(false).unwrap();
        for end in [&client, &accepted] {
            end.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        let mut heard = [0; 5];
        client.write_all(b"hello").unwrap();
        accepted.read_exact(&mut heard).unwrap();
        accepted.write_all(&heard).unwrap();
        client.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"hello");
        met.insert(server);
        sources.insert(peer.ip());
    }
    (met, sources)
}

fn accept(listeners: &[(IpAddr, TcpListener)]) -> (IpAddr, TcpStream, SocketAddr) {
    let end = Instant::now() + PATIENCE;
    loop {
        for (address, listener) in listeners {
            match listener.accept() {
                Ok((stream, peer)) => return (*address, stream, peer),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert!(Instant::now() < end, "no server gets the connection");
        std::thread::sleep(Duration::from_millis(1));
    }
}
