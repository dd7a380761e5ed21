//! The choice among the routes to one prefix (RFC 4271 9.1.2.2, RFC 4456 9).

use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr};

use crate::codec::Attributes;

/// LOCAL_PREF of routes without one.
pub(crate) const DEFAULT_PREFERENCE: u32 = 100;

/// A route that may be chosen.
#[derive(Debug, Clone, Copy)]
pub struct Contender<'a> {
    /// Its attributes, after the policy.
    pub attributes: &'a Attributes,
    /// Who sent it; `None` if it is the own one.
    pub peer: Option<Neighbour>,
    /// The cost of the way to its next hop.
    pub cost: u32,
}

/// The peer of a route, as far as the choice depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// Whether it is in the same autonomous system.
    pub internal: bool,
    /// Its BGP identifier.
    pub identifier: Ipv4Addr,
    /// Its address.
    pub address: IpAddr,
}

impl Contender<'_> {
    fn preference(&self) -> u32 {
        self.attributes.local_pref.unwrap_or(DEFAULT_PREFERENCE)
    }

    fn is_internal(&self) -> bool {
        self.peer.is_some_and(|peer| peer.internal)
    }

    fn med(&self) -> u32 {
        self.attributes.med.unwrap_or(0)
    }

    /// Who brought the route into the autonomous system (RFC 4456 9).
    fn origin(&self) -> Option<Ipv4Addr> {
        self.attributes.originator_id.or(self.peer.map(|peer| peer.identifier))
    }
}

/// The positions of the chosen routes: first the best, then those that are as good for forwarding, in a fixed order.
/// Empty if there are no routes.
#[must_use]
pub fn decide(contenders: &[Contender<'_>]) -> Vec<usize> {
    let mut left: Vec<usize> = (0..contenders.len()).collect();
    let of = |index: &usize| &contenders[*index];
    keep_lowest(&mut left, |index| Reverse(of(index).preference()));
    // The own route: as BIRD prefers its static and kernel routes.
    keep_lowest(&mut left, |index| of(index).peer.is_some());
    keep_lowest(&mut left, |index| of(index).attributes.as_path.length());
    keep_lowest(&mut left, |index| of(index).attributes.origin);
    // MULTI_EXIT_DISC counts between routes of one neighbouring autonomous system.
    let all = left.clone();
    left.retain(|index| {
        let mine = of(index);
        let rival = |other: &usize| {
            let other = of(other);
            other.attributes.as_path.neighbour() == mine.attributes.as_path.neighbour()
                && other.med() < mine.med()
        };
        !all.iter().any(rival)
    });
    keep_lowest(&mut left, |index| of(index).is_internal());
    keep_lowest(&mut left, |index| of(index).cost);
    left.sort_by_key(|index| {
        let contender = of(index);
        (contender.origin(), contender.attributes.cluster_list.len(), contender.peer.map(|peer| peer.address))
    });
    left
}

fn keep_lowest<K: Ord>(left: &mut Vec<usize>, key: impl Fn(&usize) -> K) {
    if let Some(lowest) = left.iter().map(&key).min() {
        left.retain(|index| key(index) == lowest);
    }
}
