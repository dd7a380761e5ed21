//! Why a route was chosen, and why others were not.

use std::collections::HashMap;
use std::sync::Arc;

use ipnet::IpNet;

use super::export::NotAdvertised;
use super::import::{NotUsable, not_usable, received};
use super::{
    Contenders, Destination, ExportCache, PeerId, Received, Rib, Source, Step, Target, decide_noting,
};
use crate::codec::{Attributes, Family};
use crate::filter::Verdict;

/// All that is known about a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// The own route and those that peers sent; the best one first, then those that are as good for forwarding, then the others.
    pub candidates: Vec<CandidateRoute>,
    /// What each peer is told about the best route, or why not; empty if there is no route.
    pub told: Vec<(PeerId, Result<Arc<Attributes>, NotAdvertised>)>,
}

/// A route that might have been chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CandidateRoute {
    /// Who sent it.
    pub source: Source,
    /// Its attributes: after the policy if it was accepted, otherwise as they were sent.
    pub attributes: Arc<Attributes>,
    /// Whether it is from before the peer's restart.
    pub stale: bool,
    /// What became of it.
    pub outcome: RouteOutcome,
}

/// What became of a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteOutcome {
    /// It is the best, and peers are told about it. The step decided against the last rival; none if there was none.
    Best(Option<Step>),
    /// It is as good for forwarding. The step made another one the best.
    AsGood(Step),
    /// The step decided against it.
    Worse(Step),
    /// The policy for its sender rejects it: the rule, or none if no rule accepts it.
    Rejected(Option<Arc<str>>),
    /// It can never be used.
    NotUsable(NotUsable),
    /// The node has no route to its next hop.
    NextHopUnreachable,
}

impl Rib {
    /// What is known about a prefix; `None` if there is no route to it.
    #[must_use]
    pub fn why(&self, prefix: &IpNet) -> Option<Why> {
        let destination = self.table.get(prefix)?;
        let Contenders { sources, contenders } = Contenders::of(destination, &self.peers, &self.next_hops);
        let mut lost: HashMap<usize, Step> = HashMap::new();
        let chosen = decide_noting(&contenders, |index, step| {
            lost.insert(index, step);
        });
        let route = |index: usize, outcome| {
            let (source, attributes) = sources[index];
            let is_stale = |received: &Received| {
                Source::Peer(received.peer) == source && self.is_stale(prefix, received)
            };
            let stale = destination.received.iter().any(is_stale);
            CandidateRoute { source, attributes: Arc::clone(attributes), stale, outcome }
        };
        let mut candidates: Vec<CandidateRoute> = Vec::new();
        if let Some((best, equal)) = chosen.split_first() {
            candidates.push(route(*best, RouteOutcome::Best(lost.values().copied().max())));
            let step = |index: &usize| lost.get(index).copied().unwrap_or(Step::Address);
            candidates.extend(equal.iter().map(|index| route(*index, RouteOutcome::AsGood(step(index)))));
            let worse = (0..contenders.len()).filter(|index| !chosen.contains(index));
            let mut worse: Vec<usize> = worse.collect();
            worse.sort_by_key(|index| std::cmp::Reverse(lost.get(index).copied()));
            candidates.extend(worse.iter().map(|index| route(*index, RouteOutcome::Worse(step(index)))));
        }
        let known: Vec<Source> = candidates.iter().map(|candidate| candidate.source).collect();
        let others = destination.received.iter();
        let others = others.filter(|received| !known.contains(&Source::Peer(received.peer)));
        candidates.extend(others.filter_map(|received| self.refused(prefix, received)));
        Some(Why { candidates, told: self.told_to_all(prefix, destination) })
    }

    /// The longest prefix with a route that contains this one.
    #[must_use]
    pub fn longest(&self, of: &IpNet) -> Option<IpNet> {
        let shorter = (0..=of.prefix_len()).rev();
        let prefixes = shorter.filter_map(|length| Some(IpNet::new(of.addr(), length).ok()?.trunc()));
        prefixes.into_iter().find(|prefix| self.table.contains_key(prefix))
    }

    /// A route that is no contender.
    fn refused(&self, prefix: &IpNet, route: &Received) -> Option<CandidateRoute> {
        let peer = self.peers.get(&route.peer)?;
        let attributes = route.accepted.as_ref().unwrap_or(&route.attributes);
        let usable = not_usable(self.identifier, &peer.rules, peer.own_addresses(), &route.attributes);
        let outcome = match (usable, &route.accepted) {
            (Some(reason), _) => RouteOutcome::NotUsable(reason),
            (None, Some(_)) => RouteOutcome::NextHopUnreachable,
            (None, None) => {
                let judged = peer.rules.import.judge_by(&received(prefix, &peer.rules, &route.attributes));
                let (Verdict::Rejected, rule) = judged else { return None };
                RouteOutcome::Rejected(rule.map(|rule| Arc::clone(&rule.about)))
            }
        };
        let source = Source::Peer(route.peer);
        let stale = self.is_stale(prefix, route);
        Some(CandidateRoute { source, attributes: Arc::clone(attributes), stale, outcome })
    }

    fn is_stale(&self, prefix: &IpNet, route: &Received) -> bool {
        self.peers.get(&route.peer).is_some_and(|peer| peer.is_stale(prefix, route))
    }

    fn told_to_all(
        &self,
        prefix: &IpNet,
        destination: &Destination,
    ) -> Vec<(PeerId, Result<Arc<Attributes>, NotAdvertised>)> {
        let told = self.peers.iter().filter_map(|(id, peer)| {
            let Some(session) = &peer.session else { return Some((*id, Err(NotAdvertised::NoSession))) };
            if !session.context.families.contains(Family::of(prefix)) {
                return Some((*id, Err(NotAdvertised::OtherFamily)));
            }
            let target =
                Target { id: *id, rules: &peer.rules, own: peer.own_addresses(), context: &session.context };
            Some((*id, self.told(prefix, destination, &target, &mut ExportCache::new())?))
        });
        if destination.chosen.is_empty() { Vec::new() } else { told.collect() }
    }
}
