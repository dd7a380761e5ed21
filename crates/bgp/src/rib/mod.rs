//! The routing tables: what peers sent (Adj-RIB-In), what was chosen (Loc-RIB), and what peers were told (Adj-RIB-Out).
//!
//! Changes are incremental: an input marks prefixes, [`Rib::recalculate`] decides about these alone, and
//! [`Rib::messages`] compares what a peer should know with what it was told.

mod adj_out;
mod decision;
mod export;
mod import;
mod next_hops;
mod why;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::IpNet;

pub use self::decision::{Contender, Neighbour, Step, decide, decide_noting};
pub use self::export::{NextHopMode, NotAdvertised, OwnAddresses, PeerRules};
pub use self::import::NotUsable;
pub use self::why::{CandidateRoute, RouteOutcome, Why};

use self::adj_out::AdjOut;
use self::export::{Provenance, exported, may_export, refusal};
use self::import::{Judge, import, is_unicast};
use self::next_hops::NextHops;
use crate::codec::{Attributes, Context, Families, Family, Update};
use crate::filter::{Candidate, Verdict};

/// A peer, by a number that the owner of the tables chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

/// An own route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnRoute {
    /// Its attributes. A next hop of only zeroes stands for the own address.
    pub attributes: Arc<Attributes>,
    /// The interface that it leads to, for filters.
    pub interface: Option<Arc<str>>,
}

impl OwnRoute {
    /// A route by way of this node.
    #[must_use]
    pub fn here() -> Self {
        let attributes = Attributes::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        Self { attributes: Arc::new(attributes), interface: None }
    }
}

/// Who sent a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// It is the own one.
    Own,
    /// A peer.
    Peer(PeerId),
}

/// A chosen route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Who sent it.
    pub source: Source,
    /// Its attributes, after the policy.
    pub attributes: Arc<Attributes>,
}

/// A change of the chosen routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteChange {
    /// The prefix.
    pub prefix: IpNet,
    /// The best route, and those that are as good for forwarding; none if there is no way any more.
    pub routes: Vec<Chosen>,
}

/// What peers are told for the attributes of a route that no policy changes.
type ExportCache = HashMap<(*const Attributes, Source, Family), Option<Arc<Attributes>>>;

/// A route that a peer sent.
#[derive(Debug)]
struct Received {
    peer: PeerId,
    /// As it was sent.
    attributes: Arc<Attributes>,
    /// As the policy lets it pass.
    accepted: Option<Arc<Attributes>>,
    /// The round in which it was sent; see [`Peer::round`].
    round: u32,
}

/// The routes to a prefix.
#[derive(Debug, Default)]
struct Destination {
    received: Vec<Received>,
    own: Option<OwnRoute>,
    chosen: Vec<Chosen>,
}

impl Destination {
    fn is_empty(&self) -> bool {
        self.received.is_empty() && self.own.is_none() && self.chosen.is_empty()
    }
}

#[derive(Debug)]
struct Peer {
    rules: PeerRules,
    /// How many routes it sent, in each family.
    received: [u32; 2],
    /// How many of them are stale.
    stale: [u32; 2],
    /// Routes of earlier rounds are stale: they are from before the peer's restart, or from before it began to send its routes
    /// again.
    round: [u32; 2],
    session: Option<PeerSession>,
    /// The identifier of the last session; stale routes keep it.
    identifier: Ipv4Addr,
    /// The own address of the last session.
    own_address: Option<IpAddr>,
}

impl Peer {
    /// The own addresses that the peer can use as next hops. In the family of the session, that is its local address: the peer may
    /// have no route to another one.
    fn own_addresses(&self) -> OwnAddresses {
        match self.own_address {
            Some(address) => self.rules.own_addresses.with(address),
            None => self.rules.own_addresses,
        }
    }
}

impl Peer {
    fn is_stale(&self, prefix: &IpNet, received: &Received) -> bool {
        received.round != self.round[position(Family::of(prefix))]
    }

    /// Counts a route that is gone or sent again.
    fn forget(&mut self, prefix: &IpNet, old: &Received) {
        let is_stale = self.is_stale(prefix, old);
        let family = position(Family::of(prefix));
        self.received[family] -= 1;
        self.stale[family] = self.stale[family].saturating_sub(u32::from(is_stale));
    }
}

#[derive(Debug)]
struct PeerSession {
    context: Context,
    out: AdjOut,
}

/// A peer, as a receiver of routes.
struct Target<'a> {
    id: PeerId,
    rules: &'a PeerRules,
    own: OwnAddresses,
    context: &'a Context,
}

/// The peer sent more prefixes than it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyPrefixes {
    /// The family.
    pub family: Family,
    /// How many it may send.
    pub limit: u32,
}

/// The routing tables.
#[derive(Debug)]
pub struct Rib {
    /// The own identifier.
    identifier: Ipv4Addr,
    table: BTreeMap<IpNet, Destination>,
    peers: BTreeMap<PeerId, Peer>,
    next_hops: NextHops,
    /// The prefixes to decide about.
    marked: BTreeSet<IpNet>,
}

fn position(family: Family) -> usize {
    usize::from(family == Family::Ipv6)
}

impl Rib {
    /// Empty tables of a speaker with this identifier.
    #[must_use]
    pub fn new(identifier: Ipv4Addr) -> Self {
        Self {
            identifier,
            table: BTreeMap::new(),
            peers: BTreeMap::new(),
            next_hops: NextHops::default(),
            marked: BTreeSet::new(),
        }
    }

    /// Adds a peer, or changes its rules. Routes that it sent are judged again, and it is told what it should know now.
    pub fn set_peer(&mut self, id: PeerId, rules: PeerRules) {
        match self.peers.get_mut(&id) {
            Some(peer) if peer.rules == rules => return,
            Some(peer) => peer.rules = rules,
            None => {
                let peer = Peer {
                    rules,
                    received: [0; 2],
                    stale: [0; 2],
                    round: [0; 2],
                    session: None,
                    identifier: Ipv4Addr::UNSPECIFIED,
                    own_address: None,
                };
                self.peers.insert(id, peer);
                return;
            }
        }
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let mut passed_on = Vec::new();
        for (prefix, destination) in &mut self.table {
            if let Some(received) = destination.received.iter_mut().find(|received| received.peer == id) {
                received.accepted = import(self.identifier, peer, prefix, &received.attributes);
                self.next_hops.note(received.accepted.as_deref());
                self.marked.insert(*prefix);
                passed_on.push(*prefix);
            }
            if !destination.chosen.is_empty()
                && let Some(session) = &mut peer.session
            {
                session.out.note(*prefix);
            }
        }
        self.note_everywhere(&passed_on);
    }

    /// What peers are told about these prefixes may change, also if the choice does not.
    fn note_everywhere(&mut self, prefixes: &[IpNet]) {
        for session in self.peers.values_mut().filter_map(|peer| peer.session.as_mut()) {
            prefixes.iter().for_each(|prefix| session.out.note(*prefix));
        }
    }

    /// Removes a peer with its routes.
    pub fn remove_peer(&mut self, id: PeerId) {
        self.remove_received(id, |_, _| true);
        self.peers.remove(&id);
    }

    /// A session with a peer begins; `own` is its local address.
    pub fn up(&mut self, id: PeerId, context: Context, identifier: Ipv4Addr, own: IpAddr) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let is_new = peer.identifier != identifier;
        peer.identifier = identifier;
        peer.own_address = Some(own);
        let rules = peer.rules.clone();
        let may_be_told = |destination: &Destination| {
            let best = destination.chosen.first();
            best.is_some_and(|best| concerns(&rules, best, provenance(&self.peers, best.source)))
        };
        let told = self.table.iter().filter(|(_, destination)| may_be_told(destination));
        let out = AdjOut::new(context.families, told.map(|(prefix, _)| *prefix));
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.session = Some(PeerSession { context, out });
        if is_new {
            // The choice depends on the identifier, and so does what others are told.
            let theirs = |destination: &Destination| destination.received.iter().any(|r| r.peer == id);
            let theirs = self.table.iter().filter(|(_, destination)| theirs(destination));
            let theirs: Vec<IpNet> = theirs.map(|(prefix, _)| *prefix).collect();
            self.note_everywhere(&theirs);
            self.marked.extend(theirs);
        }
    }

    /// The session with a peer has ended. Its routes of the families become stale, the others go.
    pub fn down(&mut self, id: PeerId, retained: Families) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.session = None;
        }
        // Routes that are stale for the second time are not kept any longer (RFC 4724 4.2).
        self.remove_received(id, |prefix, is_stale| is_stale || !retained.contains(Family::of(prefix)));
        retained.iter().for_each(|family| self.make_stale(id, family));
    }

    /// Makes all routes of a peer stale, before it sends them again.
    pub fn make_stale(&mut self, id: PeerId, family: Family) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let family = position(family);
        if peer.stale[family] < peer.received[family] {
            peer.round[family] = peer.round[family].wrapping_add(1);
            peer.stale[family] = peer.received[family];
        }
    }

    /// Removes stale routes of a peer. Without any, this costs nothing, however often the peer asks for it.
    pub fn forget_stale(&mut self, id: PeerId, families: Families) {
        let has_some = |peer: &Peer| families.iter().any(|family| peer.stale[position(family)] > 0);
        if self.peers.get(&id).is_some_and(has_some) {
            self.remove_received(id, |prefix, is_stale| is_stale && families.contains(Family::of(prefix)));
        }
    }

    /// Removes routes of a peer. `is_gone` gets the prefix, and whether the route is stale.
    fn remove_received(&mut self, id: PeerId, is_gone: impl Fn(&IpNet, bool) -> bool) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        for (prefix, destination) in &mut self.table {
            let index = destination.received.iter().position(|received| received.peer == id);
            if let Some(index) = index
                && is_gone(prefix, peer.is_stale(prefix, &destination.received[index]))
            {
                peer.forget(prefix, &destination.received.swap_remove(index));
                self.marked.insert(*prefix);
            }
        }
    }

    /// Takes the routes of a message.
    ///
    /// # Errors
    /// The peer sent too many; what exceeds the limit is not taken.
    pub fn update(&mut self, id: PeerId, update: Update) -> Result<(), TooManyPrefixes> {
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(()) };
        for prefix in update.withdrawn {
            let Some(destination) = self.table.get_mut(&prefix) else { continue };
            if let Some(index) = destination.received.iter().position(|received| received.peer == id) {
                peer.forget(&prefix, &destination.received.swap_remove(index));
                self.marked.insert(prefix);
            }
        }
        let own = peer.own_addresses();
        for announcement in update.announced {
            let attributes = Arc::new(announcement.attributes);
            let mut judge = Judge::new(self.identifier, &peer.rules, own, Arc::clone(&attributes));
            for prefix in announcement.prefixes.into_iter().filter(is_unicast) {
                let accepted = judge.accepted(&prefix);
                self.next_hops.note(accepted.as_deref());
                let destination = self.table.entry(prefix).or_default();
                self.marked.insert(prefix);
                let attributes = Arc::clone(&attributes);
                let family = Family::of(&prefix);
                let round = peer.round[position(family)];
                let new = Received { peer: id, attributes, accepted, round };
                match destination.received.iter_mut().find(|received| received.peer == id) {
                    Some(known) => {
                        let was_stale = known.round != round;
                        let stale = &mut peer.stale[position(family)];
                        *stale = stale.saturating_sub(u32::from(was_stale));
                        *known = new;
                    }
                    None => {
                        let count = &mut peer.received[position(family)];
                        if let Some(limit) = peer.rules.max_prefixes
                            && *count >= limit
                        {
                            return Err(TooManyPrefixes { family, limit });
                        }
                        *count += 1;
                        destination.received.push(new);
                    }
                }
            }
        }
        if let Some(family) = update.end_of_rib {
            self.forget_stale(id, Families::from_iter([family]));
        }
        Ok(())
    }

    /// Adds, changes or removes an own route.
    pub fn set_own(&mut self, prefix: IpNet, route: Option<OwnRoute>) {
        let known = self.table.get(&prefix).and_then(|destination| destination.own.as_ref());
        if known != route.as_ref() {
            self.table.entry(prefix).or_default().own = route;
            self.marked.insert(prefix);
        }
    }

    /// The prefixes of own routes.
    pub fn own(&self) -> impl Iterator<Item = &IpNet> {
        self.table.iter().filter(|(_, destination)| destination.own.is_some()).map(|(prefix, _)| prefix)
    }

    /// From now on, a route is used only when the cost of the way to its next hop is known (RFC 4271 9.1.2). Otherwise, unknown next
    /// hops cost nothing.
    pub fn require_known_next_hops(&mut self) {
        self.next_hops.require();
    }

    /// The next hops whose costs are needed, each once.
    pub fn take_unknown_next_hops(&mut self) -> Vec<IpAddr> {
        self.next_hops.take_unasked()
    }

    /// Whether costs are needed that have not been set yet.
    #[must_use]
    pub fn awaits_costs(&self) -> bool {
        self.next_hops.are_awaited()
    }

    /// Sets the costs of the ways to next hops; `None` if there is no way.
    pub fn set_costs(&mut self, costs: impl IntoIterator<Item = (IpAddr, Option<u32>)>) {
        let changed = costs.into_iter().filter(|(next_hop, cost)| self.next_hops.set(*next_hop, *cost));
        let changed: BTreeSet<IpAddr> = changed.map(|(next_hop, _)| next_hop).collect();
        if changed.is_empty() {
            return;
        }
        let leads_there = |received: &Received| changed.contains(&received.attributes.next_hop.address);
        let concerned = self.table.iter().filter(|(_, d)| d.received.iter().any(leads_there));
        self.marked.extend(concerned.map(|(prefix, _)| *prefix));
    }

    /// Forgets the costs of next hops that no received route has any more, and returns these next hops.
    pub fn forget_unused_costs(&mut self) -> Vec<IpAddr> {
        if self.next_hops.is_empty() {
            return Vec::new();
        }
        let received = self.table.values().flat_map(|destination| &destination.received);
        let used = received.map(|received| received.attributes.next_hop.address).collect();
        self.next_hops.retain(&used)
    }

    /// Decides about all marked prefixes, and returns those whose chosen routes changed.
    pub fn recalculate(&mut self) -> Vec<RouteChange> {
        let mut changes = Vec::new();
        for prefix in std::mem::take(&mut self.marked) {
            let Some(destination) = self.table.get_mut(&prefix) else { continue };
            let chosen = choose(destination, &self.peers, &self.next_hops);
            if chosen != destination.chosen {
                let old = std::mem::replace(&mut destination.chosen, chosen);
                changes.push(RouteChange { prefix, routes: destination.chosen.clone() });
                let (old, new) = (old.first(), destination.chosen.first());
                if old != new {
                    tell(&mut self.peers, prefix, [old, new]);
                }
            }
            if destination.is_empty() {
                self.table.remove(&prefix);
            }
        }
        changes
    }

    /// The peer wants to be told everything again, with or without marks of beginning and end.
    pub fn refresh(&mut self, id: PeerId, family: Family, marks: bool) {
        let session = self.peers.get_mut(&id).and_then(|peer| peer.session.as_mut());
        session.into_iter().for_each(|session| session.out.refresh(family, marks));
    }

    /// Whether there is nothing to tell the peer.
    #[must_use]
    pub fn is_idle(&self, id: PeerId) -> bool {
        let session = self.peers.get(&id).and_then(|peer| peer.session.as_ref());
        session.is_none_or(|session| session.out.is_idle())
    }

    /// The next messages for a peer; call again until it is idle.
    pub fn messages(&mut self, id: PeerId) -> Vec<Vec<u8>> {
        let Some(mut peer) = self.peers.remove(&id) else { return Vec::new() };
        let mut messages = Vec::new();
        let own = peer.own_addresses();
        if let Some(PeerSession { context, out }) = &mut peer.session {
            let mut cache = ExportCache::new();
            messages = out.messages(context, |prefix| {
                let destination = self.table.get(prefix)?;
                let to = Target { id, rules: &peer.rules, own, context };
                self.told(prefix, destination, &to, &mut cache)?.ok()
            });
        }
        self.peers.insert(id, peer);
        messages
    }

    /// What a peer should know about a prefix, or why it should know nothing. Routes with the same attributes that the policy
    /// leaves alone share the result.
    fn told(
        &self,
        prefix: &IpNet,
        destination: &Destination,
        to: &Target<'_>,
        cache: &mut ExportCache,
    ) -> Option<Result<Arc<Attributes>, NotAdvertised>> {
        let best = destination.chosen.first()?;
        let rules = to.rules;
        if best.source == Source::Peer(to.id) {
            return Some(Err(NotAdvertised::Sender));
        }
        let provenance = provenance(&self.peers, best.source)?;
        if let Some(refusal) = refusal(&best.attributes, provenance, rules) {
            return Some(Err(refusal));
        }
        let candidate = Candidate {
            prefix,
            attributes: &best.attributes,
            from_peer: best.source != Source::Own,
            interface: destination.own.as_ref().and_then(|own| own.interface.as_deref()),
            internal_peer: rules.is_internal(),
        };
        let family = Family::of(prefix);
        let export = |attributes: Attributes| {
            exported(family, attributes, provenance, (rules, to.own), to.context.extended_next_hop)
                .map(Arc::new)
        };
        let exported = match rules.export.judge_by(&candidate) {
            (Verdict::Rejected, rule) => {
                return Some(Err(NotAdvertised::Rejected(rule.map(|rule| Arc::clone(&rule.about)))));
            }
            (Verdict::Changed(attributes), _) => export(*attributes),
            // The table holds the attributes, so that their address stands for them as long as the cache lives.
            (Verdict::Unchanged, _) => cache
                .entry((Arc::as_ptr(&best.attributes), best.source, family))
                .or_insert_with(|| export(Attributes::clone(&best.attributes)))
                .clone(),
        };
        Some(exported.ok_or(NotAdvertised::NoNextHop))
    }

    /// All chosen routes.
    pub fn routes(&self) -> impl Iterator<Item = (&IpNet, &[Chosen])> {
        let chosen = self.table.iter().map(|(prefix, destination)| (prefix, destination.chosen.as_slice()));
        chosen.filter(|(_, chosen)| !chosen.is_empty())
    }

    /// How many routes a peer sent, and how many it was told.
    #[must_use]
    pub fn counts(&self, id: PeerId) -> (u32, usize) {
        let Some(peer) = self.peers.get(&id) else { return (0, 0) };
        (peer.received.iter().sum(), peer.session.as_ref().map_or(0, |session| session.out.len()))
    }

    /// The address of a peer.
    #[must_use]
    pub fn address(&self, id: PeerId) -> Option<IpAddr> {
        self.peers.get(&id).map(|peer| peer.rules.address)
    }

    /// The route that a peer was told.
    #[must_use]
    pub fn advertised(&self, id: PeerId, prefix: &IpNet) -> Option<&Arc<Attributes>> {
        self.peers.get(&id)?.session.as_ref()?.out.told(prefix)
    }
}

/// Marks a prefix for the peers that may have received the old best route, or may receive the new one. In a mesh,
/// most routes are for few peers.
fn tell(peers: &mut BTreeMap<PeerId, Peer>, prefix: IpNet, routes: [Option<&Chosen>; 2]) {
    let routes = routes.map(|route| route.map(|route| (route, provenance(peers, route.source))));
    for Peer { rules, session, .. } in peers.values_mut() {
        let Some(session) = session else { continue };
        if routes.into_iter().flatten().any(|(route, from)| concerns(rules, route, from)) {
            session.out.note(prefix);
        }
    }
}

/// Whether a peer with these rules may receive a route. If its sender is gone, the answer is yes, so the route is examined.
fn concerns(rules: &PeerRules, route: &Chosen, from: Option<Provenance>) -> bool {
    from.is_none_or(|from| may_export(&route.attributes, from, rules))
}

/// Where a route comes from.
fn provenance(peers: &BTreeMap<PeerId, Peer>, source: Source) -> Option<Provenance> {
    let Source::Peer(id) = source else { return Some(Provenance::Own) };
    let peer = peers.get(&id)?;
    let (internal, client) = (peer.rules.is_internal(), peer.rules.client);
    Some(Provenance::Peer { internal, client, identifier: peer.identifier })
}

/// The routes to a destination that may be chosen.
struct Contenders<'a> {
    sources: Vec<(Source, &'a Arc<Attributes>)>,
    contenders: Vec<Contender<'a>>,
}

impl<'a> Contenders<'a> {
    fn of(destination: &'a Destination, peers: &BTreeMap<PeerId, Peer>, next_hops: &NextHops) -> Self {
        let mut all = Self { sources: Vec::new(), contenders: Vec::new() };
        if let Some(own) = &destination.own {
            all.sources.push((Source::Own, &own.attributes));
            all.contenders.push(Contender { attributes: &own.attributes, peer: None, cost: 0 });
        }
        for received in &destination.received {
            let (Some(attributes), Some(peer)) = (&received.accepted, peers.get(&received.peer)) else {
                continue;
            };
            let Some(cost) = next_hops.cost(attributes.next_hop.address) else {
                continue;
            };
            let neighbour = Neighbour {
                internal: peer.rules.is_internal(),
                identifier: peer.identifier,
                address: peer.rules.address,
            };
            all.sources.push((Source::Peer(received.peer), attributes));
            all.contenders.push(Contender { attributes, peer: Some(neighbour), cost });
        }
        all
    }
}

/// The routes to use for a destination.
fn choose(destination: &Destination, peers: &BTreeMap<PeerId, Peer>, next_hops: &NextHops) -> Vec<Chosen> {
    let Contenders { sources, contenders } = Contenders::of(destination, peers, next_hops);
    let chosen = decide(&contenders).into_iter().map(|index| {
        let (source, attributes) = sources[index];
        Chosen { source, attributes: Arc::clone(attributes) }
    });
    chosen.collect()
}
