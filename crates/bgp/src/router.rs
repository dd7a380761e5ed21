//! A speaker without sockets and clocks: sessions and routing tables together.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::IpNet;

use crate::codec::notification::{cease, code};
use crate::codec::{Families, Family, Notification, RefreshKind, encode_refresh};
use crate::fsm::{ConnectionId, Input, Output, Session, SessionSettings, Time};
use crate::rib::{OwnRoute, PeerId, PeerRules, Rib, RouteChange};

/// What the speaker wants.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Connect to the peer; answer with [`Router::connected`] or [`Router::connect_failed`].
    Connect(PeerId),
    /// Send these bytes.
    Send(ConnectionId, Vec<u8>),
    /// The next bytes show whether the peer still has the connection: end it if the peer's system does not acknowledge them within some seconds.
    Probe(ConnectionId),
    /// End the connection after what was sent before.
    Close(ConnectionId),
}

#[derive(Debug)]
struct Member {
    session: Session,
    /// The own addresses of its connections.
    own: BTreeMap<ConnectionId, IpAddr>,
    /// The families whose first routes are complete, in this session.
    complete: Families,
}

/// The wait after an own restart until the peers' routes are there (RFC 4724 4.1).
#[derive(Debug, Clone, Copy)]
struct Deferral {
    until: Time,
}

/// A speaker.
#[derive(Debug)]
pub struct Router {
    members: BTreeMap<PeerId, Member>,
    rib: Rib,
    deferral: Option<Deferral>,
    /// Changes that are held back until the wait ends.
    held: BTreeMap<IpNet, RouteChange>,
    seed: u64,
}

impl Router {
    /// A speaker without peers. The seed decides about delays. `restarted` says that the speaker has just restarted and
    /// that packets were forwarded all the time; nothing is told to the kernel, and to peers that keep the routes from before,
    /// until the peers' routes are there, or that time is over.
    #[must_use]
    pub fn new(identifier: Ipv4Addr, seed: u64, now: Time, restarted: Option<Duration>) -> Self {
        Self {
            members: BTreeMap::new(),
            rib: Rib::new(identifier),
            deferral: restarted.map(|wait| Deferral { until: now + wait }),
            held: BTreeMap::new(),
            seed,
        }
    }

    /// The routing tables.
    #[must_use]
    pub fn rib(&self) -> &Rib {
        &self.rib
    }

    /// The session with a peer.
    #[must_use]
    pub fn session(&self, id: PeerId) -> Option<&Session> {
        self.members.get(&id).map(|member| &member.session)
    }

    /// The peers.
    pub fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.members.keys().copied()
    }

    /// Whether the speaker still waits for its peers' routes after its restart.
    #[must_use]
    pub fn is_deferring(&self) -> bool {
        self.deferral.is_some()
    }

    /// Adds a peer, or changes it. A session whose settings stay the same goes on.
    pub fn set_peer(
        &mut self,
        now: Time,
        id: PeerId,
        settings: SessionSettings,
        rules: PeerRules,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Some(member) = self.members.get(&id)
            && *member.session.settings() != settings
        {
            let reason = Notification::new(code::CEASE, cease::CONFIGURATION_CHANGE);
            effects = self.handle(now, id, Input::Stop(reason));
            self.members.remove(&id);
        }
        self.rib.set_peer(id, rules);
        if !self.members.contains_key(&id) {
            let seed = self.seed.wrapping_add(u64::from(id.0)).wrapping_mul(0x2545_f491_4f6c_dd1d);
            let mut session = Session::new(settings, seed);
            session.set_restarted(self.deferral.is_some());
            self.members.insert(id, Member { session, own: BTreeMap::new(), complete: Families::default() });
            effects.extend(self.handle(now, id, Input::Start));
        }
        effects
    }

    /// Removes a peer with its routes.
    pub fn remove_peer(&mut self, now: Time, id: PeerId) -> Vec<Effect> {
        let reason = Notification::new(code::CEASE, cease::PEER_DECONFIGURED);
        let effects = self.handle(now, id, Input::Stop(reason));
        self.members.remove(&id);
        self.rib.remove_peer(id);
        self.end_deferral(now);
        effects
    }

    /// Ends all sessions, and tells the peers why.
    pub fn shut_down(&mut self, now: Time, text: &str) -> Vec<Effect> {
        let ids: Vec<PeerId> = self.members.keys().copied().collect();
        let reason = Notification::shutdown(cease::ADMINISTRATIVE_SHUTDOWN, text);
        ids.into_iter().flat_map(|id| self.handle(now, id, Input::Stop(reason.clone()))).collect()
    }

    /// Adds, changes or removes an own route.
    pub fn set_own(&mut self, prefix: IpNet, route: Option<OwnRoute>) {
        self.rib.set_own(prefix, route);
    }

    /// From now on, a route is used only when the cost of the way to its next hop is known. Otherwise, unknown next hops cost nothing.
    pub fn require_known_next_hops(&mut self) {
        self.rib.require_known_next_hops();
    }

    /// The next hops whose costs are needed, each once.
    pub fn take_unknown_next_hops(&mut self) -> Vec<IpAddr> {
        self.rib.take_unknown_next_hops()
    }

    /// Sets the costs of the ways to next hops; `None` if there is no way.
    pub fn set_costs(&mut self, now: Time, costs: impl IntoIterator<Item = (IpAddr, Option<u32>)>) {
        self.rib.set_costs(costs);
        self.end_deferral(now);
    }

    /// Forgets the costs of next hops that no route has any more, and returns these next hops.
    pub fn forget_unused_costs(&mut self) -> Vec<IpAddr> {
        self.rib.forget_unused_costs()
    }

    /// A requested connection is there; `own` is its local address.
    pub fn connected(&mut self, now: Time, id: PeerId, connection: ConnectionId, own: IpAddr) -> Vec<Effect> {
        self.remember(id, connection, own);
        self.handle(now, id, Input::Connected(connection))
    }

    /// A requested connection did not come about.
    pub fn connect_failed(&mut self, now: Time, id: PeerId) -> Vec<Effect> {
        self.handle(now, id, Input::ConnectFailed)
    }

    /// A peer has connected; `own` is the local address.
    pub fn accepted(&mut self, now: Time, id: PeerId, connection: ConnectionId, own: IpAddr) -> Vec<Effect> {
        self.remember(id, connection, own);
        self.handle(now, id, Input::Accepted(connection))
    }

    fn remember(&mut self, id: PeerId, connection: ConnectionId, own: IpAddr) {
        if let Some(member) = self.members.get_mut(&id) {
            member.own.insert(connection, own);
        }
    }

    /// A whole message has arrived, or a wrong header.
    pub fn received(
        &mut self,
        now: Time,
        id: PeerId,
        connection: ConnectionId,
        message: Result<&[u8], Notification>,
    ) -> Vec<Effect> {
        self.handle(now, id, Input::Received(connection, message))
    }

    /// A connection has ended.
    pub fn closed(&mut self, now: Time, id: PeerId, connection: ConnectionId) -> Vec<Effect> {
        self.handle(now, id, Input::Closed(connection))
    }

    /// Ends a session, and begins it again after a while.
    pub fn reset(&mut self, now: Time, id: PeerId, reason: Notification) -> Vec<Effect> {
        self.handle(now, id, Input::Reset(reason))
    }

    /// Asks a peer to send its routes again, if it can.
    pub fn request_refresh(&mut self, id: PeerId) -> Vec<Effect> {
        let Some(session) = self.session(id) else { return Vec::new() };
        let (Some(connection), Some((negotiated, _))) = (session.connection(), session.negotiated()) else {
            return Vec::new();
        };
        let families = negotiated.context.families.iter().filter(|_| negotiated.refresh);
        let request = |family| Effect::Send(connection, encode_refresh(family, RefreshKind::Request));
        families.map(request).collect()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Time) -> Vec<Effect> {
        let is_due = |member: &Member| member.session.deadline().is_some_and(|deadline| deadline <= now);
        let due: Vec<PeerId> =
            self.members.iter().filter(|(_, member)| is_due(member)).map(|(id, _)| *id).collect();
        let effects = due.into_iter().flat_map(|id| self.handle(now, id, Input::Tick)).collect();
        self.end_deferral(now);
        effects
    }

    /// When [`tick`](Self::tick) is to be called next.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        let sessions = self.members.values().filter_map(|member| member.session.deadline());
        sessions.chain(self.deferral.map(|deferral| deferral.until)).min()
    }

    /// The changes of the chosen routes since the last call; none while the speaker waits for its peers' routes.
    pub fn take_changes(&mut self) -> Vec<RouteChange> {
        let changes = self.rib.recalculate();
        if !self.is_deferring() && self.held.is_empty() {
            return changes;
        }
        self.held.extend(changes.into_iter().map(|change| (change.prefix, change)));
        if self.is_deferring() { Vec::new() } else { std::mem::take(&mut self.held).into_values().collect() }
    }

    /// The next messages with routes for a peer, and the connection for them; `None` if it knows everything. Call
    /// [`take_changes`](Self::take_changes) before.
    pub fn messages(&mut self, id: PeerId) -> Option<(ConnectionId, Vec<Vec<u8>>)> {
        let session = &self.members.get(&id)?.session;
        let (negotiated, _) = session.negotiated()?;
        // A peer without graceful restart has forgotten the routes from before, so it needs some at once.
        if self.is_deferring() && negotiated.graceful_restart.is_some() || self.rib.is_idle(id) {
            return None;
        }
        let connection = session.connection()?;
        Some((connection, self.rib.messages(id)))
    }

    fn handle(&mut self, now: Time, id: PeerId, input: Input<'_>) -> Vec<Effect> {
        let Some(member) = self.members.get_mut(&id) else {
            // A connection of a peer that has just been removed.
            return match input {
                Input::Connected(connection) | Input::Accepted(connection) => vec![Effect::Close(connection)],
                _ => Vec::new(),
            };
        };
        let outputs = member.session.handle(now, input);
        let mut effects = Vec::new();
        for output in outputs {
            self.carry_out(now, id, output, &mut effects);
        }
        effects
    }

    fn carry_out(&mut self, now: Time, id: PeerId, output: Output, effects: &mut Vec<Effect>) {
        match output {
            Output::Connect => effects.push(Effect::Connect(id)),
            Output::Send(connection, bytes) => effects.push(Effect::Send(connection, bytes)),
            Output::Probe(connection) => effects.push(Effect::Probe(connection)),
            Output::Close(connection) => {
                if let Some(member) = self.members.get_mut(&id) {
                    member.own.remove(&connection);
                }
                effects.push(Effect::Close(connection));
            }
            Output::Up(connection) => self.up(now, id, connection),
            Output::Down(retained) => self.rib.down(id, retained),
            Output::Forget(families) => self.rib.forget_stale(id, families),
            Output::Update(update) => {
                update
                    .problems
                    .iter()
                    .for_each(|problem| tracing::warn!(peer = id.0, %problem, "malformed UPDATE"));
                let end = update.end_of_rib;
                if let Err(excess) = self.rib.update(id, update) {
                    let (address, family, limit) = (self.rib.address(id), excess.family, excess.limit);
                    tracing::error!(
                        peer = address.map(tracing::field::display),
                        %family,
                        limit,
                        "the peer sent more prefixes than it may, and is rejected for up to two minutes; let it send fewer, such as a \
                         default route"
                    );
                    let reason = Notification::too_many_prefixes(excess.family, excess.limit);
                    effects.extend(self.handle(now, id, Input::Reset(reason)));
                }
                if let (Some(family), Some(member)) = (end, self.members.get_mut(&id)) {
                    member.complete.insert(family);
                    self.end_deferral(now);
                }
            }
            Output::Refresh(family, RefreshKind::Request) => {
                let negotiated = self.session(id).and_then(Session::negotiated);
                let marks = negotiated.is_some_and(|(negotiated, _)| negotiated.enhanced_refresh);
                self.rib.refresh(id, family, marks);
            }
            Output::Refresh(family, RefreshKind::Begin) => self.rib.make_stale(id, family),
            Output::Refresh(family, RefreshKind::End) => {
                self.rib.forget_stale(id, Families::from_iter([family]));
            }
            Output::Refresh(_, RefreshKind::Other(_)) => {}
        }
    }

    fn up(&mut self, now: Time, id: PeerId, connection: ConnectionId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let Some((negotiated, _)) = member.session.negotiated() else { return };
        let own = member.own.get(&connection).copied().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        // A peer that has restarted too, or that does not mark the end, is not waited for.
        let is_waited_for = negotiated.graceful_restart.as_ref().is_some_and(|restart| !restart.restarted);
        member.complete = if is_waited_for { Families::default() } else { negotiated.context.families };
        self.rib.up(id, negotiated.context, negotiated.identifier, own);
        self.end_deferral(now);
    }

    /// Ends the wait after the own restart, if all peers have sent their routes or time is over.
    fn end_deferral(&mut self, now: Time) {
        let Some(deferral) = self.deferral else { return };
        let is_complete = |member: &Member| {
            let agreed = member.session.negotiated().map(|(negotiated, _)| negotiated.context.families);
            agreed.is_some_and(|families| {
                families.iter().all(|family: Family| member.complete.contains(family))
            })
        };
        // What is not known yet would be missing from the routes that replace those from before.
        let all =
            !self.members.is_empty() && !self.rib.awaits_costs() && self.members.values().all(is_complete);
        if all || deferral.until <= now {
            self.deferral = None;
            self.members.values_mut().for_each(|member| member.session.set_restarted(false));
        }
    }
}
