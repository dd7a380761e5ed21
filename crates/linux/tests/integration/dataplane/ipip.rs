//! Pods of other nodes by IPIP. The kernel of most machines that run this has no IPIP, so a stand-in has the link
//! ([`testkit::ipip`]).

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};
use testkit::ipip::IpipStandIn;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Link, LinkSetting, NewLink, NewLinkKind, RouteSocket};
use tortie_linux::dataplane::Config;
use tortie_linux::remove_all;
use tortie_policy::program::*;

use crate::common::cluster::*;
use crate::dataplane::dual_stack::capture;

/// The address of a node's IPIP link, of its own block.
fn tunnel(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 65, number, 1)
}

fn ipip_to(number: u8) -> RouteTarget {
    RouteTarget::Ipip { router: node_address(number) }
}

/// A node without VXLAN.
fn node_with_ipip(number: u8) -> LocalNode {
    let node = LocalNode::ipv4(&format!("node-{number}"), node_address(number), None);
    LocalNode { ipip: Some(LocalIpip { address: Some(tunnel(number)) }), ..node }
}

fn join(node: &mut Node, own: u8, other: u8) -> Report {
    node.change(|state| {
        open_profile(state);
        Arc::make_mut(&mut state.settings).pools.insert("10.65.0.0/16".parse().unwrap(), false);
        state.node = Some(node_with_ipip(own));
        state.routes.insert(block(own).into(), RouteTarget::Local);
        state.routes.insert(block(other).into(), ipip_to(other));
    })
}

/// Two nodes with IPIP between them, and a pod on each.
fn two_nodes_with_ipip() -> ([Node; 2], [IpipStandIn; 2], [Pod; 2]) {
    let underlay = Underlay::new();
    let mut nodes = [1, 2].map(|number| Node::new(&underlay, number));
    let links = [0, 1].map(|index| IpipStandIn::start(&nodes[index].namespace));
    let pods = [Pod::new("one", 1, 2), Pod::new("two", 2, 2)];
    for (index, node) in nodes.iter_mut().enumerate() {
        let (own, other) = ([1, 2][index], [2, 1][index]);
        assert_eq!(join(node, own, other), Report::default());
        node.add(&pods[index], open());
        pods[index].serve(80);
    }
    (nodes, links, pods)
}

fn link(node: &Node) -> Option<Link> {
    node.namespace.run(|| RouteSocket::open().unwrap().link("tunl0").unwrap()).unwrap()
}

fn addresses(node: &Node) -> Vec<String> {
    let list = || {
        let Ok(index) = interface_index("tunl0") else { return Vec::new() };
        let all = RouteSocket::open().unwrap().addresses().unwrap().into_iter();
        let of_link = all.filter(|at| at.link == index && at.address.is_ipv4());
        let mut texts: Vec<_> = of_link.map(|at| format!("{}/{}", at.address, at.prefix_length)).collect();
        texts.sort();
        texts
    };
    node.namespace.run(list).unwrap()
}

/// The messages of the node's conditions.
fn messages(report: &Report) -> Vec<&str> {
    report.node.iter().map(|condition| condition.message.as_str()).collect()
}

/// The frames that have arrived.
fn frames(socket: &PacketSocket) -> Vec<Vec<u8>> {
    let mut buffer = [0; 4096];
    let next = || socket.receive(&mut buffer).unwrap().map(|length| buffer[..length].to_vec());
    std::iter::from_fn(next).collect()
}

/// The outer and the inner addresses of the IPIP packets among frames.
fn carried(frames: &[Vec<u8>]) -> Vec<[Ipv4Addr; 4]> {
    let address = |frame: &[u8], at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
    let is_ipip = |frame: &&Vec<u8>| frame.len() >= 54 && frame[12..14] == [8, 0] && frame[23] == 4;
    let ends = |frame: &Vec<u8>| [26, 30, 46, 50].map(|at| address(frame, at));
    frames.iter().filter(is_ipip).map(ends).collect()
}

#[test]
fn pods_of_two_nodes_reach_each_other_by_ipip() {
    let (mut nodes, _links, pods) = two_nodes_with_ipip();
    let arriving = capture(&nodes[0]);
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    let arrived = carried(&frames(&arriving));
    // Those that come from the other node.
    let expected = [node_address(2), node_address(1), pods[1].address, pods[0].address];
    assert!(arrived.contains(&expected) && arrived.iter().all(|ends| *ends == expected), "{arrived:?}");

    // The node itself comes from the address of its link, so that answers come back by the link.
    let listener = pods[1].namespace.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 81)).unwrap()).unwrap();
    let stream = nodes[0].namespace.run(|| connect(pods[1].address, 81)).unwrap();
    assert_eq!(seen(stream, &listener), Some(tunnel(1).into()));

    // Policy judges what comes out of the link.
    nodes[1].program(&pods[1], ingress(&[], EndOfTier::Deny));
    assert!(pods[0].is_cut_off(pods[1].address, 80));
    assert!(pods[1].reaches(&pods[0], 80));
    // Pods send no such packets themselves.
    let raw = pods[0].namespace.run(ipip_socket).unwrap();
    let arriving = capture(&nodes[1]);
    send_ipip(&raw, node_address(2), &inner(&pods));
    std::thread::sleep(Duration::from_millis(300));
    let arrived = carried(&frames(&arriving));
    assert!(arrived.iter().all(|[outer, ..]| *outer == node_address(1)), "{arrived:?}");
}

/// While the nodes learn of another mode of the pool, they may disagree about the way: both ways work. A node in the way of a migration
/// may have no tunnel address: its routes and those of others stay.
#[test]
fn nodes_may_differ_about_the_mode_and_lack_an_address() {
    let (mut nodes, _links, pods) = two_nodes_with_ipip();
    for node in &mut nodes {
        let all =
            |state: &mut NodeState| [1, 2].map(|number| state.vteps.insert(vtep(number).key(), vtep(number)));
        assert_eq!(node.change(|state| drop(all(state))), Report::default());
    }
    let direct = RouteTarget::Direct { router: node_address(1).into() };
    let report = nodes[1].change(|state| drop(state.routes.insert(block(1).into(), direct)));
    assert_eq!(report, Report::default());
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    let report = nodes[0].change(|state| state.node.as_mut().unwrap().ipip = Some(LocalIpip::default()));
    assert!(messages(&report).concat().contains("no tunnel address"), "{report:?}");
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
}

#[test]
fn host_endpoints_let_ipip_between_nodes_pass() {
    let (mut nodes, _links, pods) = two_nodes_with_ipip();
    for node in &mut nodes {
        let program = HostEndpointProgram::default();
        let host = HostEndpoint { interface: Some("eth0".to_owned()), addresses: vec![], program };
        let report = node.change(|state| drop(state.host_endpoints.insert("all".into(), Arc::new(host))));
        assert_eq!(report, Report::default());
    }
    assert!(nodes[0].is_cut_off(node_address(2), 80), "the host endpoint is in force");
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
}

fn ipip_socket() -> OwnedFd {
    socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::IPIP)).unwrap()
}

/// Policy may refuse it at once.
fn send_ipip(from: &OwnedFd, to: Ipv4Addr, packet: &[u8]) {
    let _ = sendto(from, packet, SendFlags::empty(), &SocketAddrV4::new(to, 0));
}

/// A UDP packet from the first pod to port 7000 of the second one.
fn inner(pods: &[Pod; 2]) -> Vec<u8> {
    // Without the Ethernet header.
    crate::common::frame(&datagram(pods), [2; 6], 7).split_off(14)
}

/// Whoever can send IPIP to a node could otherwise send packets with any address to its pods.
#[test]
fn ipip_comes_from_nodes_only() {
    const STRANGER: u8 = 9;
    let (mut nodes, _links, pods) = two_nodes_with_ipip();
    let receiver = pods[1].namespace.run(|| UdpSocket::bind((pods[1].address, 7000)).unwrap()).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    let stranger = nodes[0].underlay().connect(STRANGER);
    let senders = [stranger.run(ipip_socket).unwrap(), nodes[0].namespace.run(ipip_socket).unwrap()];
    let arrive = |sender: &OwnedFd| {
        send_ipip(sender, node_address(2), &inner(&pods));
        receiver.recv(&mut [0; 64]).is_ok()
    };
    assert_eq!(senders.each_ref().map(arrive), [false, true]);
    let net: IpNet = block(STRANGER).into();
    assert_eq!(nodes[1].change(|state| drop(state.routes.insert(net, ipip_to(STRANGER)))), Report::default());
    assert_eq!(senders.each_ref().map(arrive), [true, true], "it is a node's now");
    // A second network of the same node changes nothing when it goes.
    let other: IpNet = "10.65.77.0/26".parse().unwrap();
    nodes[1].change(|state| drop(state.routes.insert(other, ipip_to(STRANGER))));
    nodes[1].change(|state| drop(state.routes.remove(&other)));
    assert_eq!(senders.each_ref().map(arrive), [true, true]);
    nodes[1].change(|state| drop(state.routes.remove(&net)));
    assert_eq!(senders.each_ref().map(arrive), [false, true], "it is a node's no more");
    nodes[1].restart();
    assert_eq!(senders.each_ref().map(arrive), [false, true], "after a restart of the agent");
}

/// Calico's link is left, and no pool has IPIP any more.
#[test]
fn a_link_that_nobody_uses_gives_pods_nothing() {
    let (mut nodes, pods) = two_nodes();
    let _link = IpipStandIn::start(&nodes[1].namespace);
    let set_up = || {
        let up = vec![LinkSetting::Up(true)];
        RouteSocket::open().unwrap().change(&Change::SetLink(interface_index("tunl0").unwrap(), up)).unwrap();
    };
    nodes[1].namespace.run(set_up).unwrap();
    let receiver = pods[1].namespace.run(|| UdpSocket::bind((pods[1].address, 7000)).unwrap()).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    let stranger = nodes[0].underlay().connect(9).run(ipip_socket).unwrap();
    let arrives = || {
        send_ipip(&stranger, node_address(2), &inner(&pods));
        receiver.recv(&mut [0; 64]).is_ok()
    };
    assert!(!arrives());
    assert!(pods[0].reaches(&pods[1], 80));
    // With IPIP, it is a matter of who sends.
    let used = |state: &mut NodeState| {
        state.node.as_mut().unwrap().ipip = Some(LocalIpip { address: Some(tunnel(2)) });
        state.routes.insert(block(9).into(), ipip_to(9));
    };
    assert_eq!(nodes[1].change(used), Report::default());
    assert!(arrives());
}

#[test]
fn the_link_has_what_the_node_needs_and_is_left_when_no_pool_has_ipip() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    let _link = IpipStandIn::start(&node.namespace);
    // Calico's tunnel address of an earlier time, and an address of somebody else, who balances load with it.
    let before = || {
        let link = interface_index("tunl0").unwrap();
        for address in [tunnel(7), Ipv4Addr::new(203, 0, 113, 7)] {
            let address = Address { link, address: address.into(), prefix_length: 32 };
            RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
        }
    };
    node.namespace.run(before).unwrap();
    assert_eq!(join(&mut node, 1, 2), Report::default());
    let state = |node: &Node| link(node).map(|link| (link.up, link.mtu, link.alias)).unwrap();
    assert_eq!(state(&node), (true, 1480, "tortie overlay".to_owned()));
    assert_eq!(addresses(&node), ["10.65.1.1/32", "203.0.113.7/32"]);
    let set = |state: &mut NodeState| Arc::make_mut(&mut state.settings).ipip_mtu = Some(1300);
    assert_eq!(node.change(set), Report::default());
    assert_eq!(state(&node).1, 1300);
    // Somebody sets it down, and its routes go.
    let spoil = || {
        let down = vec![LinkSetting::Up(false)];
        RouteSocket::open()
            .unwrap()
            .change(&Change::SetLink(interface_index("tunl0").unwrap(), down))
            .unwrap();
    };
    node.namespace.run(spoil).unwrap();
    assert_eq!(node.resync(), Report::default());
    let routes = || {
        let routes = RouteSocket::open().unwrap().routes().unwrap().into_iter();
        routes.filter(|route| route.gateway == Some(node_address(2).into())).count()
    };
    assert_eq!((state(&node).0, node.namespace.run(routes).unwrap()), (true, 1));

    node.restart();
    let none = |state: &mut NodeState| {
        state.node.as_mut().unwrap().ipip = None;
        state.routes.remove(&block(2).into());
    };
    assert_eq!(node.change(none), Report::default());
    // The kernel's own link would stay.
    let left = link(&node).map(|link| (link.up, link.alias));
    assert!(left.is_none() || left == Some((false, String::new())), "{left:?}");
}

#[test]
fn a_node_that_cannot_have_ipip_says_so() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    let report = join(&mut node, 1, 2);
    if link(&node).is_none() {
        // As on this kernel, without its module.
        assert!(messages(&report).concat().contains("modprobe ipip"), "{report:?}");
    }
    // It works as soon as the link is there.
    let relay = IpipStandIn::start(&node.namespace);
    assert_eq!(node.resync(), Report::default());
    assert_eq!(addresses(&node), ["10.65.1.1/32"]);
    drop(relay);

    let mut node = Node::new(&underlay, 3);
    let other = || {
        RouteSocket::open().unwrap().create(&NewLink::new("tunl0", NewLinkKind::Bridge)).unwrap();
    };
    node.namespace.run(other).unwrap();
    let report = join(&mut node, 3, 2);
    assert!(messages(&report).concat().contains("ip link delete tunl0"), "{report:?}");
    assert_eq!(link(&node).unwrap().kind, "bridge");

    let mut node = Node::new(&underlay, 4);
    let _link = IpipStandIn::start(&node.namespace);
    assert_eq!(join(&mut node, 4, 2), Report::default());
    let report = node.change(|state| state.node.as_mut().unwrap().ipip = Some(LocalIpip::default()));
    assert!(messages(&report).concat().contains("Node node-4 has no tunnel address for IPIP"), "{report:?}");
    assert_eq!((link(&node).unwrap().up, addresses(&node)), (true, Vec::new()));
    // An MTU that the kernel refuses costs IPIP only.
    let report = node.change(|state| Arc::make_mut(&mut state.settings).ipip_mtu = Some(20));
    assert!(messages(&report).concat().contains("check ipipMTU"), "{report:?}");
    let pod = Pod::new("pod", 4, 2);
    node.namespace.run(|| drop(node.wiring.connect(&pod.attachment()).unwrap())).unwrap();
}

#[test]
fn removal_leaves_no_trace_of_ipip() {
    let ([node, _other], [link, _link], _pods) = two_nodes_with_ipip();
    let Node { namespace, dataplane, wiring, .. } = node;
    drop((dataplane, wiring));
    let removed = namespace.run(|| remove_all(&Config::default())).unwrap().unwrap();
    assert!(removed.contains(&"link tunl0".to_owned()), "{removed:?}");
    let left = || {
        let mut socket = RouteSocket::open().unwrap();
        let link = socket.link("tunl0").unwrap();
        let address = socket.addresses().unwrap().into_iter().find(|at| at.address == tunnel(1));
        (link.map(|link| (link.up, link.alias)), address)
    };
    let (link_left, address) = namespace.run(left).unwrap();
    assert!(link_left.is_none() || link_left == Some((false, String::new())), "{link_left:?}");
    assert_eq!(address, None);
    drop(link);
}
