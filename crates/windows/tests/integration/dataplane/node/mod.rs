//! A Windows node with an emulated HNS that records the calls.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use testkit::Stateful;
use tortie_api::calico::WindowsPolicySets;
use tortie_api::net::{Action, Direction, Protocol};
use tortie_dataplane::{
    Delta, Endpoint, EndpointId, LocalNode, MacAddress, NodeState, PodAddress, PodAttachment, PodWiring,
    Report, Route, RouteTarget, Service, ServiceId, ServicePort, Settings, Vtep,
};
use tortie_hcn::schema::{self, Acl, AclAction, DrMacAddress, Namespace};
use tortie_hcn::{Guid, Hcn, HcnExt};
use tortie_hns_emulator::{Config, Emulator, Packet, PacketDirection, Recorder, Verdict};
use tortie_policy::program::{
    EndOfTier, EndpointProgram, EntityMatch, Flow, PolicyId, PolicyKind, PolicyRules, Rule, TierProgram,
};
use tortie_windows::{
    NETWORK, NetworkKind, NetworkSpec, WindowsDataplane, WindowsWiring, endpoint_id, ensure_network,
};

pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
pub(crate) const TUNNEL: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 1);
pub(crate) const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 5);
pub(crate) const CONTAINER: &str = "0123456789abcdef";

pub(crate) struct Node {
    pub hns: Arc<Recorder<Emulator>>,
    pub wiring: WindowsWiring,
    pub dataplane: Stateful<WindowsDataplane>,
    /// The expected state of the dataplane.
    pub state: NodeState,
    /// How far the dataplane's clock is ahead.
    pub ahead: Arc<Mutex<Duration>>,
    /// The MAC address in the Node's annotation.
    pub announced: MacAddress,
}

impl Node {
    /// A node whose overlay network exists.
    pub(crate) fn new(config: Config) -> Node {
        let hns = Arc::new(Recorder::new(Emulator::new(config)));
        ensure_network(&*hns, &spec()).unwrap();
        Node::over(hns)
    }

    /// A node whose overlay network exists, with or without set names in ACLs.
    pub(crate) fn with(config: Config, sets: WindowsPolicySets) -> Node {
        let mut node = Node::new(config);
        node.apply(&[policy_sets(sets)]);
        node
    }

    /// The agent after a restart.
    pub(crate) fn over(hns: Arc<Recorder<Emulator>>) -> Node {
        let hcn: Arc<dyn Hcn> = hns.clone();
        let wiring = WindowsWiring::new(hcn.clone());
        let (start, ahead) = (Instant::now(), Arc::new(Mutex::new(Duration::ZERO)));
        let clock = Arc::clone(&ahead);
        let clock = Box::new(move || start + *clock.lock().unwrap());
        let dataplane = Stateful::new(WindowsDataplane::with_clock(hcn, clock));
        let network = hns.inner().network_by_name(NETWORK).unwrap().unwrap();
        let mac = network.policies.iter().find_map(|policy| policy.settings::<DrMacAddress>().unwrap());
        let announced = mac.unwrap().address.parse().unwrap();
        Node { hns, wiring, dataplane, state: NodeState::default(), ahead, announced }
    }

    /// Advances the clock of the dataplane.
    pub(crate) fn wait(&self, seconds: u64) {
        *self.ahead.lock().unwrap() += Duration::from_secs(seconds);
    }

    pub(crate) fn usual() -> Node {
        Node::new(Config::new(Config::SERVER_2022, NODE))
    }

    pub(crate) fn apply(&mut self, deltas: &[Delta]) -> Report {
        let announced = |delta: &Delta| match delta.clone() {
            Delta::Node(mut node) => {
                let vteps = node.ends.values_mut().filter_map(|end| end.vtep.as_mut());
                vteps.for_each(|vtep| vtep.mac = self.announced);
                Delta::Node(node)
            }
            other => other,
        };
        let deltas: Vec<Delta> = deltas.iter().map(announced).collect();
        deltas.iter().for_each(|delta| self.state.apply(delta));
        self.dataplane.apply(&deltas)
    }

    pub(crate) fn namespace(&self) -> Guid {
        self.hns.create_namespace(&Namespace::default()).unwrap()
    }

    /// Connects a pod.
    pub(crate) fn connect(&self) -> PodAttachment {
        let pod = attachment(self.namespace());
        self.wiring.connect(&pod).unwrap();
        pod
    }

    /// Whether HNS lets the flow's first packet pass.
    pub(crate) fn passes(&self, direction: Direction, flow: &Flow) -> bool {
        self.hns.inner().judge(endpoint_id(CONTAINER), &packet(direction, flow)).unwrap() == Verdict::Allow
    }

    /// The pod's endpoint in HNS.
    pub(crate) fn endpoint(&self) -> schema::Endpoint {
        self.hns.inner().endpoint(endpoint_id(CONTAINER)).unwrap()
    }

    /// The ACLs of the pod.
    pub(crate) fn acls(&self) -> Vec<Acl> {
        let policies = self.endpoint().policies;
        policies.iter().filter_map(|policy| policy.settings().unwrap()).collect()
    }
}

pub(crate) fn spec() -> NetworkSpec {
    NetworkSpec {
        name: NETWORK.into(),
        block: "10.244.3.0/26".parse().unwrap(),
        ipv6: None,
        kind: NetworkKind::Overlay { vni: 4096 },
        adapter: None,
    }
}

pub(crate) fn packet(direction: Direction, flow: &Flow) -> Packet {
    let Flow { source, destination, .. } = *flow;
    let protocol = flow.protocol.0;
    match direction {
        Direction::Ingress => Packet {
            direction: PacketDirection::In,
            protocol,
            local: destination,
            remote: source,
            local_port: flow.destination_port,
            remote_port: flow.source_port,
        },
        Direction::Egress => Packet {
            direction: PacketDirection::Out,
            protocol,
            local: source,
            remote: destination,
            local_port: flow.source_port,
            remote_port: flow.destination_port,
        },
    }
}

pub(crate) fn attachment(namespace: Guid) -> PodAttachment {
    PodAttachment {
        endpoint: pod_id(),
        container_id: CONTAINER.into(),
        netns: namespace.to_string(),
        addresses: vec![PodAddress::ipv4(POD, spec().block)],
        mtu: None,
        mac: None,
        limits: Default::default(),
        dns: Default::default(),
    }
}

pub(crate) fn pod_id() -> EndpointId {
    EndpointId { namespace: "calico-demo".into(), pod: "windows-server".into(), interface: "eth0".into() }
}

pub(crate) fn endpoint(program: EndpointProgram) -> Delta {
    let endpoint = Endpoint {
        container_id: CONTAINER.into(),
        host_interface: format!("{CONTAINER}_{NETWORK}").into(),
        addresses: vec![POD.into()],
        mac: None,
        host_ports: Default::default(),
        program: Arc::new(program),
    };
    Delta::Endpoint(pod_id(), Arc::new(endpoint))
}

pub(crate) fn local_node() -> Delta {
    let (address, parent) = (TUNNEL.into(), NODE.into());
    let vtep = Vtep { node: "minion".into(), address, mac: MacAddress([2; 6]), parent, mtu: None };
    Delta::Node(LocalNode::ipv4("minion", NODE, Some(vtep)))
}

/// Sets whether ACLs name sets.
pub(crate) fn policy_sets(windows_policy_sets: WindowsPolicySets) -> Delta {
    Delta::Settings(Arc::new(Settings { windows_policy_sets, ..Settings::default() }))
}

pub(crate) fn own_block() -> Delta {
    Delta::Route(Route { destination: spec().block.into(), target: RouteTarget::Local })
}

pub(crate) fn policy_id(name: &str) -> PolicyId {
    PolicyId { kind: PolicyKind::NetworkPolicy, namespace: "calico-demo".into(), name: name.into() }
}

pub(crate) fn policy(name: &str, ingress: Vec<Rule>, egress: Vec<Rule>) -> Delta {
    Delta::Policy(policy_id(name), Arc::new(PolicyRules { ingress, egress }))
}

/// Allows every packet, like the profile of a namespace.
pub(crate) fn allow_all() -> Delta {
    policy("allow-all", vec![Rule::all(Action::Allow)], vec![Rule::all(Action::Allow)])
}

pub(crate) fn tier(name: &str, policies: &[&str], end: EndOfTier) -> TierProgram {
    TierProgram { name: name.into(), policies: policies.iter().map(|name| policy_id(name)).collect(), end }
}

pub(crate) fn open_program() -> EndpointProgram {
    EndpointProgram { profiles: vec![policy_id("allow-all")], ..EndpointProgram::default() }
}

pub(crate) fn node_addresses() -> BTreeSet<IpAddr> {
    [NODE.into(), TUNNEL.into()].into()
}

/// The flow in the opposite direction.
pub(crate) fn back(flow: Flow) -> Flow {
    Flow {
        source: flow.destination,
        destination: flow.source,
        source_port: flow.destination_port,
        destination_port: flow.source_port,
        ..flow
    }
}

pub(crate) fn service_id(name: &str) -> ServiceId {
    ServiceId { namespace: "shop".into(), name: name.into() }
}

/// A Service with this TCP port.
pub(crate) fn service(vips: &[&str], port: u16, backends: &[&str]) -> Service {
    let parse = |text: &&str| text.parse().unwrap();
    Service {
        cluster_ips: vips.iter().map(parse).collect(),
        external_ips: vec![],
        ports: vec![ServicePort {
            protocol: Protocol::TCP,
            port,
            backends: backends.iter().map(|text| (text.parse().unwrap(), 8080)).collect(),
        }],
    }
}

/// Adds or changes the Service.
pub(crate) fn is_now(name: &str, service: Service) -> Delta {
    Delta::Service(service_id(name), Arc::new(service))
}

/// Allows TCP to these networks.
pub(crate) fn to(nets: &[&str]) -> Rule {
    let nets = nets.iter().map(|net| net.parse().unwrap()).collect();
    let destination = EntityMatch { nets, ..EntityMatch::default() };
    Rule { protocol: Some(Protocol::TCP), destination, ..Rule::all(Action::Allow) }
}

/// Only what `rule` allows.
pub(crate) fn isolated(rule: Rule) -> [Delta; 2] {
    let program = EndpointProgram {
        egress: vec![tier("default", &["out"], EndOfTier::Deny)],
        ..EndpointProgram::default()
    };
    [policy("out", vec![], vec![rule]), endpoint(program)]
}

/// A node with these deltas.
pub(crate) fn started(more: impl IntoIterator<Item = Delta>) -> (Node, Report) {
    let mut node = Node::usual();
    node.connect();
    let mut deltas = vec![local_node(), own_block(), allow_all()];
    deltas.extend(more);
    let report = node.apply(&deltas);
    (node, report)
}

/// The ACLs of Services.
pub(crate) fn rows_of_services(node: &Node) -> Vec<(AclAction, String, String)> {
    let acls = node.acls().into_iter().filter(|acl| acl.id == "tortie/Service");
    let mut rows: Vec<_> = acls
        .map(|acl| (acl.action, acl.remote_addresses, format!("{}:{}", acl.protocols, acl.remote_ports)))
        .collect();
    rows.sort_by(|a, b| a.1.cmp(&b.1));
    rows
}
