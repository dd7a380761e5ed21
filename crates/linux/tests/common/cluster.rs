//! Nodes and pods made of namespaces, wired and programmed by the code under test.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv4Net;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use testkit::Stateful;
use tortie_api::net::{Action, Flow, Protocol};
use tortie_dataplane::*;
use tortie_kernel::interface_index;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::*;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_linux::wire::Wiring;
use tortie_policy::program::*;

/// A switch to which nodes are connected.
#[derive(Clone)]
pub(crate) struct Underlay(Arc<NetNs>);

impl Underlay {
    pub(crate) fn new() -> Self {
        let namespace = NetNs::create().unwrap();
        let bridge = || {
            let mut socket = RouteSocket::open().unwrap();
            socket.create(&NewLink { up: true, ..NewLink::new("switch", NewLinkKind::Bridge) }).unwrap();
        };
        namespace.run(bridge).unwrap();
        Self(Arc::new(namespace))
    }

    /// A machine by number: its `eth0` has the address of that node.
    pub(crate) fn connect(&self, number: u8) -> NetNs {
        let namespace = NetNs::create().unwrap();
        let port = format!("node{number}");
        super::cable(&self.0, &port, &namespace, "eth0");
        let plug = || {
            let controller = LinkSetting::Controller(Some(interface_index("switch").unwrap()));
            let port = interface_index(&port).unwrap();
            RouteSocket::open().unwrap().change(&Change::SetLink(port, vec![controller])).unwrap();
        };
        self.0.run(plug).unwrap();
        let address = || {
            let link = interface_index("eth0").unwrap();
            let address = Address { link, address: node_address(number).into(), prefix_length: 24 };
            RouteSocket::open().unwrap().change(&Change::AddAddress(address)).unwrap();
        };
        namespace.run(address).unwrap();
        namespace
    }
}

/// A node with an agent's dataplane.
pub(crate) struct Node {
    pub namespace: NetNs,
    pub dataplane: Stateful<Dataplane>,
    pub wiring: Wiring,
    pub state: NodeState,
    config: Config,
    underlay: Underlay,
}

impl Node {
    /// A node by number: 172.31.0.n on the underlay, tunnel address 10.65.n.0, pods in 10.65.n.0/26.
    pub(crate) fn new(underlay: &Underlay, number: u8) -> Self {
        Self::with(underlay, number, Config::default())
    }

    /// The same with its own configuration.
    pub(crate) fn with(underlay: &Underlay, number: u8, config: Config) -> Self {
        let namespace = underlay.connect(number);
        let (dataplane, wiring) = namespace
            .run(|| (Dataplane::open(config.clone()).unwrap(), Wiring::open(&config).unwrap()))
            .unwrap();
        let wiring = wiring.with_pod_mtu(dataplane.pod_mtu());
        let dataplane = Stateful::new(dataplane);
        let (state, underlay) = (NodeState::default(), underlay.clone());
        Self { namespace, dataplane, wiring, state, config, underlay }
    }

    /// The switch that it is connected to.
    pub(crate) fn underlay(&self) -> &Underlay {
        &self.underlay
    }

    /// Replaces the dataplane by that of a new process.
    pub(crate) fn restart(&mut self) {
        assert_eq!(self.restart_with_report(), Report::default());
    }

    /// The same; and what it reports.
    pub(crate) fn restart_with_report(&mut self) -> Report {
        let config = self.config.clone();
        self.dataplane = self.namespace.run(|| Stateful::new(Dataplane::open(config).unwrap())).unwrap();
        let deltas = super::deltas(&NodeState::default(), &self.state);
        self.apply(&deltas)
    }

    /// Changes the node's state.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut NodeState)) -> Report {
        let mut state = self.state.clone();
        change(&mut state);
        let deltas = super::deltas(&self.state, &state);
        self.state = state;
        let report = self.apply(&deltas);
        // The next change removes what is left over.
        self.apply(&[]);
        report
    }

    pub(crate) fn apply(&mut self, deltas: &[Delta]) -> Report {
        self.namespace.run(|| self.dataplane.apply(deltas)).unwrap()
    }

    pub(crate) fn resync(&mut self) -> Report {
        self.namespace.run(|| self.dataplane.resync()).unwrap()
    }

    /// Connects a pod, as CNI ADD does, and gives it the program.
    pub(crate) fn add(&mut self, pod: &Pod, program: EndpointProgram) {
        assert_eq!(self.attach(pod, program), Report::default());
    }

    /// The same on a node that may have conditions.
    pub(crate) fn attach(&mut self, pod: &Pod, program: EndpointProgram) -> Report {
        let connect = || {
            let interface = self.wiring.connect(&pod.attachment()).unwrap();
            assert!(self.wiring.wait_until_live(&interface, TIMEOUT));
            interface
        };
        let interface = self.namespace.run(connect).unwrap();
        let endpoint = Endpoint {
            container_id: pod.container_id.as_str().into(),
            host_interface: interface.host_interface.into(),
            addresses: vec![pod.address.into()],
            mac: Some(interface.mac),
            host_ports: Default::default(),
            program: Arc::new(program),
        };
        self.change(|state| drop(state.endpoints.insert(pod.id(), Arc::new(endpoint))))
    }

    /// Gives a pod another program.
    pub(crate) fn program(&mut self, pod: &Pod, program: EndpointProgram) {
        let report = self.change(|state| {
            let endpoint = state.endpoints.get_mut(&pod.id()).unwrap();
            Arc::make_mut(endpoint).program = Arc::new(program);
        });
        assert_eq!(report, Report::default());
    }

    /// Whether the node itself reaches a pod.
    pub(crate) fn reaches(&self, pod: &Pod, port: u16) -> bool {
        self.namespace.run(|| connect(pod.address, port).is_some()).unwrap()
    }

    /// Whether no connection of the node itself to an address succeeds.
    pub(crate) fn is_cut_off(&self, to: Ipv4Addr, port: u16) -> bool {
        self.namespace.run(|| is_cut_off(to, port)).unwrap()
    }
}

/// Two nodes with the overlay between them, and a pod on each.
pub(crate) fn two_nodes() -> ([Node; 2], [Pod; 2]) {
    two_nodes_with(&Config::default())
}

/// Connects a node with another one by VXLAN.
pub(crate) fn join_overlay(node: &mut Node, own: u8, other: u8) {
    let report = node.change(|state| {
        open_profile(state);
        state.node = Some(local_node(own));
        state.vteps.insert(vtep(other).key(), vtep(other));
        state.routes.insert(block(own).into(), RouteTarget::Local);
        state.routes.insert(block(other).into(), RouteTarget::Vxlan { node: format!("node-{other}") });
    });
    assert_eq!(report, Report::default());
}

pub(crate) fn two_nodes_with(config: &Config) -> ([Node; 2], [Pod; 2]) {
    let underlay = Underlay::new();
    let mut nodes = [1, 2].map(|number| Node::with(&underlay, number, config.clone()));
    let pods = [Pod::new("one", 1, 2), Pod::new("two", 2, 2)];
    for (index, node) in nodes.iter_mut().enumerate() {
        let (own, other) = ([1, 2][index], [2, 1][index]);
        join_overlay(node, own, other);
        node.add(&pods[index], open());
        pods[index].serve(80);
    }
    (nodes, pods)
}

/// A node with two pods that policy leaves open, and a machine outside of the cluster.
pub(crate) fn node_with_two_pods() -> ([Node; 2], [Pod; 2]) {
    let underlay = Underlay::new();
    let (mut node, outside) = (Node::new(&underlay, 1), Node::new(&underlay, 9));
    let pods = [Pod::new("pod", 1, 2), Pod::new("other", 1, 3)];
    assert_eq!(node.change(open_profile), Report::default());
    pods.iter().for_each(|pod| node.add(pod, open()));
    ([node, outside], pods)
}

/// The address of a client as its server sees it; `None` if the client did not reach the server.
pub(crate) fn seen(client: Option<TcpStream>, server: &TcpListener) -> Option<IpAddr> {
    let _stream = client?;
    // Another server may have the client, so the wait has an end.
    let limit = Timespec { tv_sec: TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(server, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "the client did not reach this server");
    Some(server.accept().unwrap().1.ip())
}

pub(crate) fn node_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 31, 0, number)
}

/// A node's end of the overlay.
pub(crate) fn vtep(number: u8) -> Vtep {
    Vtep {
        node: format!("node-{number}"),
        address: Ipv4Addr::new(10, 65, number, 0).into(),
        mac: MacAddress([0x66, 0, 0, 0, 0, number]),
        parent: node_address(number).into(),
        mtu: None,
    }
}

pub(crate) fn local_node(number: u8) -> LocalNode {
    LocalNode::ipv4(&format!("node-{number}"), node_address(number), Some(vtep(number)))
}

pub(crate) fn block(number: u8) -> Ipv4Net {
    Ipv4Net::new(Ipv4Addr::new(10, 65, number, 0), 26).unwrap()
}

/// A namespace with an address.
pub(crate) struct Pod {
    pub namespace: NetNs,
    pub name: String,
    pub address: Ipv4Addr,
    pub container_id: String,
}

impl Pod {
    pub(crate) fn new(name: &str, node: u8, number: u8) -> Self {
        Self {
            namespace: NetNs::create().unwrap(),
            name: name.to_owned(),
            address: Ipv4Addr::new(10, 65, node, number),
            container_id: format!("container-{node}-{number}"),
        }
    }

    pub(crate) fn id(&self) -> EndpointId {
        EndpointId { namespace: "demo".into(), pod: self.name.as_str().into(), interface: "eth0".into() }
    }

    pub(crate) fn attachment(&self) -> PodAttachment {
        PodAttachment {
            endpoint: self.id(),
            container_id: self.container_id.clone(),
            netns: format!("/proc/self/fd/{}", self.namespace.as_fd().as_raw_fd()),
            addresses: vec![PodAddress::ipv4(self.address, Ipv4Net::new(self.address, 26).unwrap().trunc())],
            mtu: None,
            mac: None,
            limits: Default::default(),
            dns: Default::default(),
        }
    }

    /// Echoes on a port while the test runs.
    pub(crate) fn serve(&self, port: u16) {
        let listener =
            self.namespace.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap()).unwrap();
        echo_on(listener);
    }

    /// A connection to another pod, or `None` if none succeeds.
    pub(crate) fn connect(&self, to: Ipv4Addr, port: u16) -> Option<TcpStream> {
        self.namespace.run(|| connect(to, port)).unwrap()
    }

    pub(crate) fn reaches(&self, pod: &Pod, port: u16) -> bool {
        self.connect(pod.address, port).is_some_and(|stream| answers(&stream))
    }

    /// Whether no connection to an address succeeds.
    pub(crate) fn is_cut_off(&self, to: Ipv4Addr, port: u16) -> bool {
        self.namespace.run(|| is_cut_off(to, port)).unwrap()
    }
}

/// A UDP packet from port 7000 of the first pod to that of the second one.
pub(crate) fn datagram(pods: &[Pod; 2]) -> Flow {
    Flow {
        source: pods[0].address.into(),
        destination: pods[1].address.into(),
        protocol: Protocol::UDP,
        source_port: 7000,
        destination_port: 7000,
        icmp: None,
    }
}

/// How long to wait for what must happen.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Nobody reports a drop, so this waits. TCP has sent its first packet twice by then.
pub(crate) const UNREACHED: Duration = Duration::from_millis(1_800);

/// A connection, if one succeeds.
pub(crate) fn connect(to: Ipv4Addr, port: u16) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&SocketAddr::from((to, port)), TIMEOUT).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    Some(stream)
}

/// Whether no connection succeeds.
pub(crate) fn is_cut_off(to: Ipv4Addr, port: u16) -> bool {
    TcpStream::connect_timeout(&SocketAddr::from((to, port)), UNREACHED).is_err()
}

/// Echoes while the test runs.
pub(crate) fn echo_on(listener: TcpListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || echo(stream.unwrap()));
        }
    });
}

fn echo(mut stream: TcpStream) {
    let mut buffer = [0; 1024];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

/// Whether the other end of a connection echoes.
pub(crate) fn answers(mut stream: &TcpStream) -> bool {
    let mut buffer = [0; 4];
    stream.write_all(b"meow").is_ok() && stream.read_exact(&mut buffer).is_ok() && buffer == *b"meow"
}

pub(crate) fn policy_id(name: &str) -> PolicyId {
    PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "demo".into(), name: name.into() }
}

/// The program of a pod without policy, in a namespace whose profile allows everything.
pub(crate) fn open() -> EndpointProgram {
    EndpointProgram { profiles: vec![policy_id("open")], ..EndpointProgram::default() }
}

/// Adds the policy that [`open`] names.
pub(crate) fn open_profile(state: &mut NodeState) {
    let all = || vec![Rule::all(Action::Allow)];
    state.policies.insert(policy_id("open"), Arc::new(PolicyRules { ingress: all(), egress: all() }));
}

/// A program with one tier of these policies for packets into the pod.
pub(crate) fn ingress(policies: &[&str], end: EndOfTier) -> EndpointProgram {
    let policies = policies.iter().map(|name| policy_id(name)).collect();
    EndpointProgram { ingress: vec![TierProgram { name: "default".into(), policies, end }], ..open() }
}

/// The number of connections that the node tracks.
pub(crate) fn entries(node: &Node) -> u32 {
    let text =
        node.namespace.run(|| std::fs::read_to_string("/proc/thread-self/net/stat/nf_conntrack").unwrap());
    let text = text.unwrap();
    u32::from_str_radix(text.lines().nth(1).unwrap().split_whitespace().next().unwrap(), 16).unwrap()
}
