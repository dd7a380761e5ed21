//! The IPIP link (RFC 2003). It has no ends of its own: the router of each route is the other end
//! (`felix/dataplane/linux/ipip_mgr.go` of Calico).
//!
//! The kernel creates a link `tunl0` in each network namespace when it loads its module for IPIP. Nobody can delete that one.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use tortie_api::net::IpVersion;
use tortie_dataplane::{Condition, LocalNode, NodeState, Reason, RouteTarget};
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
    /// The link that Tortie uses, with its MTU.
    made: Option<(u32, u32)>,
    /// Whether it is certain that no link has Tortie's mark.
    is_ended: bool,
}

/// The link, as [`IpipLink::apply`] leaves it.
pub(super) struct AppliedIpip {
    pub(super) index: Option<u32>,
    /// Whether the kernel's tables must be read again.
    pub(super) is_changed: bool,
    pub(super) condition: Option<Condition>,
}

impl IpipLink {
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), made: None, is_ended: false }
    }

    /// Creates or changes the link, or takes the one that the kernel has created, if a pool has IPIP. What prevents that concerns IPIP
    /// only. `is_known` says that nothing has changed in the kernel.
    pub(super) fn apply(
        &mut self,
        state: &NodeState,
        underlay: &Underlay,
        socket: &mut RouteSocket,
        is_known: bool,
    ) -> AppliedIpip {
        let applied = |index, is_changed, condition| AppliedIpip { index, is_changed, condition };
        if state.node.as_ref().is_none_or(|node| node.ipip.is_none()) {
            self.is_ended &= is_known;
            return applied(None, false, None);
        }
        self.is_ended = false;
        let detected = underlay.mtu(IpVersion::V4).unwrap_or(USUAL_MTU).saturating_sub(OVERHEAD);
        let mtu = state.settings.ipip_mtu.unwrap_or(detected);
        if let Some((index, _)) = self.made.filter(|(_, made)| is_known && *made == mtu) {
            return applied(Some(index), false, without_address(state));
        }
        self.made = None;
        match self.obtain(mtu, socket) {
            Ok((index, is_changed)) => {
                self.made = Some((index, mtu));
                applied(Some(index), is_changed, without_address(state))
            }
            Err(problem) => {
                let message = format!("no packets to pods of other nodes by IPIP: {problem}");
                applied(None, false, Some(Condition::new(Reason::RouteRefused, message)))
            }
        }
    }

    /// The index of the link, and whether it has changed.
    fn obtain(&self, mtu: u32, socket: &mut RouteSocket) -> Result<(u32, bool), String> {
        let name = &self.name;
        let found = socket.link(name).map_err(|error| format!("{error}; Tortie retries"))?;
        let link = match found {
            Some(link) => link,
            None => create(name, socket).map_err(|error| {
                format!(
                    "the kernel creates no link {name}: {error}; load its module (modprobe ipip), or move the pods to a pool with VXLAN \
                     (tortie pool migrate). Tortie retries"
                )
            })?,
        };
        if !link.carries_ipv4 {
            let kind = &link.kind;
            return Err(format!(
                "the link {name} of kind {kind:?} is none of IPIP, and stays; if nobody needs it, delete it: ip link delete {name}"
            ));
        }
        let adjusted = adjust(&link, mtu, socket);
        let is_changed = adjusted.map_err(|error| {
            format!("the link {name} cannot be changed: {error}; check ipipMTU in FelixConfiguration. Tortie retries")
        })?;
        Ok((link.index, is_changed))
    }

    /// Ends the use of the link, also of an earlier process, once no pool has IPIP. Returns whether that changed anything.
    pub(super) fn end(&mut self, state: &NodeState, socket: &mut RouteSocket) -> Result<bool> {
        let is_wanted = state.node.as_ref().is_none_or(|node| node.ipip.is_some());
        if is_wanted || self.is_ended {
            return Ok(false);
        }
        let removed = remove(&self.name, socket)?;
        (self.made, self.is_ended) = (None, true);
        Ok(removed)
    }
}

/// Whether Tortie manages an address of the link: its own, and those that Calico or an earlier process has left, which are in a pool.
/// Others are somebody else's.
pub(super) fn is_managed(address: &Address, state: &NodeState) -> bool {
    let net = IpNet::from(address.address);
    let is_own =
        state.node.as_ref().and_then(LocalNode::ipip_address).map(IpAddr::V4) == Some(address.address);
    is_own
        || net.prefix_len() == address.prefix_length
            && state.settings.pools.keys().any(|pool| pool.contains(&net))
}

/// Ends the use of the link, if it has Tortie's mark: deletes it or, if the kernel has created it, its addresses and the mark, and
/// sets it down. Returns whether there was one.
pub(crate) fn remove(name: &str, socket: &mut RouteSocket) -> Result<bool> {
    let marked = |link: &Link| link.alias == MARK && link.carries_ipv4;
    let Some(link) = socket.link(name)?.filter(marked) else { return Ok(false) };
    tracing::info!(link = name, "ending the use of the IPIP link");
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
fn adjust(link: &Link, mtu: u32, socket: &mut RouteSocket) -> Result<bool> {
    let mut settings = Vec::new();
    if link.alias != MARK {
        settings.push(LinkSetting::Alias(MARK.to_owned()));
    }
    if link.mtu != mtu {
        settings.push(LinkSetting::Mtu(mtu));
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

/// The condition of a node whose link has no address, while packets leave by it.
fn without_address(state: &NodeState) -> Option<Condition> {
    let node = state.node.as_ref().filter(|node| node.ipip_address().is_none())?;
    let is_used = state.routes.values().any(|target| matches!(target, RouteTarget::Ipip { .. }));
    let message = || {
        format!(
            "Node {} has no tunnel address for IPIP (projectcalico.org/IPv4IPIPTunnelAddr), so what it sends itself to pods of other nodes \
             may have no answer; let an IPPool with ipipMode give addresses to tunnels of this node (allowedUses, nodeSelector), and have \
             addresses left",
            node.name
        )
    };
    is_used.then(|| Condition::new(Reason::NetworkPartNotInForce, message()))
}
