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

/// A step of the choice, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The highest LOCAL_PREF.
    LocalPreference,
    /// The own route, as BIRD prefers its static and kernel routes.
    OwnRoute,
    /// The shortest AS_PATH.
    PathLength,
    /// The lowest ORIGIN.
    Origin,
    /// The lowest MULTI_EXIT_DISC among routes of one neighbouring autonomous system.
    ExitDiscriminator,
    /// A route of an external peer.
    External,
    /// The cheapest way to the next hop.
    Cost,
    /// The lowest identifier of who brought the route into the autonomous system. This step and those after it choose the
    /// route that peers are told; for forwarding, what is left is equal.
    Identifier,
    /// The shortest CLUSTER_LIST.
    ClusterList,
    /// The lowest address of the peer.
    Address,
}

/// The positions of the chosen routes: first the best, then those that are as good for forwarding, in a fixed order.
/// Empty if there are no routes.
#[must_use]
pub fn decide(contenders: &[Contender<'_>]) -> Vec<usize> {
    decide_noting(contenders, |_, _| {})
}

/// As [`decide`]; `lost` is told the position of each route that is not the best, and the step that decided against it.
pub fn decide_noting(contenders: &[Contender<'_>], mut lost: impl FnMut(usize, Step)) -> Vec<usize> {
    let mut left: Vec<usize> = (0..contenders.len()).collect();
    let of = |index: &usize| &contenders[*index];
    keep_lowest(
        &mut left,
        |index| Reverse(of(index).preference()),
        |index| lost(index, Step::LocalPreference),
    );
    keep_lowest(&mut left, |index| of(index).peer.is_some(), |index| lost(index, Step::OwnRoute));
    keep_lowest(
        &mut left,
        |index| of(index).attributes.as_path.length(),
        |index| lost(index, Step::PathLength),
    );
    keep_lowest(&mut left, |index| of(index).attributes.origin, |index| lost(index, Step::Origin));
    let all = left.clone();
    left.retain(|index| {
        let mine = of(index);
        let rival = |other: &usize| {
            let other = of(other);
            other.attributes.as_path.neighbour() == mine.attributes.as_path.neighbour()
                && other.med() < mine.med()
        };
        let stays = !all.iter().any(rival);
        if !stays {
            lost(*index, Step::ExitDiscriminator);
        }
        stays
    });
    keep_lowest(&mut left, |index| of(index).is_internal(), |index| lost(index, Step::External));
    keep_lowest(&mut left, |index| of(index).cost, |index| lost(index, Step::Cost));
    let identifier = |index: &usize| of(index).origin();
    let clusters = |index: &usize| of(index).attributes.cluster_list.len();
    left.sort_by_key(|index| (identifier(index), clusters(index), of(index).peer.map(|peer| peer.address)));
    if let Some((best, others)) = left.split_first() {
        for other in others {
            let step = match () {
                () if identifier(other) != identifier(best) => Step::Identifier,
                () if clusters(other) != clusters(best) => Step::ClusterList,
                () => Step::Address,
            };
            lost(*other, step);
        }
    }
    left
}

fn keep_lowest<K: Ord>(left: &mut Vec<usize>, key: impl Fn(&usize) -> K, mut lost: impl FnMut(usize)) {
    if let Some(lowest) = left.iter().map(&key).min() {
        left.retain(|index| {
            let stays = key(index) == lowest;
            if !stays {
                lost(*index);
            }
            stays
        });
    }
}
