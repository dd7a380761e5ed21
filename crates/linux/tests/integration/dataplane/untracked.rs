//! The overlay's own packets bypass connection tracking, and nothing else does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, RecvFlags, SocketFlags, SocketType};
use tortie_api::net::{Action, Flow, IpVersion, Protocol};
use tortie_dataplane::*;
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Nft, Table};
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, RouteSocket};
use tortie_policy::program::*;

use crate::common::cluster::*;
use crate::dataplane::dual_stack::{capture, dual_nodes, own, pod_v6, reaches_v6, vtep_v6};

const VXLAN: u16 = 4789;

/// The flows that a node tracks.
fn tracked(node: &Node) -> Vec<Flow> {
    let flows = Mutex::new(Vec::new());
    let look = |flow: &Flow| {
        flows.lock().unwrap().push(*flow);
        false
    };
    node.namespace.run(|| Conntrack::open().unwrap().forget_flows(look).unwrap()).unwrap();
    flows.into_inner().unwrap()
}

fn tracked_to(node: &Node, port: u16) -> Vec<Flow> {
    tracked(node).into_iter().filter(|flow| flow.destination_port == port).collect()
}

fn forget(node: &Node) {
    node.namespace.run(|| Conntrack::open().unwrap().flush().unwrap()).unwrap();
}

fn table(node: &Node) -> Table {
    node.namespace.run(|| Nft::open().unwrap().list("tortie").unwrap().unwrap()).unwrap()
}

/// Closes the node's own interfaces, except for failsafe ports.
fn close(node: &mut Node) {
    let program = HostEndpointProgram::default();
    let host = HostEndpoint { interface: Some("*".to_owned()), addresses: vec![], program };
    let report = node.change(|state| drop(state.host_endpoints.insert("all".into(), Arc::new(host))));
    assert_eq!(report, Report::default());
}

fn send(from: &NetNs, source: impl Into<IpAddr>, to: impl Into<IpAddr>, port: u16) {
    let (source, to) = (source.into(), to.into());
    let socket = from.run(|| UdpSocket::bind((source, 0)).unwrap()).unwrap();
    // Policy may refuse it at once.
    let _ = socket.send_to(b"meow", SocketAddr::from((to, port)));
}

#[test]
fn the_overlay_has_no_connections_and_pods_have_theirs() {
    let (mut nodes, pods) = dual_nodes();
    nodes.iter().for_each(forget);
    for closed in [false, true] {
        if closed {
            nodes.iter_mut().for_each(close);
        }
        // The sender accepts only what belongs to connections of its own.
        nodes[0].program(&pods[0], ingress(&[], EndOfTier::Deny));
        assert!(pods[0].reaches(&pods[1], 80), "closed: {closed}");
        assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81), "closed: {closed}");
        assert!(pods[1].is_cut_off(pods[0].address, 80), "closed: {closed}");
        for node in &nodes {
            assert_eq!(tracked_to(node, VXLAN), [], "closed: {closed}");
            let pods: Vec<Flow> = [80, 81].into_iter().flat_map(|port| tracked_to(node, port)).collect();
            assert!(pods.iter().any(|flow| flow.destination.is_ipv4()), "{pods:?}");
            assert!(pods.iter().any(|flow| flow.destination.is_ipv6()), "{pods:?}");
        }
    }
    assert_eq!(nodes[0].resync(), Report::default());
}

/// Other packets to the port are tracked: from addresses of no node, to other addresses, and without an overlay.
#[test]
fn only_packets_between_tunnel_ends_are_untracked() {
    let (mut nodes, pods) = two_nodes();
    let [one, two] = [1, 2].map(node_address);
    let stranger = Ipv4Addr::new(172, 31, 0, 77);
    let is_tracked = |nodes: &[Node; 2], index: usize, from: Ipv4Addr, to: Ipv4Addr| {
        forget(&nodes[index]);
        send(&nodes[index].namespace, from, to, VXLAN);
        !tracked_to(&nodes[index], VXLAN).is_empty()
    };
    assert!(!is_tracked(&nodes, 0, one, two));
    assert!(is_tracked(&nodes, 0, one, stranger), "to no node");
    assert!(
        is_tracked(&nodes, 0, vtep(1).address.to_string().parse().unwrap(), two),
        "from another own address"
    );
    assert!(is_tracked(&nodes, 0, one, pods[1].address), "to a pod");

    // Another port.
    let moved = |state: &mut NodeState| state.node.as_mut().unwrap().network.port = 4790;
    for node in &mut nodes {
        assert_eq!(node.change(moved), Report::default());
        forget(node);
    }
    assert!(pods[0].reaches(&pods[1], 80));
    nodes.iter().for_each(|node| assert_eq!(tracked_to(node, 4790), []));
    assert!(is_tracked(&nodes, 0, one, two), "the old port");

    // No overlay any more, and another overlay's peers.
    let chains = |node: &Node| table(node).chains.keys().filter(|name| name.starts_with("vxlan-")).count();
    assert_eq!(chains(&nodes[0]), 2);
    let report = nodes[0].change(|state| {
        state.node.as_mut().unwrap().ends.get_mut(&IpVersion::V4).unwrap().vtep = None;
        state.node.as_mut().unwrap().network.port = VXLAN;
        state.routes.remove(&block(2).into());
    });
    assert_eq!((chains(&nodes[0]), report), (0, Report::default()));
    assert!(is_tracked(&nodes, 0, one, two), "no overlay");
}

/// Where pods may send VXLAN, policy judges it by connections, as other packets.
#[test]
fn pods_own_packets_to_the_port_are_tracked_and_judged() {
    let (mut nodes, pods) = two_nodes();
    let receiver =
        pods[1].namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, VXLAN)).unwrap()).unwrap();
    let arrives = |timeout: Duration| {
        send(&pods[0].namespace, pods[0].address, pods[1].address, VXLAN);
        receiver.set_read_timeout(Some(timeout)).unwrap();
        receiver.recv(&mut [0; 8]).is_ok()
    };
    let brief = Duration::from_millis(300);
    assert!(!arrives(brief), "pods may not send VXLAN");
    for node in &mut nodes {
        let allow = |state: &mut NodeState| Arc::make_mut(&mut state.settings).vxlan_from_workloads = true;
        assert_eq!(node.change(allow), Report::default());
    }
    assert!(arrives(TIMEOUT));
    for node in &nodes {
        let [flow] = &tracked_to(node, VXLAN)[..] else { panic!("{:?}", tracked(node)) };
        assert_eq!((flow.source, flow.destination), (pods[0].address.into(), pods[1].address.into()));
    }
    nodes[1].program(&pods[1], ingress(&[], EndOfTier::Deny));
    nodes.iter().for_each(forget);
    assert!(!arrives(brief), "policy denies it");
}

/// A pod that claims to be a node gets nothing into the overlay, also where pods may send VXLAN. For IPv6, only the table checks
/// sources: the kernel has no check of the path back.
#[test]
fn a_pod_with_a_nodes_address_sends_nothing_into_the_overlay() {
    let (mut nodes, pods) = dual_nodes();
    let allow = |state: &mut NodeState| Arc::make_mut(&mut state.settings).vxlan_from_workloads = true;
    assert_eq!(nodes[1].change(allow), Report::default());
    let claim = || {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: own(1).into(), prefix_length: 128 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    };
    pods[1].namespace.run(claim).unwrap();
    let sender = || UdpSocket::bind((own(1), 0)).unwrap();
    let senders = [&pods[1].namespace, &nodes[0].namespace].map(|namespace| namespace.run(sender).unwrap());
    let receiver = pods[1].namespace.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 7000)).unwrap()).unwrap();
    receiver.set_read_timeout(Some(TIMEOUT)).unwrap();
    let inner = Flow {
        source: pod_v6(&pods[0]).into(),
        destination: pod_v6(&pods[1]).into(),
        protocol: Protocol::UDP,
        source_port: 7000,
        destination_port: 7000,
        icmp: None,
    };
    // What the node sends arrives after what the pod has sent before.
    for (tag, sender) in (0..).zip(&senders) {
        let header = [8, 0, 0, 0, 0, 0x10, 0, 0];
        let packet = [&header[..], &crate::common::frame(&inner, vtep_v6(2).mac.0, tag)].concat();
        sender.send_to(&packet, (own(2), VXLAN)).unwrap();
    }
    let mut buffer = [0; 8];
    let length = receiver.recv(&mut buffer).unwrap();
    assert_eq!(crate::common::tag(&buffer[..length]), 1, "the node's packet");
}

/// docs/operate.md: what an administrator's rule for VXLAN must accept.
#[test]
fn a_rule_that_accepts_new_connections_only_does_not_match_the_overlay() {
    let (nodes, pods) = two_nodes();
    let input = |accepted: &str| {
        let rules = format!(
            "add table inet admin; flush table inet admin; add chain inet admin input {{ type filter hook input priority filter; }}; \
             add rule inet admin input udp dport {VXLAN} {accepted} accept; add rule inet admin input udp dport {VXLAN} drop"
        );
        let mut nft = std::process::Command::new("nft");
        let status = nodes[1].namespace.enter_on_spawn(nft.arg(rules)).unwrap().status().unwrap();
        assert!(status.success());
    };
    input("ct state new");
    assert!(pods[0].is_cut_off(pods[1].address, 80));
    for accepted in ["ct state { new, untracked }", ""] {
        input(accepted);
        assert!(pods[0].reaches(&pods[1], 80), "{accepted}");
    }
}

/// A router says that a packet of the overlay was too big. The node believes it, also if its own interfaces are closed.
#[test]
fn closed_nodes_learn_the_mtu_of_a_path_between_nodes() {
    let (mut nodes, pods) = dual_nodes();
    close(&mut nodes[0]);
    let report = nodes[0].change(|state| {
        let icmp = || vec![Rule { protocol: Some(Protocol(58)), ..Rule::all(Action::Deny) }];
        state
            .policies
            .insert(policy_id("no-icmp"), Arc::new(PolicyRules { ingress: icmp(), egress: vec![] }));
        let host = Arc::make_mut(state.host_endpoints.get_mut("all").unwrap());
        host.program.pre_dnat = ingress(&["no-icmp"], EndOfTier::Pass);
        host.program.pre_dnat.profiles.clear();
    });
    assert_eq!(report, Report::default());
    let (mac, packet) = vxlan_packet(&nodes[1], &pods);
    let raw = || {
        let icmp = Some(rustix::net::Protocol::from_raw(58.try_into().unwrap()));
        net::socket_with(AddressFamily::INET6, SocketType::RAW, SocketFlags::NONBLOCK, icmp).unwrap()
    };
    let passed = nodes[0].namespace.run(raw).unwrap();
    let patched = |at: usize, bytes: &[u8]| {
        let mut packet = packet.clone();
        packet[at..at + bytes.len()].copy_from_slice(bytes);
        packet
    };
    // About another protocol, another address, another port; and about the overlay's packet, which is the last one to arrive.
    let others = [patched(6, &[6]), patched(24, &own(77).octets()), patched(42, &4790u16.to_be_bytes())];
    for (packet, mtu) in others.iter().zip([1291, 1292, 1293]).chain([(&packet, 1300)]) {
        let message = too_big(own(9), own(1), mtu, packet);
        let frame = [&mac[..], &[0x66, 0, 0, 0, 0, 9], &[0x86, 0xdd], &message].concat();
        let send = || PacketSocket::open(interface_index("eth0").unwrap()).unwrap().send(&frame).unwrap();
        assert!(nodes[1].namespace.run(send).unwrap());
    }
    let look = || {
        let show =
            std::process::Command::new("ip").args(["-6", "route", "get", &own(2).to_string()]).output();
        String::from_utf8(show.unwrap().stdout).unwrap()
    };
    let deadline = Instant::now() + TIMEOUT;
    while !nodes[0].namespace.run(look).unwrap().contains("mtu 1300") {
        assert!(Instant::now() < deadline, "{}", nodes[0].namespace.run(look).unwrap());
    }
    let (mut buffer, mut told) = ([0; 2048], Vec::new());
    while let Ok((length, _)) = net::recv(&passed, &mut buffer[..], RecvFlags::empty()) {
        if buffer[0] == 2 && length > 8 {
            told.push(u32::from_be_bytes(buffer[4..8].try_into().unwrap()));
        }
    }
    assert_eq!(told, [1300]);
}

/// A packet of the overlay of IPv6 from the first node to the second one, and the first node's MAC address.
fn vxlan_packet(node: &Node, pods: &[Pod; 2]) -> (Vec<u8>, Vec<u8>) {
    let seen = capture(node);
    assert!(reaches_v6(&pods[0].namespace, pod_v6(&pods[1]), 81));
    let mut buffer = [0; 4096];
    while let Some(length) = seen.receive(&mut buffer).unwrap() {
        let frame = &buffer[..length];
        if frame[12..14] == [0x86, 0xdd] && frame[20] == 17 && frame[22..38] == own(1).octets() {
            return (frame[6..12].to_vec(), frame[14..].to_vec());
        }
    }
    panic!("no VXLAN over IPv6");
}

/// An ICMPv6 message of the type Packet Too Big, with its IPv6 header (RFC 4443, section 3.2).
fn too_big(from: Ipv6Addr, to: Ipv6Addr, mtu: u32, packet: &[u8]) -> Vec<u8> {
    let mut icmp = [&[2, 0, 0, 0], &mtu.to_be_bytes()[..], packet].concat();
    let length = icmp.len() as u16;
    let addresses = [from.octets(), to.octets()].concat();
    let pseudo = [&addresses[..], &u32::from(length).to_be_bytes(), &[0, 0, 0, 58], &icmp].concat();
    let mut sum: u32 = pseudo
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    icmp[2..4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    [&[0x60, 0, 0, 0], &length.to_be_bytes()[..], &[58, 64], &addresses, &icmp].concat()
}
