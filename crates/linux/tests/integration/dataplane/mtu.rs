//! The MTU of overlay and pods: no packet through VXLAN is fragmented, and none disappears.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::Arc;

use crate::common::cluster::*;
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Change, LinkSetting, RouteSocket};

/// The headers of IPv4 and UDP.
const HEADERS: usize = 28;

fn set_mtu(namespace: &NetNs, link: &str, mtu: u32) {
    let set = || {
        let index = interface_index(link).unwrap();
        RouteSocket::open().unwrap().change(&Change::SetLink(index, vec![LinkSetting::Mtu(mtu)])).unwrap();
    };
    namespace.run(set).unwrap();
}

fn mtu(namespace: &NetNs, link: &str) -> u32 {
    namespace.run(|| RouteSocket::open().unwrap().link(link).unwrap().unwrap().mtu).unwrap()
}

/// Two nodes on an underlay with this MTU, and a pod on each.
fn nodes(underlay_mtu: u32) -> ([Node; 2], [Pod; 2]) {
    let underlay = Underlay::new();
    let mut nodes = [1, 2].map(|number| Node::new(&underlay, number));
    let pods = [Pod::new("one", 1, 2), Pod::new("two", 2, 2)];
    for (node, (pod, own, other)) in nodes.iter_mut().zip([(&pods[0], 1, 2), (&pods[1], 2, 1)]) {
        set_mtu(&node.namespace, "eth0", underlay_mtu);
        join_overlay(node, own, other);
        node.add(pod, open());
    }
    (nodes, pods)
}

/// Fragments that a namespace has made or put together.
fn fragments(namespace: &NetNs) -> u64 {
    let text = namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap()).unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("Ip:"));
    let (names, values) =
        (lines.next().unwrap().split_whitespace(), lines.next().unwrap().split_whitespace());
    let counted = ["ReasmReqds", "ReasmFails", "FragOKs", "FragFails", "FragCreates"];
    let pairs = names.zip(values).filter(|(name, _)| counted.contains(name));
    pairs.map(|(_, value)| value.parse::<u64>().unwrap()).sum()
}

/// The datagram arrives.
fn arrives(from: &Pod, to: &Pod, receiver: &UdpSocket, length: usize) -> bool {
    let datagram = vec![7; length];
    let sender = from.namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap()).unwrap();
    sender.send_to(&datagram, (to.address, 9)).unwrap();
    let mut buffer = vec![0; 1 << 16];
    receiver.recv(&mut buffer).is_ok_and(|received| received == length)
}

#[test]
fn every_size_passes_the_overlay_in_one_piece() {
    for underlay_mtu in [1500, 1400] {
        let (nodes, pods) = nodes(underlay_mtu);
        let expected = underlay_mtu - 50;
        for (node, pod) in nodes.iter().zip(&pods) {
            assert_eq!(
                (mtu(&node.namespace, "vxlan.calico"), mtu(&pod.namespace, "eth0")),
                (expected, expected)
            );
        }
        let receiver =
            pods[1].namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 9)).unwrap()).unwrap();
        receiver.set_read_timeout(Some(TIMEOUT)).unwrap();
        let largest = expected as usize - HEADERS;
        let namespaces = [&nodes[0].namespace, &nodes[1].namespace, &pods[0].namespace, &pods[1].namespace];
        for length in (1..largest - 64).step_by(97).chain(largest - 64..=largest) {
            assert!(arrives(&pods[0], &pods[1], &receiver, length), "{length} bytes at {underlay_mtu}");
        }
        assert_eq!(namespaces.map(fragments), [0; 4], "{underlay_mtu}");
        // The test sees fragments: the sender itself divides what is one byte longer.
        assert!(arrives(&pods[0], &pods[1], &receiver, largest + 1));
        assert!(fragments(&pods[0].namespace) > 0);
    }
}

#[test]
fn the_setting_counts_for_new_pods_and_older_ones_learn_it() {
    let ([mut node, other], [pod, remote]) = nodes(1500);
    let set = |mtu| move |state: &mut NodeState| Arc::make_mut(&mut state.settings).vxlan_mtu = mtu;
    assert_eq!(node.change(set(Some(1300))), Report::default());
    let newer = Pod::new("newer", 1, 3);
    node.add(&newer, open());
    assert_eq!((mtu(&node.namespace, "vxlan.calico"), mtu(&newer.namespace, "eth0")), (1300, 1300));
    assert_eq!(mtu(&pod.namespace, "eth0"), 1450, "a pod keeps its own until it is recreated");

    // A pod with a larger one is told by its node, so that its connections do not stall.
    let sent = vec![7; 300_000];
    let listener = remote.namespace.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 80)).unwrap()).unwrap();
    let mut client = pod.connect(remote.address, 80).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    let receive = std::thread::spawn(move || {
        let mut received = Vec::new();
        server.read_to_end(&mut received).map(|_| received.len())
    });
    client.write_all(&sent).unwrap();
    drop(client);
    assert_eq!(receive.join().unwrap().unwrap(), sent.len());
    assert_eq!(fragments(&other.namespace), 0);

    assert_eq!(node.change(set(None)), Report::default());
    assert_eq!(mtu(&node.namespace, "vxlan.calico"), 1450);
    // The interface changes; the next full check follows it.
    set_mtu(&node.namespace, "eth0", 1280);
    assert_eq!(node.resync(), Report::default());
    assert_eq!(mtu(&node.namespace, "vxlan.calico"), 1230);
    let adopted = node.namespace.run(|| node.wiring.check(&pod.attachment())).unwrap();
    assert!(adopted.is_ok());
}

/// The pods of a Windows node keep their MTU, whatever the network between the nodes carries.
#[test]
fn a_pod_learns_that_the_pods_of_another_node_take_less() {
    let ([mut node, _other], [pod, remote]) = nodes(1500);
    let change = |mtu| {
        move |state: &mut NodeState| {
            state.vteps.get_mut(&vtep(2).key()).unwrap().mtu = mtu;
        }
    };
    let route_mtus = |node: &Node| {
        let routes = node.namespace.run(|| RouteSocket::open().unwrap().routes().unwrap()).unwrap();
        let to_other = |destination: &str| {
            routes.iter().find(|route| route.destination == destination.parse().unwrap()).unwrap().mtu
        };
        [to_other("10.65.2.0/26"), to_other("10.65.2.0/32")]
    };
    let receiver = remote.namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 9)).unwrap()).unwrap();
    receiver.set_read_timeout(Some(std::time::Duration::from_millis(500))).unwrap();
    assert!(arrives(&pod, &remote, &receiver, 1400));
    assert_eq!(route_mtus(&node), [None; 2]);
    assert_eq!(node.change(change(Some(1300))), Report::default());
    assert_eq!(route_mtus(&node), [Some(1300); 2]);
    assert!(arrives(&pod, &remote, &receiver, 1300 - HEADERS));
    assert!(
        !arrives(&pod, &remote, &receiver, 1301 - HEADERS),
        "the pod's first packet must not be fragmented"
    );
    assert!(arrives(&pod, &remote, &receiver, 1301 - HEADERS), "the pod has learned the size");
    assert!(fragments(&pod.namespace) > 0);
    // The own link is narrower.
    let set = |state: &mut NodeState| Arc::make_mut(&mut state.settings).vxlan_mtu = Some(1280);
    assert_eq!(node.change(set), Report::default());
    assert_eq!(route_mtus(&node), [None; 2]);
    assert_eq!(node.change(change(Some(1200))), Report::default());
    assert_eq!(route_mtus(&node), [Some(1200); 2]);
    assert_eq!(node.change(change(None)), Report::default());
    assert_eq!(route_mtus(&node), [None; 2]);
}

/// The node's own pods, BGP and direct routes need no VXLAN, and what works goes on.
#[test]
fn a_vxlan_link_that_cannot_be_as_wanted_costs_nothing_else() {
    let ([mut node, _other], [pod, remote]) = nodes(1500);
    remote.serve(80);
    let set = |mtu| move |state: &mut NodeState| Arc::make_mut(&mut state.settings).vxlan_mtu = mtu;
    let is_named = |report: &Report| {
        let conditions: Vec<_> =
            report.node.iter().map(|it| (it.reason, it.message.contains("vxlanMTU"))).collect();
        conditions == [(Reason::RouteRefused, true)] && report.retry && report.endpoints.is_empty()
    };
    let report = node.change(set(Some(20)));
    assert!(is_named(&report), "{report:?}");
    assert!(pod.reaches(&remote, 80), "the link has its former MTU");
    let newer = Pod::new("newer", 1, 3);
    let report = node.attach(&newer, open());
    assert!(is_named(&report), "{report:?}");
    newer.serve(81);
    assert!(pod.reaches(&newer, 81), "a new pod has its route");

    // A node without a link from before, where a program has the port.
    let mut node = Node::new(&Underlay::new(), 3);
    let taken = node.namespace.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 4789)).unwrap()).unwrap();
    let report = node.change(|state| {
        open_profile(state);
        state.node = Some(local_node(3));
    });
    assert!(is_named(&report), "{report:?}");
    let (client, server) = (Pod::new("client", 3, 2), Pod::new("server", 3, 3));
    for pod in [&client, &server] {
        assert!(is_named(&node.attach(pod, open())));
    }
    server.serve(80);
    assert!(client.reaches(&server, 80), "pods of the node have their routes");
    drop(taken);
    assert_eq!(node.resync(), Report::default());
}

/// flannel's backend host-gw has no tunnel. Where a tunnel cannot be made yet, pods fit it nevertheless.
#[test]
fn without_a_link_of_an_overlay_pods_have_the_mtu_of_the_nodes_interface() {
    let underlay = Underlay::new();
    for (number, has_tunnel, underlay_mtu, expected) in
        [(1, false, 1400, 1400), (2, false, 1500, 1500), (3, false, 9000, 9000), (4, true, 1400, 1350)]
    {
        let mut node = Node::new(&underlay, number);
        set_mtu(&node.namespace, "eth0", underlay_mtu);
        node.change(|state| {
            open_profile(state);
            let vtep = has_tunnel.then(|| vtep(number));
            state.node = Some(LocalNode::ipv4("n", node_address(number), vtep));
        });
        if has_tunnel {
            let delete = || {
                let mut socket = RouteSocket::open().unwrap();
                let index = interface_index("vxlan.calico").unwrap();
                socket.change(&Change::DeleteLink(index)).unwrap();
            };
            node.namespace.run(delete).unwrap();
        }
        let pod = Pod::new("pod", number, 2);
        let connect = || drop(node.wiring.connect(&pod.attachment()).unwrap());
        node.namespace.run(connect).unwrap();
        assert_eq!(mtu(&pod.namespace, "eth0"), expected, "{number}");
    }
}
