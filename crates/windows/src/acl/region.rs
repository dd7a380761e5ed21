//! Regions: the packets that a rule concerns, as sets that can be intersected exactly.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::net::{Direction, IpVersion, Protocol};
use tortie_policy::program::{EntityMatch, IcmpMatch, Lookup, Member, Rule, SetId};

use super::peers::{Named, Peers, Term};
use super::ranges::{Addresses, Ports, Protocols};

/// All packets whose protocol, addresses and ports are in these sets. If a set of ports is not everything, the region
/// contains no protocol without ports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Region {
    /// The protocols.
    pub protocols: Protocols,
    /// The endpoint's side.
    pub local: Side,
    /// The peer's side.
    pub remote: Side,
}

/// One side of a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Side {
    /// The addresses.
    pub addresses: Peers,
    /// The ports.
    pub ports: Ports,
}

impl Side {
    fn all() -> Side {
        Side { addresses: Peers::all(), ports: Ports::all() }
    }

    fn and(&self, other: &Side) -> Side {
        Side { addresses: self.addresses.and(&other.addresses), ports: self.ports.and(&other.ports) }
    }

    fn is_within(&self, other: &Side) -> bool {
        self.addresses.is_within(&other.addresses) && self.ports.is_within(&other.ports)
    }

    fn is_empty(&self) -> bool {
        self.addresses.is_empty() || self.ports.is_empty()
    }
}

impl Region {
    /// Every packet.
    pub(crate) fn all() -> Region {
        Region { protocols: Protocols::ALL, local: Side::all(), remote: Side::all() }
    }

    /// The intersection; `None` if it is empty.
    pub(crate) fn and(&self, other: &Region) -> Option<Region> {
        let protocols = self.protocols.and(other.protocols);
        if protocols.is_empty() {
            return None;
        }
        let region =
            Region { protocols, local: self.local.and(&other.local), remote: self.remote.and(&other.remote) };
        (!region.is_empty()).then_some(region)
    }

    /// Whether no packet is in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.protocols.is_empty() || self.local.is_empty() || self.remote.is_empty()
    }

    /// Whether it is a subset of the other.
    pub(crate) fn is_within(&self, other: &Region) -> bool {
        self.protocols.is_within(other.protocols)
            && self.local.is_within(&other.local)
            && self.remote.is_within(&other.remote)
    }
}

/// What a rule matches.
#[derive(Debug, Default)]
pub(super) struct Matched {
    /// It matches every packet of these regions.
    pub exact: Vec<Region>,
    /// It matches some packets of these regions, but an ACL cannot express which ones.
    pub vague: Vec<Region>,
}

/// The endpoint of the list, and whether sets may be named.
#[derive(Debug)]
pub(super) struct View<'a, L> {
    /// The family of the packets.
    pub family: IpVersion,
    /// The endpoint's own addresses.
    pub own: &'a Addresses,
    /// Whether peers are named by sets, as in rules; otherwise their addresses are listed.
    pub by_name: bool,
    /// Finds policies and sets.
    pub lookup: &'a L,
}

impl<L: Lookup> View<'_, L> {
    /// A set by its name, or its current members.
    pub(super) fn term(&self, named: Named) -> Term {
        if self.by_name {
            Term::Named(named)
        } else {
            Term::Literal(named.addresses(self.family, self.lookup))
        }
    }
}

// Implemented by hand, because the target of `lookup` need not be cloned.
impl<L> Clone for View<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L> Copy for View<'_, L> {}

/// The packets of one family that the rule matches in this direction of an endpoint.
pub(super) fn matched<L: Lookup>(rule: &Rule, direction: Direction, view: &View<'_, L>) -> Matched {
    let (exact, vague) = protocols(rule, view.family);
    // Exhaustive, here and below, because a forgotten criterion would open something. `protocols` reads the rest.
    let Rule {
        action: _,
        ip_version: _,
        protocol: _,
        not_protocol: _,
        icmp: _,
        not_icmp: _,
        source,
        destination,
    } = rule;
    let (local, remote) = match direction {
        Direction::Ingress => (destination, source),
        Direction::Egress => (source, destination),
    };
    // Whether the endpoint is meant is decided here, so that no ACL needs to test it.
    let local = pieces(local, &View { by_name: false, ..*view });
    let local: Vec<Piece> = local.into_iter().filter_map(|piece| piece.at(view.own)).collect();
    let remote = pieces(remote, view);
    let regions = |protocols: Protocols| {
        let combine = |(local, remote): (&Piece, &Piece)| Region {
            protocols: protocols.and(local.protocols).and(remote.protocols),
            local: local.side.clone(),
            remote: remote.side.clone(),
        };
        let pairs = local.iter().flat_map(|local| remote.iter().map(move |remote| (local, remote)));
        pairs.map(combine).filter(|region| !region.is_empty()).collect::<Vec<_>>()
    };
    let mut matched = Matched { exact: regions(exact), vague: regions(vague) };
    matched.vague.extend(matched.exact.iter_mut().filter_map(without_inexpressible_ports));
    matched.exact.retain(|region| !region.is_empty());
    matched
}

/// Whether an ACL can match ports of the protocol. The sources disagree on SCTP (Calico for Windows writes such ACLs;
/// azure-npm refuses them, because HNS does not support SCTP), so nothing may depend on it.
pub(super) fn has_ports_in_acls(protocol: Protocol) -> bool {
    protocol.has_ports() && protocol != Protocol::SCTP
}

/// Removes SCTP from a region that has only some of its ports. `Some`: all of SCTP between the same addresses.
fn without_inexpressible_ports(region: &mut Region) -> Option<Region> {
    let sctp = Protocols::of(&[Protocol::SCTP]);
    let has_all_ports = region.local.ports.is_all() && region.remote.ports.is_all();
    if has_all_ports || region.protocols.and(sctp).is_empty() {
        return None;
    }
    region.protocols = region.protocols.and(sctp.not());
    let all_ports = |side: &Side| Side { ports: Ports::all(), ..side.clone() };
    Some(Region { protocols: sctp, local: all_ports(&region.local), remote: all_ports(&region.remote) })
}

/// The protocols that the rule matches exactly, and those of which it matches only some messages.
fn protocols(rule: &Rule, family: IpVersion) -> (Protocols, Protocols) {
    let Rule {
        action: _,
        ip_version,
        protocol,
        not_protocol,
        icmp: wanted,
        not_icmp,
        source: _,
        destination: _,
    } = rule;
    if ip_version.is_some_and(|wanted| wanted != family) {
        return (Protocols::NONE, Protocols::NONE);
    }
    let icmp = Protocols::of(&[Protocol::ICMP, Protocol::ICMPV6]);
    let mut exact = protocol.map_or(Protocols::ALL, |protocol| Protocols::of(&[protocol]));
    if let Some(unwanted) = *not_protocol {
        exact = exact.and(Protocols::of(&[unwanted]).not());
    }
    let mut vague = Protocols::NONE;
    let every_message = |wanted: &IcmpMatch| wanted.icmp_type.is_none() && wanted.icmp_code.is_none();
    if let Some(wanted) = wanted {
        exact = exact.and(icmp);
        if !every_message(wanted) {
            (exact, vague) = (Protocols::NONE, exact);
        }
    }
    if let Some(unwanted) = not_icmp {
        let partly = if every_message(unwanted) { Protocols::NONE } else { exact.and(icmp) };
        vague = if every_message(unwanted) { vague.and(icmp.not()) } else { vague.or(partly) };
        exact = exact.and(icmp.not());
    }
    (exact, vague)
}

/// A part of what one side of a rule matches.
#[derive(Debug, Clone)]
struct Piece {
    protocols: Protocols,
    side: Side,
}

impl Piece {
    /// The piece with listed addresses, for an endpoint with these addresses.
    fn at(mut self, own: &Addresses) -> Option<Piece> {
        let here = self.side.addresses.literal().and(own);
        if here.is_empty() {
            return None;
        }
        self.side.addresses = if here == *own { Peers::all() } else { here.into() };
        Some(self)
    }

    fn ports(&self, ports: &Ports) -> Piece {
        Piece {
            protocols: self.protocols.and(Protocols::with_ports()),
            side: Side { ports: self.side.ports.and(ports), ..self.side.clone() },
        }
    }

    fn is_empty(&self) -> bool {
        self.protocols.is_empty() || self.side.is_empty()
    }
}

/// What one side of a rule matches, in pieces whose union is exact.
fn pieces<L: Lookup>(entity: &EntityMatch, view: &View<'_, L>) -> Vec<Piece> {
    let EntityMatch { nets, not_nets, sets, not_sets, ports: numbers, port_sets, not_ports, not_port_sets } =
        entity;
    let addresses = within_sets(within_nets(nets, not_nets, view.family), sets, not_sets, view);
    let whole = Piece { protocols: Protocols::ALL, side: Side { addresses, ports: Ports::all() } };
    let port_set = |id| grouped(id, view);
    let mut pieces = if numbers.is_empty() && port_sets.is_empty() {
        vec![whole]
    } else {
        let by_number = (!numbers.is_empty()).then(|| whole.ports(&ports(numbers)));
        let by_set = port_sets.iter().flat_map(port_set).map(|group| group.within(&whole));
        by_number.into_iter().chain(by_set).collect()
    };
    if !not_ports.is_empty() {
        let wanted = ports(not_ports).not();
        pieces = pieces.iter().flat_map(|piece| without_ports(piece, &wanted)).collect();
    }
    for group in not_port_sets.iter().flat_map(port_set) {
        pieces = pieces.iter().flat_map(|piece| group.cut_out_of(piece)).collect();
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

fn within_nets(nets: &[IpNet], not_nets: &[IpNet], family: IpVersion) -> Peers {
    let of_nets = |nets: &[IpNet]| Term::Literal(Addresses::of_nets(family, nets.iter().copied()));
    let mut addresses = Peers::all();
    if !nets.is_empty() {
        addresses = addresses.among(&of_nets(nets));
    }
    if !not_nets.is_empty() {
        addresses = addresses.except(&of_nets(not_nets));
    }
    addresses
}

fn within_sets<L: Lookup>(addresses: Peers, sets: &[SetId], not_sets: &[SetId], view: &View<'_, L>) -> Peers {
    let of_set = |id: &SetId| view.term(Named::Nets(id.clone()));
    let addresses = sets.iter().fold(addresses, |all, id| all.among(&of_set(id)));
    not_sets.iter().fold(addresses, |all, id| all.except(&of_set(id)))
}

fn ports(ranges: &[tortie_api::net::PortRange]) -> Ports {
    let ranges = ranges.iter().filter(|range| range.first <= range.last);
    Ports::from_ranges(ranges.map(|range| (range.first, range.last)).collect())
}

/// Ports of addresses in a set of kind AddressPorts, as products.
#[derive(Debug)]
struct Group {
    protocol: Protocol,
    addresses: Term,
    ports: Ports,
}

/// The set as few products: first the addresses of each port, then, if addresses are listed, the ports of equal
/// addresses.
fn grouped<L: Lookup>(id: &SetId, view: &View<'_, L>) -> Vec<Group> {
    let mut by_port: BTreeMap<(Protocol, u16), Vec<IpAddr>> = BTreeMap::new();
    for member in view.lookup.set(id).into_iter().flatten() {
        match *member {
            Member::AddressPort { address, protocol, port } if IpVersion::of(&address) == view.family => {
                by_port.entry((protocol, port)).or_default().push(address);
            }
            Member::AddressPort { .. } | Member::Net(_) => {}
        }
    }
    // A protocol without ports has only packets with port 0, and no ports in an ACL.
    let range = |protocol: Protocol, port: u16| match (protocol.has_ports(), port) {
        (true, port) => Some((port, port)),
        (false, 0) => Some((0, u16::MAX)),
        (false, _) => None,
    };
    let ports_of = by_port.into_iter().filter_map(|((protocol, port), addresses)| {
        Some((protocol, port, range(protocol, port)?, addresses))
    });
    if view.by_name {
        let group = |(protocol, port, range, _)| Group {
            protocol,
            addresses: Term::Named(Named::Port(id.clone(), protocol, port)),
            ports: Ports::from_ranges(vec![range]),
        };
        return ports_of.map(group).collect();
    }
    let mut by_addresses: BTreeMap<(Protocol, Addresses), Vec<(u16, u16)>> = BTreeMap::new();
    for (protocol, _, range, addresses) in ports_of {
        by_addresses.entry((protocol, Addresses::of(view.family, addresses))).or_default().push(range);
    }
    let group = |((protocol, addresses), ports)| Group {
        protocol,
        addresses: Term::Literal(addresses),
        ports: Ports::from_ranges(ports),
    };
    by_addresses.into_iter().map(group).collect()
}

impl Group {
    fn within(&self, piece: &Piece) -> Piece {
        Piece {
            protocols: piece.protocols.and(Protocols::of(&[self.protocol])),
            side: Side {
                addresses: piece.side.addresses.clone().among(&self.addresses),
                ports: piece.side.ports.and(&self.ports),
            },
        }
    }

    /// The piece without the group: other protocols, other addresses, other ports.
    fn cut_out_of(&self, piece: &Piece) -> Vec<Piece> {
        let inside = self.within(piece);
        if inside.is_empty() {
            return vec![piece.clone()];
        }
        let other_protocols =
            Piece { protocols: piece.protocols.and(inside.protocols.not()), side: piece.side.clone() };
        let addresses = piece.side.addresses.clone().except(&self.addresses);
        let other_addresses =
            Piece { protocols: inside.protocols, side: Side { addresses, ports: piece.side.ports.clone() } };
        let ports = piece.side.ports.and(&self.ports.not());
        let other_ports = Piece { side: Side { ports, ..inside.side.clone() }, ..inside };
        [other_protocols, other_addresses, other_ports]
            .into_iter()
            .filter(|piece| !piece.is_empty())
            .collect()
    }
}

/// The piece with only the wanted ports, for protocols with ports.
fn without_ports(piece: &Piece, wanted: &Ports) -> [Piece; 2] {
    let portless = piece.protocols.and(Protocols::with_ports().not());
    [piece.ports(wanted), Piece { protocols: portless, side: piece.side.clone() }]
}
