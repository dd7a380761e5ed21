//! What is known about the ways to next hops.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use crate::codec::Attributes;

/// The ways to next hops.
#[derive(Debug, Default)]
pub(super) struct NextHops {
    /// The costs of the ways; `None` if there is no way.
    costs: HashMap<IpAddr, Option<u32>>,
    /// Whether a way must be known before it is used. Otherwise, unknown next hops cost nothing.
    must_be_known: bool,
    /// The next hops whose costs are not known yet.
    unknown: BTreeSet<IpAddr>,
    /// The unknown next hops whose costs the speaker has not requested yet.
    unasked: Vec<IpAddr>,
}

impl NextHops {
    /// From now on, next hops are used when their costs are known.
    pub(super) fn require(&mut self) {
        self.must_be_known = true;
    }

    /// A route may be used if there is a way to its next hop.
    pub(super) fn note(&mut self, accepted: Option<&Attributes>) {
        let Some(next_hop) = accepted.map(|attributes| attributes.next_hop.address) else { return };
        if self.must_be_known && !self.costs.contains_key(&next_hop) && self.unknown.insert(next_hop) {
            self.unasked.push(next_hop);
        }
    }

    /// The next hops whose costs are needed, each once.
    pub(super) fn take_unasked(&mut self) -> Vec<IpAddr> {
        std::mem::take(&mut self.unasked)
    }

    /// Whether some costs are not known yet.
    pub(super) fn are_awaited(&self) -> bool {
        !self.unknown.is_empty()
    }

    /// The cost of the way; `None` if the next hop must not be used.
    pub(super) fn cost(&self, next_hop: IpAddr) -> Option<u32> {
        self.costs.get(&next_hop).copied().unwrap_or((!self.must_be_known).then_some(0))
    }

    /// Sets the cost of the way, and says whether it is another one.
    pub(super) fn set(&mut self, next_hop: IpAddr, cost: Option<u32>) -> bool {
        let before = self.cost(next_hop);
        self.costs.insert(next_hop, cost);
        self.unknown.remove(&next_hop);
        before != cost
    }

    /// Whether nothing would be forgotten.
    pub(super) fn is_empty(&self) -> bool {
        self.costs.is_empty() && self.unknown.is_empty()
    }

    /// Forgets all but these, and returns those whose costs were known.
    pub(super) fn retain(&mut self, used: &BTreeSet<IpAddr>) -> Vec<IpAddr> {
        let unused = self.costs.keys().filter(|next_hop| !used.contains(next_hop)).copied().collect();
        self.costs.retain(|next_hop, _| used.contains(next_hop));
        self.unknown.retain(|next_hop| used.contains(next_hop));
        self.unasked.retain(|next_hop| used.contains(next_hop));
        unused
    }
}
