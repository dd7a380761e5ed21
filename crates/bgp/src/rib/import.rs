//! Which routes of peers may be used.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;

use super::{OwnAddresses, Peer, PeerRules};
use crate::codec::Attributes;
use crate::filter::{Candidate, Verdict};

/// A route that a peer sent, for its policy.
pub(super) fn received<'a>(
    prefix: &'a IpNet,
    rules: &PeerRules,
    attributes: &'a Attributes,
) -> Candidate<'a> {
    Candidate { prefix, attributes, from_peer: true, interface: None, internal_peer: rules.is_internal() }
}

/// The policy about the routes of one message: what does not depend on the prefix is decided once.
pub(super) struct Judge<'a> {
    rules: &'a PeerRules,
    attributes: Arc<Attributes>,
    is_usable: bool,
    /// The last changed attributes, which the next prefix often shares.
    changed: Option<Arc<Attributes>>,
}

impl<'a> Judge<'a> {
    pub(super) fn new(
        identifier: Ipv4Addr,
        rules: &'a PeerRules,
        own: OwnAddresses,
        attributes: Arc<Attributes>,
    ) -> Self {
        let is_usable = not_usable(identifier, rules, own, &attributes).is_none();
        Self { rules, attributes, is_usable, changed: None }
    }

    pub(super) fn accepted(&mut self, prefix: &IpNet) -> Option<Arc<Attributes>> {
        if !self.is_usable {
            return None;
        }
        match self.rules.import.judge(&received(prefix, self.rules, &self.attributes)) {
            Verdict::Rejected => None,
            Verdict::Unchanged => Some(Arc::clone(&self.attributes)),
            Verdict::Changed(changed) => match &self.changed {
                Some(known) if **known == *changed => Some(Arc::clone(known)),
                _ => Some(Arc::clone(self.changed.insert(Arc::from(changed)))),
            },
        }
    }
}

pub(super) fn import(
    identifier: Ipv4Addr,
    peer: &Peer,
    prefix: &IpNet,
    attributes: &Arc<Attributes>,
) -> Option<Arc<Attributes>> {
    Judge::new(identifier, &peer.rules, peer.own_addresses(), Arc::clone(attributes)).accepted(prefix)
}

/// Why a route that a peer sent cannot be used, whatever the policy says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotUsable {
    /// Its next hop is no address of a router.
    ImpossibleNextHop,
    /// Its next hop is a link-local address, and the message does not name the link.
    LinkLocalNextHop,
    /// Its next hop is this node.
    OwnNextHop,
    /// The own autonomous system is in its AS_PATH.
    OwnAutonomousSystem,
    /// This node brought it into the autonomous system (ORIGINATOR_ID).
    OwnOriginator,
    /// It has passed a reflector of the own cluster (CLUSTER_LIST).
    OwnCluster,
}

/// Whether a route is a loop, or leads to no possible next router (RFC 4271 9.1.2 and 6.3, RFC 4456 8).
pub(super) fn not_usable(
    identifier: Ipv4Addr,
    rules: &PeerRules,
    own: OwnAddresses,
    attributes: &Attributes,
) -> Option<NotUsable> {
    let address = attributes.next_hop.address;
    let is_impossible_hop = address.is_unspecified()
        || address.is_multicast()
        || address.is_loopback()
        || address == IpAddr::V4(Ipv4Addr::BROADCAST);
    let is_link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
    let is_own_cluster =
        !rules.cluster_id.is_unspecified() && attributes.cluster_list.contains(&rules.cluster_id);
    let is_own_system = attributes.as_path.count(rules.local_as) > rules.allowed_own_as;
    let reasons = [
        (is_impossible_hop, NotUsable::ImpossibleNextHop),
        (is_link_local, NotUsable::LinkLocalNextHop),
        (own.contains(address) || rules.own_addresses.contains(address), NotUsable::OwnNextHop),
        (is_own_system, NotUsable::OwnAutonomousSystem),
        (attributes.originator_id == Some(identifier), NotUsable::OwnOriginator),
        (is_own_cluster, NotUsable::OwnCluster),
    ];
    reasons.into_iter().find_map(|(holds, reason)| holds.then_some(reason))
}

/// Whether routes to the prefix make sense: those of multicast do not (RFC 4271 6.3).
pub(super) fn is_unicast(prefix: &IpNet) -> bool {
    !prefix.network().is_multicast()
}
