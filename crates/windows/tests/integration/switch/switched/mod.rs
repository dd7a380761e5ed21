//! Emulated Windows nodes with real interfaces.
#![allow(dead_code, reason = "each test uses its part")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv4Net;
use testkit::Stateful;
use tortie_api::net::Action;
use tortie_dataplane::{
    Delta, Endpoint, EndpointId, HostPort, LocalNode, PodAddress, PodAttachment, PodWiring, Report, Route,
    RouteTarget, Vtep,
};
use tortie_hcn::schema::Namespace;
use tortie_hcn::{Hcn, HcnExt};
use tortie_hns_emulator::{Config, Emulator, bind_compartment};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_policy::program::{EndpointProgram, PolicyId, PolicyKind, PolicyRules, Rule};
use tortie_windows::{NETWORK, NetworkKind, NetworkSpec, WindowsDataplane, WindowsWiring, ensure_network};

pub(crate) struct Node {
    pub number: u8,
    pub hns: Arc<Emulator>,
    pub dataplane: Stateful<WindowsDataplane>,
    pub namespace: NetNs,
    pub pods: Vec<(NetNs, Ipv4Addr)>,
    pub vtep: Vtep,
}

pub(crate) fn block(number: u8) -> Ipv4Net {
    Ipv4Net::new([10, 244, number, 0].into(), 26).unwrap()
}

pub(crate) fn path_of(namespace: &NetNs) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_fd().as_raw_fd()).into()
}

pub(crate) fn name(number: u8) -> String {
    format!("node-{number}")
}

/// Two namespaces with a cable between them.
pub(crate) fn underlay() -> [NetNs; 2] {
    let nodes = [NetNs::create().unwrap(), NetNs::create().unwrap()];
    let peer = Peer { name: "eth0", mac: None, mtu: None, namespace: Some(nodes[1].as_fd()) };
    let cable = NewLink::new("eth0", NewLinkKind::Veth(peer));
    nodes[0].run(|| RouteSocket::open().unwrap().create(&cable).unwrap()).unwrap();
    for (number, node) in (1..).zip(&nodes) {
        let set_up = || {
            let link = tortie_kernel::interface_index("eth0").unwrap();
            let address =
                Address { link, address: Ipv4Addr::new(172, 16, 0, number).into(), prefix_length: 24 };
            let changes = [Change::AddAddress(address), Change::SetLink(link, vec![LinkSetting::Up(true)])];
            RouteSocket::open().unwrap().change_all(&changes).unwrap().into_iter().for_each(Result::unwrap);
        };
        node.run(set_up).unwrap();
    }
    nodes.iter().for_each(|node| testkit::links::wait_for(node, "eth0").unwrap());
    nodes
}

impl Node {
    pub(crate) fn new(number: u8, namespace: NetNs) -> Node {
        Node::with(number, namespace, |config| config)
    }

    /// The same with another HNS configuration.
    pub(crate) fn with(number: u8, namespace: NetNs, config: impl FnOnce(Config) -> Config) -> Node {
        let parent = Ipv4Addr::new(172, 16, 0, number);
        let own = NetNs::open(&path_of(&namespace)).unwrap();
        let config = config(Config::new(Config::SERVER_2022, parent));
        let hns = Arc::new(Emulator::with_switch(config, own).unwrap());
        let hcn: Arc<dyn Hcn> = hns.clone();
        let spec = NetworkSpec {
            name: NETWORK.into(),
            block: block(number),
            ipv6: None,
            kind: NetworkKind::Overlay { vni: 4096 },
            adapter: None,
        };
        let overlay = ensure_network(&*hns, &spec).unwrap();
        let (address, parent) = (overlay.gateway.into(), parent.into());
        let vtep = Vtep { node: name(number), address, mac: overlay.router_mac.unwrap(), parent, mtu: None };
        let dataplane = Stateful::new(WindowsDataplane::new(hcn));
        Node { number, hns, dataplane, namespace, pods: vec![], vtep }
    }

    /// The node's own address.
    pub(crate) fn parent(&self) -> Ipv4Addr {
        let std::net::IpAddr::V4(parent) = self.vtep.parent else { panic!("{:?}", self.vtep) };
        parent
    }

    pub(crate) fn start(&mut self, other: &Vtep, other_number: u8) {
        let node = LocalNode::ipv4(&name(self.number), self.parent(), Some(self.vtep.clone()));
        let route =
            |destination: Ipv4Net, target| Delta::Route(Route { destination: destination.into(), target });
        let allow = Arc::new(PolicyRules {
            ingress: vec![Rule::all(Action::Allow)],
            egress: vec![Rule::all(Action::Allow)],
        });
        self.apply(&[
            Delta::Node(node),
            route(block(self.number), RouteTarget::Local),
            route(block(other_number), RouteTarget::Vxlan { node: name(other_number) }),
            Delta::Vtep(other.clone()),
            Delta::Policy(policy_id("open"), allow),
        ]);
    }

    pub(crate) fn apply(&mut self, deltas: &[Delta]) {
        assert_eq!(self.dataplane.apply(deltas), Report::default());
    }

    pub(crate) fn add_pod(&mut self, last: u8) {
        self.add_pod_of(block(self.number), last);
    }

    /// A pod of any block; the last parts of the addresses of a node's pods differ.
    pub(crate) fn add_pod_of(&mut self, block: Ipv4Net, last: u8) {
        let namespace = NetNs::create().unwrap();
        let compartment = self.hns.create_namespace(&Namespace::default()).unwrap();
        bind_compartment(&*self.hns, compartment, Some(&path_of(&namespace))).unwrap();
        let address = address_in(block, last);
        let pod = PodAttachment {
            endpoint: pod_id(last),
            container_id: format!("container-{last}"),
            netns: compartment.to_string(),
            addresses: vec![PodAddress::ipv4(address, block)],
            mtu: None,
            mac: None,
            limits: Default::default(),
            dns: Default::default(),
        };
        WindowsWiring::new(self.hns.clone()).connect(&pod).unwrap();
        self.pods.push((namespace, address));
        let open = EndpointProgram { profiles: vec![policy_id("open")], ..EndpointProgram::default() };
        self.set_program_of(block, last, open);
    }

    pub(crate) fn set_program(&mut self, last: u8, program: EndpointProgram) {
        self.set_program_of(block(self.number), last, program);
    }

    /// A pod's ports of the node. Its policy stays.
    pub(crate) fn set_host_ports(&mut self, last: u8, ports: Vec<HostPort>) {
        let known = Arc::clone(&self.dataplane.state.endpoints[&pod_id(last)]);
        let endpoint = Endpoint { host_ports: ports.into(), ..(*known).clone() };
        self.apply(&[Delta::Endpoint(pod_id(last), Arc::new(endpoint))]);
    }

    /// DEL of a pod, as the agent does it.
    pub(crate) fn remove_pod(&mut self, last: u8) {
        let container = format!("container-{last}");
        WindowsWiring::new(self.hns.clone()).disconnect(&pod_id(last), &container).unwrap();
        self.apply(&[Delta::EndpointRemoved(pod_id(last))]);
    }

    fn set_program_of(&mut self, block: Ipv4Net, last: u8, program: EndpointProgram) {
        let known = self.dataplane.state.endpoints.get(&pod_id(last));
        let host_ports = known.map(|known| known.host_ports.clone()).unwrap_or_default();
        let endpoint = Endpoint {
            container_id: format!("container-{last}").into(),
            host_interface: "".into(),
            addresses: vec![address_in(block, last).into()],
            mac: None,
            host_ports,
            program: Arc::new(program),
        };
        self.apply(&[Delta::Endpoint(pod_id(last), Arc::new(endpoint))]);
    }
}

fn address_in(block: Ipv4Net, last: u8) -> Ipv4Addr {
    let [a, b, c, _] = block.addr().octets();
    Ipv4Addr::new(a, b, c, last)
}

pub(crate) fn pod_id(last: u8) -> EndpointId {
    EndpointId { namespace: "demo".into(), pod: format!("pod-{last}").into(), interface: "eth0".into() }
}

pub(crate) fn policy_id(name: &str) -> PolicyId {
    PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "demo".into(), name: name.into() }
}

/// Nobody reports a drop, so this waits. TCP has sent its first packet twice by then.
const UNREACHED: Duration = Duration::from_millis(1_800);

/// Sends a megabyte there and back. `None` if no connection succeeds.
pub(crate) fn talk(from: &NetNs, to: &(NetNs, Ipv4Addr)) -> Option<usize> {
    talk_by(from, to, (to.1, 80).into())
}

/// The same by another address that leads there.
pub(crate) fn talk_by(from: &NetNs, to: &(NetNs, Ipv4Addr), address: SocketAddr) -> Option<usize> {
    let listener = to.0.run(|| TcpListener::bind((to.1, 80)).unwrap()).unwrap();
    let mut client = from.run(|| TcpStream::connect_timeout(&address, UNREACHED)).unwrap().ok()?;
    let (mut server, _) = listener.accept().unwrap();
    let echo = std::thread::spawn(move || {
        server.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut heard = Vec::new();
        server.read_to_end(&mut heard).unwrap();
        server.write_all(&heard).unwrap();
    });
    client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let sent: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
    client.write_all(&sent).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut heard = Vec::new();
    client.read_to_end(&mut heard).unwrap();
    echo.join().unwrap();
    assert!(heard == sent);
    Some(heard.len())
}
