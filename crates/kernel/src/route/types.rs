//! Links, addresses, routes and neighbours as plain data.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use tortie_api::net::MacAddress;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its index in its namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// What it is: `veth`, `bridge`, `vxlan`, …; empty for physical interfaces and loopback.
    pub kind: String,
    /// Its hardware address, if it has an Ethernet one.
    pub mac: Option<MacAddress>,
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// The index of the bridge that it is a port of.
    pub controller: Option<u32>,
    /// The index of its peer in the peer's namespace, or of the link that it stands on.
    pub peer: Option<u32>,
    /// What somebody noted at it (`ifalias`); empty for nothing.
    pub alias: String,
    /// What a VXLAN link is set to.
    pub vxlan: Option<Vxlan>,
}

/// The settings of a VXLAN link. It never learns: who is where is programmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vxlan {
    /// The VXLAN network identifier.
    pub vni: u32,
    /// The UDP port.
    pub port: u16,
    /// The node's own address, from which its packets go.
    pub local: Option<Ipv4Addr>,
    /// Whether it learns addresses from what it receives; [`NewLinkKind::Vxlan`] always makes one that does not.
    pub learning: bool,
}

/// A link to be made.
#[derive(Debug, Clone)]
pub struct NewLink<'a> {
    /// Its name.
    pub name: &'a str,
    /// What it is.
    pub kind: NewLinkKind<'a>,
    /// Its hardware address; the kernel makes one up otherwise.
    pub mac: Option<MacAddress>,
    /// Its MTU in bytes; the kernel's default otherwise.
    pub mtu: Option<u32>,
    /// Whether it is up from the start.
    pub up: bool,
    /// The index of the bridge that it becomes a port of.
    pub controller: Option<u32>,
}

impl<'a> NewLink<'a> {
    /// A link with nothing set but its name and kind; it is down.
    #[must_use]
    pub fn new(name: &'a str, kind: NewLinkKind<'a>) -> Self {
        Self { name, kind, mac: None, mtu: None, up: false, controller: None }
    }
}

/// What kind of link to make.
#[derive(Debug, Clone)]
pub enum NewLinkKind<'a> {
    /// A switch.
    Bridge,
    /// One end of a virtual cable.
    Veth(Peer<'a>),
    /// An end of an overlay.
    Vxlan(Vxlan),
}

/// The other end of a virtual cable. It is down at first: the kernel cannot set it up before the cable is complete.
#[derive(Debug, Clone)]
pub struct Peer<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its hardware address; the kernel makes one up otherwise.
    pub mac: Option<MacAddress>,
    /// Its MTU in bytes; the kernel's default otherwise.
    pub mtu: Option<u32>,
    /// The namespace that it is made in; the same one otherwise.
    pub namespace: Option<BorrowedFd<'a>>,
}

/// A setting of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkSetting {
    /// Up, or down.
    Up(bool),
    /// The MTU, in bytes.
    Mtu(u32),
    /// The hardware address.
    Mac(MacAddress),
    /// The name.
    Name(String),
    /// A note, of at most 255 bytes (`ifalias`).
    Alias(String),
    /// The group that it is in; 0 is where all links begin.
    Group(u32),
    /// The bridge that it is a port of; `None` takes it out.
    Controller(Option<u32>),
}

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// The link's index.
    pub link: u32,
    /// The address.
    pub address: IpAddr,
    /// The length of its network's prefix.
    pub prefix_length: u8,
}

/// What a route does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteKind {
    /// Sends packets out of a link.
    Unicast,
    /// Drops them.
    Blackhole,
}

/// A route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Where the packets go.
    pub destination: IpNet,
    /// What happens to them.
    pub kind: RouteKind,
    /// The index of the link that they leave by.
    pub link: Option<u32>,
    /// The next router; without one the destination is on the link itself (scope link).
    pub gateway: Option<IpAddr>,
    /// Whether the router is taken to be on the link though no other route says so.
    pub onlink: bool,
    /// The source address that the host's own packets get.
    pub source: Option<IpAddr>,
    /// Who made it (`RTPROT_…`): 2 the kernel, 3 boot, 4 an administrator, 80 Calico and Tortie.
    pub protocol: u8,
    /// Which of several routes to one destination goes first: the lowest. 0 is the kernel's default (1024 for IPv6).
    pub metric: u32,
}

impl Route {
    /// A route to what is on a link itself.
    #[must_use]
    pub fn on_link(destination: IpNet, link: u32, protocol: u8) -> Self {
        let kind = RouteKind::Unicast;
        Self {
            destination,
            kind,
            link: Some(link),
            gateway: None,
            onlink: false,
            source: None,
            protocol,
            metric: 0,
        }
    }

    /// A route by a router that is on the link, whatever the other routes say.
    #[must_use]
    pub fn via(destination: IpNet, gateway: IpAddr, link: u32, protocol: u8) -> Self {
        Self { gateway: Some(gateway), onlink: true, ..Self::on_link(destination, link, protocol) }
    }

    /// A route that drops.
    #[must_use]
    pub fn blackhole(destination: IpNet, protocol: u8) -> Self {
        Self { kind: RouteKind::Blackhole, link: None, ..Self::on_link(destination, 0, protocol) }
    }
}

/// A permanent neighbour: the hardware address of an address on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    /// The link's index.
    pub link: u32,
    /// The address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: MacAddress,
}

/// A forwarding entry of a VXLAN link: behind which node a hardware address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FdbEntry {
    /// The link's index.
    pub link: u32,
    /// The hardware address.
    pub mac: MacAddress,
    /// The node's address.
    pub destination: Ipv4Addr,
}

/// A change of the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Changes settings of the link with this index.
    SetLink(u32, Vec<LinkSetting>),
    /// Deletes the link with this index.
    DeleteLink(u32),
    /// Deletes all links of a group, which takes the kernel no longer than one. An error where there are none.
    DeleteGroup(u32),
    /// Adds an address, or leaves it as it is.
    AddAddress(Address),
    /// Deletes an address.
    DeleteAddress(Address),
    /// Adds a route; refused where one to that destination with that metric exists.
    AddRoute(Route),
    /// Adds a route in the place of the one to that destination with that metric, whoever made it.
    ReplaceRoute(Route),
    /// Deletes a route with that destination, metric, link and protocol.
    DeleteRoute(Route),
    /// Adds or changes a neighbour.
    SetNeighbour(Neighbour),
    /// Deletes a neighbour.
    DeleteNeighbour(Neighbour),
    /// Adds or changes a forwarding entry.
    SetFdb(FdbEntry),
    /// Deletes a forwarding entry.
    DeleteFdb(FdbEntry),
}

impl Change {
    /// What the change does, as in "refused to …".
    pub(super) fn operation(&self) -> &'static str {
        match self {
            Self::SetLink(..) => "change the link",
            Self::DeleteLink(_) => "delete the link",
            Self::DeleteGroup(_) => "delete the links of the group",
            Self::AddAddress(_) => "add the address",
            Self::DeleteAddress(_) => "delete the address",
            Self::AddRoute(_) => "add the route",
            Self::ReplaceRoute(_) => "replace the route",
            Self::DeleteRoute(_) => "delete the route",
            Self::SetNeighbour(_) => "set the neighbour",
            Self::DeleteNeighbour(_) => "delete the neighbour",
            Self::SetFdb(_) => "set the forwarding entry",
            Self::DeleteFdb(_) => "delete the forwarding entry",
        }
    }
}

/// The object that the change is about.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetLink(index, settings) => write!(f, "link {index} to {settings:?}"),
            Self::DeleteLink(index) => write!(f, "link {index}"),
            Self::DeleteGroup(group) => write!(f, "link group {group:#x}"),
            Self::AddAddress(a) | Self::DeleteAddress(a) => {
                write!(f, "{}/{} on link {}", a.address, a.prefix_length, a.link)
            }
            Self::AddRoute(route) | Self::ReplaceRoute(route) | Self::DeleteRoute(route) => route.fmt(f),
            Self::SetNeighbour(n) | Self::DeleteNeighbour(n) => {
                write!(f, "neighbour {} at {} on link {}", n.address, n.mac, n.link)
            }
            Self::SetFdb(entry) | Self::DeleteFdb(entry) => {
                write!(f, "{} behind {} on link {}", entry.mac, entry.destination, entry.link)
            }
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == RouteKind::Blackhole {
            write!(f, "blackhole ")?;
        }
        write!(f, "route to {}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(link) = self.link {
            write!(f, " on link {link}")?;
        }
        write!(f, " (protocol {})", self.protocol)
    }
}
