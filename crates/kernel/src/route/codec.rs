//! Encodes and decodes route messages. Only this module uses `netlink-packet-route`.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use ipnet::IpNet;
use netlink_packet_core::{Emitable, ParseableParametrized};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
    State,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop,
    RouteNextHopFlags, RouteScope, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tortie_api::net::MacAddress;

use super::rate_limit;
use super::types::{
    Address, Change, FdbEntry, Link, LinkSetting, Neighbour, NewLink, NewLinkKind, NextHop, Peer, Route,
    RouteKind, Vxlan,
};
use crate::netlink::{Reply, Request};

const EXCLUSIVE: u16 = libc::NLM_F_CREATE as u16 | libc::NLM_F_EXCL as u16;
const REPLACE: u16 = libc::NLM_F_CREATE as u16 | libc::NLM_F_REPLACE as u16;

pub(super) fn create(link: &NewLink<'_>) -> Request {
    let mut message = LinkMessage::default();
    message.attributes = link_attributes(link.name, link.mac, link.mtu);
    if link.up {
        set_up(&mut message, true);
    }
    message.attributes.extend(link.controller.map(LinkAttribute::Controller));
    let (kind, data) = match &link.kind {
        NewLinkKind::Bridge => (InfoKind::Bridge, None),
        NewLinkKind::Veth(peer) => (InfoKind::Veth, Some(InfoData::Veth(InfoVeth::Peer(peer_message(peer))))),
        NewLinkKind::Ipip => (InfoKind::IpIp, None),
        NewLinkKind::Vxlan(vxlan) => (InfoKind::Vxlan, Some(InfoData::Vxlan(vxlan_attributes(vxlan)))),
    };
    let info = std::iter::once(LinkInfo::Kind(kind)).chain(data.map(LinkInfo::Data)).collect();
    message.attributes.push(LinkAttribute::LinkInfo(info));
    request(RouteNetlinkMessage::NewLink(message), EXCLUSIVE)
}

fn peer_message(peer: &Peer<'_>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes = link_attributes(peer.name, peer.mac, peer.mtu);
    message.attributes.extend(peer.namespace.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
    message
}

fn link_attributes(name: &str, mac: Option<MacAddress>, mtu: Option<u32>) -> Vec<LinkAttribute> {
    let mut attributes = vec![LinkAttribute::IfName(name.to_owned())];
    attributes.extend(mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    attributes.extend(mtu.map(LinkAttribute::Mtu));
    attributes
}

fn vxlan_attributes(vxlan: &Vxlan) -> Vec<InfoVxlan> {
    let mut data =
        vec![InfoVxlan::Id(vxlan.vni), InfoVxlan::Port(vxlan.port), InfoVxlan::Learning(vxlan.learning)];
    data.extend(vxlan.local.map(|local| match local {
        IpAddr::V4(local) => InfoVxlan::Local(local),
        IpAddr::V6(local) => InfoVxlan::Local6(local),
    }));
    data
}

fn set_up(message: &mut LinkMessage, up: bool) {
    message.header.change_mask |= LinkFlags::Up;
    message.header.flags.set(LinkFlags::Up, up);
}

pub(super) fn move_link(index: u32, namespace: BorrowedFd<'_>) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::NetNsFd(namespace.as_raw_fd()));
    request(RouteNetlinkMessage::SetLink(message), 0)
}

pub(super) fn change(change: &Change) -> Request {
    use RouteNetlinkMessage as M;
    match change {
        Change::SetLink(index, settings) => request(M::SetLink(set_link(*index, settings)), 0),
        Change::DeleteLink(index) => request(M::DelLink(set_link(*index, &[])), 0),
        Change::DeleteGroup(group) => request(M::DelLink(set_link(0, &[LinkSetting::Group(*group)])), 0),
        Change::AddAddress(address) => request(M::NewAddress(address_message(address)), REPLACE),
        Change::DeleteAddress(address) => request(M::DelAddress(address_message(address)), 0),
        Change::AddRoute(route) => request(M::NewRoute(route_message(route)), EXCLUSIVE),
        Change::ReplaceRoute(route) => request(M::NewRoute(route_message(route)), REPLACE),
        Change::DeleteRoute(route) => request(M::DelRoute(route_message(route)), 0),
        Change::SetNeighbour(neighbour) => request(M::NewNeighbour(neighbour_message(neighbour)), REPLACE),
        Change::DeleteNeighbour(neighbour) => request(M::DelNeighbour(neighbour_message(neighbour)), 0),
        Change::SetFdb(entry) => request(M::NewNeighbour(fdb_message(entry)), REPLACE),
        Change::DeleteFdb(entry) => request(M::DelNeighbour(fdb_message(entry)), 0),
        Change::SetRateLimit(link, limit) => rate_limit::set(*link, limit),
    }
}

fn set_link(index: u32, settings: &[LinkSetting]) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    for setting in settings {
        message.attributes.push(match setting {
            LinkSetting::Up(up) => {
                set_up(&mut message, *up);
                continue;
            }
            LinkSetting::Mtu(mtu) => LinkAttribute::Mtu(*mtu),
            LinkSetting::Mac(mac) => LinkAttribute::Address(mac.0.to_vec()),
            LinkSetting::Name(name) => LinkAttribute::IfName(name.clone()),
            LinkSetting::Alias(alias) => LinkAttribute::IfAlias(alias.clone()),
            LinkSetting::Group(group) => LinkAttribute::Group(*group),
            LinkSetting::Controller(controller) => LinkAttribute::Controller(controller.unwrap_or(0)),
        });
    }
    message
}

fn address_message(address: &Address) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(address.address);
    message.header.prefix_len = address.prefix_length;
    message.header.index = address.link;
    message.attributes =
        vec![AddressAttribute::Local(address.address), AddressAttribute::Address(address.address)];
    if address.address.is_ipv6() {
        // Tortie's addresses are unique by IPAM. Without the flag, the kernel does not use them for the second that its
        // detection of duplicates takes.
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    message
}

fn route_message(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(route.destination.addr());
    message.header.destination_prefix_length = route.destination.prefix_len();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = route.protocol.into();
    message.header.kind = match route.kind {
        RouteKind::Unicast => RouteType::Unicast,
        RouteKind::Blackhole => RouteType::BlackHole,
        RouteKind::Unreachable => RouteType::Unreachable,
        RouteKind::Prohibit => RouteType::Prohibit,
        RouteKind::Throw => RouteType::Throw,
    };
    message.header.scope = match (route.kind, route.gateway) {
        (RouteKind::Unicast, None) => RouteScope::Link,
        _ => RouteScope::Universe,
    };
    if route.others.is_empty() && route.onlink {
        message.header.flags |= RouteFlags::Onlink;
    }
    if route.destination.prefix_len() > 0 {
        message.attributes.push(RouteAttribute::Destination(route.destination.network().into()));
    }
    if route.others.is_empty() {
        message.attributes.extend(route.link.map(RouteAttribute::Oif));
        message
            .attributes
            .extend(route.gateway.map(|gateway| gateway_attribute(&route.destination, gateway)));
    } else {
        let hops = route.next_hops();
        let hops = hops.iter().map(|hop| next_hop_message(&route.destination, hop)).collect();
        message.attributes.push(RouteAttribute::MultiPath(hops));
    }
    message.attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(source.into())));
    if route.metric != 0 {
        message.attributes.push(RouteAttribute::Priority(route.metric));
    }
    message.attributes.extend(route.mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
    message
}

/// The next router. One of the other family is in RTA_VIA (Linux 5.2).
fn gateway_attribute(destination: &IpNet, gateway: IpAddr) -> RouteAttribute {
    match (destination, gateway) {
        (IpNet::V4(_), IpAddr::V6(gateway)) => RouteAttribute::Via(RouteVia::Inet6(gateway)),
        _ => RouteAttribute::Gateway(gateway.into()),
    }
}

/// The router that an attribute names.
fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some((*address).into()),
        RouteAttribute::Via(RouteVia::Inet(address)) => Some((*address).into()),
        _ => None,
    }
}

fn next_hop_message(destination: &IpNet, hop: &NextHop) -> RouteNextHop {
    let mut message = RouteNextHop::default();
    message.interface_index = hop.link;
    message.flags = if hop.onlink { RouteNextHopFlags::Onlink } else { RouteNextHopFlags::empty() };
    message.attributes.extend(hop.gateway.map(|gateway| gateway_attribute(destination, gateway)));
    message
}

fn next_hop(message: &RouteNextHop) -> NextHop {
    let gateway = message.attributes.iter().find_map(gateway);
    let onlink = message.flags.contains(RouteNextHopFlags::Onlink);
    NextHop { link: message.interface_index, gateway, onlink }
}

fn neighbour_message(neighbour: &Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(neighbour.address);
    message.header.ifindex = neighbour.link;
    message.header.state = NeighbourState::Permanent;
    message.attributes = vec![
        NeighbourAttribute::Destination(neighbour_address(neighbour.address)),
        NeighbourAttribute::LinkLayerAddress(neighbour.mac.0.to_vec()),
    ];
    message
}

fn fdb_message(entry: &FdbEntry) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = entry.link;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes = vec![
        NeighbourAttribute::LinkLayerAddress(entry.mac.0.to_vec()),
        NeighbourAttribute::Destination(neighbour_address(entry.destination)),
    ];
    message
}

fn neighbour_address(address: IpAddr) -> NeighbourAddress {
    match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }
}

pub(super) fn get_link(name: &str) -> Request {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    request(RouteNetlinkMessage::GetLink(message), 0)
}

pub(super) fn list_links() -> Request {
    request(RouteNetlinkMessage::GetLink(LinkMessage::default()), 0)
}

pub(super) fn list_addresses() -> Request {
    request(RouteNetlinkMessage::GetAddress(AddressMessage::default()), 0)
}

pub(super) fn list_routes(v6: bool) -> Request {
    let mut message = RouteMessage::default();
    message.header.address_family = if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    request(RouteNetlinkMessage::GetRoute(message), 0)
}

pub(super) fn list_neighbours() -> Request {
    request(RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()), 0)
}

pub(super) fn list_fdb(link: u32) -> Request {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = link;
    request(RouteNetlinkMessage::GetNeighbour(message), 0)
}

pub(super) fn link(reply: &Reply) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = parse(reply)? else { return None };
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        kind: String::new(),
        mac: None,
        mtu: 0,
        up: message.header.flags.contains(LinkFlags::Up),
        controller: None,
        peer: None,
        alias: String::new(),
        vxlan: None,
        carries_ipv4: message.header.link_layer_type == LinkLayerType::Tunnel,
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::IfAlias(alias) => link.alias = alias,
            LinkAttribute::Address(bytes) => link.mac = mac(&bytes),
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::Controller(index) => link.controller = Some(index),
            LinkAttribute::Link(index) => link.peer = Some(index),
            LinkAttribute::LinkInfo(info) => read_link_info(&mut link, info),
            _ => {}
        }
    }
    Some(link)
}

/// Whether the kernel reports that a link forwards packets (`IF_OPER_UP`, RFC 2863), and not only that it should.
pub(super) fn is_operating(reply: &Reply) -> bool {
    let Some(RouteNetlinkMessage::NewLink(message)) = parse(reply) else { return false };
    message.attributes.contains(&LinkAttribute::OperState(State::Up))
}

fn read_link_info(link: &mut Link, info: Vec<LinkInfo>) {
    for part in info {
        match part {
            LinkInfo::Kind(kind) => link.kind = kind.to_string(),
            LinkInfo::Data(InfoData::Vxlan(attributes)) => {
                let mut vxlan = Vxlan { vni: 0, port: 0, local: None, learning: false };
                for attribute in attributes {
                    match attribute {
                        InfoVxlan::Id(vni) => vxlan.vni = vni,
                        InfoVxlan::Port(port) => vxlan.port = port,
                        InfoVxlan::Local(local) => vxlan.local = Some(local.into()),
                        InfoVxlan::Local6(local) => vxlan.local = Some(local.into()),
                        InfoVxlan::Learning(learning) => vxlan.learning = learning,
                        _ => {}
                    }
                }
                link.vxlan = Some(vxlan);
            }
            _ => {}
        }
    }
}

pub(super) fn address(reply: &Reply) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = parse(reply)? else { return None };
    // IFA_LOCAL is the address itself; IPv6 has only IFA_ADDRESS.
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) if local => Some(*address),
            AddressAttribute::Address(address) if !local => Some(*address),
            _ => None,
        })
    };
    let address = find(true).or_else(|| find(false))?;
    Some(Address { link: message.header.index, address, prefix_length: message.header.prefix_len })
}

pub(super) fn route(reply: &Reply) -> Option<Route> {
    route_and_dead_links(reply).map(|(route, _)| route)
}

/// A route, and the links of its next hops that the kernel does not use (`RTNH_F_DEAD`), because they are down.
pub(super) fn route_and_dead_links(reply: &Reply) -> Option<(Route, Vec<u32>)> {
    let RouteNetlinkMessage::NewRoute(message) = parse(reply)? else { return None };
    let header = &message.header;
    let kind = match header.kind {
        RouteType::Unicast => RouteKind::Unicast,
        RouteType::BlackHole => RouteKind::Blackhole,
        RouteType::Unreachable => RouteKind::Unreachable,
        RouteType::Prohibit => RouteKind::Prohibit,
        RouteType::Throw => RouteKind::Throw,
        _ => return None,
    };
    let mut destination = match header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        AddressFamily::Inet6 => IpAddr::from([0; 16]),
        _ => return None,
    };
    let (mut link, mut gateway, mut source, mut metric, mut mtu) = (None, None, None, 0, None);
    let mut onlink = header.flags.contains(RouteFlags::Onlink);
    let (mut others, mut dead) = (Vec::new(), Vec::new());
    let mut table = u32::from(header.table);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(address)?,
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => gateway = self::gateway(attribute),
            RouteAttribute::MultiPath(hops) => {
                dead.extend(
                    hops.iter()
                        .filter(|hop| hop.flags.contains(RouteNextHopFlags::Dead))
                        .map(|hop| hop.interface_index),
                );
                let mut hops = hops.iter().map(next_hop);
                let first = hops.next()?;
                (link, gateway, onlink) = (Some(first.link), first.gateway, first.onlink);
                others = hops.collect();
            }
            RouteAttribute::PrefSource(address) => source = ip(address),
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Table(id) => table = *id,
            RouteAttribute::Metrics(metrics) => {
                mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    if table != u32::from(RouteHeader::RT_TABLE_MAIN) {
        return None;
    }
    let destination = IpNet::new(destination, header.destination_prefix_length).ok()?;
    // The kernel's defaults for IPv6: IP6_RT_PRIO_USER, and loopback for dropping routes.
    if destination.addr().is_ipv6() && metric == 1024 {
        metric = 0;
    }
    if kind != RouteKind::Unicast {
        link = None;
    }
    if header.flags.contains(RouteFlags::Dead) {
        dead.extend(link);
    }
    let protocol = header.protocol.into();
    Some((Route { destination, kind, link, gateway, onlink, others, source, protocol, metric, mtu }, dead))
}

pub(super) fn neighbour(reply: &Reply) -> Option<Neighbour> {
    let RouteNetlinkMessage::NewNeighbour(message) = parse(reply)? else { return None };
    if message.header.state != NeighbourState::Permanent {
        return None;
    }
    let (bytes, hardware) = neighbour_attributes(&message)?;
    Some(Neighbour { link: message.header.ifindex, address: address_of(&bytes)?, mac: hardware })
}

pub(super) fn fdb_entry(reply: &Reply) -> Option<FdbEntry> {
    let RouteNetlinkMessage::NewNeighbour(message) = parse(reply)? else { return None };
    let (bytes, hardware) = neighbour_attributes(&message)?;
    Some(FdbEntry { link: message.header.ifindex, mac: hardware, destination: address_of(&bytes)? })
}

/// The address of four or sixteen bytes.
fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    let of_ipv4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    of_ipv4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}

fn neighbour_attributes(message: &NeighbourMessage) -> Option<(Vec<u8>, MacAddress)> {
    let (mut address, mut hardware) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => {
                address = Some(v4.octets().to_vec())
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => {
                address = Some(v6.octets().to_vec())
            }
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => address = Some(bytes.clone()),
            NeighbourAttribute::LinkLayerAddress(bytes) => hardware = mac(bytes),
            _ => {}
        }
    }
    address.zip(hardware)
}

fn request(message: RouteNetlinkMessage, flags: u16) -> Request {
    let mut payload = vec![0; message.buffer_len()];
    message.emit(&mut payload);
    Request { kind: message.message_type(), flags, payload }
}

/// Messages that cannot be decoded do not concern Tortie: it can read back everything that it writes, as its tests
/// show.
fn parse(reply: &Reply) -> Option<RouteNetlinkMessage> {
    RouteNetlinkMessage::parse_with_param(&reply.payload, reply.kind)
        .inspect_err(|error| {
            tracing::debug!(%error, kind = reply.kind, "left out a kernel object that could not be read");
        })
        .ok()
}

fn mac(bytes: &[u8]) -> Option<MacAddress> {
    bytes.try_into().ok().map(MacAddress)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}
