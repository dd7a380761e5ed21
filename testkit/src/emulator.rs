//! A cluster of Windows nodes without Windows: each node is an emulated HNS with the dataplane of Windows that calc feeds.
//! No frame moves: a flow is judged by the ACLs of both its ends, as HNS has them.
//!
//! Objects have to be [`on_windows`] first.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Stateful;
use anyhow::{Context, Result, ensure};
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use tortie_api::calico::FelixConfiguration;
use tortie_api::net::Direction;
use tortie_api::{Key, Kind};
use tortie_calc::Calc;
use tortie_dataplane::{
    Delta, EndpointId, NodeState, PodAttachment, PodWiring as _, Report, Route, RouteTarget,
};
use tortie_hcn::schema::{Endpoint, Namespace};
use tortie_hcn::{Feature, Guid, Hcn, HcnExt};
use tortie_hns_emulator::{Config, Emulator, Packet, Recorder, Verdict, Way};
use tortie_policy::program::Flow;
use tortie_windows::{
    Clock, NETWORK, OverlaySpec, WindowsDataplane, WindowsWiring, endpoint_id, ensure_overlay,
};

use crate::clusters::Objects;
use crate::exceptions::no_acl_is_about_ports_of_sctp;
use crate::told::tell;

/// A way to have policy rendered.
#[derive(Debug, Clone, Copy)]
pub struct Rendering {
    /// What it is called.
    pub name: &'static str,
    /// What the operator has set: the value of [`FelixConfiguration::WINDOWS_POLICY_SETS`].
    policy_sets: &'static str,
    /// Whether HNS of this configuration has what it needs.
    pub suits: fn(&Config) -> bool,
    /// Whether ACLs name sets: else what HNS makes of those makes no difference.
    pub names_sets: bool,
}

impl Rendering {
    /// Has the operator set it.
    pub(crate) fn ask_for(&self, objects: &mut BTreeMap<Key, Value>) {
        let settings = objects.entry(Key::global(Kind::FelixConfiguration, "default"));
        let settings = settings.or_insert_with(|| json!({"metadata": {"name": "default"}, "spec": {}}));
        let annotation = &mut settings["metadata"]["annotations"][FelixConfiguration::WINDOWS_POLICY_SETS];
        *annotation = json!(self.policy_sets);
    }
}

/// All there are. Each is right on every HNS that it suits.
pub const RENDERINGS: [Rendering; 2] = [
    Rendering { name: "lists", policy_sets: "Disabled", suits: |_| true, names_sets: false },
    Rendering {
        name: "sets",
        policy_sets: "Enabled",
        suits: |config| config.version.supports(Feature::SetPolicy),
        names_sets: true,
    },
];

/// Every address is of every node's network. Where packets go is not asked here, so that blocks may overlap.
const BLOCK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0);
/// The VNI of Calico's VXLAN.
const VNI: u32 = 4096;

/// The addresses of Windows nodes, by their place in the list.
#[must_use]
pub fn node_address(index: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, 1 + index)
}

/// The cluster as it is where these nodes are Windows nodes: they have addresses, and pods have sandboxes.
#[must_use]
pub fn on_windows(objects: &Objects, nodes: &[&str]) -> Objects {
    let mut all = objects.clone();
    for (key, value) in all.iter_mut().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint) {
        let spec = &mut value["spec"];
        // Another address is another sandbox: the endpoint of the old one goes.
        let sandbox = format!("{}-{}-{}", key.namespace, key.name, spec["ipNetworks"]);
        spec["containerID"] = json!(sandbox.replace(['"', '/', '[', ']'], ""));
    }
    for (index, name) in (0..).zip(nodes) {
        let annotations = json!({"projectcalico.org/IPv4Address": format!("{}/24", node_address(index))});
        let value = json!({"metadata": {"name": name, "annotations": annotations}});
        all.push((Key::global(Kind::Node, *name), value));
    }
    all
}

/// Windows nodes, and what is known of them.
pub struct Cluster {
    nodes: Vec<Node>,
    rendering: Rendering,
    objects: BTreeMap<Key, Value>,
    places: BTreeMap<IpAddr, Place>,
    /// How far the dataplanes' clocks are ahead.
    ahead: Arc<Mutex<Duration>>,
}

/// Where an address is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
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
    wiring: WindowsWiring,
    network: Guid,
    block: Ipv4Net,
}

/// What the ends of a flow say; `None` where the end is no pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends<T> {
    /// The source.
    pub egress: Option<T>,
    /// The destination.
    pub ingress: Option<T>,
}

impl Ends<bool> {
    /// Whether none of them says no.
    #[must_use]
    pub fn all(self) -> bool {
        self.egress != Some(false) && self.ingress != Some(false)
    }
}

impl Cluster {
    /// Nodes of these names, without pods, which may have any address.
    ///
    /// # Errors
    /// What HNS refused.
    pub fn new(names: &[&str], config: &Config, rendering: Rendering) -> Result<Self> {
        Self::of_block(names, config, rendering, BLOCK)
    }

    /// The same where pods have addresses of this block, and Services, which may not take those, have others.
    ///
    /// # Errors
    /// What HNS refused.
    pub fn of_block(names: &[&str], config: &Config, rendering: Rendering, block: Ipv4Net) -> Result<Self> {
        let (start, ahead) = (Instant::now(), Arc::new(Mutex::new(Duration::ZERO)));
        let clock = || -> Clock {
            let ahead = Arc::clone(&ahead);
            Box::new(move || start + *lock(&ahead))
        };
        let nodes = (0..)
            .zip(names)
            .map(|(index, name)| {
                let config = Config { provider_address: node_address(index), ..config.clone() };
                Node::new(name, config, rendering, block, clock())
            })
            .collect::<Result<_>>()?;
        Ok(Self { nodes, rendering, objects: BTreeMap::new(), places: BTreeMap::new(), ahead })
    }

    /// Lets time pass for the dataplanes.
    pub fn wait(&self, time: Duration) {
        *lock(&self.ahead) += time;
    }

    /// Has the dataplanes compare all with HNS.
    pub fn resync(&mut self) -> Vec<Report> {
        self.nodes.iter_mut().map(|node| node.dataplane.resync()).collect()
    }

    /// The state of the nodes as calc has it.
    pub fn states(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().map(|node| node.calc.state())
    }

    /// Where an address is, if it is a pod's.
    #[must_use]
    pub fn place(&self, address: IpAddr) -> Option<&Place> {
        self.places.get(&address)
    }

    /// The addresses of the pods.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.places.keys().copied()
    }

    /// The HNS of a node, with the calls that it got.
    #[must_use]
    pub fn hns(&self, node: usize) -> &Arc<Recorder<Emulator>> {
        &self.nodes[node].hns
    }

    /// Changes the cluster into that of these objects: pods that are gone are disconnected, new ones connected as CNI does
    /// it, and the dataplanes are told what follows.
    ///
    /// # Errors
    /// A pod could not be connected or disconnected, or has an ACL such as we do not write.
    pub fn change(&mut self, objects: &Objects) -> Result<Vec<Report>> {
        let mut new: BTreeMap<Key, Value> = objects.iter().cloned().collect();
        self.rendering.ask_for(&mut new);
        let deltas: Vec<_> =
            self.nodes.iter_mut().map(|node| tell(&mut node.calc, &self.objects, &new)).collect();
        self.objects = new;
        self.connect()?;
        let told = self.nodes.iter_mut().zip(deltas);
        let reports = told.map(|(node, deltas)| node.dataplane.apply(&deltas)).collect();
        for node in &self.nodes {
            let endpoints = node.hns.inner().endpoints_of_network(node.network)?;
            no_acl_is_about_ports_of_sctp(&endpoints)?;
        }
        Ok(reports)
    }

    fn connect(&mut self) -> Result<()> {
        let mut places = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            for (id, endpoint) in &node.calc.state().endpoints {
                let container_id = endpoint.container_id.to_string();
                let place = Place { node: index, endpoint: id.clone(), container_id };
                places.extend(endpoint.addresses.iter().map(|address| (*address, place.clone())));
            }
        }
        let (old, new) = (sandboxes(&self.places), sandboxes(&places));
        for (place, address) in old.iter().filter(|(place, _)| !new.contains_key(*place)) {
            let wiring = &self.nodes[place.node].wiring;
            wiring.disconnect(&place.endpoint, &place.container_id).with_context(|| address.to_string())?;
        }
        for (place, address) in new.iter().filter(|(place, _)| !old.contains_key(*place)) {
            self.nodes[place.node].connect(place, *address)?;
        }
        self.places = places;
        Ok(())
    }

    /// Whether the flow is one of a pod, or of two.
    #[must_use]
    pub fn is_of_pods(&self, flow: &Flow) -> bool {
        self.place(flow.source).is_some() || self.place(flow.destination).is_some()
    }

    /// What the ACLs of both ends do with the flow's first packet.
    ///
    /// # Errors
    /// HNS does not have an endpoint, or the flow has an address that is none of IPv4.
    pub fn judge(&self, flow: &Flow) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, place, packet| {
            Ok(hns.judge(endpoint_id(&place.container_id), packet)? == Verdict::Allow)
        })
    }

    /// The same for a flow that is sent to this address and port of a Service, and comes to the backend that it names.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn judge_to_service(&self, flow: &Flow, front: (Ipv4Addr, u16)) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, place, packet| {
            let endpoint = endpoint_id(&place.container_id);
            Ok(hns.judge_to_service(endpoint, packet, Some(front))? == Verdict::Allow)
        })
    }

    /// Sends the flow's first packet past both ends, which keep the flow if they let it pass.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn open(&self, flow: &Flow) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, place, packet| {
            Ok(hns.open(endpoint_id(&place.container_id), packet, None)? == Verdict::Allow)
        })
    }

    /// Whether both ends still have a flow that was opened.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn is_open(&self, flow: &Flow) -> Result<Ends<bool>> {
        self.at_ends(flow, |hns, place, packet| Ok(hns.is_open(endpoint_id(&place.container_id), packet)?))
    }

    /// The HNS endpoints of a flow's ends.
    ///
    /// # Errors
    /// As [`judge`](Self::judge).
    pub fn endpoints(&self, flow: &Flow) -> Result<Ends<Endpoint>> {
        self.at_ends(flow, |hns, place, _| Ok(hns.endpoint(endpoint_id(&place.container_id))?))
    }

    fn at_ends<T>(
        &self,
        flow: &Flow,
        ask: impl Fn(&Emulator, &Place, &Packet) -> Result<T>,
    ) -> Result<Ends<T>> {
        let end = |address: IpAddr, direction| {
            let Some(place) = self.place(address) else { return Ok(None) };
            let packet = packet(direction, flow).with_context(|| format!("{flow:?} is not IPv4"))?;
            let hns = self.nodes[place.node].hns.inner();
            ask(hns, place, &packet).with_context(|| place.endpoint.to_string()).map(Some)
        };
        let egress = end(flow.source, Direction::Egress)?;
        Ok(Ends { egress, ingress: end(flow.destination, Direction::Ingress)? })
    }
}

impl Node {
    fn new(name: &str, config: Config, rendering: Rendering, block: Ipv4Net, clock: Clock) -> Result<Self> {
        ensure!((rendering.suits)(&config), "HNS {} has nothing for {}", config.version, rendering.name);
        let hns = Arc::new(Recorder::new(Emulator::new(config)));
        let spec = OverlaySpec { name: NETWORK.into(), block, vni: VNI, adapter: None };
        let network = ensure_overlay(&*hns, &spec)?.id;
        let hcn: Arc<dyn Hcn> = hns.clone();
        let wiring = WindowsWiring::new(hcn.clone());
        let mut dataplane = Stateful::new(WindowsDataplane::with_clock(hcn, None, clock));
        dataplane.apply(&[Delta::Route(Route { destination: block, target: RouteTarget::Local })]);
        let calc = Calc::new(name).with_services();
        Ok(Self { hns, calc, dataplane, wiring, network, block })
    }

    fn connect(&self, place: &Place, address: Ipv4Addr) -> Result<()> {
        let compartment = self.hns.create_namespace(&Namespace::default())?;
        let pod = PodAttachment {
            endpoint: place.endpoint.clone(),
            container_id: place.container_id.clone(),
            netns: compartment.to_string(),
            address,
            block: self.block,
            mtu: 1450,
        };
        self.wiring.connect(&pod).with_context(|| place.endpoint.to_string())?;
        Ok(())
    }
}

/// The address that each sandbox is connected with. The network has IPv4 only: a pod that has no such address all the
/// same has one in HNS that the cluster does not know.
fn sandboxes(places: &BTreeMap<IpAddr, Place>) -> BTreeMap<&Place, Ipv4Addr> {
    let mut all = BTreeMap::new();
    // Addresses of IPv4 come first.
    for (address, place) in places {
        all.entry(place).or_insert_with(|| match address {
            IpAddr::V4(address) => *address,
            IpAddr::V6(address) => {
                let [.., a, b] = address.octets();
                Ipv4Addr::new(100, 64, a, b)
            }
        });
    }
    all
}

/// What an endpoint's ACLs see of the flow's first packet.
fn packet(direction: Direction, flow: &Flow) -> Option<Packet> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (flow.source, flow.destination) else { return None };
    let Flow { source_port, destination_port, .. } = *flow;
    let protocol = flow.protocol.0;
    Some(match direction {
        Direction::Ingress => Packet {
            way: Way::In,
            protocol,
            local: destination,
            remote: source,
            local_port: destination_port,
            remote_port: source_port,
        },
        Direction::Egress => Packet {
            way: Way::Out,
            protocol,
            local: source,
            remote: destination,
            local_port: source_port,
            remote_port: destination_port,
        },
    })
}

fn lock(ahead: &Mutex<Duration>) -> MutexGuard<'_, Duration> {
    ahead.lock().unwrap_or_else(PoisonError::into_inner)
}
