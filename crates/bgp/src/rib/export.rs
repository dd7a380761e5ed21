//! What a peer is told about a route (RFC 4271 5.1 and 9.1.3, RFC 4456, RFC 1997).

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use super::decision::DEFAULT_PREFERENCE;
use crate::codec::{Attributes, Community, Family, NextHop};
use crate::filter::Policy;

/// The next hop that a peer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NextHopMode {
    /// The own address for external peers and own routes; otherwise that of the route.
    #[default]
    Auto,
    /// Always the own address.
    Own,
    /// That of the route, except for own routes.
    Keep,
}

/// The settings of a peer for routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerRules {
    /// The peer's address.
    pub address: IpAddr,
    /// The own autonomous system, as this peer sees it.
    pub local_as: u32,
    /// The peer's autonomous system.
    pub peer_as: u32,
    /// Whether it is a client of this route reflector.
    pub client: bool,
    /// The cluster of this route reflector.
    pub cluster_id: Ipv4Addr,
    /// The next hop that it is told.
    pub next_hop: NextHopMode,
    /// The own addresses that it may use as next hops, in families other than that of the session.
    pub own_addresses: OwnAddresses,
    /// How often the own number may be in the path of its routes.
    pub allowed_own_as: usize,
    /// The most prefixes of a family that it may send.
    pub max_prefixes: Option<u32>,
    /// What is taken from it.
    pub import: Policy,
    /// What is sent to it.
    pub export: Policy,
}

/// An address in each family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnAddresses {
    /// The IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address.
    pub ipv6: Option<std::net::Ipv6Addr>,
}

impl OwnAddresses {
    /// The addresses with this one in its family. An address that no router far away can use replaces none.
    #[must_use]
    pub fn with(self, address: IpAddr) -> Self {
        match address {
            address if address.is_unspecified() => self,
            IpAddr::V4(address) => Self { ipv4: Some(address), ..self },
            IpAddr::V6(address) if address.is_unicast_link_local() && self.ipv6.is_some() => self,
            IpAddr::V6(address) => Self { ipv6: Some(address), ..self },
        }
    }

    /// Whether the address is one of them.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.ipv4 == Some(address),
            IpAddr::V6(address) => self.ipv6 == Some(address),
        }
    }

    fn next_hop(&self, family: Family, extended_next_hop: bool) -> Option<IpAddr> {
        let ipv6 = self.ipv6.map(IpAddr::V6);
        match family {
            Family::Ipv4 => self.ipv4.map(IpAddr::V4).or(ipv6.filter(|_| extended_next_hop)),
            Family::Ipv6 => ipv6,
        }
    }
}

impl PeerRules {
    /// Rules that let everything pass.
    #[must_use]
    pub fn new(address: IpAddr, local_as: u32, peer_as: u32) -> Self {
        Self {
            address,
            local_as,
            peer_as,
            client: false,
            cluster_id: Ipv4Addr::UNSPECIFIED,
            next_hop: NextHopMode::Auto,
            own_addresses: OwnAddresses::default(),
            allowed_own_as: 0,
            max_prefixes: None,
            import: Policy::ACCEPT,
            export: Policy::ACCEPT,
        }
    }

    /// Whether the peer is in the same autonomous system.
    #[must_use]
    pub fn is_internal(&self) -> bool {
        self.local_as == self.peer_as
    }
}

/// Where a route comes from, as far as its export depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Provenance {
    /// It is the own one.
    Own,
    /// A peer sent it.
    Peer { internal: bool, client: bool, identifier: Ipv4Addr },
}

/// Why a peer is not told a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotAdvertised {
    /// There is no session with the peer.
    NoSession,
    /// The session is not for routes of this family.
    OtherFamily,
    /// The peer sent the route itself.
    Sender,
    /// A well-known community keeps it here (RFC 1997).
    Community(Community),
    /// An internal peer sent it, and neither of the two is a client of this reflector.
    NotReflected,
    /// The policy for the peer rejects it: the rule, or none if no rule accepts it.
    Rejected(Option<Arc<str>>),
    /// The node has no address that the peer could use as the next hop.
    NoNextHop,
}

/// Why the route must not go to the peer, before its policy is asked.
pub(super) fn refusal(attributes: &Attributes, from: Provenance, to: &PeerRules) -> Option<NotAdvertised> {
    let of_all = [Community::NO_ADVERTISE];
    let of_external = [Community::NO_EXPORT, Community::NO_EXPORT_SUBCONFED];
    let external = of_external.into_iter().filter(|_| !to.is_internal());
    if let Some(community) =
        of_all.into_iter().chain(external).find(|community| attributes.communities.contains(community))
    {
        return Some(NotAdvertised::Community(community));
    }
    match from {
        Provenance::Peer { internal: true, client, .. } if to.is_internal() && !client && !to.client => {
            Some(NotAdvertised::NotReflected)
        }
        Provenance::Peer { .. } | Provenance::Own => None,
    }
}

/// Whether the route may go to the peer at all, before its policy is asked.
pub(super) fn may_export(attributes: &Attributes, from: Provenance, to: &PeerRules) -> bool {
    refusal(attributes, from, to).is_none()
}

/// The attributes that the peer is told; `None` if there is no next hop that it could use.
pub(super) fn exported(
    family: Family,
    mut attributes: Attributes,
    from: Provenance,
    (to, own): (&PeerRules, OwnAddresses),
    extended_next_hop: bool,
) -> Option<Attributes> {
    let is_own_hop = attributes.next_hop.address.is_unspecified();
    let replaces = match to.next_hop {
        NextHopMode::Auto => is_own_hop || !to.is_internal(),
        NextHopMode::Own => true,
        NextHopMode::Keep => is_own_hop,
    };
    if replaces {
        attributes.next_hop = own.next_hop(family, extended_next_hop)?.into();
    }
    let needs_extension = family == Family::Ipv4 && attributes.next_hop.address.is_ipv6();
    if needs_extension && !extended_next_hop {
        return None;
    }
    // A link-local address means nothing beyond the link on which it was received.
    attributes.next_hop = NextHop { link_local: None, ..attributes.next_hop };
    if to.is_internal() {
        attributes.local_pref.get_or_insert(DEFAULT_PREFERENCE);
        if let Provenance::Peer { internal: true, identifier, .. } = from {
            attributes.originator_id.get_or_insert(identifier);
            attributes.cluster_list.insert(0, to.cluster_id);
        }
    } else {
        attributes.as_path = attributes.as_path.without_confederations();
        attributes.as_path.prepend(to.local_as);
        attributes.local_pref = None;
        attributes.originator_id = None;
        // Those that are not transitive (RFC 4360 6).
        attributes.extended_communities.retain(|community| community[0] & 0x40 == 0);
        attributes.cluster_list.clear();
        // It is for the neighbouring system only (RFC 4271 5.1.4).
        attributes.med = attributes.med.filter(|_| from == Provenance::Own);
    }
    Some(attributes)
}
