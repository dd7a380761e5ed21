//! A mixed cluster with real frames: two Linux nodes with their dataplane on this kernel, and two Windows nodes, each
//! an emulated HNS with its switch and the Windows dataplane. All are on one underlay with VXLAN between them, and
//! calc computes their states.
//!
//! ```text
//! pods ═══ cali… ┌────┐ eth0 ═══╗ bridge ╔═══ eth0 ┌────┐ switch ═══ eth0 of pods
//!                │ l1 │         ╠════════╣         │ w1 │
//! pods ═══ cali… ├────┤ eth0 ═══╝        ╚═══ eth0 ├────┤ switch ═══ eth0 of pods
//!                │ l2 │                            │ w2 │
//!                └────┘                            └────┘
//! ```
//! Pods have IPv4 only, and no kernel answers for them, so every packet begins a new flow. Everything needs root, and
//! disappears with the value.

mod fence;
mod linux;
mod placed;
mod services;
mod underlay;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use tortie_api::kubernetes::Node as NodeResource;
use tortie_api::net::IpVersion;
use tortie_api::{Key, Kind};
use tortie_calc::{Calc, vtep_mac};
use tortie_dataplane::{Delta, EndpointId, MacAddress, NodeState, Report};
use tortie_hns_emulator::Config;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::packet::PacketSocket;
use tortie_policy::program::Flow;

use crate::clusters::Objects;
use crate::emulator::Rendering;
use crate::frames;
use crate::links::keep_to_one_processor;
use crate::update::update_calc;

use self::fence::{Marker, Question};
pub use self::placed::{Addresses, NODES, System, addresses, between_pods, placed};
pub use self::services::{Arrival, Balanced, Proxy, Step};

/// The VNI of Calico's VXLAN.
const VNI: u32 = 4096;
/// How long to wait for an expected packet.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The number of packets in flight: fewer than fit into the queues on their way.
const BATCH: usize = 100;
/// The bits of a tag.
const TAGS: u32 = 0x00ff_ffff;

/// The nodes and their state.
pub struct MixedCluster {
    nodes: Vec<Node>,
    /// The objects of the overlay.
    overlay: Objects,
    objects: BTreeMap<Key, Value>,
    pods: BTreeMap<IpAddr, Pod>,
    /// The number of changes so far.
    changes: u32,
    _underlay: NetNs,
}

struct Node {
    name: &'static str,
    calc: Calc,
    host: Box<dyn Host>,
    marker: Marker,
}

/// The operations of a node's system.
trait Host {
    /// Connects a pod as CNI would.
    fn connect(&mut self, at: &Location, address: Ipv4Addr) -> Result<End>;
    /// Disconnects it.
    fn disconnect(&mut self, at: &Location) -> Result<()>;
    /// Applies deltas on the dataplane.
    fn apply(&mut self, deltas: &[Delta]) -> Result<Report>;
    /// Balances connections to exactly these Services. `providers` has the underlay address of each backend's node.
    fn balance(&mut self, services: &[Balanced], providers: &BTreeMap<Ipv4Addr, Ipv4Addr>) -> Result<()>;
    /// How many rules of pods name sets, if that depends on the rendering.
    fn rules_that_name_sets(&self) -> Result<usize>;
}

/// The location of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The index of the node in [`NODES`].
    pub node: usize,
    /// The pod.
    pub endpoint: EndpointId,
    container_id: String,
    host_interface: String,
}

struct Pod {
    at: Location,
    end: End,
}

/// A pod's end of its cable.
struct End {
    socket: PacketSocket,
    mac: MacAddress,
    /// The next hop of its frames.
    router: MacAddress,
    /// Its namespace.
    _namespace: NetNs,
}

impl MixedCluster {
    /// The nodes, without pods; `config` configures HNS. From then on, the calling thread and the switches run on one
    /// processor, so that packets keep their order.
    ///
    /// # Errors
    /// An error of the kernel or HNS; it needs root.
    pub fn new(config: &Config) -> Result<Self> {
        keep_to_one_processor()?;
        let underlay = underlay::bridge()?;
        let (mut nodes, mut overlay) = (Vec::new(), vec![pool()]);
        for (number, (name, system)) in (1..).zip(NODES) {
            let (block, parent) = (placed::block(number - 1), underlay::address(number));
            let namespace = underlay::join(&underlay, number)?;
            let (host, tunnel, mac): (Box<dyn Host>, _, _) = match system {
                System::Linux => {
                    (Box::new(linux::Node::new(&namespace)?), block.network(), vtep_mac(name, IpVersion::V4))
                }
                System::Windows => {
                    let config = Config { provider_address: parent, ..config.clone() };
                    let (node, vtep) = windows::Node::new(&namespace, block, config)?;
                    (
                        Box::new(node),
                        vtep.gateway,
                        vtep.router_mac.unwrap_or_else(|| panic!("the network is an overlay")),
                    )
                }
            };
            overlay.extend(node_objects(name, parent, block, (tunnel, mac)));
            nodes.push((name, host, namespace, tunnel));
        }
        let mut calcs: Vec<_> = nodes.into_iter().map(|node| (calc_of(node.0), node)).collect();
        let objects: BTreeMap<_, _> = overlay.iter().cloned().collect();
        let mut nodes = Vec::new();
        for (calc, (_, host, ..)) in &mut calcs {
            let report = host.apply(&update_calc(calc, &BTreeMap::new(), &objects))?;
            ensure!(report == Report::default(), "{report:?}");
        }
        for (calc, (name, host, namespace, tunnel)) in calcs {
            nodes.push(Node { name, calc, host, marker: Marker::new(namespace, tunnel)? });
        }
        fence::wait_for_tunnels(nodes.iter().map(|node| &node.marker))?;
        Ok(Self { nodes, overlay, objects, pods: BTreeMap::new(), changes: 0, _underlay: underlay })
    }

    /// The state of the nodes according to calc.
    pub fn states(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().map(|node| node.calc.state())
    }

    /// How many ACLs of Windows nodes name sets.
    ///
    /// # Errors
    /// An error of HNS.
    pub fn acls_that_name_sets(&self) -> Result<usize> {
        self.nodes.iter().map(|node| node.host.rules_that_name_sets()).sum()
    }

    /// The location of an address, if it belongs to a pod.
    #[must_use]
    pub fn location(&self, address: IpAddr) -> Option<&Location> {
        self.pods.get(&address).map(|pod| &pod.at)
    }

    /// The addresses of the pods.
    pub fn pods(&self) -> impl Iterator<Item = IpAddr> {
        self.pods.keys().copied()
    }

    /// The nodes as stored in the datastore.
    pub fn node_objects(&self) -> impl Iterator<Item = &(Key, Value)> {
        self.overlay.iter().filter(|(key, _)| key.kind == Kind::Node)
    }

    /// A flow from a node's end of the tunnel to a pod, sent by the node's own kernel.
    #[must_use]
    pub fn from_node(&self, node: usize, to: IpAddr, destination_port: u16) -> Flow {
        self.nodes[node].marker.flow(to, destination_port)
    }

    /// Changes the cluster to these objects, which must be [`placed`], with this rendering of policy on Windows. All
    /// pods get new sandboxes, so no earlier flow is remembered.
    ///
    /// # Errors
    /// A pod could not be connected or disconnected.
    pub fn change(&mut self, objects: &Objects, rendering: Rendering) -> Result<Vec<Report>> {
        self.changes += 1;
        let mut new: BTreeMap<Key, Value> = self.overlay.iter().chain(objects).cloned().collect();
        rendering.ask_for(&mut new);
        for (key, value) in new.iter_mut().filter(|(key, _)| key.kind == Kind::WorkloadEndpoint) {
            value["spec"]["containerID"] = json!(format!("{}-{}-{}", self.changes, key.namespace, key.name));
        }
        let deltas: Vec<_> =
            self.nodes.iter_mut().map(|node| update_calc(&mut node.calc, &self.objects, &new)).collect();
        self.objects = new;
        self.connect()?;
        let apply = |(node, deltas): (&mut Node, Vec<Delta>)| node.host.apply(&deltas).context(node.name);
        self.nodes.iter_mut().zip(deltas).map(apply).collect()
    }

    fn connect(&mut self) -> Result<()> {
        for (address, pod) in std::mem::take(&mut self.pods) {
            self.nodes[pod.at.node].host.disconnect(&pod.at).with_context(|| address.to_string())?;
        }
        for (index, node) in self.nodes.iter_mut().enumerate() {
            for (id, endpoint) in &node.calc.state().endpoints {
                let at = Location {
                    node: index,
                    endpoint: id.clone(),
                    container_id: endpoint.container_id.to_string(),
                    host_interface: endpoint.host_interface.to_string(),
                };
                for address in &endpoint.addresses {
                    let IpAddr::V4(v4) = *address else { continue };
                    let end = node.host.connect(&at, v4).with_context(|| format!("{id} of {}", node.name))?;
                    let taken = self.pods.insert(*address, Pod { at: at.clone(), end });
                    ensure!(taken.is_none(), "two pods have the address {address}");
                }
            }
        }
        Ok(())
    }

    /// Sends a packet of each flow, and returns the indices of those that arrived. No flow may be the answer to
    /// another one.
    ///
    /// # Errors
    /// A packet could not be sent, or arrived at the wrong place; or a packet that is not subject to policy did not
    /// arrive.
    pub fn passed(&self, flows: &[Flow]) -> Result<BTreeSet<usize>> {
        let mut passed = BTreeSet::new();
        for (number, batch) in flows.chunks(BATCH).enumerate() {
            for (index, Arrival { at, .. }) in self.send(batch, Step::Begins)? {
                ensure!(at == batch[index].destination, "{:?} arrived at {at}", batch[index]);
                passed.insert(number * BATCH + index);
            }
        }
        Ok(passed)
    }

    fn send(&self, flows: &[Flow], step: Step) -> Result<BTreeMap<usize, Arrival>> {
        static SENT: AtomicU32 = AtomicU32::new(0);
        let mut sent = BTreeMap::new();
        for (index, flow) in flows.iter().enumerate() {
            let tag = SENT.fetch_add(1, Ordering::Relaxed) & TAGS;
            let node = || self.nodes.iter().find(|node| node.marker.is_source_of(flow));
            match (self.pods.get(&flow.source), node()) {
                (Some(Pod { end, .. }), _) => end.send(&services::frame(flow, step, end.router.0, tag))?,
                (None, Some(node)) => node.marker.send(flow, tag)?,
                (None, None) => bail!("{flow:?} is none of a pod, nor of what nodes can send"),
            }
            sent.insert(tag, index);
        }
        let mut arrived = self.fence()?;
        arrived.extend(self.drain()?);
        let known = |(tag, arrival)| Some((*sent.get(&tag)?, arrival));
        Ok(arrived.into_iter().filter_map(known).collect())
    }

    /// Waits until all packets have been received or dropped, and returns the arrivals.
    fn fence(&self) -> Result<Vec<(u32, Arrival)>> {
        let mut arrived = Vec::new();
        // What the switches have received from their pods...
        let windows = self.pods.iter().filter(|(_, pod)| NODES[pod.at.node].1 == System::Windows);
        for (address, pod) in windows {
            let IpAddr::V4(v4) = *address else { continue };
            let frames = pod.end.answered(v4, TIMEOUT)?;
            let frames = frames.with_context(|| format!("the switch does not answer {address}"))?;
            arrived.extend(frames.iter().filter_map(|frame| arrival(*address, frame)));
        }
        // ...is ahead of what is sent through the tunnels now. A packet that passes through a node needs one step
        // more than one that ends there, so this is done twice.
        for _ in 0..2 {
            fence::through_tunnels(self.nodes.iter().map(|node| &node.marker))?;
        }
        Ok(arrived)
    }

    fn drain(&self) -> Result<Vec<(u32, Arrival)>> {
        let (mut arrived, mut buffer) = (Vec::new(), [0; 2048]);
        for (address, pod) in &self.pods {
            while let Some(length) = pod.end.socket.receive(&mut buffer)? {
                arrived.extend(arrival(*address, &buffer[..length]));
            }
        }
        Ok(arrived)
    }
}

impl End {
    /// Sends a frame from the pod.
    fn send(&self, frame: &[u8]) -> Result<()> {
        let mut frame = frame.to_vec();
        frame[6..12].copy_from_slice(&self.mac.0);
        ensure!(self.socket.send(&frame)?, "there is no room for a packet to be sent");
        Ok(())
    }

    /// Sends the switch a request that it answers whatever policy says. After the answer, earlier packets have been
    /// handled, and the other received frames are returned; without an answer in that time, `None`.
    fn answered(&self, own: Ipv4Addr, patience: Duration) -> Result<Option<Vec<Vec<u8>>>> {
        let (mut frames, deadline) = (Vec::new(), Instant::now() + patience);
        let question = Question::new(self.mac, own);
        let mut buffer = [0; 2048];
        self.send(&question.frame())?;
        while Instant::now() < deadline {
            while let Some(length) = self.socket.receive(&mut buffer)? {
                let frame = &buffer[..length];
                if question.is_answered_by(frame) {
                    return Ok(Some(frames));
                }
                frames.push(frame.to_vec());
            }
            std::thread::yield_now();
        }
        Ok(None)
    }

    /// Waits until frames pass: the cable's queues become active some time after its ends are up.
    fn wait_until_live(&self, own: Ipv4Addr) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.answered(own, Duration::from_millis(10))?.is_none() {
            ensure!(Instant::now() < deadline, "the switch does not answer {own}");
        }
        Ok(())
    }
}

/// The arrival of a frame at a pod, by its tag.
fn arrival(at: IpAddr, frame: &[u8]) -> Option<(u32, Arrival)> {
    Some((frames::tag(frame), Arrival { at, flow: services::flow_of(frame)? }))
}

/// The Windows dataplane needs Services.
fn calc_of(name: &'static str) -> Calc {
    match NODES.iter().find(|(node, _)| *node == name) {
        Some((_, System::Windows)) => Calc::new(name).with_services(),
        _ => Calc::new(name),
    }
}

fn pool() -> (Key, Value) {
    let spec =
        json!({"cidr": placed::POOL, "vxlanMode": "Always", "ipipMode": "Never", "natOutgoing": false});
    (Key::global(Kind::IpPool, "pool"), json!({"metadata": {"name": "pool"}, "spec": spec}))
}

/// A node and its block, as stored in the datastore.
fn node_objects(
    name: &str,
    parent: Ipv4Addr,
    block: Ipv4Net,
    (tunnel, mac): (Ipv4Addr, MacAddress),
) -> [(Key, Value); 2] {
    let annotations = json!({
        NodeResource::ADDRESS: format!("{parent}/24"),
        NodeResource::VXLAN_ADDRESS: tunnel,
        NodeResource::VXLAN_MAC: mac.to_string(),
    });
    let node = json!({"metadata": {"name": name, "annotations": annotations}});
    let free: Vec<u32> = (0..1 << (32 - block.prefix_len())).collect();
    let cidr = block.to_string();
    let affine = json!({
        "cidr": cidr, "affinity": format!("host:{name}"),
        "allocations": vec![Value::Null; free.len()], "unallocated": free, "attributes": [],
    });
    [(Key::global(Kind::Node, name), node), (Key::global(Kind::IpamBlock, cidr), affine)]
}

/// The same namespace, by another handle.
fn again(namespace: &NetNs) -> Result<NetNs> {
    Ok(NetNs::open(&path_of(namespace))?)
}

fn path_of(namespace: &NetNs) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), namespace.as_fd().as_raw_fd()).into()
}
