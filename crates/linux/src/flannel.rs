//! What flannel leaves on a node that runs Tortie's agent now: found, and removed on request.
//!
//! Pods that flannel's plugin has connected are ports of its bridge. They would lose their network, so nothing is removed while there
//! are any, even if the bridge seems to be of another plugin.

use std::fmt;
use std::fs;

use ipnet::IpNet;
use tortie_kernel::nftables::leftovers::Marks;
use tortie_kernel::route::{Change, Link, Route, RouteSocket};

use crate::Error;
use crate::error::tolerate_gone;
use crate::foreign_chains::ForeignChains;

/// flanneld's tables, and its chains in those of `iptables` (`pkg/trafficmngr`). Its comments have no digest, so none counts.
const MARKS: Marks<'static> =
    Marks { tables: &["flannel-ipv4", "flannel-ipv6"], chains: "FLANNEL-", comments: "flanneld:" };
/// The prefixes of its VXLAN links, which the VXLAN network identifier follows (`pkg/backend/vxlan`).
const OVERLAYS: [&str; 2] = ["flannel.", "flannel-v6."];
/// The bridge of its plugin.
const BRIDGE: &str = "cni0";
/// `RTPROT_BOOT`, which its routes have, and those of `ip route`.
const BOOT: u8 = 3;
/// The name of its daemon's process. A container sees only its own processes.
const PROCESS: &str = "flanneld";

/// What flannel has left, in the calling thread's network namespace.
#[derive(Debug)]
pub struct FlannelLeftovers {
    chains: ForeignChains,
    /// Its VXLAN links.
    overlays: Vec<Link>,
    bridge: Option<Link>,
    /// The ports of any bridge with the name of its bridge, such as those of pods that its plugin has connected.
    ports: Vec<String>,
    /// The routes to the pods of other nodes (backend `host-gw`). Those of its links go with the links.
    routes: Vec<Route>,
}

impl FlannelLeftovers {
    /// Looks for leftovers, and changes nothing. Without flannel's networks, its bridge and its routes are not recognised.
    ///
    /// # Errors
    /// The kernel refused to list something.
    pub fn find(networks: &[IpNet]) -> crate::Result<Self> {
        let mut socket = RouteSocket::open()?;
        let (links, addresses) = (socket.links()?, socket.addresses()?);
        let is_in = |net: &IpNet| networks.iter().any(|network| network.contains(net) && network != net);
        let named = links.iter().find(|link| link.name == BRIDGE && link.kind == "bridge").cloned();
        let of_named = |link: &&Link| named.as_ref().is_some_and(|it| link.controller == Some(it.index));
        let ports = links.iter().filter(of_named).map(|link| link.name.clone()).collect();
        let bridge = named.clone().filter(|link| {
            let mut own = addresses.iter().filter(|address| address.link == link.index);
            own.any(|address| is_in(&address.address.into()))
        });
        let is_overlay = |link: &Link| {
            let vni = link.vxlan.map(|it| it.vni.to_string());
            vni.is_some_and(|vni| OVERLAYS.iter().any(|prefix| link.name == format!("{prefix}{vni}")))
        };
        let overlays: Vec<Link> = links.into_iter().filter(is_overlay).collect();
        let mut routes = socket.routes()?;
        routes.retain(|route| {
            let goes_with_link = overlays.iter().any(|link| Some(link.index) == route.link);
            route.protocol == BOOT && route.gateway.is_some() && is_in(&route.destination) && !goes_with_link
        });
        Ok(Self { chains: ForeignChains::find(MARKS)?, overlays, bridge, ports, routes })
    }

    /// Whether nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { chains, overlays, bridge, ports: _, routes } = self;
        chains.is_empty() && overlays.is_empty() && bridge.is_none() && routes.is_empty()
    }

    /// What Tortie cannot remove, each with the remedy.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        self.chains.notes("flannel")
    }

    /// Why nothing may be removed now, with the remedy.
    ///
    /// # Errors
    /// flanneld runs here, or pods need what is there.
    pub fn check(&self) -> crate::Result<()> {
        if runs() {
            return Err(Error::FlannelRuns);
        }
        let links = self.ports.join(", ");
        match (self.ports.is_empty(), self.bridge.is_some()) {
            (true, _) => Ok(()),
            (false, true) => Err(Error::PodsOfFlannel { links }),
            (false, false) => Err(Error::PortsOfUnknownBridge { links }),
        }
    }

    /// Removes everything. Repeat it after an error.
    ///
    /// # Errors
    /// See [`check`](Self::check); or the kernel refused something.
    pub fn remove(mut self) -> crate::Result<()> {
        self.check()?;
        let failed = self.chains.remove()?;
        let mut socket = RouteSocket::open()?;
        for route in &self.routes {
            tolerate_gone(socket.change(&Change::DeleteRoute(route.clone())))?;
        }
        for link in self.overlays.iter().chain(&self.bridge) {
            tolerate_gone(socket.change(&Change::DeleteLink(link.index)))?;
        }
        failed.into_iter().next().map_or(Ok(()), |first| Err(first.into()))
    }
}

/// One line for each object.
impl fmt::Display for FlannelLeftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.chains)?;
        self.routes.iter().try_for_each(|route| writeln!(f, "{route}"))?;
        self.overlays.iter().chain(&self.bridge).try_for_each(|link| writeln!(f, "link {}", link.name))
    }
}

/// Whether its daemon's process is visible.
fn runs() -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut names = processes.filter_map(|process| fs::read_to_string(process.path().join("comm")).ok());
    names.any(|name| name.trim() == PROCESS)
}
