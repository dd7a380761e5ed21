//! Policy for pods that another plugin has connected, when the agent's thread looks late or could not look before.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;
use testkit::Stateful;
use tortie_api::calico::EstablishedFlows;
use tortie_dataplane::*;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Nft, Op, Transaction};
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Route, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_linux::Dataplane;
use tortie_linux::dataplane::{Config, PolicyOnly};
use tortie_policy::program::*;

use crate::common::cluster::*;
use crate::common::{cable, checksum};

/// A node whose runtime keeps results in a folder.
struct Foreign {
    node: Node,
    config: Config,
    folder: TempDir,
}

impl Foreign {
    fn new() -> Self {
        Self::with("eni")
    }

    /// With a prefix of pods' interfaces. [`Foreign::attach`] makes interfaces with the prefix `cali` and the hash of their pods.
    fn with(prefix: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let results = folder.path().join("results");
        std::fs::create_dir(&results).unwrap();
        let config = Config { policy_only: only(prefix, results), ..Config::default() };
        let mut node = Node::with(&Underlay::new(), 1, config.clone());
        let forward = || std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        node.namespace.run(forward).unwrap();
        let report = node.change(|state| {
            open_profile(state);
            state.policies.insert(policy_id("closed"), Arc::new(PolicyRules::default()));
        });
        assert_eq!(report, Report::default());
        Self { node, config, folder }
    }

    /// What another plugin and the runtime do for a pod. Returns the interface on the host.
    fn attach(&mut self, pod: &Pod) -> String {
        let connect = || {
            let interface = self.node.wiring.connect(&pod.attachment()).unwrap();
            assert!(self.node.wiring.wait_until_live(&interface, TIMEOUT));
            let link = interface_index(&interface.host_interface).unwrap();
            let route = Route::on_link(IpAddr::from(pod.address).into(), link, 3);
            RouteSocket::open().unwrap().change(&Change::AddRoute(route)).unwrap();
            interface.host_interface
        };
        let interface = self.node.namespace.run(connect).unwrap();
        self.keep_result(pod, "eth0", &interface);
        interface
    }

    /// The result of a plugin for an interface of the pod, with the one that it names on the host.
    fn keep_result(&self, pod: &Pod, inside: &str, interface: &str) {
        let result = json!({
            "containerId": pod.container_id, "ifName": inside,
            "cniArgs": [["K8S_POD_NAMESPACE", "demo"], ["K8S_POD_NAME", pod.name]],
            "result": {
                "interfaces": [{"name": interface}, {"name": inside, "sandbox": "/run/netns/x"}],
                "ips": [{"address": format!("{}/32", pod.address), "interface": 1}],
            },
        });
        std::fs::write(self.folder.path().join("results").join(&pod.name), result.to_string()).unwrap();
    }

    /// The API has the pod.
    fn report(&mut self, pod: &Pod, program: EndpointProgram) -> Report {
        self.node.change(|state| drop(state.endpoints.insert(pod.id(), endpoint(pod, program))))
    }

    /// Whether the results are a folder that the agent can read.
    fn show_results(&self, are_readable: bool) {
        let (results, kept) = (self.folder.path().join("results"), self.folder.path().join("kept"));
        if are_readable {
            std::fs::remove_file(&results).unwrap();
            std::fs::rename(&kept, &results).unwrap();
        } else {
            std::fs::rename(&results, &kept).unwrap();
            std::fs::write(&results, "no folder").unwrap();
        }
    }

    fn stop_agent(&mut self) {
        let elsewhere = NetNs::create().unwrap();
        let idle = elsewhere.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
        drop(std::mem::replace(&mut self.node.dataplane, idle));
    }

    /// The first call of a new process, for a state that has changed meanwhile.
    fn start_agent(&mut self, change: impl FnOnce(&mut NodeState)) -> Report {
        self.stop_agent();
        change(&mut self.node.state);
        let config = self.config.clone();
        let open = || Stateful::new(Dataplane::open(config).unwrap());
        self.node.dataplane = self.node.namespace.run(open).unwrap();
        let deltas = crate::common::deltas(&NodeState::default(), &self.node.state);
        self.node.apply(&deltas)
    }

    fn look(&mut self) -> Option<Report> {
        let (dataplane, state) = (&mut self.node.dataplane, &self.node.state);
        self.node.namespace.run(|| tortie_dataplane::Dataplane::look(&mut **dataplane, state)).unwrap()
    }

    /// The interfaces without the prefix that are pods', whether with policy or closed.
    fn odd_interfaces(&self) -> String {
        let shown = || {
            let table = Nft::open().unwrap().list("tortie").unwrap().unwrap();
            format!("{:?}", table.sets["odd-interfaces"].elements.keys())
        };
        self.node.namespace.run(shown).unwrap()
    }
}

fn only(prefix: &str, results: std::path::PathBuf) -> Option<PolicyOnly> {
    Some(PolicyOnly { prefixes: vec![prefix.to_owned()], results })
}

fn endpoint(pod: &Pod, program: EndpointProgram) -> Arc<Endpoint> {
    Arc::new(Endpoint {
        container_id: "".into(),
        host_interface: "".into(),
        addresses: vec![pod.address.into()],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(program),
    })
}

/// Policy has changed while the agent could not see whose the interfaces are.
#[test]
fn flows_that_policy_denies_are_cut_when_the_results_can_be_read_again() {
    for looks_before in [true, false] {
        let mut foreign = Foreign::new();
        let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
        server.serve(80);
        [&client, &server].into_iter().for_each(|pod| drop(foreign.attach(pod)));
        foreign.node.change(|state| {
            Arc::make_mut(&mut state.settings).established_flows = EstablishedFlows::Cut;
        });
        assert_eq!(foreign.report(&client, open()), Report::default());
        assert_eq!(foreign.report(&server, open()), Report::default());
        let stream = client.connect(server.address, 80).unwrap();
        assert!(answers(&stream));

        foreign.show_results(false);
        let report = foreign.start_agent(|state| {
            let server = state.endpoints.get_mut(&server.id()).unwrap();
            Arc::make_mut(server).program = Arc::new(ingress(&["closed"], EndOfTier::Deny));
        });
        assert_eq!(report.node[0].reason, Reason::PolicyNotInForce, "{report:?}");
        assert!(answers(&stream), "the table of before stays");
        foreign.show_results(true);
        if looks_before {
            assert_eq!(foreign.look(), None, "the table is still that of before");
        }
        assert_eq!(foreign.node.resync(), Report::default());
        assert!(client.is_cut_off(server.address, 80));
        let deadline = Instant::now() + Duration::from_secs(15);
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        while answers(&stream) {
            assert!(Instant::now() < deadline, "the flow goes on, looked before: {looks_before}");
        }
    }
}

/// The thread was busy, so the comparison with the kernel sees the pod's interface first.
#[test]
fn connections_of_a_pod_that_a_resync_recognises_are_forgotten_by_that_resync_only() {
    let mut foreign = Foreign::new();
    let (client, server) = (Pod::new("client", 1, 2), Pod::new("server", 1, 3));
    server.serve(80);
    let report = foreign.report(&server, open());
    assert_eq!(report.endpoints[&server.id()][0].reason, Reason::InterfaceMissing);
    foreign.report(&client, open());
    [&client, &server].into_iter().for_each(|pod| drop(foreign.attach(pod)));
    assert_eq!(foreign.node.resync(), Report::default());
    let stream = client.connect(server.address, 80).unwrap();
    assert!(answers(&stream));
    let count = entries(&foreign.node);
    assert_eq!(foreign.node.apply(&[]), Report::default());
    assert_eq!(entries(&foreign.node), count, "the connection began when policy was in force");
}

/// An interface of the node has networks. One of a pod that gets one stays closed, and the node's adapter stays open whatever plugins
/// have answered.
#[test]
fn a_network_on_an_interface_opens_no_pod_and_closes_no_adapter() {
    let mut foreign = Foreign::new();
    let (client, server, beside) =
        (Pod::new("client", 1, 2), Pod::new("server", 1, 3), Pod::new("beside", 1, 4));
    server.serve(80);
    let [_, interface] = [&client, &server].map(|pod| foreign.attach(pod));
    foreign.node.change(|state| state.node = Some(LocalNode::ipv4("node-1", node_address(1), None)));
    foreign.report(&client, open());
    assert_eq!(foreign.report(&server, ingress(&["closed"], EndOfTier::Deny)), Report::default());
    foreign.keep_result(&beside, "net1", "eth0");
    let change = |foreign: &Foreign, change: &(dyn Fn(u32) -> Change + Sync), interface: &str| {
        let change = || {
            let link = interface_index(interface).unwrap();
            RouteSocket::open().unwrap().change(&change(link)).unwrap();
        };
        foreign.node.namespace.run(change).unwrap();
    };
    let add_route = |foreign: &Foreign, pod: &Pod, interface: &str| {
        let route = |link| Change::AddRoute(Route::on_link(IpAddr::from(pod.address).into(), link, 3));
        change(foreign, &route, interface);
    };
    add_route(&foreign, &beside, "eth0");
    let network = |link| Address { link, address: "192.0.2.1".parse().unwrap(), prefix_length: 24 };
    change(&foreign, &|link| Change::AddAddress(network(link)), &interface);
    let report = foreign.node.resync();
    let conditions = &report.endpoints[&server.id()];
    assert!(conditions[0].message.contains(&format!("{interface} is closed")), "{report:?}");
    let closed = foreign.odd_interfaces();
    assert!(closed.contains(&interface) && !closed.contains("eth0"), "{closed}");
    assert!(client.is_cut_off(server.address, 80));
    change(&foreign, &|link| Change::DeleteAddress(network(link)), &interface);
    // The kernel removes it with the last address of an interface.
    add_route(&foreign, &server, &interface);
    foreign.node.program(&server, open());
    assert!(client.reaches(&server, 80));
}

/// The network that the node's router advertises, with the router's address there.
const ROUTED: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 0);
const ROUTER: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, 1);

/// A router advertisement to all nodes of the link. Its sender becomes the default router, and these networks become the link's, with
/// an address in those of 64 bits (RFC 4861, sections 4.2 and 4.6.2).
fn advertisement(networks: &[(Ipv6Addr, u8)]) -> Vec<u8> {
    const LIFETIME: [u8; 2] = 1800_u16.to_be_bytes();
    let mut message = [&[134, 0, 0, 0, 0, 0][..], &LIFETIME, &[0; 8]].concat();
    for (network, length) in networks {
        let flags = if *length == 64 { 0xc0 } else { 0x80 };
        let lifetimes = [[0, 0, 0x70, 0x80]; 2].concat();
        message.extend([&[3, 4, *length, flags][..], &lifetimes, &[0; 4], &network.octets()].concat());
    }
    let (source, all_nodes) =
        (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 5), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
    let addresses = [source.octets(), all_nodes.octets()].concat();
    let length = message.len() as u16;
    let sum = checksum(&[&addresses[..], &[0, 0], &length.to_be_bytes(), &[0, 0, 0, 58], &message].concat());
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let header = [&[0x60, 0, 0, 0][..], &length.to_be_bytes(), &[58, 255], &addresses].concat();
    let ethernet = [0x33, 0x33, 0, 0, 0, 1, 2, 0, 0, 0, 0, 5, 0x86, 0xdd];
    [&ethernet[..], &header, &message].concat()
}

/// Sends advertisements from `eth0` of a namespace until the node has all routes by them on its interface. Plugins leave its
/// parameters as the kernel's defaults are.
fn advertise(node: &NetNs, interface: &str, from: &NetNs, networks: &[(Ipv6Addr, u8)]) {
    node.run(|| {
        for (parameter, value) in [("accept_ra", "1"), ("forwarding", "0"), ("accept_dad", "0")] {
            sysctl::ensure(&format!("net/ipv6/conf/{interface}/{parameter}"), value).unwrap();
        }
    })
    .unwrap();
    let link = node.run(|| interface_index(interface).unwrap()).unwrap();
    let socket = from.run(|| PacketSocket::open(interface_index("eth0").unwrap()).unwrap()).unwrap();
    let has_routes = || {
        let routes = RouteSocket::open().unwrap().routes().unwrap();
        let there: Vec<_> = routes.into_iter().filter(|route| route.link == Some(link)).collect();
        let has = |to: &str, protocol| {
            there.iter().any(|it| it.destination.to_string() == to && it.protocol == protocol)
        };
        has("::/0", 9) && networks.iter().all(|(network, length)| has(&format!("{network}/{length}"), 2))
    };
    let deadline = Instant::now() + TIMEOUT;
    while !node.run(has_routes).unwrap() {
        assert!(Instant::now() < deadline, "the kernel takes no route from the advertisement");
        socket.send(&advertisement(networks)).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A pod on a node without an agent calls itself a router, so that its interface looks like one of the node. The next agent starts all the
/// same, and closes it: by its prefix, or without a prefix and a result of the plugin. The node's own router remains.
#[test]
fn a_pods_router_advertisement_neither_stops_the_agent_nor_opens_the_pod() {
    for prefix in ["cali", "eni"] {
        let mut foreign = Foreign::with(prefix);
        let namespace = foreign.node.namespace.run(NetNs::current).unwrap().unwrap();
        let pods = [Pod::new("client", 1, 2), Pod::new("server", 1, 3), Pod::new("router", 1, 4)];
        let [client, server, router] = &pods;
        let interfaces = [client, server, router].map(|pod| foreign.attach(pod));
        pods.iter().for_each(|pod| pod.serve(80));
        std::fs::remove_file(foreign.folder.path().join("results/router")).unwrap();
        // The node's own router. A plugin has named the interface for some pod.
        let outside = NetNs::create().unwrap();
        cable(&namespace, "nested0", &outside, "eth0");
        foreign.keep_result(&Pod::new("beside", 1, 5), "net1", "nested0");
        outside.run(serve_as_router).unwrap();
        // Nothing of an agent is there.
        foreign.stop_agent();
        let delete = Transaction { table: "tortie".to_owned(), ops: vec![Op::DeleteTable] };
        namespace.run(|| Nft::open().unwrap().commit(&delete).unwrap()).unwrap();
        advertise(&namespace, "nested0", &outside, &[(ROUTED, 64)]);
        let [others, everything] = ["2001:db8:7::", "::"].map(|network| network.parse().unwrap());
        advertise(&namespace, &interfaces[2], &router.namespace, &[(others, 64), (everything, 0)]);

        let report = foreign.start_agent(|state| {
            let closed = ingress(&["closed"], EndOfTier::Deny);
            for (pod, program) in [(client, open()), (server, closed), (router, open())] {
                state.endpoints.insert(pod.id(), endpoint(pod, program));
            }
        });
        assert_eq!(report.endpoints.keys().collect::<Vec<_>>(), [&router.id()], "{report:?}");
        let message = &report.endpoints[&router.id()][0].message;
        assert!(message.contains(&format!("{} is closed", interfaces[2])), "{message}");
        assert!(server.reaches(client, 80) && client.is_cut_off(server.address, 80), "pods have policy");
        assert!(client.is_cut_off(router.address, 80), "the pod that advertised itself is closed");
        let odd = foreign.odd_interfaces();
        assert!(!odd.contains("nested0") && (prefix == "cali" || odd.contains(&interfaces[2])), "{odd}");
        let reaches_router = || {
            TcpStream::connect_timeout(&SocketAddr::from((ROUTER, 80)), TIMEOUT).is_ok_and(|it| answers(&it))
        };
        assert!(namespace.run(reaches_router).unwrap(), "the node's adapter is open");
        // Its prefix is still that of an interface of the node.
        let config =
            Config { policy_only: only("nested", foreign.folder.path().into()), ..Config::default() };
        let refused = namespace.run(|| Dataplane::open(config)).unwrap();
        assert!(refused.is_err_and(|error| error.to_string().contains("nested0")));
    }
}

/// The router's address, with a server.
fn serve_as_router() {
    sysctl::ensure("net/ipv6/conf/eth0/accept_dad", "0").unwrap();
    let link = interface_index("eth0").unwrap();
    let address = Address { link, address: ROUTER.into(), prefix_length: 64 };
    RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
    echo_on(TcpListener::bind((ROUTER, 80)).unwrap());
}
