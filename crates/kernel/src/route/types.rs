//! Links, addresses, routes and neighbours as plain data.

use std::fmt;
use std::net::IpAddr;
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
    /// Its type: `veth`, `bridge`, `vxlan`, …; empty for physical interfaces and loopback.
    pub kind: String,
    /// Its hardware address, if it has an Ethernet one.
    pub mac: Option<MacAddress>,
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// The index of the bridge that it is a port of.
    pub controller: Option<u32>,
    /// The index of its peer in the peer's namespace, or of the underlying link.
    pub peer: Option<u32>,
    /// Its alias (`ifalias`); empty for none.
    pub alias: String,
    /// The settings of a VXLAN link.
    pub vxlan: Option<Vxlan>,
    /// Whether it carries IPv4 packets in others to the routers of its routes (`ARPHRD_TUNNEL`), as links of IPIP do.
    pub carries_ipv4: bool,
}

/// The settings of a VXLAN link. It never learns; all entries are programmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vxlan {
    /// The VXLAN network identifier.
    pub vni: u32,
    /// The UDP port.
    pub port: u16,
    /// The node's own address, the source of its packets.
    pub local: Option<IpAddr>,
    /// Whether it learns addresses from received packets; [`NewLinkKind::Vxlan`] always creates one that does not.
    pub learning: bool,
}

/// A link to create.
#[derive(Debug, Clone)]
pub struct NewLink<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its type.
    pub kind: NewLinkKind<'a>,
    /// Its hardware address; otherwise the kernel chooses one.
    pub mac: Option<MacAddress>,
    /// Its MTU in bytes; the kernel's default otherwise.
    pub mtu: Option<u32>,
    /// Whether it is up immediately.
    pub up: bool,
    /// The index of the bridge that it becomes a port of.
    pub controller: Option<u32>,
}

impl<'a> NewLink<'a> {
    /// A link with only a name and a type; it is down.
    #[must_use]
    pub fn new(name: &'a str, kind: NewLinkKind<'a>) -> Self {
        Self { name, kind, mac: None, mtu: None, up: false, controller: None }
    }
}

/// The type of a new link.
#[derive(Debug, Clone)]
pub enum NewLinkKind<'a> {
    /// A bridge.
    Bridge,
    /// One end of a virtual cable.
    Veth(Peer<'a>),
    /// An end of an overlay.
    Vxlan(Vxlan),
    /// A tunnel of IPv4 in IPv4 (RFC 2003) without fixed ends: the router of each route is the other end.
    Ipip,
}

/// The other end of a virtual cable. It is down at first, because the kernel cannot set it up before the cable is
/// complete.
#[derive(Debug, Clone)]
pub struct Peer<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its hardware address; otherwise the kernel chooses one.
    pub mac: Option<MacAddress>,
    /// Its MTU in bytes; the kernel's default otherwise.
    pub mtu: Option<u32>,
    /// The namespace in which it is created; otherwise the same one.
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
    /// An alias of at most 255 bytes (`ifalias`).
    Alias(String),
    /// The group; all links start in group 0.
    Group(u32),
    /// The bridge that it is a port of; `None` removes it from its bridge.
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

/// The type of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RouteKind {
    /// Sends packets out of a link.
    Unicast,
    /// Drops them.
    Blackhole,
    /// Drops them, and tells the sender that there is no way (`unreachable` of iproute2).
    Unreachable,
    /// Drops them, and tells the sender that somebody forbids it (`prohibit`).
    Prohibit,
    /// Leaves them to other tables (`throw`).
    Throw,
}

/// A next hop of a route: an outgoing link and the next router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NextHop {
    /// The index of the outgoing link.
    pub link: u32,
    /// The next router; without one, the destination is on the link itself.
    pub gateway: Option<IpAddr>,
    /// Whether the router counts as on the link even if no other route says so.
    pub onlink: bool,
}

/// A route of the main table.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Route {
    /// The destination of the packets.
    pub destination: IpNet,
    /// The type.
    pub kind: RouteKind,
    /// The index of the outgoing link.
    pub link: Option<u32>,
    /// The next router; without one, the destination is on the link itself (scope link).
    pub gateway: Option<IpAddr>,
    /// Whether the router counts as on the link even if no other route says so.
    pub onlink: bool,
    /// More next hops, over which the kernel spreads connections, each with the same share as the first one (`RTA_MULTIPATH`).
    pub others: Vec<NextHop>,
    /// The source address of the host's own packets.
    pub source: Option<IpAddr>,
    /// The creator (`RTPROT_…`): 2 the kernel, 3 boot, 4 an administrator, 80 Calico, 84 Tortie.
    pub protocol: u8,
    /// The lowest metric wins among routes to one destination. 0 is the kernel's default (1024 for IPv6).
    pub metric: u32,
    /// The longest packet that takes the route, in bytes, if it is not that of the link (`RTAX_MTU`).
    pub mtu: Option<u32>,
}

impl Route {
    /// A route to a destination on the link itself.
    #[must_use]
    pub fn on_link(destination: IpNet, link: u32, protocol: u8) -> Self {
        let kind = RouteKind::Unicast;
        Self {
            destination,
            kind,
            link: Some(link),
            gateway: None,
            onlink: false,
            others: Vec::new(),
            source: None,
            protocol,
            metric: 0,
            mtu: None,
        }
    }

    /// A route by a router that counts as on the link, whatever other routes say.
    #[must_use]
    pub fn via(destination: IpNet, gateway: IpAddr, link: u32, protocol: u8) -> Self {
        Self { gateway: Some(gateway), onlink: true, ..Self::on_link(destination, link, protocol) }
    }

    /// All next hops of the route, sorted; none if it drops.
    #[must_use]
    pub fn next_hops(&self) -> Vec<NextHop> {
        let first = self.link.map(|link| NextHop { link, gateway: self.gateway, onlink: self.onlink });
        let mut all: Vec<NextHop> = first.into_iter().chain(self.others.iter().copied()).collect();
        all.sort_unstable();
        all
    }

    /// Whether two routes lead to the same next hops, whoever created them.
    #[must_use]
    pub fn leads_like(&self, other: &Self) -> bool {
        let next_hops = |route: &Self| match route.kind {
            RouteKind::Unicast => {
                let hops = route.next_hops().into_iter().map(|hop| (hop.link, hop.gateway));
                (route.kind, hops.collect())
            }
            other => (other, Vec::new()),
        };
        next_hops(self) == next_hops(other)
    }

    /// A route that drops.
    #[must_use]
    pub fn blackhole(destination: IpNet, protocol: u8) -> Self {
        Self { kind: RouteKind::Blackhole, link: None, ..Self::on_link(destination, 0, protocol) }
    }
}

/// A permanent neighbour: the hardware address of an IP address on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    /// The link's index.
    pub link: u32,
    /// The address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: MacAddress,
}

/// A forwarding entry of a VXLAN link: the node of a hardware address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FdbEntry {
    /// The link's index.
    pub link: u32,
    /// The hardware address.
    pub mac: MacAddress,
    /// The node's address.
    pub destination: IpAddr,
}

/// A change of the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Changes settings of the link with this index.
    SetLink(u32, Vec<LinkSetting>),
    /// Deletes the link with this index.
    DeleteLink(u32),
    /// Deletes all links of a group, which takes no longer than deleting one. An error if there are none.
    DeleteGroup(u32),
    /// Adds an address, or keeps an existing one.
    AddAddress(Address),
    /// Deletes an address.
    DeleteAddress(Address),
    /// Adds a route; refused if one with that destination and metric exists.
    AddRoute(Route),
    /// Adds a route, or replaces the one with that destination and metric, whoever created it.
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
    /// Limits what the link with this index sends. Replaces its root queueing discipline.
    SetRateLimit(u32, RateLimit),
}

/// A limit of what a link sends: a bucket of tokens, and a queue for packets that find no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RateLimit {
    /// The tokens that come in a second, each for one byte.
    pub bytes_per_second: u64,
    /// The size of the bucket in bytes. Packets that are longer, after segmentation, are lost.
    pub burst: u32,
}

impl RateLimit {
    /// The bytes that may wait: as many as pass in 25 milliseconds, which is what the CNI plugin `bandwidth` takes, and a
    /// bucket's content, so that a burst is not lost.
    pub(super) fn queue(&self) -> u32 {
        let waiting = self.bytes_per_second / 40;
        u32::try_from(waiting).unwrap_or(u32::MAX).saturating_add(self.burst)
    }
}

impl Change {
    /// The operation, as in "refused to …".
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
            Self::SetRateLimit(..) => "limit the rate",
        }
    }
}

/// The object of the change.
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
            Self::SetRateLimit(link, limit) => {
                let RateLimit { bytes_per_second, burst } = limit;
                write!(f, "link {link} to {bytes_per_second} bytes a second with bursts of {burst} bytes")
            }
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            RouteKind::Unicast => "",
            RouteKind::Blackhole => "blackhole ",
            RouteKind::Unreachable => "unreachable ",
            RouteKind::Prohibit => "prohibit ",
            RouteKind::Throw => "throw ",
        })?;
        write!(f, "route to {}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(link) = self.link {
            write!(f, " on link {link}")?;
        }
        for NextHop { link, gateway, .. } in &self.others {
            let via = gateway.map(|gateway| format!(" via {gateway}")).unwrap_or_default();
            write!(f, " and{via} on link {link}")?;
        }
        if let Some(mtu) = self.mtu {
            write!(f, " with MTU {mtu}")?;
        }
        write!(f, " (protocol {})", self.protocol)
    }
}
