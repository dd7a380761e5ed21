//! The network between the nodes: a bridge in the lab's own network namespace, and a cable to each node.
//!
//! Hardware addresses are derived from IP addresses, and each end has permanent neighbour entries for all others. So
//! the machine's neighbour table, which other programs may fill, is not needed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use ipnet::{IpNet, Ipv4Net};
use tortie_api::net::MacAddress;
use tortie_kernel::ethtool;
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::{
    Address, Change, LinkSetting, Neighbour, NewLink, NewLinkKind, Peer, Route, RouteSocket,
};

use crate::LabError;

/// The underlay's addresses (TEST-NET-1, RFC 5737), which are never real.
pub(crate) const NETWORK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(192, 0, 2, 0), 24);
/// The lab's own address on the underlay, where the datastore is served.
pub(crate) const LAB: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The first node's last byte.
const FIRST_NODE: u8 = 11;
/// The maximum number of nodes.
pub(crate) const MAX_NODES: usize = 200;

const BRIDGE: &str = "underlay";
/// Protocol of routes by an administrator (`RTPROT_STATIC`).
const STATIC: u8 = 4;

/// The TLS port of the datastore.
pub(crate) const STORE_PORT: u16 = 7443;

/// The address of a node by its number.
pub(crate) fn address(node: usize) -> Ipv4Addr {
    let last = usize::from(FIRST_NODE) + node.min(MAX_NODES);
    Ipv4Addr::new(192, 0, 2, u8::try_from(last).unwrap_or(u8::MAX))
}

/// The IPv6 address of a node by its number, in the network of RFC 3849 with the prefix length [`PREFIX_V6`].
pub(crate) fn address_v6(node: usize) -> Ipv6Addr {
    let [.., last] = address(node).octets();
    Ipv6Addr::new(0x2001, 0xdb8, 0, 2, 0, 0, 0, last.into())
}

/// The length of the prefix of the nodes' IPv6 addresses.
pub(crate) const PREFIX_V6: u8 = 64;

/// Gives a node its IPv6 address.
pub(crate) fn add_ipv6(netns: &NetNs, node: usize) -> Result<(), LabError> {
    netns.run(|| {
        let mut socket = RouteSocket::open()?;
        let link = index(&mut socket, "eth0")?;
        let address = Address { link, address: address_v6(node).into(), prefix_length: PREFIX_V6 };
        Ok(socket.change(&Change::AddAddress(address))?)
    })?
}

/// The hardware address of an address of the underlay; "locally administered".
fn mac(address: Ipv4Addr) -> MacAddress {
    let [a, b, c, d] = address.octets();
    MacAddress([0x02, 0x00, a, b, c, d])
}

/// The neighbour entry for an address of the underlay.
fn neighbour(address: Ipv4Addr, link: u32) -> Change {
    Change::SetNeighbour(Neighbour { link, address: address.into(), mac: mac(address) })
}

/// Creates the bridge.
pub(crate) fn lay(nodes: usize) -> Result<(), LabError> {
    let mut socket = RouteSocket::open()?;
    socket.create(&NewLink { up: true, mac: Some(mac(LAB)), ..NewLink::new(BRIDGE, NewLinkKind::Bridge) })?;
    let bridge = index(&mut socket, BRIDGE)?;
    socket.change(&Change::AddAddress(Address {
        link: bridge,
        address: IpAddr::V4(LAB),
        prefix_length: 24,
    }))?;
    change_all(&mut socket, &(0..nodes).map(|node| neighbour(address(node), bridge)).collect::<Vec<_>>())
}

/// The permanent neighbours of one of `nodes` nodes.
pub(crate) fn neighbours(node: usize, nodes: usize) -> Vec<Ipv4Addr> {
    (0..nodes).filter(|other| *other != node).map(address).chain([LAB]).collect()
}

/// Connects a node: its `eth0` gets its address and a default route to the lab. It asks for the hardware addresses of all but
/// these neighbours.
pub(crate) fn connect(netns: &NetNs, node: usize, neighbours: &[Ipv4Addr]) -> Result<(), LabError> {
    let mut socket = RouteSocket::open()?;
    let bridge = index(&mut socket, BRIDGE)?;
    let port = format!("node{node}");
    let peer =
        Peer { name: "eth0", mac: Some(mac(address(node))), mtu: None, namespace: Some(netns.as_fd()) };
    socket.create(&NewLink {
        up: true,
        controller: Some(bridge),
        ..NewLink::new(&port, NewLinkKind::Veth(peer))
    })?;
    // A capture should show what a wire would carry: no unfinished checksums, no super-segments.
    ethtool::disable_offloads(&port)?;
    netns.run(|| {
        ethtool::disable_offloads("eth0")?;
        let mut socket = RouteSocket::open()?;
        let eth0 = index(&mut socket, "eth0")?;
        let own = Address { link: eth0, address: IpAddr::V4(address(node)), prefix_length: 24 };
        socket.change(&Change::AddAddress(own))?;
        socket.change(&Change::SetLink(eth0, vec![LinkSetting::Up(true)]))?;
        let everywhere = IpNet::V4(Ipv4Net::default());
        let default = Route { onlink: false, ..Route::via(everywhere, IpAddr::V4(LAB), eth0, STATIC) };
        socket.change(&Change::AddRoute(default))?;
        let neighbours: Vec<Change> = neighbours.iter().map(|other| neighbour(*other, eth0)).collect();
        change_all(&mut socket, &neighbours)
    })?
}

fn change_all(socket: &mut RouteSocket, changes: &[Change]) -> Result<(), LabError> {
    let verdicts = socket.change_all(changes)?;
    Ok(verdicts.into_iter().collect::<Result<(), _>>()?)
}

fn index(socket: &mut RouteSocket, name: &str) -> Result<u32, LabError> {
    let link = socket.link(name)?;
    link.map(|link| link.index).ok_or_else(|| LabError::problem(name, "the link was made but is not there"))
}
