//! What two OPENs agree on.

use std::net::Ipv4Addr;

use crate::codec::notification::{code, open};
use crate::codec::{Capability, Context, Families, Family, GracefulRestart, Notification, Open};

/// The settings of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionSettings {
    /// The own autonomous system, as this peer sees it.
    pub local_as: u32,
    /// The own BGP identifier.
    pub identifier: Ipv4Addr,
    /// The autonomous system of the peer.
    pub peer_as: u32,
    /// The families of routes.
    pub families: Families,
    /// The proposed hold time in seconds: 0 for none, otherwise at least 3.
    pub hold_time: u16,
    /// Seconds between KEEPALIVE messages; a third of the hold time otherwise, and never more than that.
    pub keepalive_time: Option<u16>,
    /// Whether to wait for the peer to connect.
    pub passive: bool,
    /// Seconds between attempts to connect.
    pub connect_retry: u16,
    /// How many seconds the peer is asked to keep routes while this end restarts; `None` turns graceful restart off,
    /// also for restarts of the peer.
    pub restart_time: Option<u16>,
    /// Whether IPv4 routes may have IPv6 next hops (RFC 8950).
    pub extended_next_hop: bool,
}

impl SessionSettings {
    /// The usual settings: BIRD's hold time, and the times to reconnect that Calico gives BIRD.
    #[must_use]
    pub fn new(local_as: u32, identifier: Ipv4Addr, peer_as: u32) -> Self {
        Self {
            local_as,
            identifier,
            peer_as,
            families: Families::BOTH,
            hold_time: 240,
            keepalive_time: None,
            passive: false,
            connect_retry: 5,
            restart_time: Some(120),
            extended_next_hop: false,
        }
    }

    /// Whether the peer is in the same autonomous system.
    #[must_use]
    pub fn is_internal(&self) -> bool {
        self.local_as == self.peer_as
    }

    /// The own OPEN. `restarted` says that this end has just restarted, and `has_forwarded` that it has forwarded packets since the
    /// last session.
    #[must_use]
    pub fn open(&self, restarted: bool, has_forwarded: bool) -> Open {
        let mut capabilities: Vec<Capability> = self.families.iter().map(Capability::family).collect();
        capabilities.extend([Capability::RouteRefresh, Capability::EnhancedRouteRefresh]);
        if self.extended_next_hop && self.families.contains(Family::Ipv4) {
            let (afi, safi) = (Family::Ipv4.afi(), u16::from(Family::Ipv4.safi()));
            capabilities.push(Capability::ExtendedNextHop(vec![(afi, safi, Family::Ipv6.afi())]));
        }
        if let Some(restart_time) = self.restart_time {
            let families =
                self.families.iter().map(|family| (family.afi(), family.safi(), has_forwarded)).collect();
            capabilities.push(Capability::GracefulRestart(GracefulRestart {
                restarted,
                notification: true,
                restart_time,
                families,
            }));
        }
        Open::new(self.local_as, self.hold_time, self.identifier, capabilities)
    }
}

/// What both ends agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// What the meaning of bytes depends on.
    pub context: Context,
    /// The BGP identifier of the peer.
    pub identifier: Ipv4Addr,
    /// The hold time in seconds; 0 for none.
    pub hold_time: u16,
    /// Whether the peer sends its routes again on request.
    pub refresh: bool,
    /// Whether beginning and end of what is sent again are marked.
    pub enhanced_refresh: bool,
    /// The peer's promise for its restart, if both ends made one.
    pub graceful_restart: Option<GracefulRestart>,
}

impl Negotiated {
    /// The families whose routes survive the session, if it ends by a lost connection.
    #[must_use]
    pub fn retainable(&self) -> Families {
        let Some(restart) = &self.graceful_restart else { return Families::default() };
        self.context.families.iter().filter(|family| restart.forwarding(*family).is_some()).collect()
    }
}

/// Compares the peer's OPEN with the settings.
///
/// # Errors
/// The session must end with this notification.
pub(super) fn negotiate(settings: &SessionSettings, peer: &Open) -> Result<Negotiated, Notification> {
    let own = settings.open(false, false);
    if peer.as_number() != settings.peer_as {
        return Err(Notification::new(code::OPEN, open::BAD_PEER_AS));
    }
    // RFC 6286: identifiers are unique within an autonomous system only.
    let is_own = settings.is_internal() && peer.identifier == settings.identifier;
    if peer.identifier.is_unspecified() || is_own {
        return Err(Notification::new(code::OPEN, open::BAD_IDENTIFIER));
    }
    if [1, 2].contains(&peer.hold_time) {
        return Err(Notification::new(code::OPEN, open::UNACCEPTABLE_HOLD_TIME));
    }
    let families = own.families().and(peer.families());
    if families.is_empty() {
        // RFC 5492: the capabilities that are missing.
        let missing = settings.families.iter().flat_map(|family| {
            let [high, low] = family.afi().to_be_bytes();
            [1, 4, high, low, 0, family.safi()]
        });
        let missing: Vec<u8> = missing.collect();
        return Err(Notification::with(code::OPEN, open::UNSUPPORTED_CAPABILITY, missing));
    }
    Ok(Negotiated {
        context: Context {
            four_octet: peer.four_octet_as().is_some(),
            internal: settings.is_internal(),
            extended_next_hop: own.has_extended_next_hop() && peer.has_extended_next_hop(),
            families,
        },
        identifier: peer.identifier,
        hold_time: settings.hold_time.min(peer.hold_time),
        refresh: peer.has(&Capability::RouteRefresh),
        enhanced_refresh: peer.has(&Capability::EnhancedRouteRefresh),
        graceful_restart: own.graceful_restart().and(peer.graceful_restart()).cloned(),
    })
}
