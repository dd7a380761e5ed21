//! A cluster of Windows nodes without Windows: each node is an emulated HNS with the Windows dataplane, fed by calc.
//! No frames are sent: a flow is judged by the ACLs that HNS has for both of its ends.
//!
//! Objects must be prepared by [`on_windows`] first.

mod plugin;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Stateful;
use anyhow::{Context, Result, ensure};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use tortie_api::calico::FelixConfiguration;
use tortie_api::net::Direction;
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::{Delta, EndpointId, NodeState, Report, Route, RouteTarget};
use tortie_hcn::schema::Endpoint;
use tortie_hcn::{Adapter, Feature, Guid, Hcn, HcnExt, IpHelper};
use tortie_hns_emulator::{Config, EmulatedHost, Emulator, Packet, PacketDirection, Recorder, Verdict};
use tortie_policy::program::Flow;
use tortie_windows::{
    Clock, Host, HostRoutes, NETWORK, NetworkKind, NetworkSpec, PolicyOnly, WindowsDataplane, WindowsWiring,
    endpoint_id, ensure_network,
};

use crate::clusters::Objects;
use crate::exceptions::no_acl_is_about_ports_of_sctp;
use crate::update::update_calc;
use PodNetwork::{BothFamilies, Ipv4Only};
use plugin::Plugin;

/// A way to render policy.
#[derive(Debug, Clone, Copy)]
pub struct Rendering {
    /// Its name.
    pub name: &'static str,
    /// The operator's setting: the value of [`FelixConfiguration::WINDOWS_POLICY_SETS`].
    policy_sets: &'static str,
    /// Whether an HNS of this configuration supports it.
    pub suits: fn(&Config) -> bool,
    /// Whether ACLs name sets. Otherwise the emulator's options for sets do not matter.
    pub names_sets: bool,
}

impl Rendering {
    /// Adds the operator's setting to the objects.
    pub(crate) fn ask_for(&self, objects: &mut BTreeMap<Key, Value>) {
        let settings = objects.entry(Key::global(Kind::FelixConfiguration, "default"));
        let settings = settings.or_insert_with(|| json!({"metadata": {"name": "default"}, "spec": {}}));
        let annotation = &mut settings["metadata"]["annotations"][FelixConfiguration::WINDOWS_POLICY_SETS];
        *annotation = json!(self.policy_sets);
    }
}

/// All renderings. Each is correct on every HNS that supports it.
pub const RENDERINGS: [Rendering; 2] = [
    Rendering { name: "lists", policy_sets: "Disabled", suits: |_| true, names_sets: false },
    Rendering {
        name: "sets",
        policy_sets: "Enabled",
        suits: |config| config.version.supports(Feature::SetPolicy),
        names_sets: true,
    },
];

/// Every node's network contains every address. Forwarding is not tested here, so blocks may overlap.
const BLOCK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0);
/// The same of IPv6. Its gateway and the node's end are no addresses of random pods.
const BLOCK_V6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7);
/// The VNI of Calico's VXLAN.
const VNI: u32 = 4096;

/// The addresses of Windows nodes, by index.
#[must_use]
pub fn node_address(index: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, 1 + index)
}

/// Their IPv6 addresses.
#[must_use]
pub fn node_address_v6(index: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9 + u16::from(index))
}

/// The cluster with these nodes as Windows nodes: they have addresses, and pods have sandboxes.
#[must_use]
pub fn on_windows(objects: &Objects, nodes: &[&str]) -> Objects {
    let mut all = objects.clone();
    for (key, value) in all.iter_mut().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint) {
        let spec = &mut value["spec"];
        // A new address means a new sandbox: the endpoint of the old one is removed.
        let sandbox = format!("{}-{}-{}", key.namespace, key.name, spec["ipNetworks"]);
        spec["containerID"] = json!(sandbox.replace(['"', '/', '[', ']'], ""));
    }
    for (index, name) in (0..).zip(nodes) {
        let annotations = json!({
            "projectcalico.org/IPv4Address": format!("{}/24", node_address(index)),
            "projectcalico.org/IPv6Address": format!("{}/64", node_address_v6(index)),
        });
        let value = json!({"metadata": {"name": name, "annotations": annotations}});
        all.push((Key::global(Kind::Node, *name), value));
    }
    all
}

/// The Windows nodes and their state.
pub struct EmulatedCluster {
    nodes: Vec<Node>,
    rendering: Rendering,
    objects: BTreeMap<Key, Value>,
    locations: BTreeMap<IpAddr, Location>,
    /// How far the dataplanes' clocks are ahead.
    ahead: Arc<Mutex<Duration>>,
}

/// The location of an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The index of the node.
    pub node: usize,
    /// The pod.
    pub endpoint: EndpointId,
    /// Its sandbox.
    pub container_id: String,
}

struct Node {
    hns: Arc<Recorder<Emulator>>,
    calc: Calc,
    dataplane: Stateful<WindowsDataplane>,
    plugin: Plugin,
    network: Guid,
}

/// The verdicts of the ends of a flow; `None` if the end is not a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends<T> {
    /// The source.
    pub egress: Option<T>,
    /// The destination.
    pub ingress: Option<T>,
}

impl Ends<bool> {
    /// Whether no end denies the flow.
    #[must_use]
    pub fn all(self) -> bool {
        self.egress != Some(false) && self.ingress != Some(false)
    }
}

impl EmulatedCluster {
    /// Nodes of these names without pods, whose pods may have any address.
    ///
    /// # Errors
    /// An error of HNS.
    pub fn new(names: &[&str], config: &Config, rendering: Rendering) -> Result<Self> {
        Self::of_block(names, config, rendering, BLOCK)
    }

    /// The same, with pod addresses from this block, so that Services have addresses outside it.
    ///
    /// # Errors
    /// An error of HNS.
    pub fn of_block(names: &[&str], config: &Config, rendering: Rendering, block: Ipv4Net) -> Result<Self> {
        ensure!((rendering.suits)(config), "HNS {} has nothing for {}", config.version, rendering.name);
        let network = Ipv4Only(block);
        Self::of(names, config, rendering, |_, name, hns, clock| Node::of_tortie(name, hns, network, clock))
    }

    /// Nodes with networks of type L2Bridge, whose pods have addresses of both families, those of IPv4 from this block.
    ///
    /// # Errors
    /// An error of HNS.
    pub fn of_both_families(
        names: &[&str],
        config: &Config,
        rendering: Rendering,
        block: Ipv4Net,
    ) -> Result<Self> {
        let node =
            |index, name: &str, hns, clock| Node::of_tortie(name, hns, BothFamilies { index, block }, clock);
        Self::of(names, config, rendering, node)
    }

    /// Nodes whose pods another plugin connects, with addresses of both families. Tortie enforces policy only.
    ///
    /// # Errors
    /// An error of HNS, or a folder cannot be created.
    pub fn of_another_plugin(names: &[&str], config: &Config) -> Result<Self> {
        // Sets would be those of Tortie's network.
        let node = |_, name: &str, hns, clock| Node::of_another_plugin(name, hns, clock);
        Self::of(names, config, RENDERINGS[0], node)
    }

    fn of(
        names: &[&str],
        config: &Config,
        rendering: Rendering,
        node: impl Fn(u8, &str, Arc<Recorder<Emulator>>, Clock) -> Result<Node>,
    ) -> Result<Self> {
        let (start, ahead) = (Instant::now(), Arc::new(Mutex::new(Duration::ZERO)));
        let clock = || -> Clock {
            let ahead = Arc::clone(&ahead);
            Box::new(move || start + *lock(&ahead))
        };
        let nodes = (0..)
            .zip(names)
            .map(|(index, name)| {
                let config = Config { provider_address: node_address(index), ..config.clone() };
                node(index, name, Arc::new(Recorder::new(Emulator::new(config))), clock())
            })
            .collect::<Result<_>>()?;
        Ok(Self { nodes, rendering, objects: BTreeMap::new(), locations: BTreeMap::new(), ahead })
    }

    /// Whether the networks of the pods have IPv6.
    #[must_use]
    pub fn has_ipv6(&self) -> bool {
        self.nodes.iter().all(|node| node.plugin.has_ipv6())
    }

    /// Whether the nodes know the networks of pods. Those of another plugin are unknown to them.
    #[must_use]
    pub fn knows_pod_networks(&self) -> bool {
        self.nodes.iter().all(|node| matches!(node.plugin, Plugin::Tortie { .. }))
    }

    /// Advances the clocks of the dataplanes.
    pub fn wait(&self, time: Duration) {
        *lock(&self.ahead) += time;
    }

    /// Runs a full comparison with HNS on all dataplanes.
    pub fn resync(&mut self) -> Vec<Report> {
        self.nodes.iter_mut().map(|node| node.dataplane.resync()).collect()
    }

    /// The state of the nodes according to calc.
    pub fn states(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().map(|node| node.calc.state())
    }

    /// The location of an address, if it belongs to a pod.
    #[must_use]
    pub fn location(&self, address: IpAddr) -> Option<&Location> {
        self.locations.get(&address)
    }

    /// The addresses of the pods.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.locations.keys().copied()
    }

    /// The HNS of a node, with its recorded calls.
    #[must_use]
    pub fn hns(&self, node: usize) -> &Arc<Recorder<Emulator>> {
        &self.nodes[node].hns
    }

    /// Changes the cluster to these objects: disconnects deleted pods, connects new ones as CNI does, and passes the
    /// deltas to the dataplanes.
    ///
    /// # Errors
    /// A pod could not be connected or disconnected, or has an ACL that Tortie must not write.
    pub fn change(&mut self, objects: &Objects) -> Result<Vec<Report>> {
        let mut new: BTreeMap<Key, Value> = objects.iter().cloned().collect();
        self.rendering.ask_for(&mut new);
        let deltas: Vec<_> =
            self.nodes.iter_mut().map(|node| update_calc(&mut node.calc, &self.objects, &new)).collect();
        self.objects = new;
        self.connect()?;
        let updates = self.nodes.iter_mut().zip(deltas);
        let reports = updates.map(|(node, deltas)| node.dataplane.apply(&deltas)).collect();
        for node in &self.nodes {
            let endpoints = node.hns.inner().endpoints_of_network(node.network)?;
            no_acl_is_about_ports_of_sctp(&endpoints)?;
        }
        Ok(reports)
    }

    fn connect(&mut self) -> Result<()> {
        let mut locations = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            for (id, endpoint) in &node.calc.state().endpoints {
                let container_id = endpoint.container_id.to_string();
                let location = Location { node: index, endpoint: id.clone(), container_id };
                locations.extend(endpoint.addresses.iter().map(|address| (*address, location.clone())));
            }
        }
        let (old, new) = (sandboxes(&self.locations), sandboxes(&locations));
        for location in old.keys().filter(|location| !new.contains_key(*location)) {
            let node = &self.nodes[location.node];
            node.plugin.disconnect(&*node.hns, location).with_context(|| location.endpoint.to_string())?;
        }
        for (location, addresses) in new.iter().filter(|(location, _)| !old.contains_key(*location)) {
            let node = &self.nodes[location.node];
            node.plugin
                .connect(&*node.hns, location, addresses)
                .with_context(|| location.endpoint.to_string())?;
        }
        self.locations = locations;
        Ok(())
    }

    /// Whether at least one end of the flow is a pod.
    #[must_use]
    pub fn is_of_pods(&self, flow: &Flow) -> bool {
        self.location(flow.source).is_some() || self.location(flow.destination).is_some()
    }

    /// The verdicts of the ACLs of both ends on the flow's first packet.
    ///
    /// # Errors
    /// HNS does not have an endpoint.
    pub fn judge(&self, flow: &Flow) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, location, packet| {
            Ok(hns.judge(endpoint_id(&location.container_id), packet)? == Verdict::Allow)
        })
    }

    /// The same for a flow to this address and port of a Service that is forwarded to the flow's backend.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn judge_to_service(&self, flow: &Flow, front: (Ipv4Addr, u16)) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, location, packet| {
            let endpoint = endpoint_id(&location.container_id);
            Ok(hns.judge_to_service(endpoint, packet, Some((front.0.into(), front.1)))? == Verdict::Allow)
        })
    }

    /// Sends the flow's first packet past both ends, which record the flow if they let it pass.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn open(&self, flow: &Flow) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, location, packet| {
            Ok(hns.open(endpoint_id(&location.container_id), packet, None)? == Verdict::Allow)
        })
    }

    /// Whether both ends still have an opened flow.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn is_open(&self, flow: &Flow) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, location, packet| {
            Ok(hns.is_open(endpoint_id(&location.container_id), packet)?)
        })
    }

    /// The HNS endpoints of a flow's ends.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn endpoints(&self, flow: &Flow) -> Result<Ends<Endpoint>> {
        self.at_ends(flow, |hns, location, _| Ok(hns.endpoint(endpoint_id(&location.container_id))?))
    }

    fn at_ends<T>(
        &self,
        flow: &Flow,
        ask: impl Fn(&Emulator, &Location, &Packet) -> Result<T>,
    ) -> Result<Ends<T>> {
        let end = |address: IpAddr, direction| {
            let Some(location) = self.location(address) else { return Ok(None) };
            let packet = packet(direction, flow);
            let hns = self.nodes[location.node].hns.inner();
            ask(hns, location, &packet).with_context(|| location.endpoint.to_string()).map(Some)
        };
        let egress = end(flow.source, Direction::Egress)?;
        Ok(Ends { egress, ingress: end(flow.destination, Direction::Ingress)? })
    }
}

impl Node {
    fn of_tortie(name: &str, hns: Arc<Recorder<Emulator>>, of: PodNetwork, clock: Clock) -> Result<Self> {
        let (block, ipv6, kind) = match of {
            Ipv4Only(block) => (block, None, NetworkKind::Overlay { vni: VNI }),
            BothFamilies { block, .. } => (block, Some(BLOCK_V6), NetworkKind::L2Bridge),
        };
        let spec = NetworkSpec { name: NETWORK.into(), block, ipv6, kind, adapter: None };
        let network = ensure_network(&*hns, &spec)?.id;
        let hcn: Arc<dyn Hcn> = hns.clone();
        let plugin = Plugin::Tortie { wiring: WindowsWiring::new(hcn.clone()), block, ipv6 };
        let dataplane = WindowsDataplane::with_clock(hcn, clock);
        let mut dataplane = Stateful::new(match of {
            Ipv4Only(_) => dataplane,
            BothFamilies { index, block } => dataplane.with_bridge(true).with_host(machine(index, block)),
        });
        let own = [Some(IpNet::V4(block)), ipv6.map(IpNet::V6)].into_iter().flatten();
        let local = |destination| Delta::Route(Route { destination, target: RouteTarget::Local });
        dataplane.apply(&own.map(local).collect::<Vec<_>>());
        Ok(Self { hns, calc: Calc::new(name).with_services(), dataplane, plugin, network })
    }

    fn of_another_plugin(name: &str, hns: Arc<Recorder<Emulator>>, clock: Clock) -> Result<Self> {
        let hcn: Arc<dyn Hcn> = hns.clone();
        let (plugin, network, results) = Plugin::other(&*hcn)?;
        let dataplane = WindowsDataplane::with_clock(hcn, clock).with_policy_only(PolicyOnly { results });
        let calc = Calc::new(name).with_services();
        Ok(Self { hns, calc, dataplane: Stateful::new(dataplane), plugin, network })
    }
}

/// A network that Tortie makes.
#[derive(Debug, Clone, Copy)]
enum PodNetwork {
    /// An overlay with this block.
    Ipv4Only(Ipv4Net),
    /// One of type L2Bridge with this block and [`BLOCK_V6`], on the node of this index.
    BothFamilies { index: u8, block: Ipv4Net },
}

/// The machine of a node with both families, which is connected to its pods.
fn machine(index: u8, block: Ipv4Net) -> Host {
    let adapter = |number, name: &str, addresses: [IpNet; 2]| Adapter {
        index: number,
        name: name.to_owned(),
        mac: None,
        mtu: 1500,
        is_up: true,
        addresses: addresses.into(),
    };
    let net = |address: IpAddr, length| IpNet::new_assert(address, length);
    let own = [net(node_address(index).into(), 24), net(node_address_v6(index).into(), 64)];
    let end = [
        net(Ipv4Addr::from(u32::from(block.network()) + 2).into(), block.prefix_len()),
        net(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 2).into(), 7),
    ];
    let adapters = vec![adapter(1, "Ethernet", own), adapter(2, "vEthernet (Calico_ep)", end)];
    let ip: Arc<dyn IpHelper> = Arc::new(EmulatedHost::new(adapters, Vec::new()));
    Host::new(ip.clone(), None, Arc::new(HostRoutes::new(ip, None)))
}

/// The addresses of each sandbox. Those of IPv4 come first.
fn sandboxes(locations: &BTreeMap<IpAddr, Location>) -> BTreeMap<&Location, Vec<IpAddr>> {
    let mut all: BTreeMap<&Location, Vec<IpAddr>> = BTreeMap::new();
    for (address, location) in locations {
        all.entry(location).or_default().push(*address);
    }
    all
}

/// The flow's first packet as an endpoint's ACLs see it.
fn packet(direction: Direction, flow: &Flow) -> Packet {
    let Flow { source, destination, source_port, destination_port, protocol, .. } = *flow;
    let protocol = protocol.0;
    match direction {
        Direction::Ingress => Packet {
            direction: PacketDirection::In,
            protocol,
            local: destination,
            remote: source,
            local_port: destination_port,
            remote_port: source_port,
        },
        Direction::Egress => Packet {
            direction: PacketDirection::Out,
            protocol,
            local: source,
            remote: destination,
            local_port: source_port,
            remote_port: destination_port,
        },
    }
}

fn lock(ahead: &Mutex<Duration>) -> MutexGuard<'_, Duration> {
    ahead.lock().unwrap_or_else(PoisonError::into_inner)
}
