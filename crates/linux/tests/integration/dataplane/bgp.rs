//! Pods do not reach the BGP speakers of nodes (policy decision 48), with real connections through natOutgoing.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;

use crate::common::cluster::*;
use tortie_api::calico::BgpFromPods;
use tortie_dataplane::{NodeState, Report, Settings};
use tortie_kernel::interface_index;
use tortie_kernel::route::{Change, Route, RouteSocket};
use tortie_policy::ALL_NODES;
use tortie_policy::program::{Member, SetKind};

/// A machine behind the same switch.
const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(172, 31, 0, 9);
/// The address of a Service.
const SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
const BGP: u16 = 179;
const OTHER_BGP: u16 = 1790;
/// A port of BGP from which a node connects to pods.
const BGP_CLIENT: u16 = 40_179;

fn set_nodes(state: &mut NodeState, nodes: &[Ipv4Addr]) {
    let members = nodes.iter().map(|address| Member::Net(IpAddr::V4(*address).into()));
    state.sets.insert(ALL_NODES.clone(), (SetKind::Nets, members.collect()));
}

/// As kube-proxy does: the Service has an endpoint that somebody wrote by hand, the BGP speaker of a node.
fn serve_by_hand(node: &Node) {
    let table = format!(
        "table ip by-hand {{ chain services {{ type nat hook prerouting priority -100; \
         ip daddr {SERVICE} tcp dport 80 dnat to {NEIGHBOUR}:{BGP}; }}; }}"
    );
    let mut nft = Command::new("nft");
    let status = node.namespace.enter_on_spawn(nft.arg(table)).unwrap().status();
    assert!(status.expect("this test needs the program nft: apt-get install nftables").success());
}

/// A connection from a port, if it succeeds.
fn connect_from(port: u16, to: Ipv4Addr, to_port: u16) -> Option<TcpStream> {
    let socket =
        rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((NEIGHBOUR, port))).unwrap();
    rustix::net::connect(&socket, &SocketAddr::from((to, to_port))).ok()?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(UNREACHED)).unwrap();
    Some(stream)
}

/// The listeners of a machine at the ports of BGP, and at another one.
fn listeners(node: &Node) -> [TcpListener; 3] {
    let listen = |port| TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).unwrap();
    node.namespace.run(|| [BGP, OTHER_BGP, 80].map(listen)).unwrap()
}

/// Pods behind natOutgoing, and their node. A machine beside them has a route to pods.
fn behind_nat() -> ([Node; 2], [Pod; 2]) {
    let ([mut node, neighbour], pods) = node_with_two_pods();
    let to_pods = Route::via(block(1).into(), node_address(1).into(), 0, 4);
    let wire = || {
        let link = interface_index("eth0").unwrap();
        RouteSocket::open()
            .unwrap()
            .change(&Change::AddRoute(Route { link: Some(link), ..to_pods }))
            .unwrap();
    };
    neighbour.namespace.run(wire).unwrap();
    let report = node.change(|state| {
        Arc::make_mut(&mut state.settings).pools = [("10.65.0.0/16".parse().unwrap(), true)].into();
        set_nodes(state, &[node_address(1)]);
    });
    assert_eq!(report, Report::default());
    ([node, neighbour], pods)
}

#[test]
fn pods_do_not_reach_the_bgp_speakers_of_nodes() {
    let ([mut node, neighbour], [pod, _other]) = behind_nat();
    serve_by_hand(&node);
    let [bgp, other_bgp, http] = listeners(&neighbour);
    let _own = listeners(&node);
    let change = |node: &mut Node, change: &dyn Fn(&mut NodeState)| {
        assert_eq!(node.change(change), Report::default());
    };

    // The machine is no node: a pod may be the peer of a router. The router sees the node's address.
    let as_node = Some(IpAddr::from(node_address(1)));
    assert_eq!(seen(pod.connect(NEIGHBOUR, BGP), &bgp), as_node);
    assert_eq!(seen(pod.connect(SERVICE, 80), &bgp), as_node);
    assert!(pod.is_cut_off(node_address(1), BGP), "the own node");

    // It becomes a node.
    change(&mut node, &|state| {
        set_nodes(state, &[node_address(1), NEIGHBOUR]);
        Arc::make_mut(&mut state.settings).bgp_ports = [BGP, BGP_CLIENT].into();
    });
    assert!(pod.is_cut_off(NEIGHBOUR, BGP) && pod.is_cut_off(SERVICE, 80));
    // A node's connection to a pod may come from any port, also from one of BGP.
    pod.serve(81);
    let of_node = neighbour.namespace.run(|| connect_from(BGP_CLIENT, pod.address, 81)).unwrap();
    assert!(of_node.is_some_and(|stream| answers(&stream)), "the pod answers a node");
    assert_eq!(seen(pod.connect(NEIGHBOUR, 80), &http), as_node, "other ports are open");
    let of_node = node.namespace.run(|| connect(NEIGHBOUR, BGP)).unwrap();
    assert_eq!(seen(of_node, &bgp), as_node, "the node itself is the peer");

    // Another port, by BGPConfiguration; then whatever the policy says, by FelixConfiguration.
    assert_eq!(seen(pod.connect(NEIGHBOUR, OTHER_BGP), &other_bgp), as_node);
    let set = |settings: Settings| {
        move |state: &mut NodeState| {
            let pools = state.settings.pools.clone();
            state.settings = Arc::new(Settings { pools, ..settings.clone() });
        }
    };
    let ports = Settings { bgp_ports: [BGP, OTHER_BGP].into(), ..Settings::default() };
    change(&mut node, &set(ports.clone()));
    assert!(pod.is_cut_off(NEIGHBOUR, OTHER_BGP));
    change(&mut node, &set(Settings { bgp_from_pods: BgpFromPods::Allow, ..ports.clone() }));
    assert_eq!(seen(pod.connect(NEIGHBOUR, BGP), &bgp), as_node);
    change(&mut node, &set(ports));
    assert!(pod.is_cut_off(NEIGHBOUR, BGP));

    // A restarted agent has the same table, and the machine is no node any more.
    assert_eq!(node.resync(), Report::default());
    assert!(pod.is_cut_off(NEIGHBOUR, BGP));
    change(&mut node, &|state| set_nodes(state, &[node_address(1)]));
    assert_eq!(seen(pod.connect(NEIGHBOUR, BGP), &bgp), as_node);
}
