//! A cluster on the real kernel: each node is a network namespace with a dataplane that calc feeds, each pod the end
//! of a cable. The ends have no addresses, so no kernel answers for them, and every packet begins a new flow.
//!
//! ```text
//! pods ═══ cali… ┌────┐ uplink ═══ uplink ┌────┐ cali… ═══ pods
//!  world ═════════ │ n1 │                │ n2 │ ═════════ world
//!                └────┘                    └────┘
//! ```
//! Addresses that belong to no pod are in the world, which has a link to each node. Everything needs root, and
//! disappears with the value.

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
use crate::update::update_calc;
use crate::warnings::printed;

const UPLINK: &str = "uplink";
const WORLD: &str = "world";
/// The routers of the world, which answer nothing.
const GATEWAYS: [&str; 2] = ["100.64.0.1", "fd98::1"];
/// A flow from the world behind one node to the world behind the other, past all pods.
const PASSERS_BY: [&str; 2] = ["198.51.100.250", "198.51.100.251"];
/// A higher metric than the dataplane's routes, so that this route is used only if the dataplane has none.
const METRIC: u32 = 2000;
const PROTOCOL: u8 = 4;
/// The number of packets in flight: fewer than the kernel's queue holds (`net.core.netdev_max_backlog`, 1000).
const BATCH: usize = 250;
/// Tags from here on belong to packets that pass by.
const PASSING: u32 = 0x8000_0000;

/// Two nodes and their state.
pub struct KernelCluster {
    nodes: [Node; 2],
    objects: BTreeMap<Key, Value>,
    /// The node and the link of each pod.
    locations: BTreeMap<IpAddr, Location>,
}

/// A node with the core of an agent: calc, and the dataplane that it feeds.
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
    /// The namespace with the other ends of its cables.
    outside: NetNs,
    neighbours: BTreeSet<(String, IpAddr)>,
}

/// The location of an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The index of the node.
    pub node: usize,
    /// The pod's link, or the world's.
    link: String,
}

impl KernelCluster {
    /// Two nodes of these names, without pods. From then on, the calling thread runs on one processor, so that all of
    /// its packets go through one queue and keep their order.
    ///
    /// # Errors
    /// An error of the kernel; it needs root.
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
        let mut cluster = Self { nodes, objects: BTreeMap::new(), locations: BTreeMap::new() };
        let reports = cluster.change(&Objects::new())?; // nodes forward from then on
        ensure!(reports == [Report::default(), Report::default()], "{reports:?}");
        Ok(cluster)
    }

    /// The state of the nodes according to calc.
    #[must_use]
    pub fn states(&self) -> [&NodeState; 2] {
        [self.nodes[0].calc.state(), self.nodes[1].calc.state()]
    }

    /// The location of an address, if it belongs to a pod.
    #[must_use]
    pub fn location(&self, address: IpAddr) -> Option<&Location> {
        self.locations.get(&address)
    }

    /// Changes the cluster to these objects: passes the differences to both nodes' calc, and the deltas to the
    /// dataplanes.
    ///
    /// # Errors
    /// The kernel refused links, or routes between the nodes.
    pub fn change(&mut self, objects: &Objects) -> Result<[Report; 2]> {
        let deltas = self.update_calc(objects);
        self.connect()?;
        self.apply(&deltas)
    }

    /// Passes the objects to calc, and returns the deltas for each node.
    pub fn update_calc(&mut self, objects: &Objects) -> [Vec<Delta>; 2] {
        let new: BTreeMap<Key, Value> = objects.iter().cloned().collect();
        let old = std::mem::replace(&mut self.objects, new);
        self.nodes.each_mut().map(|node| update_calc(&mut node.calc, &old, &self.objects))
    }

    /// Connects the pods in the nodes' states, as CNI would, and gives each node routes to the other one.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn connect(&mut self) -> Result<()> {
        let mut locations = BTreeMap::new();
        for (index, node) in self.nodes.iter_mut().enumerate() {
            for endpoint in node.calc.state().endpoints.values() {
                let link = endpoint.host_interface.to_string();
                let location = Location { node: index, link };
                locations.extend(endpoint.addresses.iter().map(|address| (*address, location.clone())));
            }
        }
        for (address, location) in &locations {
            self.nodes[location.node].connect(&location.link, *address)?;
        }
        let node_of = |locations: &BTreeMap<IpAddr, Location>, address: &IpAddr| {
            locations.get(address).map(|at| at.node)
        };
        let all: BTreeSet<IpAddr> = self.locations.keys().chain(locations.keys()).copied().collect();
        for address in all {
            let (old, new) = (node_of(&self.locations, &address), node_of(&locations, &address));
            for (adds, of) in [(false, old), (true, new)].into_iter().filter(|_| old != new) {
                let Some(of) = of else { continue };
                let from = &self.nodes[1 - of];
                let route = from.to_other(address, &self.nodes[of]);
                let change = if adds { Change::AddRoute(route) } else { Change::DeleteRoute(route) };
                self.nodes[1 - of].routes.change(&change)?;
            }
        }
        self.locations = locations;
        Ok(())
    }

    /// Applies deltas on both dataplanes.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn apply(&mut self, deltas: &[Vec<Delta>; 2]) -> Result<[Report; 2]> {
        let [first, second] = &mut self.nodes;
        let apply = |node: &mut Node, deltas| node.namespace.run(|| printed(|| node.dataplane.apply(deltas)));
        Ok([apply(first, &deltas[0])?, apply(second, &deltas[1])?])
    }

    /// Restarts both agents: new dataplanes without state, and calc with these objects. Returns the deltas to apply
    /// once the pods are connected; until then the kernel stays unchanged.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn restart(&mut self, config: &Config, objects: &Objects) -> Result<[Vec<Delta>; 2]> {
        for node in &mut self.nodes {
            node.calc = Calc::new(&*node.name);
            node.dataplane = Stateful::new(node.namespace.run(|| open(config.clone()))??);
        }
        self.objects.clear();
        Ok(self.update_calc(objects))
    }

    /// Runs a full comparison with the kernel on both dataplanes.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn resync(&mut self) -> Result<[Report; 2]> {
        let [first, second] = &mut self.nodes;
        let resync = |node: &mut Node| node.namespace.run(|| printed(|| node.dataplane.resync()));
        Ok([resync(first)?, resync(second)?])
    }

    /// The nodes' nftables tables, as listed by the kernel.
    ///
    /// # Errors
    /// An error of the kernel, or there is no table.
    pub fn tables(&self) -> Result<[Table; 2]> {
        let list = |node: &Node| -> Result<Table> {
            node.namespace.run(|| Nft::open()?.list("tortie"))??.context("there is no table")
        };
        Ok([list(&self.nodes[0])?, list(&self.nodes[1])?])
    }

    /// Whether at least one end of the flow is a pod.
    #[must_use]
    pub fn is_of_pods(&self, flow: &Flow) -> bool {
        self.location(flow.source).is_some() || self.location(flow.destination).is_some()
    }

    /// Sends a packet of each flow, and returns the indices of those that arrived. No flow may be the answer to
    /// another one.
    ///
    /// # Errors
    /// A packet could not be sent, or arrived at the wrong place; or the last packet, which is not subject to policy,
    /// did not arrive.
    pub fn passed(&mut self, flows: &[Flow]) -> Result<BTreeSet<usize>> {
        // A flow of an earlier case, or its answer, must not count as established.
        self.forget_connections()?;
        let mut passed = BTreeSet::new();
        for (number, batch) in flows.chunks(BATCH).enumerate() {
            passed.extend(self.traffic(batch)?.send()?.into_iter().map(|index| number * BATCH + index));
        }
        Ok(passed)
    }

    /// Removes all connections from both nodes' connection tracking.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn forget_connections(&mut self) -> Result<()> {
        self.nodes.iter_mut().try_for_each(|node| Ok(node.conntrack.flush()?))
    }

    /// Prepares packets of the flows, so that they can be sent while others change the nodes.
    ///
    /// # Errors
    /// A flow has no pod at either end.
    pub fn traffic(&self, flows: &[Flow]) -> Result<Traffic> {
        let world = |node| Location { node, link: WORLD.to_owned() };
        let mut packets = Vec::new();
        for (tag, flow) in (0..).zip(flows) {
            let (source, destination) = (self.location(flow.source), self.location(flow.destination));
            let (from, to) = match (source, destination) {
                (Some(source), Some(destination)) => (source.clone(), destination.clone()),
                (Some(source), None) => (source.clone(), world(source.node)),
                (None, Some(destination)) => (world(destination.node), destination.clone()),
                (None, None) => bail!("{flow:?} is no pod's"),
            };
            packets.push((self.socket(&from)?, frames::frame(flow, self.nodes[from.node].mac.0, tag), to));
        }
        let ends = self.nodes.iter().enumerate().flat_map(|(index, node)| {
            let location = move |link: &String| Location { node: index, link: link.clone() };
            let pods = node.pods.iter().map(move |(link, socket)| (location(link), socket.clone()));
            pods.chain([(world(index), node.world.clone())])
        });
        let router = self.nodes[0].mac.0;
        let [first, last] = self.nodes.each_ref().map(|node| node.world.clone());
        Ok(Traffic { packets, ends: ends.collect(), first, router, last })
    }

    fn socket(&self, location: &Location) -> Result<Arc<PacketSocket>> {
        self.nodes[location.node].socket(&location.link)
    }
}

/// Packets that can be sent repeatedly.
pub struct Traffic {
    packets: Vec<(Arc<PacketSocket>, Vec<u8>, Location)>,
    ends: Vec<(Location, Arc<PacketSocket>)>,
    /// Where the last packet is sent, its router, and where it arrives.
    first: Arc<PacketSocket>,
    router: [u8; 6],
    last: Arc<PacketSocket>,
}

impl Traffic {
    /// Sends all packets once and returns the indices of those that arrived.
    ///
    /// # Errors
    /// A packet could not be sent, or arrived at the wrong place; or the packet behind them, which is not subject to
    /// policy, did not arrive.
    pub fn send(&self) -> Result<BTreeSet<usize>> {
        static SENT: AtomicU32 = AtomicU32::new(0);
        let last = PASSING | SENT.fetch_add(1, Ordering::Relaxed);
        for (socket, frame, _) in &self.packets {
            ensure!(socket.send(frame)?, "there is no room for a packet to be sent");
        }
        // It takes as many hops as any of them. Once it has arrived, the others have been received or dropped.
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
        for (location, socket) in &self.ends {
            let mut arrived = tags(socket)?;
            if Arc::ptr_eq(socket, &self.last) {
                arrived.append(&mut in_world);
            }
            for tag in arrived {
                let index = tag as usize;
                let Some((_, _, to)) = self.packets.get(index) else { continue };
                ensure!(to == location, "packet {index} to {to:?} arrived at {location:?}");
                passed.insert(index);
            }
        }
        Ok(passed)
    }
}

/// A dataplane whose clock moves on by an hour at each look, so that each comparison reads the kernel's table.
pub(crate) fn open(config: Config) -> Result<Dataplane> {
    let (start, hours) = (Instant::now(), AtomicU32::new(0));
    let clock = move || start + Duration::from_secs(3600) * hours.fetch_add(1, Ordering::Relaxed);
    Ok(Dataplane::open(config)?.with_clock(Box::new(clock)))
}

impl Node {
    fn new(name: &str, number: u8, config: &Config) -> Result<Self> {
        let (namespace, outside) = (NetNs::create()?, NetNs::create()?);
        let mac = MacAddress([2, 0, 0, 0, 1, number]);
        outside.run(|| sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1"))??;
        namespace.run(node_parameters)??;
        let world = end(&namespace, (WORLD, mac), &outside, WORLD)?;
        let (dataplane, conntrack, mut routes) = namespace.run(|| -> Result<_> {
            Ok((Stateful::new(open(config.clone())?), Conntrack::open()?, RouteSocket::open()?))
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

    /// Routes the uplink to the other node.
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

    /// Ensures that there is a cable of this name whose other end has the address.
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
