//! Speakers and the connections between them in virtual time: messages are late, connections break or lose everything.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use tortie_bgp::codec::{Attributes, length};
use tortie_bgp::fsm::{ConnectionId, SessionSettings, State, Time};
use tortie_bgp::rib::{OwnRoute, PeerId, PeerRules, Source};
use tortie_bgp::router::{Effect, Router};

/// A source of numbers (xorshift).
#[derive(Debug, Clone)]
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// A speaker as it is configured.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) as_number: u32,
    pub(crate) identifier: Ipv4Addr,
    /// The cluster that it reflects for.
    pub(crate) cluster: Option<Ipv4Addr>,
    /// Its peers, and whether they are its clients.
    pub(crate) peers: BTreeMap<usize, bool>,
    pub(crate) own: BTreeSet<IpNet>,
    pub(crate) hold_time: u16,
    pub(crate) graceful: bool,
    /// The peers that it waits for.
    pub(crate) passive: BTreeSet<usize>,
}

pub(crate) fn address(node: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8 + 1))
}

#[derive(Debug)]
enum Event {
    Connect { from: usize, to: usize },
    Bytes { end: ConnectionId, bytes: Vec<u8> },
    Closed { end: ConnectionId },
}

/// One end of a connection.
#[derive(Debug)]
struct End {
    node: usize,
    peer: usize,
    is_open: bool,
    /// Nothing arrives any more, in either direction, and nobody notices.
    is_dead: bool,
    /// When the latest message arrives; later ones arrive later.
    latest: Time,
}

pub(crate) struct Network {
    pub(crate) now: Time,
    pub(crate) plans: Vec<Plan>,
    pub(crate) routers: Vec<Router>,
    events: BTreeMap<(Time, u64), Event>,
    ends: BTreeMap<ConnectionId, End>,
    /// Pairs that cannot reach each other.
    blocked: BTreeSet<(usize, usize)>,
    numbers: Numbers,
    count: u64,
    /// Routes of each speaker, as its changes say.
    pub(crate) forwarding: Vec<BTreeMap<IpNet, (Source, Vec<u32>)>>,
    /// The speakers that have restarted, and wait for their peers' routes.
    deferring: BTreeSet<usize>,
    pub(crate) restarts: usize,
    pub(crate) updates: usize,
}

impl Network {
    pub(crate) fn new(plans: Vec<Plan>, numbers: Numbers) -> Self {
        let mut network = Self {
            now: Duration::from_secs(1),
            routers: Vec::new(),
            events: BTreeMap::new(),
            ends: BTreeMap::new(),
            blocked: BTreeSet::new(),
            numbers,
            count: 0,
            forwarding: vec![BTreeMap::new(); plans.len()],
            plans,
            deferring: BTreeSet::new(),
            restarts: 0,
            updates: 0,
        };
        for node in 0..network.plans.len() {
            let router =
                Router::new(network.plans[node].identifier, network.numbers.next(), network.now, None);
            network.routers.push(router);
            network.configure(node);
        }
        network
    }

    /// Gives a speaker its peers and routes.
    fn configure(&mut self, node: usize) {
        let plan = self.plans[node].clone();
        for prefix in &plan.own {
            self.routers[node].set_own(*prefix, Some(OwnRoute::here()));
        }
        for peer in plan.peers.keys() {
            self.set_peer(node, *peer);
        }
        self.drain(node);
    }

    pub(crate) fn set_peer(&mut self, node: usize, peer: usize) {
        let (plan, theirs) = (&self.plans[node], &self.plans[peer]);
        let mut settings = SessionSettings::new(plan.as_number, plan.identifier, theirs.as_number);
        settings.hold_time = plan.hold_time;
        settings.passive = plan.passive.contains(&peer);
        settings.restart_time = plan.graceful.then_some(60);
        let mut rules = PeerRules::new(address(peer), plan.as_number, theirs.as_number);
        rules.own_addresses.ipv6 = Some(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, node as u16 + 1));
        rules.client = plan.peers[&peer];
        rules.cluster_id = plan.cluster.unwrap_or(Ipv4Addr::UNSPECIFIED);
        let effects = self.routers[node].set_peer(self.now, PeerId(peer as u32), settings, rules);
        self.carry_out(node, effects);
    }

    pub(crate) fn set_own(&mut self, node: usize, prefix: IpNet, present: bool) {
        if present {
            self.plans[node].own.insert(prefix);
        } else {
            self.plans[node].own.remove(&prefix);
        }
        self.routers[node].set_own(prefix, present.then(OwnRoute::here));
        self.drain(node);
    }

    /// Ends a speaker without a word, and starts it again. Its peers notice by their connections.
    pub(crate) fn kill(&mut self, node: usize) {
        self.restarts += 1;
        let ends: Vec<ConnectionId> =
            self.ends.iter().filter(|(_, end)| end.node == node && end.is_open).map(|(id, _)| *id).collect();
        for end in ends {
            self.close(end);
        }
        let restarted = self.plans[node].graceful.then_some(Duration::from_secs(90));
        let (identifier, seed) = (self.plans[node].identifier, self.numbers.next());
        self.routers[node] = Router::new(identifier, seed, self.now, restarted);
        if restarted.is_some() {
            self.deferring.insert(node);
        } else {
            self.forwarding[node].clear();
        }
        self.configure(node);
    }

    /// Breaks all connections between two speakers. One end may hear of it later than the other.
    pub(crate) fn cut(&mut self, a: usize, b: usize) {
        let between = |end: &End| (end.node, end.peer) == (a, b) || (end.node, end.peer) == (b, a);
        let ends: Vec<ConnectionId> =
            self.ends.iter().filter(|(_, end)| end.is_open && between(end)).map(|(id, _)| *id).collect();
        for end in ends {
            self.ends.get_mut(&end).unwrap().is_dead = true;
            let delay = self.delay();
            self.schedule(delay, Event::Closed { end });
        }
    }

    /// Loses everything between two speakers from now on, or no longer. A connection that lost something is dead until
    /// its ends notice by their timers.
    pub(crate) fn block(&mut self, a: usize, b: usize, blocked: bool) {
        let pair = (a.min(b), a.max(b));
        if blocked {
            self.blocked.insert(pair);
        } else {
            self.blocked.remove(&pair);
        }
    }

    pub(crate) fn heal(&mut self) {
        self.blocked.clear();
    }

    fn is_blocked(&self, a: usize, b: usize) -> bool {
        self.blocked.contains(&(a.min(b), a.max(b)))
    }

    fn delay(&mut self) -> Duration {
        Duration::from_millis(1 + self.numbers.below(60) as u64)
    }

    fn schedule(&mut self, delay: Duration, event: Event) {
        self.count += 1;
        self.events.insert((self.now + delay, self.count), event);
    }

    /// The other end of a connection: ends have neighbouring numbers.
    fn other(end: ConnectionId) -> ConnectionId {
        ConnectionId(end.0 ^ 1)
    }

    fn carry_out(&mut self, node: usize, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Connect(peer) => {
                    let delay = self.delay();
                    self.schedule(delay, Event::Connect { from: node, to: peer.0 as usize });
                }
                Effect::Send(end, bytes) => self.send(end, bytes),
                Effect::Probe(end) => self.probe(end),
                Effect::Close(end) => self.close(end),
            }
        }
    }

    fn send(&mut self, end: ConnectionId, bytes: Vec<u8>) {
        assert_eq!(length(&bytes), Ok(Some(bytes.len())), "one whole message at a time");
        let Some((node, peer)) = self.ends.get(&end).map(|end| (end.node, end.peer)) else { return };
        if self.is_blocked(node, peer) {
            for end in [end, Self::other(end)] {
                self.ends.get_mut(&end).unwrap().is_dead = true;
            }
            return;
        }
        let delay = self.delay();
        let sender = self.ends.get_mut(&end).unwrap();
        let at = (self.now + delay).max(sender.latest);
        sender.latest = at;
        self.updates += usize::from(bytes[18] == 2);
        self.schedule(at - self.now, Event::Bytes { end: Self::other(end), bytes });
    }

    /// The system ends a connection whose other end acknowledges nothing, or does not know it.
    fn probe(&mut self, end: ConnectionId) {
        let is_lost = |end: &End| end.is_dead || self.is_blocked(end.node, end.peer);
        let is_known = self.ends.get(&Self::other(end)).is_some_and(|other| other.is_open);
        if self.ends.get(&end).is_some_and(is_lost) || !is_known {
            self.schedule(Duration::from_secs(3), Event::Closed { end });
        }
    }

    /// One end closes; the other hears of it after everything that was sent.
    fn close(&mut self, end: ConnectionId) {
        let delay = self.delay();
        let Some(own) = self.ends.get_mut(&end).filter(|end| end.is_open) else { return };
        own.is_open = false;
        let at = (self.now + delay).max(own.latest);
        let (node, peer, is_dead) = (own.node, own.peer, own.is_dead);
        if !is_dead && !self.is_blocked(node, peer) {
            self.schedule(at - self.now, Event::Closed { end: Self::other(end) });
        }
    }

    fn connect(&mut self, from: usize, to: usize) {
        let id = PeerId(to as u32);
        if self.is_blocked(from, to) || self.numbers.chance(5) {
            let effects = self.routers[from].connect_failed(self.now, id);
            return self.carry_out(from, effects);
        }
        self.count += 1;
        let (near, far) = (ConnectionId(self.count * 2), ConnectionId(self.count * 2 + 1));
        for (id, node, peer) in [(near, from, to), (far, to, from)] {
            self.ends.insert(id, End { node, peer, is_open: true, is_dead: false, latest: self.now });
        }
        let effects = self.routers[from].connected(self.now, id, near, address(from));
        self.carry_out(from, effects);
        let effects = self.routers[to].accepted(self.now, PeerId(from as u32), far, address(to));
        self.carry_out(to, effects);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Connect { from, to } => self.connect(from, to),
            Event::Bytes { end, bytes } => {
                let Some(receiver) = self.ends.get(&end).filter(|end| end.is_open && !end.is_dead) else {
                    return;
                };
                let (node, peer) = (receiver.node, PeerId(receiver.peer as u32));
                let effects = self.routers[node].received(self.now, peer, end, Ok(&bytes));
                self.carry_out(node, effects);
                self.drain(node);
            }
            Event::Closed { end } => {
                let Some(receiver) = self.ends.get_mut(&end).filter(|end| end.is_open) else { return };
                receiver.is_open = false;
                let (node, peer) = (receiver.node, PeerId(receiver.peer as u32));
                let effects = self.routers[node].closed(self.now, peer, end);
                self.carry_out(node, effects);
                self.drain(node);
            }
        }
    }

    /// Carries out the changes of a speaker's routes, and sends what its peers do not know.
    fn drain(&mut self, node: usize) {
        let changes = self.routers[node].take_changes();
        if self.deferring.contains(&node) && !self.routers[node].is_deferring() {
            // After a restart, what the tables do not have is removed from the kernel.
            self.deferring.remove(&node);
            let known: BTreeSet<IpNet> =
                self.routers[node].rib().routes().map(|(prefix, _)| *prefix).collect();
            self.forwarding[node].retain(|prefix, _| known.contains(prefix));
        }
        for change in changes {
            match change.routes.first() {
                Some(best) => {
                    let path = best.attributes.as_path.numbers().collect();
                    self.forwarding[node].insert(change.prefix, (best.source, path));
                }
                None => drop(self.forwarding[node].remove(&change.prefix)),
            }
        }
        let peers: Vec<PeerId> = self.routers[node].peers().collect();
        for peer in peers {
            while let Some((connection, messages)) = self.routers[node].messages(peer) {
                messages.into_iter().for_each(|message| self.send(connection, message));
            }
        }
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let event = self.events.first_key_value().map(|((at, _), _)| *at);
            let timers = self.routers.iter().filter_map(Router::deadline).min();
            let Some(next) = event.into_iter().chain(timers).min().filter(|next| *next <= end) else { break };
            self.now = self.now.max(next);
            if event == Some(next) {
                let (_, event) = self.events.pop_first().unwrap();
                self.happen(event);
                continue;
            }
            for node in 0..self.routers.len() {
                if self.routers[node].deadline().is_some_and(|deadline| deadline <= self.now) {
                    let effects = self.routers[node].tick(self.now);
                    self.carry_out(node, effects);
                    self.drain(node);
                }
            }
        }
        self.now = end;
    }

    pub(crate) fn state(&self, node: usize, peer: usize) -> State {
        self.routers[node].session(PeerId(peer as u32)).unwrap().state()
    }

    /// The best routes of a speaker.
    pub(crate) fn best(&self, node: usize) -> BTreeMap<IpNet, (Option<usize>, Attributes)> {
        let routes = self.routers[node].rib().routes();
        let best = routes.map(|(prefix, chosen)| {
            let from = match chosen[0].source {
                Source::Own => None,
                Source::Peer(peer) => Some(peer.0 as usize),
            };
            (*prefix, (from, Attributes::clone(&chosen[0].attributes)))
        });
        best.collect()
    }
}
