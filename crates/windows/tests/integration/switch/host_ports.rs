//! Ports of an emulated Windows node that lead to its pods, with real connections.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use tortie_api::net::{Action, Protocol};
use tortie_dataplane::{Delta, HostPort};
use tortie_kernel::namespace::NetNs;
use tortie_policy::program::{EndOfTier, EndpointProgram, EntityMatch, PolicyRules, Rule, TierProgram};

use crate::switch::switched::*;

const NODE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 1);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 2);
/// For what must come.
const PATIENCE: Duration = Duration::from_secs(10);
/// For what must not come. TCP has sent its first packet twice by then.
const SILENCE: Duration = Duration::from_millis(1_800);

fn port(protocol: Protocol, port: u16, pod_port: u16) -> HostPort {
    HostPort { protocol, address: None, port, pod_port }
}

/// A node with two pods, and a machine on its network that is no node.
fn node_and_outside() -> (Node, NetNs) {
    let [first, outside] = underlay();
    let mut node = Node::new(1, first);
    let nobody = tortie_dataplane::Vtep { parent: Ipv4Addr::new(172, 16, 0, 77).into(), ..node.vtep.clone() };
    node.start(&nobody, 2);
    node.add_pod(4);
    node.add_pod(5);
    (node, outside)
}

fn listen(node: &Node, pod: usize, port: u16) -> TcpListener {
    let (namespace, address) = &node.pods[pod];
    namespace.run(|| TcpListener::bind((*address, port)).unwrap()).unwrap()
}

/// The address of the client that a server sees, after a byte there and back.
fn client_seen(from: &NetNs, to: SocketAddr, server: &TcpListener) -> Option<std::net::IpAddr> {
    let mut client = from.run(|| TcpStream::connect_timeout(&to, SILENCE)).unwrap().ok()?;
    let (mut accepted, address) = server.accept().unwrap();
    client.write_all(b"?").unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut byte = [0];
    accepted.read_exact(&mut byte).unwrap();
    accepted.write_all(&byte).unwrap();
    client.read_exact(&mut byte).unwrap();
    Some(address.ip())
}

fn only_from(address: Ipv4Addr) -> (Delta, EndpointProgram) {
    let source = EntityMatch { nets: vec![ipnet::Ipv4Net::from(address).into()], ..EntityMatch::default() };
    let rules = PolicyRules { ingress: vec![Rule { source, ..Rule::all(Action::Allow) }], egress: vec![] };
    let tier =
        TierProgram { name: "default".into(), policies: vec![policy_id("some")], end: EndOfTier::Deny };
    let profiles = vec![policy_id("open")];
    let program = EndpointProgram { ingress: vec![tier], egress: vec![], profiles };
    (Delta::Policy(policy_id("some"), Arc::new(rules)), program)
}

#[test]
fn a_port_of_the_node_leads_to_its_pod_and_policy_sees_the_client() {
    let (mut node, outside) = node_and_outside();
    let server = listen(&node, 0, 80);
    let at = SocketAddr::from((NODE, 8080));
    assert_eq!(client_seen(&outside, at, &server), None, "before");
    node.set_host_ports(4, vec![port(Protocol::TCP, 8080, 80)]);
    assert_eq!(client_seen(&outside, at, &server), Some(OUTSIDE.into()));
    assert_eq!(client_seen(&node.namespace, at, &server), Some(NODE.into()), "the node itself");
    let other = node.pods[1].1;
    assert_eq!(client_seen(&node.pods[1].0, at, &server), Some(other.into()), "another pod");

    let (policy, program) = only_from(Ipv4Addr::new(172, 16, 0, 99));
    node.apply(&[policy]);
    node.set_program(4, program.clone());
    assert_eq!(client_seen(&outside, at, &server), None, "policy does not name the client");
    assert_eq!(client_seen(&node.pods[1].0, at, &server), None, "nor the other pod");
    let (policy, _) = only_from(OUTSIDE);
    node.apply(&[policy]);
    assert_eq!(client_seen(&outside, at, &server), Some(OUTSIDE.into()), "policy names the client");
    assert_eq!(client_seen(&node.pods[1].0, at, &server), None);

    node.set_host_ports(4, vec![port(Protocol::TCP, 8081, 80)]);
    assert_eq!(client_seen(&outside, at, &server), None, "the port has changed");
    let at = SocketAddr::from((NODE, 8081));
    assert_eq!(client_seen(&outside, at, &server), Some(OUTSIDE.into()));
    node.remove_pod(4);
    assert_eq!(client_seen(&outside, at, &server), None, "the pod has gone");
}

#[test]
fn datagrams_to_a_port_of_the_node_reach_the_pod_and_answers_come_from_the_node() {
    let (mut node, outside) = node_and_outside();
    node.set_host_ports(4, vec![port(Protocol::UDP, 5353, 53), port(Protocol::TCP, 5353, 54)]);
    let bind = |address: Ipv4Addr, port: u16| move || UdpSocket::bind((address, port)).unwrap();
    let server = node.pods[0].0.run(bind(node.pods[0].1, 53)).unwrap();
    let client = outside.run(bind(OUTSIDE, 0)).unwrap();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    // The client takes answers of this address and port only.
    client.connect((NODE, 5353)).unwrap();
    client.send(b"meow").unwrap();
    let mut buffer = [0; 4];
    let (_, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(from.ip(), std::net::IpAddr::from(OUTSIDE));
    server.send_to(&buffer, from).unwrap();
    assert_eq!(client.recv(&mut buffer).unwrap(), 4);
    // The same number leads elsewhere by TCP.
    let server = listen(&node, 0, 54);
    assert_eq!(client_seen(&outside, (NODE, 5353).into(), &server), Some(OUTSIDE.into()));
}
