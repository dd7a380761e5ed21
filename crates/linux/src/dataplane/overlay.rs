//! The VXLAN link of one address family.

use std::collections::BTreeMap;
use std::net::IpAddr;

use tortie_api::net::IpVersion;
use tortie_dataplane::{ClusterNetwork, Condition, LocalNode, NodeState, Reason, Vtep};
use tortie_kernel::route::{Change, Link, LinkSetting, NewLink, NewLinkKind, RouteSocket, Vxlan};
use tortie_kernel::{Result, ethtool, interface_index};

use super::ipv6;

/// The mark (`ifalias`) of the VXLAN links that Tortie creates.
pub(crate) const MARK: &str = "tortie overlay";

/// What VXLAN adds to a packet: Ethernet, IP, UDP and its own header (RFC 7348).
fn overhead(version: IpVersion) -> u32 {
    match version {
        IpVersion::V4 => 50,
        IpVersion::V6 => 70,
    }
}

/// The interfaces that have the node's own addresses.
#[derive(Debug, Default)]
pub(super) struct Underlay {
    /// The addresses for which they were read.
    addresses: BTreeMap<IpVersion, IpAddr>,
    /// The index and the MTU of each interface.
    links: BTreeMap<IpVersion, (u32, u32)>,
}

impl Underlay {
    pub(super) fn read(socket: &mut RouteSocket, state: &NodeState) -> Result<Self> {
        // A node's address may be on the loopback interface; packets leave by another one.
        let links: BTreeMap<u32, u32> = socket
            .links()?
            .into_iter()
            .filter(|link| link.name != "lo")
            .map(|link| (link.index, link.mtu))
            .collect();
        let addresses = socket.addresses()?;
        let link = |own: IpAddr| {
            let mut at = addresses.iter().filter(|at| at.address == own);
            at.find_map(|at| Some((at.link, *links.get(&at.link)?)))
        };
        let own = own_addresses(state);
        let links = own.iter().filter_map(|(version, address)| Some((*version, link(*address)?))).collect();
        Ok(Self { addresses: own, links })
    }

    /// Whether they were read for the node's present addresses.
    pub(super) fn is_of(&self, state: &NodeState) -> bool {
        self.addresses == own_addresses(state)
    }

    /// The interface with the node's address of a family.
    pub(super) fn link(&self, version: IpVersion) -> Option<u32> {
        self.links.get(&version).map(|(index, _)| *index)
    }

    pub(super) fn mtu(&self, version: IpVersion) -> Option<u32> {
        self.links.get(&version).map(|(_, mtu)| *mtu)
    }
}

fn own_addresses(state: &NodeState) -> BTreeMap<IpVersion, IpAddr> {
    let ends = state.node.iter().flat_map(|node| &node.ends);
    ends.map(|(version, end)| (*version, end.address)).collect()
}

/// The VXLAN link of a family.
#[derive(Debug)]
pub(super) struct Overlay {
    pub(super) version: IpVersion,
    name: String,
    /// The link that Tortie created or adopted, with its purpose.
    made: Option<(Wanted, u32)>,
    /// The condition if somebody else's VXLAN link is in the way.
    foreign: Option<Condition>,
}

/// A VXLAN link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct VxlanLink {
    pub(super) index: u32,
    pub(super) mtu: u32,
}

/// The links of all overlays.
#[derive(Debug, Default)]
pub(super) struct OverlayLinks {
    /// The VXLAN link of each family.
    pub(super) vxlan: BTreeMap<IpVersion, VxlanLink>,
    /// The index of the IPIP link.
    pub(super) ipip: Option<u32>,
}

impl VxlanLink {
    /// The MTU of a route to the pods of a node, if it must be less than that of the link.
    pub(super) fn mtu_to(&self, vtep: &Vtep) -> Option<u32> {
        vtep.mtu.filter(|mtu| *mtu < self.mtu)
    }
}

/// The link of an overlay, as [`Overlay::apply`] leaves it.
pub(super) struct OverlayLink {
    pub(super) link: Option<VxlanLink>,
    /// Whether the kernel's tables must be read again.
    pub(super) is_changed: bool,
    pub(super) foreign: Option<Condition>,
}

/// What a link must be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    vxlan: Vxlan,
    vtep: Vtep,
    mtu: u32,
    /// Whether it leaves checksums to others; none leaves that as it is.
    checksum_offload: Option<bool>,
}

impl Overlay {
    pub(super) fn new(version: IpVersion, name: &str) -> Self {
        Self { version, name: name.to_owned(), made: None, foreign: None }
    }

    /// Creates or changes the link. Without an overlay, removes Tortie's link, because nothing keeps strangers from sending
    /// packets into it. A link from before this process stays until the node is known. `is_known` says that nothing has changed in
    /// the kernel.
    pub(super) fn apply(
        &mut self,
        state: &NodeState,
        underlay: &Underlay,
        socket: &mut RouteSocket,
        is_known: bool,
    ) -> Result<OverlayLink> {
        let wanted = state.node.as_ref().and_then(|node| self.wanted(node, state, underlay));
        let Some(wanted) = wanted else {
            self.foreign = None;
            let removed = self.remove(socket, state.node.is_some() && !is_known)?;
            return Ok(OverlayLink { link: None, is_changed: removed, foreign: None });
        };
        let mtu = wanted.mtu;
        if let Some((_, index)) = self.made.as_ref().filter(|(made, _)| is_known && *made == wanted) {
            let link = VxlanLink { index: *index, mtu };
            return Ok(OverlayLink { link: Some(link), is_changed: false, foreign: self.foreign.clone() });
        }
        self.made = None;
        let concerns = |link: &Link| {
            let is_alike = |it: Vxlan| is_same_tunnel(&it, &wanted.vxlan);
            link.name == self.name || link.vxlan.is_some_and(is_alike)
        };
        let links = socket.links()?.into_iter().filter(concerns);
        let (mut ours, foreign): (Vec<_>, Vec<_>) =
            links.partition(|link| link.name == self.name && is_ours(link, &wanted));
        self.foreign = foreign.first().map(foreign_link);
        let mut link = ours.pop();
        if link.is_none() && self.foreign.is_some() {
            return Ok(OverlayLink { link: None, is_changed: false, foreign: self.foreign.clone() });
        }
        let mut is_changed = false;
        if let Some(other) = link.take_if(|link| link.vxlan != Some(wanted.vxlan)) {
            tracing::warn!(link = self.name, found = ?other.vxlan, "recreating the VXLAN link with other settings");
            socket.change(&Change::DeleteLink(other.index))?;
            is_changed = true;
        }
        let (index, adjusted) = match link {
            Some(link) => adjust(&link, &wanted, socket)?,
            None => (create(&self.name, &wanted, socket)?, true),
        };
        is_changed |= adjusted;
        if self.version == IpVersion::V6 && (is_changed || !is_known) {
            ipv6::enable_on_overlay(&self.name)?;
        }
        if let Some(on) = wanted.checksum_offload {
            ethtool::set_transmit_checksum_offload(&self.name, on)?;
        }
        self.made = Some((wanted, index));
        Ok(OverlayLink { link: Some(VxlanLink { index, mtu }), is_changed, foreign: self.foreign.clone() })
    }

    /// The link after a change has failed, if packets may still pass it: one with another MTU is better than none.
    pub(super) fn usable(&self, socket: &mut RouteSocket) -> Result<Option<VxlanLink>> {
        let link = socket.link(&self.name)?;
        let is_usable = |link: &Link| link.up && link.alias == MARK && link.vxlan.is_some();
        Ok(link.filter(is_usable).map(|link| VxlanLink { index: link.index, mtu: link.mtu }))
    }

    /// The MTU that the link should have; `None` without an overlay.
    pub(super) fn mtu(&self, node: &LocalNode, state: &NodeState, underlay: &Underlay) -> Option<u32> {
        self.wanted(node, state, underlay).map(|wanted| wanted.mtu)
    }

    /// What the link must be; `None` without an overlay.
    fn wanted(&self, node: &LocalNode, state: &NodeState, underlay: &Underlay) -> Option<Wanted> {
        let version = self.version;
        let vtep = node.vtep(version)?.clone();
        let ClusterNetwork { vni, port, mtu } = node.network;
        let vxlan = Vxlan { vni, port, local: Some(vtep.parent), learning: false };
        let detected = underlay.mtu(version).map(|mtu| mtu.saturating_sub(overhead(version)));
        let configured = match version {
            IpVersion::V4 => state.settings.vxlan_mtu,
            IpVersion::V6 => state.settings.vxlan_mtu_v6,
        };
        let usual = mtu.saturating_sub(overhead(version) - overhead(IpVersion::V4));
        let (mtu, checksum_offload) =
            (configured.or(detected).unwrap_or(usual), state.settings.vxlan_checksum_offload);
        Some(Wanted { vxlan, vtep, mtu, checksum_offload })
    }

    /// Removes Tortie's link, also that of an earlier process if `is_searched`. Returns whether there was one.
    fn remove(&mut self, socket: &mut RouteSocket, is_searched: bool) -> Result<bool> {
        let known = self.made.take().map(|(_, index)| index);
        let earlier = match known {
            None if is_searched => socket.link(&self.name)?.filter(|link| link.alias == MARK),
            _ => None,
        };
        let Some(index) = known.or(earlier.map(|link| link.index)) else { return Ok(false) };
        tracing::info!(link = self.name, "deleting the VXLAN link, because there is no overlay any more");
        socket.change(&Change::DeleteLink(index))?;
        Ok(true)
    }
}

fn create(name: &str, wanted: &Wanted, socket: &mut RouteSocket) -> Result<u32> {
    let kind = NewLinkKind::Vxlan(wanted.vxlan);
    let new = NewLink { mac: Some(wanted.vtep.mac), mtu: Some(wanted.mtu), ..NewLink::new(name, kind) };
    socket.create(&new)?;
    let index = interface_index(name)?;
    // The kernel does not accept a mark on creation. Until the link has its mark, it stays down.
    let marked = vec![LinkSetting::Alias(MARK.to_owned()), LinkSetting::Up(true)];
    socket.change(&Change::SetLink(index, marked))?;
    Ok(index)
}

/// Changes what differs. Returns the link, and whether it has changed: a link that was down has lost its routes.
fn adjust(link: &Link, wanted: &Wanted, socket: &mut RouteSocket) -> Result<(u32, bool)> {
    let mut settings = Vec::new();
    if link.alias != MARK {
        settings.push(LinkSetting::Alias(MARK.to_owned()));
    }
    if link.mac != Some(wanted.vtep.mac) {
        settings.push(LinkSetting::Mac(wanted.vtep.mac));
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
    Ok((link.index, is_changed))
}

/// Whether the kernel cannot have both: links of one family need different identifiers or ports. A link without an address
/// of its own is of either family.
fn is_same_tunnel(one: &Vxlan, other: &Vxlan) -> bool {
    let family = |it: &Vxlan| it.local.as_ref().map(IpVersion::of);
    let of_one_family = family(one).is_none() || family(other).is_none() || family(one) == family(other);
    of_one_family && (one.vni, one.port) == (other.vni, other.port)
}

/// Whether Tortie created a VXLAN link with its name: it has the mark, or the right form or the MAC address that is derived from the node's
/// name, and is not up yet, as after a process that ended between the two steps. Settings and addresses may have changed since.
fn is_ours(link: &Link, wanted: &Wanted) -> bool {
    let is_alike = || link.vxlan == Some(wanted.vxlan) || link.mac == Some(wanted.vtep.mac);
    link.vxlan.is_some() && (link.alias == MARK || link.alias.is_empty() && !link.up && is_alike())
}

fn foreign_link(link: &Link) -> Condition {
    let what = match link.vxlan {
        Some(it) => format!("VXLAN link (VNI {}, port {})", it.vni, it.port),
        None => format!("link of kind {:?}", link.kind),
    };
    let message = format!(
        "the {what} {0} is not ours and stays; while it is there this node may have no overlay. If it is of a Calico that \
         no longer runs: tortie node cleanup --calico; of a flannel that no longer runs: tortie node cleanup --flannel. If nobody else \
         needs it, delete it: ip link delete {0}",
        link.name
    );
    Condition::new(Reason::ForeignVxlanLink, message)
}
