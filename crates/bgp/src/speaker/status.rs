//! What a speaker reports.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::codec::Families;
use crate::fsm::{Negotiated, State};
use crate::rib::{PeerId, RouteChange};

/// A change of routes, for whoever puts them into the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteEvent {
    /// The chosen routes of these prefixes changed.
    Changed(Vec<RouteChange>),
    /// The first routes are complete: routes of an earlier life of the speaker that were not reported since are gone.
    Complete,
    /// The costs of these next hops are needed. Only [`Speaker::start_asking`](super::Speaker::start_asking) leads to this.
    UnknownNextHops(Vec<IpAddr>),
}

/// The state of a speaker.
#[derive(Debug, Clone)]
pub struct SpeakerStatus {
    /// The peers, by address.
    pub peers: Vec<PeerStatus>,
    /// How many sessions are established.
    pub established: usize,
    /// Whether it still waits for its peers' routes after its restart.
    pub deferring: bool,
}

/// The state of a peer.
#[derive(Debug, Clone)]
pub struct PeerStatus {
    /// Its address and port.
    pub address: SocketAddr,
    /// Its number in [`RouteEvent`].
    pub id: PeerId,
    /// The state of the session.
    pub state: State,
    /// For how long the session is established.
    pub since: Option<Duration>,
    /// What was agreed on.
    pub negotiated: Option<Negotiated>,
    /// The families whose stale routes are kept.
    pub stale: Families,
    /// How many routes it sent.
    pub received: u32,
    /// How many routes it was told.
    pub advertised: usize,
    /// How often the session was established.
    pub established: u64,
    /// Why the last session ended.
    pub last_error: Option<String>,
}
