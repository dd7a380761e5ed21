//! Nodes on the real kernel, with packets of the nodes themselves: each node is a network namespace with a dataplane
//! that calc feeds. The other end of its outside interface and of each pod's cable is a socket that answers nothing.
//!
//! ```text
//!            ┌────┐ cali… ═══ pods
//!  eth0 ════ │ n1 │
//!            └────┘ raw sockets: packets of the node itself
//! ```
//! The nodes are not connected. A packet that leaves one node for another is received at the first one's outside
//! interface and sent to the second one's. Everything needs root, and disappears with the value.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use serde_json::Value;
use tortie_api::net::Protocol;
use tortie_api::{Key, Kind, Resource};
use tortie_calc::Calc;
use tortie_dataplane::{MacAddress, Report};
use tortie_kernel::conntrack::Conntrack;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_kernel::route::{Address, Change, Neighbour, Route, RouteSocket};
use tortie_kernel::{interface_index, sysctl};
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;
use tortie_policy::program::Flow;

use crate::Stateful;
use crate::clusters::Objects;
use crate::frames;
use crate::kernel::open;
use crate::links::{OTHERS, end, keep_to_one_processor, node_parameters};
use crate::update::update_calc;

const OUTSIDE: &str = "eth0";
/// The routers of the outside, which answer nothing.
const GATEWAYS: [&str; 2] = ["100.64.0.1", "fd98::1"];
const ROUTE_PROTOCOL: u8 = 4;
/// The number of packets in flight: fewer than the kernel's queue holds (`net.core.netdev_max_backlog`, 1000).
const BATCH: usize = 250;
const ETHERNET_HEADER: usize = 14;
/// The protocols of packets that the nodes themselves receive.
const PROTOCOLS: [u8; 9] = [1, 6, 17, 47, 58, 89, 132, 136, HEADER_INCLUDED];
/// `IPPROTO_RAW`: sockets that send packets with their own headers.
const HEADER_INCLUDED: u8 = 255;

/// Nodes, each with the core of an agent.
pub struct HostCluster {
    nodes: Vec<Node>,
    /// A router without policy. When a packet has passed it, all packets that were sent before have arrived.
    relay: Router,
    objects: BTreeMap<Key, Value>,
    next_tag: u32,
}

/// A namespace that forwards, with an outside interface.
struct Router {
    namespace: NetNs,
    mac: MacAddress,
    routes: RouteSocket,
    /// The other end of the outside interface.
    outside: Arc<PacketSocket>,
    /// The namespace with the other ends of all cables.
    others: NetNs,
}

struct Node {
    name: String,
    router: Router,
    calc: Calc,
    dataplane: Stateful<Dataplane>,
    conntrack: Conntrack,
    own: BTreeSet<IpAddr>,
    pods: BTreeMap<String, Arc<PacketSocket>>,
    neighbours: BTreeSet<(String, IpAddr)>,
    /// The sockets that receive the node's own packets, after all hooks (raw(7)).
    receivers: Vec<OwnedFd>,
    /// The sockets that send packets of the node itself, for IPv4 and IPv6.
    senders: [OwnedFd; 2],
}

/// One end of a packet's way through a node.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// A pod's link.
    Pod(String),
    Outside,
    /// The node's own network.
    Node,
}

/// A packet's way through one node.
#[derive(Debug, Clone)]
struct Hop {
    node: usize,
    from: End,
    to: End,
}

impl HostCluster {
    /// Nodes with these names and without pods. From then on, the calling thread runs on one processor, so that all of
    /// its packets go through one queue and keep their order.
    ///
    /// # Errors
    /// An error of the kernel; it needs root.
    pub fn new(names: &[&str], config: &Config) -> Result<Self> {
        keep_to_one_processor()?;
        let nodes = (1..).zip(names).map(|(number, name)| Node::new(name, number, config));
        let nodes = nodes.collect::<Result<_>>()?;
        Ok(Self { nodes, relay: Router::new(0)?, objects: BTreeMap::new(), next_tag: 0 })
    }

    /// Changes the cluster to these objects: connects new pods, and applies each node's deltas. A node's addresses are
    /// those of its Node object.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn change(&mut self, objects: &Objects) -> Result<Vec<Report>> {
        let new: BTreeMap<Key, Value> = objects.iter().cloned().collect();
        let old = std::mem::replace(&mut self.objects, new);
        let change = |node: &mut Node| node.change(&old, &self.objects);
        self.nodes.iter_mut().map(change).collect()
    }

    /// Sends a packet of each flow, and returns the indices of those that arrived. No flow may be the answer to
    /// another one.
    ///
    /// # Errors
    /// A packet could not be sent, or neither end of a flow is a pod or a node.
    pub fn passed(&mut self, flows: &[Flow]) -> Result<BTreeSet<usize>> {
        // A flow of an earlier case, or its answer, must not count as established.
        for node in &mut self.nodes {
            node.conntrack.flush()?;
        }
        let mut passed = BTreeSet::new();
        for (number, batch) in flows.chunks(BATCH).enumerate() {
            passed.extend(self.batch(batch)?.into_iter().map(|index| number * BATCH + index));
        }
        Ok(passed)
    }

    fn batch(&mut self, flows: &[Flow]) -> Result<BTreeSet<usize>> {
        let first = self.next_tag;
        self.next_tag += flows.len() as u32;
        let (mut packets, mut second_hops) = (BTreeMap::new(), BTreeMap::new());
        for (tag, flow) in (first..).zip(flows) {
            let mut hops = self.hops(flow)?.into_iter();
            let hop = hops.next().context("a flow without hops")?;
            packets.insert(tag, (hop, frames::frame(flow, OTHERS.0, tag)));
            second_hops.extend(hops.next().map(|hop| (tag, hop)));
        }
        let mut arrived = self.send(&packets)?;
        let on_other_node = |(tag, hop)| Some((tag, (hop, arrived.remove(&tag)?)));
        let packets = second_hops.into_iter().filter_map(on_other_node).collect();
        arrived.extend(self.send(&packets)?);
        Ok(arrived.keys().map(|tag| (tag - first) as usize).collect())
    }

    /// The way of a flow: through the node of the sender, and through that of the receiver if it is another one.
    fn hops(&self, flow: &Flow) -> Result<Vec<Hop>> {
        let hops = match (self.end(flow.source), self.end(flow.destination)) {
            (Some((node, from)), Some((other, to))) if node == other => vec![Hop { node, from, to }],
            (Some((node, from)), Some((other, to))) => {
                vec![Hop { node, from, to: End::Outside }, Hop { node: other, from: End::Outside, to }]
            }
            (Some((node, from)), None) => vec![Hop { node, from, to: End::Outside }],
            (None, Some((node, to))) => vec![Hop { node, from: End::Outside, to }],
            (None, None) => bail!("{flow:?}: neither end is a pod or a node"),
        };
        Ok(hops)
    }

    /// The node that an address belongs to, and the end that it is there.
    fn end(&self, address: IpAddr) -> Option<(usize, End)> {
        self.nodes.iter().enumerate().find_map(|(index, node)| Some((index, node.end(address)?)))
    }

    /// Sends packets by their tags, and returns those that arrived at the end of their hop, as they arrived.
    fn send(&self, packets: &BTreeMap<u32, (Hop, Vec<u8>)>) -> Result<BTreeMap<u32, Vec<u8>>> {
        for (hop, frame) in packets.values() {
            self.nodes[hop.node].send(&hop.from, frame)?;
        }
        self.relay.wait_for_packets()?;
        let mut arrived = BTreeMap::new();
        for (index, node) in self.nodes.iter().enumerate() {
            for (end, frame) in node.received()? {
                let tag = frames::tag(&frame);
                // A node's own errors (ICMP) repeat the tag at the sender's end.
                if packets.get(&tag).is_some_and(|(hop, _)| hop.node == index && hop.to == end) {
                    arrived.insert(tag, frame);
                }
            }
        }
        Ok(arrived)
    }
}

impl Router {
    fn new(number: u8) -> Result<Self> {
        let (namespace, others) = (NetNs::create()?, NetNs::create()?);
        let mac = MacAddress([2, 0, 0, 0, 1, number]);
        others.run(|| sysctl::ensure("net/ipv6/conf/default/disable_ipv6", "1"))??;
        namespace.run(|| -> Result<()> {
            node_parameters()?;
            sysctl::ensure("net/ipv4/ip_forward", "1")?;
            sysctl::ensure("net/ipv4/icmp_echo_ignore_all", "1")?;
            // Nobody else has its addresses.
            sysctl::ensure("net/ipv6/conf/default/accept_dad", "0")?;
            Ok(())
        })??;
        let outside = end(&namespace, (OUTSIDE, mac), &others, OUTSIDE)?;
        let mut routes = namespace.run(RouteSocket::open)??;
        let link = namespace.run(|| interface_index(OUTSIDE))??;
        for (gateway, all) in GATEWAYS.into_iter().zip(["0.0.0.0/0", "::/0"]) {
            let gateway: IpAddr = gateway.parse()?;
            routes.change(&Change::SetNeighbour(Neighbour { link, address: gateway, mac: OTHERS }))?;
            routes.change(&Change::AddRoute(Route::via(all.parse()?, gateway, link, ROUTE_PROTOCOL)))?;
        }
        Ok(Self { namespace, mac, routes, outside, others })
    }

    /// Sends a packet through the router and waits until it has returned.
    fn wait_for_packets(&self) -> Result<()> {
        let [source, destination] = ["198.51.100.250", "198.51.100.251"].map(str::parse);
        let (source, destination) = (source?, destination?);
        let (source_port, destination_port, icmp) = (7, 7, None);
        let flow = Flow { source, destination, protocol: Protocol::UDP, source_port, destination_port, icmp };
        let tag = u32::MAX;
        ensure!(self.outside.send(&frames::frame(&flow, self.mac.0, tag))?, "no room for a packet");
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if received(&self.outside)?.iter().any(|frame| frames::tag(frame) == tag) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the packet through the relay did not arrive");
            std::thread::yield_now();
        }
    }
}

impl Node {
    fn new(name: &str, number: u8, config: &Config) -> Result<Self> {
        let router = Router::new(number)?;
        let open = || -> Result<_> {
            let receivers = PROTOCOLS.into_iter().flat_map(|protocol| {
                [AddressFamily::INET, AddressFamily::INET6].map(|family| raw_socket(family, protocol))
            });
            Ok((
                Stateful::new(open(config.clone())?),
                Conntrack::open()?,
                receivers.collect::<Result<_>>()?,
                [
                    raw_socket(AddressFamily::INET, HEADER_INCLUDED)?,
                    raw_socket(AddressFamily::INET6, HEADER_INCLUDED)?,
                ],
            ))
        };
        let (dataplane, conntrack, receivers, senders) = router.namespace.run(open)??;
        Ok(Self {
            name: name.to_owned(),
            router,
            calc: Calc::new(name),
            dataplane,
            conntrack,
            own: BTreeSet::new(),
            pods: BTreeMap::new(),
            neighbours: BTreeSet::new(),
            receivers,
            senders,
        })
    }

    fn change(&mut self, old: &BTreeMap<Key, Value>, new: &BTreeMap<Key, Value>) -> Result<Report> {
        self.set_addresses(new)?;
        let deltas = update_calc(&mut self.calc, old, new);
        let pods: Vec<(String, Vec<IpAddr>)> = self
            .calc
            .state()
            .endpoints
            .values()
            .map(|endpoint| (endpoint.host_interface.to_string(), endpoint.addresses.to_vec()))
            .collect();
        for (link, addresses) in pods {
            self.connect(&link, &addresses)?;
        }
        Ok(self.router.namespace.run(|| self.dataplane.apply(&deltas))?)
    }

    /// Gives the outside interface the addresses of the Node object. Addresses that were there before stay.
    fn set_addresses(&mut self, objects: &BTreeMap<Key, Value>) -> Result<()> {
        let key = Key::global(Kind::Node, self.name.as_str());
        let Some(value) = objects.get(&key) else { return Ok(()) };
        let Ok(Resource::Node(node)) = Resource::read(&key, value) else { bail!("{key} cannot be read") };
        let v4 = node.address().map(IpAddr::V4);
        let link = self.router.namespace.run(|| interface_index(OUTSIDE))??;
        for address in v4.into_iter().chain(node.address_v6().map(IpAddr::V6)) {
            if self.own.insert(address) {
                let prefix_length = if address.is_ipv4() { 32 } else { 128 };
                self.router.routes.change(&Change::AddAddress(Address { link, address, prefix_length }))?;
            }
        }
        Ok(())
    }

    /// Ensures that there is a cable of this name whose other end has the addresses.
    fn connect(&mut self, link: &str, addresses: &[IpAddr]) -> Result<()> {
        if !self.pods.contains_key(link) {
            let Router { namespace, mac, others, .. } = &self.router;
            self.pods.insert(link.to_owned(), end(namespace, (link, *mac), others, link)?);
        }
        for address in addresses {
            if self.neighbours.insert((link.to_owned(), *address)) {
                let link = self.router.namespace.run(|| interface_index(link))??;
                let neighbour = Neighbour { link, address: *address, mac: OTHERS };
                self.router.routes.change(&Change::SetNeighbour(neighbour))?;
            }
        }
        Ok(())
    }

    fn end(&self, address: IpAddr) -> Option<End> {
        if self.own.contains(&address) {
            return Some(End::Node);
        }
        let mut endpoints = self.calc.state().endpoints.values();
        let endpoint = endpoints.find(|endpoint| endpoint.addresses.contains(&address))?;
        Some(End::Pod(endpoint.host_interface.to_string()))
    }

    /// Sends a packet from one of the node's ends. The kernel reports an error if policy drops a packet of the node
    /// itself.
    fn send(&self, from: &End, frame: &[u8]) -> Result<()> {
        let socket = match from {
            End::Pod(link) => self.pods.get(link).with_context(|| format!("there is no cable {link}"))?,
            End::Outside => &self.router.outside,
            End::Node => return self.send_own(&frame[ETHERNET_HEADER..]),
        };
        let frame = [&self.router.mac.0[..], &frame[self.router.mac.0.len()..]].concat();
        ensure!(socket.send(&frame)?, "no room for a packet");
        Ok(())
    }

    fn send_own(&self, packet: &[u8]) -> Result<()> {
        let (socket, to) = match (packet[0] >> 4, packet.get(16..20), packet.get(24..40)) {
            (4, Some(to), _) => (&self.senders[0], IpAddr::from(<[u8; 4]>::try_from(to)?)),
            (6, _, Some(to)) => (&self.senders[1], IpAddr::from(<[u8; 16]>::try_from(to)?)),
            _ => bail!("a packet without addresses"),
        };
        match net::sendto(socket, packet, SendFlags::empty(), &SocketAddr::from((to, 0))) {
            Ok(_) | Err(Errno::PERM) => Ok(()),
            Err(error) => Err(error).with_context(|| format!("a packet of the node to {to}")),
        }
    }

    /// The packets that have arrived at the node's ends.
    fn received(&self) -> Result<Vec<(End, Vec<u8>)>> {
        let mut all = Vec::new();
        let outside = received(&self.router.outside)?;
        all.extend(outside.into_iter().map(|frame| (End::Outside, frame)));
        for (link, socket) in &self.pods {
            let frames = received(socket)?;
            all.extend(frames.into_iter().map(|frame| (End::Pod(link.clone()), frame)));
        }
        let mut buffer = [0; 2048];
        for socket in &self.receivers {
            loop {
                match net::recv(socket, &mut buffer, RecvFlags::empty()) {
                    Ok((length, _)) => all.push((End::Node, buffer[..length].to_vec())),
                    Err(Errno::AGAIN) => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(all)
    }
}

fn received(socket: &PacketSocket) -> Result<Vec<Vec<u8>>> {
    let mut buffer = [0; 2048];
    let mut frames = Vec::new();
    while let Some(length) = socket.receive(&mut buffer)? {
        frames.push(buffer[..length].to_vec());
    }
    Ok(frames)
}

fn raw_socket(family: AddressFamily, protocol: u8) -> Result<OwnedFd> {
    let protocol = net::Protocol::from_raw(u32::from(protocol).try_into()?);
    Ok(net::socket_with(family, SocketType::RAW, SocketFlags::NONBLOCK, Some(protocol))?)
}
