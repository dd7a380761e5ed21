//! The IPIP link (RFC 2003). It has no ends of its own: the router of each route is the other end
//! (`felix/dataplane/linux/ipip_mgr.go` of Calico).
//!
//! The kernel creates a link `tunl0` in each network namespace when it loads its module for IPIP. Nobody can delete that one.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use tortie_api::net::IpVersion;
use tortie_dataplane::{Condition, NodeState, Reason, RouteTarget};
use tortie_kernel::route::{Address, Change, Link, LinkSetting, NewLink, NewLinkKind, RouteSocket};
use tortie_kernel::{Error, Result};

use super::overlay::{MARK, Underlay};

/// What IPIP adds to a packet: the outer IPv4 header.
const OVERHEAD: u32 = 20;
/// The MTU of the node's interface where none is known.
const USUAL_MTU: u32 = 1500;

/// The IPIP link of the node.
#[derive(Debug)]
pub(super) struct IpipLink {
    name: String,
    /// The link that Tortie uses, with its purpose.
    made: Option<(WantedIpip, u32)>,
    condition: Option<Condition>,
}

/// The link, as [`IpipLink::apply`] leaves it.
pub(super) struct AppliedIpip {
    pub(super) index: Option<u32>,
    /// Whether the kernel's tables must be read again.
    pub(super) is_changed: bool,
    pub(super) condition: Option<Condition>,
}

/// What the link must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WantedIpip {
    address: Ipv4Addr,
    mtu: u32,
}

impl IpipLink {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), made: None, condition: None }
    }

    /// Creates or changes the link, or takes the one that the kernel has created. Without IPIP, the link ends, also that of an earlier
    /// process. `is_known` says that nothing has changed in the kernel.
    pub(super) fn apply(
        &mut self,
        state: &NodeState,
        underlay: &Underlay,
        socket: &mut RouteSocket,
        is_known: bool,
    ) -> Result<AppliedIpip> {
        let address = state.node.as_ref().and_then(|node| node.ipip);
        let Some(address) = address else {
            self.condition = without_address(state);
            let is_searched = state.node.is_some() && !is_known;
            let is_changed = (self.made.take().is_some() || is_searched) && remove(&self.name, socket)?;
            return Ok(self.applied(None, is_changed));
        };
        let detected = underlay.mtu(IpVersion::V4).unwrap_or(USUAL_MTU).saturating_sub(OVERHEAD);
        let wanted = WantedIpip { address, mtu: state.settings.ipip_mtu.unwrap_or(detected) };
        if let Some((_, index)) = self.made.filter(|(made, _)| is_known && *made == wanted) {
            return Ok(self.applied(Some(index), false));
        }
        (self.made, self.condition) = (None, None);
        let link = match socket.link(&self.name)? {
            Some(link) => link,
            None => match create(&self.name, socket) {
                Ok(link) => link,
                Err(error) => {
                    let message = format!(
                        "no packets to pods of other nodes with IPIP: the kernel creates no link {}: {error}; load its module (modprobe ipip), \
                         or move the pods to a pool with VXLAN (tortie pool migrate). Tortie retries",
                        self.name
                    );
                    self.condition = Some(Condition::new(Reason::RouteRefused, message));
                    return Ok(self.applied(None, false));
                }
            },
        };
        if !link.carries_ipv4 {
            let message = format!(
                "the link {} of kind {:?} is none of IPIP and stays, so no packets reach pods of other nodes by IPIP; if nobody needs it, \
                 delete it: ip link delete {0}",
                self.name, link.kind
            );
            self.condition = Some(Condition::new(Reason::RouteRefused, message));
            return Ok(self.applied(None, false));
        }
        let is_changed = adjust(&link, wanted, socket)?;
        self.made = Some((wanted, link.index));
        Ok(self.applied(Some(link.index), is_changed))
    }

    fn applied(&self, index: Option<u32>, is_changed: bool) -> AppliedIpip {
        AppliedIpip { index, is_changed, condition: self.condition.clone() }
    }
}

/// Whether Tortie keeps an address of the link: its own, and those that Calico or an earlier process has left, which are in a pool.
/// Others are somebody else's.
pub(super) fn is_kept(address: &Address, state: &NodeState) -> bool {
    let net = IpNet::from(address.address);
    let is_own = state.node.as_ref().and_then(|node| node.ipip).map(IpAddr::V4) == Some(address.address);
    is_own
        || net.prefix_len() == address.prefix_length
            && state.settings.pools.keys().any(|pool| pool.contains(&net))
}

/// Ends the use of the link, if it has Tortie's mark: deletes it or, if the kernel has created it, its addresses and the mark, and
/// sets it down. Returns whether there was one.
pub(crate) fn remove(name: &str, socket: &mut RouteSocket) -> Result<bool> {
    let marked = |link: &Link| link.alias == MARK && link.carries_ipv4;
    let Some(link) = socket.link(name)?.filter(marked) else { return Ok(false) };
    tracing::info!(link = name, "ending the use of the IPIP link, because no pool has IPIP any more");
    let addresses = socket.addresses()?.into_iter().filter(|at| at.link == link.index);
    let single = addresses.filter(|at| at.prefix_length == 32);
    for address in single.collect::<Vec<_>>() {
        socket.change(&Change::DeleteAddress(address))?;
    }
    socket.change(&Change::DeleteLink(link.index))?;
    if socket.link(name)?.is_some() {
        let unused = vec![LinkSetting::Up(false), LinkSetting::Alias(String::new())];
        socket.change(&Change::SetLink(link.index, unused))?;
    }
    Ok(true)
}

/// Creates the link. If the kernel loads its module for that, the link may be there by then.
fn create(name: &str, socket: &mut RouteSocket) -> Result<Link> {
    let created = socket.create(&NewLink::new(name, NewLinkKind::Ipip));
    if let Err(error) = created
        && error.errno() != Some(libc::EEXIST)
    {
        return Err(error);
    }
    let gone = || Error::system("find the link", name)(io::Error::from(io::ErrorKind::NotFound));
    socket.link(name)?.ok_or_else(gone)
}

/// Changes what differs. Returns whether the link has changed: a link that was down has lost its routes.
fn adjust(link: &Link, wanted: WantedIpip, socket: &mut RouteSocket) -> Result<bool> {
    let mut settings = Vec::new();
    if link.alias != MARK {
        settings.push(LinkSetting::Alias(MARK.to_owned()));
    }
    if link.mtu != wanted.mtu {
        settings.push(LinkSetting::Mtu(wanted.mtu));
    }
    if !link.up {
        settings.push(LinkSetting::Up(true));
    }
    let is_changed = !settings.is_empty();
    if is_changed {
        socket.change(&Change::SetLink(link.index, settings))?;
    }
    Ok(is_changed)
}

/// The condition of a node without an address for its IPIP link.
fn without_address(state: &NodeState) -> Option<Condition> {
    let node = state.node.as_ref()?;
    let by_node: BTreeMap<_, _> = state
        .routes
        .iter()
        .filter_map(|(net, target)| match target {
            RouteTarget::Ipip { router } => Some((*router, *net)),
            RouteTarget::Local | RouteTarget::Vxlan { .. } | RouteTarget::Direct { .. } => None,
        })
        .collect();
    let (router, net) = by_node.first_key_value()?;
    let message = format!(
        "Node {} has no tunnel address for IPIP (projectcalico.org/IPv4IPIPTunnelAddr), so no route leads to {net} at {router}; let an \
         IPPool with ipipMode give addresses to tunnels (allowedUses), and have addresses left",
        node.name
    );
    Some(Condition::new(Reason::RouteRefused, message))
}
