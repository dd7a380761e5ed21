//! A speaker of Tortie and others, each in a network namespace of its own on one bridge.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::UnboundedReceiver;
use tortie_bgp::codec::Attributes;
use tortie_bgp::fsm::{SessionSettings, State};
use tortie_bgp::rib::{Chosen, OwnRoute, PeerRules};
use tortie_bgp::speaker::{Config, PeerConfig, RouteEvent, Speaker, SpeakerStatus, Transport};
use tortie_kernel::namespace::{NetNs, die_with_parent};
use tortie_kernel::route::{Address, Change, LinkSetting, NewLink, NewLinkKind, Peer, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_servers::programs::Program;

/// How long to wait for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The autonomous system of all, unless a test says otherwise.
pub(crate) const AS: u32 = 64512;

pub(crate) fn ipv4(node: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 9, 0, node))
}

pub(crate) fn ipv6(node: u8) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, node.into()))
}

/// Where a BGP speaker with this number listens.
pub(crate) fn at(node: u8) -> SocketAddr {
    SocketAddr::new(ipv4(node), 179)
}

/// Nodes on a bridge.
pub(crate) struct Lab {
    bridge: NetNs,
    nodes: BTreeMap<u8, NetNs>,
    pub(crate) folder: TempDir,
}

impl Lab {
    /// Nodes 1 to `count`.
    pub(crate) fn new(count: u8) -> Self {
        let bridge = NetNs::create().unwrap();
        bridge
            .run(|| {
                let link = NewLink { up: true, ..NewLink::new("bridge", NewLinkKind::Bridge) };
                RouteSocket::open().unwrap().create(&link).unwrap();
            })
            .unwrap();
        let mut lab = Self { bridge, nodes: BTreeMap::new(), folder: TempDir::new().unwrap() };
        (1..=count).for_each(|node| lab.add(node));
        lab
    }

    pub(crate) fn add(&mut self, node: u8) {
        let namespace = NetNs::create().unwrap();
        // Addresses are usable at once.
        let no_detection = || sysctl::ensure("net/ipv6/conf/default/accept_dad", "0");
        namespace.run(no_detection).unwrap().unwrap();
        let port = format!("port{node}");
        self.bridge
            .run(|| {
                let controller = Some(interface_index("bridge").unwrap());
                let peer = Peer { name: "eth0", mac: None, mtu: None, namespace: Some(namespace.as_fd()) };
                let link = NewLink { up: true, controller, ..NewLink::new(&port, NewLinkKind::Veth(peer)) };
                RouteSocket::open().unwrap().create(&link).unwrap();
            })
            .unwrap();
        namespace
            .run(|| {
                let link = interface_index("eth0").unwrap();
                let mut socket = RouteSocket::open().unwrap();
                socket.change(&Change::SetLink(link, vec![LinkSetting::Up(true)])).unwrap();
                for (address, prefix_length) in [(ipv4(node), 24), (ipv6(node), 64)] {
                    socket.change(&Change::AddAddress(Address { link, address, prefix_length })).unwrap();
                }
            })
            .unwrap();
        self.nodes.insert(node, namespace);
        testkit::links::wait_for(&self.bridge, &port).unwrap();
    }

    pub(crate) fn namespace(&self, node: u8) -> &NetNs {
        &self.nodes[&node]
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a program on a node. It ends with the value, or with this thread.
    pub(crate) fn start(&self, node: u8, name: &str, program: Program, arguments: &[&str]) -> Daemon {
        let mut command = Command::new(program.find().unwrap());
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.log"))).unwrap();
        command.args(arguments).current_dir(self.folder.path());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.namespace(node).enter_on_spawn(&mut command).unwrap();
        Daemon(die_with_parent(&mut command).spawn().unwrap())
    }
}

/// A running program.
pub(crate) struct Daemon(Child);

impl Daemon {
    /// Its process.
    #[allow(dead_code, reason = "the benchmark asks for its memory")]
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Ends it by SIGKILL.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Tortie's speaker on a node. Dropping it ends it as SIGKILL would: the kernel closes its connections.
pub(crate) struct Tortie {
    runtime: Option<Runtime>,
    speaker: Option<Speaker>,
    events: UnboundedReceiver<RouteEvent>,
}

impl Tortie {
    pub(crate) fn start(lab: &Lab, node: u8, config: Config, restarted: bool) -> Self {
        let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = lab.namespace(node).run(build).unwrap().unwrap();
        let restarted = restarted.then_some(Duration::from_secs(30));
        let (speaker, events, left_out) = runtime.block_on(Speaker::start(config, restarted)).unwrap();
        assert!(left_out.is_empty(), "{left_out:?}");
        Self { runtime: Some(runtime), speaker: Some(speaker), events }
    }

    pub(crate) fn run<T>(&self, work: impl AsyncFnOnce(&Speaker) -> T) -> T {
        self.runtime.as_ref().unwrap().block_on(work(self.speaker.as_ref().unwrap()))
    }

    pub(crate) fn advertise(&self, routes: &[(&str, Attributes)]) {
        let routes: Vec<(IpNet, OwnRoute)> = routes
            .iter()
            .map(|(prefix, attributes)| {
                let attributes = std::sync::Arc::new(attributes.clone());
                (prefix.parse().unwrap(), OwnRoute { attributes, interface: None })
            })
            .collect();
        self.run(async |speaker| speaker.advertise(routes).await).unwrap();
    }

    pub(crate) fn withdraw(&self, prefix: &str) {
        self.run(async |speaker| speaker.withdraw([prefix.parse().unwrap()]).await).unwrap();
    }

    pub(crate) fn apply(&self, config: Config) {
        let left_out = self.run(async |speaker| speaker.apply(config).await).unwrap();
        assert!(left_out.is_empty(), "{left_out:?}");
    }

    pub(crate) fn status(&self) -> SpeakerStatus {
        self.run(async |speaker| speaker.status().await).unwrap()
    }

    pub(crate) fn route(&self, prefix: &str) -> Option<Chosen> {
        let routes = self.run(async |speaker| speaker.routes().await).unwrap();
        let prefix: IpNet = prefix.parse().unwrap();
        routes.into_iter().find(|(known, _)| *known == prefix).map(|(_, chosen)| chosen[0].clone())
    }

    pub(crate) fn is_established(&self) -> bool {
        self.status().peers.iter().all(|peer| peer.state == State::Established)
    }

    /// The reports since the last call.
    pub(crate) fn events(&mut self) -> Vec<RouteEvent> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }

    pub(crate) fn shut_down(mut self, text: &str) {
        let speaker = self.speaker.take().unwrap();
        self.runtime.as_ref().unwrap().block_on(speaker.shut_down(text)).unwrap();
    }
}

impl Drop for Tortie {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

/// A route by way of the speaker's node.
pub(crate) fn here() -> Attributes {
    Attributes::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
}

/// A peer with the usual settings.
pub(crate) fn peer(node: u8, peer: u8, peer_as: u32) -> PeerConfig {
    let IpAddr::V4(identifier) = ipv4(node) else { unreachable!() };
    let mut session = SessionSettings::new(AS, identifier, peer_as);
    session.connect_retry = 1;
    session.hold_time = 30;
    let mut rules = PeerRules::new(ipv4(peer), AS, peer_as);
    if let IpAddr::V6(address) = ipv6(node) {
        rules.own_addresses.ipv6 = Some(address);
    }
    PeerConfig { session, rules, transport: Transport { source: Some(ipv4(node)), ..Transport::default() } }
}

pub(crate) fn config(node: u8, peers: impl IntoIterator<Item = (u8, PeerConfig)>) -> Config {
    let IpAddr::V4(identifier) = ipv4(node) else { unreachable!() };
    let peers = peers.into_iter().map(|(node, peer)| (at(node), peer)).collect();
    Config { identifier, listen: vec![at(node)], peers }
}

/// Waits until the condition holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
