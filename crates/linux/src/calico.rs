//! What Calico leaves on a node when Tortie has taken over: found, and removed on request.
//!
//! The links of pods stay, because Tortie has adopted them. The VXLAN link and the routes between nodes are handed over to
//! the agent instead of being removed, so that no packet is lost: the agent keeps what it needs and removes the rest.

mod running;

use std::fmt;

use tortie_kernel::ipset;
use tortie_kernel::nftables::Nft;
use tortie_kernel::nftables::leftovers::Marks;
use tortie_kernel::route::{Address, Change, Link, LinkSetting, Route, RouteSocket};

use crate::Error;
use crate::dataplane::{Config, OVERLAY_MARK, ROUTE_PROTOCOL, is_held};
use crate::error::tolerate_gone;
use crate::foreign_chains::ForeignChains;

pub use running::running;

/// Calico's objects in nftables: tables of its own, or chains and rules in those of `iptables` (`felix/rules`).
const MARKS: Marks<'static> = Marks { tables: &["calico"], chains: "cali-", comments: "cali:" };
/// The prefixes of its IP sets (`felix/ipsets`): version 4 and 6, permanent and temporary.
const SETS: [&str; 4] = ["cali40", "cali60", "cali4t", "cali6t"];
/// `RTPROT` of its routes (`felix/dataplane/linux`).
pub(crate) const PROTOCOL: u8 = 80;
/// The protocol number of routes by BIRD, which Calico runs (`rtnetlink.h`).
pub(crate) const BIRD_PROTOCOL: u8 = 12;
/// Its links besides those of pods and the overlays.
const LINKS: [&str; 4] = ["wireguard.cali", "wg-v6.cali", "bpfin.cali", "bpfout.cali"];
/// The link of IPIP, which the kernel creates and nobody can delete.
const IPIP: &str = "tunl0";

/// What Calico has left, in the calling thread's network namespace.
#[derive(Debug)]
pub struct Found {
    chains: ForeignChains,
    sets: Vec<String>,
    routes: Vec<Route>,
    /// The VXLAN links, without the mark of Tortie.
    overlays: Vec<Link>,
    links: Vec<Link>,
    /// The addresses of the link of IPIP.
    ipip: Vec<Address>,
}

impl Found {
    /// Looks for leftovers, and changes nothing.
    ///
    /// # Errors
    /// The kernel refused to list something.
    pub fn find(config: &Config) -> crate::Result<Self> {
        let mut socket = RouteSocket::open()?;
        let (mut overlays, mut links, mut ipip) = (Vec::new(), Vec::new(), Vec::new());
        let mut tunnel = None;
        for link in socket.links()? {
            if link.name == IPIP && link.carries_ipv4 {
                tunnel = Some(link.index);
            }
            let is_overlay = [&config.vxlan_device, &config.vxlan_v6_device].contains(&&link.name);
            if is_overlay && link.vxlan.is_some() && link.alias.is_empty() {
                overlays.push(link);
            } else if LINKS.contains(&link.name.as_str()) {
                links.push(link);
            } else if link.name == IPIP && link.alias != OVERLAY_MARK {
                // Calico's tunnel address is a network of its own.
                ipip = socket.addresses()?;
                ipip.retain(|address| address.link == link.index && address.prefix_length == 32);
            }
        }
        let mut sets = ipset::names()?;
        sets.retain(|name| SETS.iter().any(|prefix| name.starts_with(prefix)));
        let mut routes = socket.routes()?;
        // BIRD has the routes by IPIP, and leaves them if it is killed.
        let is_of_bird = |route: &Route| route.protocol == BIRD_PROTOCOL && route.link == tunnel;
        routes.retain(|route| route.protocol == PROTOCOL || tunnel.is_some() && is_of_bird(route));
        Ok(Self { chains: ForeignChains::find(MARKS)?, sets, routes, overlays, links, ipip })
    }

    /// Whether nothing is left that [`remove`](Self::remove) would change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { chains, sets, routes, overlays, links, ipip } = self;
        chains.is_empty()
            && sets.is_empty()
            && routes.is_empty()
            && overlays.is_empty()
            && links.is_empty()
            && ipip.is_empty()
    }

    /// What Tortie cannot remove, each with the remedy.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        self.chains.notes("Calico")
    }

    /// Removes everything, or hands it over to the agent. Repeat it after an error.
    ///
    /// # Errors
    /// Calico runs here; Tortie's policy is not in force here, so that pods would lose all policy; or the kernel refused
    /// something.
    pub fn remove(mut self, config: &Config) -> crate::Result<()> {
        if let Some(sign) = running() {
            return Err(Error::CalicoRuns { sign });
        }
        let mut nft = Nft::open()?;
        if nft.list(&config.table)?.is_none() || is_held(&mut nft, &config.table)? {
            return Err(Error::NotInForce { table: config.table.clone() });
        }
        // One table that cannot be changed must not keep the overlay from being handed over.
        let mut failed = self.chains.remove()?;
        // Rules no longer use them.
        failed.extend(self.sets.iter().filter_map(|name| ipset::destroy(name).err()));
        let mut socket = RouteSocket::open()?;
        for overlay in &self.overlays {
            let marked = vec![LinkSetting::Alias(OVERLAY_MARK.to_owned())];
            socket.change(&Change::SetLink(overlay.index, marked))?;
        }
        let handed_over =
            |route: &Route| Change::ReplaceRoute(Route { protocol: ROUTE_PROTOCOL, ..route.clone() });
        self.routes.iter().try_for_each(|route| tolerate_gone(socket.change(&handed_over(route))))?;
        for link in &self.links {
            tolerate_gone(socket.change(&Change::DeleteLink(link.index)))?;
        }
        for address in &self.ipip {
            tolerate_gone(socket.change(&Change::DeleteAddress(*address)))?;
            let down = Change::SetLink(address.link, vec![LinkSetting::Up(false)]);
            tolerate_gone(socket.change(&down))?;
        }
        failed.into_iter().next().map_or(Ok(()), |first| Err(first.into()))
    }
}

/// One line for each object.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.chains)?;
        self.sets.iter().try_for_each(|name| writeln!(f, "IP set {name}"))?;
        self.routes.iter().try_for_each(|route| writeln!(f, "{route}, which Tortie's agent takes over"))?;
        for link in &self.overlays {
            writeln!(f, "link {}, which Tortie's agent takes over", link.name)?;
        }
        self.links.iter().try_for_each(|link| writeln!(f, "link {}", link.name))?;
        self.ipip.iter().try_for_each(|address| writeln!(f, "address {} of link {IPIP}", address.address))
    }
}
