//! Two emulated Windows nodes and one Linux node, in network namespaces on one bridge. Their pods are in an overlay, or in L2Bridge
//! networks with routes between the nodes.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::json;
use tortie_api::net::MacAddress;
use tortie_hcn::schema::{
    Acl, AclAction, AclDirection, AclRuleType, DrMacAddress, Endpoint, Extra, Modify, Namespace,
    NamespaceType, Network, NetworkMode, Policy, RemoteSubnetRoute, RequestType, lenient,
};
use tortie_hcn::{Guid, HcnExt};
use tortie_hns_emulator::{Config, DefaultAction, Emulator, OnRewrite, bind_compartment};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{
    Address, Change, FdbEntry, LinkSetting, Neighbour, NewLink, NewLinkKind, Peer, Route, RouteSocket, Vxlan,
};
use tortie_kernel::sysctl;

const VNI: u32 = 4096;
const DEADLINE: Duration = Duration::from_secs(60);
const LINUX_MAC: MacAddress = MacAddress([0x66, 0, 0, 0, 0, 1]);
const LINUX_TUNNEL: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 0);

/// A network namespace where a socket can be opened.
pub(crate) struct Location {
    pub namespace: Arc<NetNs>,
    pub address: IpAddr,
    pub endpoint: Guid,
}

impl Location {
    pub(crate) fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.namespace.run(work).unwrap()
    }

    /// The same place with its IPv6 address, which it has in an L2Bridge network.
    pub(crate) fn by_ipv6(&self) -> Location {
        let IpAddr::V4(address) = self.address else { panic!("{}", self.address) };
        Location { namespace: self.namespace.clone(), address: ipv6(address).into(), endpoint: self.endpoint }
    }
}

pub(crate) struct WindowsNode {
    pub hns: Emulator,
    pub network: Guid,
    namespace: Arc<NetNs>,
    gateway: Ipv4Addr,
    pods: Vec<(Arc<NetNs>, Ipv4Addr, Guid)>,
}

impl WindowsNode {
    pub(crate) fn pod(&self, index: usize) -> Location {
        let (namespace, address, endpoint) = &self.pods[index];
        Location { namespace: namespace.clone(), address: (*address).into(), endpoint: *endpoint }
    }

    pub(crate) fn node(&self) -> Location {
        Location { namespace: self.namespace.clone(), address: self.gateway.into(), endpoint: Guid::ZERO }
    }
}

pub(crate) struct Cluster {
    pub windows: Vec<WindowsNode>,
    linux: Arc<NetNs>,
    _underlay: NetNs,
}

impl Cluster {
    pub(crate) fn new() -> Cluster {
        Cluster::with(OnRewrite::Keep)
    }

    /// The nodes send each other packets of pods as they are, as with flannel's `host-gw`. Everybody has IPv6, too.
    pub(crate) fn bridged() -> Cluster {
        let (underlay, nodes) = underlay();
        let linux = nodes[0].clone();
        let pod = || {
            let link = tortie_kernel::interface_index("eth0").unwrap();
            change(&[
                Change::AddAddress(Address { link, address: LINUX_TUNNEL.into(), prefix_length: 32 }),
                Change::AddAddress(Address { link, address: ipv6(LINUX_TUNNEL).into(), prefix_length: 128 }),
            ]);
        };
        linux.run(pod).unwrap();
        for (number, node) in (1..).zip(&nodes) {
            let source = if number == 1 { LINUX_TUNNEL } else { provider(number) };
            node.run(|| routes_to_others(number, source)).unwrap();
        }
        let windows = (2..=3).map(|number| {
            windows_node(nodes[number as usize - 1].clone(), number, NetworkMode::L2Bridge, OnRewrite::Keep)
        });
        Cluster { windows: windows.collect(), linux, _underlay: underlay }
    }

    pub(crate) fn with(on_rewrite: OnRewrite) -> Cluster {
        let (underlay, nodes) = underlay();
        let windows = (2..=3).map(|number| {
            windows_node(nodes[number as usize - 1].clone(), number, NetworkMode::Overlay, on_rewrite)
        });
        let windows: Vec<WindowsNode> = windows.collect();
        let dr_macs: Vec<String> = windows.iter().map(|node| dr_mac(&node.hns, node.network)).collect();
        for (index, node) in windows.iter().enumerate() {
            let other = 1 - index;
            let routes = vec![
                remote(block(1), provider(1), &LINUX_MAC.dashed()),
                remote(block(other as u8 + 2), provider(other as u8 + 2), &dr_macs[other]),
            ];
            node.hns.modify_network(node.network, &Modify::policies(RequestType::Add, routes)).unwrap();
        }
        let linux = nodes[0].clone();
        linux.run(|| linux_node(&dr_macs)).unwrap();
        Cluster { windows, linux, _underlay: underlay }
    }

    pub(crate) fn linux(&self) -> Location {
        Location { namespace: self.linux.clone(), address: LINUX_TUNNEL.into(), endpoint: Guid::ZERO }
    }
}

/// The bridge, and the nodes on it.
fn underlay() -> (NetNs, Vec<Arc<NetNs>>) {
    let underlay = NetNs::create().unwrap();
    underlay.run(|| RouteSocket::open().unwrap().create(&bridge("br0")).unwrap()).unwrap();
    let nodes = (1..=3).map(|number| join(&underlay, number)).collect();
    (underlay, nodes)
}

/// Routes of a node to the blocks of the others, which its stack forwards to.
fn routes_to_others(number: u8, source: Ipv4Addr) {
    let link = tortie_kernel::interface_index("eth0").unwrap();
    let own = Address { link, address: ipv6(provider(number)).into(), prefix_length: 64 };
    let mut changes = vec![Change::AddAddress(own)];
    for other in (1..=3).filter(|other| *other != number) {
        let (v4, v6) = (block(other).into(), ipv6_block(other).into());
        let route = Route::via(v4, provider(other).into(), link, 80);
        changes.push(Change::AddRoute(Route { source: Some(source.into()), ..route }));
        let route = Route::via(v6, ipv6(provider(other)).into(), link, 80);
        changes.push(Change::AddRoute(Route { source: Some(ipv6(source).into()), ..route }));
    }
    change(&changes);
    for forwarding in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        sysctl::ensure(forwarding, "1").unwrap();
    }
}

pub(crate) fn provider(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 16, 0, number)
}

fn block(number: u8) -> Ipv4Net {
    Ipv4Net::new(Ipv4Addr::new(10, 244, number, 0), 26).unwrap()
}

/// The IPv6 address of who has this one in an L2Bridge network, such as fd00:a:f4:2::4 for 10.244.2.4.
pub(crate) fn ipv6(address: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = address.octets().map(u16::from);
    Ipv6Addr::new(0xfd00, a, b, c, 0, 0, 0, d)
}

fn ipv6_block(number: u8) -> Ipv6Net {
    Ipv6Net::new(ipv6(block(number).network()), 64).unwrap()
}

fn bridge(name: &str) -> NewLink<'_> {
    NewLink { up: true, ..NewLink::new(name, NewLinkKind::Bridge) }
}

/// A node's namespace, with `eth0` on the underlay's bridge.
fn join(underlay: &NetNs, number: u8) -> Arc<NetNs> {
    let node = NetNs::create().unwrap();
    let join = || {
        let mut links = RouteSocket::open().unwrap();
        let bridge = links.link("br0").unwrap().unwrap().index;
        let name = format!("node{number}");
        let peer = Peer { name: "eth0", mac: None, mtu: None, namespace: Some(node.as_fd()) };
        let cable = NewLink::new(&name, NewLinkKind::Veth(peer));
        links.create(&NewLink { up: true, controller: Some(bridge), ..cable }).unwrap();
    };
    underlay.run(join).unwrap();
    let address = || {
        let link = tortie_kernel::interface_index("eth0").unwrap();
        let address = Address { link, address: provider(number).into(), prefix_length: 24 };
        change(&[Change::AddAddress(address), Change::SetLink(link, vec![LinkSetting::Up(true)])]);
    };
    node.run(address).unwrap();
    testkit::links::wait_for(underlay, &format!("node{number}")).unwrap();
    testkit::links::wait_for(&node, "eth0").unwrap();
    Arc::new(node)
}

fn change(changes: &[Change]) {
    for verdict in RouteSocket::open().unwrap().change_all(changes).unwrap() {
        verdict.unwrap();
    }
}

fn windows_node(namespace: Arc<NetNs>, number: u8, mode: NetworkMode, on_rewrite: OnRewrite) -> WindowsNode {
    let config = Config {
        host_default: None,
        switch_default: DefaultAction::DenySameDirection,
        on_rewrite,
        ..Config::new(Config::SERVER_2022, provider(number))
    };
    let own = NetNs::open(&path_of(&namespace)).unwrap();
    let hns = Emulator::with_switch(config, own).unwrap();
    if mode == NetworkMode::L2Bridge {
        return bridged_node(hns, namespace, number);
    }
    let gateway = Ipv4Addr::new(10, 244, number, 1);
    let network: Network = lenient(
        &json!({"Name": "Calico", "Type": "Overlay", "Policies": [{"Type": "HostRoute", "Settings": {}}],
            "Ipams": [{"Type": "Static", "Subnets": [{"IpAddressPrefix": block(number),
                "Policies": [{"Type": "VSID", "Settings": {"IsolationId": VNI}}],
                "Routes": [{"NextHop": gateway, "DestinationPrefix": "0.0.0.0/0"}]}]}]})
        .to_string(),
    )
    .unwrap();
    let network = hns.create_network(&network).unwrap();
    let pods = (4..6).map(|last| pod(&hns, network, gateway, Ipv4Addr::new(10, 244, number, last))).collect();
    WindowsNode { hns, network, namespace, gateway, pods }
}

/// The network, the node's own endpoint and pods behind it, as flannel and win-bridge make them.
fn bridged_node(hns: Emulator, namespace: Arc<NetNs>, number: u8) -> WindowsNode {
    let router = Ipv4Addr::new(10, 244, number, 1);
    let subnets = json!([
        {"IpAddressPrefix": block(number), "Routes": [{"NextHop": router, "DestinationPrefix": "0.0.0.0/0"}]},
        {"IpAddressPrefix": ipv6_block(number), "Routes": [{"NextHop": ipv6(router), "DestinationPrefix": "::/0"}]}]);
    let network =
        json!({"Name": "cbr0", "Type": "L2Bridge", "Ipams": [{"Type": "Static", "Subnets": subnets}]});
    let network = hns.create_network(&lenient::<Network>(&network.to_string()).unwrap()).unwrap();
    let gateway = Ipv4Addr::new(10, 244, number, 2);
    let own = json!({"Name": "cbr0_ep", "HostComputeNetwork": network, "IpConfigurations": [{"IpAddress": gateway}, {"IpAddress": ipv6(gateway)}]});
    let own = hns.create_endpoint(&lenient::<Endpoint>(&own.to_string()).unwrap()).unwrap();
    let compartment =
        Namespace { r#type: NamespaceType::HostDefault, namespace_id: 1, ..Namespace::default() };
    let compartment = hns.create_namespace(&compartment).unwrap();
    hns.modify_namespace(compartment, &Modify::namespace_endpoint(RequestType::Add, own)).unwrap();
    let pods = (4..6).map(|last| pod(&hns, network, gateway, Ipv4Addr::new(10, 244, number, last))).collect();
    WindowsNode { hns, network, namespace, gateway, pods }
}

fn pod(hns: &Emulator, network: Guid, gateway: Ipv4Addr, address: Ipv4Addr) -> (Arc<NetNs>, Ipv4Addr, Guid) {
    let [a, b, c, d] = address.octets();
    let mut addresses = vec![json!({"IpAddress": address})];
    let mut routes = vec![json!({"NextHop": gateway, "DestinationPrefix": "0.0.0.0/0"})];
    if hns.network(network).unwrap().r#type == NetworkMode::L2Bridge {
        addresses.push(json!({"IpAddress": ipv6(address)}));
        routes.push(json!({"NextHop": ipv6(gateway), "DestinationPrefix": "::/0"}));
    }
    let document = json!({"HostComputeNetwork": network, "IpConfigurations": addresses,
        "MacAddress": format!("0E-2A-{a:02x}-{b:02x}-{c:02x}-{d:02x}"), "Routes": routes});
    let document: Endpoint = lenient(&document.to_string()).unwrap();
    let endpoint = hns.create_endpoint(&document).unwrap();
    let compartment = hns.create_namespace(&Namespace::default()).unwrap();
    let namespace = Arc::new(NetNs::create().unwrap());
    bind_compartment(hns, compartment, Some(&path_of(&namespace))).unwrap();
    hns.modify_namespace(compartment, &Modify::namespace_endpoint(RequestType::Add, endpoint)).unwrap();
    (namespace, address, endpoint)
}

fn path_of(namespace: &NetNs) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_fd().as_raw_fd()).into()
}

fn dr_mac(hns: &Emulator, network: Guid) -> String {
    let network = hns.network(network).unwrap();
    network.policies.iter().find_map(|policy| policy.settings::<DrMacAddress>().unwrap()).unwrap().address
}

fn remote(prefix: Ipv4Net, provider: Ipv4Addr, mac: &str) -> Policy {
    Policy::of(&RemoteSubnetRoute {
        destination_prefix: prefix.to_string(),
        isolation_id: VNI,
        provider_address: provider.to_string(),
        distributed_router_mac_address: mac.to_owned(),
        ..Default::default()
    })
}

/// The interfaces that Calico creates on a Linux node, with all offloads as in the kernel.
fn linux_node(dr_macs: &[String]) {
    let mut links = RouteSocket::open().unwrap();
    let vxlan = Vxlan { vni: VNI, port: 4789, local: Some(provider(1).into()), learning: false };
    let link = NewLink::new("vxlan.calico", NewLinkKind::Vxlan(vxlan));
    links.create(&NewLink { up: true, mac: Some(LINUX_MAC), mtu: Some(1450), ..link }).unwrap();
    let link = links.link("vxlan.calico").unwrap().unwrap().index;
    let mut changes =
        vec![Change::AddAddress(Address { link, address: LINUX_TUNNEL.into(), prefix_length: 32 })];
    for (number, mac) in (2..).zip(dr_macs) {
        let mac: MacAddress = mac.parse().unwrap();
        let vtep = Ipv4Addr::new(10, 244, number, 1);
        changes.push(Change::SetNeighbour(Neighbour { link, address: vtep.into(), mac }));
        changes.push(Change::SetFdb(FdbEntry { link, mac, destination: provider(number).into() }));
        changes.push(Change::AddRoute(Route::via(IpNet::V4(block(number)), vtep.into(), link, 80)));
    }
    change(&changes);
}

pub(crate) fn acl_block_in(priority: u16, remote: &str) -> Acl {
    Acl {
        id: "test".into(),
        protocols: "256".into(),
        action: AclAction::Block,
        direction: AclDirection::In,
        local_addresses: String::new(),
        remote_addresses: remote.into(),
        local_ports: String::new(),
        remote_ports: String::new(),
        rule_type: AclRuleType::Switch,
        priority,
        extra: Extra::default(),
    }
}

/// The name of the node's interface on the overlay.
pub(crate) fn node_leg(node: &Location) -> Option<String> {
    let links = node.run(|| RouteSocket::open().unwrap().links().unwrap());
    links.into_iter().map(|link| link.name).find(|name| name.starts_with("hns-"))
}

pub(crate) fn make_dummy_pair(name: &str) {
    let peer = Peer { name: "other", mac: None, mtu: None, namespace: None };
    RouteSocket::open().unwrap().create(&NewLink::new(name, NewLinkKind::Veth(peer))).unwrap();
}

/// Whether a TCP connection succeeds. A refusal counts as reached.
pub(crate) fn connects(from: &Location, to: &Location) -> bool {
    reaches(from, to, DEADLINE)
}

/// Whether no connection succeeds. Nobody reports a drop, so this waits.
pub(crate) fn is_cut_off(from: &Location, to: &Location) -> bool {
    !reaches(from, to, Duration::from_millis(700))
}

fn reaches(from: &Location, to: &Location, patience: Duration) -> bool {
    let address = SocketAddr::from((to.address, 81));
    match from.run(|| TcpStream::connect_timeout(&address, patience)) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
    }
}

/// A connection that both sides hold open.
pub(crate) struct Connection {
    client: TcpStream,
    server: TcpStream,
}

impl Connection {
    pub(crate) fn open(from: &Location, to: &Location) -> Connection {
        let listener = to.run(|| TcpListener::bind((to.address, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let client = from.run(|| TcpStream::connect_timeout(&address, DEADLINE)).unwrap_or_else(|error| {
            panic!("{} to {}: {error}", from.address, to.address);
        });
        let (server, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip(), from.address, "the source address stays");
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.set_write_timeout(Some(DEADLINE)).unwrap();
        }
        Connection { client, server }
    }

    pub(crate) fn exchange(&self) {
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            from.write_all(b"still here").unwrap();
            let mut heard = [0; 10];
            to.read_exact(&mut heard).unwrap();
            assert_eq!(&heard, b"still here");
        }
    }
}

impl Connection {
    /// Both ends see the reset, although neither sends anything.
    pub(crate) fn is_reset(&self) -> bool {
        [&self.client, &self.server].into_iter().all(|mut end| {
            let read = end.read(&mut [0]);
            read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
        })
    }
}

/// Sends that many bytes in each direction over one connection, and compares them.
pub(crate) fn transfer(from: &Location, to: &Location, bytes: usize) {
    let Connection { client, server } = Connection::open(from, to);
    let data: Arc<Vec<u8>> =
        Arc::new((0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect());
    let both = |mut stream: TcpStream, data: Arc<Vec<u8>>| {
        let mut writer = stream.try_clone().unwrap();
        let sent = data.clone();
        let writing = thread::spawn(move || {
            writer.write_all(&sent).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).unwrap();
        writing.join().unwrap();
        assert!(heard == *data, "{} of {} bytes", heard.len(), data.len());
    };
    let other = data.clone();
    let serving = thread::spawn(move || both(server, other));
    both(client, data);
    serving.join().unwrap();
}
