//! Pods of different nodes reach each other through VXLAN, and nobody else can send packets into it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;

use crate::common::cluster::*;
use ipnet::IpNet;
use rustix::net::{AddressFamily, SocketType};
use tortie_api::net::Action;
use tortie_dataplane::{MacAddress, NodeState, Report, RouteTarget};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::ethtool;
use tortie_kernel::interface_index;
use tortie_kernel::nftables::Nft;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};
use tortie_policy::program::*;

#[test]
fn pods_of_two_nodes_connect_over_vxlan() {
    let (mut nodes, pods) = two_nodes();
    let capture =
        nodes[1].namespace.run(|| PacketSocket::open(interface_index("eth0").unwrap()).unwrap()).unwrap();
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    assert!(nodes[0].reaches(&pods[1], 80), "from a node to another node's pod");
    for node in &nodes {
        assert!(tracked_to(node, 80) >= 3 && tracked_to(node, 4789) == 0, "only the pods' flows are tracked");
    }

    // On the underlay it is VXLAN: UDP to port 4789, flags 8, VNI 4096 (RFC 7348).
    let mut buffer = [0; 4096];
    let mut seen = 0;
    while let Some(length) = capture.receive(&mut buffer).unwrap() {
        let frame = &buffer[..length];
        if frame.len() > 50 && frame[12..14] == [8, 0] && frame[23] == 17 {
            assert_eq!(frame[36..38], 4789u16.to_be_bytes());
            assert_eq!(frame[42..50], [8, 0, 0, 0, 0, 0x10, 0, 0]);
            seen += 1;
        }
    }
    assert!(seen >= 6, "{seen} VXLAN packets were seen");

    // From another node, a pod is judged by its policy, with the address that the node has there.
    nodes[1].change(|state| {
        let nets = vec!["10.65.1.2/32".parse().unwrap()];
        let source = EntityMatch { nets, ..EntityMatch::default() };
        let ingress = vec![Rule { source, ..Rule::all(Action::Allow) }];
        let rules = PolicyRules { ingress, egress: Vec::new() };
        state.policies.insert(policy_id("one-only"), Arc::new(rules));
    });
    nodes[1].program(&pods[1], ingress(&["one-only"], EndOfTier::Deny));
    assert!(pods[0].reaches(&pods[1], 80) && nodes[0].is_cut_off(pods[1].address, 80));

    // Packets to a free address of an own block do not leave the node, and nothing else of the block does.
    let routes = nodes[0].namespace.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
    assert!(routes.contains(&Route::blackhole(block(1).into(), 84)), "{routes:#?}");

    // The other node disappears.
    nodes[0].change(|state| {
        state.routes.remove(&block(2).into());
        state.vteps.clear();
    });
    assert!(pods[0].is_cut_off(pods[1].address, 80));
    let left = nodes[0].namespace.run(|| {
        let mut socket = RouteSocket::open().unwrap();
        let link = interface_index("vxlan.calico").unwrap();
        let neighbours =
            socket.neighbours().unwrap().into_iter().filter(|it| it.link == link && it.address.is_ipv4());
        (socket.fdb(link).unwrap().len(), neighbours.count())
    });
    assert_eq!(left.unwrap(), (0, 0));
}

/// A program of the node may be bound to the node's address, and the source for a Service's address is chosen before the packet goes into a
/// tunnel. Other nodes would not answer through the tunnel.
#[test]
fn what_a_node_sends_by_the_tunnel_has_the_address_of_the_tunnel() {
    let (nodes, pods) = two_nodes();
    let listen = || TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 81))).unwrap();
    let server = pods[1].namespace.run(listen).unwrap();
    let bound = |source: Ipv4Addr| {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((source, 0))).unwrap();
        rustix::net::connect(&socket, &SocketAddr::from((pods[1].address, 81))).unwrap();
        Some(TcpStream::from(socket))
    };
    for (source, expected) in [(node_address(1), vtep(1).address), (Ipv4Addr::UNSPECIFIED, vtep(1).address)] {
        let found = nodes[0].namespace.run(|| seen(bound(source), &server)).unwrap();
        assert_eq!(found, Some(expected), "bound to {source}");
    }
    assert_eq!(seen(pods[0].connect(pods[1].address, 81), &server), Some(pods[0].address.into()));
}

/// Some adapters, hypervisors and drivers damage the checksums that are left to them.
#[test]
fn checksums_of_the_overlay_are_computed_in_the_kernel_if_an_operator_says_so() {
    let (mut nodes, pods) = two_nodes();
    let [node, _] = &mut nodes;
    let offloads = |node: &Node| {
        node.namespace.run(|| ethtool::transmit_checksum_offload("vxlan.calico").unwrap()).unwrap()
    };
    assert!(offloads(node));
    let set = |node: &mut Node, value: Option<bool>| {
        let report = node.change(|state| Arc::make_mut(&mut state.settings).vxlan_checksum_offload = value);
        assert_eq!(report, Report::default());
        assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80), "{value:?}");
        offloads(node)
    };
    assert!(!set(node, Some(false)));
    assert!(!set(node, None), "the link stays as it is");
    assert!(set(node, Some(true)));
    assert!(!set(node, Some(false)));
    // Somebody else changes it.
    node.namespace.run(|| ethtool::set_transmit_checksum_offload("vxlan.calico", true).unwrap()).unwrap();
    assert_eq!(node.resync(), Report::default());
    assert!(!offloads(node));
}

/// A Node may be registered anew, and get its address later. Its pods run on meanwhile.
#[test]
fn a_starting_agent_whose_node_has_no_address_keeps_routes_and_guards_the_overlay() {
    let (mut nodes, pods) = two_nodes();
    let [node, _] = &mut nodes;
    let known = node.state.node.take();
    let gone = block(3).into();
    let report = node.restart_with_report();
    let [condition] = &report.node[..] else { panic!("{report:?}") };
    assert!(condition.message.contains("has no address of its own"), "{condition:?}");
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    let guards = |node: &Node| {
        let listed = || Nft::open().unwrap().list("tortie").unwrap().unwrap();
        let chains = node.namespace.run(listed).unwrap().chains;
        chains
            .values()
            .flat_map(|chain| &chain.rules)
            .filter(|rule| rule.comment == "VXLAN only from nodes")
            .count()
    };
    assert_eq!(guards(node), 2, "of both families");
    // With the address, everything is compared again.
    node.state.routes.insert(gone, RouteTarget::Vxlan { node: "node-2".to_owned() });
    node.change(|state| state.node = known);
    assert_eq!(guards(node), 1);
    node.change(|state| drop(state.routes.remove(&block(2).into())));
    assert!(pods[0].is_cut_off(pods[1].address, 80));
}

/// How many tracked connections lead to a port. It removes them.
pub(crate) fn tracked_to(node: &Node, port: u16) -> usize {
    let is_it = |flow: &Flow| flow.destination_port == port;
    node.namespace.run(|| Conntrack::open().unwrap().forget_flows(is_it).unwrap()).unwrap()
}

/// Packets of other nodes to the port of VXLAN that are for a pod are a flow of the pod.
#[test]
fn a_nodes_flow_to_a_pods_port_4789_is_tracked() {
    let (nodes, pods) = two_nodes();
    let to_pod = Route::via(IpNet::from(IpAddr::from(pods[0].address)), node_address(1).into(), 0, 3);
    let send = || {
        let link = interface_index("eth0").unwrap();
        let route = Route { link: Some(link), metric: 1, ..to_pod.clone() };
        let mut socket = RouteSocket::open().unwrap();
        let ours = socket.routes().unwrap().into_iter().find(|it| it.destination == block(1).into()).unwrap();
        socket.change(&Change::DeleteRoute(ours)).unwrap();
        socket.change(&Change::AddRoute(route)).unwrap();
        UdpSocket::bind((node_address(2), 0)).unwrap().send_to(b"x", (pods[0].address, 4789)).unwrap();
    };
    nodes[1].namespace.run(send).unwrap();
    let deadline = std::time::Instant::now() + TIMEOUT;
    while tracked_to(&nodes[0], 4789) == 0 {
        assert!(std::time::Instant::now() < deadline, "the flow is tracked");
    }
}

/// VXLAN packets could bypass the pods' policy with any inner source. Sends the same packets to a node from a foreign
/// address and from a node's address.
#[test]
fn vxlan_is_accepted_only_from_nodes() {
    let (nodes, pods) = two_nodes();
    accepted_only_from_nodes(nodes, &pods, 4789);
}

#[test]
fn vxlan_to_another_port_is_accepted_only_from_nodes() {
    let (mut nodes, pods) = two_nodes();
    for node in &mut nodes {
        let report = node.change(|state| state.node.as_mut().unwrap().network.port = 4790);
        assert_eq!(report, Report::default());
    }
    accepted_only_from_nodes(nodes, &pods, 4790);
}

fn accepted_only_from_nodes(mut nodes: [Node; 2], pods: &[Pod; 2], port: u16) {
    const STRANGER: u8 = 99;
    let sender = |number: u8| UdpSocket::bind((node_address(number), 0)).unwrap();
    let open_senders = || {
        let link = interface_index("eth0").unwrap();
        let address = Address { link, address: node_address(STRANGER).into(), prefix_length: 24 };
        RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
        [STRANGER, 1].map(|number| (number, sender(number)))
    };
    let senders = nodes[0].namespace.run(open_senders).unwrap();
    let receiver = pods[1].namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 7000)).unwrap()).unwrap();
    receiver.set_read_timeout(Some(TIMEOUT)).unwrap();

    // Whose packets arrive in the pod: when the node's has arrived, the foreign one before it has been received or
    // dropped.
    let inner = datagram(pods);
    let arrive_from = || {
        for (number, socket) in &senders {
            // Flags 8, VNI 4096 (RFC 7348).
            let header = [8, 0, 0, 0, 0, 0x10, 0, 0];
            let packet =
                [&header[..], &crate::common::frame(&inner, vtep(2).mac.0, (*number).into())].concat();
            socket.send_to(&packet, (node_address(2), port)).unwrap();
        }
        let mut arrived = Vec::new();
        while arrived.last() != Some(&1) {
            let mut buffer = [0; 8];
            let length = receiver.recv(&mut buffer).expect("a packet from a node is taken");
            arrived.push(crate::common::tag(&buffer[..length]));
        }
        arrived
    };
    assert_eq!(arrive_from(), [1]);
    let node = vtep(STRANGER);
    nodes[1].change(|state| drop(state.vteps.insert(node.key(), node.clone())));
    assert_eq!(arrive_from(), [STRANGER.into(), 1], "it is a node's now");
    nodes[1].change(|state| drop(state.vteps.remove(&node.key())));
    assert_eq!(arrive_from(), [1], "it is a node's no more");
}

/// Another node's VTEP gets another MAC address, and then another underlay address: at each moment the kernel knows where
/// its packets go.
#[test]
fn a_changed_vtep_is_known_before_the_old_one_is_forgotten() {
    let underlay = Underlay::new();
    let mut node = Node::new(&underlay, 1);
    node.change(|state| {
        state.node = Some(local_node(1));
        state.vteps.insert(vtep(2).key(), vtep(2));
        state.routes.insert(block(2).into(), RouteTarget::Vxlan { node: "node-2".to_owned() });
    });
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut monitor = std::process::Command::new("ip");
    monitor.args(["monitor", "neigh"]).stdout(log.reopen().unwrap());
    let mut monitor = node.namespace.run(|| monitor.spawn().unwrap()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let (mac, parent) = (MacAddress([0x66, 0, 0, 0, 0, 0x99]), Ipv4Addr::new(172, 31, 0, 77).into());
    assert_eq!(
        node.change(|state| state.vteps.get_mut(&vtep(2).key()).unwrap().mac = mac),
        Report::default()
    );
    assert_eq!(
        node.change(|state| state.vteps.get_mut(&vtep(2).key()).unwrap().parent = parent),
        Report::default()
    );
    std::thread::sleep(std::time::Duration::from_millis(300));
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    let events = std::fs::read_to_string(log.path()).unwrap();
    let of = |word: &str| events.lines().filter(|line| line.contains(word)).collect::<Vec<_>>();
    let neighbour = of(&vtep(2).address.to_string());
    assert!(!neighbour.is_empty() && neighbour.iter().all(|line| !line.starts_with("Deleted")), "{events}");
    let (added, old) = (of("66:00:00:00:00:99"), of("66:00:00:00:00:02"));
    assert!(added.iter().all(|line| !line.starts_with("Deleted")), "{events}");
    // The last word on the old one is its deletion, after the new one came.
    let deleted = old.last().expect("the old entry goes");
    assert!(deleted.starts_with("Deleted"), "{events}");
    assert!(events.find(added[0]) < events.find(*deleted), "{events}");
    let knows = || {
        let mut socket = RouteSocket::open().unwrap();
        let link = interface_index("vxlan.calico").unwrap();
        let entries = socket.fdb(link).unwrap();
        entries.iter().map(|entry| (entry.mac, entry.destination)).collect::<Vec<_>>()
    };
    assert_eq!(node.namespace.run(knows).unwrap(), [(mac, parent)]);
    assert_eq!(node.resync(), Report::default());
}

#[test]
fn another_identifier_and_port_take_effect_on_a_running_overlay() {
    let (mut nodes, pods) = two_nodes();
    assert!(pods[0].reaches(&pods[1], 80));
    let set = |state: &mut NodeState| {
        let network = &mut state.node.as_mut().unwrap().network;
        (network.vni, network.port) = (5000, 4790);
    };
    assert_eq!(nodes[0].change(set), Report::default());
    assert!(pods[0].is_cut_off(pods[1].address, 80), "the other node has the old ones");
    assert_eq!(nodes[1].change(set), Report::default());
    for node in &nodes {
        tracked_to(node, 4790); // from when one node had another port
    }
    assert!(pods[0].reaches(&pods[1], 80) && pods[1].reaches(&pods[0], 80));
    for node in &nodes {
        let link = node.namespace.run(|| RouteSocket::open().unwrap().link("vxlan.calico").unwrap());
        let vxlan = link.unwrap().unwrap().vxlan.unwrap();
        assert_eq!((vxlan.vni, vxlan.port), (5000, 4790));
        assert_eq!(tracked_to(node, 4790), 0);
    }
}
