//! Pods with addresses of both families, and routes without encapsulation.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;

use ipnet::Ipv6Net;
use tortie_api::net::{Action, IpVersion, Protocol};
use tortie_dataplane::*;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Route as KernelRoute, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_policy::program::*;

use crate::common::cluster::*;
use crate::dataplane::overlay::tracked_to;

/// A node's own IPv6 address.
pub(crate) fn own(number: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd31, 0, 0, 0, 0, 0, 0, number.into())
}

fn block_v6(number: u8) -> Ipv6Net {
    Ipv6Net::new(Ipv6Addr::new(0xfd65, 0, 0, number.into(), 0, 0, 0, 0), 122).unwrap()
}

/// The address of a pod that has this IPv4 address.
pub(crate) fn pod_v6(pod: &Pod) -> Ipv6Addr {
    let [_, _, node, last] = pod.address.octets();
    Ipv6Addr::new(0xfd65, 0, 0, node.into(), 0, 0, 0, last.into())
}

pub(crate) fn vtep_v6(number: u8) -> Vtep {
    let mac = MacAddress([0x66, 0, 0, 0, 6, number]);
    let address = block_v6(number).network().into();
    Vtep { node: format!("node-{number}"), address, mac, parent: own(number).into(), mtu: None }
}

/// Gives a node its IPv6 address, and joins both overlays.
fn join_both(node: &mut Node, number: u8, other: u8) {
    let add = || {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: own(number).into(), prefix_length: 64 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    };
    node.namespace.run(add).unwrap();
    join_overlay(node, number, other);
    let report = node.change(|state| {
        let end = LocalEnd { address: own(number).into(), vtep: Some(vtep_v6(number)) };
        state.node.as_mut().unwrap().ends.insert(IpVersion::V6, end);
        state.vteps.insert(vtep_v6(other).key(), vtep_v6(other));
        state.routes.insert(block_v6(number).into(), RouteTarget::Local);
        let target = RouteTarget::Vxlan { node: format!("node-{other}") };
        state.routes.insert(block_v6(other).into(), target);
    });
    assert_eq!(report, Report::default());
}

/// Connects a pod with these addresses, and expects nothing to report.
pub(crate) fn add(node: &mut Node, pod: &Pod, addresses: Vec<PodAddress>) -> PodInterface {
    let (interface, report) = add_to(node, pod, addresses);
    assert_eq!(report, Report::default());
    interface
}

/// Connects a pod with these addresses.
fn add_to(node: &mut Node, pod: &Pod, addresses: Vec<PodAddress>) -> (PodInterface, Report) {
    let attachment = PodAttachment { addresses, ..pod.attachment() };
    let connect = || {
        let interface = node.wiring.connect(&attachment).unwrap();
        assert!(node.wiring.wait_until_live(&interface, TIMEOUT));
        node.wiring.check(&attachment).unwrap();
        interface
    };
    let interface = node.namespace.run(connect).unwrap();
    let endpoint = Endpoint {
        container_id: pod.container_id.as_str().into(),
        host_interface: interface.host_interface.as_str().into(),
        addresses: attachment.addresses.iter().map(|own| own.address).collect(),
        mac: Some(interface.mac),
        host_ports: Default::default(),
        program: Arc::new(open()),
    };
    let report = node.change(|state| drop(state.endpoints.insert(pod.id(), Arc::new(endpoint))));
    (interface, report)
}

fn v6_of(pod: &Pod) -> PodAddress {
    let [_, _, node, _] = pod.address.octets();
    PodAddress { address: pod_v6(pod).into(), block: block_v6(node).into() }
}

pub(crate) fn both_of(pod: &Pod) -> Vec<PodAddress> {
    [pod.attachment().addresses, vec![v6_of(pod)]].concat()
}

fn serve_v6(pod: &Pod, port: u16) {
    echo_on(pod.namespace.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap()).unwrap());
}

pub(crate) fn reaches_v6(from: &NetNs, to: Ipv6Addr, port: u16) -> bool {
    let connect = || TcpStream::connect_timeout(&SocketAddr::from((to, port)), TIMEOUT).ok();
    let Some(stream) = from.run(connect).unwrap() else { return false };
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    answers(&stream)
}

pub(crate) fn is_cut_off_v6(from: &NetNs, to: Ipv6Addr, port: u16) -> bool {
    from.run(|| TcpStream::connect_timeout(&SocketAddr::from((to, port)), UNREACHED).is_err()).unwrap()
}

pub(crate) fn dual_nodes() -> ([Node; 2], [Pod; 2]) {
    join_dual(&Underlay::new(), || {})
}

/// With nodes that are prepared in this way.
fn join_dual(underlay: &Underlay, prepare: impl Fn() + Sync) -> ([Node; 2], [Pod; 2]) {
    let mut nodes = [1, 2].map(|number| Node::new(underlay, number));
    nodes.iter().for_each(|node| node.namespace.run(&prepare).unwrap());
    let pods = [Pod::new("one", 1, 2), Pod::new("two", 2, 2)];
    for (node, (pod, number, other)) in nodes.iter_mut().zip([(&pods[0], 1, 2), (&pods[1], 2, 1)]) {
        join_both(node, number, other);
        add(node, pod, both_of(pod));
        pod.serve(80);
        serve_v6(pod, 81);
    }
    (nodes, pods)
}

pub(crate) fn capture(node: &Node) -> PacketSocket {
    node.namespace.run(|| PacketSocket::open(interface_index("eth0").unwrap()).unwrap()).unwrap()
}

/// How many frames of each kind pass: VXLAN over IPv4, VXLAN over IPv6, and TCP without VXLAN of either family.
fn kinds(capture: &PacketSocket) -> BTreeMap<&'static str, usize> {
    let (mut buffer, mut seen) = ([0; 4096], BTreeMap::new());
    while let Some(length) = capture.receive(&mut buffer).unwrap() {
        let frame = &buffer[..length];
        let kind = match (&frame[12..14], frame.get(23), frame.get(20)) {
            ([8, 0], Some(17), _) if frame[36..38] == 4789u16.to_be_bytes() => "VXLAN over IPv4",
            ([8, 0], Some(6), _) => "TCP over IPv4",
            ([0x86, 0xdd], _, Some(17)) if frame[56..58] == 4789u16.to_be_bytes() => "VXLAN over IPv6",
            ([0x86, 0xdd], _, Some(6)) => "TCP over IPv6",
            _ => continue,
        };
        *seen.entry(kind).or_default() += 1;
    }
    seen
}

#[test]
fn pods_of_two_nodes_connect_by_both_families() {
    let (mut nodes, pods) = dual_nodes();
    let seen = capture(&nodes[1]);
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    assert_eq!(kinds(&seen).into_keys().collect::<Vec<_>>(), ["VXLAN over IPv4"]);
    let seen = capture(&nodes[1]);
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));
    assert!(reaches_v6(&pods[1].namespace, pod_v6(&pods[0]), 81));
    assert!(reaches_v6(&nodes[0].namespace, pod_v6(&pods[1]), 81), "from a node to another node's pod");
    assert!(reaches_v6(&nodes[0].namespace, pod_v6(&pods[0]), 81), "from a node to its own pod");
    // The connections of IPv4 may end late.
    let kinds: Vec<_> = kinds(&seen).into_keys().filter(|kind| *kind != "VXLAN over IPv4").collect();
    assert_eq!(kinds, ["VXLAN over IPv6"]);
    for node in &nodes {
        assert!(tracked_to(node, 81) >= 2 && tracked_to(node, 4789) == 0, "only the pods' flows are tracked");
    }

    // The overlay of IPv6 has 20 bytes less, and pods have the smaller MTU.
    let mtu = |namespace: &NetNs, link: &str| {
        namespace.run(|| RouteSocket::open().unwrap().link(link).unwrap().unwrap().mtu).unwrap()
    };
    let mtus = ["vxlan.calico", "vxlan-v6.calico"].map(|link| mtu(&nodes[0].namespace, link));
    assert_eq!((mtus, mtu(&pods[0].namespace, "eth0")), ([1450, 1430], 1430));

    // Policy judges the addresses of both families.
    nodes[1].change(|state| {
        let nets = vec![format!("{}/128", pod_v6(&pods[0])).parse().unwrap()];
        let source = EntityMatch { nets, ..EntityMatch::default() };
        let ingress = vec![Rule { source, ..Rule::all(Action::Allow) }];
        let rules = PolicyRules { ingress, egress: Vec::new() };
        state.policies.insert(policy_id("one-by-ipv6"), Arc::new(rules));
    });
    nodes[1].program(&pods[1], ingress(&["one-by-ipv6"], EndOfTier::Deny));
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));
    assert!(is_cut_off_v6(&nodes[0].namespace, pod_v6(&pods[1]), 81));
    assert!(pods[0].is_cut_off(pods[1].address, 80));

    // Packets to a free address of an own block do not leave the node.
    let routes = nodes[0].namespace.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
    assert!(routes.contains(&KernelRoute::blackhole(block_v6(1).into(), 84)), "{routes:#?}");

    // A full check finds nothing to change, and a new process takes everything over.
    assert_eq!(nodes[0].resync(), Report::default());
    nodes[0].restart();
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));

    // The other node has no IPv6 any more.
    nodes[0].change(|state| {
        state.routes.remove(&block_v6(2).into());
        state.vteps.remove(&vtep_v6(2).key());
    });
    assert!(is_cut_off_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));
    let left = nodes[0].namespace.run(|| {
        let mut socket = RouteSocket::open().unwrap();
        let link = interface_index("vxlan-v6.calico").unwrap();
        let neighbours = socket.neighbours().unwrap().into_iter().filter(|it| it.link == link);
        (socket.fdb(link).unwrap().len(), neighbours.count())
    });
    assert_eq!(left.unwrap(), (0, 0));
}

/// The network interface of a pod that has been wired for IPv4 gets its IPv6 address by another ADD.
#[test]
fn a_pod_may_have_one_family_and_get_the_other_later() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    join_both(&mut node, 1, 2);
    let [client, six] = [Pod::new("client", 1, 2), Pod::new("six", 1, 3)];
    let interface = add(&mut node, &six, vec![v6_of(&six)]);
    assert_eq!(interface.addresses.len(), 1);
    assert_eq!(interface.addresses[0].gateway, IpAddr::from(tortie_linux::wire::GATEWAY_V6));
    serve_v6(&six, 81);
    let interface = add(&mut node, &client, client.attachment().addresses);
    assert_eq!(interface.addresses.len(), 1);
    assert!(is_cut_off_v6(&client.namespace, pod_v6(&six), 81));
    let both = PodAttachment { addresses: both_of(&client), ..client.attachment() };
    let problem = node.namespace.run(|| node.wiring.check(&both)).unwrap().unwrap_err().to_string();
    assert!(problem.contains(&pod_v6(&client).to_string()), "{problem}");
    add(&mut node, &client, both_of(&client));
    assert!(reaches_v6(&client.namespace, pod_v6(&six), 81));
    // Runtimes switch IPv6 off in the namespaces of pods.
    let off = Pod::new("off", 1, 4);
    let switch_off = || sysctl::ensure("net/ipv6/conf/all/disable_ipv6", "1").unwrap();
    off.namespace.run(switch_off).unwrap();
    add(&mut node, &off, both_of(&off));
    assert!(reaches_v6(&off.namespace, pod_v6(&six), 81));
}

/// VXLAN packets over IPv6 from a stranger are dropped, as those over IPv4 are.
#[test]
fn vxlan_over_ipv6_is_accepted_only_from_nodes() {
    const STRANGER: u8 = 99;
    let (mut nodes, _pods) = dual_nodes();
    let senders = nodes[0].namespace.run(|| {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: own(STRANGER).into(), prefix_length: 64 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
        [STRANGER, 1].map(|number| UdpSocket::bind((own(number), 0)).unwrap())
    });
    let [stranger, node] = senders.unwrap();
    // The link counts what it takes out of VXLAN packets.
    let received = |nodes: &[Node; 2]| {
        let read = || {
            let statistics = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let line = statistics.lines().find(|line| line.trim().starts_with("vxlan-v6.calico:")).unwrap();
            line.split_whitespace().nth(2).unwrap().parse::<u64>().unwrap()
        };
        nodes[1].namespace.run(read).unwrap()
    };
    let [own_mac, other_mac] = [vtep_v6(2).mac.0, vtep_v6(1).mac.0];
    let frame = [&own_mac[..], &other_mac, &[0x86, 0xdd, 0x60], &[0; 39]].concat();
    let packet = [&[8, 0, 0, 0, 0, 0x10, 0, 0][..], &frame].concat();
    let sends = |nodes: &[Node; 2], from: &UdpSocket, expected: u64| {
        let before = received(nodes);
        from.send_to(&packet, (own(2), 4789)).unwrap();
        // What the node sends arrives after what the stranger has sent before.
        node.send_to(&packet, (own(2), 4789)).unwrap();
        let deadline = std::time::Instant::now() + TIMEOUT;
        while received(nodes) < before + expected && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(received(nodes) - before, expected);
    };
    sends(&nodes, &stranger, 1);
    sends(&nodes, &node, 2);
    nodes[1].change(|state| drop(state.vteps.insert(vtep_v6(STRANGER).key(), vtep_v6(STRANGER))));
    sends(&nodes, &stranger, 2);
}

#[test]
fn direct_routes_need_no_encapsulation() {
    let (mut nodes, pods) = dual_nodes();
    let seen = capture(&nodes[1]);
    for (index, other) in [(0, 2), (1, 1)] {
        let report = nodes[index].change(|state| {
            let direct = |router: IpAddr| RouteTarget::Direct { router };
            state.routes.insert(block(other).into(), direct(node_address(other).into()));
            state.routes.insert(block_v6(other).into(), direct(own(other).into()));
        });
        assert_eq!(report, Report::default());
    }
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));
    assert_eq!(kinds(&seen).into_keys().collect::<Vec<_>>(), ["TCP over IPv4", "TCP over IPv6"]);
    assert!(nodes[0].reaches(&pods[1], 80), "from a node to another node's pod");

    // One end may still encapsulate, while the pools of both nodes change.
    nodes[0].change(|state| {
        let target = RouteTarget::Vxlan { node: "node-2".to_owned() };
        state.routes.insert(block(2).into(), target.clone());
        state.routes.insert(block_v6(2).into(), target);
    });
    assert!(pods[0].reaches(&pods[1], 80));
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));

    // A node without an address in the network has no such route, and says so.
    let report = nodes[0].change(|state| {
        let end = LocalEnd { address: own(77).into(), vtep: Some(vtep_v6(1)) };
        state.node.as_mut().unwrap().ends.insert(IpVersion::V6, end);
        let target = RouteTarget::Direct { router: own(2).into() };
        state.routes.insert(block_v6(2).into(), target);
    });
    assert_eq!(report.node_failures().count(), 0, "other pods can be added");
    let message = &report.node.first().unwrap().message;
    assert!(message.contains("fd31::4d") && message.contains(&block_v6(2).to_string()), "{message}");
}

/// A node that begins to forward goes on with router advertisements. What an administrator has set stays.
#[test]
fn a_node_that_forwards_ipv6_still_believes_its_router() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    let read = |node: &Node, name: &str| node.namespace.run(|| sysctl::read(name).unwrap()).unwrap();
    let (forwarding, accept) = ("net/ipv6/conf/all/forwarding", "net/ipv6/conf/eth0/accept_ra");
    node.namespace
        .run(|| {
            sysctl::ensure(forwarding, "0").unwrap();
            sysctl::ensure(accept, "1").unwrap();
        })
        .unwrap();
    join_overlay(&mut node, 1, 2);
    assert_eq!((read(&node, forwarding).as_str(), read(&node, accept).as_str()), ("0", "1"));
    node.change(|state| drop(state.routes.insert(block_v6(1).into(), RouteTarget::Local)));
    assert_eq!((read(&node, forwarding).as_str(), read(&node, accept).as_str()), ("1", "2"));
    node.namespace.run(|| sysctl::ensure(accept, "1").unwrap()).unwrap();
    assert_eq!(node.resync(), Report::default());
    assert_eq!(read(&node, accept), "1");
}

/// Nothing keeps strangers from sending packets into a link without an overlay.
#[test]
fn an_overlay_that_ended_while_the_agent_was_away_leaves_no_link() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    join_both(&mut node, 1, 2);
    let exists = |node: &Node, link: &str| {
        node.namespace.run(|| RouteSocket::open().unwrap().link(link).unwrap().is_some()).unwrap()
    };
    assert!(exists(&node, "vxlan-v6.calico"));
    node.state.node.as_mut().unwrap().ends.remove(&IpVersion::V6);
    node.state.vteps.remove(&vtep_v6(2).key());
    node.state.routes.retain(|net, _| net.addr().is_ipv4());
    node.restart();
    assert!(!exists(&node, "vxlan-v6.calico") && exists(&node, "vxlan.calico"));
}

/// Without IPv6, a node goes on with IPv4, and says what is missing.
#[test]
fn a_node_with_ipv6_switched_off_goes_on_with_ipv4() {
    let (mut nodes, pods) = dual_nodes();
    let off = || sysctl::ensure("net/ipv6/conf/all/disable_ipv6", "1").unwrap();
    nodes[0].namespace.run(off).unwrap();
    let wiring = &nodes[0].wiring;
    assert!(!nodes[0].namespace.run(|| wiring.has_ipv6()).unwrap().unwrap());
    let report = nodes[0].resync();
    assert_eq!(report.node_failures().count(), 0, "{report:?}");
    assert!(report.node.iter().any(|condition| condition.message.contains("switched off")), "{report:?}");
    let third = Pod::new("third", 1, 7);
    add_to(&mut nodes[0], &third, third.attachment().addresses);
    assert!(third.reaches(&pods[1], 80));
}

/// Without an address for its end of an overlay, a node cannot reach pods of other nodes in that family, and says so.
#[test]
fn a_node_without_a_tunnel_address_reports_that_it_has_no_overlay() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    join_overlay(&mut node, 1, 2);
    let report = node.change(|state| {
        state.vteps.insert(vtep_v6(2).key(), vtep_v6(2));
        state.routes.insert(block_v6(2).into(), RouteTarget::Vxlan { node: "node-2".to_owned() });
    });
    let [condition] = &report.node[..] else { panic!("{report:?}") };
    // The node serves IPv4, as in a cluster of which some nodes have no IPv6.
    assert_eq!(condition.reason, Reason::NetworkPartNotInForce);
    assert_eq!(report.node_failures().count(), 0, "IPv4 pods can be added");
    assert!(condition.message.contains("projectcalico.org/IPv6Address"), "{condition:?}");
    let report = node.change(|state| {
        state.routes.remove(&block_v6(2).into());
        state.node = Some(LocalNode::ipv4("node-1", node_address(1), None));
    });
    let [condition] = &report.node[..] else { panic!("{report:?}") };
    assert!(condition.message.contains("no IPv4 tunnel address"), "{condition:?}");
}

/// Sets the ports of the node that a pod wants.
fn want(node: &mut Node, pod: &Pod, ports: &[HostPort]) -> Report {
    node.change(|state| {
        let endpoint = Arc::make_mut(state.endpoints.get_mut(&pod.id()).unwrap());
        endpoint.host_ports = ports.into();
    })
}

fn host_port(address: Option<IpAddr>, protocol: Protocol) -> HostPort {
    HostPort { protocol, address, port: 8080, pod_port: 80 }
}

#[test]
fn a_host_port_leads_to_the_pods_address_of_the_same_family() {
    let (mut nodes, [pod, _]) = dual_nodes();
    let [node, outside] = &mut nodes;
    let other = Pod::new("other", 1, 3);
    add(node, &other, both_of(&other));
    let listen = || TcpListener::bind((Ipv6Addr::UNSPECIFIED, 82)).unwrap();
    let server = pod.namespace.run(listen).unwrap();
    let from = |namespace: &NetNs, address: IpAddr| {
        let to = SocketAddr::from((address, 8080));
        let client = namespace.run(|| TcpStream::connect_timeout(&to, TIMEOUT).ok()).unwrap();
        seen(client, &server).map(|address| address.to_canonical())
    };
    let own_v6 = IpAddr::from(own(1));
    assert_eq!(from(&outside.namespace, own_v6), None, "before");

    let any = HostPort { pod_port: 82, ..host_port(None, Protocol::TCP) };
    assert_eq!(want(node, &pod, &[any]), Report::default());
    assert_eq!(from(&outside.namespace, own_v6), Some(own(2).into()));
    assert_eq!(from(&outside.namespace, node_address(1).into()), Some(node_address(2).into()));
    assert_eq!(from(&other.namespace, own_v6), Some(pod_v6(&other).into()), "another pod");
    // The kernel chooses the node's address that is nearest to the pod's: that of the tunnel.
    let tunnel = IpAddr::from(block_v6(1).network());
    assert_eq!(from(&pod.namespace, own_v6), Some(tunnel), "the pod itself");
    assert_eq!(from(&node.namespace, own_v6), Some(own_v6), "the node");
    assert_eq!(from(&node.namespace, Ipv6Addr::LOCALHOST.into()), None, "loopback");
    assert_eq!(from(&outside.namespace, pod_v6(&pod).into()), None, "the pod's own port is another");

    // The pod's policy judges by the real source.
    node.program(&pod, ingress(&[], EndOfTier::Deny));
    assert!(is_cut_off_v6(&outside.namespace, own(1), 8080));
    node.program(&pod, open());

    // A port of one address is none of the other family.
    let of_v6 = HostPort { pod_port: 82, ..host_port(Some(own_v6), Protocol::TCP) };
    assert_eq!(want(node, &pod, &[of_v6]), Report::default());
    assert_eq!(from(&outside.namespace, own_v6), Some(own(2).into()));
    assert_eq!(from(&outside.namespace, node_address(1).into()), None);
    assert_eq!(node.resync(), Report::default());
    node.restart();
    assert_eq!(from(&outside.namespace, own_v6), Some(own(2).into()), "a new agent");
    node.change(|state| drop(state.endpoints.remove(&pod.id())));
    assert_eq!(from(&outside.namespace, own_v6), None);
    assert_eq!(node.resync(), Report::default());
}

#[test]
fn datagrams_to_a_host_port_at_an_ipv6_address_are_answered_from_there() {
    let (mut nodes, [pod, _]) = dual_nodes();
    let [node, outside] = &mut nodes;
    assert_eq!(want(node, &pod, &[host_port(None, Protocol::UDP)]), Report::default());
    let bind = |port: u16| move || UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap();
    let (server, client) = (pod.namespace.run(bind(80)).unwrap(), outside.namespace.run(bind(0)).unwrap());
    for socket in [&server, &client] {
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    }
    client.send_to(b"meow", (own(1), 8080)).unwrap();
    let mut buffer = [0; 4];
    let (_, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(from.ip(), IpAddr::from(own(2)));
    server.send_to(&buffer, from).unwrap();
    let (_, from) = client.recv_from(&mut buffer).unwrap();
    assert_eq!(from, SocketAddr::from((own(1), 8080)));
}

#[test]
fn a_host_port_at_an_address_of_a_family_that_the_pod_lacks_is_reported() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    join_both(&mut node, 1, 2);
    let [both, six, four] = [Pod::new("both", 1, 2), Pod::new("six", 1, 3), Pod::new("four", 1, 4)];
    add(&mut node, &both, both_of(&both));
    add(&mut node, &six, vec![v6_of(&six)]);
    add(&mut node, &four, four.attachment().addresses);
    let (own_v4, own_v6) = (Some(node_address(1).into()), Some(own(1).into()));
    for (pod, address, is_reported) in [
        (&both, None, false),
        (&both, own_v4, false),
        (&both, own_v6, false),
        (&six, None, false),
        (&six, own_v4, true),
        (&four, None, false),
        (&four, own_v6, true),
    ] {
        let report = want(&mut node, pod, &[host_port(address, Protocol::TCP)]);
        let reasons: Vec<Reason> =
            report.endpoints.get(&pod.id()).into_iter().flatten().map(|condition| condition.reason).collect();
        let expected = if is_reported { vec![Reason::HostPortNotServed] } else { vec![] };
        assert_eq!(reasons, expected, "{} {address:?}", pod.name);
        want(&mut node, pod, &[]);
    }
}

/// Hosts may have IPv6 only on the interfaces where they want it.
#[test]
fn the_overlay_of_ipv6_comes_up_where_new_links_have_no_ipv6() {
    let prepare = || {
        sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1").unwrap();
    };
    let (nodes, pods) = join_dual(&Underlay::new(), prepare);
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));
    let off = || sysctl::read("net/ipv6/conf/vxlan-v6.calico/disable_ipv6").unwrap();
    assert_eq!(nodes[0].namespace.run(off).unwrap(), "0");
}
