//! Load balancers (docs/hns.md, Load balancers): packets from a pod or from the node to a Service's address go to a backend,
//! and the answers come from the Service's address.
//!
//! The translation happens at the port of the pod that connects: the destination becomes the backend's, and without
//! direct server return (DSR) the source becomes the load balancer's own address. A load balancer without address (a NodePort)
//! has the node's. Packets to it that pods do not send arrive at the node's own stack, which hands them over to the switch
//! under another address ([`hand_over`]), and translates the answers back. Where the sources are silent, the
//! emulator does this:
//! - A hash over the fields named by DistributionType chooses the backend. A connection keeps its backend. Clients
//!   change a load balancer by deleting it; this ends its connections, and only the first segment of TCP begins a new
//!   one.
//! - ACLs see the same address in both directions, the backend's or the Service's
//!   ([`EgressSees`](crate::EgressSees)).
//! - If a pod has used one port for two Services and both connections would look the same at the backend, the second
//!   one goes to another backend, or nowhere.
//! - Fragments are not reassembled, so fragments to a Service are dropped. ICMP is not translated (docs/hns.md, Load
//!   balancers).
//!
//! Not implemented: PreserveDip, SCTP, and the blocks of 64 ports for which load balancers without DSR compete. A pod that reaches itself through a Service gets a packet with
//! its own address as the source, as without the policy that plugins call loopbackDSR.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use tortie_hcn::Guid;
use tortie_hcn::schema::{LoadBalancer, LoadBalancerFlags, LoadBalancerPortMapping};

use super::checksum::{TCP, UDP, finish};
use super::packet::{IpPacket, u16_at};
use crate::addresses::ipv4;
use crate::flows::{Key, lifetime};
use crate::state::State;

/// The flag of a port mapping that keeps the destination (hcsshim `hcn/hcnloadbalancer.go`).
const PRESERVE_DIP: u32 = 8;
/// The source ports for connections whose source is translated: the dynamic range (docs/hns.md, Load balancers).
const DYNAMIC: std::ops::RangeInclusive<u16> = 49_152..=65_535;
/// Beyond this number of connections, expired ones are removed.
const MANY: usize = 4096;

/// An address and a port.
pub(super) type Socket = (Ipv4Addr, u16);

/// Where packets to a Service go.
#[derive(Debug, Clone)]
pub(crate) struct Front {
    balancer: Guid,
    backends: Vec<Backend>,
    distribution: u32,
    /// The source address that backends see without DSR.
    source: Option<Ipv4Addr>,
    stand_in: Option<StandIn>,
}

#[derive(Debug, Clone)]
struct Backend {
    socket: Socket,
    is_remote: bool,
}

/// The source address of connections to backends of other nodes of an L2Bridge network. They leave by the node's own stack, which would
/// refuse its own address, and would keep the answers to it. It replaces this address by its own.
#[derive(Debug, Clone)]
pub(super) struct StandIn {
    /// The node's own addresses.
    pub(super) own: Vec<Ipv4Addr>,
    pub(super) address: Ipv4Addr,
}

/// By protocol, address and port.
pub(crate) type Fronts = BTreeMap<(u8, Ipv4Addr, u16), Front>;

/// The address by which the node's stack hands packets to its own ports over to the switch of a network. Nobody else uses it.
pub(super) fn hand_over(network: Guid) -> Ipv4Addr {
    let [a, b, ..] = network.as_bytes();
    // 169.254.1.0/24 has the next hops of interfaces.
    Ipv4Addr::new(169, 254, 2 + a % 126, *b)
}

/// The address that stands for the node's own ([`StandIn`]).
pub(super) fn stand_in(network: Guid) -> Ipv4Addr {
    let [a, b, ..] = network.as_bytes();
    Ipv4Addr::new(169, 254, 128 + a % 126, *b)
}

/// The Services as the node's packets name them: the node's own address is that of the hand-over.
pub(super) fn of_node(fronts: &Fronts, network: Guid, node: Ipv4Addr) -> Fronts {
    let address = |vip: Ipv4Addr| if vip == node { hand_over(network) } else { vip };
    fronts
        .iter()
        .map(|((protocol, vip, port), front)| ((*protocol, address(*vip), *port), front.clone()))
        .collect()
}

/// The Services whose backends are endpoints of the network. `node` is the node's address.
pub(super) fn fronts(network: Guid, state: &State, node: Ipv4Addr, stand_in: Option<&StandIn>) -> Fronts {
    let mut fronts = Fronts::new();
    // The switch translates IPv4 only.
    let is_ipv4 =
        |balancer: &&std::sync::Arc<LoadBalancer>| balancer.flags & LoadBalancerFlags::ENABLE_IPV6 == 0;
    for balancer in state.load_balancers.values().filter(is_ipv4) {
        let backend = |endpoint: &Guid| {
            // Endpoints that no longer exist get nothing, even if the load balancer still names them.
            let endpoint = state.endpoint(*endpoint).ok()?;
            let (address, _) = ipv4(endpoint)?;
            (endpoint.host_compute_network == network).then_some((address, endpoint.is_remote()))
        };
        let backends: Vec<(Ipv4Addr, bool)> =
            balancer.host_compute_endpoints.iter().filter_map(backend).collect();
        if backends.is_empty() {
            continue;
        }
        let vips = balancer.frontend_vips.iter().filter_map(|vip| vip.parse().ok());
        let own = balancer.frontend_vips.is_empty().then_some(node);
        for vip in vips.chain(own) {
            for mapping in balancer.port_mappings.iter().filter(|mapping| mapping.flags & PRESERVE_DIP == 0) {
                let Some(protocol) = [TCP, UDP].into_iter().find(|it| mapping.protocol == u32::from(*it))
                else {
                    continue;
                };
                let key = (protocol, vip, mapping.external_port);
                let front = Front::new(balancer, mapping, &backends, node);
                fronts.insert(key, Front { stand_in: stand_in.cloned(), ..front });
            }
        }
    }
    fronts
}

impl Front {
    fn new(
        balancer: &LoadBalancer,
        mapping: &LoadBalancerPortMapping,
        backends: &[(Ipv4Addr, bool)],
        node: Ipv4Addr,
    ) -> Front {
        let source = || balancer.source_vip.parse().unwrap_or(node);
        let backend = |&(address, is_remote): &(Ipv4Addr, bool)| Backend {
            socket: (address, mapping.internal_port),
            is_remote,
        };
        Front {
            balancer: balancer.id,
            backends: backends.iter().map(backend).collect(),
            distribution: mapping.distribution_type,
            source: (!balancer.is_direct()).then(source),
            stand_in: None,
        }
    }

    pub(crate) fn balancer(&self) -> Guid {
        self.balancer
    }

    fn has(&self, backend: Socket) -> bool {
        self.backends.iter().any(|other| other.socket == backend)
    }

    /// Whether backends see this address as the source.
    pub(crate) fn hides_behind(&self, address: IpAddr) -> bool {
        self.source.is_some_and(|source| address == source)
    }

    /// The backends, starting with the one for a new connection.
    fn in_turn(&self, ends: &Ends) -> impl Iterator<Item = &Backend> {
        let mut hash = DefaultHasher::new();
        match self.distribution {
            0 => ends.hash(&mut hash),
            1 => (ends.protocol, ends.source.0).hash(&mut hash),
            _ => ends.source.0.hash(&mut hash),
        }
        let first = (hash.finish() % self.backends.len() as u64) as usize;
        self.backends.iter().cycle().skip(first).take(self.backends.len())
    }

    /// The source address of a new connection to a backend, if it is not the client's.
    fn source_to(&self, backend: &Backend, client: Ipv4Addr) -> Option<Ipv4Addr> {
        let source = self.source.unwrap_or(client);
        let replaces = |it: &&StandIn| backend.is_remote && it.own.contains(&source);
        self.stand_in.as_ref().filter(replaces).map(|it| it.address).or(self.source)
    }
}

/// The protocol, addresses and ports of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Ends {
    protocol: u8,
    source: Socket,
    destination: Socket,
}

impl Ends {
    /// The ends of a packet that can be translated: IPv4 only.
    pub(super) fn of(packet: &IpPacket<'_>) -> Option<Ends> {
        let IpPacket::V4(packet) = packet else { return None };
        let (protocol, payload) = (packet.protocol(), packet.payload());
        if ![TCP, UDP].contains(&protocol) || packet.is_fragment() {
            return None;
        }
        let source = (packet.source(), u16_at(payload, 0)?);
        Some(Ends { protocol, source, destination: (packet.destination(), u16_at(payload, 2)?) })
    }

    /// Those of a flow of IPv4.
    fn of_flow(key: &Key) -> Option<Ends> {
        let Key { protocol, local: IpAddr::V4(local), remote: IpAddr::V4(remote), .. } = *key else {
            return None;
        };
        Some(Ends { protocol, source: (local, key.local_port), destination: (remote, key.remote_port) })
    }

    pub(super) fn protocol(&self) -> u8 {
        self.protocol
    }

    pub(super) fn destination(&self) -> Socket {
        self.destination
    }

    pub(super) fn back(self) -> Ends {
        Ends { source: self.destination, destination: self.source, ..self }
    }
}

/// A connection of a pod or of the node to a Service.
#[derive(Debug, Clone, Copy)]
pub(super) struct Connection {
    balancer: Guid,
    /// Whether it came from the node's stack.
    of_node: bool,
    /// As sent by the client.
    sent: Ends,
    /// As received by the backend.
    got: Ends,
    last_seen: Instant,
}

impl Connection {
    /// The pod's packet with the backend's address instead of the Service's, and with the translated source.
    pub(super) fn for_backend(&self, packet: &[u8]) -> Vec<u8> {
        with(packet, self.sent.source, self.got.destination)
    }

    /// A packet of the client's side in the form that goes to the backend, whichever addresses it has.
    pub(super) fn on_the_way(&self, packet: &[u8]) -> Vec<u8> {
        with(packet, self.got.source, self.got.destination)
    }

    /// A packet of the other side with the backend's address and the pod's own.
    pub(super) fn answer_by_backend(&self, packet: &[u8]) -> Vec<u8> {
        with(packet, self.got.destination, self.sent.source)
    }

    /// A packet of the other side in the form that the pod receives: from the Service's address.
    pub(super) fn answer_by_service(&self, packet: &[u8]) -> Vec<u8> {
        with(packet, self.sent.destination, self.sent.source)
    }

    /// Whether the node's stack is the client's side.
    pub(super) fn is_of_node(&self) -> bool {
        self.of_node
    }

    /// Whether a flow at the pod's port belongs to this connection, whichever address is seen there.
    fn has(&self, flow: &Ends) -> bool {
        let seen = Ends { source: self.sent.source, ..self.got };
        *flow == self.sent || *flow == seen
    }
}

/// A packet with these addresses and ports, and with correct checksums.
fn with(packet: &[u8], source: Socket, destination: Socket) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let header = usize::from(packet[0] & 0x0f) * 4;
    packet[12..16].copy_from_slice(&source.0.octets());
    packet[16..20].copy_from_slice(&destination.0.octets());
    packet[header..header + 2].copy_from_slice(&source.1.to_be_bytes());
    packet[header + 2..header + 4].copy_from_slice(&destination.1.to_be_bytes());
    finish(&mut packet);
    packet
}

/// Who sends to a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sender {
    Pod,
    Node,
}

/// The connections of a node and of its pods to Services.
#[derive(Debug, Default)]
pub(super) struct Connections {
    by_sent: HashMap<Ends, Connection>,
    /// The connection by the ends that the backend receives.
    by_got: HashMap<Ends, Ends>,
}

/// What happens to a packet.
pub(super) enum Balancing {
    /// It goes to its destination.
    Unchanged,
    /// It belongs to this connection.
    ToBackend(Connection),
    /// It is addressed to a Service without a backend.
    NoBackend,
}

impl Connections {
    /// Handles a packet that a pod or the node sends.
    pub(super) fn leaves(
        &mut self,
        fronts: &Fronts,
        packet: &IpPacket<'_>,
        sender: Sender,
        now: Instant,
    ) -> Balancing {
        let Some(sent) = Ends::of(packet) else { return Balancing::Unchanged };
        let (vip, port) = sent.destination;
        let Some(front) = fronts.get(&(sent.protocol, vip, port)) else { return Balancing::Unchanged };
        let known = self.by_sent.get(&sent).filter(|known| known.is_alive(now)).copied();
        // A new connection uses only current backends.
        let fits = |known: &Connection| !opens(packet) || front.has(known.got.destination);
        if let Some(known) = known.filter(fits) {
            let connection = Connection { last_seen: now, ..known };
            self.by_sent.insert(sent, connection);
            return Balancing::ToBackend(connection);
        }
        self.forget(&sent);
        // A packet in the middle of an unknown connection is not translated.
        let begins = sent.protocol != TCP || opens(packet);
        let connection = begins.then(|| self.begin(front, sent, sender, now)).flatten();
        connection.map_or(Balancing::NoBackend, Balancing::ToBackend)
    }

    /// The connection that a packet to this node, or to one of its pods, answers.
    pub(super) fn answered_by(&mut self, packet: &IpPacket<'_>, now: Instant) -> Option<Connection> {
        let sent = self.by_got.get(&Ends::of(packet)?.back())?;
        let connection = self.by_sent.get_mut(sent).filter(|connection| connection.is_alive(now))?;
        connection.last_seen = now;
        Some(*connection)
    }

    /// The connection that a flow of a port belongs to.
    pub(super) fn of_flow(&self, key: &Key) -> Option<Connection> {
        let flow = Ends::of_flow(key)?;
        self.by_sent.values().find(|connection| connection.has(&flow)).copied()
    }

    /// Keeps connections by their load balancer, and those of pods also by the pod's address.
    pub(super) fn keep(&mut self, stays: impl Fn(Guid, Option<Ipv4Addr>) -> bool) {
        self.retain(|connection| {
            let pod = (!connection.of_node).then_some(connection.sent.source.0);
            stays(connection.balancer, pod)
        });
    }

    fn begin(&mut self, front: &Front, sent: Ends, sender: Sender, now: Instant) -> Option<Connection> {
        if self.by_sent.len() >= MANY {
            self.retain(|connection| connection.is_alive(now));
        }
        let got = front.in_turn(&sent).find_map(|backend| {
            let free = |source: Socket| {
                let got = Ends { source, destination: backend.socket, ..sent };
                (!self.by_got.contains_key(&got)).then_some(got)
            };
            match front.source_to(backend, sent.source.0) {
                None => free(sent.source),
                Some(address) => DYNAMIC.into_iter().find_map(|port| free((address, port))),
            }
        })?;
        let of_node = sender == Sender::Node;
        let connection = Connection { balancer: front.balancer, of_node, sent, got, last_seen: now };
        self.by_sent.insert(sent, connection);
        self.by_got.insert(got, sent);
        Some(connection)
    }

    fn forget(&mut self, sent: &Ends) {
        if let Some(old) = self.by_sent.remove(sent) {
            self.by_got.remove(&old.got);
        }
    }

    fn retain(&mut self, stays: impl Fn(&Connection) -> bool) {
        self.by_sent.retain(|_, connection| stays(connection));
        let by_sent = &self.by_sent;
        self.by_got.retain(|_, sent| by_sent.contains_key(sent));
    }
}

impl Connection {
    fn is_alive(&self, now: Instant) -> bool {
        now.duration_since(self.last_seen) < lifetime(self.sent.protocol)
    }
}

/// Whether it is the first segment of a TCP connection.
fn opens(packet: &IpPacket<'_>) -> bool {
    const SYN: u8 = 0x02;
    const ACK: u8 = 0x10;
    packet.protocol() == TCP && packet.payload().get(13).is_some_and(|flags| flags & (SYN | ACK) == SYN)
}
