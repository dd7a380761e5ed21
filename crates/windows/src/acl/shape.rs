//! What makes a rule as many ACLs as it is.

use std::collections::BTreeSet;
use std::net::IpAddr;

use tortie_api::net::Direction;
use tortie_dataplane::Endpoint;
use tortie_policy::program::{Lookup, Rule};

use super::numbers::Addresses;
use super::region::{View, matched};
use super::spell::CHUNK;
use super::v4;

/// A rule by itself, at one endpoint, without sets: products of addresses, ports and protocols that together are what it
/// matches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// How many products: one, or one for each port that has addresses of its own, and for what is left around what is
    /// excluded.
    pub products: usize,
    /// The most protocols that one of them names; 1 where it is about any.
    pub protocols: usize,
    /// The most lists of addresses that one of them takes.
    pub lists: usize,
    /// The addresses and networks of all of them.
    pub addresses: usize,
}

/// The shape of the rule.
pub fn shape(rule: &Rule, direction: Direction, endpoint: &Endpoint, lookup: &impl Lookup) -> Shape {
    let own: BTreeSet<_> = endpoint.addresses.iter().filter_map(|address: &IpAddr| v4(address)).collect();
    let own = Addresses::of_nets(own.into_iter().map(Into::into));
    let matched = matched(rule, direction, &View { own: &own, by_name: false, lookup });
    let mut shape = Shape::default();
    for region in matched.exact.iter().chain(&matched.vague) {
        let protocols = region.protocols.iter().count();
        let peers = region.remote.addresses.literal();
        let addresses = if peers.is_all() { 0 } else { peers.to_nets().len() };
        shape.products += 1;
        shape.protocols = shape.protocols.max(if protocols > 128 { 1 } else { protocols });
        shape.lists = shape.lists.max(addresses.div_ceil(CHUNK).max(1));
        shape.addresses += addresses;
    }
    shape
}
