//! Ports of the node that lead to pods, with real connections from outside, from pods and from the node itself.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;

use tortie_api::net::Protocol;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, RouteSocket};
use tortie_policy::program::EndOfTier;

use crate::common::cluster::*;

/// A second address of the node.
const SECOND: Ipv4Addr = Ipv4Addr::new(172, 31, 0, 101);

fn tcp(address: Option<IpAddr>, port: u16, pod_port: u16) -> HostPort {
    HostPort { protocol: Protocol::TCP, address, port, pod_port }
}

fn want(node: &mut Node, pod: &Pod, ports: &[HostPort]) -> Report {
    node.change(|state| {
        let endpoint = state.endpoints.get_mut(&pod.id()).unwrap();
        Arc::make_mut(endpoint).host_ports = ports.into();
    })
}

fn listen(pod: &Pod, port: u16) -> TcpListener {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    pod.namespace.run(|| TcpListener::bind(address).unwrap()).unwrap()
}

#[test]
fn a_port_of_the_node_leads_to_its_pod_from_everywhere() {
    let ([mut node, outside], [pod, other]) = node_with_two_pods();
    let add_second = || {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: SECOND.into(), prefix_length: 24 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    };
    node.namespace.run(add_second).unwrap();
    let (server, to) = (listen(&pod, 80), node_address(1));
    let own = Some(IpAddr::from(to));
    let from = |namespace: &tortie_kernel::namespace::NetNs, address, port| {
        let stream =
            namespace.run(|| TcpStream::connect_timeout(&SocketAddr::from((address, port)), TIMEOUT));
        stream.unwrap().ok()
    };
    let refused = |address, port| from(&outside.namespace, address, port).is_none();
    assert!(refused(to, 8080), "before");

    let ports = [tcp(None, 8080, 80), tcp(Some(SECOND.into()), 8081, 80)];
    assert_eq!(want(&mut node, &pod, &ports), Report::default());
    assert_eq!(seen(from(&outside.namespace, to, 8080), &server), Some(node_address(9).into()));
    assert_eq!(seen(from(&outside.namespace, SECOND, 8080), &server), Some(node_address(9).into()));
    assert_eq!(seen(other.connect(to, 8080), &server), Some(other.address.into()), "another pod");
    assert_eq!(seen(pod.connect(to, 8080), &server), own, "the pod itself");
    assert_eq!(seen(from(&node.namespace, to, 8080), &server), own, "the node");
    // A port of one address is none of the others.
    assert_eq!(seen(from(&outside.namespace, SECOND, 8081), &server), Some(node_address(9).into()));
    assert!(refused(to, 8081));
    // An address of nobody here is not the node's.
    assert!(pod.is_cut_off(Ipv4Addr::new(172, 31, 0, 77), 8080));
    // Nor is that of another machine, even if a pod says so.
    let foreign = IpAddr::from(node_address(9));
    let another = outside.namespace.run(|| TcpListener::bind((node_address(9), 8083)).unwrap()).unwrap();
    let report = want(&mut node, &pod, &[tcp(Some(foreign), 8083, 80)]);
    let [condition] = &report.endpoints[&pod.id()][..] else { panic!("{report:?}") };
    assert_eq!(condition.reason, Reason::HostPortNotServed);
    assert!(condition.message.contains("172.31.0.9 is no address of the node"), "{condition:?}");
    assert_eq!(seen(from(&node.namespace, node_address(9), 8083), &another), own);
    // Nobody answers the pod's own address there.
    assert!(other.is_cut_off(node_address(9), 8083));
    assert_eq!(want(&mut node, &pod, &ports), Report::default());
    // A connection to the loopback address stays on the node.
    let local = node.namespace.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 8080)).unwrap()).unwrap();
    assert_eq!(
        seen(from(&node.namespace, Ipv4Addr::LOCALHOST, 8080), &local),
        Some(Ipv4Addr::LOCALHOST.into())
    );

    // The pod's policy judges by the real source and the pod's port.
    node.program(&pod, ingress(&[], EndOfTier::Deny));
    for closed in [outside.is_cut_off(to, 8080), other.is_cut_off(to, 8080)] {
        assert!(closed);
    }
    node.program(&pod, open());
    assert_eq!(node.resync(), Report::default());

    // The ports go with the pod's wish, and with the pod.
    assert_eq!(want(&mut node, &pod, &[tcp(None, 8082, 80)]), Report::default());
    assert!(refused(to, 8080) && refused(SECOND, 8081));
    assert_eq!(seen(from(&outside.namespace, to, 8082), &server), Some(node_address(9).into()));
    node.restart();
    assert_eq!(
        seen(from(&outside.namespace, to, 8082), &server),
        Some(node_address(9).into()),
        "a new agent"
    );
    node.change(|state| drop(state.endpoints.remove(&pod.id())));
    assert!(refused(to, 8082));
    assert_eq!(node.resync(), Report::default());
}

#[test]
fn the_first_of_two_pods_has_the_port_and_the_second_gets_it_afterwards() {
    let underlay = Underlay::new();
    let (mut node, outside) = (Node::new(&underlay, 1), Node::new(&underlay, 9));
    let pods = [Pod::new("a", 1, 2), Pod::new("b", 1, 3)];
    node.change(open_profile);
    let [first, second] = &pods;
    for pod in &pods {
        node.add(pod, open());
    }
    let servers = pods.each_ref().map(|pod| listen(pod, 80));
    let connect = || outside.namespace.run(|| connect(node_address(1), 8080)).unwrap();
    // Other protocols and addresses are not in the way.
    let udp = HostPort { protocol: Protocol::UDP, ..tcp(None, 8080, 80) };
    assert_eq!(want(&mut node, second, std::slice::from_ref(&udp)), Report::default());
    assert_eq!(want(&mut node, second, &[udp, tcp(None, 8080, 80)]), Report::default());
    assert!(seen(connect(), &servers[1]).is_some());
    let report = want(&mut node, first, &[tcp(None, 8080, 80)]);
    let reasons: Vec<_> = report.endpoints[&second.id()].iter().map(|condition| condition.reason).collect();
    assert_eq!(reasons, [Reason::HostPortTaken]);
    assert_eq!(report.endpoints.len(), 1);
    assert!(seen(connect(), &servers[0]).is_some());
    assert_eq!(node.resync(), report);
    assert_eq!(want(&mut node, first, &[]), Report::default());
    assert!(seen(connect(), &servers[1]).is_some());
}

/// The test listens on these ports of the node, and a pod of a tenant would take their connections.
#[test]
fn ports_of_the_nodes_own_programs_lead_to_no_pod() {
    let ([mut node, outside], [pod, other]) = node_with_two_pods();
    let served = listen(&pod, 80);
    let ports = [22, 10250, 8080];
    let of_node = |port: u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
    let own = node.namespace.run(|| [22, 10250].map(of_node)).unwrap();
    let [condition] =
        &want(&mut node, &pod, &ports.map(|port| tcp(None, port, 80))).endpoints[&pod.id()][..].to_vec()[..]
    else {
        panic!("not one condition")
    };
    assert_eq!(condition.reason, Reason::HostPortNotServed);
    assert!(condition.message.contains("hostPort 22/TCP is not served: it is in failsafe"), "{condition:?}");
    let to = node_address(1);
    let from = |namespace: &tortie_kernel::namespace::NetNs, port| {
        namespace.run(|| TcpStream::connect_timeout(&SocketAddr::from((to, port)), TIMEOUT)).unwrap().ok()
    };
    for (server, port) in own.iter().zip(ports) {
        assert!(seen(from(&outside.namespace, port), server).is_some(), "{port} from outside");
        assert!(seen(other.connect(to, port), server).is_some(), "{port} from another pod");
        assert!(seen(from(&node.namespace, port), server).is_some(), "{port} from the node");
    }
    assert!(seen(from(&outside.namespace, 8080), &served).is_some(), "another port");

    // An operator gives the port away, and the pod has it at once. The kubelet's stays.
    node.change(|state| {
        Arc::make_mut(&mut state.settings).failsafe_inbound.retain(|failsafe| failsafe.port != 22)
    });
    assert!(seen(from(&outside.namespace, 22), &served).is_some());
    assert!(seen(from(&outside.namespace, 10250), &own[1]).is_some());
    assert!(node.resync().endpoints[&pod.id()][0].message.contains("hostPort 10250/TCP"));
}

/// kube-proxy translates at the usual priority, whoever made its chain first.
#[test]
fn a_service_keeps_its_port_of_the_node() {
    let ([mut node, outside], [pod, other]) = node_with_two_pods();
    let (server, backend, to) = (listen(&pod, 80), listen(&other, 81), node_address(1));
    let service = format!(
        "table ip kube-proxy {{ chain nat-prerouting {{ type nat hook prerouting priority dstnat; \
         ip daddr {to} tcp dport 30443 dnat to {}:81; }}; }}",
        other.address
    );
    let namespace = node.namespace.run(NetNs::current).unwrap().unwrap();
    let change = |text: &str| {
        let mut nft = Command::new("nft");
        let status = namespace.enter_on_spawn(nft.arg(text)).unwrap().status().unwrap();
        assert!(status.success(), "{text}");
    };
    let from_outside = || {
        let to = SocketAddr::from((to, 30_443));
        outside.namespace.run(|| TcpStream::connect_timeout(&to, TIMEOUT).ok()).unwrap()
    };
    change(&service);
    let wants = [tcp(None, 30_443, 80)];
    assert_eq!(want(&mut node, &pod, &wants), Report::default());
    assert_eq!(seen(from_outside(), &backend), Some(node_address(9).into()), "made before");
    change("delete table ip kube-proxy");
    assert_eq!(seen(from_outside(), &server), Some(node_address(9).into()), "no Service");
    change(&service);
    assert_eq!(seen(from_outside(), &backend), Some(node_address(9).into()), "made after");
}

#[test]
fn datagrams_to_a_port_of_the_node_reach_the_pod_and_answers_come_from_the_node() {
    let underlay = Underlay::new();
    let (mut node, outside) = (Node::new(&underlay, 1), Node::new(&underlay, 9));
    let pod = Pod::new("pod", 1, 2);
    node.change(open_profile);
    node.add(&pod, open());
    let port = HostPort { protocol: Protocol::UDP, ..tcp(None, 5353, 53) };
    assert_eq!(want(&mut node, &pod, &[port]), Report::default());
    let bind = |port: u16| move || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
    let server = pod.namespace.run(bind(53)).unwrap();
    let client = outside.namespace.run(bind(0)).unwrap();
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    }
    client.send_to(b"meow", (node_address(1), 5353)).unwrap();
    let mut buffer = [0; 4];
    let (_, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(from.ip(), IpAddr::from(node_address(9)));
    server.send_to(&buffer, from).unwrap();
    let (_, from) = client.recv_from(&mut buffer).unwrap();
    assert_eq!(from, SocketAddr::from((node_address(1), 5353)));
}
