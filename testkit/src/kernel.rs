//! A cluster on the real kernel: each node is a network namespace with a dataplane that calc feeds, each pod the end of a
//! cable. The ends have no addresses: no kernel answers for them, so that every packet begins a flow anew.
//!
//! ```text
//! pods ═══ cali… ┌────┐ uplink ═══ uplink ┌────┐ cali… ═══ pods
//!  world ═════════ │ n1 │                │ n2 │ ═════════ world
//!                └────┘                    └────┘
//! ```
//! What is no pod's address is in the world, which each node has an end of. It all needs root, and ends with the value.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::Stateful;
use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::Value;
use tortie_api::Key;
use tortie_api::net::Protocol;
use tortie_calc::Calc;
use tortie_dataplane::{Delta, MacAddress, NodeState, Report};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::{Nft, Table};
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Neighbour, Route, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_policy::program::Flow;

use crate::clusters::Objects;
use crate::frames;
use crate::links::{OTHERS, cable, end, keep_to_one_processor, node_parameters, tags};
use crate::told::tell;

const UPLINK: &str = "uplink";
const WORLD: &str = "world";
/// The routers of the world, which answer nothing either.
const GATEWAYS: [&str; 2] = ["100.64.0.1", "fd98::1"];
/// From the world behind one node to that behind the other: past all pods.
const PASSERS_BY: [&str; 2] = ["198.51.100.250", "198.51.100.251"];
/// More than those of the dataplane, and so asked for only where it has none.
const METRIC: u32 = 2000;
const PROTOCOL: u8 = 4;
/// So many packets are under way at once: fewer than the kernel's queue holds (`net.core.netdev_max_backlog`, 1000).
const BATCH: usize = 250;
/// Tags from here on are of packets that pass by.
const PASSING: u32 = 0x8000_0000;

/// Two nodes, and what is known of them.
pub struct Cluster {
    nodes: [Node; 2],
    objects: BTreeMap<Key, Value>,
    /// Of each pod: on which node, behind which link.
    places: BTreeMap<IpAddr, Place>,
}

/// A node with an agent's heart: calc, and the dataplane that it feeds.
pub struct Node {
    name: String,
    namespace: NetNs,
    mac: MacAddress,
    calc: Calc,
    dataplane: Stateful<Dataplane>,
    conntrack: Conntrack,
    routes: RouteSocket,
    /// Its own addresses on the uplink.
    own: [IpAddr; 2],
    uplink: u32,
    pods: BTreeMap<String, Arc<PacketSocket>>,
    world: Arc<PacketSocket>,
    /// Where the other ends of its cables are.
    outside: NetNs,
    neighbours: BTreeSet<(String, IpAddr)>,
}

/// Where an address is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The index of the node.
    pub node: usize,
    /// The pod's link, or the world's.
    link: String,
}

impl Cluster {
    /// Two nodes of these names, without pods. The calling thread keeps to one processor from then on: all packets that
    /// it sends go through that one's queue, and so keep their order.
    ///
    /// # Errors
    /// What the kernel refused; it needs root.
    pub fn new(names: [&str; 2], config: &Config) -> Result<Self> {
        keep_to_one_processor()?;
        let mut nodes = [Node::new(names[0], 1, config)?, Node::new(names[1], 2, config)?];
        cable(&nodes[0].namespace, (UPLINK, nodes[0].mac), &nodes[1].namespace, (UPLINK, nodes[1].mac))?;
        let [first, second] = &mut nodes;
        first.find_other(second)?;
        second.find_other(first)?;
        for address in PASSERS_BY {
            first.routes.change(&Change::AddRoute(first.to_other(address.parse()?, second)))?;
        }
        let mut cluster = Self { nodes, objects: BTreeMap::new(), places: BTreeMap::new() };
        let reports = cluster.change(&Objects::new())?; // nodes forward from then on
        ensure!(reports == [Report::default(), Report::default()], "{reports:?}");
        Ok(cluster)
    }

    /// The state of the nodes as calc has it.
    #[must_use]
    pub fn states(&self) -> [&NodeState; 2] {
        [self.nodes[0].calc.state(), self.nodes[1].calc.state()]
    }

    /// Where an address is, if it is a pod's.
    #[must_use]
    pub fn place(&self, address: IpAddr) -> Option<&Place> {
        self.places.get(&address)
    }

    /// Changes the cluster into that of these objects: both nodes' calc is told what differs, and the dataplanes are told
    /// what follows from it.
    ///
    /// # Errors
    /// What the kernel refused of links, and of routes between the nodes.
    pub fn change(&mut self, objects: &Objects) -> Result<[Report; 2]> {
        let deltas = self.tell(objects);
        self.connect()?;
        self.apply(&deltas)
    }

    /// Tells calc of the objects, and gives the deltas for each node.
    pub fn tell(&mut self, objects: &Objects) -> [Vec<Delta>; 2] {
        let new: BTreeMap<Key, Value> = objects.iter().cloned().collect();
        let old = std::mem::replace(&mut self.objects, new);
        self.nodes.each_mut().map(|node| tell(&mut node.calc, &old, &self.objects))
    }

    /// Connects the pods that the nodes' states speak of, as CNI would do, and has each node know the other one's.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn connect(&mut self) -> Result<()> {
        let mut places = BTreeMap::new();
        for (index, node) in self.nodes.iter_mut().enumerate() {
            for endpoint in node.calc.state().endpoints.values() {
                let link = endpoint.host_interface.to_string();
                let place = Place { node: index, link };
                places.extend(endpoint.addresses.iter().map(|address| (*address, place.clone())));
            }
        }
        for (address, place) in &places {
            self.nodes[place.node].connect(&place.link, *address)?;
        }
        let node_of =
            |places: &BTreeMap<IpAddr, Place>, address: &IpAddr| places.get(address).map(|at| at.node);
        let all: BTreeSet<IpAddr> = self.places.keys().chain(places.keys()).copied().collect();
        for address in all {
            let (old, new) = (node_of(&self.places, &address), node_of(&places, &address));
            for (way, of) in [(false, old), (true, new)].into_iter().filter(|_| old != new) {
                let Some(of) = of else { continue };
                let from = &self.nodes[1 - of];
                let route = from.to_other(address, &self.nodes[of]);
                let change = if way { Change::AddRoute(route) } else { Change::DeleteRoute(route) };
                self.nodes[1 - of].routes.change(&change)?;
            }
        }
        self.places = places;
        Ok(())
    }

    /// Has both dataplanes apply deltas.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn apply(&mut self, deltas: &[Vec<Delta>; 2]) -> Result<[Report; 2]> {
        let [first, second] = &mut self.nodes;
        let apply = |node: &mut Node, deltas| node.namespace.run(|| node.dataplane.apply(deltas));
        Ok([apply(first, &deltas[0])?, apply(second, &deltas[1])?])
    }

    /// Starts both agents anew: dataplanes that know nothing yet, and calc that is told of these objects. Gives what to
    /// apply, once the pods are connected; until then the kernel stays as it is.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn restart(&mut self, config: &Config, objects: &Objects) -> Result<[Vec<Delta>; 2]> {
        for node in &mut self.nodes {
            node.calc = Calc::new(&*node.name);
            node.dataplane = Stateful::new(node.namespace.run(|| Dataplane::open(config.clone()))??);
        }
        self.objects.clear();
        Ok(self.tell(objects))
    }

    /// Has both dataplanes compare all with the kernel.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn resync(&mut self) -> Result<[Report; 2]> {
        let [first, second] = &mut self.nodes;
        let resync = |node: &mut Node| node.namespace.run(|| node.dataplane.resync());
        Ok([resync(first)?, resync(second)?])
    }

    /// The nodes' nftables tables, as the kernel lists them.
    ///
    /// # Errors
    /// What the kernel refused, or that there is none.
    pub fn tables(&self) -> Result<[Table; 2]> {
        let list = |node: &Node| -> Result<Table> {
            node.namespace.run(|| Nft::open()?.list("tortie"))??.context("there is no table")
        };
        Ok([list(&self.nodes[0])?, list(&self.nodes[1])?])
    }

    /// Whether the flow is one of a pod, or of two.
    #[must_use]
    pub fn is_of_pods(&self, flow: &Flow) -> bool {
        self.place(flow.source).is_some() || self.place(flow.destination).is_some()
    }

    /// Sends a packet of each flow, and gives the indices of those that arrived. No flow may be another one's answer.
    ///
    /// # Errors
    /// A packet could not be sent or arrived where it does not belong; or the last one, which no policy is asked of, did
    /// not arrive.
    pub fn passed(&mut self, flows: &[Flow]) -> Result<BTreeSet<usize>> {
        // A flow of an earlier case, or its answer, must not be taken for an established one.
        self.forget_connections()?;
        let mut passed = BTreeSet::new();
        for (number, batch) in flows.chunks(BATCH).enumerate() {
            passed.extend(self.traffic(batch)?.send()?.into_iter().map(|index| number * BATCH + index));
        }
        Ok(passed)
    }

    /// Has both nodes forget all connections.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn forget_connections(&mut self) -> Result<()> {
        self.nodes.iter_mut().try_for_each(|node| Ok(node.conntrack.flush()?))
    }

    /// The flows with what is needed to send packets of them, while others change the nodes.
    ///
    /// # Errors
    /// A flow that is none of pods.
    pub fn traffic(&self, flows: &[Flow]) -> Result<Traffic> {
        let world = |node| Place { node, link: WORLD.to_owned() };
        let mut ways = Vec::new();
        for (tag, flow) in (0..).zip(flows) {
            let (source, destination) = (self.place(flow.source), self.place(flow.destination));
            let (from, to) = match (source, destination) {
                (Some(source), Some(destination)) => (source.clone(), destination.clone()),
                (Some(source), None) => (source.clone(), world(source.node)),
                (None, Some(destination)) => (world(destination.node), destination.clone()),
                (None, None) => bail!("{flow:?} is no pod's"),
            };
            ways.push((self.socket(&from)?, frames::frame(flow, self.nodes[from.node].mac.0, tag), to));
        }
        let ends = self.nodes.iter().enumerate().flat_map(|(index, node)| {
            let place = move |link: &String| Place { node: index, link: link.clone() };
            let pods = node.pods.iter().map(move |(link, socket)| (place(link), socket.clone()));
            pods.chain([(world(index), node.world.clone())])
        });
        let router = self.nodes[0].mac.0;
        let [first, last] = self.nodes.each_ref().map(|node| node.world.clone());
        Ok(Traffic { ways, ends: ends.collect(), first, router, last })
    }

    fn socket(&self, place: &Place) -> Result<Arc<PacketSocket>> {
        self.nodes[place.node].socket(&place.link)
    }
}

/// Packets that can be sent again and again.
pub struct Traffic {
    ways: Vec<(Arc<PacketSocket>, Vec<u8>, Place)>,
    ends: Vec<(Place, Arc<PacketSocket>)>,
    /// Where the last packet is sent from, to which router, and where it arrives.
    first: Arc<PacketSocket>,
    router: [u8; 6],
    last: Arc<PacketSocket>,
}

impl Traffic {
    /// Sends all once and gives the indices of those that arrived.
    ///
    /// # Errors
    /// A packet could not be sent or arrived where it does not belong; or the one behind them, which no policy is asked
    /// of, did not arrive.
    pub fn send(&self) -> Result<BTreeSet<usize>> {
        static SENT: AtomicU32 = AtomicU32::new(0);
        let last = PASSING | SENT.fetch_add(1, Ordering::Relaxed);
        for (socket, frame, _) in &self.ways {
            ensure!(socket.send(frame)?, "there is no room for a packet to be sent");
        }
        // It takes as many hops as any of them: when it is there, they have been received or dropped.
        let [source, destination] = PASSERS_BY.map(|address| address.parse::<IpAddr>());
        let (source, destination) = (source?, destination?);
        let (source_port, destination_port, icmp) = (7, 7, None);
        let flow = Flow { source, destination, protocol: Protocol::UDP, source_port, destination_port, icmp };
        ensure!(self.first.send(&frames::frame(&flow, self.router, last))?, "no room");
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut in_world = BTreeSet::new();
        while !in_world.contains(&last) {
            ensure!(
                Instant::now() < deadline,
                "the last packet, which no policy is asked of, did not arrive"
            );
            std::thread::yield_now();
            in_world.extend(tags(&self.last)?);
        }
        let mut passed = BTreeSet::new();
        for (place, socket) in &self.ends {
            let mut arrived = tags(socket)?;
            if Arc::ptr_eq(socket, &self.last) {
                arrived.append(&mut in_world);
            }
            for tag in arrived {
                let index = tag as usize;
                let Some((_, _, to)) = self.ways.get(index) else { continue };
                ensure!(to == place, "packet {index} to {to:?} arrived at {place:?}");
                passed.insert(index);
            }
        }
        Ok(passed)
    }
}

impl Node {
    fn new(name: &str, number: u8, config: &Config) -> Result<Self> {
        let (namespace, outside) = (NetNs::create()?, NetNs::create()?);
        let mac = MacAddress([2, 0, 0, 0, 1, number]);
        outside.run(|| sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1"))??;
        namespace.run(node_parameters)??;
        let world = end(&namespace, (WORLD, mac), &outside, WORLD)?;
        let (dataplane, conntrack, mut routes) = namespace.run(|| -> Result<_> {
            Ok((Stateful::new(Dataplane::open(config.clone())?), Conntrack::open()?, RouteSocket::open()?))
        })??;
        let link = namespace.run(|| interface_index(WORLD))??;
        for (gateway, all) in GATEWAYS.into_iter().zip(["0.0.0.0/0", "::/0"]) {
            let gateway: IpAddr = gateway.parse()?;
            routes.change(&Change::SetNeighbour(Neighbour { link, address: gateway, mac: OTHERS }))?;
            let route = Route::via(all.parse()?, gateway, link, PROTOCOL);
            routes.change(&Change::AddRoute(route))?;
        }
        let own =
            [IpAddr::from([172, 31, 0, number]), IpAddr::from([0xfd99, 0, 0, 0, 0, 0, 0, number.into()])];
        let (calc, pods, neighbours) = (Calc::new(name), BTreeMap::new(), BTreeSet::new());
        let uplink = 0; // there is none yet
        Ok(Self {
            name: name.to_owned(),
            namespace,
            mac,
            calc,
            dataplane,
            conntrack,
            routes,
            own,
            uplink,
            pods,
            world,
            outside,
            neighbours,
        })
    }

    /// The uplink leads to the other node.
    fn find_other(&mut self, other: &Self) -> Result<()> {
        let link = self.namespace.run(|| interface_index(UPLINK))??;
        self.uplink = link;
        for (own, other_own) in self.own.into_iter().zip(other.own) {
            let prefix_length = if own.is_ipv4() { 24 } else { 64 };
            self.routes.change(&Change::AddAddress(Address { link, address: own, prefix_length }))?;
            let neighbour = Neighbour { link, address: other_own, mac: other.mac };
            self.routes.change(&Change::SetNeighbour(neighbour))?;
        }
        Ok(())
    }

    fn to_other(&self, address: IpAddr, other: &Self) -> Route {
        let gateway = other.own[usize::from(address.is_ipv6())];
        Route { metric: METRIC, ..Route::via(IpNet::from(address), gateway, self.uplink, PROTOCOL) }
    }

    /// Sees to it that there is a cable of this name, at whose other end somebody has the address.
    fn connect(&mut self, link: &str, address: IpAddr) -> Result<()> {
        if !self.pods.contains_key(link) {
            let socket = end(&self.namespace, (link, self.mac), &self.outside, link)?;
            self.pods.insert(link.to_owned(), socket);
        }
        if self.neighbours.insert((link.to_owned(), address)) {
            let link = self.namespace.run(|| interface_index(link))??;
            self.routes.change(&Change::SetNeighbour(Neighbour { link, address, mac: OTHERS }))?;
        }
        Ok(())
    }

    fn socket(&self, link: &str) -> Result<Arc<PacketSocket>> {
        if link == WORLD {
            return Ok(self.world.clone());
        }
        self.pods.get(link).cloned().with_context(|| format!("there is no cable {link}"))
    }
}
